//! The output of commands: tables on a terminal, tab-separated lines in a pipe, JSON on request.

use std::borrow::Cow;
use std::fmt;
use std::io::{IsTerminal as _, Write as _};

use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde::Serialize;

/// A terminal that reports fewer columns is treated as having an unknown width.
const COLUMNS_MIN: u16 = 20;
const COLUMNS_DEFAULT: u16 = 100;

/// How to print.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
    terminal: bool,
}

/// Prints text as it is.
pub fn raw(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a message to the user that is not the command's result, on standard error.
pub fn note(text: &str) {
    // If standard error is closed, continue: the result matters more.
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl Output {
    /// Detects whether standard output is a terminal.
    pub fn new(json: bool) -> Self {
        Self { json, terminal: std::io::stdout().is_terminal() }
    }

    /// Whether JSON was requested.
    pub fn is_json(self) -> bool {
        self.json
    }

    /// Whether standard output is a terminal.
    pub fn is_terminal(self) -> bool {
        self.terminal
    }

    /// Prints one JSON document.
    pub fn value(self, value: &impl Serialize) -> anyhow::Result<()> {
        let text =
            if self.terminal { serde_json::to_string_pretty(value)? } else { serde_json::to_string(value)? };
        raw(&(text + "\n"))
    }

    /// Prints the result of an action: a sentence, or JSON.
    pub fn done(self, sentence: &str, value: &impl Serialize) -> anyhow::Result<()> {
        if self.json { self.value(value) } else { raw(&format!("{sentence}\n")) }
    }

    /// Prints rows: a table on a terminal, otherwise one line each without a heading, cells separated by tabs.
    pub fn rows(self, heading: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
        if !self.terminal {
            let lines: String = rows.iter().map(|row| row.join("\t") + "\n").collect();
            return raw(&lines);
        }
        let mut table = table();
        if !heading.is_empty() {
            table.set_header(heading.iter().map(|name| Cell::new(name).add_attribute(Attribute::Bold)));
        }
        raw(&format!("{}\n", table.add_rows(rows).trim_fmt()))
    }
}

/// Prints rows with coloured cells, for a terminal.
pub fn cells(rows: Vec<Vec<Cell>>) -> anyhow::Result<()> {
    raw(&format!("{}\n", table().add_rows(rows).trim_fmt()))
}

fn table() -> Table {
    let mut table = Table::new();
    // Some terminals (a new pty, a serial line) report a width of zero.
    if table.width().is_none_or(|columns| columns < COLUMNS_MIN) {
        table.set_width(COLUMNS_DEFAULT);
    }
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// A progress bar on a terminal; nothing in a pipe. `None`: the total is unknown.
pub fn progress(total: Option<u64>, doing: impl Into<Cow<'static, str>>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = match total {
        Some(_) => "{msg} [{bar:40}] {human_pos}/{human_len}, {rate}, {eta} left",
        None => "{spinner} {msg} {human_pos}, {rate}",
    };
    let style =
        ProgressStyle::with_template(template).expect("the template is constant").progress_chars("=> ");
    let style = style.with_key("rate", |state: &ProgressState, text: &mut dyn fmt::Write| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{:.0}/s", state.per_sec());
    });
    let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
    bar.with_style(style).with_message(doing)
}
