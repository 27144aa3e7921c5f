-- The ledger: one row per key, updated in place.
--
-- The decisions are made by the program (hapax_core::ledger::protocol): it reads rows, decides, and writes each back only
-- if nobody has changed it since (`ledger_write` compares fence and version). So no lock is held between two statements,
-- and every statement is a transaction of its own.

-- Only columns that stay the same between two claims are indexed: heartbeats and completions are HOT updates.
CREATE TABLE hapax.ledger_entry (
  id bytea NOT NULL PRIMARY KEY,      -- 128-bit hash of scope and key
  scope text NOT NULL,
  key text NOT NULL,
  fence bigint NOT NULL,              -- of the last claim
  version int NOT NULL,               -- grows with every change under the same fence
  owner text NOT NULL,
  fingerprint text,
  claimed_ms bigint NOT NULL,
  takeovers int NOT NULL,
  stage smallint NOT NULL,            -- 0 held, 1 given up in doubt, 2 completed, 3 failed
  lease_ms bigint NOT NULL,           -- held: the lease, 0 once its lapse is recorded; ended: the time to live
  until_ms bigint NOT NULL,           -- held: the end of the lease; ended: when
  parks boolean NOT NULL,             -- in case of doubt, an operator has to decide
  prune_ms bigint,                    -- when it may be removed; NULL: not before someone decides
  outcome text,                       -- JSON as it was written; not jsonb, which would change it
  omitted_bytes bigint                -- size of an outcome that was too large to keep
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ledger_entry_fence ON hapax.ledger_entry (fence);

-- Entries that are held or in doubt, by the fence of their claim. Rows are only inserted and deleted.
CREATE TABLE hapax.ledger_open (
  fence bigint NOT NULL PRIMARY KEY,
  id bytea NOT NULL,
  scope text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- Ended entries by the time when they may be removed. Rows are only inserted and deleted; one whose entry has changed is
-- passed over.
CREATE TABLE hapax.ledger_due (
  prune_ms bigint NOT NULL,
  fence bigint NOT NULL,
  id bytea NOT NULL,
  PRIMARY KEY (prune_ms, fence)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- How many entries there are is the sum of these rows: every transaction that changes it adds one, and the sweep adds them
-- up. One row that is updated would be a lock that every claim waits for.
CREATE TABLE hapax.ledger_count (
  entries bigint NOT NULL,
  open bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- What the ledger asks the queues; the migration of the queues replaces these functions.

-- Whether a message in the store needs the entry.
CREATE FUNCTION hapax.entry_needed(p_id bytea) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN false; END';
-- The doubt about these entries has ended: messages that are parked for them continue.
CREATE FUNCTION hapax.doubt_cleared(p_ids bytea[]) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
-- Claims were made for deliveries of these messages: their entries are kept as long as the messages.
CREATE FUNCTION hapax.link_entries(p_ids bytea[], p_messages bigint[], p_granted boolean[]) RETURNS void
LANGUAGE plpgsql AS 'BEGIN END';

-- One row for each id, in the order of the ids, with NULLs for an entry that is not there. `over`: its time is over, and no
-- message needs it. `spare`: a fence for a new claim, drawn if `p_spare` and the entry is in doubt or over.
CREATE FUNCTION hapax.ledger_read(p_ids bytea[], p_lock boolean, p_spare boolean)
RETURNS TABLE (
  now_ms bigint, started_ms bigint, over boolean, spare bigint, id bytea, scope text, key text, fence bigint, version int,
  owner text, fingerprint text, claimed_ms bigint, takeovers int, stage smallint, lease_ms bigint, until_ms bigint,
  parks boolean, outcome text, omitted_bytes bigint)
LANGUAGE plpgsql ROWS 10
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE t bigint;
BEGIN
  IF p_lock THEN
    PERFORM 1 FROM hapax.ledger_entry e WHERE e.id = ANY (p_ids) ORDER BY e.id FOR UPDATE;
  END IF;
  t := hapax.now_ms();
  RETURN QUERY
    SELECT t, hapax.started_ms(),
      CASE WHEN e.prune_ms <= t THEN NOT hapax.entry_needed(e.id) ELSE false END,
      CASE WHEN p_spare AND (e.stage = 1 OR (e.stage = 0 AND e.until_ms <= t) OR e.prune_ms <= t)
        THEN hapax.next_fence() END,
      u.id, e.scope, e.key, e.fence, e.version, e.owner, e.fingerprint, e.claimed_ms, e.takeovers, e.stage,
      e.lease_ms, e.until_ms, e.parks, e.outcome, e.omitted_bytes
    FROM unnest(p_ids) WITH ORDINALITY u(id, n)
    LEFT JOIN LATERAL (SELECT * FROM hapax.ledger_entry x WHERE x.id = u.id OFFSET 0) e ON true
    ORDER BY u.n;
END $$;

-- Claims the keys that are free, and returns the fences of those. All arrays have the same length; ids are distinct and
-- sorted. `p_messages`: the messages whose deliveries the claims are for.
CREATE FUNCTION hapax.ledger_claim(
  p_ids bytea[], p_scopes text[], p_keys text[], p_owners text[], p_fingerprints text[], p_leases bigint[],
  p_parks boolean[], p_messages bigint[], p_doubt_ms bigint)
RETURNS TABLE (id bytea, fence bigint, now_ms bigint)
LANGUAGE plpgsql ROWS 10 AS $$
#variable_conflict use_column
DECLARE t bigint := hapax.now_ms(); i int; f bigint; granted int := 0; linked bytea[]; messages bigint[];
BEGIN
  FOR i IN 1 .. cardinality(p_ids) LOOP
    INSERT INTO hapax.ledger_entry AS e (id, scope, key, fence, version, owner, fingerprint, claimed_ms, takeovers, stage,
      lease_ms, until_ms, parks, prune_ms)
    VALUES (p_ids[i], p_scopes[i], p_keys[i], hapax.next_fence(), 0, p_owners[i], p_fingerprints[i], t, 0, 0,
      p_leases[i], t + p_leases[i], p_parks[i],
      CASE WHEN p_parks[i] THEN NULL ELSE t + p_leases[i] + p_doubt_ms END)
    ON CONFLICT ON CONSTRAINT ledger_entry_pkey DO NOTHING
    RETURNING e.fence INTO f;
    IF FOUND THEN
      INSERT INTO hapax.ledger_open (fence, id, scope) VALUES (f, p_ids[i], p_scopes[i]);
      granted := granted + 1;
      IF p_messages[i] IS NOT NULL THEN
        linked := linked || p_ids[i];
        messages := messages || p_messages[i];
      END IF;
      RETURN QUERY SELECT p_ids[i], f, t;
    END IF;
  END LOOP;
  IF granted > 0 THEN
    INSERT INTO hapax.ledger_count VALUES (granted, granted);
  END IF;
  IF linked IS NOT NULL THEN
    PERFORM hapax.link_entries(linked, messages, array_fill(true, ARRAY[cardinality(linked)]));
  END IF;
END $$;

-- Writes decisions back. Element by element: if the entry still has the fence and the version that the decision was made
-- from (NULL: it is absent), it is replaced, or removed if `p_stages` is NULL. Returns the ids that were written. Ids are
-- distinct and sorted, so that two calls cannot wait for each other in a circle. `p_cleared`: ids whose doubt ends.
CREATE FUNCTION hapax.ledger_write(
  p_ids bytea[], p_old_fences bigint[], p_old_versions int[], p_was_open boolean[], p_scopes text[], p_keys text[],
  p_fences bigint[], p_owners text[], p_fingerprints text[], p_claimed bigint[], p_takeovers int[], p_stages smallint[],
  p_leases bigint[], p_untils bigint[], p_parks boolean[], p_prunes bigint[], p_outcomes text[], p_omitted bigint[],
  p_cleared bytea[])
RETURNS SETOF bytea
LANGUAGE plpgsql ROWS 10
-- Else a session that met a small table keeps reading it from end to end when it has grown.
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
  i int; is_open boolean; entries bigint := 0; opened bigint := 0; cleared bytea[];
BEGIN
  FOR i IN 1 .. cardinality(p_ids) LOOP
    IF p_stages[i] IS NULL THEN
      DELETE FROM hapax.ledger_entry e
      WHERE e.id = p_ids[i] AND e.fence = p_old_fences[i] AND e.version = p_old_versions[i];
    ELSIF p_old_fences[i] IS NULL THEN
      INSERT INTO hapax.ledger_entry VALUES (p_ids[i], p_scopes[i], p_keys[i], p_fences[i], 0, p_owners[i],
        p_fingerprints[i], p_claimed[i], p_takeovers[i], p_stages[i], p_leases[i], p_untils[i], p_parks[i], p_prunes[i],
        p_outcomes[i], p_omitted[i])
      ON CONFLICT DO NOTHING;
    ELSE
      UPDATE hapax.ledger_entry e SET fence = p_fences[i], version = e.version + 1, owner = p_owners[i],
        fingerprint = p_fingerprints[i], claimed_ms = p_claimed[i], takeovers = p_takeovers[i], stage = p_stages[i],
        lease_ms = p_leases[i], until_ms = p_untils[i], parks = p_parks[i], prune_ms = p_prunes[i],
        outcome = p_outcomes[i], omitted_bytes = p_omitted[i]
      WHERE e.id = p_ids[i] AND e.fence = p_old_fences[i] AND e.version = p_old_versions[i];
    END IF;
    IF NOT FOUND THEN
      CONTINUE;
    END IF;
    RETURN NEXT p_ids[i];
    is_open := coalesce(p_stages[i] < 2, false);
    IF p_was_open[i] AND NOT (is_open AND p_fences[i] = p_old_fences[i]) THEN
      DELETE FROM hapax.ledger_open o WHERE o.fence = p_old_fences[i];
    END IF;
    IF is_open AND NOT (p_was_open[i] AND p_fences[i] = p_old_fences[i]) THEN
      INSERT INTO hapax.ledger_open (fence, id, scope) VALUES (p_fences[i], p_ids[i], p_scopes[i]);
    END IF;
    IF p_stages[i] >= 2 THEN
      INSERT INTO hapax.ledger_due (prune_ms, fence, id) VALUES (p_prunes[i], p_fences[i], p_ids[i])
      ON CONFLICT DO NOTHING;
    END IF;
    entries := entries + (p_stages[i] IS NOT NULL)::int - (p_old_fences[i] IS NOT NULL)::int;
    opened := opened + is_open::int - p_was_open[i]::int;
    IF p_ids[i] = ANY (p_cleared) THEN
      cleared := cleared || p_ids[i];
    END IF;
  END LOOP;
  IF entries <> 0 OR opened <> 0 THEN
    INSERT INTO hapax.ledger_count VALUES (entries, opened);
  END IF;
  IF cleared IS NOT NULL THEN
    PERFORM hapax.doubt_cleared(cleared);
  END IF;
END $$;

-- Adds up the rows of `ledger_count` if there are many. Two that run at the same time share the rows between them.
CREATE FUNCTION hapax.ledger_fold() RETURNS void LANGUAGE plpgsql AS $$
DECLARE e bigint; o bigint;
BEGIN
  IF (SELECT count(*) FROM (SELECT 1 FROM hapax.ledger_count LIMIT 100) x) < 100 THEN
    RETURN;
  END IF;
  WITH gone AS (DELETE FROM hapax.ledger_count RETURNING entries, open)
  SELECT coalesce(sum(entries), 0), coalesce(sum(open), 0) INTO e, o FROM gone;
  INSERT INTO hapax.ledger_count VALUES (e, o);
END $$;

-- Prepares keys for a new message, in the transaction that links the message to its key: an entry whose time is over is
-- removed for good, so that the message does not bring it back. A redriven message also clears a recorded failure;
-- otherwise it would fail without running.
CREATE FUNCTION hapax.ledger_clear(p_ids bytea[], p_redriven boolean) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE t bigint; e record; entries bigint := 0; opened bigint := 0;
BEGIN
  FOR e IN SELECT x.* FROM hapax.ledger_entry x WHERE x.id = ANY (p_ids) ORDER BY x.id FOR UPDATE LOOP
    t := coalesce(t, hapax.now_ms());
    IF (e.stage = 3 AND p_redriven) OR (e.prune_ms <= t AND NOT hapax.entry_needed(e.id)) THEN
      DELETE FROM hapax.ledger_entry x WHERE x.id = e.id;
      DELETE FROM hapax.ledger_open o WHERE o.fence = e.fence;
      entries := entries + 1;
      opened := opened + (e.stage < 2)::int;
    END IF;
  END LOOP;
  IF entries > 0 THEN
    INSERT INTO hapax.ledger_count VALUES (-entries, -opened);
  END IF;
END $$;
