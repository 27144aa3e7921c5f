-- Small named JSON documents with a revision.
CREATE TABLE hapax.document (
  name text COLLATE "C" NOT NULL PRIMARY KEY,
  revision bigint NOT NULL,
  modified_ms bigint NOT NULL,
  value text NOT NULL                 -- JSON as it was written
);

-- Puts or deletes a document. `p_expected`: NULL any, 0 absent, else the revision. `p_value` NULL deletes. Returns
-- whether it was done, the new revision, the document's actual revision before, and what all documents together hold.
-- Changes take turns: the bounds hold for all documents together, and documents change seldom. Revisions are drawn from the
-- fences, so that none is used twice, also not after a document was deleted.
CREATE FUNCTION hapax.document_change(p_name text, p_expected bigint, p_value text, p_count_max bigint, p_bytes_max bigint)
RETURNS TABLE (done boolean, revision bigint, actual bigint, total_count bigint, total_bytes bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
  PERFORM 1 FROM hapax.store FOR UPDATE;
  SELECT d.revision INTO actual FROM hapax.document d WHERE d.name = p_name;
  done := p_expected IS NULL OR p_expected = coalesce(actual, 0);
  IF NOT done THEN
    RETURN NEXT; RETURN;
  END IF;
  IF p_value IS NULL THEN
    DELETE FROM hapax.document d WHERE d.name = p_name;
    RETURN NEXT; RETURN;
  END IF;
  SELECT count(*), coalesce(sum(octet_length(d.name) + octet_length(d.value)), 0) INTO total_count, total_bytes
  FROM hapax.document d WHERE d.name <> p_name;
  total_count := total_count + 1;
  total_bytes := total_bytes + octet_length(p_name) + octet_length(p_value);
  IF total_count > p_count_max OR total_bytes > p_bytes_max THEN
    done := false;
    RETURN NEXT; RETURN;
  END IF;
  revision := hapax.next_fence();
  INSERT INTO hapax.document VALUES (p_name, revision, hapax.now_ms(), p_value)
  ON CONFLICT (name) DO UPDATE SET revision = excluded.revision, modified_ms = excluded.modified_ms, value = excluded.value;
  RETURN NEXT;
END $$;
