//! One claim, renewed by heartbeats.

use std::sync::Arc;

use hapax_core::{ClaimEnding, EndClaim, EntryId, Fence, Receipt, Token};

use crate::claims::{Claims, EndError, Granted};
use crate::heartbeat::{LeaseKeeper, LeasedItem};
use crate::lease::{Lease, Phase};

struct LeasedClaim {
    granted: Granted,
    lease: Lease,
    lease_ms: u64,
}

impl LeasedItem for LeasedClaim {
    fn lease(&self) -> &Lease {
        &self.lease
    }

    fn lease_ms(&self) -> u64 {
        self.lease_ms
    }

    fn receipt(&self) -> Option<&Receipt> {
        None
    }

    fn claim(&self) -> Option<(&EntryId, &Token)> {
        Some((&self.granted.id, &self.granted.grant.token))
    }
}

/// A claim that is renewed until it is ended or dropped. After a drop it lapses with its lease and is in doubt, because
/// its holder may have caused the effect.
#[must_use = "dropped, the claim lapses"]
pub struct HeldClaim {
    leased: Arc<LeasedClaim>,
    claims: Claims,
    /// Its heartbeat renews the claim.
    _lease_keeper: Arc<LeaseKeeper>,
}

impl Claims {
    /// Renews a granted claim from now on, for `lease_ms` each time.
    pub fn hold(&self, lease_keeper: &Arc<LeaseKeeper>, granted: Granted, lease_ms: u64) -> HeldClaim {
        granted.mark_used();
        let lease = Lease::of_claim(granted.asked_us, granted.grant.lease_ms);
        lease.set_phase(Phase::Running);
        let leased = Arc::new(LeasedClaim { granted, lease, lease_ms });
        lease_keeper.add([leased.clone() as Arc<dyn LeasedItem>]);
        HeldClaim { leased, claims: self.clone(), _lease_keeper: lease_keeper.clone() }
    }
}

impl HeldClaim {
    /// The entry's lookup key.
    pub fn id(&self) -> &EntryId {
        &self.leased.granted.id
    }

    /// Grows with every grant of the key.
    pub fn fence(&self) -> Fence {
        self.leased.granted.grant.fence
    }

    /// The claim of an earlier holder lapsed: its effect may have happened.
    pub fn is_takeover(&self) -> bool {
        self.leased.granted.grant.takeover
    }

    /// The lease, as this process knows it.
    pub fn lease(&self) -> &Lease {
        &self.leased.lease
    }

    /// Completes when this holder has lost the claim, or may have: the ledger refused a renewal, or the lease ran out
    /// on this process's clock.
    pub async fn lost(&self) {
        self.leased.lease.cancelled().await;
    }

    /// Ends the claim; retries while the ledger does not answer. The claim is renewed meanwhile.
    pub async fn end(&self, ending: ClaimEnding) -> Result<(), EndError> {
        self.leased.lease.set_phase(Phase::Settling);
        let Granted { id, grant, .. } = &self.leased.granted;
        let end = EndClaim { id: id.clone(), token: grant.token.clone(), ending };
        let ended = self.claims.end(vec![end]).await.pop();
        self.leased.lease.set_phase(Phase::Over);
        ended.unwrap_or_else(|| Err(EndError::no_answer()))
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        self.leased.lease.set_phase(Phase::Over);
    }
}
