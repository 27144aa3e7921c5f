-- The base of the store: its identity and its clock. The fences are in a file of their own, which has two forms.

-- One row: what every process on this store has to agree on.
CREATE TABLE hapax.store (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  -- Seals receipts and tokens, so that a forged one is told apart from a stale one.
  secret bytea NOT NULL CHECK (octet_length(secret) = 32),
  -- The form of the schema; see `fences_portable.sql`.
  portable boolean NOT NULL DEFAULT false,
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
