-- Positions in a partitioned log (Kafka), advanced in the transaction of the business writes.
--
-- One row for each group and partition. Rows are updated often, and no index has the columns that change.
CREATE TABLE hapax.log_position (
  reader_group text NOT NULL,
  topic_id text NOT NULL,
  partition int NOT NULL,
  topic text NOT NULL,
  next_offset bigint NOT NULL CHECK (next_offset >= 0),
  moved_ms bigint NOT NULL,
  PRIMARY KEY (reader_group, topic_id, partition)
) WITH (fillfactor = 50);
