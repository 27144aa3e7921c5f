//! `/metrics`: everything that store, ledger and this process count, for Prometheus.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use hapax_core::StoreError;
use hapax_core::metrics::{self, Metrics as _, Sample};
use hapax_observe::advice;
use http::header::{CONTENT_TYPE, HeaderValue};

use super::Api;
use super::input::Caller;
use super::problem::ApiError;

/// Maximum time that the store is asked for its figures: less than Prometheus waits by default.
const STORE_TIMEOUT: Duration = Duration::from_secs(8);

/// How long findings are shown before they are made again.
const ADVICE_INTERVAL: Duration = Duration::from_secs(30);

hapax_core::metrics! {
    /// What a server knows about its store without asking it.
    #[derive(Debug, Clone, Copy)]
    struct StoreReachable is "hapax_server", kept by Process, labels [];
    plain {}
    nested {}
    /// Whether the store answered when this page was made; if not, its figures are missing below.
    gauge store_reachable,
}

/// A function that reads counters of this process.
type ReadSamples = Box<dyn Fn() -> Vec<Sample> + Send + Sync>;

/// Counters of this process that are kept elsewhere, for example by the proxies beside a server.
#[derive(Default)]
pub(super) struct ProcessSamples(Mutex<Vec<ReadSamples>>);

impl ProcessSamples {
    pub(super) fn add(&self, read: ReadSamples) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(read);
    }

    fn read(&self) -> Vec<Sample> {
        let sources = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sources.iter().flat_map(|read| read()).collect()
    }

    /// The sum of a counter over all its labels.
    pub(super) fn sum(&self, name: &str) -> u64 {
        self.read().iter().filter(|sample| sample.metric.name == name).map(|sample| sample.value).sum()
    }
}

/// The findings that the page showed last, and when they were made.
#[derive(Default)]
pub(super) struct LastAdvice(tokio::sync::Mutex<Option<(Instant, Vec<Sample>)>>);

impl Api {
    /// The findings as metrics. They ask for each queue again, so they are made at most twice a minute.
    async fn advice_samples(&self) -> Result<Vec<Sample>, StoreError> {
        let mut last = self.last_advice.0.lock().await;
        if let Some((made, samples)) = &*last
            && made.elapsed() < ADVICE_INTERVAL
        {
            return Ok(samples.clone());
        }
        let mut advice = self.advice(None, None).await?;
        advice.add_examination(&*self.store).await;
        let samples = advice::samples(&advice);
        *last = Some((Instant::now(), samples.clone()));
        Ok(samples)
    }
}

/// A key of some queues is shown these queues, and nothing about the store, the ledger or the process.
pub(super) async fn show(
    State(native): State<Arc<Api>>,
    caller: Caller,
) -> Result<([(http::HeaderName, HeaderValue); 1], String), ApiError> {
    caller.check_action("GetMetrics")?;
    let sees_all = caller.identity().may_see_all();
    let figures = async {
        if sees_all {
            let mut samples = metrics::of_store(&*native.store, Some(&*native.store)).await?;
            if native.observer().is_some() {
                samples.extend(native.advice_samples().await?);
            }
            return Ok(samples);
        }
        let shows = |queue: &hapax_core::QueueName| caller.check_queue("GetQueueAttributes", queue).is_ok();
        metrics::of_queues(&*native.store, &shows).await
    };
    let figures = match tokio::time::timeout(STORE_TIMEOUT, figures).await {
        Ok(figures) => figures,
        Err(_) => Err(StoreError::Unavailable(format!("no response within {} s", STORE_TIMEOUT.as_secs()))),
    };
    let mut samples = StoreReachable { store_reachable: u64::from(figures.is_ok()) }.samples(&[]);
    match figures {
        Ok(figures) => samples.extend(figures),
        Err(error) => tracing::warn!(%error, "metrics without the figures of the store"),
    }
    if sees_all {
        samples.extend(native.process_samples.read());
    }
    let content_type = (CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    Ok(([content_type], metrics::page(&samples)))
}
