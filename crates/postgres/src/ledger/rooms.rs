//! The bound on open entries of one scope: an upstream that fails for long leaves many in doubt, and they must not stop the
//! claims of other scopes.
//!
//! Each process estimates how many are open in a scope, from what its sweeps have counted and from its own claims since.
//! Only if the estimate has reached the bound, it counts exactly, before it refuses.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hapax_core::{ClaimError, Scope};
use sqlx::{PgConnection, Row as _};

use crate::error::Failure;

/// Open entries of one scope.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct OpenCount {
    pub open: u64,
    pub in_doubt: u64,
}

pub(super) struct Rooms {
    max: u64,
    estimates: Mutex<HashMap<Scope, u64>>,
}

impl Rooms {
    pub fn new(max: u64) -> Self {
        Self { max, estimates: Mutex::default() }
    }

    fn estimates(&self) -> MutexGuard<'_, HashMap<Scope, u64>> {
        self.estimates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the estimates by what a whole sweep has counted.
    pub fn counted(&self, counts: &HashMap<Scope, OpenCount>) {
        *self.estimates() = counts.iter().map(|(scope, count)| (scope.clone(), count.open)).collect();
    }

    /// Entries of a scope were opened or closed by this process.
    pub fn add(&self, scope: &Scope, opened: i64) {
        let mut estimates = self.estimates();
        match estimates.get_mut(scope) {
            Some(open) => *open = open.saturating_add_signed(opened),
            None if opened > 0 => drop(estimates.insert(scope.clone(), opened as u64)),
            None => {}
        }
    }

    /// How many more entries of a scope may be opened.
    pub async fn room(&self, connection: &mut PgConnection, scope: &Scope) -> Result<Room, Failure> {
        let estimate = self.estimates().get(scope).copied().unwrap_or_default();
        if estimate < self.max {
            return Ok(Room { left: self.max - estimate, max: self.max, count: OpenCount::default() });
        }
        let count = count(connection, scope).await?;
        self.estimates().insert(scope.clone(), count.open);
        Ok(Room { left: self.max.saturating_sub(count.open), max: self.max, count })
    }
}

/// The room for new entries of a scope.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub left: u64,
    max: u64,
    count: OpenCount,
}

impl Room {
    pub fn refusal(&self, scope: &Scope) -> ClaimError {
        let OpenCount { open, in_doubt } = self.count;
        ClaimError::TooManyInDoubt { scope: scope.clone(), open, in_doubt, max: self.max }
    }
}

async fn count(connection: &mut PgConnection, scope: &Scope) -> Result<OpenCount, Failure> {
    let sql =
        "SELECT count(*), count(*) FILTER (WHERE e.stage = 1 OR e.lease_ms = 0 OR e.until_ms <= t.now_ms)
               FROM hapax.ledger_open o JOIN hapax.ledger_entry e ON e.id = o.id,
                    (SELECT hapax.now_ms() AS now_ms OFFSET 0) t
               WHERE o.scope = $1";
    let row = sqlx::query(sql).bind(scope.as_str()).fetch_one(connection).await?;
    let number = |at: usize| row.try_get::<i64, _>(at).map(|count| count as u64);
    Ok(OpenCount { open: number(0)?, in_doubt: number(1)? })
}
