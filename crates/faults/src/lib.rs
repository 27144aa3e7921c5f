//! Breaks things on purpose, so that tests can show what survives.
//!
//! [`Process`] runs a program that can be killed and paused; [`FaultProxy`] stands between a client and a server and
//! cuts, delays, drops, duplicates or holds what passes. Both report what they did: a fault that met nothing has
//! proved nothing, so a test asserts on [`Injected::count`].
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

mod frame;
mod process;
mod proxy;

pub use frame::{Direction, Protocol};
pub use process::{PATIENCE, Process, rerun_test};
pub use proxy::{Action, FaultProxy, Injected, Match};
