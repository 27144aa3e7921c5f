//! Injects faults, so that tests can show that data and guarantees survive them.
//!
//! [`Process`] runs a program that can be killed and paused; [`FaultProxy`] sits between a client and a server and
//! cuts, delays, drops, duplicates or holds messages; [`PostgresServer`], [`RedisServer`] and [`KafkaServer`] are servers that can be stopped,
//! [`PatroniCluster`] is two of the first with failover, and [`PgBouncer`] is a pooler before one. [`Process`] and
//! [`FaultProxy`] report their actions: a fault that hit nothing proves nothing, so a test asserts on [`FaultHandle::count`].
//!
//! ```no_run
//! # async fn example(server: std::net::SocketAddr) {
//! use hapax_faults::{Action, FaultProxy, Match, Protocol};
//! let proxy = FaultProxy::start(server, Protocol::Http).unwrap();
//! // The client talks to `proxy.address()`. The server completes the claim, but the client never hears of it.
//! let lost = proxy.inject(Match::answer_to("/complete"), Action::Cut).times(1);
//! // ... run the client ...
//! lost.wait_for(1).await;
//! # }
//! ```

mod example;
mod frame;
mod kafka;
mod kafka_addresses;
mod kafka_frames;
mod kafka_rights;
#[cfg(feature = "kafka-topics")]
mod kafka_topics;
mod patroni;
mod pgbouncer;
mod postgres;
mod postgres_frames;
mod postgres_trouble;
mod private_server;
mod process;
mod proxy;
mod redis;
mod redis_frames;
mod redis_tls;

pub use example::example_program;
pub use frame::{Direction, Protocol};
pub use kafka::KafkaServer;
pub use kafka_rights::{KafkaOperation, KafkaResource};
#[cfg(feature = "kafka-topics")]
pub use kafka_topics::{Isolation, KafkaTopics, ReadRecord};
pub use patroni::{PatroniCluster, Replication};
pub use pgbouncer::PgBouncer;
pub use postgres::{PROGRAMS_VARIABLE, PostgresServer, ROLE_WITH_PASSWORD};
pub use postgres_trouble::PostgresFault;
pub use private_server::free_ports;
pub use process::{Process, TIMEOUT, rerun_test};
pub use proxy::{Action, FaultHandle, FaultProxy, Match};
pub use redis::{RedisCluster, RedisSentinels, RedisServer};
pub use redis_tls::RedisTls;
