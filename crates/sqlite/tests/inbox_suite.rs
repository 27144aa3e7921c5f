//! SQLite passes the conformance suite of the transactional seam in its blocking form.

use std::sync::Arc;
use std::time::Duration;

use hapax_conformance::inbox::{BlockingHarness, InboxHarness};
use hapax_conformance::inbox_suite;
use hapax_sqlite::SqliteInbox;
use rusqlite::{Connection, Transaction};

fn write(tx: &Transaction<'_>) {
    tx.execute("INSERT INTO effects VALUES (1)", []).unwrap();
}

fn count(tx: &Transaction<'_>) -> u64 {
    tx.query_row("SELECT count(*) FROM effects", [], |row| row.get::<_, i64>(0)).unwrap() as u64
}

async fn fresh() -> Box<dyn InboxHarness> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let open = move || {
        // Keeps the folder alive as long as the harness.
        let _ = folder.path();
        let connection = Connection::open(&path).unwrap();
        connection.pragma_update(None, "journal_mode", "wal").unwrap();
        connection.execute_batch("CREATE TABLE IF NOT EXISTS effects (number INTEGER)").unwrap();
        SqliteInbox::new(connection).unwrap().lock_timeout(Duration::from_millis(100)).unwrap()
    };
    Box::new(BlockingHarness { inbox: Arc::new(open()), open: Box::new(open), write, count })
}

inbox_suite!(fresh);

#[test]
fn a_database_that_may_forget_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = SqliteInbox::new(Connection::open_in_memory().unwrap()).err().unwrap();
    assert!(refused.to_string().contains("use a file"), "{refused}");
    let lax = Connection::open(folder.path().join("lax.db")).unwrap();
    lax.pragma_update(None, "synchronous", "normal").unwrap();
    let refused = SqliteInbox::new(lax).err().unwrap();
    assert!(refused.to_string().contains("set it to FULL"), "{refused}");
}

#[test]
fn a_panic_rolls_back_and_the_connection_is_usable() {
    use hapax_core::BlockingInbox as _;
    use hapax_core::inbox::TransactionEnd;

    let folder = tempfile::tempdir().unwrap();
    let connection = Connection::open(folder.path().join("shop.db")).unwrap();
    connection.execute_batch("CREATE TABLE effects (number INTEGER)").unwrap();
    let inbox = SqliteInbox::new(connection).unwrap();
    let panicking = inbox.clone();
    let panicked = std::thread::spawn(move || {
        panicking.in_transaction(|tx| -> ((), TransactionEnd) {
            write(tx);
            panic!("told so");
        })
    });
    assert!(panicked.join().is_err());
    assert_eq!(inbox.in_transaction(|tx| (count(tx), TransactionEnd::Rollback)).unwrap(), 0);
}
