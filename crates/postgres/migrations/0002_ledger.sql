-- The ledger: one row per key, updated in place.
--
-- The decisions are made by the program (hapax_core::ledger::protocol): it reads rows, decides, and writes each back only
-- if nobody has changed it since (`ledger_write` compares fence and version). So no lock is held between two statements,
-- and every statement is a transaction of its own.

-- The id of an entry's row, made of scope and key by a function that SQL has, so that `hapax.enter` finds the entries of
-- the program, and the program those of `hapax.enter`. The lengths keep ('ab', 'c') and ('a', 'bc') apart. It is as stable as
-- convert_to: declared immutable it could not be inlined, and its text would be parsed and planned again in each transaction.
CREATE FUNCTION hapax.entry_id(p_scope text, p_key text) RETURNS bytea LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT substr(sha256(int8send(octet_length(p_scope)::bigint) || convert_to(p_scope, 'UTF8')
    || int8send(octet_length(p_key)::bigint) || convert_to(p_key, 'UTF8')), 1, 16)
$$;

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
DECLARE t bigint := hapax.now_ms(); ids bytea[]; fences bigint[]; linked bytea[]; messages bigint[];
BEGIN
  WITH e AS (
    INSERT INTO hapax.ledger_entry AS e (id, scope, key, fence, version, owner, fingerprint, claimed_ms, takeovers, stage,
      lease_ms, until_ms, parks, prune_ms)
    SELECT u.id, u.scope, u.key, hapax.next_fence(), 0, u.owner, u.fingerprint, t, 0, 0, u.lease, t + u.lease, u.parks,
      CASE WHEN u.parks THEN NULL ELSE t + u.lease + p_doubt_ms END
    FROM unnest(p_ids, p_scopes, p_keys, p_owners, p_fingerprints, p_leases, p_parks)
      u(id, scope, key, owner, fingerprint, lease, parks)
    ON CONFLICT ON CONSTRAINT ledger_entry_pkey DO NOTHING
    RETURNING e.id, e.fence, e.scope),
  o AS (INSERT INTO hapax.ledger_open (fence, id, scope) SELECT e.fence, e.id, e.scope FROM e)
  SELECT array_agg(e.id), array_agg(e.fence) INTO ids, fences FROM e;
  IF ids IS NULL THEN
    RETURN;
  END IF;
  INSERT INTO hapax.ledger_count VALUES (cardinality(ids), cardinality(ids));
  IF array_remove(p_messages, NULL) <> '{}' THEN
    SELECT array_agg(u.id), array_agg(u.message) INTO linked, messages FROM unnest(p_ids, p_messages) u(id, message)
    WHERE u.message IS NOT NULL AND u.id = ANY (ids);
    IF linked IS NOT NULL THEN
      PERFORM hapax.link_entries(linked, messages, array_fill(true, ARRAY[cardinality(linked)]));
    END IF;
  END IF;
  RETURN QUERY SELECT u.id, u.fence, t FROM unnest(ids, fences) u(id, fence);
END $$;

-- Completes the claims that are held, not lapsed and not in doubt, by the fences of their tokens. Gives the ids of those.
-- What is not among them needs a closer look. Ids are distinct. `p_stages`: 2 completed, 3 failed.
CREATE FUNCTION hapax.ledger_complete(
  p_ids bytea[], p_fences bigint[], p_stages smallint[], p_ttls bigint[], p_outcomes text[], p_omitted bigint[])
RETURNS bytea[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); ids bytea[]; fences bigint[]; prunes bigint[];
BEGIN
  WITH e AS (
    UPDATE hapax.ledger_entry e SET (version, stage, lease_ms, until_ms, parks, prune_ms, outcome, omitted_bytes) =
      (SELECT e.version + 1, p_stages[x.at], p_ttls[x.at], t, false, t + p_ttls[x.at], p_outcomes[x.at], p_omitted[x.at]
       FROM (SELECT array_position(p_ids, e.id) AS at OFFSET 0) x)
    WHERE e.id = ANY (p_ids) AND e.fence = p_fences[array_position(p_ids, e.id)] AND e.stage = 0 AND e.lease_ms > 0
      AND e.until_ms > t
    RETURNING e.id, e.fence, e.prune_ms)
  SELECT array_agg(e.id), array_agg(e.fence), array_agg(e.prune_ms) INTO ids, fences, prunes FROM e;
  IF ids IS NULL THEN
    RETURN '{}';
  END IF;
  DELETE FROM hapax.ledger_open o WHERE o.fence = ANY (fences);
  INSERT INTO hapax.ledger_due (prune_ms, fence, id) SELECT * FROM unnest(prunes, fences, ids) ON CONFLICT DO NOTHING;
  INSERT INTO hapax.ledger_count VALUES (0, -cardinality(ids));
  RETURN ids;
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

-- What the sweep reads and removes. In functions, so that a table that was empty when it was analyzed is not read from end
-- to end once it has grown.

-- Open entries behind a fence.
CREATE FUNCTION hapax.ledger_open_behind(p_fence bigint, p_n bigint) RETURNS TABLE (fence bigint, id bytea) LANGUAGE plpgsql ROWS 10
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN QUERY SELECT o.fence, o.id FROM hapax.ledger_open o WHERE o.fence > p_fence ORDER BY o.fence LIMIT p_n;
END $$;

-- Entries that may be removed by now, behind a time.
CREATE FUNCTION hapax.ledger_due_behind(p_ms bigint, p_n bigint) RETURNS TABLE (prune_ms bigint, fence bigint, id bytea)
LANGUAGE plpgsql ROWS 10
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms();
BEGIN
  RETURN QUERY SELECT d.prune_ms, d.fence, d.id FROM hapax.ledger_due d
    WHERE d.prune_ms > p_ms AND d.prune_ms <= t ORDER BY d.prune_ms, d.fence LIMIT p_n;
END $$;

-- These rows of `ledger_due` were looked at. An entry that is still there is needed by a message, or damaged: it is looked at
-- again after `p_again_ms`.
CREATE FUNCTION hapax.ledger_due_done(p_times bigint[], p_fences bigint[], p_ids bytea[], p_again_ms bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms();
BEGIN
  INSERT INTO hapax.ledger_due SELECT t + p_again_ms, e.fence, e.id FROM hapax.ledger_entry e
    WHERE e.id = ANY (p_ids) AND e.stage >= 2 AND e.prune_ms <= t ON CONFLICT DO NOTHING;
  FOR i IN 1 .. cardinality(p_times) LOOP
    DELETE FROM hapax.ledger_due d WHERE d.prune_ms = p_times[i] AND d.fence = p_fences[i];
  END LOOP;
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
