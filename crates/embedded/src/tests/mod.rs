//! Tests below the public surface.

mod below_sqlite;
mod schema_versions;
mod writer_ends;
