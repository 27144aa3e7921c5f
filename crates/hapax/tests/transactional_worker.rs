//! A worker whose handler writes to the user's own database, built from a typed queue.

#![cfg(feature = "sqlite")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hapax::{Cx, Hapax, QueueConfig, SqliteInbox};
use rusqlite::{Connection, Transaction};

#[tokio::test]
async fn a_failed_run_leaves_nothing_and_a_duplicate_books_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await.unwrap();
    let charges = hapax.queue::<i64>("charges").unwrap();
    let at_once = QueueConfig::default().retry(hapax::RetryPolicy::at_once().attempts(5));
    charges.ensure_with_dead_letters(at_once).await.unwrap();
    for _ in 0..2 {
        charges.send_keyed(&1999, "order-1").await.unwrap();
    }
    charges.send_keyed(&2499, "order-2").await.unwrap();

    let shop = folder.path().join("shop.db");
    let connection = Connection::open(&shop).unwrap();
    connection.execute_batch("CREATE TABLE bookings (cents INTEGER)").unwrap();
    let inbox = SqliteInbox::new(connection).unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let book = move |cents: i64, tx: &Transaction<'_>, _cx: &Cx| {
        tx.execute("INSERT INTO bookings VALUES (?1)", [cents])?;
        // The very first run fails after its write.
        if counted.fetch_add(1, Ordering::Relaxed) == 0 { Err(rusqlite::Error::InvalidQuery) } else { Ok(()) }
    };
    let worker = charges.transactional_worker(&inbox, book).concurrency(4).build().await.unwrap();
    let store = hapax.store().clone();
    let name = charges.name().clone();
    let empty = async move {
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_mins(1);
        loop {
            let stats = store.stats(&name).await.unwrap();
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                break;
            }
            assert!(tokio::time::Instant::now() < deadline, "{stats:?}");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    worker.run(empty).await.unwrap();
    let booked: Vec<i64> = {
        let connection = Connection::open(&shop).unwrap();
        let mut select = connection.prepare("SELECT cents FROM bookings ORDER BY cents").unwrap();
        select.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    assert_eq!(booked, [1999, 2499]);
    assert_eq!(runs.load(Ordering::Relaxed), 3, "one failed, one for each order");
}
