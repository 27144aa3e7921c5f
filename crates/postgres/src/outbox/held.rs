//! Messages that are set aside: the sink did not accept them, or an earlier one of their key.

use hapax_core::StoreError;
use hapax_core::outbox::{BucketLease, HeldMessage, OutboxMessage};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::PostgresOutbox;
use super::relay::{lost, message, numbers};
use crate::error::{Access, Failure};

const COLUMNS: &str =
    "route, bucket, number, id::text, topic, key, body, headers::text, deliver_at_ms, enqueued_us,
    parked, attempts, error, greatest(next_us - hapax.now_us(), 0) AS wait_us";

fn held(row: &PgRow) -> Result<HeldMessage, Failure> {
    Ok(HeldMessage {
        message: message(row)?,
        attempts: row.try_get::<i32, _>("attempts")? as u32,
        parked: row.try_get("parked")?,
        retry_after_ms: row.try_get::<Option<i64>, _>("wait_us")?.map(|us| us as u64 / 1000),
        error: row.try_get("error")?,
    })
}

fn is_id(id: &str) -> bool {
    id.len() == 36 && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

impl PostgresOutbox {
    pub(super) async fn hold_messages(
        &self,
        route: &str,
        relay: &str,
        leases: &[BucketLease],
        messages: Vec<HeldMessage>,
    ) -> Result<Vec<u16>, StoreError> {
        let args = (route.to_owned(), relay.to_owned(), numbers(leases), messages);
        let own = self.on_db(Access::Write, move |db| {
            let (route, relay, (buckets, fences), messages) = args.clone();
            Box::pin(async move {
                let each =
                    |value: &dyn Fn(&HeldMessage) -> i64| messages.iter().map(value).collect::<Vec<i64>>();
                let hold = sqlx::query(
                    "SELECT hapax.outbox_hold($1, $2, $3, $4, $5::int[], $6, $7, $8, $9, $10::int[], $11)",
                )
                .bind(route)
                .bind(relay)
                .bind(buckets)
                .bind(fences)
                .bind(each(&|held| i64::from(held.message.bucket)))
                .bind(each(&|held| held.message.number as i64))
                .bind(messages.iter().map(|held| held.message.ordered_key().is_none()).collect::<Vec<_>>())
                .bind(each(&|held| held.retry_after_ms.unwrap_or(0) as i64 * 1000))
                .bind(messages.iter().map(|held| held.parked).collect::<Vec<_>>())
                .bind(each(&|held| i64::from(held.attempts)))
                .bind(messages.iter().map(|held| held.error.clone()).collect::<Vec<_>>());
                Ok(hold.fetch_one(db).await?.try_get::<Vec<i32>, _>(0)?)
            })
        });
        Ok(lost(leases.iter().map(|lease| lease.bucket), &own.await?))
    }

    pub(super) async fn keys_of(
        &self,
        route: &str,
        buckets: &[u16],
    ) -> Result<Vec<(u16, String)>, StoreError> {
        let args = (route.to_owned(), buckets.iter().map(|&bucket| i32::from(bucket)).collect::<Vec<_>>());
        self.on_db(Access::Read, move |db| {
            let (route, buckets) = args.clone();
            Box::pin(async move {
                let sql = "SELECT DISTINCT bucket, key FROM hapax.outbox_held WHERE route = $1 AND bucket = ANY ($2) AND NOT alone";
                let key = |row: &PgRow| -> Result<(u16, String), Failure> {
                    Ok((row.try_get::<i32, _>(0)? as u16, row.try_get(1)?))
                };
                sqlx::query(sql).bind(route).bind(buckets).fetch_all(db).await?.iter().map(key).collect()
            })
        })
        .await
    }

    pub(super) async fn due_messages(
        &self,
        route: &str,
        buckets: &[u16],
        max: usize,
    ) -> Result<Vec<HeldMessage>, StoreError> {
        let args = (route.to_owned(), buckets.iter().map(|&bucket| i32::from(bucket)).collect::<Vec<_>>());
        self.on_db(Access::Read, move |db| {
            let (route, buckets) = args.clone();
            Box::pin(async move {
                let sql = format!(
                    "SELECT {COLUMNS} FROM hapax.outbox_held WHERE route = $1 AND next_us <= hapax.now_us()
                     AND bucket = ANY ($2) ORDER BY next_us, number LIMIT $3"
                );
                let due = sqlx::query(&sql).bind(route).bind(buckets).bind(max as i64);
                due.fetch_all(db).await?.iter().map(held).collect()
            })
        })
        .await
    }

    pub(super) async fn release_message(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        message: &OutboxMessage,
    ) -> Result<Option<bool>, StoreError> {
        let key = message.ordered_key().map(str::to_owned);
        let (args, number) = ((route.to_owned(), relay.to_owned(), key), message.number);
        self.on_db(Access::Write, move |db| {
            let (route, relay, key) = args.clone();
            Box::pin(async move {
                let release = sqlx::query("SELECT hapax.outbox_release($1, $2, $3, $4, $5, $6)")
                    .bind(route)
                    .bind(relay)
                    .bind(i32::from(lease.bucket))
                    .bind(lease.fence as i64)
                    .bind(number as i64)
                    .bind(key);
                Ok(release.fetch_one(db).await?.try_get(0)?)
            })
        })
        .await
    }

    pub(super) async fn postpone_message(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        held: &HeldMessage,
    ) -> Result<(), StoreError> {
        let args = (route.to_owned(), relay.to_owned(), held.clone());
        self.on_db(Access::Write, move |db| {
            let (route, relay, held) = args.clone();
            Box::pin(async move {
                let sql = "UPDATE hapax.outbox_held SET parked = $6, attempts = $7, error = $8,
                             next_us = CASE WHEN $6 THEN NULL ELSE hapax.now_us() + $9 END
                           WHERE route = $1 AND bucket = $3 AND number = $5
                             AND hapax.outbox_own($1, $2, ARRAY[$3], ARRAY[$4]) <> '{}'";
                let postpone = sqlx::query(sql)
                    .bind(route)
                    .bind(relay)
                    .bind(i32::from(lease.bucket))
                    .bind(lease.fence as i64)
                    .bind(held.message.number as i64)
                    .bind(held.parked)
                    .bind(held.attempts as i32)
                    .bind(held.error)
                    .bind(held.retry_after_ms.unwrap_or(0) as i64 * 1000);
                postpone.execute(db).await?;
                Ok(())
            })
        })
        .await
    }

    pub(super) async fn held_messages(
        &self,
        route: Option<&str>,
        parked: bool,
        max: usize,
    ) -> Result<Vec<(String, HeldMessage)>, StoreError> {
        let route = route.map(str::to_owned);
        self.on_db(Access::Read, move |db| {
            let route = route.clone();
            Box::pin(async move {
                let sql = format!(
                    "SELECT {COLUMNS} FROM hapax.outbox_held WHERE ($1::text IS NULL OR route = $1) AND (parked OR NOT $2)
                     ORDER BY route, held_us, number LIMIT $3"
                );
                let rows = sqlx::query(&sql).bind(route).bind(parked).bind(max as i64).fetch_all(db).await?;
                let one = |row: &PgRow| -> Result<(String, HeldMessage), Failure> { Ok((row.try_get("route")?, held(row)?)) };
                rows.iter().map(one).collect()
            })
        })
        .await
    }

    pub(super) async fn retry_messages(
        &self,
        route: &str,
        id: Option<&str>,
        by: &str,
    ) -> Result<u64, StoreError> {
        if id.is_some_and(|id| !is_id(id)) {
            return Ok(0);
        }
        let args = (route.to_owned(), id.map(str::to_owned), by.to_owned());
        self.on_db(Access::Write, move |db| {
            let (route, id, by) = args.clone();
            Box::pin(async move {
                let sql = "WITH again AS (UPDATE hapax.outbox_held SET parked = false, attempts = 0, next_us = hapax.now_us()
                             WHERE route = $1 AND parked AND ($2::text IS NULL OR id = $2::uuid) RETURNING id),
                           told AS (INSERT INTO hapax.audit (at_ms, by, what)
                             SELECT hapax.now_ms(), $3, format('retried message %s of route %s', id, $1) FROM again)
                           SELECT count(*) FROM again";
                let row = sqlx::query(sql).bind(route).bind(id).bind(by).fetch_one(db).await?;
                Ok(row.try_get::<i64, _>(0)? as u64)
            })
        })
        .await
    }

    pub(super) async fn skip_message(&self, route: &str, id: &str, by: &str) -> Result<bool, StoreError> {
        if !is_id(id) {
            return Ok(false);
        }
        let args = (route.to_owned(), id.to_owned(), by.to_owned());
        self.on_db(Access::Write, move |db| {
            let (route, id, by) = args.clone();
            Box::pin(async move {
                let skip =
                    sqlx::query("SELECT hapax.outbox_skip($1, $2::uuid, $3)").bind(route).bind(id).bind(by);
                Ok(skip.fetch_one(db).await?.try_get(0)?)
            })
        })
        .await
    }
}
