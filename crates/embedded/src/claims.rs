//! What callers ask of the ledger, and claims that wait while someone else holds their key.
//!
//! A claim that waits is tried again when its entry is freed, when its holder's lease ends, and when its own wait is
//! over; nothing polls.

use std::collections::{BTreeSet, HashMap};

use hapax_core::ledger::OUTCOME_BYTES_MAX;
use hapax_core::ledger::protocol::Claimed;
use hapax_core::{
    ClaimEnd, ClaimError, ClaimRequest, Ending, EntryId, EntryView, Remaining, Renew, Resolution,
    ResolveError, TokenError,
};

use crate::receipt::{DeliveryRef, ReceiptCodec};
use crate::time::Now;
use crate::writer::Reply;

/// The most claims that wait; those beyond are answered at once.
const WAITERS_MAX: usize = 100_000;

/// A claim on its way.
pub(crate) struct Claiming {
    pub hash: u128,
    pub request: ClaimRequest,
    /// The delivery that it is for.
    pub named: Option<DeliveryRef>,
}

/// What a claim came to, and when.
pub(crate) type Claimings = Result<(Claimed, u64), ClaimError>;

/// A renewal whose token was opened.
pub(crate) struct Keep {
    pub id: EntryId,
    pub hash: u128,
    /// `None` when this store did not make the token.
    pub fence: Option<u64>,
    pub lease_ms: u64,
}

impl Keep {
    pub fn new(codec: &ReceiptCodec, renew: Renew) -> Self {
        let hash = renew.id.hash();
        let fence = codec.open_token(hash, &renew.token);
        Self { id: renew.id, hash, fence, lease_ms: renew.lease_ms }
    }
}

/// The end of a claim whose token was opened.
pub(crate) struct End {
    pub id: EntryId,
    pub hash: u128,
    /// `None` when this store did not make the token.
    pub fence: Option<u64>,
    pub ending: Ending,
}

impl End {
    pub fn new(codec: &ReceiptCodec, end: ClaimEnd) -> Self {
        let hash = end.id.hash();
        let fence = codec.open_token(hash, &end.token);
        // What is too large to keep need not wait in memory either.
        let ending = match end.ending {
            Ending::Complete { outcome, ttl_ms } => Ending::Complete { outcome: outcome.kept(), ttl_ms },
            ending => ending,
        };
        Self { id: end.id, hash, fence, ending }
    }

    pub fn bytes(&self) -> usize {
        match &self.ending {
            Ending::Complete { outcome, .. } => outcome.value.as_ref().map_or(0, |json| json.as_str().len()),
            Ending::Release | Ending::Doubt => 0,
        }
    }
}

/// What callers ask of the ledger.
pub(crate) enum LedgerOp {
    Claim {
        claiming: Box<Claiming>,
        /// When the caller asked: its wait counts from then.
        asked: Now,
        reply: Reply<Claimings>,
    },
    Renew {
        batch: Vec<Keep>,
        reply: Reply<Vec<Result<Remaining, TokenError>>>,
    },
    End {
        batch: Vec<End>,
        reply: Reply<Vec<Result<(), TokenError>>>,
    },
    Look {
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
            Self::End { batch, .. } => batch.iter().map(End::bytes).sum(),
            Self::Resolve { .. } => OUTCOME_BYTES_MAX,
            _ => 0,
        }
    }

    /// A renewal that a power cut takes back costs nothing: whoever opens the store gives every claim a full lease.
    pub fn is_light(&self) -> bool {
        matches!(self, Self::Renew { .. } | Self::Look { .. })
    }
}

/// A claim that waits.
pub(crate) struct ClaimWaiter {
    pub claiming: Box<Claiming>,
    pub deadline_ms: u64,
    pub reply: Reply<Claimings>,
}

#[derive(Default)]
pub(crate) struct ClaimWaiters {
    next: u64,
    /// By number: the smallest has waited longest.
    waiting: HashMap<u64, (u64, ClaimWaiter)>,
    by_entry: HashMap<u128, BTreeSet<u64>>,
    /// By when to try again.
    wakes: BTreeSet<(u64, u64)>,
}

impl ClaimWaiters {
    /// Has a claim wait, at the longest until `wake_ms`; gives it back if too many wait.
    pub fn add(&mut self, waiter: ClaimWaiter, wake_ms: u64) -> Result<(), ClaimWaiter> {
        if self.waiting.len() >= WAITERS_MAX {
            return Err(waiter);
        }
        let number = self.next;
        self.next += 1;
        self.put(number, waiter, wake_ms);
        Ok(())
    }

    /// Has a claim wait on in its old place.
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

    /// Takes out those who wait for an entry, longest first.
    pub fn of_entry(&mut self, hash: u128) -> Vec<(u64, ClaimWaiter)> {
        let numbers: Vec<_> = self.by_entry.get(&hash).into_iter().flatten().copied().collect();
        numbers.into_iter().filter_map(|number| Some((number, self.remove(number)?))).collect()
    }

    /// Takes out those whose time to try again has come, longest first.
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
