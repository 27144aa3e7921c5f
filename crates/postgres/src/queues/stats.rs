//! What queues hold now, for many queues by one statement.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{QueueName, QueueStats, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::counted::took;
use super::{Inner, Queue, catalogue, lock};
use crate::error::{Access, Failure};

/// Queues of one statement.
const TOGETHER_MAX: usize = 1_000;
/// A statement that has counted for this long begins no further queue; the next statement counts the rest. So queues that take
/// long together do not exceed the time of an operation, and what was counted is not lost.
const COUNT_MS: i64 = 200;

/// The queues that a statement counts.
#[derive(Debug, Clone, Default)]
struct Asked {
    names: Vec<String>,
    /// Their numbers as this process knows them; 0: not known.
    ids: Vec<i32>,
    /// The times behind which to look for leases and delays that are over.
    from: Vec<i64>,
    /// Whether to look: a queue in which time has something to do is not counted.
    looks: bool,
    /// How long it counts.
    count_ms: i64,
}

/// A queue as a statement has found it.
struct Counted {
    queue: Queue,
    /// A lease or a delay is over.
    due: bool,
    /// `None`: it is due, or there was no time left for it.
    stats: Option<QueueStats>,
    took: Duration,
}

impl Counted {
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
        Ok(Self { queue: Queue::read(row)?, due: row.try_get("due")?, stats, took: took(row)? })
    }
}

/// Counts queues until its time is over. A queue that does not exist is left out.
async fn count(db: &mut PgConnection, asked: &Asked) -> Result<Vec<Counted>, Failure> {
    let over = |table: &str, time: &str, also: &str| {
        format!(
            "EXISTS (SELECT 1 FROM hapax.{table} x WHERE x.queue_id = q.id AND x.{time} > q.from_ms \
             AND x.{time} <= t.now{also})"
        )
    };
    // A lease ends no earlier than its length after the start of the server.
    let lease = over("q_claim", "until_ms", " AND t.started + x.lease_ms <= t.now");
    let (delay, head) = (over("q_due", "until_ms", ""), over("q_head", "due_ms", ""));
    let of = |table: &str| {
        format!(
            "(SELECT count(*) AS n, sum(x.bytes) AS bytes, min(x.sent_ms) AS oldest FROM hapax.{table} x \
             WHERE x.queue_id = d.id)"
        )
    };
    let (ready, hidden, leased, parked) = (of("q_ready"), of("q_due"), of("q_claim"), of("q_parked"));
    // The subqueries end in OFFSET 0 so that the planner leaves them as they are: `due` is found before `began` is read, and
    // both before the queue is counted.
    let sql = format!(
        "WITH t AS MATERIALIZED (SELECT hapax.now_ms() AS now, hapax.started_ms() AS started, \
             clock_timestamp() + $5 * interval '1 ms' AS until) \
         SELECT e.*, (extract(epoch FROM clock_timestamp() - began) * 1000000)::bigint AS took_us FROM ( \
           SELECT d.*, clock_timestamp() AS began, CASE WHEN NOT d.due AND clock_timestamp() < t.until THEN ( \
             SELECT ARRAY[r.n + f.n, h.n + f.hidden, c.n, p.n, g.n, \
               coalesce(r.bytes, 0) + coalesce(h.bytes, 0) + coalesce(c.bytes, 0) + coalesce(p.bytes, 0) \
                 + coalesce(f.bytes, 0), \
               least(r.oldest, h.oldest, c.oldest, p.oldest, f.oldest)] \
             FROM {ready} r, {hidden} h, {leased} c, {parked} p, \
               (SELECT count(*) FILTER (WHERE coalesce(x.until_ms, 0) <= t.now) AS n, \
                  count(*) FILTER (WHERE x.until_ms > t.now) AS hidden, sum(x.bytes) AS bytes, \
                  min(x.sent_ms) AS oldest FROM hapax.q_fifo x WHERE x.queue_id = d.id) f, \
               (SELECT coalesce(sum(w.n), 0)::bigint AS n FROM \
                  (SELECT DISTINCT u.grp FROM hapax.q_undecided u WHERE u.queue_id = d.id) u, LATERAL \
                  (SELECT count(*) AS n FROM hapax.q_fifo x WHERE x.queue_id = d.id AND x.grp = u.grp) w) g \
           ) END AS counts FROM t, ( \
             SELECT q.*, $4 AND ({lease} OR {delay} OR {head}) AS due FROM t, ( \
               SELECT {}, CASE WHEN a.known = id THEN a.from_ms ELSE 0 END AS from_ms \
               FROM unnest($1::text[], $2::int[], $3::bigint[]) a(queue, known, from_ms) \
               JOIN hapax.q_queue ON name = a.queue OFFSET 0) q OFFSET 0) d OFFSET 0) e",
        catalogue::COLUMNS
    );
    let query = sqlx::query(&sql).bind(&asked.names).bind(&asked.ids).bind(&asked.from);
    let rows = query.bind(asked.looks).bind(asked.count_ms).fetch_all(db).await?;
    rows.iter().map(Counted::read).collect()
}

impl Inner {
    pub(super) async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        let found = self.stats_of(std::slice::from_ref(name)).await?.pop().flatten();
        found.ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    pub(super) async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let mut found: HashMap<QueueName, QueueStats> = HashMap::new();
        let mut open: HashSet<&QueueName> = HashSet::new();
        for name in names {
            let known = lock(&self.known).get(name).map(|queue| queue.id);
            let counted = known.and_then(|id| Some((id, lock(&self.counted).stats(id)?)));
            if let Some((id, stats)) = counted {
                found.insert(name.clone(), self.with_totals(id, stats));
            } else {
                open.insert(name);
            }
        }
        let open: Vec<QueueName> = open.into_iter().cloned().collect();
        for together in open.chunks(TOGETHER_MAX) {
            // What time has caused is done first, so that a lease which has ended is not counted as one.
            let swept = self.count_together(together.to_vec(), true, &mut found).await?;
            self.count_together(swept, false, &mut found).await?;
        }
        Ok(names.iter().map(|name| found.get(name).copied()).collect())
    }

    /// Counts queues. With `looks`, does what time has caused in some instead, and returns these.
    async fn count_together(
        &self,
        mut names: Vec<QueueName>,
        looks: bool,
        found: &mut HashMap<QueueName, QueueStats>,
    ) -> Result<Vec<QueueName>, StoreError> {
        let (mut swept, mut count_ms) = (Vec::new(), COUNT_MS);
        while !names.is_empty() {
            let asked = Asked { count_ms, ..self.asked(&names, looks) };
            let all = self.base.pool.run("count messages", Access::Read, move |db| {
                Box::pin(async move { count(db, &asked).await })
            });
            let all = all.await?;
            self.note_known(&names, &all);
            let before = names.len();
            names.clear();
            for Counted { queue, due, stats, took } in all {
                match stats {
                    Some(stats) => {
                        lock(&self.counted).note_stats(queue.id, stats, took);
                        found.insert(queue.name, self.with_totals(queue.id, stats));
                    }
                    None if due => {
                        self.sweep(&queue).await?;
                        swept.push(queue.name);
                    }
                    None => names.push(queue.name),
                }
            }
            if names.len() == before {
                // To look at the first queue took all the time. Its count is bounded as every statement is.
                count_ms = i64::from(i32::MAX);
            }
        }
        Ok(swept)
    }

    fn asked(&self, names: &[QueueName], looks: bool) -> Asked {
        let mut asked = Asked { looks, ..Asked::default() };
        for name in names {
            let known = lock(&self.known).get(name).map(|queue| queue.id);
            asked.names.push(name.as_str().to_owned());
            asked.ids.push(known.unwrap_or(0));
            asked.from.push(known.map_or(0, |id| self.sweep_from(id)));
        }
        asked
    }

    /// Remembers queues as they were found; those that were not found do not exist.
    fn note_known(&self, names: &[QueueName], all: &[Counted]) {
        let mut known = lock(&self.known);
        for name in names {
            known.remove(name);
        }
        for Counted { queue, .. } in all {
            known.insert(queue.name.clone(), Arc::new(queue.clone()));
        }
    }

    fn with_totals(&self, queue_id: i32, stats: QueueStats) -> QueueStats {
        QueueStats { totals: lock(&self.totals).get(&queue_id).copied().unwrap_or_default(), ..stats }
    }
}
