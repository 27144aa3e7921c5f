//! Claim and complete a fresh key: Hapax beside a bare INSERT … ON CONFLICT and UPDATE.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Fingerprint, Json, Ledger as _, RecordedOutcome,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::PgConnection;
use tokio::task::JoinSet;

use crate::server::Server;

const OUTCOME: &str = r#"{"charge":"ch_1234567890","cents":1999,"status":"succeeded"}"#;
/// Columns that such a table has at least; nothing fences an owner that was slow.
const TABLE: &str = "CREATE TABLE entry (key text PRIMARY KEY, owner text NOT NULL, state smallint NOT NULL, fingerprint text NOT NULL, \
                       expires_ms bigint NOT NULL, outcome text)";
const CLAIM: &str = "INSERT INTO entry (key, owner, state, fingerprint, expires_ms) VALUES ($1, $2, 0, $3, $4) ON CONFLICT (key) DO NOTHING";
const COMPLETE: &str =
    "UPDATE entry SET state = 1, outcome = $3, expires_ms = $4 WHERE key = $1 AND owner = $2 AND state = 0";
const SCOPE: &str = "queue/payments";
pub const DATABASES: [&str; 2] = ["ledger_hapax", "ledger_sql"];

/// Both ledgers.
pub struct Ledgers {
    store: PostgresStore,
    connections: Vec<PgConnection>,
    keys: Arc<AtomicU64>,
}

fn owner(client: usize) -> String {
    format!("worker-12345-0123456789abcdef/{client}")
}

impl Ledgers {
    pub async fn open(server: &mut Server, clients: usize) -> Self {
        server.create(DATABASES[0], "SELECT 1").await;
        server.create(DATABASES[1], TABLE).await;
        let options = Options { migrate: true, ..Options::default() };
        let store = PostgresStore::open(&server.url(DATABASES[0]), options).await.expect("the store opens");
        let mut connections = Vec::new();
        for _ in 0..clients {
            connections.push(server.connect(DATABASES[1]).await);
        }
        Self { store, connections, keys: Arc::default() }
    }

    /// A turn of Hapax; gives the count of keys and the seconds.
    pub async fn hapax(&self, time: Duration) -> (u64, f64) {
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for client in 0..self.connections.len() {
            let (store, keys) = (self.store.clone(), self.keys.clone());
            running.spawn(async move {
                let mut done = 0;
                while start.elapsed() < time {
                    pay(&store, keys.fetch_add(1, Ordering::Relaxed), client).await;
                    done += 1;
                }
                done
            });
        }
        let done: u64 = running.join_all().await.into_iter().sum();
        (done, start.elapsed().as_secs_f64())
    }

    /// A turn of the bare statements.
    pub async fn sql(&mut self, time: Duration) -> (u64, f64) {
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for (client, mut connection) in std::mem::take(&mut self.connections).into_iter().enumerate() {
            let keys = self.keys.clone();
            running.spawn(async move {
                let mut done = 0;
                while start.elapsed() < time {
                    pay_sql(&mut connection, keys.fetch_add(1, Ordering::Relaxed), client).await;
                    done += 1;
                }
                (connection, done)
            });
        }
        let mut done = 0;
        for (connection, count) in running.join_all().await {
            self.connections.push(connection);
            done += count;
        }
        (done, start.elapsed().as_secs_f64())
    }
}

async fn pay(store: &PostgresStore, number: u64, client: usize) {
    let id =
        EntryId::new(SCOPE.parse().expect("a scope"), format!("order-{number:012}").parse().expect("a key"));
    let fingerprint = Fingerprint::new(format!("{number:064x}")).expect("a fingerprint");
    let asked = ClaimRequest::new(id.clone(), owner(client).parse().expect("an owner"), 30_000);
    let request = ClaimRequest { fingerprint: Some(fingerprint), ..asked };
    let claimed = store.claim(vec![request]).await.expect("it is claimed").remove(0);
    let Ok(Claim::Granted(grant)) = claimed else { panic!("a fresh key is granted: {claimed:?}") };
    let outcome = RecordedOutcome::done(Json::parse(OUTCOME).expect("JSON"));
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 86_400_000 };
    let ended = store.end(vec![EndClaim { id, token: grant.token, ending }]).await.expect("it is completed");
    assert!(ended[0].is_ok(), "{ended:?}");
}

async fn pay_sql(connection: &mut PgConnection, number: u64, client: usize) {
    let (key, owner, expires_ms) =
        (format!("{SCOPE}/order-{number:012}"), owner(client), 1_800_000_000_000_i64);
    let claim = sqlx::query(CLAIM).bind(&key).bind(&owner).bind(format!("{number:064x}")).bind(expires_ms);
    assert_eq!(claim.execute(&mut *connection).await.expect("it is claimed").rows_affected(), 1);
    let complete = sqlx::query(COMPLETE).bind(&key).bind(&owner).bind(OUTCOME).bind(expires_ms);
    assert_eq!(complete.execute(connection).await.expect("it is completed").rows_affected(), 1);
}
