-- Of these queues, those that have something to receive: behind a place of a priority, or for priority -1 a FIFO group.
CREATE FUNCTION hapax.q_waiting(p_queue int[], p_prio smallint[], p_floor bigint[]) RETURNS SETOF int LANGUAGE plpgsql ROWS 10
 SET enable_seqscan=off SET enable_bitmapscan=off SET enable_hashjoin=off SET enable_mergejoin=off SET plan_cache_mode=force_generic_plan AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_queue) LOOP
    IF p_prio[i] < 0 THEN
      PERFORM 1 FROM hapax.q_head x WHERE x.queue_id = p_queue[i] AND x.due_ms IS NULL ORDER BY x.queue_id, x.turn LIMIT 1;
    ELSE
      PERFORM 1 FROM hapax.q_ready x WHERE x.queue_id = p_queue[i] AND x.prio = p_prio[i] AND x.pos > p_floor[i]
        ORDER BY x.queue_id, x.prio, x.pos LIMIT 1;
    END IF;
    IF FOUND THEN RETURN NEXT p_queue[i]; END IF;
  END LOOP; END $$;
