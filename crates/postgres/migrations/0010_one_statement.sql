-- Claims of free keys and completions, each as one statement over all keys of a call instead of one for each key.

CREATE OR REPLACE FUNCTION hapax.ledger_claim(
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
