-- Fences in the portable form: without sequences and advisory locks, which some databases that speak PostgreSQL's protocol
-- do not have or do not keep their promises about. One row is updated by every claim of a free key: slower, and correct on
-- any database whose transactions are.
CREATE TABLE hapax.fence_last (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  value bigint NOT NULL
) WITH (fillfactor = 50);
INSERT INTO hapax.fence_last (value) VALUES (hapax.now_us());

CREATE FUNCTION hapax.next_fence() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  UPDATE hapax.fence_last SET value = greatest(value + 1, hapax.now_us()) RETURNING value
$$;

-- Every fence is at least the clock's microseconds: there is nothing to raise.
CREATE FUNCTION hapax.raise_fence() RETURNS void LANGUAGE sql AS $$
  SELECT
$$;
