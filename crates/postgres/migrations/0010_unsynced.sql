-- Receives that do not wait for the disk. A crash of the server may lose them after their deliveries were handed out, and the
-- sequence of fences with them. So they use only fences up to a floor that is durable before, and the first thing that a
-- session does after a crash or a failover is to raise the sequence above it.

-- The greatest value counts. Rows are only inserted and deleted.
CREATE TABLE hapax.fence_floor (value bigint PRIMARY KEY)
  WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Makes a floor durable that is this many microseconds ahead of the clock, and returns it.
CREATE FUNCTION hapax.raise_floor(p_ahead bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE v bigint := hapax.now_us() + p_ahead;
BEGIN
  INSERT INTO hapax.fence_floor VALUES (v) ON CONFLICT DO NOTHING;
  DELETE FROM hapax.fence_floor f WHERE f.value < v;
  RETURN v;
END $$;

-- Brings the fences up to the clock, and with the first call of a session above the floor: what was drawn before a crash is
-- not drawn again. The sequence is never more than a second ahead of the floor, and that a few seconds ahead of the clock. A
-- new value is a million or more ahead of the old one, so that concurrent calls of nextval cannot pass it.
CREATE OR REPLACE FUNCTION hapax.raise_fence() RETURNS void LANGUAGE plpgsql AS $$
DECLARE first boolean := current_setting('hapax.raised', true) IS DISTINCT FROM 'yes'; floor bigint; last bigint;
BEGIN
  IF first THEN
    SELECT f.value INTO floor FROM hapax.fence_floor f ORDER BY f.value DESC LIMIT 1;
  END IF;
  floor := coalesce(floor, 0);
  last := (SELECT s.last_value FROM hapax.fence s);
  IF last <= floor OR last + 1000000 < hapax.now_us() THEN
    PERFORM pg_advisory_xact_lock(hashtext('hapax.fence'));
    last := (SELECT s.last_value FROM hapax.fence s);
    IF last <= floor OR last + 1000000 < hapax.now_us() THEN
      PERFORM setval('hapax.fence', greatest(floor, hapax.now_us(), last + 1000000));
    END IF;
  END IF;
  IF first THEN
    PERFORM set_config('hapax.raised', 'yes', false);
  END IF;
END $$;

DROP FUNCTION hapax.q_take(int, bigint, smallint[], bigint[], bigint[], text[], bigint, text[], bigint);
-- Leases ready messages of a standard queue, one per slot, each with its own lease and consumer. `p_floors` says for each
-- priority below which place nothing is expected. A message past its retention is deleted instead. The first row has no
-- message: its slot is -1 if the queue has changed, else 0. If slots are left, a row says so: -2, time has something to do
-- first; -4 or, if a lease is blocked, -5: it has next at that time. A row with slot -3 counts what was deleted instead.
--
-- Rows are picked by one statement and moved by the next: where nothing is ready, the second is not begun, and what was
-- deleted instead is the difference of their counts. Columns are returned one by one: to take a composite value apart
-- again costs more than the rest.
--
-- `p_unsynced`: the caller does not wait for the disk if all fences are at most this one, which is durable (see
-- `raise_floor`); 0: it does.
CREATE FUNCTION hapax.q_take(p_queue int, p_version bigint, p_prios smallint[], p_floors bigint[], p_lease bigint[], p_consumer text[],
    p_retention bigint, p_noisy text[], p_from bigint, p_unsynced bigint DEFAULT 0)
 RETURNS TABLE (slot int, at_ms bigint, seq bigint, id_hi bigint, pos bigint, sent_ms bigint, retained_ms bigint, fence bigint, until_ms bigint,
   received_ms bigint, first_ms bigint, id_lo bigint, queue_id int, attempts int, deliveries int, bytes int, lease_ms int, prio smallint,
   key_source smallint, own boolean, grp text, dedup text, key text, consumer text, story text, attrs text, body bytea) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
#variable_conflict use_column
DECLARE t bigint := hapax.now_ms(); n int := cardinality(p_lease); used int := 0; got int; dropped int := 0; picked tid[]; p record;
  was text := current_setting('synchronous_commit'); BEGIN
  at_ms := t; slot := -1;
  PERFORM 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.version = p_version;
  IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
  slot := 0; RETURN NEXT;
  IF p_unsynced > 0 THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
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
        SELECT used + (row_number() OVER ())::int, t, c.seq, c.id_hi, c.pos, c.sent_ms, c.retained_ms,
          -- A fence that might be drawn again after a crash: the caller waits.
          CASE WHEN p_unsynced > 0 AND c.fence > p_unsynced AND set_config('synchronous_commit', was, true) IS NULL THEN 0 ELSE c.fence END,
          c.until_ms, c.received_ms, c.first_ms, c.id_lo, c.queue_id, c.attempts, c.deliveries, c.bytes, c.lease_ms, c.prio,
          c.key_source, c.own, c.grp, c.dedup, c.key, c.consumer, c.story, c.attrs, c.body FROM c;
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
