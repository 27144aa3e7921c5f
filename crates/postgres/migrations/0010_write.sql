-- Acks of one standard queue and sends to one, of calls that are merged: what `hapax.q_ack` and `hapax.q_send` do, by one statement. Each
-- statement that a function begins costs about as much as a message. Servers of the version before use the other two, and so does a batch
-- with calls of one kind. `sent` is NULL if the queue that is sent to has changed; the acks are done nevertheless.
--
-- `needed` is a scalar subquery: PostgreSQL 18 would read the whole table into a hash for an EXISTS. Places are drawn in the order of the
-- messages, and rows are returned in the order of their insertion. Tables are locked in the order of the text, `q_queue` first, as migrations
-- lock them.
CREATE FUNCTION hapax.q_write(p_acks int, p_seq bigint[], p_fence bigint[], p_queue int, p_version bigint, p_id_hi bigint[],
    p_prio smallint[], p_bytes int[], p_grp text[], p_key text[], p_source smallint[], p_attrs text[], p_body bytea[],
    OUT acked bigint[], OUT fences bigint[], OUT sent bigint[]) LANGUAGE plpgsql
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
DECLARE t bigint := hapax.now_ms(); needed boolean; BEGIN
  WITH u AS MATERIALIZED (SELECT true AS ok FROM hapax.q_queue u WHERE u.id = p_queue AND u.version = p_version),
  d AS (DELETE FROM hapax.q_claim k WHERE k.seq = ANY (p_seq) AND k.queue_id + 0 = p_acks
     AND k.fence = p_fence[array_position(p_seq, k.seq)] AND k.xmax = 0 RETURNING k.seq, k.fence),
  i AS (INSERT INTO hapax.q_ready AS q (seq, id_hi, pos, sent_ms, retained_ms, fence, queue_id, attempts, deliveries, bytes, prio,
       key_source, grp, key, attrs, body)
     SELECT s.seq, p_id_hi[s.at], s.seq, t, t, 0, p_queue, 0, 0, p_bytes[s.at], p_prio[s.at], p_source[s.at], p_grp[s.at], p_key[s.at],
       p_attrs[s.at], p_body[s.at]
     FROM (SELECT nextval('hapax.q_seq') AS seq, g.at FROM generate_series(1, cardinality(p_id_hi)) g(at)
       WHERE (SELECT u.ok FROM u) OFFSET 0) s RETURNING q.seq),
  a AS (SELECT array_agg(d.seq) AS seqs, array_agg(d.fence) AS fences FROM d)
  SELECT coalesce(a.seqs, '{}'), coalesce(a.fences, '{}'), (SELECT array_agg(i.seq) FROM i),
    (SELECT true FROM hapax.q_need n WHERE n.queue_id = p_acks AND n.seq = ANY (p_seq) LIMIT 1)
  INTO acked, fences, sent, needed FROM a;
  IF needed THEN
    DELETE FROM hapax.q_need n WHERE n.queue_id = p_acks AND n.seq = ANY (acked);
  END IF;
END $$;
