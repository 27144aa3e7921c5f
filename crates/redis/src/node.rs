//! Connections to one node.

use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Semaphore;

use crate::connect::{Target, UrlError};

/// Why a node gave no answers at all.
#[derive(Debug, Clone)]
pub(crate) enum NoAnswer {
    /// Nothing was sent.
    Unreachable(String),
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
    /// Connections for calls that wait for replicas, which would block the others.
    idle: Mutex<Vec<MultiplexedConnection>>,
    permits: Semaphore,
    /// Held while the scripts are loaded.
    pub loading: tokio::sync::Mutex<()>,
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
            idle: Mutex::default(),
            permits: Semaphore::new(options.connections_max),
            loading: tokio::sync::Mutex::default(),
        })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<MultiplexedConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, NoAnswer> {
        let connected = self.client.get_multiplexed_async_connection_with_config(&self.config).await;
        connected.map_err(|error| NoAnswer::Unreachable(format!("{}: {error}", self.address)))
    }

    /// Sends commands on the shared connection: one answer each.
    pub async fn ask(&self, pipeline: &Pipeline) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        let mut connection = {
            let mut shared = self.shared.lock().await;
            match &*shared {
                Some(connection) => connection.clone(),
                None => shared.insert(self.connect().await?).clone(),
            }
        };
        let answers = pipeline.query_async(&mut connection).await;
        if answers.is_err() {
            *self.shared.lock().await = None;
        }
        self.answers(answers)
    }

    /// Sends commands on a connection that no other call uses.
    pub async fn ask_alone(&self, pipeline: &Pipeline) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let idle = self.idle().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let answers = pipeline.query_async(&mut connection).await;
        if answers.is_ok() {
            self.idle().push(connection);
        } else {
            // The others lead to the same server, which was perhaps restarted.
            self.idle().clear();
        }
        self.answers(answers)
    }

    fn answers(
        &self,
        answers: Result<Vec<RedisResult<Value>>, RedisError>,
    ) -> Result<Vec<RedisResult<Value>>, NoAnswer> {
        answers.map_err(|error| NoAnswer::Lost(format!("{}: {error}", self.address)))
    }
}

/// An empty pipeline whose answers may be errors.
pub(crate) fn pipeline() -> Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.ignore_errors();
    pipeline
}
