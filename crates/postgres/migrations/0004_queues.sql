-- Queues.
--
-- A message is one row, and the row travels: q_ready -> q_claim (a delivery) -> nothing (acked), q_due (hidden until a
-- time), q_ready again, or q_parked. The messages of a FIFO group that wait are in q_fifo, and the group's first message
-- that can be delivered is announced by one row of q_head. These tables are only inserted into and deleted from (a
-- lease's extension is the exception), so that a transaction that is open for long does not slow the queues.
--
-- A receipt names (seq, fence). Every settle and extension compares both. seq is unique in the whole store.
--
-- Statements of the hot path are functions with their planner settings, without joins: keys come as `= ANY(array)`, rows
-- are picked as `ctid = ANY(ARRAY(SELECT ...))`.

CREATE SEQUENCE hapax.q_seq;
CREATE SEQUENCE hapax.q_revision;

CREATE TABLE hapax.q_queue (
  id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE,
  config text NOT NULL,
  revision bigint NOT NULL,
  version bigint NOT NULL,              -- grows with every change that a process may have cached
  created_ms bigint NOT NULL,
  modified_ms bigint NOT NULL,
  purged_ms bigint,
  paused text,
  prios int NOT NULL DEFAULT 1,         -- which priorities were ever used, one bit each
  grouped boolean NOT NULL DEFAULT false); -- whether a message ever had a group

CREATE TABLE hapax.q_deleted (name text PRIMARY KEY, deleted_ms bigint NOT NULL);
-- Numbers of deleted queues. They are emptied again for a time: an operation that began before may write after the deletion.
CREATE TABLE hapax.q_gone (queue_id int PRIMARY KEY, deleted_ms bigint NOT NULL);

CREATE TABLE hapax.q_parked (
  seq bigint NOT NULL,                  -- the message's place in its queue
  id_hi bigint NOT NULL,                -- the id's upper half
  pos bigint NOT NULL,                  -- its place among the ready ones; the same as seq until it is returned
  sent_ms bigint NOT NULL,
  retained_ms bigint NOT NULL,          -- its retention counts from here
  fence bigint NOT NULL,                -- of its last delivery
  until_ms bigint,                      -- the end of its lease or of its delay
  received_ms bigint,                   -- when its last delivery was made, unless that was given back
  first_ms bigint,
  id_lo bigint,                         -- the id's lower half, where it is not made of seq
  queue_id int NOT NULL,
  attempts int NOT NULL,
  deliveries int NOT NULL,
  bytes int NOT NULL,
  lease_ms int,
  prio smallint NOT NULL,
  key_source smallint NOT NULL,
  own boolean,                          -- its lease was changed alone
  grp text COLLATE "C",
  dedup text,
  key text,                             -- NULL: the message's id
  consumer text,
  story text,                           -- history, death and park as JSON
  attrs text,
  body bytea NOT NULL);
CREATE TABLE hapax.q_ready (LIKE hapax.q_parked INCLUDING ALL);
CREATE TABLE hapax.q_claim (LIKE hapax.q_parked INCLUDING ALL);
CREATE TABLE hapax.q_due (LIKE hapax.q_parked INCLUDING ALL);
CREATE TABLE hapax.q_fifo (LIKE hapax.q_parked INCLUDING ALL);

ALTER TABLE hapax.q_parked ADD PRIMARY KEY (seq);
ALTER TABLE hapax.q_ready ADD PRIMARY KEY (queue_id, prio, pos);
ALTER TABLE hapax.q_claim ADD PRIMARY KEY (seq);
ALTER TABLE hapax.q_due ADD PRIMARY KEY (queue_id, until_ms, seq);
ALTER TABLE hapax.q_fifo ADD PRIMARY KEY (queue_id, grp, seq);
CREATE INDEX q_parked_queue ON hapax.q_parked (queue_id, seq);
CREATE INDEX q_ready_returned ON hapax.q_ready (queue_id, seq) WHERE pos <> seq;
CREATE INDEX q_claim_until ON hapax.q_claim (queue_id, until_ms);
CREATE INDEX q_claim_group ON hapax.q_claim (queue_id, grp, seq) WHERE grp IS NOT NULL;
CREATE UNIQUE INDEX q_due_seq ON hapax.q_due (seq);
CREATE UNIQUE INDEX q_fifo_seq ON hapax.q_fifo (seq);
CREATE INDEX q_ready_alias ON hapax.q_ready (id_lo) WHERE id_lo IS NOT NULL;
CREATE INDEX q_claim_alias ON hapax.q_claim (id_lo) WHERE id_lo IS NOT NULL;
CREATE INDEX q_due_alias ON hapax.q_due (id_lo) WHERE id_lo IS NOT NULL;
CREATE INDEX q_fifo_alias ON hapax.q_fifo (id_lo) WHERE id_lo IS NOT NULL;
CREATE INDEX q_parked_alias ON hapax.q_parked (id_lo) WHERE id_lo IS NOT NULL;

-- A FIFO group. The row is only ever locked: whoever changes anything of the group holds it.
CREATE TABLE hapax.q_group (queue_id int NOT NULL, grp text COLLATE "C" NOT NULL, PRIMARY KEY (queue_id, grp));
-- A FIFO group with a message that can be delivered, from due_ms on if that is set.
CREATE TABLE hapax.q_head (queue_id int NOT NULL, grp text COLLATE "C" NOT NULL, turn bigint NOT NULL, due_ms bigint, PRIMARY KEY (queue_id, grp));
CREATE INDEX q_head_turn ON hapax.q_head (queue_id, turn) WHERE due_ms IS NULL;
CREATE INDEX q_head_due ON hapax.q_head (queue_id, due_ms) WHERE due_ms IS NOT NULL;
-- Messages that a FIFO group is halted for, until someone decides about them.
CREATE TABLE hapax.q_undecided (queue_id int NOT NULL, id_hi bigint NOT NULL, id_lo bigint NOT NULL, grp text COLLATE "C" NOT NULL,
  PRIMARY KEY (queue_id, id_hi, id_lo));
CREATE INDEX q_undecided_group ON hapax.q_undecided (queue_id, grp);
CREATE INDEX q_undecided_id ON hapax.q_undecided (id_lo, id_hi);

-- Entries of the ledger that are kept as long as a message lives. A row whose message is gone does no harm.
CREATE TABLE hapax.q_need (entry bytea NOT NULL, queue_id int NOT NULL, seq bigint NOT NULL, PRIMARY KEY (entry, seq));
CREATE INDEX q_need_message ON hapax.q_need (queue_id, seq);

-- Ids of what was imported to a queue: what is gone since is not imported again.
CREATE TABLE hapax.q_imported (id bytea NOT NULL, queue_id int NOT NULL, PRIMARY KEY (id, queue_id));
CREATE INDEX q_imported_queue ON hapax.q_imported (queue_id);

CREATE TABLE hapax.q_dedup (queue_id int NOT NULL, hash bytea NOT NULL, first_ms bigint NOT NULL,
  id_hi bigint NOT NULL, id_lo bigint NOT NULL, seq bigint NOT NULL, PRIMARY KEY (queue_id, hash));
CREATE INDEX q_dedup_age ON hapax.q_dedup (queue_id, first_ms);
-- What a queue with a quota holds at most: the row with the greatest number. Rows are only inserted and deleted.
CREATE TABLE hapax.q_room (queue_id int NOT NULL, number bigint NOT NULL,
  revision bigint NOT NULL,             -- of the queue's configuration
  messages bigint NOT NULL, bytes bigint NOT NULL,
  counted_ms bigint NOT NULL,           -- when its messages were counted
  again_ms bigint NOT NULL,             -- they are not counted again before
  PRIMARY KEY (queue_id, number));
-- Receives that can be repeated.
CREATE TABLE hapax.q_attempt (queue_id int NOT NULL, name text NOT NULL, since_ms bigint NOT NULL, seqs bigint[] NOT NULL, fences bigint[] NOT NULL,
  PRIMARY KEY (queue_id, name));
CREATE TABLE hapax.q_redrive (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue_id int NOT NULL, from_name text NOT NULL, task text NOT NULL,
  running boolean NOT NULL, started_ms bigint NOT NULL, per_second bigint NOT NULL, moved bigint NOT NULL DEFAULT 0,
  after_seq bigint NOT NULL DEFAULT 0, upto_seq bigint NOT NULL);
CREATE INDEX q_redrive_from ON hapax.q_redrive (from_name, id);
CREATE UNIQUE INDEX q_redrive_running ON hapax.q_redrive (queue_id) WHERE running;

DO $$ DECLARE t text; BEGIN FOREACH t IN ARRAY ARRAY['q_ready','q_claim','q_due','q_fifo','q_head','q_dedup','q_room'] LOOP
  EXECUTE format('ALTER TABLE hapax.%I SET (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000,
    autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_insert_threshold=-1, autovacuum_analyze_threshold=2000000000, vacuum_truncate=off)', t);
END LOOP; END $$;

-- Accepts messages of a standard queue that can be delivered at once. NULL: the queue has changed.
CREATE FUNCTION hapax.q_send(p_queue int, p_version bigint, p_id_hi bigint[], p_prio smallint[], p_bytes int[], p_grp text[],
    p_key text[], p_source smallint[], p_attrs text[], p_body bytea[]) RETURNS bigint[] LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE r bigint[]; t bigint; BEGIN
  PERFORM 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.version = p_version;
  IF NOT FOUND THEN RETURN NULL; END IF;
  t := hapax.now_ms();
  WITH i AS (INSERT INTO hapax.q_ready AS q (seq, id_hi, pos, sent_ms, retained_ms, fence, queue_id, attempts, deliveries, bytes, prio,
       key_source, grp, key, attrs, body)
     SELECT s.seq, s.id_hi, s.seq, t, t, 0, p_queue, 0, 0, s.bytes, s.prio, s.source, s.grp, s.key, s.attrs, s.body
     FROM (SELECT nextval('hapax.q_seq') AS seq, u.* FROM unnest(p_id_hi, p_prio, p_bytes, p_grp, p_key, p_source, p_attrs, p_body)
           u(id_hi, prio, bytes, grp, key, source, attrs, body) OFFSET 0) s RETURNING q.seq)
  SELECT array_agg(i.seq ORDER BY i.seq) INTO r FROM i;
  RETURN r; END $$;

-- Whether time has something to do in a queue now, and when it has within the next second. Looks behind `p_from`: before
-- that time there are only rows that are gone. `blocked`: a lease is over, but ends no earlier than its length after the
-- start of the server.
CREATE FUNCTION hapax.q_probe(p_queue int, p_from bigint, OUT due boolean, OUT blocked boolean, OUT next_ms bigint, OUT now_ms bigint)
 LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE a bigint; b bigint; c bigint; e bigint; s bigint := hapax.started_ms(); k record; BEGIN
  now_ms := hapax.now_ms(); blocked := false;
  -- The first by its deadline, unless the start of the server keeps it longer: then another one may end before it.
  FOR k IN SELECT x.until_ms, x.lease_ms FROM hapax.q_claim x
    WHERE x.queue_id = p_queue AND x.until_ms > p_from AND x.until_ms <= now_ms + 1000 ORDER BY x.queue_id, x.until_ms LOOP
    EXIT WHEN k.until_ms >= a OR a <= now_ms;
    e := greatest(k.until_ms, s + k.lease_ms);
    a := least(a, e);
    blocked := blocked OR (k.until_ms <= now_ms AND e > now_ms);
  END LOOP;
  SELECT x.until_ms INTO b FROM hapax.q_due x
    WHERE x.queue_id = p_queue AND x.until_ms > p_from AND x.until_ms <= now_ms + 1000 ORDER BY x.queue_id, x.until_ms LIMIT 1;
  SELECT x.due_ms INTO c FROM hapax.q_head x
    WHERE x.queue_id = p_queue AND x.due_ms > p_from AND x.due_ms <= now_ms + 1000 ORDER BY x.queue_id, x.due_ms LIMIT 1;
  next_ms := least(a, b, c);
  due := coalesce(next_ms <= now_ms, false);
END $$;

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

-- Deletes deliveries of a standard queue; gives those that were there, with their fences. If a message is named twice, its
-- first fence is judged. Passes over rows that are locked (their xmax is set), and so does the next function: a user's
-- transaction may be ending the delivery, and the other calls of the batch do not wait for it. An xmax may also be left over
-- from a lock that was released: such a delivery needs a closer look, too. FOR UPDATE SKIP LOCKED would write a record to the
-- WAL for each row.
--
-- Deliveries are found by their numbers alone. `queue_id = p_queue` beside `seq = ANY (...)` lets the planner choose the
-- index that begins with the queue's number, and then each ack and each extension walks over every delivery of the queue,
-- and over every deleted one that could not be vacuumed yet. `queue_id + 0` and `until_ms + 0` cannot be looked up in an
-- index; they are only compared.
CREATE FUNCTION hapax.q_ack(p_queue int, p_seq bigint[], p_fence bigint[], OUT acked bigint[], OUT fences bigint[]) LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  WITH d AS (DELETE FROM hapax.q_claim k WHERE k.seq = ANY (p_seq) AND k.queue_id + 0 = p_queue
     AND k.fence = p_fence[array_position(p_seq, k.seq)] AND k.xmax = 0 RETURNING k.seq, k.fence)
  SELECT coalesce(array_agg(d.seq), '{}'), coalesce(array_agg(d.fence), '{}') INTO acked, fences FROM d;
  IF EXISTS (SELECT 1 FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked)) THEN
    DELETE FROM hapax.q_need n WHERE n.queue_id = p_queue AND n.seq = ANY (acked);
  END IF;
END $$;

-- Extends leases that have not ended. Whatever is not among the answers needs a closer look. A row that is locked before it is
-- updated would keep its xmax. `p_unsynced`: the caller does not wait for the disk.
CREATE FUNCTION hapax.q_extend(p_queue int, p_seq bigint[], p_fence bigint[], p_lease bigint[], p_own boolean[], p_longest bigint,
    p_unsynced boolean)
 RETURNS TABLE (seq bigint, fence bigint) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); BEGIN
  IF p_unsynced THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
  RETURN QUERY
  UPDATE hapax.q_claim k SET until_ms = t + p_lease[array_position(p_seq, k.seq)], lease_ms = p_lease[array_position(p_seq, k.seq)],
    own = k.own OR p_own[array_position(p_seq, k.seq)] OR NULL
  WHERE k.seq = ANY (p_seq) AND k.queue_id + 0 = p_queue AND k.until_ms + 0 > t AND k.fence = p_fence[array_position(p_seq, k.seq)]
    AND k.xmax = 0 AND p_lease[array_position(p_seq, k.seq)] > 0
    AND t + p_lease[array_position(p_seq, k.seq)] <= k.received_ms + p_longest
  RETURNING k.seq, k.fence; END $$;

-- Of these queues, those that have something to receive: behind a place of a priority, or for priority -1 a FIFO group.
CREATE FUNCTION hapax.q_waiting(p_queue int[], p_prio smallint[], p_floor bigint[]) RETURNS SETOF int LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_queue) LOOP
    IF p_prio[i] < 0 THEN
      PERFORM 1 FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.due_ms IS NULL ORDER BY x.queue_id, x.turn LIMIT 1;
    ELSE
      PERFORM 1 FROM hapax.q_ready x WHERE x.queue_id = p_queue[i] AND x.prio = p_prio[i] AND x.pos > p_floor[i]
        ORDER BY x.queue_id, x.prio, x.pos LIMIT 1;
    END IF;
    IF FOUND THEN RETURN NEXT p_queue[i]; END IF;
  END LOOP; END $$;

-- Hidden messages whose time has come are ready, behind the ones that are.
CREATE FUNCTION hapax.q_promote(p_queue int, p_from bigint, p_n int) RETURNS bigint LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE r bigint; t bigint := hapax.now_ms(); BEGIN
  WITH d AS MATERIALIZED (DELETE FROM hapax.q_due k WHERE k.ctid = ANY (ARRAY(
      SELECT y.ctid FROM hapax.q_due y WHERE y.queue_id = p_queue AND y.until_ms > p_from AND y.until_ms <= t
      ORDER BY y.until_ms, y.seq LIMIT p_n FOR UPDATE SKIP LOCKED)) RETURNING k.*),
  i AS (INSERT INTO hapax.q_ready (seq, id_hi, pos, sent_ms, retained_ms, fence, received_ms, first_ms, id_lo, queue_id, attempts,
       deliveries, bytes, prio, key_source, grp, dedup, key, consumer, story, attrs, body)
    SELECT d.seq, d.id_hi, nextval('hapax.q_seq'), d.sent_ms, d.retained_ms, d.fence, d.received_ms, d.first_ms, d.id_lo, d.queue_id,
       d.attempts, d.deliveries, d.bytes, d.prio, d.key_source, d.grp, d.dedup, d.key, d.consumer, d.story, d.attrs, d.body
    FROM (SELECT * FROM d ORDER BY d.until_ms, d.pos, d.seq OFFSET 0) d RETURNING 1)
  SELECT count(*) INTO r FROM i; RETURN r; END $$;

-- Announces again what can be delivered of FIFO groups. The caller holds their locks.
CREATE FUNCTION hapax.q_heads(p_queue int[], p_grp text[]) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE i int; f record; c bigint; t bigint := hapax.now_ms(); h hapax.q_head; BEGIN
  FOR i IN 1 .. cardinality(p_queue) LOOP
    SELECT x.seq, x.pos, x.until_ms INTO f FROM hapax.q_fifo x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i] ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
    IF FOUND THEN
      SELECT x.seq INTO c FROM hapax.q_claim x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i] ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
    END IF;
    SELECT * INTO h FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i];
    IF f.seq IS NULL OR c < f.seq OR EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.queue_id = p_queue[i] AND u.grp = p_grp[i]) THEN
      IF h.grp IS NOT NULL THEN DELETE FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i]; END IF;
    ELSIF h.grp IS NULL OR h.turn <> greatest(f.seq, f.pos) OR h.due_ms IS DISTINCT FROM (CASE WHEN f.until_ms > t THEN f.until_ms END) THEN
      IF h.grp IS NOT NULL THEN DELETE FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.grp = p_grp[i]; END IF;
      INSERT INTO hapax.q_head VALUES (p_queue[i], p_grp[i], greatest(f.seq, f.pos), CASE WHEN f.until_ms > t THEN f.until_ms END);
    END IF;
  END LOOP; END $$;

-- Leases messages of FIFO groups, in order, one per slot. `p_call` says which receive a slot belongs to: a group gives its
-- messages to one receive only. `p_alone`: a group whose first message has failed gives only that one; `p_single`: every
-- group gives only one. The first row has no message: its slot is -1 if the queue has changed, -2 if time has something to
-- do first, else 0. The last one, with slot -4 or -5, says when time has something to do next.
CREATE FUNCTION hapax.q_recv_fifo(p_queue int, p_version bigint, p_lease bigint[], p_consumer text[], p_call int[], p_retention bigint,
    p_alone boolean, p_single boolean, p_probe boolean, p_from bigint) RETURNS TABLE (slot int, now_ms bigint, m hapax.q_claim) LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); n int := cardinality(p_lease); used int := 0; skipped text[] := '{}'; waits boolean := false;
  h record; r record; p record; c bigint; taken int; BEGIN
  now_ms := t; m := NULL; slot := -1;
  PERFORM 1 FROM hapax.q_queue q WHERE q.id = p_queue AND q.version = p_version;
  IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
  p := hapax.q_probe(p_queue, p_from);
  IF p_probe AND p.due THEN slot := -2; RETURN NEXT; RETURN; END IF;
  slot := 0; RETURN NEXT;
  LOOP
    FOR h IN SELECT x.grp FROM hapax.q_head x WHERE x.queue_id = p_queue AND x.due_ms IS NULL ORDER BY x.queue_id, x.turn LIMIT n + 100 LOOP
      -- A receive that holds a group waits for no other one: a settle might hold that and wait for the first.
      EXIT WHEN used >= n OR (waits AND used > 0);
      IF waits THEN
        CONTINUE WHEN h.grp <> ALL (skipped);
        PERFORM 1 FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = h.grp FOR UPDATE;
      ELSE
        PERFORM 1 FROM hapax.q_group g WHERE g.queue_id = p_queue AND g.grp = h.grp FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN skipped := skipped || h.grp; CONTINUE; END IF;
      END IF;
      -- Another receive may have had the group since the heads were read.
      PERFORM 1 FROM hapax.q_head x WHERE x.queue_id = p_queue AND x.grp = h.grp AND x.due_ms IS NULL;
      CONTINUE WHEN NOT FOUND;
      SELECT x.seq INTO c FROM hapax.q_claim x WHERE x.queue_id = p_queue AND x.grp = h.grp ORDER BY x.queue_id, x.grp, x.seq LIMIT 1;
      taken := 0;
      FOR r IN SELECT x.* FROM hapax.q_fifo x WHERE x.queue_id = p_queue AND x.grp = h.grp ORDER BY x.queue_id, x.grp, x.seq LIMIT n - used LOOP
        EXIT WHEN r.until_ms > t OR c < r.seq OR (taken > 0 AND (p_single OR p_call[used + 1] <> p_call[used]));
        DELETE FROM hapax.q_fifo x WHERE x.queue_id = p_queue AND x.grp = h.grp AND x.seq = r.seq;
        IF r.retained_ms + p_retention < t AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.id_hi = r.id_hi
            AND u.id_lo = coalesce(r.id_lo, (1::bigint << 63) | r.seq)) THEN CONTINUE; END IF;
        used := used + 1; taken := taken + 1;
        INSERT INTO hapax.q_claim AS k (seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, received_ms, first_ms, id_lo, queue_id,
            attempts, deliveries, bytes, lease_ms, prio, key_source, grp, dedup, key, consumer, story, attrs, body)
        VALUES (r.seq, r.id_hi, r.pos, r.sent_ms, r.retained_ms, greatest(r.fence + 1, nextval('hapax.fence')), t + p_lease[used], t,
            coalesce(r.first_ms, t), r.id_lo, r.queue_id, r.attempts + 1, r.deliveries + 1, r.bytes, p_lease[used], r.prio, r.key_source,
            r.grp, r.dedup, r.key, p_consumer[used], r.story, r.attrs, r.body)
        RETURNING k.* INTO m;
        slot := used; RETURN NEXT;
        EXIT WHEN p_alone AND taken = 1 AND r.attempts > 0;
      END LOOP;
      PERFORM hapax.q_heads(ARRAY[p_queue], ARRAY[h.grp]);
    END LOOP;
    EXIT WHEN used > 0 OR waits OR cardinality(skipped) = 0;
    waits := true;
  END LOOP;
  slot := CASE WHEN p.blocked THEN -5 ELSE -4 END; now_ms := p.next_ms; m := NULL; RETURN NEXT; END $$;

-- What the ledger asks the queues.

-- Whether a message is somewhere in its queue.
CREATE FUNCTION hapax.q_lives(p_queue int, p_seq bigint) RETURNS boolean LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM hapax.q_claim x WHERE x.seq = p_seq AND x.queue_id = p_queue)
    OR EXISTS (SELECT 1 FROM hapax.q_ready x WHERE x.queue_id = p_queue AND x.prio = ANY ('{0,1,2,3,4,5,6,7,8,9}'::smallint[])
      AND x.pos = p_seq AND x.seq = p_seq)
    OR EXISTS (SELECT 1 FROM hapax.q_ready x WHERE x.queue_id = p_queue AND x.seq = p_seq AND x.pos <> x.seq)
    OR EXISTS (SELECT 1 FROM hapax.q_due x WHERE x.seq = p_seq AND x.queue_id = p_queue)
    OR EXISTS (SELECT 1 FROM hapax.q_fifo x WHERE x.seq = p_seq AND x.queue_id = p_queue)
    OR EXISTS (SELECT 1 FROM hapax.q_parked x WHERE x.seq = p_seq AND x.queue_id = p_queue);
END $$;

CREATE OR REPLACE FUNCTION hapax.entry_needed(p_id bytea) RETURNS boolean LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM hapax.q_need n WHERE n.entry = p_id AND hapax.q_lives(n.queue_id, n.seq));
END $$;

-- An entry that a claim was given for is linked to its message; another only if the message has none.
CREATE OR REPLACE FUNCTION hapax.link_entries(p_ids bytea[], p_messages bigint[], p_granted boolean[]) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off AS $$
DECLARE q int; BEGIN
  FOR i IN 1 .. cardinality(p_ids) LOOP
    SELECT x.queue_id INTO q FROM hapax.q_claim x WHERE x.seq = p_messages[i];
    IF NOT FOUND THEN
      -- Its lease has ended; it need not be its newest delivery.
      SELECT x.id INTO q FROM hapax.q_queue x WHERE hapax.q_lives(x.id, p_messages[i]) LIMIT 1;
      CONTINUE WHEN NOT FOUND;
    END IF;
    CONTINUE WHEN NOT p_granted[i] AND EXISTS (SELECT 1 FROM hapax.q_need n WHERE n.queue_id = q AND n.seq = p_messages[i]);
    INSERT INTO hapax.q_need (entry, queue_id, seq) VALUES (p_ids[i], q, p_messages[i]) ON CONFLICT DO NOTHING;
  END LOOP; END $$;

-- Messages that are parked because their effect is in doubt continue, as if an operator had released them.
CREATE OR REPLACE FUNCTION hapax.doubt_cleared(p_ids bytea[]) RETURNS void LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off AS $$
DECLARE n record; r hapax.q_parked; t bigint := hapax.now_ms(); story jsonb; fifo boolean; retention bigint; BEGIN
  FOR n IN SELECT x.queue_id, x.seq FROM hapax.q_need x WHERE x.entry = ANY (p_ids) ORDER BY x.queue_id, x.seq LOOP
    SELECT * INTO r FROM hapax.q_parked x WHERE x.seq = n.seq AND x.queue_id = n.queue_id
      AND x.story::jsonb #>> '{parked,0}' = 'in-doubt';
    CONTINUE WHEN NOT FOUND;
    SELECT q.name LIKE '%.fifo', (q.config::jsonb ->> 'retention_ms')::bigint INTO fifo, retention FROM hapax.q_queue q WHERE q.id = r.queue_id;
    CONTINUE WHEN NOT FOUND;
    IF fifo THEN
      PERFORM 1 FROM hapax.q_group g WHERE g.queue_id = r.queue_id AND g.grp = r.grp FOR UPDATE;
    END IF;
    DELETE FROM hapax.q_parked x WHERE x.seq = r.seq AND x.queue_id = r.queue_id;
    CONTINUE WHEN NOT FOUND;
    story := r.story::jsonb - 'history' - 'parked';
    r.story := CASE WHEN story <> '{}' THEN story::text END;
    r.attempts := 0; r.received_ms := NULL; r.retained_ms := t; r.until_ms := NULL; r.lease_ms := NULL; r.own := NULL; r.consumer := NULL;
    IF fifo THEN
      INSERT INTO hapax.q_fifo SELECT r.*;
      DELETE FROM hapax.q_undecided u WHERE u.queue_id = r.queue_id AND u.id_hi = r.id_hi
        AND u.id_lo = coalesce(r.id_lo, (1::bigint << 63) | r.seq);
      UPDATE hapax.q_fifo f SET retained_ms = t WHERE f.queue_id = r.queue_id AND f.grp = r.grp AND f.retained_ms + retention < t
        AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.queue_id = f.queue_id AND u.grp = f.grp);
      PERFORM hapax.q_heads(ARRAY[r.queue_id], ARRAY[r.grp]);
    ELSE
      r.pos := nextval('hapax.q_seq');
      INSERT INTO hapax.q_ready SELECT r.*;
    END IF;
  END LOOP; END $$;
