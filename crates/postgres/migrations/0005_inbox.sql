-- Entries that are made in a user's own transaction: `hapax.enter` and `hapax.record`, for any language.
--
-- An entered key is a row of stage 4. Only its own transaction ever sees that stage: the commit is refused unless the
-- outcome was recorded. Another transaction that enters the key waits for the first one, for a bounded time.

-- Looks up a key in the caller's transaction, and prevents others from entering it until that transaction ends.
--
-- `state`: 'fresh', the effect may happen now, and `hapax.record` has to follow; 'completed', it has happened, with this
-- outcome; 'in-progress', it is under way elsewhere, try again after `retry_ms`; 'in-doubt', an operator has to decide
-- first; 'mismatch', the key was used with another fingerprint. Waits at most `p_wait_ms` for another transaction.
CREATE FUNCTION hapax.enter(p_scope text, p_key text, p_fingerprint text DEFAULT NULL, p_wait_ms int DEFAULT 1000,
  OUT state text, OUT outcome text, OUT failed boolean, OUT omitted_bytes bigint, OUT since_ms bigint, OUT retry_ms bigint)
LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE v_id bytea; t bigint := hapax.now_ms();
BEGIN
  IF p_scope IS NULL OR p_key IS NULL OR octet_length(p_scope) NOT BETWEEN 1 AND 255 OR octet_length(p_key) NOT BETWEEN 1 AND 255
    OR p_scope ~ '[\u0001-\u001f\u007f-\u009f]' OR p_key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
    RAISE EXCEPTION 'hapax.enter: scope % and key %: use 1 to 255 bytes without control characters for each',
      quote_nullable(p_scope), quote_nullable(p_key) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF octet_length(p_fingerprint) NOT BETWEEN 1 AND 128 OR p_fingerprint ~ '[^\u0021-\u007e]' THEN
    RAISE EXCEPTION 'hapax.enter: fingerprint %: use 1 to 128 visible ASCII characters, for example a hash in hex',
      quote_nullable(p_fingerprint) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF p_wait_ms IS NULL OR p_wait_ms NOT BETWEEN 1 AND 60000 THEN
    RAISE EXCEPTION 'hapax.enter: p_wait_ms %: use 1 to 60000', quote_nullable(p_wait_ms) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  v_id := hapax.entry_id(p_scope, p_key);
  IF p_wait_ms <> 1000 THEN
    -- Undone at the end of the function, since the function sets it too.
    PERFORM set_config('lock_timeout', p_wait_ms::text, true);
  END IF;
  BEGIN
    LOOP
      WITH e AS (
        INSERT INTO hapax.ledger_entry (id, scope, key, fence, version, owner, fingerprint, claimed_ms, takeovers, stage, lease_ms,
          until_ms, parks)
        VALUES (v_id, p_scope, p_key, hapax.next_fence(), 1, 'transaction', p_fingerprint, t, 0, 4, 0, t, true)
        ON CONFLICT ON CONSTRAINT ledger_entry_pkey DO NOTHING RETURNING 1)
      INSERT INTO hapax.ledger_count SELECT 1, 0 FROM e;
      IF FOUND THEN
        state := 'fresh';
        RETURN;
      END IF;
      SELECT x.* INTO state, outcome, failed, omitted_bytes, since_ms, retry_ms
        FROM hapax.enter_known(v_id, p_scope, p_key, p_fingerprint, t) x;
      EXIT WHEN state IS NOT NULL;
    END LOOP;
  EXCEPTION WHEN lock_not_available THEN
    state := 'in-progress';
    retry_ms := p_wait_ms;
  END;
END $$;

-- `hapax.enter` for a key that has an entry. `state` is NULL if the entry has gone or changed meanwhile.
CREATE FUNCTION hapax.enter_known(p_id bytea, p_scope text, p_key text, p_fingerprint text, t bigint,
  OUT state text, OUT outcome text, OUT failed boolean, OUT omitted_bytes bigint, OUT since_ms bigint, OUT retry_ms bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE e hapax.ledger_entry;
BEGIN
  SELECT * INTO e FROM hapax.ledger_entry x WHERE x.id = p_id;
  IF NOT FOUND THEN
    RETURN;
  ELSIF e.stage = 4 THEN
    RAISE EXCEPTION 'hapax.enter: this transaction has entered the key % of % already', quote_literal(p_key), quote_literal(p_scope)
      USING ERRCODE = 'HX003', HINT = 'Call hapax.record once for each key that was fresh.';
  ELSIF e.prune_ms <= t AND NOT hapax.entry_needed(p_id) THEN
    -- Its time is over: the row is used again.
    UPDATE hapax.ledger_entry x SET fence = hapax.next_fence(), version = 1, owner = 'transaction', fingerprint = p_fingerprint,
      claimed_ms = t, takeovers = 0, stage = 4, lease_ms = 0, until_ms = t, parks = true, prune_ms = NULL, outcome = NULL,
      omitted_bytes = NULL
    WHERE x.id = p_id AND x.fence = e.fence AND x.version = e.version;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    IF e.stage < 2 THEN
      DELETE FROM hapax.ledger_open o WHERE o.fence = e.fence;
      INSERT INTO hapax.ledger_count VALUES (0, -1);
    END IF;
    state := 'fresh';
  ELSIF e.fingerprint IS DISTINCT FROM p_fingerprint THEN
    state := 'mismatch';
  ELSIF e.stage >= 2 THEN
    state := 'completed';
    outcome := e.outcome;
    failed := e.stage = 3;
    omitted_bytes := e.omitted_bytes;
  ELSIF e.stage = 0 AND greatest(e.until_ms, hapax.started_ms() + e.lease_ms) > t THEN
    state := 'in-progress';
    retry_ms := greatest(e.until_ms, hapax.started_ms() + e.lease_ms) - t;
  ELSE
    state := 'in-doubt';
    since_ms := e.until_ms;
  END IF;
END $$;

-- Records the outcome of a key that `hapax.enter` found fresh in this transaction, as JSON. It is kept for `p_ttl_ms`
-- (1 s to 366 days, default 4 days). Of an outcome above 1 MiB only the size is kept.
CREATE FUNCTION hapax.record(p_scope text, p_key text, p_outcome text DEFAULT NULL, p_ttl_ms bigint DEFAULT 345600000,
  p_failed boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE v_id bytea := hapax.entry_id(p_scope, p_key); t bigint := hapax.now_ms();
  ttl bigint := least(greatest(p_ttl_ms, 1000), 31622400000); large boolean := octet_length(p_outcome) > 1048576;
  -- Only to examine it. What is stored is the text: JSON as PostgreSQL keeps it would be changed.
  examined json := p_outcome;
BEGIN
  -- The version stays as it is: see the trigger `ledger_open_only`.
  WITH e AS (
    UPDATE hapax.ledger_entry e SET stage = CASE WHEN p_failed THEN 3 ELSE 2 END, lease_ms = ttl, until_ms = t,
      parks = false, prune_ms = t + ttl, outcome = CASE WHEN large THEN NULL ELSE p_outcome END,
      omitted_bytes = CASE WHEN large THEN octet_length(p_outcome) END
    WHERE e.id = v_id AND e.stage = 4 RETURNING e.prune_ms, e.fence, e.id)
  INSERT INTO hapax.ledger_due (prune_ms, fence, id) SELECT e.prune_ms, e.fence, e.id FROM e;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'hapax.record: this transaction has not entered the key % of %, or has rolled that back',
      quote_nullable(p_key), quote_nullable(p_scope) USING ERRCODE = 'HX003',
      HINT = 'Call hapax.enter first, in the same transaction, outside of savepoints that are rolled back.';
  END IF;
END $$;

-- An entered key without an outcome must not be committed: the effect would be there without its record.
CREATE FUNCTION hapax.entered_without_outcome() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  IF EXISTS (SELECT 1 FROM hapax.ledger_entry e WHERE e.id = NEW.id AND e.stage = 4) THEN
    RAISE EXCEPTION 'the transaction has entered the key % of % and recorded no outcome: it is rolled back',
      quote_literal(NEW.key), quote_literal(NEW.scope) USING ERRCODE = 'HX003', HINT = 'Call hapax.record before the commit.';
  END IF;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER ledger_entry_entered AFTER INSERT OR UPDATE ON hapax.ledger_entry
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.stage = 4) EXECUTE FUNCTION hapax.entered_without_outcome();
