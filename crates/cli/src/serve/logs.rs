//! Logs on standard error, as text or JSON.

use std::io::IsTerminal as _;

use anyhow::{Context as _, bail};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::config::{LogConfig, LogFormat};
use crate::config_file::nearest;

/// The names of the levels, most important first.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The problem with a `log.level`. The filter library treats every unknown word as the name of a module.
pub fn level_mistake(level: &str) -> Option<String> {
    level.split(',').map(str::trim).find_map(|part| {
        let given = part.rsplit_once('=').map_or(part, |(_, level)| level).to_ascii_lowercase();
        let meant = match nearest(&given, &LEVELS) {
            _ if LEVELS.contains(&given.as_str()) => return None,
            Some(meant) => format!("did you mean {meant}?"),
            None => "use error, warn, info, debug, trace, or MODULE=LEVEL".to_owned(),
        };
        Some(format!("{part:?} is no level; {meant}"))
    })
}

/// Starts logging.
pub fn start(config: &LogConfig) -> anyhow::Result<()> {
    if let Some(problem) = level_mistake(&config.level) {
        bail!("log.level: {problem}");
    }
    let levels: Targets = config.level.parse().with_context(|| format!("log.level: {:?}", config.level))?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let lines = match config.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.with_ansi(false).json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(levels)).try_init().map_err(Into::into)
}
