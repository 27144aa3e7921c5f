//! The native JSON API under `/v1`: all operations of the store's traits, for any language.
//!
//! The JSON is defined in [`hapax_client::wire`], which both ends share; `openapi.json` beside this file describes it
//! and is served. A new route goes into `ROUTES` or `OPERATOR_ROUTES`, and into `openapi.json`; a test compares the two.
//!
//! | file | content |
//! |---|---|
//! | `messages.rs` | send, receive, settle, extend |
//! | `claims.rs` | the ledger: claims, and operations on them for operators |
//! | `documents.rs` | named JSON documents |
//! | `queues.rs` | queues and their configuration |
//! | `backups.rs` | where backups may be written |
//! | `metrics.rs` | `/metrics`, outside of `/v1` |
//! | `operate.rs` | looking at messages, parked ones, halted groups, redrives, the store itself |
//! | `stories.rs` | what happened to a message or key and why; advice |
//! | `polls.rs` | receives and claims that wait: counted, and receives cancelled |
//! | `input.rs`, `problem.rs` | requests read strictly, errors as problem details |

mod backups;
mod claims;
mod documents;
mod input;
mod messages;
mod metrics;
mod operate;
mod problem;
mod queues;
mod stories;
#[cfg(test)]
mod tests;
mod transfer;
mod waiting_receives;

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use hapax_core::metrics::Sample;
use hapax_core::store::SharedStore;
use hapax_net::listen::Shutdown;
use hapax_observe::Observer;
use http::header::{CONTENT_TYPE, HeaderValue};

pub use self::backups::{Backup, Backups};
use self::metrics::{LastAdvice, ProcessSamples};
use self::problem::ApiError;
use self::waiting_receives::WaitingReceives;

/// Maximum size of a request body, in bytes: a few of the largest messages, escaped.
pub const BODY_BYTES_MAX: usize = 8 * 1024 * 1024;

/// The native API over one store. Cheap to clone.
#[derive(Clone)]
pub struct Native {
    api: Arc<Api>,
}

/// State shared by the handlers.
struct Api {
    store: SharedStore,
    shutdown: Shutdown,
    backups: Option<Backups>,
    waiting_receives: WaitingReceives,
    process_samples: ProcessSamples,
    observer: OnceLock<Arc<Observer>>,
    last_advice: LastAdvice,
}

impl Api {
    fn observer(&self) -> Option<&Observer> {
        self.observer.get().map(|observer| &**observer)
    }
}

/// The native API as a router. Requests must carry an [`Identity`](crate::auth::Identity) in their extensions, which
/// [`Server::with_router`](crate::Server::with_router) sees to.
pub fn router(store: SharedStore, shutdown: Shutdown, backups: Option<Backups>) -> Router {
    Native::new(store, shutdown, backups).router()
}

impl Native {
    /// The API over `store`. Long polls are answered empty when `shutdown` begins; `backups` is there where the
    /// store can be copied.
    pub fn new(store: SharedStore, shutdown: Shutdown, backups: Option<Backups>) -> Self {
        let (waiting_receives, process_samples, observer, last_advice) = Default::default();
        let api = Api { store, shutdown, backups, waiting_receives, process_samples, observer, last_advice };
        Self { api: Arc::new(api) }
    }

    /// Shows the counters that `read` returns on `/metrics`, too.
    pub fn add_samples(&self, read: impl Fn() -> Vec<Sample> + Send + Sync + 'static) {
        self.api.process_samples.add(Box::new(read));
    }

    /// Tells stories and gives advice by what this observer of the same store has seen, and shows its counters.
    pub fn observe(&self, observer: &Arc<Observer>) {
        let counted = observer.clone();
        if self.api.observer.set(observer.clone()).is_ok() {
            self.add_samples(move || counted.samples());
        }
    }

    /// Number of receives, and of claims that may wait, currently at the store.
    pub fn waiting_calls(&self) -> usize {
        self.api.waiting_receives.len()
    }

    /// The routes. Unknown paths under `/v1` get an error in the API's own format.
    pub fn router(&self) -> Router {
        self.nested(OPERATOR_ROUTES.iter().chain(ROUTES))
    }

    /// Only the routes with which operators look after a ledger and its store. Every other path, outside of `/v1` too, is
    /// answered in the API's own form.
    pub fn operator_router(&self) -> Router {
        self.nested(OPERATOR_ROUTES.iter()).fallback(|| async { ApiError::no_such_path() })
    }

    fn nested(&self, routes: impl Iterator<Item = &'static Route>) -> Router {
        let mut inner = Router::new();
        for (_, path, handler) in routes {
            inner = inner.route(path, handler());
        }
        let inner = inner
            .fallback(|| async { ApiError::no_such_path() })
            .method_not_allowed_fallback(|| async { ApiError::method_not_allowed() })
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(self.api.clone());
        let metrics = get(metrics::show).fallback(|| async { ApiError::method_not_allowed() });
        Router::new().route("/metrics", metrics).with_state(self.api.clone()).nest("/v1", inner)
    }
}

/// Method, path below `/v1`, handler.
type Route = (&'static str, &'static str, fn() -> MethodRouter<Arc<Api>>);

/// What operators of a ledger and its store need, `hapax doctor` and `hapax top` with their lists of queues among them.
const OPERATOR_ROUTES: &[Route] = &[
    ("get", "/queues", || get(queues::list)),
    ("get", "/stats", || get(queues::all_stats)),
    ("get", "/claims/{scope}/{key}", || get(claims::show)),
    ("delete", "/claims/{scope}/{key}", || delete(claims::forget)),
    ("post", "/claims/{scope}/{key}/resolve", || post(claims::resolve)),
    ("get", "/claims", || get(claims::list)),
    ("get", "/ledger", || get(claims::ledger)),
    ("get", "/advice", || get(stories::advise)),
    ("get", "/status", || get(operate::status)),
    ("get", "/examine", || get(operate::examine)),
    ("post", "/resume", || post(operate::resume)),
    ("post", "/backup", || post(operate::backup)),
    ("get", "/openapi.json", || get(openapi)),
];

/// Every other route.
const ROUTES: &[Route] = &[
    ("post", "/queues/{queue}/messages", || post(messages::send)),
    ("post", "/queues/{queue}/receive", || post(messages::receive)),
    ("delete", "/queues/{queue}/receives/{cancel_id}", || delete(messages::cancel_receive)),
    ("post", "/queues/{queue}/settle", || post(messages::settle)),
    ("post", "/queues/{queue}/extend", || post(messages::extend)),
    ("put", "/queues/{queue}", || put(queues::create)),
    ("get", "/queues/{queue}", || get(queues::show)),
    ("patch", "/queues/{queue}", || patch(queues::change)),
    ("delete", "/queues/{queue}", || delete(queues::remove)),
    ("put", "/queues/{queue}/config", || put(queues::replace)),
    ("get", "/queues/{queue}/stats", || get(queues::stats)),
    ("post", "/queues/{queue}/purge", || post(queues::purge)),
    ("post", "/queues/{queue}/pause", || post(queues::pause)),
    ("post", "/queues/{queue}/resume", || post(queues::resume)),
    ("get", "/queues/{queue}/messages", || get(operate::browse)),
    ("get", "/queues/{queue}/messages/{id}/story", || get(stories::of_message)),
    ("get", "/queues/{queue}/observed", || get(stories::observed)),
    ("get", "/queues/{queue}/keys/{key}/stories", || get(stories::of_key)),
    ("post", "/queues/{queue}/discard", || post(operate::discard)),
    ("post", "/queues/{queue}/release", || post(operate::release)),
    ("get", "/queues/{queue}/halted", || get(operate::halted)),
    ("post", "/queues/{queue}/halted/{group}/release", || post(operate::release_group)),
    ("post", "/redrives", || post(operate::start_redrive)),
    ("get", "/redrives", || get(operate::redrives)),
    ("delete", "/redrives/{id}", || delete(operate::cancel_redrive)),
    ("post", "/claims", || post(claims::claim_batch)),
    ("post", "/claims/renew", || post(claims::renew_batch)),
    ("post", "/claims/end", || post(claims::end_batch)),
    ("put", "/claims/{scope}/{key}", || put(claims::claim)),
    ("post", "/claims/{scope}/{key}/complete", || post(claims::complete)),
    ("post", "/claims/{scope}/{key}/renew", || post(claims::renew)),
    ("post", "/claims/{scope}/{key}/release", || post(claims::release)),
    ("get", "/documents", || get(documents::list)),
    ("get", "/documents/{*name}", || get(documents::show)),
    ("put", "/documents/{*name}", || put(documents::put)),
    ("delete", "/documents/{*name}", || delete(documents::remove)),
    ("get", "/transfer", || get(transfer::fence)),
    ("post", "/transfer/fence", || post(transfer::raise_fence)),
    ("get", "/transfer/copy", || get(transfer::ledger_copy)),
    ("post", "/transfer/copy", || post(transfer::set_copy)),
    ("get", "/transfer/items", || get(transfer::export)),
    ("post", "/transfer/items", || post(transfer::import)),
];

/// The API's OpenAPI 3.1 description.
pub const OPENAPI: &str = include_str!("openapi.json");

async fn openapi() -> impl axum::response::IntoResponse {
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], OPENAPI)
}
