-- Cheaper transactions of workers: what `hapax.enter` and `hapax.record` do for every language, in the form in which the program
-- calls it for keys and outcomes that it has checked itself. Either form of one goes with either form of the other.

-- Enters a key without an entry, and returns true. Returns false if there is one: `hapax.enter` tells what it says. Waits at most
-- `p_wait_ms` for another transaction, then fails with lock_not_available, which ends the transaction: to catch it here would
-- need a subtransaction. Statements that follow in the transaction wait for locks without a bound.
CREATE FUNCTION hapax.tx_enter(p_id bytea, p_scope text, p_key text, p_fingerprint text, p_wait_ms text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE t bigint := hapax.now_ms(); setting text := set_config('lock_timeout', p_wait_ms, true);
BEGIN
  INSERT INTO hapax.ledger_entry (id, scope, key, fence, version, owner, fingerprint, claimed_ms, takeovers, stage, lease_ms,
    until_ms, parks)
  VALUES (p_id, p_scope, p_key, hapax.next_fence(), 1, 'transaction', p_fingerprint, t, 0, 4, 0, t, true)
  ON CONFLICT ON CONSTRAINT ledger_entry_pkey DO NOTHING;
  IF NOT FOUND THEN
    setting := set_config('lock_timeout', '0', true);
    RETURN false;
  END IF;
  INSERT INTO hapax.ledger_count VALUES (1, 0);
  setting := set_config('lock_timeout', '0', true);
  RETURN true;
END $$;

-- Records the outcome of a key that this transaction has entered. `p_stage`: 2 completed, 3 failed.
CREATE FUNCTION hapax.tx_record(p_id bytea, p_outcome text, p_omitted bigint, p_ttl_ms bigint, p_stage int) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE t bigint := hapax.now_ms(); v_fence bigint; setting text;
BEGIN
  -- The version stays as it is: see the trigger `ledger_open_only`.
  UPDATE hapax.ledger_entry e SET stage = p_stage, lease_ms = p_ttl_ms, until_ms = t, parks = false, prune_ms = t + p_ttl_ms,
    outcome = p_outcome, omitted_bytes = p_omitted
  WHERE e.id = p_id AND e.stage = 4 RETURNING e.fence INTO v_fence;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'hapax.tx_record: this transaction has not entered the key, or has rolled that back' USING ERRCODE = 'HX003',
      HINT = 'A handler must not end the transaction that it is given.';
  END IF;
  INSERT INTO hapax.ledger_due (prune_ms, fence, id) VALUES (t + p_ttl_ms, v_fence, p_id);
  setting := set_config('hapax.recorded', p_id::text, true);
END $$;

-- As before, and says which key was recorded last. The setting ends with the transaction, and a savepoint that is rolled back
-- takes it back.
CREATE OR REPLACE FUNCTION hapax.record(p_scope text, p_key text, p_outcome text DEFAULT NULL, p_ttl_ms bigint DEFAULT 345600000,
  p_failed boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE v_id bytea := hapax.entry_id(p_scope, p_key); t bigint := hapax.now_ms();
  ttl bigint := least(greatest(p_ttl_ms, 1000), 31622400000); large boolean := octet_length(p_outcome) > 1048576;
  -- Only to examine it. What is stored is the text: JSON as PostgreSQL keeps it would be changed.
  examined json := p_outcome; v_fence bigint; setting text;
BEGIN
  -- The version stays as it is: see the trigger `ledger_open_only`.
  UPDATE hapax.ledger_entry e SET stage = CASE WHEN p_failed THEN 3 ELSE 2 END, lease_ms = ttl, until_ms = t,
    parks = false, prune_ms = t + ttl, outcome = CASE WHEN large THEN NULL ELSE p_outcome END,
    omitted_bytes = CASE WHEN large THEN octet_length(p_outcome) END
  WHERE e.id = v_id AND e.stage = 4 RETURNING e.fence INTO v_fence;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'hapax.record: this transaction has not entered the key % of %, or has rolled that back',
      quote_nullable(p_key), quote_nullable(p_scope) USING ERRCODE = 'HX003',
      HINT = 'Call hapax.enter first, in the same transaction, outside of savepoints that are rolled back.';
  END IF;
  INSERT INTO hapax.ledger_due (prune_ms, fence, id) VALUES (t + ttl, v_fence, v_id);
  setting := set_config('hapax.recorded', v_id::text, true);
END $$;

CREATE FUNCTION hapax.is_entered(p_id bytea) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM hapax.ledger_entry e WHERE e.id = p_id AND e.stage = 4);
END $$;

-- As before. The row is read only if the key is not the one that was recorded last.
CREATE OR REPLACE FUNCTION hapax.entered_without_outcome() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('hapax.recorded', true) = NEW.id::text THEN
    RETURN NULL;
  END IF;
  IF hapax.is_entered(NEW.id) THEN
    RAISE EXCEPTION 'the transaction has entered the key % of % and recorded no outcome: it is rolled back',
      quote_literal(NEW.key), quote_literal(NEW.scope) USING ERRCODE = 'HX003', HINT = 'Call hapax.record before the commit.';
  END IF;
  RETURN NULL;
END $$;
