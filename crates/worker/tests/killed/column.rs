//! The tiers and their variants, as run by a child process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{OnDoubt, QueueAdmin, Tier};
use hapax_embedded::Embedded;
use hapax_sqlite::SqliteInbox;
use hapax_worker::{Cx, Point, Worker, WorkerBuilder};
use rusqlite::{Transaction, params};

use super::{
    Case, Line, TIMEOUT, database, effects, ledger_folder, manual_clock, note, open_on, queue, store_folder,
};

/// The lease of the killed process.
const LEASE_KILLED: Duration = Duration::from_mins(1);
/// The lease of its successor.
const LEASE: Duration = Duration::from_hours(10);
/// How much time passes between the two processes: every lease of the first has ended. While a worker runs, no time passes:
/// nothing that a slow machine delays can then time out.
pub const BETWEEN: Duration = Duration::from_mins(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Column {
    AtMostOnce,
    AtLeastOnce,
    Keyed,
    Blind,
    Elsewhere,
    Park,
    Transactional,
    Postgres,
}

impl Column {
    pub const ALL: [Self; 8] = [
        Self::AtMostOnce,
        Self::AtLeastOnce,
        Self::Keyed,
        Self::Blind,
        Self::Elsewhere,
        Self::Park,
        Self::Transactional,
        Self::Postgres,
    ];

    /// The columns that can be made on this machine.
    pub fn available() -> Vec<Self> {
        let postgres = super::postgres::server();
        Self::ALL.into_iter().filter(|column| *column != Self::Postgres || postgres.is_ok()).collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
            Self::Keyed => "effectively-once, `retry`, keyed sink",
            Self::Blind => "effectively-once, `retry`, blind sink",
            Self::Elsewhere => "effectively-once, `retry`, blind sink, ledger elsewhere",
            Self::Park => "effectively-once, `park`, blind sink",
            Self::Transactional => "transactional (SQLite)",
            Self::Postgres => "transactional (Postgres)",
        }
    }

    pub fn tier(self) -> Tier {
        match self {
            Self::AtMostOnce => Tier::AtMostOnce,
            Self::AtLeastOnce => Tier::AtLeastOnce,
            Self::Keyed | Self::Blind | Self::Elsewhere | Self::Park => Tier::EffectivelyOnce,
            Self::Transactional | Self::Postgres => Tier::Transactional,
        }
    }

    /// Whether an outcome is recorded for duplicates.
    pub fn records(self) -> bool {
        matches!(self.tier(), Tier::EffectivelyOnce | Tier::Transactional)
    }
}

pub type Die = Arc<dyn Fn(Point) + Send + Sync>;

/// Kills this process when a delivery passes the point; no destructor and no flush runs.
pub fn die_at(deadly: Option<Point>) -> Die {
    Arc::new(move |point| {
        if deadly == Some(point) {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            loop {
                std::thread::park();
            }
        }
    })
}

pub fn line(cx: &Cx) -> Line {
    Line {
        key: cx.idempotency_key().as_str().to_owned(),
        fence: cx.fence().0,
        derived: cx.derived_key("charge").as_str().to_owned(),
    }
}

/// Causes the effect; returns the fence of the run whose effect counts.
fn act(folder: &std::path::Path, keyed: bool, line: &Line) -> u64 {
    note(folder, "run", line);
    let known = effects(folder).lines.into_iter().find(|known| known.derived == line.derived);
    if let Some(known) = known.filter(|_| keyed) {
        note(folder, "refused", line);
        return known.fence;
    }
    note(folder, "effect", line);
    line.fence
}

fn transactional(builder: WorkerBuilder, folder: PathBuf, die: Die) -> WorkerBuilder {
    let inbox = SqliteInbox::new(database(&folder)).unwrap();
    builder.transactional_handler(&inbox, move |_: u32, tx: &Transaction<'_>, cx: &Cx| {
        let line = line(cx);
        note(&folder, "run", &line);
        let insert = "INSERT INTO effects VALUES (?1, ?2, ?3)";
        tx.execute(insert, params![line.key, line.fence as i64, line.derived])?;
        // `effect_point` is only for async handlers.
        die(Point::InEffect);
        Ok::<_, rusqlite::Error>(line.fence)
    })
}

pub fn lease(case: &Case) -> Duration {
    if case.point.is_some() { LEASE_KILLED } else { LEASE }
}

fn builder(store: &Arc<Embedded>, ledger: Option<&Arc<Embedded>>, case: &Case, die: &Die) -> WorkerBuilder {
    let builder = match (case.column.tier(), ledger) {
        (Tier::EffectivelyOnce, None) => Worker::builder(store.clone(), queue()),
        (_, None) => Worker::over(store.clone(), queue()),
        (_, Some(ledger)) => Worker::over(store.clone(), queue()).ledger(ledger.clone()),
    };
    let hook = die.clone();
    let builder = builder.lease(lease(case)).hook(move |point| hook(point));
    if case.column == Column::Transactional {
        return transactional(builder, case.folder.clone(), die.clone());
    }
    let (folder, keyed) = (case.folder.clone(), case.column == Column::Keyed);
    let builder = builder.handler(move |_: u32, cx: Cx| {
        let folder = folder.clone();
        async move {
            let fence = act(&folder, keyed, &line(&cx));
            cx.effect_point().await;
            Ok::<_, std::io::Error>(fence)
        }
    });
    if case.column == Column::Park { builder.on_doubt(OnDoubt::Park) } else { builder }
}

/// Works until the queue is empty, or dies.
pub async fn child(case: Case) {
    if case.column == Column::Postgres {
        return super::postgres::child(case).await;
    }
    let clock = manual_clock();
    let store = open_on(store_folder(&case.folder), clock.clone());
    let ledger =
        (case.column == Column::Elsewhere).then(|| open_on(ledger_folder(&case.folder), clock.clone()));
    if case.point.is_none() {
        clock.advance_ms(BETWEEN.as_millis() as u64);
    }
    let die = die_at(case.point);
    let builder = builder(&store, ledger.as_ref(), &case, &die).clock(clock.clone());
    work(store.clone(), builder).await;
    store.close();
    if let Some(ledger) = ledger {
        ledger.close();
    }
}

/// Works until the queue is empty.
pub async fn work(store: Arc<dyn QueueAdmin>, builder: WorkerBuilder) {
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let rest = async move {
        loop {
            let stats = store.stats(&queue()).await.unwrap();
            // All received messages have reached the worker, which finishes them before it ends.
            let reached = stats.totals.delivered == watch.counts().delivered;
            if reached && stats.ready + stats.delayed + stats.in_flight == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let report =
        tokio::time::timeout(TIMEOUT / 2, worker.run(rest)).await.expect("it takes too long").unwrap();
    assert!(report.drained, "{report:?}");
}
