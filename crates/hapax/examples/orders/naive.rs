//! The same three programs as they are often written.

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use hapax::{Hapax, Receive};
use sqlx::Connection as _;

use crate::connect;

/// The service: order and event in one transaction.
pub async fn service(url: &str, port: u16) -> anyhow::Result<()> {
    let app = Router::new().route("/orders/{id}", post(place)).with_state(url.to_owned());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    Ok(axum::serve(listener, app).await?)
}

async fn place(State(url): State<String>, Path(id): Path<i64>) -> StatusCode {
    match place_order(&url, id).await {
        Ok(()) => StatusCode::OK,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn place_order(url: &str, id: i64) -> anyhow::Result<()> {
    let mut db = connect(url).await?;
    let mut tx = db.begin().await?;
    let insert = sqlx::query("INSERT INTO naive_orders VALUES ($1, 1999) ON CONFLICT DO NOTHING").bind(id);
    if insert.execute(&mut *tx).await?.rows_affected() == 1 {
        let event = sqlx::query("INSERT INTO naive_outbox (body) VALUES ($1)").bind(id.to_string());
        event.execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(())
}

/// The relay: publishes what is behind the last id, then remembers it.
pub async fn relay(url: &str) -> anyhow::Result<()> {
    let mut db = connect(url).await?;
    let orders = Hapax::open(url).await?.queue::<i64>("naive-orders")?;
    loop {
        let sql = "SELECT id, body::bigint FROM naive_outbox WHERE id > (SELECT last FROM naive_position) ORDER BY id LIMIT 10";
        let rows: Vec<(i64, i64)> = sqlx::query_as(sql).fetch_all(&mut db).await?;
        for (_, order) in &rows {
            orders.send(order).await?;
        }
        if let Some((last, _)) = rows.last() {
            sqlx::query("UPDATE naive_position SET last = $1").bind(last).execute(&mut db).await?;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The consumer: ships, announces, acks.
pub async fn consumer(url: &str) -> anyhow::Result<()> {
    let mut db = connect(url).await?;
    let hapax = Hapax::open(url).await?;
    let (orders, shipped) = (hapax.queue::<i64>("naive-orders")?, hapax.queue::<i64>("naive-shipped")?);
    loop {
        for received in orders.receive(Receive::up_to(10)).await? {
            let order = received.value()?;
            sqlx::query("INSERT INTO naive_shipments VALUES ($1)").bind(order).execute(&mut db).await?;
            shipped.send(&order).await?;
            received.ack().await?;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
