//! Faults at random times, from a seed: of the server, of its connections, and of the answers to commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_faults::{Action, FaultProxy, Match, Protocol};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Connection as _, PgConnection};

use super::Server;

/// A small generator, so that one number replays the choices of a run.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    pub fn ms(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }
}

/// The seed of a run: `HAPAX_SEED`, or a fixed one.
pub fn seed() -> u64 {
    std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}

/// How long faults are injected: `seconds`, and twenty times as long with `HAPAX_LONG`.
pub fn time(seconds: u64) -> Duration {
    Duration::from_secs(if std::env::var_os("HAPAX_LONG").is_some() { 20 * seconds } else { seconds })
}

/// A server with a database of its own, reached by one store directly and by others through a proxy that knows its
/// frames.
pub struct Site {
    pub server: Server,
    pub url: String,
    pub proxy: FaultProxy,
    pub stores: Vec<PostgresStore>,
}

impl Site {
    /// What is answered as accepted must survive a crash, so the server is durable.
    pub async fn start(stores: usize) -> Self {
        let server = Server::start(&["fsync=on", "max_wal_size=256MB"]).unwrap();
        let url = server.url("postgres");
        hapax_postgres::migrate(&url, &Options::default(), false).await.unwrap();
        let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
        let through = url.replace(&server.address().to_string(), &proxy.address().to_string());
        assert_ne!(url, through);
        let options = Options {
            connect_timeout: Duration::from_secs(2),
            operation_timeout: Duration::from_secs(4),
            ..Options::default()
        };
        let mut all = vec![PostgresStore::open(&url, options.clone()).await.unwrap()];
        for _ in 1..stores {
            all.push(PostgresStore::open(&through, options.clone()).await.unwrap());
        }
        Self { server, url, proxy, stores: all }
    }

    /// Injects faults for a time, until each kind has hit and `enough` has happened, then lets everything run.
    pub async fn trouble(self: &Arc<Self>, time: Duration, over: &AtomicBool, enough: impl Fn() -> bool) {
        let mut random = Random::new(seed());
        let (start, mut count) = (Instant::now(), [0; 5]);
        let mut round = 0;
        while start.elapsed() < time || count.contains(&0) || !enough() {
            assert!(start.elapsed() < time + Duration::from_mins(5), "too little has happened: {count:?}");
            tokio::time::sleep(Duration::from_millis(300) + random.ms(700)).await;
            // Each kind occurs, whatever the seed is.
            let kind = if round < 5 { round } else { random.below(5) as usize };
            count[kind] += self.inject(kind, &mut random).await;
            round += 1;
        }
        over.store(true, Ordering::SeqCst);
    }

    async fn inject(self: &Arc<Self>, kind: usize, random: &mut Random) -> u64 {
        match kind {
            0 => {
                let Ok(mut connection) = PgConnection::connect(&self.url).await else { return 0 };
                let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'hapax' \
                            AND datname = current_database() ORDER BY random() LIMIT $1";
                let kill = sqlx::query(kill).bind(1 + random.below(4) as i64).fetch_all(&mut connection);
                kill.await.map_or(0, |killed| killed.len() as u64)
            }
            1 => {
                let site = self.clone();
                let pause = random.ms(300);
                let restart = move || {
                    site.server.stop("QUIT");
                    std::thread::sleep(pause);
                    site.server.run().unwrap();
                };
                tokio::task::spawn_blocking(restart).await.unwrap();
                1
            }
            2 => {
                self.server.signal_all("STOP");
                tokio::time::sleep(Duration::from_millis(200) + random.ms(1_500)).await;
                self.server.signal_all("CONT");
                1
            }
            3 => self.on_answer(Action::Cut, random).await,
            _ => self.on_answer(Action::Delay(Duration::from_millis(200) + random.ms(1_500)), random).await,
        }
    }

    /// A change was committed, and its answer is lost or late.
    async fn on_answer(&self, action: Action, random: &mut Random) -> u64 {
        let sql = ["COMMIT", "q_recv", "q_send", "q_ack", "ledger_claim", "ledger_write"];
        let faults = sql.map(|sql| {
            let (skip, times) = (random.below(4), 1 + random.below(2));
            self.proxy.inject(Match::answer_to(sql), action).after(skip).times(times)
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        for fault in &faults {
            fault.remove();
        }
        faults.iter().map(hapax_faults::FaultHandle::count).sum()
    }
}
