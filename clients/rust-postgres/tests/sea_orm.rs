//! Charges an order once, with SeaORM. The database DATABASE_URL has the schema `hapax` and a table of charges.

use sea_orm::{
    ConnectionTrait as _, Database, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr, Statement,
    TransactionTrait as _, Value,
};

const SCOPE: &str = "sea-orm/charge";

fn statement(sql: &str, values: impl IntoIterator<Item = Value>) -> Statement {
    Statement::from_sql_and_values(DbBackend::Postgres, sql, values)
}

async fn enter(tx: &DatabaseTransaction, order: &str, cents: i64) -> Result<String, DbErr> {
    let sql = "SELECT state FROM hapax.enter($1, $2, $3, 100)";
    let enter = statement(sql, [SCOPE.into(), order.into(), format!("cents-{cents}").into()]);
    tx.query_one(enter).await?.expect("a row").try_get("", "state")
}

/// Gives the state that was met.
async fn charge(db: &DatabaseConnection, order: &str, cents: i64) -> Result<String, DbErr> {
    let tx = db.begin().await?;
    let state = enter(&tx, order, cents).await?;
    if state == "fresh" {
        let sql = "INSERT INTO charges (order_id, cents) VALUES ($1, $2)";
        tx.execute(statement(sql, [order.into(), cents.into()])).await?;
        let outcome = format!(r#"{{"charged":{cents}}}"#);
        let sql = "SELECT hapax.record($1, $2, $3)";
        tx.execute(statement(sql, [SCOPE.into(), order.into(), outcome.into()])).await?;
        tx.commit().await?;
    }
    Ok(state)
}

async fn connect() -> DatabaseConnection {
    Database::connect(std::env::var("DATABASE_URL").expect("DATABASE_URL")).await.unwrap()
}

async fn charges(db: &DatabaseConnection, order: &str) -> i64 {
    let count = statement("SELECT count(*) AS n FROM charges WHERE order_id = $1", [order.into()]);
    db.query_one(count).await.unwrap().expect("a row").try_get("", "n").unwrap()
}

#[tokio::test]
async fn an_order_is_charged_once() {
    let db = connect().await;
    let mut states = Vec::new();
    for cents in [1999, 1999, 2999] {
        states.push(charge(&db, "sea-1", cents).await.unwrap());
    }
    assert_eq!(states, ["fresh", "completed", "mismatch"]);
    assert_eq!(charges(&db, "sea-1").await, 1);
}

#[tokio::test]
async fn an_order_that_another_transaction_charges_is_left_to_it() {
    let db = connect().await;
    let tx = db.begin().await.unwrap();
    assert_eq!(enter(&tx, "sea-2", 1999).await.unwrap(), "fresh");
    assert_eq!(charge(&db, "sea-2", 1999).await.unwrap(), "in-progress");
    let refused = tx.commit().await.unwrap_err();
    assert!(refused.to_string().contains("sea-2"), "no outcome was recorded: {refused}");
    assert_eq!(charge(&db, "sea-2", 1999).await.unwrap(), "fresh");
    assert_eq!(charges(&db, "sea-2").await, 1);
}
