//! Only tests: `hapax.enter` and `hapax.record` from tokio-postgres, diesel-async and SeaORM.
