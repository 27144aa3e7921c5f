-- Deliveries are found by their numbers alone. `queue_id = p_queue` beside `seq = ANY (...)` lets the planner choose the index
-- that begins with the queue's number, and then each ack and each extension walks over every delivery of the queue, and over
-- every deleted one that could not be vacuumed yet. `queue_id + 0` cannot be looked up in an index; it is only compared.

CREATE OR REPLACE FUNCTION hapax.q_ack(p_queue int, p_seq bigint[], p_fence bigint[], OUT acked bigint[], OUT fences bigint[]) LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  WITH d AS (DELETE FROM hapax.q_claim k WHERE k.seq = ANY (p_seq) AND k.queue_id + 0 = p_queue
     AND k.fence = p_fence[array_position(p_seq, k.seq)] RETURNING k.seq, k.fence)
  SELECT coalesce(array_agg(d.seq), '{}'), coalesce(array_agg(d.fence), '{}') INTO acked, fences FROM d;
  IF EXISTS (SELECT 1 FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked)) THEN
    DELETE FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked);
  END IF;
END $$;

CREATE OR REPLACE FUNCTION hapax.q_extend(p_queue int, p_seq bigint[], p_fence bigint[], p_lease bigint[], p_own boolean[], p_longest bigint)
 RETURNS TABLE (seq bigint, fence bigint) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); BEGIN RETURN QUERY
  UPDATE hapax.q_claim k SET until_ms = t + p_lease[array_position(p_seq, k.seq)], lease_ms = p_lease[array_position(p_seq, k.seq)],
    own = k.own OR p_own[array_position(p_seq, k.seq)] OR NULL
  WHERE k.ctid = ANY (ARRAY(SELECT x.ctid FROM hapax.q_claim x WHERE x.seq = ANY (p_seq) AND x.queue_id + 0 = p_queue
      AND x.until_ms > t AND x.fence = p_fence[array_position(p_seq, x.seq)] ORDER BY x.seq FOR UPDATE SKIP LOCKED))
    AND p_lease[array_position(p_seq, k.seq)] > 0
    AND t + p_lease[array_position(p_seq, k.seq)] <= k.received_ms + p_longest
  RETURNING k.seq, k.fence; END $$;

CREATE OR REPLACE FUNCTION hapax.q_settle(p_queue int, p_seq bigint, p_fence bigint) RETURNS void LANGUAGE plpgsql
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
