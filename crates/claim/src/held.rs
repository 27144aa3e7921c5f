//! One claim, renewed by heartbeats.

use std::sync::Arc;

use hapax_core::{ClaimEnding, EndClaim, EntryId, Fence, Receipt, Token};

use crate::claims::{Claims, EndError, Granted};
use crate::heartbeat::{Held, Holder};
use crate::lease::{Lease, Phase};

struct Single {
    granted: Granted,
    lease: Lease,
    lease_ms: u64,
}

impl Held for Single {
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
    single: Arc<Single>,
    claims: Claims,
    /// Its heartbeat renews the claim.
    _holder: Arc<Holder>,
}

impl Claims {
    /// Renews a granted claim from now on, for `lease_ms` each time.
    pub fn hold(&self, holder: &Arc<Holder>, granted: Granted, lease_ms: u64) -> HeldClaim {
        granted.spend();
        let lease = Lease::of_claim(granted.asked_us, granted.grant.lease_ms);
        lease.enter(Phase::Running);
        let single = Arc::new(Single { granted, lease, lease_ms });
        holder.keep([single.clone() as Arc<dyn Held>]);
        HeldClaim { single, claims: self.clone(), _holder: holder.clone() }
    }
}

impl HeldClaim {
    /// The entry's lookup key.
    pub fn id(&self) -> &EntryId {
        &self.single.granted.id
    }

    /// Grows with every grant of the key.
    pub fn fence(&self) -> Fence {
        self.single.granted.grant.fence
    }

    /// The claim of an earlier holder lapsed: its effect may have happened.
    pub fn is_takeover(&self) -> bool {
        self.single.granted.grant.takeover
    }

    /// The lease, as this process knows it.
    pub fn lease(&self) -> &Lease {
        &self.single.lease
    }

    /// Completes when this holder has lost the claim, or may have: the ledger refused a renewal, or the lease ran out
    /// on this process's clock.
    pub async fn lost(&self) {
        self.single.lease.cancelled().await;
    }

    /// Ends the claim; retries while the ledger does not answer. The claim is renewed meanwhile.
    pub async fn end(&self, ending: ClaimEnding) -> Result<(), EndError> {
        self.single.lease.enter(Phase::Settling);
        let Granted { id, grant, .. } = &self.single.granted;
        let end = EndClaim { id: id.clone(), token: grant.token.clone(), ending };
        let ended = self.claims.end(vec![end]).await.pop();
        self.single.lease.enter(Phase::Over);
        ended.unwrap_or_else(|| Err(EndError::no_answer()))
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        self.single.lease.enter(Phase::Over);
    }
}
