//! Idempotency for HTTP: a request that is sent twice takes effect once.
//!
//! [`IdempotencyLayer`] is a tower layer for axum and any other tower service, over any
//! [`Ledger`](hapax_core::Ledger). It follows draft-ietf-httpapi-idempotency-key-header-07:
//!
//! | request | response |
//! |---|---|
//! | first with its key | runs; the response is recorded, then sent |
//! | the same again | the recorded response, with `Idempotent-Replayed: true` |
//! | the same, while the first runs | waits for its response; 409 with `Retry-After` if that takes too long |
//! | another request with the same key | 422 |
//! | without a key where one is required, or with a malformed one | 400 |
//! | after an interrupted run | 409 until an operator decides, or another run: [`Policy::on_doubt`] |
//! | while the ledger is down | 503 with `Retry-After`, or unprotected and counted: [`Policy::on_outage`] |
//!
//! With the feature `proxy`, [`proxy`] provides the same in front of any HTTP service.
//!
//! Limits: the effect happens once if the service acts only through requests that came through the layer. An
//! interrupted run (a crash, a lost connection, a 5xx) is *in doubt*. The policy decides whether it is run again; then
//! the effect happens once only if the service honours the key or the fence that it is sent.

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
mod span;
mod stored;

use hapax_net::{body, problem};

pub use counters::Counters;
pub use hapax_net::body::{Body, BoxError};
pub use headers::{HAPAX_FENCE, HAPAX_TAKEOVER};
pub use key::{IDEMPOTENCY_KEY, X_IDEMPOTENCY_KEY};
pub use layer::{Builder, Idempotency, IdempotencyLayer, KeyedRun};
pub use policy::{ConfigError, EffectVerdict, OnOutage, Policy, Statuses};
pub use scope::{Tenant, TenantFunction};
pub use stored::{IDEMPOTENT_REPLAYED, OutcomeError, check_resolution};
