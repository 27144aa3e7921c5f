//! A Hapax server as a store: [`Client`] implements the queue seams, the ledger and the documents over the server's
//! native API (`/v1`). Code that runs against an embedded store runs against a server unchanged.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_client::Client;
//! use hapax_core::{NewMessage, QueueName, QueueStore as _};
//!
//! let client = Client::connect("http://127.0.0.1:9324", None).await?;
//! client.send(&QueueName::new("emails")?, vec![NewMessage::new("hello")]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! In contrast to a local store, a call may fail after it took effect. A change then returns
//! [`OutcomeUnknown`](hapax_core::StoreError::OutcomeUnknown); it returns `Unavailable` only if the request was not
//! sent.

#[cfg(feature = "http")]
mod admin;
#[cfg(feature = "http")]
mod connect;
#[cfg(feature = "http")]
mod documents;
#[cfg(feature = "http")]
mod ledger;
#[cfg(feature = "http")]
pub mod otlp;
#[cfg(feature = "http")]
mod receive;
#[cfg(feature = "http")]
mod store;
#[cfg(feature = "http")]
mod transfer;
#[cfg(feature = "http")]
mod transport;
pub mod wire;

#[cfg(feature = "http")]
pub use connect::{Client, ConnectError, Options, Token};
#[cfg(feature = "http")]
pub use transport::connector;
