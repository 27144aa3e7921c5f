-- Fences: each is larger than every one before it. The sequence begins at the clock's microseconds, and advances by one,
-- so it stays behind the clock. A nextval is durable before the transaction that drew it has committed.
CREATE SEQUENCE hapax.fence AS bigint MINVALUE 1;
SELECT setval('hapax.fence', hapax.now_us());

CREATE FUNCTION hapax.next_fence() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT nextval('hapax.fence')
$$;

-- Brings the fences up to the clock. Called by every new connection: after a restore or a failover the sequence may be
-- behind fences that were handed out. Only one session at a time may do so, and only if the sequence is so far behind
-- that concurrent calls of nextval cannot pass the new value.
CREATE FUNCTION hapax.raise_fence() RETURNS void LANGUAGE plpgsql AS $$
DECLARE behind bigint := (SELECT last_value FROM hapax.fence) + 1000000;
BEGIN
  IF behind < hapax.now_us() THEN
    PERFORM pg_advisory_xact_lock(hashtext('hapax.fence'));
    IF (SELECT last_value FROM hapax.fence) + 1000000 < hapax.now_us() THEN
      PERFORM setval('hapax.fence', hapax.now_us());
    END IF;
  END IF;
END $$;
