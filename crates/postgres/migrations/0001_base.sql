-- The base of the store: its identity, its clock and its fences.

-- One row: what every process on this store has to agree on.
CREATE TABLE hapax.store (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  -- Seals receipts and tokens, so that a forged one is told apart from a stale one.
  secret bytea NOT NULL CHECK (octet_length(secret) = 32),
  created timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The store's clock, in microseconds since 1970. Every statement of the store takes its time from this function and from
-- no other source, so that a test can replace it. It is the database's clock, never a client's: the clock of the
-- statement, since now() would be the start of the transaction.
CREATE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- The same in milliseconds.
CREATE FUNCTION hapax.now_ms() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT hapax.now_us() / 1000
$$;

-- When the database server was started, in milliseconds since 1970. No holder could renew while the server was down, so
-- a lease lapses at the later of its deadline and (this time + lease).
CREATE FUNCTION hapax.started_ms() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000)::bigint
$$;

-- Fences: each is larger than every one before it. The sequence begins at the clock's microseconds, and advances by one,
-- so it stays behind the clock. A nextval is durable before the transaction that drew it has committed.
CREATE SEQUENCE hapax.fence AS bigint MINVALUE 1;
SELECT setval('hapax.fence', hapax.now_us());

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

-- Decisions of operators.
CREATE TABLE hapax.audit (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at_ms bigint NOT NULL,
  by text NOT NULL,
  what text NOT NULL
);
