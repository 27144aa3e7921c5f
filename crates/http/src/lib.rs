//! Idempotency for HTTP: a request that is sent twice takes effect once.
//!
//! [`IdempotencyLayer`] is a tower layer for axum and any other tower service, over any
//! [`Ledger`](hapax_core::Ledger). It follows draft-ietf-httpapi-idempotency-key-header-07:
//!
//! | request | answer |
//! |---|---|
//! | first with its key | runs; the answer is recorded, then sent |
//! | the same again | the recorded answer, with `Idempotent-Replayed: true` |
//! | the same, while the first runs | waits for its answer; 409 with `Retry-After` when that takes too long |
//! | another request with the same key | 422 |
//! | without a key where one is required, or with one of bad form | 400 |
//! | after a run that broke off | 409 until someone decides, or another run: [`Policy::on_doubt`] |
//! | while the ledger is down | 503 with `Retry-After`, or unprotected and counted: [`Policy::on_outage`] |
//!
//! With the feature `proxy`, [`proxy`] puts the same before any HTTP service.
//!
//! Boundary: the effect happens once as far as the service behind acts only through requests that came through the
//! layer. A run that breaks off (a crash, a cut connection, a 5xx) is *in doubt*; whether it is run again is the
//! policy's to say, and once only if the service honours the key or the fence that it is sent.

mod canonical;
mod counters;
mod fingerprint;
mod headers;
mod key;
mod layer;
mod media;
mod path;
mod policy;
#[cfg(feature = "proxy")]
pub mod proxy;
mod run;
mod scope;
mod stored;

use hapax_net::{body, problem};

pub use counters::Counters;
pub use hapax_net::body::{Body, BoxError};
pub use headers::{HAPAX_FENCE, HAPAX_TAKEOVER};
pub use key::{IDEMPOTENCY_KEY, X_IDEMPOTENCY_KEY};
pub use layer::{Builder, Idempotency, IdempotencyLayer, KeyedRun};
pub use policy::{ConfigError, OnOutage, Policy, Statuses, Verdict};
pub use scope::{Tenant, TenantFunction};
pub use stored::{IDEMPOTENT_REPLAYED, OutcomeError, check_resolution};
