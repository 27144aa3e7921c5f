//! Connections to the database, and the rule for giving one back: only one on which nothing is under way.
//!
//! It is not the pool of sqlx, for three reasons. That one waits for a server that refuses connections until its time is
//! over, while a store that is down has to say so at once. It returns a connection whose operation was cancelled. And it
//! makes a round trip whenever a connection is taken and given back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hapax_core::StoreError;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Access, Failure, broken, late};
use crate::transaction::{Transaction, repeat_conflicts};
use crate::{BoxFuture, connect, pooled};

/// A connection that was idle for longer is tested before it is used.
const TEST_AFTER: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is closed when the next one is taken.
const IDLE_MAX: Duration = Duration::from_mins(1);
/// After a failed connect, further ones fail at once for this long, so that a server that is down is not flooded.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);

/// Queues are empty at times and full at others, and rows that were deleted stay in tables and indexes while a transaction is
/// open for long: what the planner knows of them is out of date. Functions of the hot path have these settings themselves.
const PLANS: &str = "SELECT set_config(name, 'off', false)
                     FROM unnest(ARRAY['enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin']) name";

/// Bounds on the use of the database.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Maximum count of connections.
    pub connections_max: usize,
    /// Time for opening a connection, or for waiting until one is free.
    pub connect: Duration,
    /// Time for one operation.
    pub operation: Duration,
}

struct Idle {
    connection: PgConnection,
    since: Instant,
    epoch: u64,
}

#[derive(Default)]
struct State {
    idle: Vec<Idle>,
    /// Grows whenever a connection breaks: those that are older are tested before they are used.
    epoch: u64,
    failed: Option<(Instant, String)>,
    closed: bool,
}

struct Inner {
    options: PgConnectOptions,
    bounds: Bounds,
    permits: Arc<Semaphore>,
    state: Mutex<State>,
    runtime: Handle,
    has_schema: AtomicBool,
    pooler: bool,
    /// Indexes are used whatever the statistics say.
    own: bool,
}

/// The connections of one store. It belongs to the runtime on which it was made.
#[derive(Clone)]
pub(crate) struct Pool {
    inner: Arc<Inner>,
}

/// A connection that was taken. It is closed when dropped, unless it is given back.
pub(crate) struct Taken {
    pub connection: PgConnection,
    epoch: u64,
    permit: OwnedSemaphorePermit,
}

impl Pool {
    /// `own`: only statements of the store run here, on a server whose planner is PostgreSQL's.
    pub fn new(options: PgConnectOptions, bounds: Bounds, pooler: bool, own: bool) -> Self {
        let permits = Arc::new(Semaphore::new(bounds.connections_max));
        let (state, runtime) = (Mutex::default(), Handle::current());
        let has_schema = AtomicBool::new(false);
        Self { inner: Arc::new(Inner { options, bounds, permits, state, runtime, has_schema, pooler, own }) }
    }

    pub fn runtime(&self) -> &Handle {
        &self.inner.runtime
    }

    /// Another pool to the same database, with its own bound, for statements of users.
    pub fn sibling(&self, connections_max: usize, application_name: &str) -> Self {
        let inner = &self.inner;
        let options = inner.options.clone().application_name(application_name);
        let bounds = Bounds { connections_max, ..inner.bounds };
        let sibling = Self::new(options, bounds, inner.pooler, false);
        sibling.set_has_schema();
        sibling
    }

    pub fn bounds(&self) -> Bounds {
        self.inner.bounds
    }

    /// Grows whenever a connection breaks.
    pub fn epoch(&self) -> u64 {
        self.state().epoch
    }

    /// Runs an operation on a connection, in a task of its own: a caller that is dropped does not interrupt it.
    pub async fn run<T, F>(&self, what: &'static str, access: Access, operation: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + 'static,
    {
        let pool = self.clone();
        let task = self.inner.runtime.spawn(async move { pool.run_here(what, access, operation).await });
        task.await.unwrap_or_else(|error| Err(broken(what, &error.to_string(), access)))
    }

    /// The same for an operation that may lose against another transaction: it is then repeated.
    pub async fn repeat<T, F>(
        &self,
        what: &'static str,
        access: Access,
        operation: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync + 'static,
    {
        self.run(what, access, move |connection| {
            Box::pin(async move { repeat_conflicts(connection, &operation).await })
        })
        .await
    }

    /// As [`repeat`](Self::repeat), in the caller's task. The caller must not be cancelled by a user.
    pub async fn repeat_here<T, F>(
        &self,
        what: &'static str,
        access: Access,
        operation: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync + 'static,
    {
        self.run_here(what, access, move |connection| {
            Box::pin(async move { repeat_conflicts(connection, &operation).await })
        })
        .await
    }

    /// Runs an operation on a connection, in the caller's task. The caller must not be cancelled by a user.
    pub async fn run_here<T, F>(
        &self,
        what: &'static str,
        access: Access,
        operation: F,
    ) -> Result<T, StoreError>
    where
        F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send,
    {
        let mut taken = self.take(what).await?;
        let limit = self.inner.bounds.operation;
        let mut begun = false;
        let run = self.run_on(&mut taken.connection, &mut begun, operation);
        match tokio::time::timeout(limit, run).await {
            Ok(Ok(done)) => {
                self.give_back(taken);
                Ok(done)
            }
            Ok(Err(failure)) => {
                // A transaction that the operation has left is rolled back before someone else uses the connection. Of one that
                // has only begun, sqlx does not know.
                let db = &mut taken.connection;
                let usable = failure.leaves_connection()
                    && if begun { answers(db, limit).await } else { rolls_back(db, limit).await };
                if usable {
                    self.give_back(taken);
                } else {
                    self.state().epoch += 1;
                }
                Err(failure.into_store_error(what, access))
            }
            // Dropping the connection closes it; the server's own statement timeout ends what runs there.
            Err(_) => Err(late(what, limit, access)),
        }
    }

    /// `begun`: what is open on the connection afterwards is known to sqlx.
    async fn run_on<T, F>(
        &self,
        connection: &mut PgConnection,
        begun: &mut bool,
        operation: F,
    ) -> Result<T, Failure>
    where
        F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send,
    {
        if !self.inner.pooler {
            *begun = true;
            return operation(connection).await;
        }
        let first = pooled::begin(self.inner.bounds.operation, self.inner.has_schema.load(Ordering::Relaxed));
        let mut transaction = Transaction::begin_with(connection, first).await?;
        *begun = true;
        let done = operation(&mut transaction).await;
        transaction.end(done).await
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn take(&self, what: &str) -> Result<Taken, StoreError> {
        let Bounds { connections_max, connect, .. } = self.inner.bounds;
        let permit = tokio::time::timeout(connect, self.inner.permits.clone().acquire_owned()).await;
        let permit = match permit {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(closed()),
            Err(_) => {
                return Err(StoreError::Overloaded(format!(
                    "{what}: all {connections_max} connections to PostgreSQL were busy for {} ms",
                    connect.as_millis()
                )));
            }
        };
        loop {
            let (idle, epoch) = {
                let mut state = self.state();
                if state.closed {
                    return Err(closed());
                }
                state.idle.retain(|idle| idle.since.elapsed() < IDLE_MAX);
                (state.idle.pop(), state.epoch)
            };
            let Some(mut idle) = idle else {
                return Ok(Taken { connection: self.connect(what).await?, epoch, permit });
            };
            let doubtful = idle.epoch != epoch || idle.since.elapsed() > TEST_AFTER;
            if !doubtful || answers(&mut idle.connection, connect).await {
                return Ok(Taken { connection: idle.connection, epoch, permit });
            }
            self.state().epoch += 1;
        }
    }

    /// Gives back a connection on which nothing is under way.
    pub fn give_back(&self, taken: Taken) {
        let mut state = self.state();
        if !state.closed {
            state.idle.push(Idle { connection: taken.connection, since: Instant::now(), epoch: taken.epoch });
        }
        drop(taken.permit);
    }

    async fn connect(&self, what: &str) -> Result<PgConnection, StoreError> {
        if let Some((at, problem)) = &self.state().failed
            && at.elapsed() < CONNECT_PAUSE
        {
            return Err(StoreError::Unavailable(format!("{what}: {problem}")));
        }
        let limit = self.inner.bounds.connect;
        let problem = match tokio::time::timeout(limit, self.open()).await {
            Ok(Ok(connection)) => {
                self.state().failed = None;
                return Ok(connection);
            }
            Ok(Err(error)) => format!("no connection to PostgreSQL: {}", connect::refusal(&error)),
            Err(_) => format!("no connection to PostgreSQL within {} ms", limit.as_millis()),
        };
        self.state().failed = Some((Instant::now(), problem.clone()));
        Err(StoreError::Unavailable(format!("{what}: {problem}")))
    }

    async fn open(&self) -> Result<PgConnection, sqlx::Error> {
        let mut connection = PgConnection::connect_with(&self.inner.options).await?;
        // Behind a pooler every transaction does so.
        if self.inner.has_schema.load(Ordering::Relaxed) && !self.inner.pooler {
            sqlx::query("SELECT hapax.raise_fence()").execute(&mut connection).await?;
            // A claim must not be lost after it was granted. Set in any case: a session that has not set it follows a later change
            // of the server's configuration.
            let sql = "SELECT set_config('synchronous_commit',
                         coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)";
            sqlx::query(sql).execute(&mut connection).await?;
            if self.inner.own {
                sqlx::query(PLANS).execute(&mut connection).await?;
            }
        }
        Ok(connection)
    }

    /// The schema is there: from now on, every new connection brings the fences up to the clock. The ones that were opened
    /// before have not done so, and are closed.
    pub fn set_has_schema(&self) {
        self.inner.has_schema.store(true, Ordering::Relaxed);
        let early = std::mem::take(&mut self.state().idle);
        drop(early);
    }

    /// Closes idle connections, and lets no other be taken.
    pub fn close(&self) {
        let idle = {
            let mut state = self.state();
            state.closed = true;
            std::mem::take(&mut state.idle)
        };
        self.inner.permits.close();
        drop(idle);
    }
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}

async fn answers(connection: &mut PgConnection, limit: Duration) -> bool {
    matches!(tokio::time::timeout(limit, connection.ping()).await, Ok(Ok(())))
}

/// Ends a transaction whose beginning failed: the server has begun it, and is in it, if a later statement of the same text failed.
async fn rolls_back(connection: &mut PgConnection, limit: Duration) -> bool {
    matches!(tokio::time::timeout(limit, connection.execute(sqlx::raw_sql("ROLLBACK"))).await, Ok(Ok(_)))
}
