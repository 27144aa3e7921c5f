-- A store that is copied to another one: its ledger is closed by the document `hapax/copy`, its queues by their pause.
--
-- The check is a trigger and not a part of each function, so that nothing that writes to the ledger can pass it by. A
-- transaction that was let through holds a lock on hapax.document until it ends: closing waits for those.

-- One row, changed whenever the ledger is closed. A transaction above READ COMMITTED sees the documents as they were when it
-- began, perhaps before the ledger was closed: it locks this row, which fails if the row has changed since.
CREATE TABLE hapax.ledger_gate (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  closed bigint NOT NULL DEFAULT 0
);
INSERT INTO hapax.ledger_gate DEFAULT VALUES;

CREATE FUNCTION hapax.ledger_check_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE state text;
BEGIN
  IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
    PERFORM 1 FROM hapax.ledger_gate FOR SHARE;
  END IF;
  SELECT d.value INTO state FROM hapax.document d WHERE d.name = 'hapax/copy';
  IF FOUND THEN
    RAISE EXCEPTION 'the ledger was copied to % and is closed here; use it there, or open it here again with `hapax copy --release`',
      state::jsonb #>> '{to,store}' USING ERRCODE = 'HX001';
  END IF;
  RETURN NULL;
END $$;

-- Every update sets the version, except for the one of `hapax.record`: its transaction was let through when it entered the key.
CREATE TRIGGER ledger_open_only BEFORE INSERT OR UPDATE OF version OR DELETE ON hapax.ledger_entry
  FOR EACH STATEMENT EXECUTE FUNCTION hapax.ledger_check_open();
