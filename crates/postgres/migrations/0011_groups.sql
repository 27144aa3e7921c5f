-- Groups, while a transaction is open for long somewhere in the database. Rows that were deleted stay in the indexes then, so no look of a
-- receive or a settle may begin at the first entry of a queue or of a group:
--
-- * Heads are announced with a number that grows, so a receive begins behind those that it knows to be gone, as it does with messages of a
--   standard queue.
-- * The row of a group has a place (`low`) below which the group has no message that waits or is in flight, and no head. It is moved up now and
--   then, not each time: the rows of groups are locked all the time, and each update leaves a version of the row behind.
--
-- The first message of a group is looked for as the first of a range of rows, from (group, low) to the end of the group, so that only the
-- index by queue and group gives the order. With an equation for the group and a wrong estimate (somebody has analyzed an empty table),
-- PostgreSQL reads the messages of all queues, in the order of an index that has only their numbers.
--
-- Programs of the version before call functions of the same names with fewer arguments.

LOCK TABLE hapax.q_queue IN ACCESS EXCLUSIVE MODE;

-- The newest number. A number that is drawn later is greater, so this is the place of a group that has no messages.
CREATE FUNCTION hapax.q_last() RETURNS bigint LANGUAGE sql AS 'SELECT last_value FROM hapax.q_seq';

-- Whether to move the place of a group up now. Tests have it moved each time.
CREATE FUNCTION hapax.q_raises() RETURNS boolean LANGUAGE sql AS 'SELECT random() < 0.016';

ALTER TABLE hapax.q_group ADD COLUMN low bigint NOT NULL DEFAULT 0;
ALTER TABLE hapax.q_group ALTER COLUMN low SET DEFAULT hapax.q_last();
ALTER TABLE hapax.q_group SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0);
ALTER TABLE hapax.q_head DROP CONSTRAINT q_head_pkey, ADD PRIMARY KEY (queue_id, grp, turn);

-- Announces what can be delivered of FIFO groups. The caller holds their locks. `p_kept`: a group that had been announced keeps its place among
-- the groups (its first message has it), otherwise it goes behind those that are announced now. `p_all`: messages were put below `low`.
CREATE FUNCTION hapax.q_heads(p_queue int[], p_grp text[], p_kept boolean, p_all boolean) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE i int; f record; c bigint; t bigint := hapax.now_ms(); h hapax.q_head; l bigint; due bigint; turn_now bigint; up bigint; raises boolean; BEGIN
  FOR i IN 1 .. cardinality(p_queue) LOOP
    l := 0;
    IF NOT p_all THEN
      SELECT g.low INTO l FROM hapax.q_group g WHERE g.queue_id = p_queue[i] AND g.grp = p_grp[i];
      l := coalesce(l, 0);
    END IF;
    SELECT x.seq, x.pos, x.until_ms INTO f FROM hapax.q_fifo x WHERE x.queue_id = p_queue[i] AND (x.grp, x.seq) >= (p_grp[i], l)
      AND x.grp <= p_grp[i] ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
    SELECT x.seq INTO c FROM hapax.q_claim x WHERE x.queue_id = p_queue[i] AND (x.grp, x.seq) >= (p_grp[i], l)
      AND x.grp <= p_grp[i] AND x.grp IS NOT NULL ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
    SELECT * INTO h FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i] AND x.turn >= l
      ORDER BY x.queue_id, x.grp, x.turn LIMIT 1;
    turn_now := h.turn;
    due := CASE WHEN f.until_ms > t THEN f.until_ms END;
    IF f.seq IS NULL OR c < f.seq OR EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.queue_id = p_queue[i] AND u.grp = p_grp[i]) THEN
      turn_now := NULL;
    -- A first message that was put back since goes behind, and its group with it.
    ELSIF h.turn IS NULL OR h.turn < greatest(f.seq, f.pos) OR h.due_ms IS DISTINCT FROM due THEN
      turn_now := CASE WHEN p_kept THEN greatest(f.seq, f.pos) ELSE nextval('hapax.q_seq') END;
    END IF;
    IF turn_now IS DISTINCT FROM h.turn OR (turn_now IS NOT NULL AND h.due_ms IS DISTINCT FROM due) THEN
      IF h.turn IS NOT NULL THEN
        DELETE FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i] AND x.turn >= l;
      END IF;
      IF turn_now IS NOT NULL THEN
        INSERT INTO hapax.q_head (queue_id, grp, turn, due_ms) VALUES (p_queue[i], p_grp[i], turn_now, due);
      END IF;
    END IF;
    raises := hapax.q_raises();
    IF p_all OR raises THEN
      up := coalesce(least(f.seq, c, turn_now), hapax.q_last());
      UPDATE hapax.q_group g SET low = up WHERE g.queue_id = p_queue[i] AND g.grp = p_grp[i]
        AND (g.low > up OR (g.low < up AND raises));
    END IF;
  END LOOP; END $$;

CREATE OR REPLACE FUNCTION hapax.q_heads(p_queue int[], p_grp text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM hapax.q_heads(p_queue, p_grp, false, true);
END $$;

-- Deliveries of FIFO groups, locked in the order of their places, as by others that lock several. The caller holds the groups' locks.
CREATE FUNCTION hapax.q_flight(p_queue int, p_grp text[]) RETURNS SETOF hapax.q_claim LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE i int; l bigint; seqs bigint[] := '{}'; BEGIN
  FOR i IN 1 .. cardinality(p_grp) LOOP
    SELECT g.low INTO l FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = p_grp[i];
    seqs := seqs || ARRAY(SELECT x.seq FROM hapax.q_claim x WHERE x.queue_id = p_queue AND (x.grp, x.seq) >= (p_grp[i], coalesce(l, 0))
      AND x.grp <= p_grp[i] AND x.grp IS NOT NULL ORDER BY x.queue_id, x.grp, x.seq);
  END LOOP;
  RETURN QUERY SELECT x.* FROM hapax.q_claim x WHERE x.seq = ANY (seqs) ORDER BY x.seq FOR UPDATE;
END $$;

-- Those of these FIFO groups of which a delivery is locked by another transaction; locks the others' deliveries. The caller holds the groups'
-- locks.
CREATE FUNCTION hapax.q_busy(p_queue int, p_grp text[]) RETURNS SETOF text LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE i int; l bigint; free bigint[]; BEGIN
  FOR i IN 1 .. cardinality(p_grp) LOOP
    SELECT g.low INTO l FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = p_grp[i];
    l := coalesce(l, 0);
    free := ARRAY(SELECT x.seq FROM hapax.q_claim x WHERE x.queue_id = p_queue AND (x.grp, x.seq) >= (p_grp[i], l)
      AND x.grp <= p_grp[i] AND x.grp IS NOT NULL ORDER BY x.queue_id, x.grp, x.seq FOR UPDATE SKIP LOCKED);
    PERFORM 1 FROM hapax.q_claim x WHERE x.queue_id = p_queue AND (x.grp, x.seq) >= (p_grp[i], l)
      AND x.grp <= p_grp[i] AND x.grp IS NOT NULL AND x.seq <> ALL (free)
      ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
    IF FOUND THEN RETURN NEXT p_grp[i]; END IF;
  END LOOP; END $$;

-- Leases messages of FIFO groups, as the function with one argument less does. Looks at the heads behind `p_floor`; a row with slot -6 says up
-- to which one all are gone now, one with slot -7 behind which place there is a group that was locked. A delivery keeps the turn of its head,
-- so that one that is given back keeps its place among the groups.
CREATE FUNCTION hapax.q_recv_fifo(p_queue int, p_version bigint, p_lease bigint[], p_consumer text[], p_call int[], p_retention bigint,
    p_alone boolean, p_single boolean, p_probe boolean, p_from bigint, p_floor bigint)
 RETURNS TABLE (slot int, now_ms bigint, m hapax.q_claim) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); n int := cardinality(p_lease); used int := 0; skipped text[] := '{}'; waits boolean := false;
  h record; r record; p record; c bigint; l bigint; taken int; gone bigint := p_floor; gap boolean := false; holds boolean := false;
  missed bigint; BEGIN
  now_ms := t; m := NULL; slot := -1;
  PERFORM 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.version = p_version;
  IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
  p := hapax.q_probe(p_queue, p_from);
  IF p_probe AND p.due THEN slot := -2; RETURN NEXT; RETURN; END IF;
  slot := 0; RETURN NEXT;
  LOOP
    FOR h IN SELECT x.grp, x.turn FROM hapax.q_head x WHERE x.queue_id = p_queue AND x.due_ms IS NULL AND x.turn > p_floor
        ORDER BY x.queue_id, x.turn LIMIT n + 100 LOOP
      -- A receive that holds a group, also one that has nothing to deliver, waits for no other one: who holds that might wait for the first.
      EXIT WHEN used >= n OR (waits AND holds);
      IF waits THEN
        CONTINUE WHEN h.grp <> ALL (skipped);
        SELECT g.low INTO l FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = h.grp FOR UPDATE;
      ELSE
        SELECT g.low INTO l FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = h.grp FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          skipped := skipped || h.grp; missed := coalesce(missed, h.turn - 1); gap := true;
          CONTINUE;
        END IF;
      END IF;
      holds := true;
      l := coalesce(l, 0);
      -- Another receive may have had the group since the heads were read.
      PERFORM 1 FROM hapax.q_head x WHERE x.queue_id = p_queue AND x.grp = h.grp AND x.turn = h.turn AND x.due_ms IS NULL;
      CONTINUE WHEN NOT FOUND;
      SELECT x.seq INTO c FROM hapax.q_claim x WHERE x.queue_id = p_queue AND (x.grp, x.seq) >= (h.grp, l)
        AND x.grp <= h.grp AND x.grp IS NOT NULL ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
      taken := 0;
      FOR r IN SELECT x.* FROM hapax.q_fifo x WHERE x.queue_id = p_queue AND (x.grp, x.seq) >= (h.grp, l)
          AND x.grp <= h.grp ORDER BY x.queue_id, x.grp, x.seq LIMIT n - used LOOP
        EXIT WHEN r.until_ms > t OR c < r.seq OR (taken > 0 AND (p_single OR p_call[used + 1] <> p_call[used]));
        DELETE FROM hapax.q_fifo x WHERE x.queue_id = p_queue AND x.grp = h.grp AND x.seq = r.seq;
        IF r.retained_ms + p_retention < t AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.id_hi = r.id_hi
            AND u.id_lo = coalesce(r.id_lo, (1::bigint << 63) | r.seq)) THEN CONTINUE; END IF;
        used := used + 1; taken := taken + 1;
        INSERT INTO hapax.q_claim AS k (seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, received_ms, first_ms, id_lo, queue_id,
            attempts, deliveries, bytes, lease_ms, prio, key_source, grp, dedup, key, consumer, story, attrs, body)
        VALUES (r.seq, r.id_hi, h.turn, r.sent_ms, r.retained_ms, greatest(r.fence + 1, nextval('hapax.fence')), t + p_lease[used], t,
            coalesce(r.first_ms, t), r.id_lo, r.queue_id, r.attempts + 1, r.deliveries + 1, r.bytes, p_lease[used], r.prio, r.key_source,
            r.grp, r.dedup, r.key, p_consumer[used], r.story, r.attrs, r.body)
        RETURNING k.* INTO m;
        slot := used; RETURN NEXT;
        EXIT WHEN p_alone AND taken = 1 AND r.attempts > 0;
      END LOOP;
      PERFORM hapax.q_heads(ARRAY[p_queue], ARRAY[h.grp], false, false);
      -- With a delivery the group's head is gone. Without one it may still be there.
      gap := gap OR taken = 0;
      IF NOT gap THEN gone := h.turn; END IF;
    END LOOP;
    EXIT WHEN holds OR waits OR cardinality(skipped) = 0;
    waits := true; gap := true;
  END LOOP;
  IF missed IS NOT NULL THEN slot := -7; now_ms := missed; m := NULL; RETURN NEXT; END IF;
  IF gone > p_floor THEN slot := -6; now_ms := gone; m := NULL; RETURN NEXT; END IF;
  slot := CASE WHEN p.blocked THEN -5 ELSE -4 END; now_ms := p.next_ms; m := NULL; RETURN NEXT; END $$;

-- Of these queues, those that have something to receive: behind a place of a priority, or for priority -1 behind the turn of a FIFO group.
CREATE OR REPLACE FUNCTION hapax.q_waiting(p_queue int[], p_prio smallint[], p_floor bigint[]) RETURNS SETOF int LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_queue) LOOP
    IF p_prio[i] < 0 THEN
      PERFORM 1 FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.due_ms IS NULL AND x.turn > p_floor[i]
        ORDER BY x.queue_id, x.turn LIMIT 1;
    ELSE
      PERFORM 1 FROM hapax.q_ready x WHERE x.queue_id = p_queue[i] AND x.prio = p_prio[i] AND x.pos > p_floor[i]
        ORDER BY x.queue_id, x.prio, x.pos LIMIT 1;
    END IF;
    IF FOUND THEN RETURN NEXT p_queue[i]; END IF;
  END LOOP; END $$;

-- Of a standard queue whose messages have groups: for each priority the place of the first message that can be delivered (before that place all
-- are gone, also if a receive passes over a group) and, with `p_count`, the groups that have more than their share of the deliveries. Deliveries
-- end behind `p_from`, as for `hapax.q_probe`; those that were acked before their time are read, too, until they are vacuumed: `gone` says how
-- many were, and `took_us` how long that took.
CREATE FUNCTION hapax.q_fair(p_queue int, p_prios smallint[], p_floors bigint[], p_from bigint, p_count boolean,
    OUT firsts bigint[], OUT noisy text[], OUT gone bigint, OUT took_us bigint) LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE began timestamptz := clock_timestamp(); live bigint; was bigint; BEGIN
  IF p_count THEN
    was := pg_stat_get_xact_tuples_returned('hapax.q_claim_until'::regclass);
    SELECT coalesce(array_agg(s.grp) FILTER (WHERE s.grp IS NOT NULL AND s.n >= 30 AND s.n * 10 > s.all_n), '{}'), coalesce(sum(s.n), 0)
      INTO noisy, live
      FROM (SELECT x.grp, count(*) AS n, sum(count(*)) OVER () AS all_n FROM hapax.q_claim x
        WHERE x.queue_id = p_queue AND x.until_ms > p_from GROUP BY x.grp) s;
    gone := pg_stat_get_xact_tuples_returned('hapax.q_claim_until'::regclass) - was - live;
    took_us := extract(epoch FROM clock_timestamp() - began) * 1000000;
  END IF;
  firsts := '{}';
  FOR i IN 1 .. cardinality(p_prios) LOOP
    firsts := array_append(firsts, (SELECT x.pos FROM hapax.q_ready x WHERE x.queue_id = p_queue AND x.prio = p_prios[i]
      AND x.pos > p_floors[i] ORDER BY x.queue_id, x.prio, x.pos LIMIT 1));
  END LOOP; END $$;
