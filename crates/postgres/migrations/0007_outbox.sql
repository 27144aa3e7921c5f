-- The outbox: messages that are written in the transactions of users, and published by relays.
--
-- A message belongs to one of 64 buckets, by its key. Each bucket has a sequence and two tables, of which the clock chooses
-- one every 10 minutes; the other is emptied by TRUNCATE once everything in it was published. A writer locks the bucket's
-- table before it draws a number, and keeps the lock until its transaction ends. So when a relay reads the sequence first
-- and `pg_locks` afterwards, no transaction except those that it finds there can still commit a number up to the one read.

DO $$ BEGIN
  FOR b IN 0 .. 63 LOOP
    EXECUTE format('CREATE SEQUENCE hapax.outbox_number_%s', lpad(b::text, 2, '0'));
    FOR s IN 0 .. 1 LOOP
      -- Rows are only inserted: nothing is to be vacuumed before the table is emptied.
      EXECUTE format('CREATE TABLE hapax.outbox_%s_%s (
        number bigint PRIMARY KEY,
        id uuid NOT NULL,
        topic text NOT NULL,
        key text,
        body bytea NOT NULL,
        headers jsonb,
        deliver_at_ms bigint,
        enqueued_us bigint NOT NULL
      ) WITH (autovacuum_enabled = off)', lpad(b::text, 2, '0'), s);
    END LOOP;
  END LOOP;
END $$;

-- Where a relay publishes to. `topics` are patterns of LIKE.
CREATE TABLE hapax.outbox_route (
  route text PRIMARY KEY,
  topics text[] NOT NULL,
  target text NOT NULL,
  -- What a crash of a relay can repeat there.
  after_a_crash text NOT NULL,
  created_us bigint NOT NULL
);

-- The relays of a route that run. The only rows that are updated all the time: one for each relay.
CREATE TABLE hapax.outbox_relay (
  route text NOT NULL,
  relay text NOT NULL,
  until_us bigint NOT NULL,
  PRIMARY KEY (route, relay)
) WITH (fillfactor = 20);

-- Which relay works on a bucket of a route. The fence grows with every change of hands.
CREATE TABLE hapax.outbox_lease (
  route text NOT NULL,
  bucket int NOT NULL,
  relay text,
  fence bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (route, bucket)
) WITH (fillfactor = 50);

-- How far a bucket was published: everything up to the largest position. Rows are appended, in the table that the clock
-- chooses; the other one is emptied after its largest positions were copied.
CREATE TABLE hapax.outbox_position_0 (route text NOT NULL, bucket int NOT NULL, position bigint NOT NULL);
CREATE INDEX ON hapax.outbox_position_0 (route, bucket, position);
CREATE TABLE hapax.outbox_position_1 (route text NOT NULL, bucket int NOT NULL, position bigint NOT NULL);
CREATE INDEX ON hapax.outbox_position_1 (route, bucket, position);

-- Messages below the position that are not published yet: the sink has refused or failed one, and what follows with the same
-- key waits behind it. Only the first of a key has a time to be tried at, unless it is parked.
CREATE TABLE hapax.outbox_held (
  route text NOT NULL,
  bucket int NOT NULL,
  number bigint NOT NULL,
  id uuid NOT NULL,
  topic text NOT NULL,
  key text,
  body bytea NOT NULL,
  headers jsonb,
  deliver_at_ms bigint,
  enqueued_us bigint NOT NULL,
  -- It waits for no other message of its key, and none waits for it.
  alone boolean NOT NULL,
  -- The time of the next attempt; NULL: it is parked, or waits behind another one.
  next_us bigint,
  parked boolean NOT NULL,
  attempts int NOT NULL,
  error text,
  held_us bigint NOT NULL,
  PRIMARY KEY (route, bucket, number)
);
CREATE INDEX outbox_held_key ON hapax.outbox_held (route, bucket, key, number) WHERE NOT alone;
CREATE INDEX outbox_held_due ON hapax.outbox_held (route, next_us) WHERE next_us IS NOT NULL;
CREATE INDEX outbox_held_id ON hapax.outbox_held (id);

-- The table of a bucket that is written now: 0 or 1.
CREATE FUNCTION hapax.outbox_slot(p_us bigint) RETURNS int LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT (p_us / 600000000 % 2)::int
$$;

-- The bucket of a key. The hash is the one of hash partitions, which stays the same from version to version.
CREATE FUNCTION hapax.outbox_bucket(p_key text) RETURNS int LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT (hashtextextended(p_key COLLATE "C", 0) & 63)::int
$$;

-- Writes a message in the caller's transaction, and returns its id. Messages with the same key are published in the order of
-- these calls, if the transactions that make them exclude each other, for example by a lock of the business row.
--
-- A statement for each table, found by halving: one that is put together and parsed at each call takes longer. Every expression
-- is prepared again in each transaction, so there are few on the usual path: a list of 128 cases took half of the time.
CREATE FUNCTION hapax.outbox_arms(p_from int, p_to int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE middle int := (p_from + p_to) / 2;
BEGIN
  IF p_to - p_from > 1 THEN
    RETURN format('IF leaf < %s THEN %s ELSE %s END IF;', middle, hapax.outbox_arms(p_from, middle), hapax.outbox_arms(middle, p_to));
  END IF;
  RETURN format('INSERT INTO hapax.outbox_%1$s_%2$s VALUES (nextval(''hapax.outbox_number_%1$s''), v_id, p_topic, p_key, p_body,
    p_headers, at_ms, t);', lpad((p_from / 2)::text, 2, '0'), p_from % 2);
END $$;

DO $do$ BEGIN
  EXECUTE replace($function$
CREATE FUNCTION hapax.enqueue(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL,
  p_deliver_at timestamptz DEFAULT NULL, p_traceparent text DEFAULT NULL) RETURNS uuid LANGUAGE plpgsql AS $body$
DECLARE t bigint := hapax.now_us(); v_id uuid := gen_random_uuid(); leaf int; at_ms bigint;
BEGIN
  -- Everything that is unusual, or not allowed.
  IF (octet_length(p_topic) BETWEEN 1 AND 255 AND p_topic !~ '[\u0001-\u001f\u007f-\u009f]'
    AND (p_key IS NULL OR octet_length(p_key) BETWEEN 1 AND 255 AND p_key !~ '[\u0001-\u001f\u007f-\u009f]')
    AND octet_length(p_body) <= 1048576 AND num_nonnulls(p_headers, p_deliver_at, p_traceparent) = 0) IS NOT TRUE THEN
    IF p_topic IS NULL OR octet_length(p_topic) NOT BETWEEN 1 AND 255 OR p_topic ~ '[\u0001-\u001f\u007f-\u009f]' THEN
      RAISE EXCEPTION 'hapax.enqueue: topic %: use 1 to 255 bytes without control characters', quote_nullable(p_topic)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(p_key) NOT BETWEEN 1 AND 255 OR p_key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
      RAISE EXCEPTION 'hapax.enqueue: key %: use 1 to 255 bytes without control characters, or NULL', quote_nullable(p_key)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_body IS NULL OR octet_length(p_body) > 1048576 THEN
      RAISE EXCEPTION 'hapax.enqueue: the body has % bytes: use 0 to 1048576', coalesce(octet_length(p_body)::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_headers IS NOT NULL THEN
      IF jsonb_typeof(p_headers) <> 'object' OR octet_length(p_headers::text) > 65536
        OR EXISTS (SELECT 1 FROM jsonb_each(p_headers) h WHERE jsonb_typeof(h.value) <> 'string') THEN
        RAISE EXCEPTION 'hapax.enqueue: the headers are not an object of strings with at most 65536 bytes'
          USING ERRCODE = 'invalid_parameter_value';
      END IF;
    END IF;
    IF p_traceparent IS NOT NULL THEN
      p_headers := coalesce(p_headers, '{}') || jsonb_build_object('traceparent', p_traceparent);
    END IF;
    at_ms := (extract(epoch FROM p_deliver_at) * 1000)::bigint;
  END IF;
  leaf := 2 * CASE WHEN p_key IS NULL THEN floor(random() * 64)::int ELSE hapax.outbox_bucket(p_key) END + hapax.outbox_slot(t);
  -- The table is locked before the statement runs and draws the number, also when its plan is used again.
  @arms@
  RETURN v_id;
END $body$$function$, '@arms@', hapax.outbox_arms(0, 128));
END $do$;

DROP FUNCTION hapax.outbox_arms(int, int);

-- The same with a text as the body.
CREATE FUNCTION hapax.enqueue(p_topic text, p_key text, p_body text, p_headers jsonb DEFAULT NULL,
  p_deliver_at timestamptz DEFAULT NULL, p_traceparent text DEFAULT NULL) RETURNS uuid LANGUAGE sql AS $$
  SELECT hapax.enqueue(p_topic, p_key, convert_to(p_body, 'UTF8'), p_headers, p_deliver_at, p_traceparent)
$$;

-- The same with a JSON document as the body.
CREATE FUNCTION hapax.enqueue(p_topic text, p_key text, p_body jsonb, p_headers jsonb DEFAULT NULL,
  p_deliver_at timestamptz DEFAULT NULL, p_traceparent text DEFAULT NULL) RETURNS uuid LANGUAGE sql AS $$
  SELECT hapax.enqueue(p_topic, p_key, convert_to(p_body::text, 'UTF8'), p_headers, p_deliver_at, p_traceparent)
$$;

-- Of these buckets, those whose last number is not the one seen: that number, and the transactions that may still commit a
-- number up to it. One that was prepared for two-phase commit keeps its name; after a restart of the server it begins with -1.
-- `position` is how far the route has published. `incarnation` changes when the server was restarted or has crashed: numbers
-- that no committed transaction had drawn may then be drawn again.
CREATE FUNCTION hapax.outbox_poll(p_route text, p_bucket int[], p_seen bigint[])
RETURNS TABLE (bucket int, last bigint, published bigint, writers text[], incarnation text)
LANGUAGE plpgsql VOLATILE ROWS 64 AS $$
DECLARE v_bucket int[]; v_last bigint[];
  v_incarnation text := concat_ws(' ', pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time());
BEGIN
  SELECT array_agg(x.b), array_agg(x.n) INTO v_bucket, v_last FROM (
    SELECT u.b, u.seen, coalesce(pg_sequence_last_value(('hapax.outbox_number_' || lpad(u.b::text, 2, '0'))::regclass), 0) AS n
    FROM unnest(p_bucket, p_seen) AS u (b, seen)) x
  WHERE x.n <> x.seen;
  IF v_bucket IS NULL THEN RETURN; END IF;
  -- Only now: a writer that comes later draws a larger number.
  RETURN QUERY
    WITH leaf AS MATERIALIZED (
      SELECT u.b, ('hapax.outbox_' || lpad(u.b::text, 2, '0') || '_' || s)::regclass::oid AS relation
      FROM unnest(v_bucket) AS u (b), generate_series(0, 1) AS s),
    held AS MATERIALIZED (
      SELECT l.relation, l.virtualtransaction FROM pg_locks l
      WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())),
    writer AS MATERIALIZED (
      SELECT leaf.b, array_agg(DISTINCT held.virtualtransaction) AS w FROM held JOIN leaf USING (relation) GROUP BY leaf.b)
    SELECT u.b, u.n, hapax.outbox_position(p_route, u.b), coalesce(writer.w, '{}'), v_incarnation
    FROM unnest(v_bucket, v_last) AS u (b, n) LEFT JOIN writer ON writer.b = u.b;
END $$;

-- Messages of a bucket behind `p_after` and up to `p_through`, at most `p_rows`. They end early when they have `p_bytes`. A
-- statement for each bucket, found by halving, as in `enqueue`: a plan is made once in each session.
CREATE FUNCTION hapax.outbox_arms(p_from int, p_to int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE middle int := (p_from + p_to) / 2; one text;
BEGIN
  IF p_to - p_from > 1 THEN
    RETURN format('IF p_bucket < %s THEN %s ELSE %s END IF;', middle, hapax.outbox_arms(p_from, middle),
      hapax.outbox_arms(middle, p_to));
  END IF;
  one := format('(SELECT * FROM hapax.outbox_%s_%%s m WHERE m.number > p_after AND m.number <= p_through ORDER BY m.number LIMIT p_rows)',
    lpad(p_from::text, 2, '0'));
  RETURN 'RETURN QUERY SELECT p_bucket, x.number, x.id, x.topic, x.key, x.body, x.headers, x.deliver_at_ms, x.enqueued_us FROM (
      SELECT m.*, sum(octet_length(m.body)) OVER w - octet_length(m.body) AS before FROM (' || format(one, 0)
      || ' UNION ALL ' || format(one, 1) || ') m WINDOW w AS (ORDER BY m.number) ORDER BY m.number LIMIT p_rows) x
    WHERE x.before < p_bytes;';
END $$;

DO $do$ BEGIN
  EXECUTE replace($function$
CREATE FUNCTION hapax.outbox_read_one(p_bucket int, p_after bigint, p_through bigint, p_rows int, p_bytes bigint)
RETURNS TABLE (bucket int, number bigint, id uuid, topic text, key text, body bytea, headers jsonb, deliver_at_ms bigint,
  enqueued_us bigint)
LANGUAGE plpgsql ROWS 100 AS $body$
#variable_conflict use_column
BEGIN
  @arms@
END $body$$function$, '@arms@', hapax.outbox_arms(0, 64));
END $do$;

DROP FUNCTION hapax.outbox_arms(int, int);

-- The same of several buckets.
CREATE FUNCTION hapax.outbox_read(p_bucket int[], p_after bigint[], p_through bigint[], p_rows int, p_bytes bigint)
RETURNS TABLE (bucket int, number bigint, id uuid, topic text, key text, body bytea, headers jsonb, deliver_at_ms bigint,
  enqueued_us bigint)
LANGUAGE plpgsql ROWS 100 SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_bucket) LOOP
    RETURN QUERY SELECT * FROM hapax.outbox_read_one(p_bucket[i], p_after[i], p_through[i], p_rows, p_bytes);
  END LOOP;
END $$;

-- How far a bucket was published.
CREATE FUNCTION hapax.outbox_position(p_route text, p_bucket int) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT greatest(
    (SELECT position FROM hapax.outbox_position_0 WHERE route = p_route AND bucket = p_bucket ORDER BY route DESC, bucket DESC,
      position DESC LIMIT 1),
    (SELECT position FROM hapax.outbox_position_1 WHERE route = p_route AND bucket = p_bucket ORDER BY route DESC, bucket DESC,
      position DESC LIMIT 1), 0)
$$;

-- Appends positions of the buckets that the relay still holds, and returns those buckets. Left out are also those that are
-- published less far than the relay believes: the database was restored, and has messages that the relay has not read.
CREATE FUNCTION hapax.outbox_advance(p_route text, p_relay text, p_bucket int[], p_fence bigint[], p_after bigint[],
  p_position bigint[]) RETURNS int[] LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE v_bucket int[]; v_position bigint[];
BEGIN
  -- In two steps, so that a position is looked up once for each bucket.
  WITH own AS MATERIALIZED (
    SELECT u.b, u.a, u.p FROM unnest(p_bucket, p_fence, p_after, p_position) AS u (b, f, a, p)
    JOIN hapax.outbox_lease l ON l.route = p_route AND l.bucket = u.b
    WHERE l.relay = p_relay AND l.fence = u.f ORDER BY u.b FOR UPDATE OF l)
  SELECT array_agg(own.b), array_agg(own.p) INTO v_bucket, v_position FROM own WHERE hapax.outbox_position(p_route, own.b) >= own.a;
  IF hapax.outbox_slot(hapax.now_us()) = 0 THEN
    INSERT INTO hapax.outbox_position_0 SELECT p_route, u.b, u.p FROM unnest(v_bucket, v_position) AS u (b, p);
  ELSE
    INSERT INTO hapax.outbox_position_1 SELECT p_route, u.b, u.p FROM unnest(v_bucket, v_position) AS u (b, p);
  END IF;
  RETURN coalesce(v_bucket, '{}');
END $$;

-- Renews a relay's membership and takes its share of the buckets that no running relay holds. Returns the buckets that it
-- holds; `surplus`: how many of them it should give back, so that others get theirs. A bucket of -1: the route is not known.
CREATE FUNCTION hapax.outbox_tend(p_route text, p_relay text, p_lease_us bigint, p_share boolean)
RETURNS TABLE (bucket int, fence bigint, surplus int) LANGUAGE plpgsql ROWS 64 AS $$
DECLARE t bigint := hapax.now_us(); live int; mine int; share int;
BEGIN
  IF NOT EXISTS (SELECT 1 FROM hapax.outbox_route r WHERE r.route = p_route) THEN
    RETURN QUERY SELECT -1, 0::bigint, 0;
    RETURN;
  END IF;
  INSERT INTO hapax.outbox_relay AS r VALUES (p_route, p_relay, t + p_lease_us)
    ON CONFLICT (route, relay) DO UPDATE SET until_us = excluded.until_us;
  IF (SELECT count(*) FROM hapax.outbox_lease l WHERE l.route = p_route) < 64 THEN
    INSERT INTO hapax.outbox_lease (route, bucket) SELECT p_route, b FROM generate_series(0, 63) b ON CONFLICT DO NOTHING;
  END IF;
  SELECT count(*) INTO live FROM hapax.outbox_relay r WHERE r.route = p_route AND r.until_us > t;
  SELECT count(*) INTO mine FROM hapax.outbox_lease l WHERE l.route = p_route AND l.relay = p_relay;
  share := CASE WHEN p_share THEN (63 + live) / live ELSE 64 END;
  IF mine < share THEN
    UPDATE hapax.outbox_lease l SET relay = p_relay, fence = l.fence + 1
    WHERE l.route = p_route AND l.bucket = ANY (ARRAY(
      SELECT f.bucket FROM hapax.outbox_lease f
      WHERE f.route = p_route AND f.relay IS DISTINCT FROM p_relay AND NOT EXISTS (
        SELECT 1 FROM hapax.outbox_relay r WHERE r.route = p_route AND r.relay = f.relay AND r.until_us > t)
      ORDER BY f.bucket LIMIT share - mine FOR UPDATE OF f SKIP LOCKED));
    DELETE FROM hapax.outbox_relay r WHERE r.route = p_route AND r.until_us < t - 600000000;
  END IF;
  RETURN QUERY SELECT l.bucket, l.fence, greatest(mine - share, 0) FROM hapax.outbox_lease l
    WHERE l.route = p_route AND l.relay = p_relay;
END $$;

-- Makes the next message of a key the one that is tried, after the one before it was removed.
CREATE FUNCTION hapax.outbox_next_held(p_route text, p_bucket int, p_key text) RETURNS void LANGUAGE sql AS $$
  UPDATE hapax.outbox_held h SET next_us = hapax.now_us() WHERE h.route = p_route AND h.bucket = p_bucket AND NOT h.parked
    AND h.number = (SELECT min(x.number) FROM hapax.outbox_held x
      WHERE x.route = p_route AND x.bucket = p_bucket AND x.key = p_key AND NOT x.alone)
$$;

-- Makes a route known, or changes it. Messages that no route took so far and this one does are tried at once, in order.
CREATE FUNCTION hapax.outbox_register(p_route text, p_topics text[], p_target text, p_after_a_crash text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO hapax.outbox_route AS r VALUES (p_route, p_topics, p_target, p_after_a_crash, hapax.now_us())
    ON CONFLICT (route) DO UPDATE SET topics = excluded.topics, target = excluded.target, after_a_crash = excluded.after_a_crash
    WHERE (r.topics, r.target, r.after_a_crash) IS DISTINCT FROM (excluded.topics, excluded.target, excluded.after_a_crash);
  IF NOT EXISTS (SELECT 1 FROM hapax.outbox_held h WHERE h.route = '' AND h.topic LIKE ANY (p_topics)) THEN RETURN; END IF;
  UPDATE hapax.outbox_held h SET route = p_route, next_us = NULL, parked = false, error = NULL
    WHERE h.route = '' AND h.topic LIKE ANY (p_topics);
  UPDATE hapax.outbox_held h SET next_us = CASE WHEN h.alone OR NOT EXISTS (SELECT 1 FROM hapax.outbox_held x WHERE x.route = p_route
      AND x.bucket = h.bucket AND x.key = h.key AND NOT x.alone AND x.number < h.number)
      THEN greatest(hapax.now_us(), h.deliver_at_ms * 1000, h.next_us) END
    WHERE h.route = p_route AND NOT h.parked;
END $$;

-- Empties the table of a bucket that is not written now, if every route has published what is in it. Waits for no writer:
-- one that has the table open for long is left alone until the next time. Returns 'empty', 'rotated', 'busy', 'unsent', or
-- 'unrouted': it was emptied, and messages that no route takes are held under the route ''.
CREATE FUNCTION hapax.outbox_rotate(p_bucket int) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms' AS $$
DECLARE leaf text := 'hapax.outbox_' || lpad(p_bucket::text, 2, '0') || '_' || 1 - hapax.outbox_slot(hapax.now_us());
  unrouted text := ' FROM ' || leaf || ' m WHERE NOT EXISTS (SELECT 1 FROM hapax.outbox_route r WHERE m.topic LIKE ANY (r.topics))';
  safe bigint; newest bigint; has_unrouted boolean;
BEGIN
  IF pg_relation_size(leaf::regclass) = 0 THEN RETURN 'empty'; END IF;
  SELECT min(hapax.outbox_position(r.route, p_bucket)) INTO safe FROM hapax.outbox_route r;
  EXECUTE 'SELECT max(number) FROM ' || leaf INTO newest;
  IF safe IS NULL OR newest > safe THEN RETURN 'unsent'; END IF;
  EXECUTE 'SELECT EXISTS (SELECT 1' || unrouted || ')' INTO has_unrouted;
  BEGIN
    EXECUTE 'LOCK TABLE ' || leaf || ' IN ACCESS EXCLUSIVE MODE';
  EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
  END;
  -- No writer has it open any more: what is in it now is all.
  EXECUTE 'SELECT max(number) FROM ' || leaf INTO newest;
  IF newest > safe THEN RETURN 'unsent'; END IF;
  IF has_unrouted THEN
    EXECUTE 'INSERT INTO hapax.outbox_held SELECT '''', $1, m.number, m.id, m.topic, m.key, m.body, m.headers, m.deliver_at_ms,
      m.enqueued_us, m.key IS NULL OR m.deliver_at_ms IS NOT NULL, NULL, true, 0, ''no route takes this topic'', hapax.now_us()'
      || unrouted || ' ON CONFLICT DO NOTHING' USING p_bucket;
  END IF;
  EXECUTE 'TRUNCATE ' || leaf;
  RETURN CASE WHEN has_unrouted THEN 'unrouted' ELSE 'rotated' END;
END $$;

-- The same for the positions.
CREATE FUNCTION hapax.outbox_rotate_positions() RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms' AS $$
DECLARE slot int := hapax.outbox_slot(hapax.now_us()); old text := 'hapax.outbox_position_' || 1 - slot;
BEGIN
  IF pg_relation_size(old::regclass) = 0 THEN RETURN 'empty'; END IF;
  BEGIN
    EXECUTE 'LOCK TABLE ' || old || ' IN ACCESS EXCLUSIVE MODE';
  EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
  END;
  EXECUTE 'INSERT INTO hapax.outbox_position_' || slot || ' SELECT route, bucket, max(position) FROM ' || old || ' GROUP BY 1, 2';
  EXECUTE 'TRUNCATE ' || old;
  RETURN 'rotated';
END $$;

-- What waits, by route. `lag` counts numbers, of which some were rolled back.
CREATE FUNCTION hapax.outbox_status() RETURNS TABLE (route text, target text, after_a_crash text, topics text[], lag bigint, oldest_us bigint,
  held bigint, parked_keys bigint, relays bigint) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE r hapax.outbox_route; p bigint; n bigint; o bigint; b text;
BEGIN
  FOR r IN SELECT * FROM hapax.outbox_route x ORDER BY x.route LOOP
    route := r.route; target := r.target; after_a_crash := r.after_a_crash; topics := r.topics; lag := 0; oldest_us := NULL;
    FOR i IN 0 .. 63 LOOP
      b := lpad(i::text, 2, '0');
      p := hapax.outbox_position(r.route, i);
      n := coalesce(pg_sequence_last_value(('hapax.outbox_number_' || b)::regclass), 0);
      IF n > p THEN
        lag := lag + n - p;
        EXECUTE format('SELECT least((SELECT enqueued_us FROM hapax.outbox_%1$s_0 WHERE number > $1 ORDER BY number LIMIT 1),
          (SELECT enqueued_us FROM hapax.outbox_%1$s_1 WHERE number > $1 ORDER BY number LIMIT 1))', b) INTO o USING p;
        oldest_us := least(oldest_us, o);
      END IF;
    END LOOP;
    SELECT count(*), count(*) FILTER (WHERE h.parked), least(oldest_us, min(h.enqueued_us)) INTO held, parked_keys, oldest_us
      FROM hapax.outbox_held h WHERE h.route = r.route;
    SELECT count(*) INTO relays FROM hapax.outbox_relay x WHERE x.route = r.route AND x.until_us > hapax.now_us();
    RETURN NEXT;
  END LOOP;
END $$;

-- The buckets of these that the relay holds, locked until the transaction ends.
CREATE FUNCTION hapax.outbox_own(p_route text, p_relay text, p_bucket int[], p_fence bigint[]) RETURNS int[] LANGUAGE sql AS $$
  SELECT coalesce(array_agg(x.b), '{}') FROM (
    SELECT u.b FROM unnest(p_bucket, p_fence) AS u (b, f) JOIN hapax.outbox_lease l ON l.route = p_route AND l.bucket = u.b
    WHERE l.relay = p_relay AND l.fence = u.f ORDER BY u.b FOR UPDATE OF l) x
$$;

-- Sets messages of the buckets that the relay holds aside, in order, and returns those buckets. The first of a key is tried
-- after `p_after_us`, or parked.
CREATE FUNCTION hapax.outbox_hold(p_route text, p_relay text, p_own int[], p_fence bigint[], p_bucket int[], p_number bigint[],
  p_alone boolean[], p_after_us bigint[], p_parked boolean[], p_attempts int[], p_error text[]) RETURNS int[]
LANGUAGE plpgsql AS $$
DECLARE own int[] := hapax.outbox_own(p_route, p_relay, p_own, p_fence); t bigint := hapax.now_us(); first boolean;
BEGIN
  FOR i IN 1 .. cardinality(p_bucket) LOOP
    CONTINUE WHEN NOT p_bucket[i] = ANY (own);
    INSERT INTO hapax.outbox_held
      SELECT p_route, m.bucket, m.number, m.id, m.topic, m.key, m.body, m.headers, m.deliver_at_ms, m.enqueued_us, p_alone[i],
        CASE WHEN f.first AND NOT p_parked[i] THEN greatest(t + coalesce(p_after_us[i], 0), m.deliver_at_ms * 1000) END, f.first AND p_parked[i],
        p_attempts[i], p_error[i], t
      FROM hapax.outbox_read(ARRAY[p_bucket[i]], ARRAY[p_number[i] - 1], ARRAY[p_number[i]], 1, 1) m,
        LATERAL (SELECT p_alone[i] OR NOT EXISTS (SELECT 1 FROM hapax.outbox_held x WHERE x.route = p_route
          AND x.bucket = p_bucket[i] AND x.key = m.key AND NOT x.alone AND x.number < m.number) AS first) f
      ON CONFLICT DO NOTHING;
  END LOOP;
  RETURN own;
END $$;

-- Removes a held message that was published. `p_key` is the key in whose order it is. Returns whether the key is still held,
-- also if an operator has deleted the message meanwhile; NULL: the relay has lost the bucket.
CREATE FUNCTION hapax.outbox_release(p_route text, p_relay text, p_bucket int, p_fence bigint, p_number bigint, p_key text)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF hapax.outbox_own(p_route, p_relay, ARRAY[p_bucket], ARRAY[p_fence]) = '{}' THEN RETURN NULL; END IF;
  DELETE FROM hapax.outbox_held x WHERE x.route = p_route AND x.bucket = p_bucket AND x.number = p_number;
  IF FOUND AND p_key IS NOT NULL THEN PERFORM hapax.outbox_next_held(p_route, p_bucket, p_key); END IF;
  RETURN EXISTS (SELECT 1 FROM hapax.outbox_held x WHERE x.route = p_route AND x.bucket = p_bucket AND x.key = p_key AND NOT x.alone);
END $$;

-- Deletes a held message unpublished.
CREATE FUNCTION hapax.outbox_skip(p_route text, p_id uuid, p_by text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE h hapax.outbox_held;
BEGIN
  SELECT * INTO h FROM hapax.outbox_held x WHERE x.route = p_route AND x.id = p_id;
  IF NOT FOUND THEN RETURN false; END IF;
  PERFORM 1 FROM hapax.outbox_lease l WHERE l.route = p_route AND l.bucket = h.bucket FOR UPDATE;
  DELETE FROM hapax.outbox_held x WHERE x.route = p_route AND x.bucket = h.bucket AND x.number = h.number;
  IF NOT FOUND THEN RETURN false; END IF;
  IF NOT h.alone THEN PERFORM hapax.outbox_next_held(p_route, h.bucket, h.key); END IF;
  INSERT INTO hapax.audit (at_ms, by, what) VALUES (hapax.now_ms(), p_by, format('skipped message %s of route %s', p_id, p_route));
  RETURN true;
END $$;

-- Forgets a route. Returns 'forgotten', 'unknown', or 'running': one of its relays runs, and would publish messages that are
-- no longer kept for it.
CREATE FUNCTION hapax.outbox_forget(p_route text, p_by text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT 1 FROM hapax.outbox_relay r WHERE r.route = p_route AND r.until_us > hapax.now_us()) THEN RETURN 'running'; END IF;
  DELETE FROM hapax.outbox_route WHERE route = p_route;
  IF NOT FOUND THEN RETURN 'unknown'; END IF;
  DELETE FROM hapax.outbox_lease WHERE route = p_route;
  DELETE FROM hapax.outbox_relay WHERE route = p_route;
  DELETE FROM hapax.outbox_position_0 WHERE route = p_route;
  DELETE FROM hapax.outbox_position_1 WHERE route = p_route;
  DELETE FROM hapax.outbox_held WHERE route = p_route;
  INSERT INTO hapax.audit (at_ms, by, what) VALUES (hapax.now_ms(), p_by, 'forgot route ' || p_route);
  RETURN 'forgotten';
END $$;
