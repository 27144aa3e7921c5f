//! The bank in the database of the store: transfer, ledger entry and ack are one transaction.

use std::sync::Arc;

use hapax::postgres::{Options, PostgresInbox, PostgresStore};
use hapax::{Cx, Hapax, WorkerBuilder};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

use crate::history::{Act, Effect};
use crate::recorder::Payment;
use crate::workload::Workload;

/// The bank's table in a run.
fn table(run: &str) -> String {
    format!("hapax_verify_{run}")
}

/// No constraint would catch a duplicate.
pub async fn create(url: &str, run: &str) -> anyhow::Result<()> {
    let mut db = PgConnection::connect(url).await?;
    let create = format!(
        "CREATE TABLE {} (receipt BIGINT GENERATED ALWAYS AS IDENTITY, id TEXT NOT NULL, account TEXT NOT NULL, \
         number BIGINT NOT NULL, fence BIGINT NOT NULL, deliveries BIGINT NOT NULL)",
        table(run)
    );
    db.execute(create.as_str()).await?;
    Ok(())
}

pub async fn drop_bank(url: &str, run: &str) -> anyhow::Result<()> {
    let mut db = PgConnection::connect(url).await?;
    db.execute(format!("DROP TABLE IF EXISTS {}", table(run)).as_str()).await?;
    Ok(())
}

pub async fn worker(url: &str, workload: Workload, run: &str) -> anyhow::Result<WorkerBuilder> {
    let store = PostgresStore::open(url, Options::default()).await?;
    let inbox = PostgresInbox::new(&store);
    let hapax = Hapax::with_store(Arc::new(store));
    let queue = hapax.queue::<Payment>(workload.queue(run).as_str())?;
    let insert: Arc<str> = format!(
        "INSERT INTO {} (id, account, number, fence, deliveries) VALUES ($1, $2, $3, $4, $5) RETURNING receipt",
        table(run)
    )
    .into();
    Ok(queue.async_transactional_worker(&inbox, move |payment, db, cx| {
        let insert = insert.clone();
        Box::pin(async move { transfer(&insert, payment, db, &cx).await })
    }))
}

async fn transfer(
    insert: &str,
    payment: Payment,
    db: &mut PgConnection,
    cx: &Cx,
) -> Result<i64, sqlx::Error> {
    let row = sqlx::query(insert)
        .bind(payment.id)
        .bind(payment.account)
        .bind(payment.number.cast_signed())
        .bind(cx.fence().0.cast_signed())
        .bind(i64::from(cx.delivery().deliveries))
        .fetch_one(db)
        .await?;
    row.try_get(0)
}

pub async fn read(url: &str, run: &str) -> anyhow::Result<Vec<Act>> {
    let mut db = PgConnection::connect(url).await?;
    let select = format!(
        "SELECT receipt, id, account, number, fence, deliveries FROM {} ORDER BY receipt",
        table(run)
    );
    let rows = sqlx::query(&select).fetch_all(&mut db).await?;
    let act = |row: &sqlx::postgres::PgRow| -> anyhow::Result<Act> {
        let number = |at: usize| row.try_get::<i64, _>(at).map(i64::cast_unsigned);
        Ok(Act::Call {
            receipt: number(0)?,
            id: row.try_get(1)?,
            account: row.try_get(2)?,
            number: number(3)?,
            fence: number(4)?,
            deliveries: u32::try_from(number(5)?).unwrap_or(u32::MAX),
            takeover: false,
            effect: Effect::Moved,
        })
    };
    rows.iter().map(act).collect()
}
