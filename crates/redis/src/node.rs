//! Connections to one node.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::connect::{Target, UrlError};

/// Why a node gave no answers at all.
#[derive(Debug, Clone)]
pub(crate) enum NoAnswer {
    /// Nothing was sent.
    Unreachable(String),
    /// Nothing was sent: all connections were in use.
    Busy(String),
    /// It was sent; what happened is not known.
    Lost(String),
}

/// A node of the store, with its connections.
pub(crate) struct Node {
    pub address: String,
    client: Client,
    config: AsyncConnectionConfig,
    /// One connection for all calls that do not block it.
    shared: tokio::sync::Mutex<Option<MultiplexedConnection>>,
    /// When the last attempt to connect failed, and why.
    failed: Mutex<Option<(Instant, String)>>,
    limit: Duration,
    /// Connections for calls that wait for replicas, which would block the others.
    idle: Mutex<Vec<MultiplexedConnection>>,
    permits: Semaphore,
    /// Held while the scripts are loaded; when that was done last.
    pub loading: tokio::sync::Mutex<Option<Instant>>,
    /// How often the node was seen to take shards over, and up to which of these times it was made ready.
    takeovers: AtomicU64,
    ready_for: AtomicU64,
}

impl Node {
    pub fn new(target: &Target, address: &str, is_sentinel: bool) -> Result<Self, UrlError> {
        let info = target.info(address, is_sentinel)?;
        let client = Client::open(info).map_err(|error| UrlError(format!("the Redis URL: {error}")))?;
        let options = &target.options;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.operation_timeout));
        Ok(Self {
            address: address.to_owned(),
            client,
            config,
            shared: tokio::sync::Mutex::default(),
            failed: Mutex::default(),
            limit: options.call_limit(),
            idle: Mutex::default(),
            permits: Semaphore::new(options.connections_max),
            loading: tokio::sync::Mutex::default(),
            takeovers: AtomicU64::new(1),
            ready_for: AtomicU64::new(0),
        })
    }

    /// The node has become the owner of shards: it is not ready until [`Self::is_now_ready`].
    pub fn has_taken_over(&self) {
        self.takeovers.fetch_add(1, Ordering::AcqRel);
    }

    /// How often it has taken over.
    pub fn takeovers(&self) -> u64 {
        self.takeovers.load(Ordering::Acquire)
    }

    /// The scripts were loaded and open claims got a full lease, after this many takeovers.
    pub fn is_now_ready(&self, takeovers: u64) {
        self.ready_for.fetch_max(takeovers, Ordering::AcqRel);
    }

    pub fn is_ready(&self) -> bool {
        self.ready_for.load(Ordering::Acquire) == self.takeovers()
    }

    fn idle(&self) -> MutexGuard<'_, Vec<MultiplexedConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self) -> MutexGuard<'_, Option<(Instant, String)>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects, unless that has failed since this time: those who waited for an attempt share its end.
    async fn connect(&self, since: Instant) -> Result<MultiplexedConnection, NoAnswer> {
        if let Some((_, why)) = self.failed().as_ref().filter(|(at, _)| *at >= since) {
            return Err(NoAnswer::Unreachable(why.clone()));
        }
        let connected = self.client.get_multiplexed_async_connection_with_config(&self.config).await;
        connected.map_err(|error| {
            let why = format!("{}: {error}", self.address);
            *self.failed() = Some((Instant::now(), why.clone()));
            NoAnswer::Unreachable(why)
        })
    }

    fn late(&self) -> NoAnswer {
        NoAnswer::Unreachable(format!("{}: no connection in time", self.address))
    }

    /// Sends commands on the shared connection: one answer each, within the time of one call.
    pub async fn ask(&self, pipeline: &Pipeline) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        self.ask_until(pipeline, Instant::now() + self.limit).await
    }

    /// The same with an end.
    pub async fn ask_until(
        &self,
        pipeline: &Pipeline,
        end: Instant,
    ) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        let since = Instant::now();
        let connecting = async {
            let mut shared = self.shared.lock().await;
            match &*shared {
                Some(connection) => Ok(connection.clone()),
                None => Ok(shared.insert(self.connect(since).await?).clone()),
            }
        };
        let mut connection = timeout_at(end, connecting).await.map_err(|_| self.late())??;
        let answers = timeout_at(end, pipeline.query_async(&mut connection)).await;
        if !matches!(answers, Ok(Ok(_)))
            && let Ok(mut shared) = timeout_at(end, self.shared.lock()).await
        {
            *shared = None;
        }
        self.answers(answers)
    }

    /// Sends commands on a connection that no other call uses.
    pub async fn ask_alone(
        &self,
        pipeline: &Pipeline,
        end: Instant,
    ) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        let since = Instant::now();
        let Ok(permit) = timeout_at(end, self.permits.acquire()).await else {
            let why = format!("{}: all connections are in use by calls that wait for it", self.address);
            return Err(NoAnswer::Busy(why));
        };
        let _permit = permit.expect("the semaphore is never closed");
        let idle = self.idle().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => timeout_at(end, self.connect(since)).await.map_err(|_| self.late())??,
        };
        let answers = timeout_at(end, pipeline.query_async(&mut connection)).await;
        if matches!(answers, Ok(Ok(_))) {
            self.idle().push(connection);
        } else {
            // The others lead to the same server, which was perhaps restarted.
            self.idle().clear();
        }
        self.answers(answers)
    }

    fn answers(
        &self,
        answers: Result<Result<Vec<RedisResult<Value>>, RedisError>, tokio::time::error::Elapsed>,
    ) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        match answers {
            Ok(answers) => answers.map_err(|error| NoAnswer::Lost(format!("{}: {error}", self.address))),
            Err(_) => Err(NoAnswer::Lost(format!("{}: no answer in time", self.address))),
        }
    }
}

/// An empty pipeline whose answers may be errors.
pub(crate) fn pipeline() -> Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    pipeline
}
