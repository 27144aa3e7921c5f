//! The one way to hold a claim of a ledger: request it with retries, confirm it if the answer came late, renew it by
//! heartbeats on a separate thread, detect its loss, end it with retries, and release it if nothing ran under it.
//!
//! The worker, the HTTP layer and `idempotent` hold their claims through this crate; no other code in this repository
//! renews or ends one. All times come from a [`Clock`](hapax_core::Clock), so that a test can control them.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::sync::Arc;
//! use hapax_claim::{ClaimResponse, Claims, LeaseKeeper, Owners, Timer};
//! use hapax_core::{ClaimRequest, ClaimEnding, EntryId, Json, RecordedOutcome};
//!
//! let timer = Timer::system();
//! let ledger = hapax_conformance::MemoryStore::new(Arc::new(hapax_core::SystemClock::default()));
//! let claims = Claims::new(ledger.clone(), timer.clone());
//! let lease_keeper = LeaseKeeper::new(None, Some(ledger), timer, Arc::new(()))?;
//!
//! let id = EntryId::new("payments".parse()?, "order-7".parse()?);
//! let request = ClaimRequest::new(id, Owners::new("example").next(), 30_000);
//! let ClaimResponse::Granted(granted) = claims.claim(vec![request]).await.remove(0) else { panic!("it is free") };
//! let held = claims.hold(&lease_keeper, granted, 30_000);
//! tokio::select! {
//!     () = held.lost() => { /* another holder may have the key: stop */ }
//!     () = async { /* the effect */ } => {
//!         let outcome = RecordedOutcome::done(Json::of("paid")?);
//!         held.end(ClaimEnding::Complete { outcome, ttl_ms: 86_400_000 }).await?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod claims;
mod heartbeat;
mod held_claim;
mod lease;
mod owner;
mod time;

pub use claims::{ClaimResponse, Claims, EndError, Granted};
pub use heartbeat::{HeartbeatEvents, LeaseKeeper, LeasedItem};
pub use held_claim::HeldClaim;
pub use lease::{Lease, NEVER, Phase, StopReason};
pub use owner::Owners;
pub use time::Timer;
