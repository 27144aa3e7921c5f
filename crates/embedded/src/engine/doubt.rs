//! Open entries by scope, and those among them that are in doubt: counted as they change, never scanned for.
//!
//! An entry that is in doubt stays until someone decides, so an upstream that fails for long leaves many. They have a
//! bound of their own in each scope, so that they neither use up the bound on claims that are held nor stop the claims
//! of other scopes.

use std::collections::{BTreeSet, HashMap};

use hapax_core::ledger::protocol::Stage;
use hapax_core::{ClaimError, EntryId, Scope, SendError, StoreError};

use crate::record::LedgerRow;

/// Open entries of one scope, by default: more than a worker or a proxy has claims under way.
pub(crate) const PER_SCOPE_MAX_DEFAULT: u64 = 100_000;
/// Claims that are held, in all scopes. They are kept in memory.
const HELD_MAX: u64 = 1_000_000;
/// Entries in doubt, in all scopes. They are kept in memory.
const IN_DOUBT_MAX: u64 = 1_000_000;
/// A scope raises the alarm at this part of its bound, in percent.
const ALARM_PERCENT: u64 = 80;
/// The alarm is logged again only after the scope has been below this part of its bound.
const CALM_PERCENT: u64 = 50;

/// A scope that is near its bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NearDoubtLimit {
    pub scope: Scope,
    pub in_doubt: u64,
    pub max: u64,
}

#[derive(Default)]
struct ScopeCount {
    /// Held or in doubt.
    open: u64,
    in_doubt: u64,
    /// The alarm was logged.
    alarmed: bool,
}

pub(super) struct DoubtCounts {
    per_scope_max: u64,
    scopes: HashMap<Scope, ScopeCount>,
    /// Held entries by the end of their lease.
    lapsing: BTreeSet<(u64, u128)>,
    /// Open entries of all scopes.
    open: u64,
    in_doubt: u64,
    /// Scopes whose alarm is still to be logged.
    alarms: Vec<NearDoubtLimit>,
}

impl Default for DoubtCounts {
    fn default() -> Self {
        Self {
            per_scope_max: PER_SCOPE_MAX_DEFAULT,
            scopes: HashMap::new(),
            lapsing: BTreeSet::new(),
            open: 0,
            in_doubt: 0,
            alarms: Vec::new(),
        }
    }
}

/// The end of the lease of an entry that is held; `None` when its holder gave it up, or its lapse is recorded.
fn held_until_ms(row: &LedgerRow) -> Option<u64> {
    match row.entry.stage {
        Stage::Processing { doubted: false, lease_ms: 1.., until_ms, .. } => Some(until_ms),
        _ => None,
    }
}

impl DoubtCounts {
    pub fn set_per_scope_max(&mut self, max: u64) {
        self.per_scope_max = max.max(1);
    }

    /// Counts an open entry.
    pub fn add(&mut self, hash: u128, row: &LedgerRow) {
        self.open += 1;
        // A scope is looked up far more often than it is seen for the first time.
        let count = match self.scopes.get_mut(&row.id.scope) {
            Some(count) => count,
            None => self.scopes.entry(row.id.scope.clone()).or_default(),
        };
        count.open += 1;
        if let Some(until_ms) = held_until_ms(row) {
            self.lapsing.insert((until_ms, hash));
            return;
        }
        self.in_doubt += 1;
        count.in_doubt += 1;
        if !count.alarmed && is_near(count.in_doubt, self.per_scope_max) {
            count.alarmed = true;
            let (in_doubt, max) = (count.in_doubt, self.per_scope_max);
            self.alarms.push(NearDoubtLimit { scope: row.id.scope.clone(), in_doubt, max });
        }
    }

    /// Counts an open entry no longer.
    pub fn remove(&mut self, hash: u128, row: &LedgerRow) {
        self.open -= 1;
        let count = self.scopes.get_mut(&row.id.scope).expect("the scope of an open entry is counted");
        count.open -= 1;
        if let Some(until_ms) = held_until_ms(row) {
            self.lapsing.remove(&(until_ms, hash));
        } else {
            self.in_doubt -= 1;
            count.in_doubt -= 1;
            count.alarmed &= count.in_doubt * 100 >= self.per_scope_max.saturating_mul(CALM_PERCENT);
        }
        if count.open == 0 {
            self.scopes.remove(&row.id.scope);
        }
    }

    /// Held entries whose lease has ended, at most `limit`.
    pub fn lapsed(&self, now_ms: u64, limit: usize) -> Vec<u128> {
        let lapsed = self.lapsing.iter().take_while(|(until_ms, _)| *until_ms <= now_ms);
        lapsed.map(|(_, hash)| *hash).take(limit).collect()
    }

    /// When the next lease ends.
    pub fn next_ms(&self) -> Option<u64> {
        self.lapsing.first().map(|(until_ms, _)| *until_ms)
    }

    /// Whether one more entry may be open.
    pub fn check_room(&self, scope: &Scope) -> Result<(), ClaimError> {
        let full = |problem: String| Err(ClaimError::Store(StoreError::Full(problem)));
        if self.open - self.in_doubt >= HELD_MAX {
            return full(format!("{HELD_MAX} claims are held, the most that may be; end some"));
        }
        if let Some(problem) = self.all_in_doubt() {
            return full(format!("{problem}; resolve some"));
        }
        match self.scopes.get(scope) {
            Some(count) if count.open >= self.per_scope_max => Err(ClaimError::TooManyInDoubt {
                scope: scope.clone(),
                open: count.open,
                in_doubt: count.in_doubt,
                max: self.per_scope_max,
            }),
            _ => Ok(()),
        }
    }

    /// Whether an entry that is in doubt may be imported: also beyond the bound of its scope, since to refuse it would lose
    /// that its effect may have happened, but not beyond what memory may hold.
    pub fn check_import(&self, id: &EntryId) -> Result<(), SendError> {
        match self.all_in_doubt() {
            None => Ok(()),
            Some(problem) => Err(SendError::Invalid(format!(
                "entry {id}: {problem}; resolve some, then repeat the import"
            ))),
        }
    }

    fn all_in_doubt(&self) -> Option<String> {
        let full = self.in_doubt >= IN_DOUBT_MAX;
        full.then(|| format!("{IN_DOUBT_MAX} keys of all scopes are in doubt, the most that may be"))
    }

    /// Scopes that are near their bound, those with most in doubt first.
    pub fn near_bound(&self) -> Vec<NearDoubtLimit> {
        let max = self.per_scope_max;
        let near = self.scopes.iter().filter(|(_, count)| is_near(count.in_doubt, max));
        let mut near: Vec<_> = near
            .map(|(scope, count)| NearDoubtLimit { scope: scope.clone(), in_doubt: count.in_doubt, max })
            .collect();
        near.sort_by(|a, b| b.in_doubt.cmp(&a.in_doubt).then_with(|| a.scope.cmp(&b.scope)));
        near
    }

    /// Alarms that were raised since the last call.
    pub fn take_alarms(&mut self) -> Vec<NearDoubtLimit> {
        std::mem::take(&mut self.alarms)
    }

    #[cfg(test)]
    pub fn check<'a>(&self, open: impl Iterator<Item = (u128, &'a LedgerRow)>) {
        let mut counted: HashMap<Scope, (u64, u64)> = HashMap::new();
        let mut lapsing = 0;
        for (hash, row) in open {
            let count = counted.entry(row.id.scope.clone()).or_default();
            count.0 += 1;
            match held_until_ms(row) {
                Some(until_ms) => {
                    assert!(self.lapsing.contains(&(until_ms, hash)), "{} lapses unnoticed", row.id);
                    lapsing += 1;
                }
                None => count.1 += 1,
            }
        }
        let scopes = self.scopes.iter().map(|(scope, count)| (scope.clone(), (count.open, count.in_doubt)));
        assert_eq!(scopes.collect::<HashMap<_, _>>(), counted);
        let sum = |of: fn(&(u64, u64)) -> u64| counted.values().map(of).sum::<u64>();
        assert_eq!((self.open, self.in_doubt, self.lapsing.len()), (sum(|c| c.0), sum(|c| c.1), lapsing));
    }
}

fn is_near(in_doubt: u64, max: u64) -> bool {
    in_doubt * 100 >= max.saturating_mul(ALARM_PERCENT)
}

#[cfg(test)]
mod tests {
    use hapax_core::{ExportedEntry, ExportedStage, Json, OnDoubt, RecordedOutcome};

    use super::*;
    use crate::engine::{Engine, EntrySnapshot, Loader, StoreQuota};
    use crate::record::Header;
    use crate::time::Now;

    fn import(engine: &mut Engine, key: &str, stage: ExportedStage) -> Result<(), SendError> {
        let id = EntryId::new("api/orders".parse().unwrap(), key.parse().unwrap());
        let known = EntrySnapshot { id: id.clone(), hash: id.hash(), row: None, over: false };
        let owner = "ann".parse().unwrap();
        let entry = ExportedEntry { id, owner, fingerprint: None, claimed_ms: 1, takeovers: 0, stage };
        engine.import_entry(Now { us: 5_000_000 }, &known, entry)
    }

    #[test]
    fn an_import_stops_at_what_memory_may_hold_and_says_so() {
        let mut engine =
            Loader::new(Header::default(), StoreQuota::default(), Now { us: 5_000_000 }).finish();
        let in_doubt = || ExportedStage::InDoubt { since_ms: 1, on_doubt: OnDoubt::Park };
        engine.ledger.doubts.in_doubt = IN_DOUBT_MAX - 1;
        import(&mut engine, "a", in_doubt()).unwrap();
        let refused = import(&mut engine, "b", in_doubt()).unwrap_err().to_string();
        assert!(refused.contains("api/orders") && refused.contains("1000000 keys"), "{refused}");
        assert!(refused.contains("repeat the import"), "{refused}");
        assert_eq!(engine.ledger.doubts.in_doubt, IN_DOUBT_MAX);
        // What has ended is not kept in memory.
        let outcome = RecordedOutcome::done(Json::of("paid").unwrap());
        let ttl_ms = hapax_core::ledger::TTL_MS_MIN;
        import(&mut engine, "c", ExportedStage::Completed { at_ms: 4_999, ttl_ms, outcome }).unwrap();
    }
}
