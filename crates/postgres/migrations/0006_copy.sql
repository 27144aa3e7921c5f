-- A store that is copied to another one: its ledger is closed by the document `hapax/copy`, its queues by their pause.
--
-- The check is a trigger and not a part of each function, so that nothing that writes to the ledger can pass it by. A
-- transaction that was let through holds a lock on hapax.document until it ends: closing waits for those.
CREATE FUNCTION hapax.ledger_check_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE state text;
BEGIN
  SELECT d.value INTO state FROM hapax.document d WHERE d.name = 'hapax/copy';
  IF FOUND THEN
    RAISE EXCEPTION 'the ledger was copied to % and is closed here; use it there, or open it here again with `hapax copy --release`',
      state::jsonb #>> '{to,store}' USING ERRCODE = 'HX001';
  END IF;
  RETURN NULL;
END $$;

CREATE TRIGGER ledger_open_only BEFORE INSERT OR UPDATE OR DELETE ON hapax.ledger_entry
  FOR EACH STATEMENT EXECUTE FUNCTION hapax.ledger_check_open();
