//! The transactional workload in SQLite: the bank is a table in the file of the inbox.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use hapax::{Cx, SqliteInbox, WorkerBuilder};
use rusqlite::{Connection, Transaction};

use crate::history::{Act, Effect};
use crate::recorder::Payment;
use crate::worker::Workplace;
use crate::workload::Workload;

/// No constraint would catch a duplicate.
const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS transfers (
        receipt INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL, account TEXT NOT NULL, number INTEGER NOT NULL,
        fence INTEGER NOT NULL, deliveries INTEGER NOT NULL
    )";

/// Creates the bank, or opens it.
pub fn open(path: &Path) -> anyhow::Result<Connection> {
    let connection = Connection::open(path).with_context(|| path.display().to_string())?;
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.execute_batch(TABLE)?;
    Ok(connection)
}

/// A worker that writes a transfer in the transaction of its inbox.
pub fn worker(place: &Workplace, workload: Workload, bank: &Path) -> anyhow::Result<WorkerBuilder> {
    let inbox = SqliteInbox::new(open(bank)?)?;
    let queue = place.hapax.queue::<Payment>(workload.queue(&place.run).as_str())?;
    Ok(queue.transactional_worker(&inbox, transfer))
}

fn transfer(payment: Payment, tx: &Transaction<'_>, cx: &Cx) -> Result<i64, rusqlite::Error> {
    let Payment { id, account, number } = payment;
    let (fence, deliveries) = (cx.fence().0.cast_signed(), cx.delivery().deliveries);
    tx.execute(
        "INSERT INTO transfers (id, account, number, fence, deliveries) VALUES (?1, ?2, ?3, ?4, ?5)",
        (id, account, number.cast_signed(), fence, deliveries),
    )?;
    Ok(tx.last_insert_rowid())
}

/// What the bank's table says, as calls that moved money.
pub fn read(path: &Path) -> anyhow::Result<Vec<Act>> {
    let connection = open(path)?;
    let mut rows = connection
        .prepare("SELECT receipt, id, account, number, fence, deliveries FROM transfers ORDER BY receipt")?;
    let acts = rows.query_map([], |row| {
        Ok(Act::Call {
            receipt: row.get::<_, i64>(0)?.cast_unsigned(),
            id: row.get(1)?,
            account: row.get(2)?,
            number: row.get::<_, i64>(3)?.cast_unsigned(),
            fence: row.get::<_, i64>(4)?.cast_unsigned(),
            deliveries: row.get(5)?,
            takeover: false,
            effect: Effect::Moved,
        })
    })?;
    Ok(acts.collect::<Result<_, _>>()?)
}
