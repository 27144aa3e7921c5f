-- As before. Only a delivery with a group asks whether its queue is a FIFO queue.
CREATE OR REPLACE FUNCTION hapax.q_settle(p_queue int, p_seq bigint, p_fence bigint) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE k record; BEGIN
  DELETE FROM hapax.q_claim c WHERE c.seq = p_seq AND c.fence = p_fence AND c.queue_id + 0 = p_queue
    RETURNING c.seq, c.grp, c.id_hi, c.id_lo, c.story INTO k;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the delivery is over: the message has passed to another consumer, or was settled' USING ERRCODE = 'HX002';
  END IF;
  DELETE FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = p_seq;
  IF k.grp IS NOT NULL THEN
    IF EXISTS (SELECT 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.name LIKE '%.fifo') THEN
      INSERT INTO hapax.q_settled VALUES (k.seq, p_queue, k.grp, k.id_hi, coalesce(k.id_lo, (1::bigint << 63) | k.seq),
        k.story::jsonb #>> '{dead,source}');
    END IF;
  END IF;
END $$;

-- Whether a group has parked messages.
CREATE INDEX q_parked_group ON hapax.q_parked (queue_id, grp) WHERE grp IS NOT NULL;
