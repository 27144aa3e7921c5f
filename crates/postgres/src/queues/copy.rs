//! Queues and the ledger while they are copied to another store or from one: closed for every process on the database.
//!
//! Closing has two steps. The first marks the queue, and is seen by every statement that begins after it. The second waits
//! for the transactions that may have read the queue before: each holds a lock on the table until it ends, and no
//! transaction that begins later is waited for. Above READ COMMITTED a transaction sees less than that; see
//! `migrations/0006_copy.sql`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::copy::{LEDGER_COPY, check_open, pause_for_copy};
use hapax_core::{
    AdminError, CopyState, DocumentName, Documents as _, ExpectedRevision, Json, QueueName, QueuePause,
    RedriveTask, StoreError, TransferScope,
};
use sqlx::{PgConnection, Row as _};

use super::{Inner, Queue, admin, catalogue, write};
use crate::error::{Access, Failure};
use crate::{BoxFuture, PostgresStore};

/// How long closing waits for a transaction that began before.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

impl Queue {
    pub(super) fn copy(&self) -> Option<&CopyState> {
        self.paused.as_ref().and_then(|paused| paused.copy.as_ref())
    }

    pub(super) fn is_closed(&self) -> bool {
        self.copy().is_some()
    }

    pub(super) fn check_open(&self) -> Result<(), StoreError> {
        check_open(&self.name, self.paused.as_ref())
    }

    /// The queue of a name, unless it is closed.
    pub(super) async fn get_open(db: &mut PgConnection, name: &QueueName) -> Result<Self, Failure> {
        let queue = Self::get(db, name).await?;
        queue.check_open()?;
        Ok(queue)
    }

    /// The queue of a name, unless it is closed because it was copied to another store.
    pub(super) async fn get_for_import(db: &mut PgConnection, name: &QueueName) -> Result<Self, Failure> {
        let queue = Self::get(db, name).await?;
        if let Some(CopyState::To { .. }) = queue.copy() {
            queue.check_open()?;
        }
        Ok(queue)
    }
}

/// Sets the pause of a queue for a copy; gives the queue as it was.
async fn set_pause(
    db: &mut PgConnection,
    name: &QueueName,
    state: Option<CopyState>,
    by: &str,
) -> Result<Queue, Failure> {
    let sql = format!("SELECT {} FROM hapax.q_queue WHERE name = $1 FOR UPDATE", catalogue::COLUMNS);
    let row = sqlx::query(&sql).bind(name.as_str()).fetch_optional(&mut *db).await?;
    let Some(row) = row else { return Err(StoreError::NoSuchQueue(name.clone()).into()) };
    let queue = Queue::read(&row)?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let pause = pause_for_copy(queue.paused.clone(), state, now_ms, by);
    if pause != queue.paused {
        let what = match pause.as_ref().and_then(|pause| pause.copy.as_ref()) {
            Some(state) => format!("closed queue {name}: {}", state.refusal(&format!("queue {name}"))),
            None => format!("opened queue {name} after a copy"),
        };
        admin::audit(db, by, what).await?;
        store_pause(db, queue.id, pause.as_ref()).await?;
    }
    Ok(queue)
}

async fn store_pause(
    db: &mut PgConnection,
    queue_id: i32,
    pause: Option<&QueuePause>,
) -> Result<(), Failure> {
    let json = pause.map(|pause| serde_json::to_string(pause).expect("a pause is plain data"));
    let sql = "UPDATE hapax.q_queue SET paused = $2, version = nextval('hapax.q_revision') WHERE id = $1";
    sqlx::query(sql).bind(queue_id).bind(json).execute(db).await?;
    Ok(())
}

/// A redrive that moves messages from or to a queue.
async fn redrive_of(db: &mut PgConnection, name: &QueueName) -> Result<Option<QueueName>, Failure> {
    let sql = "SELECT task FROM hapax.q_redrive WHERE running";
    for row in sqlx::query(sql).fetch_all(db).await? {
        let damaged = |error| StoreError::Damaged(format!("hapax.q_redrive: {error}"));
        let task: RedriveTask = serde_json::from_str(row.try_get("task")?).map_err(damaged)?;
        if task.from == *name || task.to.as_ref() == Some(name) {
            return Ok(Some(task.from));
        }
    }
    Ok(None)
}

/// After every older transaction has ended: receipts of the deliveries under way end nothing any more. If a redrive was
/// started meanwhile, the queue gets its former pause back.
async fn finish_closing(db: &mut PgConnection, before: &Queue) -> Result<Option<QueueName>, Failure> {
    let redrive = redrive_of(db, &before.name).await?;
    if redrive.is_some() {
        store_pause(db, before.id, before.paused.as_ref()).await?;
    } else {
        // Once: a copy that is continued finds the same fences.
        let sql = "UPDATE hapax.q_claim SET fence = nextval('hapax.fence'), received_ms = NULL \
                   WHERE queue_id = $1 AND received_ms IS NOT NULL";
        sqlx::query(sql).bind(before.id).execute(db).await?;
    }
    Ok(redrive)
}

impl Inner {
    /// The queue as this process knows it; one that is closed is read again.
    pub(super) async fn open_queue(&self, name: &QueueName) -> Result<Arc<Queue>, StoreError> {
        let mut queue = self.queue(name).await?;
        if queue.is_closed() {
            queue = self.read_queue(name).await?;
            queue.check_open()?;
        }
        Ok(queue)
    }

    async fn set_queue_copy(
        &self,
        name: &QueueName,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let closes = matches!(state, Some(CopyState::To { .. }));
        let args = Arc::new((name.clone(), state, by.to_owned()));
        let set = self.transact("close or open a queue", move |db| {
            let args = args.clone();
            Box::pin(async move { set_pause(db, &args.0, args.1.clone(), &args.2).await }) as BoxFuture<'_, _>
        });
        let before: Result<Queue, StoreError> = set.await;
        self.forget(name);
        let before = Arc::new(before?);
        self.freed(before.id);
        // A queue that was closed before a crash may have been closed by the first step only.
        if !closes {
            return Ok(());
        }
        self.wait_for_older("hapax.q_queue").await?;
        let queue = before.clone();
        let finished = self.transact("close a queue", move |db| {
            let queue = queue.clone();
            Box::pin(async move { finish_closing(db, &queue).await }) as BoxFuture<'_, _>
        });
        let redrive: Result<Option<QueueName>, StoreError> = finished.await;
        self.forget(name);
        redrive?.map_or(Ok(()), |from| Err(AdminError::RedriveRunning(from)))
    }

    /// Waits until the transactions have ended that have used a table before.
    async fn wait_for_older(&self, table: &'static str) -> Result<(), AdminError> {
        let older = self.base.pool.run("look for older transactions", Access::Read, move |db| {
            Box::pin(async move {
                let sql = "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE relation = $1::regclass AND granted \
                           AND pid IS DISTINCT FROM pg_backend_pid() \
                           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
                Ok(sqlx::query_scalar::<_, String>(sql).bind(table).fetch_all(db).await?)
            })
        });
        let older = Arc::new(older.await?);
        let began = Instant::now();
        loop {
            let asked = older.clone();
            let left = self.base.pool.run("wait for older transactions", Access::Read, move |db| {
                Box::pin(async move {
                    let sql = "SELECT pid FROM pg_locks WHERE virtualtransaction = ANY($1) AND relation = $2::regclass LIMIT 1";
                    let pid: Option<Option<i32>> = sqlx::query_scalar(sql)
                        .bind(asked.as_slice())
                        .bind(table)
                        .fetch_optional(db)
                        .await?;
                    Ok(pid)
                })
            });
            let Some(pid) = left.await? else { return Ok(()) };
            if began.elapsed() > WAIT_MAX {
                let who = pid.map_or_else(
                    || "a prepared transaction".to_owned(),
                    |pid| format!("the transaction of server process {pid}"),
                );
                return Err(AdminError::Refused(format!(
                    "{who} began before the queue was closed and has not ended for {} s; end it and repeat",
                    WAIT_MAX.as_secs()
                )));
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Why the ledger is closed, if it is.
pub(super) async fn ledger_copy(db: &mut PgConnection) -> Result<Option<CopyState>, Failure> {
    let sql = "SELECT value FROM hapax.document WHERE name = $1";
    let value: Option<String> = sqlx::query_scalar(sql).bind(LEDGER_COPY).fetch_optional(db).await?;
    let damaged = |error| StoreError::Damaged(format!("the document {LEDGER_COPY}: {error}"));
    Ok(value.map(|value| serde_json::from_str(&value).map_err(damaged)).transpose()?)
}

impl PostgresStore {
    pub(super) async fn set_copy_of(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let inner = self.opened()?;
        if let TransferScope::Queue(name) = scope {
            return inner.set_queue_copy(name, state, by).await;
        }
        let name = DocumentName::new(LEDGER_COPY).expect("a valid name");
        let what = match &state {
            Some(state) => format!("closed the ledger: {}", state.ledger_refusal()),
            None => "opened the ledger after a copy".to_owned(),
        };
        let refused = |error: hapax_core::DocumentError| AdminError::Refused(error.to_string());
        if let Some(state) = &state {
            let value = Json::of(state).map_err(|error| StoreError::Invalid(error.to_string()))?;
            self.put_document(&name, value, ExpectedRevision::Any).await.map_err(refused)?;
        } else {
            self.delete_document(&name, ExpectedRevision::Any).await.map_err(refused)?;
        }
        let args = Arc::new((by.to_owned(), what, state.is_some()));
        let audited = inner.transact("close or open the ledger", move |db| {
            let args = args.clone();
            Box::pin(async move {
                if args.2 {
                    let sql = "UPDATE hapax.ledger_gate SET closed = closed + 1";
                    sqlx::query(sql).execute(&mut *db).await?;
                }
                admin::audit(db, &args.0, args.1.clone()).await
            }) as BoxFuture<'_, _>
        });
        let () = audited.await?;
        match state {
            Some(_) => inner.wait_for_older("hapax.document").await,
            None => Ok(()),
        }
    }

    pub(super) async fn ledger_copy_state(&self) -> Result<Option<CopyState>, StoreError> {
        let read = self.base.pool.run("read the state of the ledger", Access::Read, |db| {
            Box::pin(async move { ledger_copy(db).await })
        });
        read.await
    }
}
