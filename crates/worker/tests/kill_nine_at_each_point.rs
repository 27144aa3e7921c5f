//! kill -9 at each point that a delivery passes, for each tier: how often the effect happened, observed, not deduced.
//! This test generates the table in `docs/guarantees.md`; `HAPAX_BLESS=1` writes it.

mod killed;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_worker::Point;
use killed::column::{Column, child};
use killed::{Effects, Fate, Found, child_case, inspect, prepare, run_child, send};

/// Maximum number of concurrent children; each has its own threads.
const CHILDREN_MAX: usize = 4;
const BEGIN: &str =
    "<!-- killed at each point: begin, made by crates/worker/tests/kill_nine_at_each_point.rs -->";
const END: &str = "<!-- killed at each point: end -->";

/// The process that is killed, and its successor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process() {
    if let Some(case) = child_case() {
        child(case).await;
    }
}

/// Kills a worker at a point, lets another one finish, and inspects the result. `None`: the tier does not pass the
/// point.
fn kill_at(column: Column, point: Point) -> Option<Found> {
    let folder = tempfile::tempdir().unwrap();
    let what = format!("{} killed at {point}", column.name());
    prepare(folder.path(), column);
    let killed = run_child(folder.path(), column, Some(point), &what);
    if !killed {
        let found = inspect(folder.path(), column);
        check(&what, column, &found);
        assert_eq!((found.fate, found.effects.runs), (Fate::Once, 1), "{what}: nobody died, {found:?}");
        return None;
    }
    assert!(!run_child(folder.path(), column, None, &what), "{what}: the second process died");
    let found = inspect(folder.path(), column);
    check(&what, column, &found);
    if column.records() {
        // Afterwards the producer sends a duplicate: it finds the recorded outcome.
        send(folder.path(), column);
        assert!(!run_child(folder.path(), column, None, &what), "{what}: the third process died");
        let again = inspect(folder.path(), column);
        assert_eq!(again.effects, found.effects, "{what}: a duplicate of the message ran");
        let parked = if found.parked == 0 { 0 } else { 2 };
        assert_eq!((again.parked, &again.outcome), (parked, &found.outcome), "{what}");
    }
    Some(found)
}

/// The invariants that hold regardless of the table, so that `HAPAX_BLESS` cannot remove them.
fn check(what: &str, column: Column, found: &Found) {
    let Found { fate, effects, parked, entry, outcome } = found;
    let Effects { lines, refused, .. } = effects;
    for pair in lines.windows(2) {
        assert!(pair[0].fence < pair[1].fence, "{what}: a later run has no greater fence: {pair:?}");
    }
    for line in lines {
        assert_eq!((line.key.as_str(), &line.derived), ("order-7", &lines[0].derived), "{what}");
    }
    match column {
        Column::AtMostOnce => assert!(lines.len() <= 1, "{what}: at most once, {found:?}"),
        Column::Keyed | Column::Transactional | Column::Postgres => {
            assert_eq!(*fate, Fate::Once, "{what}: {found:?}");
        }
        Column::AtLeastOnce | Column::Blind | Column::Elsewhere => {
            assert!(!lines.is_empty(), "{what}: lost, {found:?}");
        }
        Column::Park => {
            let allowed = matches!(fate, Fate::Once | Fate::InDoubt { .. });
            assert!(allowed && lines.len() <= 1, "{what}: parked rather than twice, {found:?}");
        }
    }
    if column.records() {
        // The first effect counts if the sink is idempotent by key, otherwise that of the last run.
        let counts = if column == Column::Keyed { lines.first() } else { lines.last() };
        let (state, recorded) = match fate {
            Fate::InDoubt { .. } => ("in_doubt", None),
            _ => ("completed", counts.map(|line| line.fence.to_string())),
        };
        assert_eq!((entry.as_deref(), outcome), (Some(state), &recorded), "{what}: {found:?}");
    }
    assert_eq!(*parked > 0, matches!(fate, Fate::InDoubt { .. }), "{what}");
    assert!(*refused == 0 || column == Column::Keyed, "{what}");
}

type Table = BTreeMap<(Point, Column), Option<Found>>;

fn kill_everywhere(columns: &[Column]) -> Table {
    let cases: Vec<_> =
        Point::ALL.iter().flat_map(|point| columns.iter().map(|column| (*point, *column))).collect();
    let (next, table) = (AtomicUsize::new(0), Mutex::new(Table::new()));
    std::thread::scope(|scope| {
        for _ in 0..CHILDREN_MAX {
            scope.spawn(|| {
                while let Some(&(point, column)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = kill_at(column, point);
                    table.lock().unwrap().insert((point, column), found);
                }
            });
        }
    });
    table.into_inner().unwrap()
}

fn cell(found: Option<&Found>) -> String {
    let Some(found) = found else { return "-".into() };
    match found.fate {
        Fate::Lost => "lost".into(),
        Fate::Once if found.effects.refused > 0 => "once *".into(),
        Fate::Once => "once".into(),
        Fate::Duplicate => "**duplicate**".into(),
        Fate::InDoubt { effects } => format!("in doubt ({effects})"),
    }
}

fn markdown(table: &Table, columns: &[Column]) -> String {
    let mut text = String::from("| killed at |");
    for column in columns {
        write!(text, " {} |", column.name()).unwrap();
    }
    text.push_str("\n|");
    text.push_str(&"---|".repeat(1 + columns.len()));
    text.push('\n');
    for point in Point::ALL {
        write!(text, "| `{point}` |").unwrap();
        for column in columns {
            write!(text, " {} |", cell(table[&(point, *column)].as_ref())).unwrap();
        }
        text.push('\n');
    }
    text
}

/// The first columns of a table: without PostgreSQL its column, the last one, is not compared.
fn columns_of(table: &str, count: usize) -> String {
    let row = |row: &str| row.split('|').take(2 + count).collect::<Vec<_>>().join("|") + "|";
    table.trim().lines().map(row).collect::<Vec<_>>().join("\n")
}

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guarantees.md")
}

#[test]
fn the_table_of_the_guarantees() {
    if child_case().is_some() {
        return;
    }
    let columns = Column::available();
    let table = kill_everywhere(&columns);
    for column in &columns {
        let passed = Point::ALL.iter().filter(|point| table[&(**point, *column)].is_some()).count();
        assert!(passed >= 4, "{} passes only {passed} points", column.name());
    }
    let made = markdown(&table, &columns);
    println!("{made}");
    let text = std::fs::read_to_string(page()).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("docs/guarantees.md has lost its marker");
    let (written, after) = rest.split_once(END).expect("docs/guarantees.md has lost its second marker");
    let written = columns_of(written, columns.len());
    if std::env::var_os("HAPAX_BLESS").is_some() {
        assert_eq!(columns.len(), Column::ALL.len(), "the whole table needs PostgreSQL 15");
        std::fs::write(page(), format!("{before}{BEGIN}\n{made}{END}{after}")).unwrap();
        return;
    }
    assert!(
        written.trim() == made.trim(),
        "docs/guarantees.md does not say what happens. It happens:\n{made}\nit says:\n{written}\n\
         If that is meant, run this test with HAPAX_BLESS=1 and read what changed."
    );
}
