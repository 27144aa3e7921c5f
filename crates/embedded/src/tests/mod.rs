//! Tests below the public surface.

mod below_sqlite;
