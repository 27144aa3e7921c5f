//! The claim protocol as pure functions. The inputs are an entry, a request and the time; the results are the entry to
//! write and the answer. A store executes each call and the write of its result as one atomic step.

use super::{
    ClaimEnding, ClaimError, ClaimRequest, DOUBT_RETENTION_MS, EntryId, EntryState, EntryView, OnDoubt,
    RecordedOutcome, Resolution, ResolveError, TTL_MS_MAX, TTL_MS_MIN, TokenError,
};
use crate::mutant;
use crate::name::{Fence, Fingerprint, Owner};
use crate::policy::LEASE_MS_MAX;

/// A ledger's record of one key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LedgerEntry {
    /// Hash of the first request's content.
    pub fingerprint: Option<Fingerprint>,
    /// The current or last holder.
    pub owner: Owner,
    /// The fence of its last grant; the claim's token encodes it.
    pub fence: Fence,
    /// When the last claim was made.
    pub claimed_ms: u64,
    /// How often a lapsed claim was taken over.
    pub takeovers: u32,
    /// The stored part of its state.
    pub stage: Stage,
}

/// The stored part of an entry's state; the rest follows from the time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Stage {
    /// A holder is working on it; in doubt from `until_ms` on.
    Processing {
        /// The lease that was last asked for; 0 once it is recorded that it has ended.
        lease_ms: u64,
        /// When the lease ends.
        until_ms: u64,
        /// The holder's wish in case of doubt; decides whether the entry may be pruned.
        on_doubt: OnDoubt,
        /// The holder gave it up at `until_ms` and does not know whether the effect happened.
        doubted: bool,
    },
    /// The effect has ended.
    Completed {
        /// When it ended, in milliseconds since 1970.
        at_ms: u64,
        /// How long the entry is kept after that.
        ttl_ms: u64,
        /// The recorded outcome.
        outcome: RecordedOutcome,
    },
}

impl std::hash::Hash for RecordedOutcome {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.failed, &self.value, self.omitted_bytes).hash(state);
    }
}

/// The decision about a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimDecision {
    /// Write this entry; the caller holds it.
    Granted {
        /// The entry to write.
        entry: LedgerEntry,
        /// The claim of an earlier holder lapsed.
        takeover: bool,
    },
    /// Nothing to write: the effect ended earlier.
    Completed {
        /// The recorded outcome.
        outcome: RecordedOutcome,
        /// When it ended, in milliseconds since 1970.
        at_ms: u64,
    },
    /// Nothing to write: another owner holds it.
    InProgress {
        /// Time left of that owner's lease.
        retry_after_ms: u64,
    },
    /// Nothing to write: the entry is in doubt and stays in doubt.
    InDoubt {
        /// Start of the doubt, in milliseconds since 1970.
        since_ms: u64,
    },
}

/// The decision about the end of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryChange {
    /// Write this entry.
    Write(LedgerEntry),
    /// Delete the entry.
    Delete,
    /// Nothing to write: it was ended in the same way before.
    Unchanged,
}

impl LedgerEntry {
    /// Its state at `now_ms`.
    pub fn state(&self, now_ms: u64) -> EntryState {
        match &self.stage {
            Stage::Processing { doubted: false, until_ms, .. } if now_ms < *until_ms => {
                EntryState::Processing
            }
            Stage::Processing { .. } => EntryState::InDoubt,
            Stage::Completed { outcome, .. } if outcome.failed => EntryState::Failed,
            Stage::Completed { .. } => EntryState::Completed,
        }
    }

    /// When it may be pruned; `None`: not before an operator decides.
    pub fn prune_ms(&self) -> Option<u64> {
        match &self.stage {
            Stage::Processing { on_doubt: OnDoubt::Park, .. } => None,
            Stage::Processing { until_ms, .. } => Some(until_ms + DOUBT_RETENTION_MS),
            Stage::Completed { at_ms, ttl_ms, .. } => Some(at_ms + ttl_ms),
        }
    }

    /// The entry after its store was opened: an open claim gets at least one full lease, since its holder could not
    /// renew it while the store was down. One whose lapse is [recorded](Self::lapsed) stays in doubt.
    #[must_use]
    pub fn after_restart(mut self, now_ms: u64) -> Self {
        if let Stage::Processing { lease_ms: lease_ms @ 1.., until_ms, doubted: false, .. } = &mut self.stage
        {
            *until_ms = (*until_ms).max(now_ms + *lease_ms);
        }
        self
    }

    /// The entry to write once its lease has ended, before anyone is told: `None` when there is nothing to record. A
    /// store that gives open claims a full lease when it is opened has to record which of them had lapsed before it
    /// stopped, or what was in doubt would be held again.
    pub fn lapsed(&self, now_ms: u64) -> Option<Self> {
        match &self.stage {
            Stage::Processing { doubted: false, lease_ms: 1.., until_ms, on_doubt }
                if *until_ms <= now_ms =>
            {
                let (until_ms, on_doubt) = (*until_ms, *on_doubt);
                let stage = Stage::Processing { lease_ms: 0, until_ms, on_doubt, doubted: false };
                Some(Self { stage, ..self.clone() })
            }
            _ => None,
        }
    }

    /// As an operator sees it.
    pub fn view(&self, id: EntryId, now_ms: u64) -> EntryView {
        let state = self.state(now_ms);
        let (lease_ms, ended_ms, outcome) = match &self.stage {
            Stage::Processing { until_ms, .. } if state == EntryState::Processing => {
                (until_ms - now_ms, None, None)
            }
            Stage::Processing { until_ms, .. } => (0, Some(*until_ms), None),
            Stage::Completed { at_ms, outcome, .. } => (0, Some(*at_ms), Some(outcome.clone())),
        };
        EntryView {
            id,
            state,
            fence: self.fence,
            owner: self.owner.clone(),
            fingerprint: self.fingerprint.clone(),
            claimed_ms: self.claimed_ms,
            takeovers: self.takeovers,
            lease_ms,
            ended_ms,
            prune_ms: self.prune_ms(),
            outcome,
        }
    }
}

/// Decides a claim. `fence` is called only if the claim is granted under a new fence.
pub fn claim(
    entry: Option<&LedgerEntry>,
    request: &ClaimRequest,
    now_ms: u64,
    fence: impl FnOnce() -> Fence,
) -> Result<ClaimDecision, ClaimError> {
    let stage = |until_ms, on_doubt| Stage::Processing {
        lease_ms: request.lease_ms,
        until_ms,
        on_doubt,
        doubted: false,
    };
    let until_ms = now_ms + request.lease_ms;
    let grant = |fence, takeovers| LedgerEntry {
        fingerprint: request.fingerprint.clone(),
        owner: request.owner.clone(),
        fence,
        claimed_ms: now_ms,
        takeovers,
        stage: stage(until_ms, request.on_doubt),
    };
    let Some(entry) = entry else {
        return Ok(ClaimDecision::Granted { entry: grant(fence(), 0), takeover: false });
    };
    if entry.fingerprint != request.fingerprint {
        return Err(ClaimError::Mismatch);
    }
    match &entry.stage {
        Stage::Completed { .. } if mutant::is("ended-key-granted") => {
            Ok(ClaimDecision::Granted { entry: grant(fence(), entry.takeovers), takeover: false })
        }
        #[cfg(feature = "mutants")]
        Stage::Completed { at_ms, outcome, .. } if mutant::is("outcome-of-another-key") => {
            Ok(ClaimDecision::Completed { outcome: mutant::previous(outcome), at_ms: *at_ms })
        }
        // As an answer from a replica that lags behind.
        Stage::Completed { .. } if mutant::is("ended-key-busy") && now_ms.is_multiple_of(3) => {
            Ok(ClaimDecision::InProgress { retry_after_ms: 1 })
        }
        Stage::Completed { at_ms, outcome, .. } => {
            Ok(ClaimDecision::Completed { outcome: outcome.clone(), at_ms: *at_ms })
        }
        // The same claim again: its answer was lost. It is still held, be it past its lease, and what its first request
        // said about doubt stands.
        Stage::Processing { until_ms: before_ms, on_doubt, doubted: false, .. }
            if entry.owner == request.owner =>
        {
            let stage = stage(until_ms.max(*before_ms), *on_doubt);
            let again = LedgerEntry { stage, ..entry.clone() };
            Ok(ClaimDecision::Granted { entry: again, takeover: entry.takeovers > 0 })
        }
        Stage::Processing { until_ms, doubted: false, .. }
            if now_ms < *until_ms && !mutant::is("held-key-granted") =>
        {
            Ok(ClaimDecision::InProgress { retry_after_ms: until_ms - now_ms })
        }
        Stage::Processing { until_ms, .. } => match request.on_doubt {
            OnDoubt::Park if !mutant::is("doubt-retried-under-park") && !mutant::is("held-key-granted") => {
                Ok(ClaimDecision::InDoubt { since_ms: *until_ms })
            }
            OnDoubt::Park | OnDoubt::Retry => {
                let fence = if mutant::is("fence-repeated") { entry.fence } else { fence() };
                Ok(ClaimDecision::Granted { entry: grant(fence, entry.takeovers + 1), takeover: true })
            }
        },
    }
}

/// Decides a renewal by the holder of `fence`. A lapsed claim that was not taken over is valid again.
pub fn renew(
    entry: Option<&LedgerEntry>,
    fence: Fence,
    lease_ms: u64,
    now_ms: u64,
) -> Result<LedgerEntry, TokenError> {
    let entry = entry.ok_or(TokenError::Gone)?;
    match &entry.stage {
        _ if entry.fence != fence && !mutant::is("stale-extend-accepted") => Err(TokenError::Stale),
        Stage::Completed { .. } => Err(TokenError::Ended),
        Stage::Processing { doubted: true, .. } => Err(TokenError::Stale),
        Stage::Processing { until_ms: before_ms, on_doubt, .. } => {
            let lease_ms = lease_ms.clamp(1, LEASE_MS_MAX);
            let until_ms = now_ms + lease_ms;
            let stage = Stage::Processing {
                lease_ms,
                until_ms: if mutant::is("extension-not-recorded") { *before_ms } else { until_ms },
                on_doubt: *on_doubt,
                doubted: false,
            };
            Ok(LedgerEntry { stage, ..entry.clone() })
        }
    }
}

/// Decides the end of a claim by the holder of `fence`. After its lease the end is still accepted, unless another owner
/// took over. A release after a takeover leaves the entry in doubt, as the holder found it.
pub fn end(
    entry: Option<&LedgerEntry>,
    fence: Fence,
    ending: &ClaimEnding,
    now_ms: u64,
) -> Result<EntryChange, TokenError> {
    let entry = entry.ok_or(TokenError::Gone)?;
    if entry.fence != fence && !mutant::is("stale-end-accepted") {
        return Err(TokenError::Stale);
    }
    match (&entry.stage, ending) {
        (Stage::Completed { outcome: before, .. }, ClaimEnding::Complete { outcome, .. })
            if *before == outcome.clone().without_oversize_value() =>
        {
            Ok(EntryChange::Unchanged)
        }
        (Stage::Completed { .. }, _) => Err(TokenError::Ended),
        (Stage::Processing { .. }, ClaimEnding::Complete { .. }) if mutant::is("completion-not-recorded") => {
            Ok(EntryChange::Unchanged)
        }
        (Stage::Processing { .. }, ClaimEnding::Complete { outcome, ttl_ms }) => {
            Ok(EntryChange::Write(completed(entry.clone(), outcome, *ttl_ms, now_ms)))
        }
        // The holder declared that the effect may have happened, and cannot withdraw that.
        (Stage::Processing { doubted: true, .. }, ClaimEnding::Release) => Err(TokenError::Stale),
        (Stage::Processing { .. }, ClaimEnding::Release) if entry.takeovers == 0 => Ok(EntryChange::Delete),
        (Stage::Processing { doubted: true, .. }, ClaimEnding::Doubt) => Ok(EntryChange::Unchanged),
        // A release after a takeover says nothing about the earlier holder's effect. The entry stays in doubt, so that
        // the next claimant learns of it.
        (
            Stage::Processing { lease_ms, until_ms, on_doubt, .. },
            ClaimEnding::Release | ClaimEnding::Doubt,
        ) => {
            let stage = Stage::Processing {
                lease_ms: *lease_ms,
                until_ms: now_ms.min(*until_ms),
                on_doubt: *on_doubt,
                doubted: true,
            };
            Ok(EntryChange::Write(LedgerEntry { stage, ..entry.clone() }))
        }
    }
}

fn completed(entry: LedgerEntry, outcome: &RecordedOutcome, ttl_ms: u64, now_ms: u64) -> LedgerEntry {
    let outcome = outcome.clone().without_oversize_value();
    let ttl_ms = if mutant::is("ttl-too-short") { 50 } else { ttl_ms.clamp(TTL_MS_MIN, TTL_MS_MAX) };
    LedgerEntry { stage: Stage::Completed { at_ms: now_ms, ttl_ms, outcome }, ..entry }
}

/// Decides an operator's resolution of an entry in doubt. A new fence shuts out a holder that returns late.
pub fn resolve(
    id: &EntryId,
    entry: Option<&LedgerEntry>,
    resolution: &Resolution,
    now_ms: u64,
    fence: impl FnOnce() -> Fence,
) -> Result<EntryChange, ResolveError> {
    let entry = entry.ok_or_else(|| ResolveError::NotFound(id.clone()))?;
    match entry.state(now_ms) {
        EntryState::Processing => Err(in_progress(entry, now_ms)),
        EntryState::Completed | EntryState::Failed => Err(ResolveError::NotInDoubt),
        EntryState::InDoubt => Ok(match resolution {
            Resolution::Absent => EntryChange::Delete,
            Resolution::Completed { outcome, ttl_ms } => {
                let entry = LedgerEntry { fence: fence(), ..entry.clone() };
                EntryChange::Write(completed(entry, outcome, *ttl_ms, now_ms))
            }
        }),
    }
}

/// Decides whether an entry may be deleted.
pub fn forget(id: &EntryId, entry: Option<&LedgerEntry>, now_ms: u64) -> Result<(), ResolveError> {
    let entry = entry.ok_or_else(|| ResolveError::NotFound(id.clone()))?;
    match entry.state(now_ms) {
        EntryState::Processing => Err(in_progress(entry, now_ms)),
        _ => Ok(()),
    }
}

fn in_progress(entry: &LedgerEntry, now_ms: u64) -> ResolveError {
    let Stage::Processing { until_ms, .. } = entry.stage else {
        unreachable!("only a held entry is in progress")
    };
    ResolveError::InProgress { retry_after_ms: until_ms.saturating_sub(now_ms) }
}
