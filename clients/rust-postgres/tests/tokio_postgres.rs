//! Charges an order once, with tokio-postgres. The database DATABASE_URL has the schema `hapax` and a table of charges.

use tokio_postgres::{Client, Error, NoTls};

const SCOPE: &str = "tokio-postgres/charge";

/// Gives the state that was met.
async fn charge(client: &mut Client, order: &str, cents: i64) -> Result<String, Error> {
    let tx = client.transaction().await?;
    let enter = "SELECT state, outcome FROM hapax.enter($1, $2, $3, 100)";
    let row = tx.query_one(enter, &[&SCOPE, &order, &format!("cents-{cents}")]).await?;
    let state: String = row.get("state");
    if state == "fresh" {
        tx.execute("INSERT INTO charges (order_id, cents) VALUES ($1, $2)", &[&order, &cents]).await?;
        let outcome = format!(r#"{{"charged":{cents}}}"#);
        tx.execute("SELECT hapax.record($1, $2, $3)", &[&SCOPE, &order, &outcome]).await?;
        tx.commit().await?;
    }
    Ok(state)
}

async fn connect() -> Client {
    let url = std::env::var("DATABASE_URL").expect("DATABASE_URL");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn charges(client: &Client, order: &str) -> i64 {
    client.query_one("SELECT count(*) FROM charges WHERE order_id = $1", &[&order]).await.unwrap().get(0)
}

#[tokio::test]
async fn an_order_is_charged_once() {
    let mut client = connect().await;
    let mut states = Vec::new();
    for cents in [1999, 1999, 2999] {
        states.push(charge(&mut client, "tokio-1", cents).await.unwrap());
    }
    assert_eq!(states, ["fresh", "completed", "mismatch"]);
    assert_eq!(charges(&client, "tokio-1").await, 1);
}

#[tokio::test]
async fn an_order_that_another_transaction_charges_is_left_to_it() {
    let (mut first, mut second) = (connect().await, connect().await);
    let tx = first.transaction().await.unwrap();
    tx.query_one("SELECT hapax.enter($1, $2, 'cents-1999')", &[&SCOPE, &"tokio-2"]).await.unwrap();
    assert_eq!(charge(&mut second, "tokio-2", 1999).await.unwrap(), "in-progress");
    let refused = tx.commit().await.unwrap_err();
    assert_eq!(refused.code().map(|code| code.code()), Some("HX003"), "no outcome was recorded");
    assert_eq!(charge(&mut second, "tokio-2", 1999).await.unwrap(), "fresh");
    assert_eq!(charges(&first, "tokio-2").await, 1);
}
