//! Logs on standard error, as text or JSON.

use std::io::IsTerminal as _;

use anyhow::anyhow;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::config::{LogConfig, LogFormat};

/// Starts to log.
pub fn start(config: &LogConfig) -> anyhow::Result<()> {
    let wrong = |error| {
        anyhow!("log level {:?}: {error}; use error, warn, info, debug, trace or MODULE=LEVEL", config.level)
    };
    let levels: Targets = config.level.parse().map_err(wrong)?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let lines = match config.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.with_ansi(false).json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(levels)).try_init().map_err(Into::into)
}
