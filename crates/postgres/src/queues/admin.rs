//! Queues as an operator handles them: create, change, pause, delete, purge, count.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use hapax_core::{
    AdminError, GroupId, MessageId, QueueConfig, QueueInfo, QueueName, QueuePause, Revision, StoreError,
    StoreStatus, policy, validate,
};
use sqlx::{PgConnection, Row as _};

use super::counted::{TOOK, took};
use super::row::{Table, id_of};
use super::write::{self, GroupOf, seqs_of, unhalt};
use super::{Inner, Queue, catalogue, lock};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// The longest name of an operator that is kept, in bytes.
const BY_BYTES_MAX: usize = 256;

/// How long a deleted queue is emptied again. No operation takes that long.
const GONE_MS: i64 = 15 * 60_000;

type Admin<T> = Result<Result<T, AdminError>, Failure>;

/// The answer of a transaction that may refuse.
fn flat<T>(answer: Result<Result<T, AdminError>, StoreError>) -> Result<T, AdminError> {
    answer?
}

/// Keeps a decision of an operator.
pub(super) async fn audit(db: &mut PgConnection, by: &str, what: String) -> Result<(), Failure> {
    let sql = "INSERT INTO hapax.audit (at_ms, by, what) VALUES (hapax.now_ms(), $1, $2)";
    sqlx::query(sql).bind(policy::truncate(by, BY_BYTES_MAX)).bind(what).execute(db).await?;
    Ok(())
}

/// Whether a queue may have this configuration.
async fn check(db: &mut PgConnection, name: &QueueName, config: &QueueConfig) -> Admin<()> {
    let dead = match &config.dead_letter {
        Some(dead) => Queue::find(db, &dead.queue).await?,
        None => None,
    };
    Ok(validate::queue(name, config, |_| dead.as_ref().map(|dead| &dead.config)))
}

fn json(config: &QueueConfig) -> String {
    serde_json::to_string(config).expect("a configuration is plain data")
}

async fn create(
    db: &mut PgConnection,
    name: &QueueName,
    config: &QueueConfig,
    interval_ms: u64,
) -> Admin<bool> {
    if let Err(error) = check(db, name, config).await? {
        return Ok(Err(error));
    }
    // A store whose ledger is closed was copied as a whole: a new queue would be forgotten there.
    if let Some(state) = super::copy::ledger_copy(db).await? {
        return Err(state.refusal("the store").into());
    }
    // Two that create the same queue wait for each other.
    let lock = "SELECT pg_advisory_xact_lock(hashtext('hapax.q_queue'), hashtext($1))";
    sqlx::query(lock).bind(name.as_str()).execute(&mut *db).await?;
    if let Some(queue) = Queue::find(db, name).await? {
        let differs = queue.config.first_difference(config);
        return Ok(differs.map_or(Ok(false), |field| Err(AdminError::Exists(name.clone(), field))));
    }
    let deleted: Option<i64> = sqlx::query_scalar("SELECT deleted_ms FROM hapax.q_deleted WHERE name = $1")
        .bind(name.as_str())
        .fetch_optional(&mut *db)
        .await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let what = || format!("queue {name} was deleted");
    if let Err(error) = validate::interval(now_ms, deleted.map(|ms| ms as u64), interval_ms, what) {
        return Ok(Err(error));
    }
    let sql = "INSERT INTO hapax.q_queue (name, config, revision, version, created_ms, modified_ms) \
               VALUES ($1, $2, nextval('hapax.q_revision'), nextval('hapax.q_revision'), $3, $3)";
    sqlx::query(sql).bind(name.as_str()).bind(json(config)).bind(now_ms as i64).execute(db).await?;
    Ok(Ok(true))
}

async fn set(
    db: &mut PgConnection,
    name: &QueueName,
    config: &QueueConfig,
    expected: Option<Revision>,
) -> Admin<(i32, Revision)> {
    let sql = format!("SELECT {} FROM hapax.q_queue WHERE name = $1 FOR UPDATE", catalogue::COLUMNS);
    let row = sqlx::query(&sql).bind(name.as_str()).fetch_optional(&mut *db).await?;
    let Some(row) = row else { return Err(StoreError::NoSuchQueue(name.clone()).into()) };
    let queue = Queue::read(&row)?;
    queue.check_open()?;
    let actual = queue.revision;
    if let Some(expected) = expected.filter(|expected| *expected != actual) {
        return Ok(Err(AdminError::RevisionConflict { what: format!("queue {name}"), expected, actual }));
    }
    if let Err(error) = check(db, name, config).await? {
        return Ok(Err(error));
    }
    if queue.config == *config {
        return Ok(Ok((queue.id, actual)));
    }
    let sql = "UPDATE hapax.q_queue SET config = $2, revision = nextval('hapax.q_revision'), \
               version = nextval('hapax.q_revision'), modified_ms = hapax.now_ms() WHERE id = $1 RETURNING revision";
    let revision: i64 = sqlx::query_scalar(sql).bind(queue.id).bind(json(config)).fetch_one(db).await?;
    Ok(Ok((queue.id, Revision(revision as u64))))
}

/// Pauses a queue, or ends its pause. The first pause stands.
async fn set_pause(
    db: &mut PgConnection,
    name: &QueueName,
    pause: Option<&QueuePause>,
) -> Result<i32, Failure> {
    let queue = Queue::get_open(db, name).await?;
    if pause.is_some() == queue.paused.is_some() {
        return Ok(queue.id);
    }
    let pause = match pause {
        Some(pause) => {
            let since_ms = write::draw(db, 0).await?.0;
            let pause = QueuePause { since_ms, ..pause.clone() };
            Some(serde_json::to_string(&pause).expect("a pause is plain data"))
        }
        None => None,
    };
    let sql = "UPDATE hapax.q_queue SET paused = $2, version = nextval('hapax.q_revision') WHERE id = $1 \
               AND (paused IS NULL) = ($2 IS NOT NULL)";
    sqlx::query(sql).bind(queue.id).bind(pause).execute(db).await?;
    Ok(queue.id)
}

/// Messages of a queue that groups of other queues wait for: the queue that waits, the message, the group. Also those that a user's
/// transaction has ended, and of which the groups were not told.
async fn awaited(db: &mut PgConnection, queue_id: i32) -> Result<Vec<(i32, MessageId, GroupId)>, Failure> {
    let sql = "SELECT queue_id, id_hi, id_lo, grp FROM hapax.q_undecided WHERE queue_id <> $1";
    let rows = sqlx::query(sql).bind(queue_id).fetch_all(&mut *db).await?;
    let mut all = Vec::new();
    for row in rows {
        let (high, low): (i64, i64) = (row.try_get("id_hi")?, row.try_get("id_lo")?);
        let group = GroupId::new(row.try_get::<String, _>("grp")?);
        all.extend(group.ok().map(|group| (row.get("queue_id"), id_of(high as u64, low as u64), group)));
    }
    let ids: Vec<MessageId> = all.iter().map(|(_, id, _)| *id).collect();
    if ids.is_empty() {
        return Ok(all);
    }
    let mut here: HashSet<MessageId> =
        seqs_of(db, queue_id, &ids).await?.into_iter().map(|(id, _)| id).collect();
    let ended = "SELECT id_hi, id_lo FROM hapax.q_settled WHERE queue_id = $1 AND source IS NOT NULL";
    for row in sqlx::query(ended).bind(queue_id).fetch_all(&mut *db).await? {
        let (high, low): (i64, i64) = (row.try_get("id_hi")?, row.try_get("id_lo")?);
        here.insert(id_of(high as u64, low as u64));
    }
    all.retain(|(_, id, _)| here.contains(id));
    Ok(all)
}

/// What is deleted of a FIFO queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Everything,
    /// The groups that there are now. One that a send makes meanwhile is not locked: some of its rows would stay, and its messages
    /// without a head would be found by no receive.
    Groups,
}

/// Deletes all messages of a queue. Groups elsewhere that waited for one of them continue.
async fn empty(
    db: &mut PgConnection,
    queue_id: i32,
    fifo: bool,
    scope: Scope,
) -> Result<(u64, BTreeSet<i32>), Failure> {
    // Before the groups are locked: a message that is sent after this is remembered, whether or not it stays.
    for table in ["q_dedup", "q_attempt"] {
        let sql = format!("DELETE FROM hapax.{table} WHERE queue_id = $1");
        sqlx::query(&sql).bind(queue_id).execute(&mut *db).await?;
    }
    let mut freed = BTreeSet::new();
    let mut groups: BTreeSet<GroupOf> = BTreeSet::new();
    let (mut waits, mut own) = (Vec::new(), Vec::<String>::new());
    if fifo {
        let all = "SELECT grp FROM hapax.q_group WHERE queue_id = $1 ORDER BY grp FOR UPDATE";
        own = sqlx::query_scalar(all).bind(queue_id).fetch_all(&mut *db).await?;
        // Afterwards: a transaction that brings a letter, and has its group halted, holds the letter's group.
        waits = awaited(db, queue_id).await?;
        groups = waits.iter().map(|(waits, _, group)| (*waits, group.clone())).collect();
        write::lock_groups(db, &groups).await?;
    }
    let groups_only = (fifo && scope == Scope::Groups).then_some(&own);
    let which = "queue_id = $1 AND ($2::text[] IS NULL OR grp IS NULL OR grp = ANY($2))";
    let mut count = 0;
    for table in Table::ALL {
        let sql = format!(
            "WITH gone AS (DELETE FROM {} WHERE {which} RETURNING seq), \
             needed AS (DELETE FROM hapax.q_need WHERE queue_id = $1 AND seq = ANY(ARRAY(SELECT seq FROM gone))) \
             SELECT count(*) FROM gone",
            table.name()
        );
        let deleted: i64 =
            sqlx::query_scalar(&sql).bind(queue_id).bind(groups_only).fetch_one(&mut *db).await?;
        count += deleted as u64;
    }
    for table in ["q_head", "q_undecided", "q_settled"] {
        let sql = format!("DELETE FROM hapax.{table} WHERE {which}");
        sqlx::query(&sql).bind(queue_id).bind(groups_only).execute(&mut *db).await?;
    }
    sqlx::query("DELETE FROM hapax.q_room WHERE queue_id = $1").bind(queue_id).execute(&mut *db).await?;
    if scope == Scope::Everything {
        sqlx::query("DELETE FROM hapax.q_need WHERE queue_id = $1").bind(queue_id).execute(&mut *db).await?;
    }
    let (now_ms, _) = write::draw(db, 0).await?;
    for (waiting, id, _) in &waits {
        let sql = format!("SELECT {} FROM hapax.q_queue WHERE id = $1", catalogue::COLUMNS);
        if let Some(row) = sqlx::query(&sql).bind(waiting).fetch_optional(&mut *db).await? {
            unhalt(db, &Queue::read(&row)?, &[*id], now_ms).await?;
            freed.insert(*waiting);
        }
    }
    write::announce(db, &groups, write::Change::default()).await?;
    Ok((count, freed))
}

async fn purge(db: &mut PgConnection, name: &QueueName, interval_ms: u64) -> Admin<(u64, BTreeSet<i32>)> {
    let queue = Queue::get_open(db, name).await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let what = || format!("queue {name} was purged");
    if let Err(error) = validate::interval(now_ms, queue.purged_ms, interval_ms, what) {
        return Ok(Err(error));
    }
    let sql = "UPDATE hapax.q_queue SET purged_ms = $2 WHERE id = $1";
    sqlx::query(sql).bind(queue.id).bind(now_ms as i64).execute(&mut *db).await?;
    Ok(Ok(empty(db, queue.id, queue.config.is_fifo(), Scope::Groups).await?))
}

async fn delete(db: &mut PgConnection, name: &QueueName) -> Result<(i32, BTreeSet<i32>), Failure> {
    let queue = Queue::get(db, name).await?;
    sqlx::query("DELETE FROM hapax.q_queue WHERE id = $1").bind(queue.id).execute(&mut *db).await?;
    let (_, freed) = empty(db, queue.id, queue.config.is_fifo(), Scope::Everything).await?;
    sqlx::query("DELETE FROM hapax.q_group WHERE queue_id = $1").bind(queue.id).execute(&mut *db).await?;
    let gone =
        "INSERT INTO hapax.q_gone (queue_id, deleted_ms) VALUES ($1, hapax.now_ms()) ON CONFLICT DO NOTHING";
    sqlx::query(gone).bind(queue.id).execute(&mut *db).await?;
    let sql = "INSERT INTO hapax.q_deleted (name, deleted_ms) VALUES ($1, hapax.now_ms()) \
               ON CONFLICT (name) DO UPDATE SET deleted_ms = excluded.deleted_ms";
    sqlx::query(sql).bind(name.as_str()).execute(&mut *db).await?;
    let imported = "DELETE FROM hapax.q_imported WHERE queue_id = $1";
    sqlx::query(imported).bind(queue.id).execute(&mut *db).await?;
    let old = "DELETE FROM hapax.q_deleted WHERE deleted_ms + $1 < hapax.now_ms()";
    sqlx::query(old).bind(2 * policy::INTERVAL_MS_MAX as i64).execute(db).await?;
    Ok((queue.id, freed))
}

/// Deletes what operations have written to queues that were deleted while they were under way. Gives the queues whose groups
/// no longer wait for that.
async fn empty_gone(db: &mut PgConnection) -> Result<BTreeSet<i32>, Failure> {
    let tables = Table::ALL.map(Table::name);
    let more = ["hapax.q_group", "hapax.q_head", "hapax.q_undecided", "hapax.q_dedup", "hapax.q_attempt"];
    let has = |table: &str| format!("EXISTS (SELECT 1 FROM {table} x WHERE x.queue_id = g.queue_id)");
    let any: Vec<String> = tables.into_iter().chain(more).map(has).collect();
    let sql =
        format!("SELECT g.queue_id FROM hapax.q_gone g WHERE {} FOR UPDATE SKIP LOCKED", any.join(" OR "));
    let left: Vec<i32> = sqlx::query_scalar(&sql).fetch_all(&mut *db).await?;
    let mut freed = BTreeSet::new();
    for queue_id in left {
        freed.extend(empty(db, queue_id, true, Scope::Everything).await?.1);
        sqlx::query("DELETE FROM hapax.q_group WHERE queue_id = $1").bind(queue_id).execute(&mut *db).await?;
    }
    let old = "DELETE FROM hapax.q_gone WHERE deleted_ms + $1 < hapax.now_ms()";
    sqlx::query(old).bind(GONE_MS).execute(db).await?;
    Ok(freed)
}

impl Inner {
    pub(super) async fn create_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        let args = Arc::new((name.clone(), config));
        let created = self.transact("create a queue", move |db| {
            let args = args.clone();
            Box::pin(async move { create(db, &args.0, &args.1, interval_ms).await }) as BoxFuture<'_, _>
        });
        let created = flat(created.await);
        self.forget(name);
        created
    }

    pub(super) async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        let args = Arc::new((name.clone(), config));
        let set = self.transact("change a queue", move |db| {
            let args = args.clone();
            Box::pin(async move { set(db, &args.0, &args.1, expected).await }) as BoxFuture<'_, _>
        });
        let set = flat(set.await);
        self.forget(name);
        let (queue_id, revision) = set?;
        self.freed(queue_id);
        Ok(revision)
    }

    pub(super) async fn pause(
        &self,
        name: &QueueName,
        by: &str,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        let pause = QueuePause::new(0, by, reason);
        let args = Arc::new((name.clone(), pause));
        let paused = self.transact("pause a queue", move |db| {
            let args = args.clone();
            Box::pin(async move { set_pause(db, &args.0, Some(&args.1)).await }) as BoxFuture<'_, _>
        });
        let paused = paused.await;
        self.forget(name);
        paused.map(|_| ())
    }

    pub(super) async fn resume(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        let args = Arc::new((name.clone(), by.to_owned()));
        let resumed = self.transact("resume a queue", move |db| {
            let args = args.clone();
            Box::pin(async move {
                audit(db, &args.1, format!("resumed queue {}", args.0)).await?;
                set_pause(db, &args.0, None).await
            }) as BoxFuture<'_, _>
        });
        let resumed = resumed.await;
        self.forget(name);
        self.freed(resumed?);
        Ok(())
    }

    pub(super) async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        let asked = name.clone();
        let deleted = self.transact("delete a queue", move |db| {
            let name = asked.clone();
            Box::pin(async move { delete(db, &name).await }) as BoxFuture<'_, _>
        });
        let deleted = deleted.await;
        self.forget(name);
        let (queue_id, freed): (i32, BTreeSet<i32>) = deleted?;
        lock(&self.totals).remove(&queue_id);
        lock(&self.in_flight).remove(&queue_id);
        self.forget_places(queue_id);
        self.freed(queue_id);
        for queue_id in freed {
            self.freed(queue_id);
        }
        Ok(())
    }

    /// Empties deleted queues again.
    pub(super) async fn empty_gone(&self) -> Result<(), StoreError> {
        let emptied = self.transact("empty deleted queues", |db| {
            Box::pin(async move { empty_gone(db).await }) as BoxFuture<'_, _>
        });
        let freed: BTreeSet<i32> = emptied.await?;
        for queue_id in freed {
            self.freed(queue_id);
        }
        Ok(())
    }

    pub(super) async fn list(&self) -> Result<Vec<QueueInfo>, StoreError> {
        let list = self.base.pool.run("list queues", Access::Read, |db| {
            Box::pin(async move {
                let sql =
                    format!("SELECT {} FROM hapax.q_queue ORDER BY name COLLATE \"C\"", catalogue::COLUMNS);
                let rows = sqlx::query(&sql).fetch_all(db).await?;
                rows.iter().map(|row| Queue::read(row).map(Queue::info)).collect()
            })
        });
        list.await
    }

    pub(super) async fn purge(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        let asked = name.clone();
        let purged = self.transact("purge a queue", move |db| {
            let name = asked.clone();
            Box::pin(async move { purge(db, &name, interval_ms).await }) as BoxFuture<'_, _>
        });
        let (count, freed): (u64, BTreeSet<i32>) = flat(purged.await)?;
        self.forget(name);
        for queue_id in freed {
            self.freed(queue_id);
        }
        Ok(count)
    }

    pub(super) async fn status(&self) -> Result<StoreStatus, StoreError> {
        if let Some(status) = lock(&self.counted).status() {
            return Ok(status);
        }
        let read = self.base.pool.run("status", Access::Read, |db| {
            Box::pin(async move {
                let of =
                    |table: Table| format!("SELECT count(*) AS c, sum(bytes) AS b FROM {}", table.name());
                let sql = format!(
                    "SELECT sum(c)::bigint AS messages, coalesce(sum(b), 0)::bigint AS bytes, {TOOK} FROM ({}) x",
                    Table::ALL.map(of).join(" UNION ALL ")
                );
                let row = sqlx::query(&sql).fetch_one(db).await?;
                let number = |name: &str| row.try_get::<i64, _>(name).map(|n| n as u64);
                let (messages, bytes) = (number("messages")?, number("bytes")?);
                Ok((StoreStatus { messages, bytes, ..StoreStatus::default() }, took(&row)?))
            })
        });
        let (status, took) = read.await?;
        lock(&self.counted).note_status(status.clone(), took);
        Ok(status)
    }
}
