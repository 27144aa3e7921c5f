-- Deliveries that end in a user's transaction.

-- Deliveries of FIFO queues that a user's transaction has ended. What follows from their end needs the locks of groups,
-- which no user's transaction may hold: a statement of its own does it after the commit, or the sweeper after a crash.
CREATE TABLE hapax.q_settled (
  seq bigint NOT NULL PRIMARY KEY,
  queue_id int NOT NULL,
  grp text COLLATE "C" NOT NULL,
  id_hi bigint NOT NULL,
  id_lo bigint NOT NULL,
  source text                           -- a dead letter: the queue in which it died
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX q_settled_queue ON hapax.q_settled (queue_id);

-- Acks one delivery in the caller's transaction. It is that delivery or an error, which aborts the transaction.
CREATE FUNCTION hapax.q_settle(p_queue int, p_seq bigint, p_fence bigint) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE k record; BEGIN
  DELETE FROM hapax.q_claim c WHERE c.seq = p_seq AND c.fence = p_fence AND c.queue_id + 0 = p_queue
    RETURNING c.seq, c.grp, c.id_hi, c.id_lo, c.story INTO k;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the delivery is over: the message has passed to another consumer, or was settled' USING ERRCODE = 'HX002';
  END IF;
  DELETE FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = p_seq;
  IF k.grp IS NOT NULL AND EXISTS (SELECT 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.name LIKE '%.fifo') THEN
    INSERT INTO hapax.q_settled VALUES (k.seq, p_queue, k.grp, k.id_hi, coalesce(k.id_lo, (1::bigint << 63) | k.seq),
      k.story::jsonb #>> '{dead,source}');
  END IF;
END $$;
