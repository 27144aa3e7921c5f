//! Two pollers of the usual shapes, as controls: what they lose, repeat and invert.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::task::JoinHandle;

pub const TABLES: &str = "
    CREATE TABLE naive_last (id bigserial PRIMARY KEY, key text NOT NULL, number bigint NOT NULL);
    CREATE TABLE naive_mark (id bigserial PRIMARY KEY, key text NOT NULL, number bigint NOT NULL, sent boolean NOT NULL DEFAULT false);
";

pub type Got = Arc<Mutex<Vec<(String, u64)>>>;

fn row(row: &sqlx::postgres::PgRow) -> (i64, String, u64) {
    (row.get(0), row.get(1), row.get::<i64, _>(2) as u64)
}

/// `id > last`: remembers the largest id that it has seen.
pub fn id_larger_than_last(url: &str) -> (Got, JoinHandle<()>) {
    let (got, url) = (Got::default(), url.to_owned());
    let into = got.clone();
    let task = tokio::spawn(async move {
        let mut db = PgConnection::connect(&url).await.unwrap();
        let mut last = 0i64;
        loop {
            let sql = "SELECT id, key, number FROM naive_last WHERE id > $1 ORDER BY id LIMIT 100";
            let rows = sqlx::query(sql).bind(last).fetch_all(&mut db).await.unwrap();
            for (id, key, number) in rows.iter().map(row) {
                into.lock().unwrap().push((key, number));
                last = id;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    (got, task)
}

/// `FOR UPDATE SKIP LOCKED`, publish, then mark, by two workers; every now and then one dies before it marks.
pub fn skip_locked(url: &str, got: &Got, worker: u64) -> JoinHandle<()> {
    let (into, url) = (got.clone(), url.to_owned());
    tokio::spawn(async move {
        let mut random = fastrand::Rng::with_seed(worker);
        let mut db = PgConnection::connect(&url).await.unwrap();
        loop {
            let mut tx = db.begin().await.unwrap();
            let sql = "SELECT id, key, number FROM naive_mark WHERE NOT sent ORDER BY id LIMIT 10 FOR UPDATE SKIP LOCKED";
            let rows = sqlx::query(sql).fetch_all(&mut *tx).await.unwrap();
            let mut ids = Vec::new();
            for (id, key, number) in rows.iter().map(row) {
                tokio::time::sleep(Duration::from_micros(random.u64(0..500))).await;
                into.lock().unwrap().push((key, number));
                ids.push(id);
            }
            if !ids.is_empty() && random.u8(0..20) == 0 {
                tx.rollback().await.unwrap();
                continue;
            }
            sqlx::query("UPDATE naive_mark SET sent = true WHERE id = ANY ($1)")
                .bind(&ids)
                .execute(&mut *tx)
                .await
                .unwrap();
            tx.commit().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
}
