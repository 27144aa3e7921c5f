//! The server: the AWS SQS protocol, with any Hapax store behind it.
//!
//! | module | content |
//! |---|---|
//! | [`config`] | every option with its meaning, unit and default |
//! | [`runtime`] | configure, bind, run, drain; `hapax-net` handles the connections |
//! | [`auth`] | keys and their rights, SigV4, bearer tokens |
//! | [`native`] | the native JSON API under `/v1`, with its OpenAPI description |
//! | [`sqs`] | the SQS protocol: one model, two codecs (AWS JSON and Query) |
//!
//! ```no_run
//! # async fn example(store: hapax_core::store::SharedStore) -> Result<(), hapax_server::ServerError> {
//! use hapax_server::{Server, ServerConfig};
//!
//! let server = Server::new(ServerConfig::default(), store)?;
//! let listeners = server.bind().await?;
//! server.run(listeners, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```

mod app;
pub mod auth;
pub mod config;
mod deliveries;
pub mod error;
pub mod native;
pub mod process;
pub mod runtime;
pub mod sqs;

pub use config::ServerConfig;
pub use error::ServerError;
pub use runtime::{Server, Shutdown};
