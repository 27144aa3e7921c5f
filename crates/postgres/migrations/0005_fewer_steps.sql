-- The same receives and acks with less work of the server.

-- Leases ready messages of a standard queue, one per slot, each with its own lease and consumer. `p_floors` says for each
-- priority below which place nothing is expected. A message past its retention is deleted instead. The first row has no
-- message: its slot is -1 if the queue has changed, else 0. If slots are left, a row says so: -2, time has something to do
-- first; -4 or, if a lease is blocked, -5: it has next at that time. A row with slot -3 counts what was deleted instead.
--
-- Rows are picked by one statement and moved by the next: where nothing is ready, the second is not begun, and what was
-- deleted instead is the difference of their counts. Columns are returned one by one: to take a composite value apart
-- again costs more than the rest.
CREATE FUNCTION hapax.q_take(p_queue int, p_version bigint, p_prios smallint[], p_floors bigint[], p_lease bigint[], p_consumer text[],
    p_retention bigint, p_noisy text[], p_from bigint)
 RETURNS TABLE (slot int, at_ms bigint, seq bigint, id_hi bigint, pos bigint, sent_ms bigint, retained_ms bigint, fence bigint, until_ms bigint,
   received_ms bigint, first_ms bigint, id_lo bigint, queue_id int, attempts int, deliveries int, bytes int, lease_ms int, prio smallint,
   key_source smallint, own boolean, grp text, dedup text, key text, consumer text, story text, attrs text, body bytea) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
#variable_conflict use_column
DECLARE t bigint := hapax.now_ms(); n int := cardinality(p_lease); used int := 0; got int; dropped int := 0; picked tid[]; p record; BEGIN
  at_ms := t; slot := -1;
  PERFORM 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.version = p_version;
  IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
  slot := 0; RETURN NEXT;
  FOR look IN 1 .. 2 LOOP
    FOR i IN 1 .. cardinality(p_prios) LOOP
      FOR pass IN 1 .. CASE WHEN p_noisy IS NULL THEN 1 ELSE 2 END LOOP
        EXIT WHEN used >= n;
        picked := ARRAY(SELECT x.ctid FROM hapax.q_ready x WHERE x.queue_id = p_queue AND x.prio = p_prios[i] AND x.pos > p_floors[i]
          AND (p_noisy IS NULL OR pass = 2 OR x.grp IS NULL OR x.grp <> ALL (p_noisy))
          ORDER BY x.pos LIMIT n - used FOR UPDATE SKIP LOCKED);
        CONTINUE WHEN cardinality(picked) = 0;
        RETURN QUERY
        WITH got AS (DELETE FROM hapax.q_ready r WHERE r.ctid = ANY (picked) RETURNING r.*),
        c AS (INSERT INTO hapax.q_claim AS k (seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, received_ms, first_ms, id_lo, queue_id,
              attempts, deliveries, bytes, lease_ms, prio, key_source, grp, dedup, key, consumer, story, attrs, body)
          SELECT o.seq, o.id_hi, o.pos, o.sent_ms, o.retained_ms, greatest(o.fence + 1, nextval('hapax.fence')), t + p_lease[used + o.rn], t,
                 coalesce(o.first_ms, t), o.id_lo, o.queue_id, o.attempts + 1, o.deliveries + 1, o.bytes, p_lease[used + o.rn], o.prio,
                 o.key_source, o.grp, o.dedup, o.key, p_consumer[used + o.rn], o.story, o.attrs, o.body
          FROM (SELECT g.*, row_number() OVER (ORDER BY g.pos) AS rn FROM got g WHERE g.retained_ms + p_retention >= t) o RETURNING k.*)
        -- In the order of their insertion, which is the one of their places.
        SELECT used + (row_number() OVER ())::int, t, c.* FROM c;
        GET DIAGNOSTICS got = ROW_COUNT;
        used := used + got;
        dropped := dropped + cardinality(picked) - got;
      END LOOP;
    END LOOP;
    EXIT WHEN used >= n;
    p := hapax.q_probe(p_queue, p_from);
    IF p.due THEN slot := -2; at_ms := t; RETURN NEXT; EXIT; END IF;
    -- Another process may have returned messages after the first look and before the probe.
    IF used > 0 OR look = 2 THEN
      slot := CASE WHEN p.blocked THEN -5 ELSE -4 END; at_ms := p.next_ms; RETURN NEXT; EXIT;
    END IF;
  END LOOP;
  IF dropped > 0 THEN slot := -3; at_ms := dropped; RETURN NEXT; END IF;
END $$;

-- Deletes deliveries of a standard queue; gives those that were there, with their fences. If a message is named twice, its
-- first fence is judged.
CREATE OR REPLACE FUNCTION hapax.q_ack(p_queue int, p_seq bigint[], p_fence bigint[], OUT acked bigint[], OUT fences bigint[]) LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  WITH d AS (DELETE FROM hapax.q_claim k WHERE k.seq = ANY (p_seq) AND k.queue_id = p_queue
     AND k.fence = p_fence[array_position(p_seq, k.seq)] RETURNING k.seq, k.fence)
  SELECT coalesce(array_agg(d.seq), '{}'), coalesce(array_agg(d.fence), '{}') INTO acked, fences FROM d;
  IF EXISTS (SELECT 1 FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked)) THEN
    DELETE FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked);
  END IF;
END $$;
