-- Decisions of operators.
CREATE TABLE hapax.audit (
  number bigint NOT NULL PRIMARY KEY DEFAULT hapax.next_fence(),
  at_ms bigint NOT NULL,
  by text NOT NULL,
  what text NOT NULL
);
