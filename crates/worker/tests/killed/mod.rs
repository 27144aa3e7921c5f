//! A worker in a child process that is killed, and the observable state afterwards.

pub mod column;
pub mod postgres;

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use column::Column;
use hapax_core::{
    EntryId, EntryState, Ledger as _, ManualClock, NewMessage, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::Point;
use rusqlite::{Connection, OptionalExtension as _};

/// Timeout of every wait; only a test that hangs reaches it.
const TIMEOUT: Duration = Duration::from_mins(4);
/// Locked for reading while this process has a store open, for writing while it forks: between fork and exec the child
/// inherits the store's lock, which would then outlive the store.
static FORK: RwLock<()> = RwLock::new(());
const FOLDER: &str = "HAPAX_TEST_CHILD_FOLDER";
const COLUMN: &str = "HAPAX_TEST_CHILD_COLUMN";
const POINT: &str = "HAPAX_TEST_CHILD_POINT";

/// The task of a child.
pub struct Case {
    pub folder: PathBuf,
    pub column: Column,
    pub point: Option<Point>,
}

/// The task of this process, if it is a child.
pub fn child_case() -> Option<Case> {
    let folder = PathBuf::from(std::env::var_os(FOLDER)?);
    let column: usize = std::env::var(COLUMN).unwrap().parse().unwrap();
    let point = std::env::var(POINT).ok().map(|point| point.parse().unwrap());
    Some(Case { folder, column: Column::ALL[column], point })
}

/// Runs a child to its end. Returns whether it was killed by signal 9; any other abnormal end is a failure.
pub fn run_child(folder: &Path, column: Column, point: Option<Point>, what: &str) -> bool {
    let log = folder.join("child.log");
    let out = File::create(&log).unwrap();
    let place = Column::ALL.iter().position(|known| *known == column).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_process", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder).env(COLUMN, place.to_string());
    if let Some(point) = point {
        command.env(POINT, point.name());
    }
    command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
    let mut child = {
        let _alone = FORK.write().unwrap();
        command.spawn().unwrap()
    };
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{what}: the process hangs; it said: {}", fs::read_to_string(log).unwrap());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let killed = status.signal() == Some(9);
    assert!(killed || status.success(), "{what}: {status}; it said: {}", fs::read_to_string(log).unwrap());
    killed
}

/// One effect, as recorded by its sink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub key: String,
    pub fence: u64,
    pub derived: String,
}

/// The records of the sink.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effects {
    /// Handler runs that reached the sink.
    pub runs: usize,
    /// Effects that happened.
    pub lines: Vec<Line>,
    /// Calls that the sink refused.
    pub refused: usize,
}

/// How often the effect happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Lost,
    Once,
    Duplicate,
    InDoubt { effects: usize },
}

/// The state when everything is settled.
#[derive(Debug, Clone)]
pub struct Found {
    pub fate: Fate,
    pub effects: Effects,
    pub parked: u64,
    /// The state of the ledger's entry.
    pub entry: Option<String>,
    /// The outcome that a duplicate gets.
    pub outcome: Option<String>,
}

pub fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// A clock that stands still. A store that was ahead of it when it was closed continues from its own time.
pub fn manual_clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at_ms(1_800_000_000_000))
}

pub fn open_on(folder: PathBuf, clock: Arc<ManualClock>) -> Arc<Embedded> {
    Arc::new(Embedded::open(folder, Options { clock, ..Options::default() }).unwrap())
}

pub fn store_folder(folder: &Path) -> PathBuf {
    folder.join("store")
}

pub fn ledger_folder(folder: &Path) -> PathBuf {
    folder.join("ledger")
}

pub fn database(folder: &Path) -> Connection {
    let connection = Connection::open(folder.join("shop.db")).unwrap();
    connection.pragma_update(None, "journal_mode", "wal").unwrap();
    connection.pragma_update(None, "synchronous", "full").unwrap();
    connection.busy_timeout(Duration::from_secs(10)).unwrap();
    connection
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A queue with one message.
pub fn prepare(folder: &Path, column: Column) {
    File::create(folder.join("sink")).unwrap().sync_all().unwrap();
    if column == Column::Postgres {
        postgres::prepare(folder);
        return send(folder, column);
    }
    if column == Column::Transactional {
        let table = "CREATE TABLE effects (key TEXT, fence INTEGER, derived TEXT)";
        database(folder).execute_batch(table).unwrap();
    }
    {
        let _no_fork = FORK.read().unwrap();
        let store = open_on(store_folder(folder), manual_clock());
        let config = QueueConfig { tier: column.tier(), ..QueueConfig::sqs() };
        block_on(store.create_queue(&queue(), config)).unwrap();
        store.close();
    }
    send(folder, column);
}

pub fn send(folder: &Path, column: Column) {
    let message = NewMessage::new("1999").idempotency_key(&"order-7".parse().unwrap());
    if column == Column::Postgres {
        return postgres::send(folder, message);
    }
    let _no_fork = FORK.read().unwrap();
    let store = open_on(store_folder(folder), manual_clock());
    block_on(store.send(&queue(), vec![message])).unwrap()[0].as_ref().unwrap();
    store.close();
}

/// Writes a line durably, so that it survives any kill.
pub fn note(folder: &Path, what: &str, line: &Line) {
    let mut file = OpenOptions::new().append(true).open(folder.join("sink")).unwrap();
    let text = format!("{what} {} {} {}\n", line.key, line.fence, line.derived);
    file.write_all(text.as_bytes()).unwrap();
    file.sync_all().unwrap();
}

/// The lines of the sink.
pub fn effects(folder: &Path) -> Effects {
    let mut effects = Effects::default();
    for text in fs::read_to_string(folder.join("sink")).unwrap().lines() {
        let [what, key, fence, derived] = text.split(' ').collect::<Vec<_>>()[..] else { panic!("{text:?}") };
        match what {
            "run" => effects.runs += 1,
            "refused" => effects.refused += 1,
            "effect" => effects.lines.push(Line {
                key: key.into(),
                fence: fence.parse().unwrap(),
                derived: derived.into(),
            }),
            _ => panic!("{text:?}"),
        }
    }
    effects
}

/// Reads the sink, the queue and the ledger.
pub fn inspect(folder: &Path, column: Column) -> Found {
    if column == Column::Postgres {
        return postgres::inspect(folder);
    }
    let _no_fork = FORK.read().unwrap();
    let clock = manual_clock();
    let store = open_on(store_folder(folder), clock.clone());
    let stats = block_on(store.stats(&queue())).unwrap();
    assert_eq!((stats.ready, stats.delayed, stats.in_flight), (0, 0, 0), "the queue is not at rest");
    let mut effects = effects(folder);
    let id = EntryId::of_queue(&queue(), "order-7".parse().unwrap());
    let (entry, outcome) = match column {
        Column::Transactional => {
            let database = database(folder);
            let mut select =
                database.prepare("SELECT key, fence, derived FROM effects ORDER BY rowid").unwrap();
            let line = |row: &rusqlite::Row<'_>| {
                let fence: i64 = row.get(1)?;
                Ok(Line { key: row.get(0)?, fence: fence as u64, derived: row.get(2)? })
            };
            effects.lines = select.query_map([], line).unwrap().map(Result::unwrap).collect();
            let select = "SELECT outcome FROM hapax_inbox WHERE scope = ?1 AND key = ?2";
            let key = [id.scope.as_str(), id.key.as_str()];
            let outcome = database.query_row(select, key, |row| row.get::<_, String>(0)).optional().unwrap();
            (outcome.as_ref().map(|_| "completed".to_owned()), outcome)
        }
        Column::Elsewhere => {
            let ledger = open_on(ledger_folder(folder), clock.clone());
            let found = entry(&ledger, &clock, &id);
            ledger.close();
            found
        }
        _ => entry(&store, &clock, &id),
    };
    store.close();
    let fate = match effects.lines.len() {
        effects if stats.parked > 0 => Fate::InDoubt { effects },
        0 => Fate::Lost,
        1 => Fate::Once,
        _ => Fate::Duplicate,
    };
    Found { fate, effects, parked: stats.parked, entry, outcome }
}

fn entry(ledger: &Embedded, clock: &ManualClock, id: &EntryId) -> (Option<String>, Option<String>) {
    let deadline = Instant::now() + TIMEOUT;
    let entry = loop {
        // Each time its store is opened, an open claim gets a full lease again.
        match block_on(ledger.entry(id)).unwrap() {
            Some(entry) if entry.state == EntryState::Processing => {
                assert!(Instant::now() < deadline, "a claim without a holder does not lapse: {entry:?}");
                clock.advance_ms(10_000);
            }
            entry => break entry,
        }
    };
    let value = entry.as_ref().and_then(|entry| entry.outcome.clone()).and_then(|outcome| outcome.value);
    (entry.map(|entry| entry.state.as_str().to_owned()), value.map(|json| json.as_str().to_owned()))
}
