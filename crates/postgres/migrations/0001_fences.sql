-- Fences: each is larger than every one before it. The sequence begins at the clock's microseconds, and advances by one,
-- so it stays behind the clock. A nextval is durable before the transaction that drew it has committed.
CREATE SEQUENCE hapax.fence AS bigint MINVALUE 1;
SELECT setval('hapax.fence', hapax.now_us());

CREATE FUNCTION hapax.next_fence() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT nextval('hapax.fence')
$$;

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
CREATE FUNCTION hapax.raise_fence() RETURNS void LANGUAGE plpgsql AS $$
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
