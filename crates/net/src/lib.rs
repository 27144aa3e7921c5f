//! One HTTP connection runtime for every listener of Hapax: the server, the proxy and its admin listener.
//!
//! | module | holds |
//! |---|---|
//! | [`body`] | bodies in memory or streamed; reading one within limits of size, time and memory |
//! | [`idle`] | reusable timers; a body that fails with an error when it stalls |
//! | [`problem`] | error responses as `application/problem+json` |
//! | [`listen`] | `Runtime`: accept, serve, drain |
//! | [`connection`] | one connection: TLS or not, HTTP/1 or HTTP/2, requests, close |
//! | [`tracker`] | the open connections, the state of each, and which ones to close |
//! | [`unread`] | responses that clients have not read yet: counted in bytes and limited |
//! | [`guard`] | refuses requests from web pages: hosts, origins, sites |
//! | [`tls`], [`files`] | certificates; the limit of open files |
//!
#![cfg_attr(feature = "listen", doc = "```no_run")]
#![cfg_attr(not(feature = "listen"), doc = "```text")]
//! use hapax_net::body::Body;
//! use hapax_net::connection::{Request, RequestHandler};
//! use hapax_net::listen::{Limits, Runtime};
//! use hapax_net::tracker::RequestGuard;
//! use http::Response;
//!
//! struct Hello;
//!
//! impl RequestHandler for Hello {
//!     async fn handle(&self, _: Request, _: &RequestGuard) -> Response<Body> {
//!         Response::new(Body::complete("hello\n".into()))
//!     }
//!
//!     fn refuse_request(&self, _: &Request) -> Response<Body> {
//!         hapax_net::problem::overloaded().into_response()
//!     }
//!
//!     fn replace_response(&self, _: &Response<Body>) -> Response<Body> {
//!         hapax_net::problem::overloaded().into_response()
//!     }
//! }
//!
//! # async fn example() -> std::io::Result<()> {
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//! Runtime::new(Limits::default(), None).run(vec![listener], |_peer| Hello, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```

pub mod body;
#[cfg(feature = "listen")]
pub mod connection;
#[cfg(feature = "listen")]
pub mod files;
#[cfg(feature = "listen")]
pub mod guard;
pub mod idle;
#[cfg(feature = "listen")]
pub mod listen;
pub mod problem;
#[cfg(feature = "listen")]
pub mod tls;
#[cfg(feature = "listen")]
pub mod tracker;
#[cfg(feature = "listen")]
pub mod unread;
#[cfg(feature = "listen")]
mod when_woken;
