-- The id of an entry's row, made of scope and key by a function that SQL has, so that `hapax.enter` finds the entries of
-- the program, and the program those of `hapax.enter`. The lengths keep ('ab', 'c') and ('a', 'bc') apart.
CREATE FUNCTION hapax.entry_id(p_scope text, p_key text) RETURNS bytea LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT substr(sha256(int8send(octet_length(p_scope)::bigint) || convert_to(p_scope, 'UTF8')
    || int8send(octet_length(p_key)::bigint) || convert_to(p_key, 'UTF8')), 1, 16)
$$;
