//! The outbox as relays see it.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::StoreError;
use hapax_core::outbox::{
    self, Advance, BucketLease, BucketRange, HeldMessage, OutboxMessage, OutboxStore, Polled, Rotated,
    RouteStatus, SinkDescription, Tended,
};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};
use tokio::sync::broadcast::error::RecvError;

use super::PostgresOutbox;
use super::horizon::Horizon;
use crate::BoxFuture;
use crate::error::{Access, Failure};
use crate::hints::Topic;

const BUCKETS: u16 = 64;

impl PostgresOutbox {
    /// Runs an operation on a connection of the store.
    pub(super) async fn on_db<T, F>(&self, access: Access, operation: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync + 'static,
    {
        self.store.base.pool.repeat("outbox", access, operation).await
    }
}

pub(super) fn numbers(leases: &[BucketLease]) -> (Vec<i32>, Vec<i64>) {
    leases.iter().map(|lease| (i32::from(lease.bucket), lease.fence as i64)).unzip()
}

pub(super) fn message(row: &PgRow) -> Result<OutboxMessage, Failure> {
    let headers: Option<&str> = row.try_get("headers")?;
    let headers = headers.map(serde_json::from_str::<BTreeMap<String, String>>).transpose();
    let headers =
        headers.map_err(|error| StoreError::Damaged(format!("headers of an outbox message: {error}")))?;
    let body: Vec<u8> = row.try_get("body")?;
    Ok(OutboxMessage {
        bucket: row.try_get::<i32, _>("bucket")? as u16,
        number: row.try_get::<i64, _>("number")? as u64,
        id: row.try_get("id")?,
        topic: row.try_get("topic")?,
        key: row.try_get("key")?,
        body: Bytes::from(body),
        headers: headers.unwrap_or_default(),
        deliver_at_ms: row.try_get::<Option<i64>, _>("deliver_at_ms")?.map(|ms| ms.max(0) as u64),
        enqueued_ms: row.try_get::<i64, _>("enqueued_us")? as u64 / 1000,
    })
}

/// The buckets of `held` that are not in `own`.
pub(super) fn lost(held: impl IntoIterator<Item = u16>, own: &[i32]) -> Vec<u16> {
    held.into_iter().filter(|bucket| !own.contains(&i32::from(*bucket))).collect()
}

/// A pattern of topics as one of LIKE.
fn like(pattern: &str) -> String {
    pattern.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_").replace('*', "%")
}

fn pattern(like: &str) -> String {
    let mut pattern = String::new();
    let mut chars = like.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' => pattern.extend(chars.next()),
            '%' => pattern.push('*'),
            other => pattern.push(other),
        }
    }
    pattern
}

#[async_trait]
impl OutboxStore for PostgresOutbox {
    fn bucket_count(&self) -> u16 {
        BUCKETS
    }

    async fn register(
        &self,
        route: &str,
        topics: &[String],
        sink: &SinkDescription,
    ) -> Result<(), StoreError> {
        let topics: Vec<String> = topics.iter().map(|topic| like(topic)).collect();
        let args = (route.to_owned(), topics, sink.name.clone(), sink.dedup.after_a_crash());
        self.on_db(Access::Write, move |db| {
            let (route, topics, target, after_a_crash) = args.clone();
            Box::pin(async move {
                let sql = "SELECT hapax.outbox_register($1, $2, $3, $4)";
                let register = sqlx::query(sql).bind(route).bind(topics).bind(target).bind(after_a_crash);
                register.execute(db).await?;
                Ok(())
            })
        })
        .await
    }

    async fn forget(&self, route: &str, by: &str) -> Result<bool, StoreError> {
        let args = (route.to_owned(), by.to_owned());
        let forgotten = self.on_db(Access::Write, move |db| {
            let (route, by) = args.clone();
            Box::pin(async move {
                let forget = sqlx::query("SELECT hapax.outbox_forget($1, $2)").bind(route).bind(by);
                Ok(forget.fetch_one(db).await?.try_get::<String, _>(0)?)
            })
        });
        match forgotten.await?.as_str() {
            "running" => Err(outbox::route_runs(route)),
            answer => Ok(answer == "forgotten"),
        }
    }

    async fn tend(&self, route: &str, relay: &str, lease_ms: u64) -> Result<Tended, StoreError> {
        let args = (route.to_owned(), relay.to_owned());
        self.on_db(Access::Write, move |db| {
            let (route, relay) = args.clone();
            Box::pin(async move {
                let sql = "SELECT bucket, fence, surplus FROM hapax.outbox_tend($1, $2, $3, true)";
                let rows = sqlx::query(sql)
                    .bind(&route)
                    .bind(relay)
                    .bind(lease_ms as i64 * 1000)
                    .fetch_all(db)
                    .await?;
                let mut tended = Tended::default();
                for row in rows {
                    let Ok(bucket) = u16::try_from(row.try_get::<i32, _>(0)?) else {
                        return Err(outbox::route_is_unknown(&route).into());
                    };
                    tended.held.push(BucketLease { bucket, fence: row.try_get::<i64, _>(1)? as u64 });
                    tended.surplus = row.try_get::<i32, _>(2)? as usize;
                }
                Ok(tended)
            })
        })
        .await
    }

    async fn give_back(&self, route: &str, relay: &str, buckets: &[BucketLease]) -> Result<(), StoreError> {
        let args = (route.to_owned(), relay.to_owned(), numbers(buckets), buckets.is_empty());
        self.on_db(Access::Write, move |db| {
            let (route, relay, (buckets, fences), all) = args.clone();
            Box::pin(async move {
                let sql =
                    "WITH ended AS (DELETE FROM hapax.outbox_relay WHERE route = $1 AND relay = $2 AND $5)
                    UPDATE hapax.outbox_lease l SET relay = NULL WHERE l.route = $1 AND l.relay = $2
                    AND ($5 OR (l.bucket, l.fence) IN (SELECT * FROM unnest($3::int[], $4::bigint[])))";
                sqlx::query(sql)
                    .bind(route)
                    .bind(relay)
                    .bind(buckets)
                    .bind(fences)
                    .bind(all)
                    .execute(db)
                    .await?;
                Ok(())
            })
        })
        .await
    }

    async fn positions(&self, route: &str, buckets: &[u16]) -> Result<Vec<(u16, u64)>, StoreError> {
        let args = (route.to_owned(), buckets.iter().map(|&bucket| i32::from(bucket)).collect::<Vec<_>>());
        self.on_db(Access::Read, move |db| {
            let (route, buckets) = args.clone();
            Box::pin(async move {
                let sql = "SELECT b, hapax.outbox_position($1, b) FROM unnest($2::int[]) AS u (b)";
                let rows = sqlx::query(sql).bind(route).bind(buckets).fetch_all(db).await?;
                let position = |row: &PgRow| -> Result<(u16, u64), Failure> {
                    Ok((row.try_get::<i32, _>(0)? as u16, row.try_get::<i64, _>(1)? as u64))
                };
                rows.iter().map(position).collect()
            })
        })
        .await
    }

    async fn poll(&self, route: &str, read: &[(u16, u64)]) -> Result<Polled, StoreError> {
        let (buckets, seen): (Vec<i32>, Vec<i64>) =
            read.iter().map(|&(bucket, number)| (i32::from(bucket), number as i64)).unzip();
        let args = (route.to_owned(), buckets, seen);
        let mut horizon = self.horizon.lock().await;
        let rows = self.on_db(Access::Read, move |db| {
            let (route, buckets, seen) = args.clone();
            Box::pin(async move {
                let sql =
                    "SELECT bucket, last, published, writers, incarnation FROM hapax.outbox_poll($1, $2, $3)";
                Ok(sqlx::query(sql).bind(route).bind(buckets).bind(seen).fetch_all(db).await?)
            })
        });
        let observed = |row: &PgRow, horizon: &mut Horizon| -> Result<(u16, u64, u64), Failure> {
            let bucket = row.try_get::<i32, _>(0)? as u16;
            let horizon = horizon.of_incarnation(row.try_get(4)?);
            let through = horizon.observe(bucket, row.try_get::<i64, _>(1)? as u64, row.try_get(3)?);
            Ok((bucket, row.try_get::<i64, _>(2)? as u64, through))
        };
        let mut polled = Polled::default();
        for row in rows.await? {
            let (bucket, published, through) = observed(&row, &mut horizon)
                .map_err(|failure| failure.into_store_error("outbox", Access::Read))?;
            let after = read.iter().find(|(of, _)| *of == bucket).map_or(0, |(_, after)| *after);
            if published < after {
                polled.rewound.push(bucket);
            } else if through > after {
                polled.ranges.push(BucketRange { bucket, after, through });
            }
        }
        Ok(polled)
    }

    async fn read(
        &self,
        ranges: &[BucketRange],
        rows: usize,
        bytes: usize,
    ) -> Result<Vec<OutboxMessage>, StoreError> {
        let buckets: Vec<i32> = ranges.iter().map(|range| i32::from(range.bucket)).collect();
        let after: Vec<i64> = ranges.iter().map(|range| range.after as i64).collect();
        let through: Vec<i64> = ranges.iter().map(|range| range.through as i64).collect();
        self.on_db(Access::Read, move |db| {
            let (buckets, after, through) = (buckets.clone(), after.clone(), through.clone());
            Box::pin(async move {
                let sql = "SELECT bucket, number, id::text, topic, key, body, headers::text, deliver_at_ms, enqueued_us
                           FROM hapax.outbox_read($1, $2, $3, $4, $5)";
                let read = sqlx::query(sql).bind(buckets).bind(after).bind(through).bind(rows as i32).bind(bytes as i64);
                read.fetch_all(db).await?.iter().map(message).collect()
            })
        })
        .await
    }

    async fn advance(&self, route: &str, relay: &str, advances: &[Advance]) -> Result<Vec<u16>, StoreError> {
        let leases: Vec<BucketLease> = advances.iter().map(|advance| advance.lease).collect();
        let positions: (Vec<i64>, Vec<i64>) =
            advances.iter().map(|advance| (advance.after as i64, advance.position as i64)).unzip();
        let args = (route.to_owned(), relay.to_owned(), numbers(&leases), positions);
        let own = self.on_db(Access::Write, move |db| {
            let (route, relay, (buckets, fences), (after, positions)) = args.clone();
            Box::pin(async move {
                let advance = sqlx::query("SELECT hapax.outbox_advance($1, $2, $3, $4, $5, $6)")
                    .bind(route)
                    .bind(relay)
                    .bind(buckets)
                    .bind(fences)
                    .bind(after)
                    .bind(positions);
                Ok(advance.fetch_one(db).await?.try_get::<Vec<i32>, _>(0)?)
            })
        });
        Ok(lost(leases.iter().map(|lease| lease.bucket), &own.await?))
    }

    async fn hold(
        &self,
        route: &str,
        relay: &str,
        leases: &[BucketLease],
        messages: Vec<HeldMessage>,
    ) -> Result<Vec<u16>, StoreError> {
        self.hold_messages(route, relay, leases, messages).await
    }

    async fn held_keys(&self, route: &str, buckets: &[u16]) -> Result<Vec<(u16, String)>, StoreError> {
        self.keys_of(route, buckets).await
    }

    async fn due(&self, route: &str, buckets: &[u16], max: usize) -> Result<Vec<HeldMessage>, StoreError> {
        self.due_messages(route, buckets, max).await
    }

    async fn release(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        message: &OutboxMessage,
    ) -> Result<Option<bool>, StoreError> {
        self.release_message(route, relay, lease, message).await
    }

    async fn postpone(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        held: &HeldMessage,
    ) -> Result<(), StoreError> {
        self.postpone_message(route, relay, lease, held).await
    }

    async fn rotate(&self) -> Result<Rotated, StoreError> {
        let mut rotated = Rotated::default();
        // One table in each transaction: what is locked stays locked until its end.
        for bucket in 0..=i32::from(BUCKETS) {
            let answer = self.on_db(Access::Write, move |db| {
                Box::pin(async move {
                    let rotate = if bucket < i32::from(BUCKETS) {
                        sqlx::query("SELECT hapax.outbox_rotate($1)").bind(bucket)
                    } else {
                        sqlx::query("SELECT hapax.outbox_rotate_positions()")
                    };
                    Ok(rotate.fetch_one(db).await?.try_get::<String, _>(0)?)
                })
            });
            match answer.await?.as_str() {
                "rotated" => rotated.emptied += 1,
                "busy" => rotated.busy += 1,
                "unrouted" => {
                    rotated.emptied += 1;
                    rotated.unrouted += 1;
                }
                _ => {}
            }
        }
        Ok(rotated)
    }

    async fn changed(&self, wait: Duration) {
        let hinted = async {
            let mut hints = self.hints.lock().await;
            let hints = hints.get_or_insert_with(|| self.store.base.hints.subscribe());
            loop {
                match hints.recv().await {
                    Ok(hint) if hint.topic != Topic::Outbox => {}
                    Err(RecvError::Closed) => std::future::pending().await,
                    _ => return,
                }
            }
        };
        // Either way there is something to look for.
        let _ = tokio::time::timeout(wait, hinted).await;
    }

    async fn status(&self) -> Result<Vec<RouteStatus>, StoreError> {
        self.on_db(Access::Read, |db| {
            Box::pin(async move {
                let sql = "SELECT route, target, after_a_crash, topics, relays, lag, oldest_us, held, parked_keys FROM hapax.outbox_status()";
                let status = |row: &PgRow| -> Result<RouteStatus, Failure> {
                    let number = |column: &str| row.try_get::<i64, _>(column).map(|number| number as u64);
                    let topics: Vec<String> = row.try_get("topics")?;
                    Ok(RouteStatus {
                        route: row.try_get("route")?,
                        target: row.try_get("target")?,
                        after_a_crash: row.try_get("after_a_crash")?,
                        topics: topics.iter().map(|topic| pattern(topic)).collect(),
                        relays: number("relays")?,
                        lag: number("lag")?,
                        oldest_ms: row.try_get::<Option<i64>, _>("oldest_us")?.map(|us| us as u64 / 1000),
                        held: number("held")?,
                        parked: number("parked_keys")?,
                    })
                };
                sqlx::query(sql).fetch_all(db).await?.iter().map(status).collect()
            })
        })
        .await
    }

    async fn held(
        &self,
        route: Option<&str>,
        parked: bool,
        max: usize,
    ) -> Result<Vec<(String, HeldMessage)>, StoreError> {
        self.held_messages(route, parked, max).await
    }

    async fn unpublished(&self, route: &str, max: usize) -> Result<Vec<OutboxMessage>, StoreError> {
        let all: Vec<u16> = (0..BUCKETS).collect();
        let positions = self.positions(route, &all).await?;
        let range = |(bucket, after)| BucketRange { bucket, after, through: i64::MAX as u64 };
        let ranges: Vec<BucketRange> = positions.into_iter().map(range).collect();
        let mut found = self.read(&ranges, max, 64 * 1024).await?;
        found.sort_by_key(|message| message.enqueued_ms);
        found.truncate(max);
        Ok(found)
    }

    async fn retry(&self, route: &str, id: Option<&str>, by: &str) -> Result<u64, StoreError> {
        self.retry_messages(route, id, by).await
    }

    async fn skip(&self, route: &str, id: &str, by: &str) -> Result<bool, StoreError> {
        self.skip_message(route, id, by).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_translated_both_ways() {
        for (topics, sql) in [("orders.*", "orders.%"), ("a_b%c\\d", "a\\_b\\%c\\\\d"), ("*", "%")] {
            assert_eq!((like(topics), pattern(sql)), (sql.to_owned(), topics.to_owned()));
        }
    }
}
