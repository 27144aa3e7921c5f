//! What commands print: tables on a terminal, tab-separated lines in a pipe, JSON when asked for.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};

use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde::Serialize;

/// Narrower than this is taken for not knowing.
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

/// Tells the person at the terminal something that is not the command's result.
pub fn note(text: &str) {
    // Standard error is closed: the result matters more.
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl Output {
    /// Looks at where standard output leads.
    pub fn new(json: bool) -> Self {
        Self { json, terminal: std::io::stdout().is_terminal() }
    }

    /// Whether JSON is wanted.
    pub fn is_json(self) -> bool {
        self.json
    }

    /// Whether a person is looking.
    pub fn is_terminal(self) -> bool {
        self.terminal
    }

    /// Prints one JSON document.
    pub fn value(self, value: &impl Serialize) -> anyhow::Result<()> {
        let text =
            if self.terminal { serde_json::to_string_pretty(value)? } else { serde_json::to_string(value)? };
        raw(&(text + "\n"))
    }

    /// Prints what was done: a sentence, or JSON.
    pub fn done(self, sentence: &str, value: &impl Serialize) -> anyhow::Result<()> {
        if self.json { self.value(value) } else { raw(&format!("{sentence}\n")) }
    }

    /// Prints rows: a table on a terminal, else a line each without a heading, cells separated by tabs.
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

/// Prints rows whose cells have colours, for a terminal.
pub fn cells(rows: Vec<Vec<Cell>>) -> anyhow::Result<()> {
    raw(&format!("{}\n", table().add_rows(rows).trim_fmt()))
}

fn table() -> Table {
    let mut table = Table::new();
    // Some terminals (a fresh pty, a serial line) say that they have no width at all.
    if table.width().is_none_or(|columns| columns < COLUMNS_MIN) {
        table.set_width(COLUMNS_DEFAULT);
    }
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// A progress bar on a terminal; nothing in a pipe. `None`: how much there is to do is not known.
pub fn progress(total: Option<u64>, doing: &'static str) -> ProgressBar {
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
        // A string takes everything.
        let _ = write!(text, "{:.0}/s", state.per_sec());
    });
    let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
    bar.with_style(style).with_message(doing)
}
