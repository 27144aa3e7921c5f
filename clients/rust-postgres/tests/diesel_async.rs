//! Charges an order once, with diesel-async. The database DATABASE_URL has the schema `hapax` and a table of charges.

use diesel::result::Error;
use diesel::sql_types::{BigInt, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};

const SCOPE: &str = "diesel-async/charge";

#[derive(QueryableByName)]
struct Entered {
    #[diesel(sql_type = Text)]
    state: String,
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

async fn enter(db: &mut AsyncPgConnection, order: &str, cents: i64) -> Result<String, Error> {
    let enter = sql_query("SELECT state FROM hapax.enter($1, $2, $3, 100)")
        .bind::<Text, _>(SCOPE)
        .bind::<Text, _>(order)
        .bind::<Text, _>(format!("cents-{cents}"));
    Ok(enter.get_result::<Entered>(db).await?.state)
}

/// Gives the state that was met.
async fn charge(db: &mut AsyncPgConnection, order: &str, cents: i64) -> Result<String, Error> {
    db.transaction(async |db| {
        let state = enter(db, order, cents).await?;
        if state == "fresh" {
            let write = sql_query("INSERT INTO charges (order_id, cents) VALUES ($1, $2)");
            write.bind::<Text, _>(order).bind::<BigInt, _>(cents).execute(db).await?;
            let record = sql_query("SELECT hapax.record($1, $2, $3)")
                .bind::<Text, _>(SCOPE)
                .bind::<Text, _>(order)
                .bind::<Text, _>(format!(r#"{{"charged":{cents}}}"#));
            record.execute(db).await?;
        }
        Ok(state)
    })
    .await
}

async fn connect() -> AsyncPgConnection {
    let url = std::env::var("DATABASE_URL").expect("DATABASE_URL");
    AsyncPgConnection::establish(&url).await.unwrap()
}

async fn charges(db: &mut AsyncPgConnection, order: &str) -> i64 {
    let count = sql_query("SELECT count(*) FROM charges WHERE order_id = $1").bind::<Text, _>(order);
    count.get_result::<Count>(db).await.unwrap().count
}

#[tokio::test]
async fn an_order_is_charged_once() {
    let mut db = connect().await;
    let mut states = Vec::new();
    for cents in [1999, 1999, 2999] {
        states.push(charge(&mut db, "diesel-1", cents).await.unwrap());
    }
    assert_eq!(states, ["fresh", "completed", "mismatch"]);
    assert_eq!(charges(&mut db, "diesel-1").await, 1);
}

#[tokio::test]
async fn an_order_that_another_transaction_charges_is_left_to_it() {
    let (mut first, mut second) = (connect().await, connect().await);
    let unrecorded: Result<(), Error> = first
        .transaction(async |db| {
            assert_eq!(enter(db, "diesel-2", 1999).await?, "fresh");
            assert_eq!(charge(&mut second, "diesel-2", 1999).await?, "in-progress");
            Ok(())
        })
        .await;
    assert!(unrecorded.unwrap_err().to_string().contains("diesel-2"), "no outcome was recorded");
    assert_eq!(charge(&mut second, "diesel-2", 1999).await.unwrap(), "fresh");
    assert_eq!(charges(&mut first, "diesel-2").await, 1);
}
