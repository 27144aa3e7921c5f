//! The relay: publishes what business transactions have written into an outbox.
//!
//! ```no_run
//! # async fn example(
//! #     outbox: std::sync::Arc<dyn hapax_core::outbox::OutboxStore>,
//! #     sink: std::sync::Arc<dyn hapax_core::outbox::Publisher>,
//! # ) -> Result<(), hapax_core::StoreError> {
//! use hapax_relay::{Relay, RelayOptions};
//!
//! let relay = Relay::new(outbox, sink, RelayOptions::route("orders").topics(["orders.*"]));
//! let watch = relay.watch();
//! relay.run(std::future::pending()).await?;
//! println!("{} messages published", watch.counts().published);
//! # Ok(())
//! # }
//! ```
//!
//! Nothing is published inside a transaction. A round is: ask the outbox how far it can be read; read; publish; record the
//! positions. What the sink does not accept is set aside with everything that follows it under the same key (`held`), so that
//! the position can pass it. Several relays of a route share its buckets by leases with fences (`ownership`).
//!
//! | module | holds |
//! |---|---|
//! | `plan` | what is to be done with the messages of a round, as pure functions |
//! | `pace` | when to look again |
//! | `ownership` | the buckets of this relay |
//! | `runner` | the rounds |
//! | `held` | further attempts of what was set aside |
//! | `watch` | what the tasks share; counts and readiness |
//! | [`sink`] | where messages are published to |

mod counts;
mod held;
mod options;
mod ownership;
mod pace;
mod plan;
mod runner;
pub mod sink;
mod watch;

pub use counts::RelayCounts;
pub use options::RelayOptions;
pub use runner::Relay;
pub use watch::RelayWatch;
