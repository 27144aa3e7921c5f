//! Operations on the ledger, and claims that wait while another holder has their key.
//!
//! A waiting claim is retried when its entry is freed, when its holder's lease expires, and at its own deadline;
//! nothing polls.

use std::collections::BTreeSet;

use hapax_core::ledger::OUTCOME_BYTES_MAX;
use hapax_core::ledger::protocol::ClaimDecision;
use hapax_core::{
    ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryView, RemainingLease, Renew, Resolution,
    ResolveError, TokenError,
};

use crate::maps::NumberMap;
use crate::receipt::{DeliveryRef, ReceiptCodec};
use crate::time::Now;
use crate::writer::Reply;

/// Maximum number of waiting claims; further ones are answered at once.
const WAITERS_MAX: usize = 100_000;

/// A claim to be decided.
pub(crate) struct ClaimOp {
    pub hash: u128,
    pub request: ClaimRequest,
    /// The delivery that the claim belongs to.
    pub delivery: Option<DeliveryRef>,
}

/// The result of a claim, and when it was decided, in ms.
pub(crate) type ClaimReply = Result<(ClaimDecision, u64), ClaimError>;

/// A renewal with its decoded token.
pub(crate) struct RenewOp {
    pub id: EntryId,
    pub hash: u128,
    /// `None` if this store did not issue the token.
    pub fence: Option<u64>,
    pub lease_ms: u64,
}

impl RenewOp {
    pub fn new(codec: &ReceiptCodec, renew: Renew) -> Self {
        let hash = renew.id.hash();
        let fence = codec.open_token(hash, &renew.token);
        Self { id: renew.id, hash, fence, lease_ms: renew.lease_ms }
    }
}

/// The end of a claim with its decoded token.
pub(crate) struct EndOp {
    pub id: EntryId,
    pub hash: u128,
    /// `None` if this store did not issue the token.
    pub fence: Option<u64>,
    pub ending: ClaimEnding,
}

impl EndOp {
    pub fn new(codec: &ReceiptCodec, end: EndClaim) -> Self {
        let hash = end.id.hash();
        let fence = codec.open_token(hash, &end.token);
        // Outcomes too large to store are dropped here, so that they do not take memory while the operation waits.
        let ending = match end.ending {
            ClaimEnding::Complete { outcome, ttl_ms } => {
                ClaimEnding::Complete { outcome: outcome.without_oversize_value(), ttl_ms }
            }
            ending => ending,
        };
        Self { id: end.id, hash, fence, ending }
    }

    pub fn bytes(&self) -> usize {
        match &self.ending {
            ClaimEnding::Complete { outcome, .. } => {
                outcome.value.as_ref().map_or(0, |json| json.as_str().len())
            }
            ClaimEnding::Release | ClaimEnding::Doubt => 0,
        }
    }
}

/// An operation on the ledger.
pub(crate) enum LedgerOp {
    Claim {
        claiming: Box<ClaimOp>,
        /// When the caller sent the request; its wait counts from then.
        asked: Now,
        reply: Reply<ClaimReply>,
    },
    Renew {
        batch: Vec<RenewOp>,
        reply: Reply<Vec<Result<RemainingLease, TokenError>>>,
    },
    End {
        batch: Vec<EndOp>,
        reply: Reply<Vec<Result<(), TokenError>>>,
    },
    Read {
        id: EntryId,
        reply: Reply<Option<EntryView>>,
    },
    Resolve {
        id: EntryId,
        resolution: Resolution,
        by: String,
        reply: Reply<Result<(), ResolveError>>,
    },
    Forget {
        id: EntryId,
        by: String,
        reply: Reply<Result<(), ResolveError>>,
    },
}

impl LedgerOp {
    pub fn bytes(&self) -> usize {
        match self {
            Self::End { batch, .. } => batch.iter().map(EndOp::bytes).sum(),
            Self::Resolve { .. } => OUTCOME_BYTES_MAX,
            _ => 0,
        }
    }

    /// A renewal may be lost in a power cut: opening the store gives every claim a full lease.
    pub fn skips_sync(&self) -> bool {
        matches!(self, Self::Renew { .. } | Self::Read { .. })
    }
}

/// A waiting claim.
pub(crate) struct ClaimWaiter {
    pub claiming: Box<ClaimOp>,
    pub deadline_ms: u64,
    pub reply: Reply<ClaimReply>,
}

#[derive(Default)]
pub(crate) struct ClaimWaiters {
    next: u64,
    /// By number: the smallest has waited longest.
    waiting: NumberMap<u64, (u64, ClaimWaiter)>,
    by_entry: NumberMap<u128, BTreeSet<u64>>,
    /// Wake-up times.
    wakes: BTreeSet<(u64, u64)>,
}

impl ClaimWaiters {
    /// Makes a claim wait at most until `wake_ms`. Returns it if too many claims wait.
    pub fn add(&mut self, waiter: ClaimWaiter, wake_ms: u64) -> Result<(), ClaimWaiter> {
        if self.waiting.len() >= WAITERS_MAX {
            return Err(waiter);
        }
        let number = self.next;
        self.next += 1;
        self.put(number, waiter, wake_ms);
        Ok(())
    }

    /// Makes a claim continue to wait in its old position.
    pub fn put(&mut self, number: u64, waiter: ClaimWaiter, wake_ms: u64) {
        self.wakes.insert((wake_ms, number));
        self.by_entry.entry(waiter.claiming.hash).or_default().insert(number);
        self.waiting.insert(number, (wake_ms, waiter));
    }

    fn remove(&mut self, number: u64) -> Option<ClaimWaiter> {
        let (wake_ms, waiter) = self.waiting.remove(&number)?;
        self.wakes.remove(&(wake_ms, number));
        if let Some(waiting) = self.by_entry.get_mut(&waiter.claiming.hash) {
            waiting.remove(&number);
            if waiting.is_empty() {
                self.by_entry.remove(&waiter.claiming.hash);
            }
        }
        Some(waiter)
    }

    /// Removes and returns the claims that wait for an entry, longest wait first.
    pub fn of_entry(&mut self, hash: u128) -> Vec<(u64, ClaimWaiter)> {
        let numbers: Vec<_> = self.by_entry.get(&hash).into_iter().flatten().copied().collect();
        numbers.into_iter().filter_map(|number| Some((number, self.remove(number)?))).collect()
    }

    /// Removes and returns the claims whose wake-up time has come, longest wait first.
    pub fn due(&mut self, now_ms: u64) -> Vec<(u64, ClaimWaiter)> {
        let due = self.wakes.iter().take_while(|(wake_ms, _)| *wake_ms <= now_ms);
        let mut numbers: Vec<_> = due.map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        numbers.into_iter().filter_map(|number| Some((number, self.remove(number)?))).collect()
    }

    pub fn next_ms(&self) -> Option<u64> {
        self.wakes.first().map(|(wake_ms, _)| *wake_ms)
    }

    pub fn drain(&mut self) -> Vec<ClaimWaiter> {
        self.wakes.clear();
        self.by_entry.clear();
        self.waiting.drain().map(|(_, (_, waiter))| waiter).collect()
    }
}
