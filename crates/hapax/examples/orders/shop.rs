//! The shop: order and event in one transaction; event, shipment and announcement in another.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use hapax::postgres::{Options, PostgresInbox, PostgresOutbox, PostgresStore};
use hapax::relay::{self, NewOutboxMessage, RelayConfig};
use hapax::{Cx, Worker};
use sqlx::Connection as _;

use crate::connect;

#[derive(Clone)]
struct Shop {
    url: String,
    outbox: PostgresOutbox,
}

/// The service: `POST /orders/ID` places an order, once.
pub async fn service(url: &str, port: u16) -> anyhow::Result<()> {
    let store = PostgresStore::open(url, Options::default()).await?;
    let shop = Shop { url: url.to_owned(), outbox: store.outbox()? };
    let app = Router::new().route("/orders/{id}", post(place)).with_state(shop);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    Ok(axum::serve(listener, app).await?)
}

async fn place(State(shop): State<Shop>, Path(id): Path<i64>) -> StatusCode {
    match place_order(&shop, id).await {
        Ok(()) => StatusCode::OK,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn place_order(shop: &Shop, id: i64) -> anyhow::Result<()> {
    let mut db = connect(&shop.url).await?;
    let mut tx = db.begin().await?;
    let insert = sqlx::query("INSERT INTO orders VALUES ($1, 1999) ON CONFLICT DO NOTHING").bind(id);
    // A repeated request finds its order, and its event, there.
    if insert.execute(&mut *tx).await?.rows_affected() == 1 {
        let event = NewOutboxMessage::new("orders.placed", id.to_string()).key(format!("order-{id}"));
        shop.outbox.enqueue(&mut tx, &event).await?;
    }
    tx.commit().await?;
    shop.outbox.wake();
    Ok(())
}

/// The relay: two routes, one for each topic.
pub async fn relay(url: &str) -> anyhow::Result<()> {
    let route = |name: &str, topic: &str, queue: &str| -> anyhow::Result<RelayConfig> {
        Ok(RelayConfig {
            name: name.to_owned(),
            from: Some(url.to_owned()),
            to: Some(url.to_owned()),
            queue: Some(queue.parse()?),
            topics: vec![topic.to_owned()],
            lease_ms: 1_000,
            ..RelayConfig::default()
        })
    };
    let placed = relay::open(&route("placed", "orders.placed", "orders")?, None, None).await?;
    let shipped = relay::open(&route("shipped", "orders.shipped", "shipped")?, None, None).await?;
    tokio::try_join!(placed.run(std::future::pending()), shipped.run(std::future::pending()))?;
    Ok(())
}

/// The consumer: ships an order and announces it, in one transaction with the ack.
pub async fn consumer(url: &str) -> anyhow::Result<()> {
    let store = PostgresStore::open(url, Options::default()).await?;
    let (inbox, outbox) = (PostgresInbox::new(&store), store.outbox()?);
    let builder = Worker::over(Arc::new(store), "orders".parse()?);
    let worker = builder.async_transactional_handler(&inbox, move |order: i64, db, _cx: Cx| {
        let outbox = outbox.clone();
        Box::pin(async move {
            sqlx::query("INSERT INTO shipments VALUES ($1)").bind(order).execute(&mut *db).await?;
            let event =
                NewOutboxMessage::new("orders.shipped", order.to_string()).key(format!("order-{order}"));
            let enqueued = outbox.enqueue(db, &event).await;
            enqueued.map(drop).map_err(|error| sqlx::Error::Protocol(error.to_string()))
        })
    });
    worker.build().await?.run(std::future::pending()).await?;
    Ok(())
}
