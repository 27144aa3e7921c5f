//! Faults at random times, from a seed: of the server, of its connections, and of the answers to commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_conformance::attack::{Random, seed};
use hapax_faults::{FaultProxy, PostgresFault, Protocol};
use hapax_postgres::{Options, PostgresStore};

use super::Server;

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

    /// Injects faults for a time, until each kind has hit and `enough` has happened.
    pub async fn trouble(self: &Arc<Self>, time: Duration, enough: impl Fn() -> bool) {
        let mut random = Random::new(seed());
        let (start, mut count) = (Instant::now(), [0; PostgresFault::ALL.len()]);
        let mut round = 0;
        while start.elapsed() < time || count.contains(&0) || !enough() {
            assert!(start.elapsed() < time + Duration::from_mins(5), "too little has happened: {count:?}");
            tokio::time::sleep(Duration::from_millis(300) + random.ms(700)).await;
            // Each kind occurs, whatever the seed is.
            let kind = if round < count.len() { round } else { random.below(count.len() as u64) as usize };
            let (site, mut choices) = (self.clone(), Random::new(random.below(u64::MAX)));
            let inject = move || {
                PostgresFault::ALL[kind].inject(&site.server, &site.proxy, &mut |bound| choices.below(bound))
            };
            count[kind] += tokio::task::spawn_blocking(inject).await.unwrap();
            round += 1;
        }
    }
}
