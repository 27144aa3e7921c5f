//! Queues by name: their configuration, with what a process remembers of it.

use std::sync::Arc;

use hapax_core::{QueueConfig, QueueInfo, QueueName, QueuePause, Revision, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::{Inner, lock};
use crate::error::{Access, Failure};

/// A queue as it was read.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    pub id: i32,
    pub name: QueueName,
    pub config: QueueConfig,
    pub revision: Revision,
    /// Grows with every change, also with those that are not changes of the configuration.
    pub version: i64,
    pub created_ms: u64,
    pub modified_ms: u64,
    pub purged_ms: Option<u64>,
    pub paused: Option<QueuePause>,
    /// The priorities that were ever used, a bit for each.
    pub priorities: i32,
    /// A message had a group.
    pub grouped: bool,
}

pub(super) const COLUMNS: &str =
    "id, name, config, revision, version, created_ms, modified_ms, purged_ms, paused, prios, grouped";

fn damaged(what: impl std::fmt::Display) -> Failure {
    Failure::Store(StoreError::Damaged(format!("hapax.q_queue: {what}")))
}

impl Queue {
    pub(super) fn read(row: &PgRow) -> Result<Self, Failure> {
        let ms = |name: &str| row.try_get::<i64, _>(name).map(|ms| ms as u64);
        let paused: Option<String> = row.try_get("paused")?;
        Ok(Self {
            id: row.try_get("id")?,
            name: QueueName::new(row.try_get::<String, _>("name")?).map_err(damaged)?,
            config: serde_json::from_str(&row.try_get::<String, _>("config")?).map_err(damaged)?,
            revision: Revision(ms("revision")?),
            version: row.try_get("version")?,
            created_ms: ms("created_ms")?,
            modified_ms: ms("modified_ms")?,
            purged_ms: row.try_get::<Option<i64>, _>("purged_ms")?.map(|ms| ms as u64),
            paused: paused.map(|json| serde_json::from_str(&json)).transpose().map_err(damaged)?,
            priorities: row.try_get("prios")?,
            grouped: row.try_get("grouped")?,
        })
    }

    pub(super) async fn find(db: &mut PgConnection, name: &QueueName) -> Result<Option<Self>, Failure> {
        let sql = format!("SELECT {COLUMNS} FROM hapax.q_queue WHERE name = $1");
        let row = sqlx::query(&sql).bind(name.as_str()).fetch_optional(db).await?;
        row.as_ref().map(Self::read).transpose()
    }

    pub(super) async fn by_id(db: &mut PgConnection, id: i32) -> Result<Option<Self>, Failure> {
        let sql = format!("SELECT {COLUMNS} FROM hapax.q_queue WHERE id = $1");
        let row = sqlx::query(&sql).bind(id).fetch_optional(db).await?;
        row.as_ref().map(Self::read).transpose()
    }

    pub(super) async fn get(db: &mut PgConnection, name: &QueueName) -> Result<Self, Failure> {
        Self::find(db, name).await?.ok_or_else(|| StoreError::NoSuchQueue(name.clone()).into())
    }

    /// The queue that takes its dead letters; `None` also if that was deleted.
    pub(super) async fn dead_letters(&self, db: &mut PgConnection) -> Result<Option<Self>, Failure> {
        match &self.config.dead_letter {
            Some(policy) => Self::find(db, &policy.queue).await,
            None => Ok(None),
        }
    }

    pub(super) fn info(self) -> QueueInfo {
        QueueInfo {
            name: self.name,
            config: self.config,
            revision: self.revision,
            created_ms: self.created_ms,
            modified_ms: self.modified_ms,
            paused: self.paused,
        }
    }

    /// The priorities to look for, highest first.
    pub(super) fn priorities(&self) -> Vec<i16> {
        (0..10).rev().filter(|priority| self.priorities & (1 << priority) != 0).collect()
    }
}

impl Inner {
    /// A queue as this process knows it. Whoever relies on it compares its version in the same statement.
    pub(super) async fn queue(&self, name: &QueueName) -> Result<Arc<Queue>, StoreError> {
        let known = lock(&self.known).get(name).cloned();
        match known {
            Some(queue) => Ok(queue),
            None => self.read_queue(name).await,
        }
    }

    /// A queue as it is now.
    pub(super) async fn read_queue(&self, name: &QueueName) -> Result<Arc<Queue>, StoreError> {
        let asked = name.clone();
        let read = self.base.pool.run("read a queue", Access::Read, move |db| {
            Box::pin(async move { Queue::get(db, &asked).await })
        });
        match read.await {
            Ok(queue) => {
                let queue = Arc::new(queue);
                lock(&self.known).insert(name.clone(), queue.clone());
                Ok(queue)
            }
            Err(error) => {
                lock(&self.known).remove(name);
                Err(error)
            }
        }
    }

    /// What is known of a queue is out of date.
    pub(super) fn forget(&self, name: &QueueName) {
        lock(&self.known).remove(name);
    }
}
