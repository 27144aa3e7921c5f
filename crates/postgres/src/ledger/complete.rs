//! Completions of claims that are held: one statement, without reading the entries first.

use std::collections::HashSet;

use hapax_core::ledger::{TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::{Fence, Json, RecordedOutcome};
use sqlx::PgConnection;

use super::rows::Hash;
use crate::error::Failure;

/// A completion on its way to the database.
struct Completion {
    /// Its place in the batch.
    at: usize,
    hash: Hash,
    fence: Fence,
    outcome: RecordedOutcome,
    ttl_ms: u64,
}

/// The completions of a batch, each of another key.
#[derive(Default)]
pub(super) struct Completions {
    all: Vec<Completion>,
}

impl Completions {
    pub fn push(&mut self, at: usize, hash: Hash, fence: Fence, outcome: RecordedOutcome, ttl_ms: u64) {
        let ttl_ms = ttl_ms.clamp(TTL_MS_MIN, TTL_MS_MAX);
        self.all.push(Completion { at, hash, fence, outcome, ttl_ms });
    }

    /// Records those whose claims are held. Gives their places in the batch.
    pub async fn write(mut self, connection: &mut PgConnection) -> Result<Vec<usize>, Failure> {
        if self.all.is_empty() {
            return Ok(Vec::new());
        }
        // In the order of the key, so that two batches cannot wait for each other.
        self.all.sort_by_key(|one| one.hash);
        let all = &self.all;
        let stage = |one: &Completion| if one.outcome.failed { 3_i16 } else { 2 };
        let write = sqlx::query_scalar("SELECT hapax.ledger_complete($1, $2, $3, $4, $5, $6)")
            .bind(all.iter().map(|one| one.hash.as_slice()).collect::<Vec<_>>())
            .bind(all.iter().map(|one| one.fence.0 as i64).collect::<Vec<_>>())
            .bind(all.iter().map(stage).collect::<Vec<_>>())
            .bind(all.iter().map(|one| one.ttl_ms as i64).collect::<Vec<_>>())
            .bind(all.iter().map(|one| one.outcome.value.as_ref().map(Json::as_str)).collect::<Vec<_>>())
            .bind(
                all.iter().map(|one| one.outcome.omitted_bytes.map(|bytes| bytes as i64)).collect::<Vec<_>>(),
            );
        let written: Vec<Vec<u8>> = write.fetch_one(connection).await?;
        let written: HashSet<Vec<u8>> = written.into_iter().collect();
        Ok(all.iter().filter(|one| written.contains(one.hash.as_slice())).map(|one| one.at).collect())
    }
}
