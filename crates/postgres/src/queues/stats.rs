//! What queues hold now, for many queues at once: one statement looks whether time has something to do in them, one counts.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use hapax_core::{QueueName, QueueStats, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::{Inner, Queue, catalogue, lock};
use crate::error::{Access, Failure};

/// Queues of one statement.
const TOGETHER_MAX: usize = 1_000;
/// A statement that has counted for this long begins no further queue; the next statement counts the rest. So queues that take
/// long together do not exceed the time of an operation, and what was counted is not lost.
const COUNT_MS: i64 = 200;

/// Queues by name, and whether a lease or a delay is over there. `from`: the times behind which to look, by the queues' `ids`.
async fn look(
    db: &mut PgConnection,
    names: &[String],
    ids: &[i32],
    from: &[i64],
) -> Result<Vec<(Queue, bool)>, Failure> {
    let sql = format!(
        "SELECT {}, p.due FROM hapax.q_queue q, LATERAL \
         hapax.q_probe(q.id, coalesce(($3::bigint[])[array_position($2::int[], q.id)], 0)) p \
         WHERE q.name = ANY($1)",
        catalogue::COLUMNS
    );
    let rows = sqlx::query(&sql).bind(names).bind(ids).bind(from).fetch_all(db).await?;
    rows.iter().map(|row| Ok((Queue::read(row)?, row.try_get("due")?))).collect()
}

/// A queue as a statement has counted it.
struct Count {
    queue_id: i32,
    /// `None`: the statement had no time left for it.
    stats: Option<QueueStats>,
    took: Duration,
}

impl Count {
    fn read(row: &PgRow) -> Result<Self, Failure> {
        let counts: Option<Vec<Option<i64>>> = row.try_get("counts")?;
        let stats = counts.map(|counts| {
            let maybe = |at: usize| counts.get(at).copied().flatten().map(|number| number as u64);
            let number = |at| maybe(at).unwrap_or(0);
            QueueStats {
                ready: number(0),
                delayed: number(1),
                in_flight: number(2),
                parked: number(3),
                halted: number(4),
                bytes: number(5),
                oldest_sent_ms: maybe(6),
                ..QueueStats::default()
            }
        });
        let took_us: i64 = row.try_get("took_us")?;
        let took = Duration::from_micros(u64::try_from(took_us).unwrap_or(0));
        Ok(Self { queue_id: row.try_get("id")?, stats, took })
    }
}

/// Counts queues until its time is over; the first one is counted in any case. A queue that was deleted is left out. Time may
/// have ended leases that are still in their table.
async fn count(db: &mut PgConnection, ids: &[i32]) -> Result<Vec<Count>, Failure> {
    let of = |table: &str| {
        format!(
            "(SELECT count(*) AS n, sum(x.bytes) AS bytes, min(x.sent_ms) AS oldest FROM hapax.{table} x \
             WHERE x.queue_id = q.id)"
        )
    };
    let (ready, due, claim, parked) = (of("q_ready"), of("q_due"), of("q_claim"), of("q_parked"));
    // The columns are computed from left to right, so the difference of the times is that of one queue.
    let sql = format!(
        "WITH t AS MATERIALIZED (SELECT hapax.now_ms() AS now, clock_timestamp() + $2 * interval '1 ms' AS until) \
         SELECT id, counts, (extract(epoch FROM clock_timestamp() - began) * 1000000)::bigint AS took_us FROM ( \
           SELECT q.id, clock_timestamp() AS began, CASE WHEN clock_timestamp() < t.until THEN ( \
             SELECT ARRAY[r.n + f.n, d.n + f.hidden, c.n, p.n, h.n, \
               coalesce(r.bytes, 0) + coalesce(d.bytes, 0) + coalesce(c.bytes, 0) + coalesce(p.bytes, 0) \
                 + coalesce(f.bytes, 0), \
               least(r.oldest, d.oldest, c.oldest, p.oldest, f.oldest)] \
             FROM {ready} r, {due} d, {claim} c, {parked} p, \
               (SELECT count(*) FILTER (WHERE coalesce(x.until_ms, 0) <= t.now) AS n, \
                  count(*) FILTER (WHERE x.until_ms > t.now) AS hidden, sum(x.bytes) AS bytes, \
                  min(x.sent_ms) AS oldest FROM hapax.q_fifo x WHERE x.queue_id = q.id) f, \
               (SELECT count(*) AS n FROM (SELECT DISTINCT u.grp FROM hapax.q_undecided u WHERE u.queue_id = q.id) g, \
                  hapax.q_fifo x WHERE x.queue_id = q.id AND x.grp = g.grp) h \
           ) END AS counts FROM hapax.q_queue q, t WHERE q.id = ANY($1) OFFSET 0) each"
    );
    let rows = sqlx::query(&sql).bind(ids).bind(COUNT_MS).fetch_all(db).await?;
    rows.iter().map(Count::read).collect()
}

impl Inner {
    pub(super) async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        let found = self.stats_of(std::slice::from_ref(name)).await?.pop().flatten();
        found.ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    pub(super) async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let mut found: HashMap<QueueName, QueueStats> = HashMap::new();
        let known: HashMap<&QueueName, i32> = {
            let all = lock(&self.known);
            names.iter().filter_map(|name| Some((name, all.get(name)?.id))).collect()
        };
        for (name, queue_id) in &known {
            if let Some(stats) = lock(&self.counted).stats(*queue_id) {
                found.insert((*name).clone(), self.with_totals(*queue_id, stats));
            }
        }
        let open: HashSet<&QueueName> = names.iter().filter(|name| !found.contains_key(name)).collect();
        let open: Vec<&QueueName> = open.into_iter().collect();
        for together in open.chunks(TOGETHER_MAX) {
            self.count_together(together, &known, &mut found).await?;
        }
        Ok(names.iter().map(|name| found.get(name).copied()).collect())
    }

    async fn count_together(
        &self,
        names: &[&QueueName],
        known: &HashMap<&QueueName, i32>,
        found: &mut HashMap<QueueName, QueueStats>,
    ) -> Result<(), StoreError> {
        let asked: Vec<String> = names.iter().map(|name| name.as_str().to_owned()).collect();
        let ids: Vec<i32> = names.iter().filter_map(|name| known.get(*name)).copied().collect();
        let from: Vec<i64> = ids.iter().map(|id| self.sweep_from(*id)).collect();
        let looked = self.base.pool.run("look at queues", Access::Read, move |db| {
            Box::pin(async move { look(db, &asked, &ids, &from).await })
        });
        let looked = looked.await?;
        {
            let mut all = lock(&self.known);
            for name in names {
                all.remove(*name);
            }
            for (queue, _) in &looked {
                all.insert(queue.name.clone(), std::sync::Arc::new(queue.clone()));
            }
        }
        // What time has caused is done first, so that a lease which has ended is not counted as one.
        for (queue, _) in looked.iter().filter(|(_, due)| *due) {
            self.sweep(queue).await?;
        }
        let names_by_id: HashMap<i32, QueueName> =
            looked.into_iter().map(|(queue, _)| (queue.id, queue.name)).collect();
        let mut open: Vec<i32> = names_by_id.keys().copied().collect();
        while !open.is_empty() {
            let counted = self.base.pool.run("count messages", Access::Read, move |db| {
                Box::pin(async move { count(db, &open).await })
            });
            open = Vec::new();
            for Count { queue_id, stats, took } in counted.await? {
                let Some(stats) = stats else {
                    open.push(queue_id);
                    continue;
                };
                lock(&self.counted).note_stats(queue_id, stats, took);
                if let Some(name) = names_by_id.get(&queue_id) {
                    found.insert(name.clone(), self.with_totals(queue_id, stats));
                }
            }
        }
        Ok(())
    }

    fn with_totals(&self, queue_id: i32, stats: QueueStats) -> QueueStats {
        QueueStats { totals: lock(&self.totals).get(&queue_id).copied().unwrap_or_default(), ..stats }
    }
}
