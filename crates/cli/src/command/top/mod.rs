//! `hapax top`: queues, one queue and advice, live in the terminal.
//!
//! `data.rs` reads the server, `view.rs` draws what was read; this file has the keys and the loop.

mod data;
mod view;

use std::io::{Read as _, Write as _};
use std::time::Duration;

use clap::Args;
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{execute, queue};
use tokio::sync::mpsc;

use self::data::{Reader, Snapshot};
use crate::output::Output;
use crate::remote::Remote;
use crate::text::{escape, parse_ms, word};

/// Shows queues, one queue and advice, live.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax top
  hapax top --interval 5s --endpoint http://10.0.0.7:9324
  hapax top --once

Keys: up and down choose a queue, Enter shows it, a shows the advice, Esc goes back, q quits.
In a pipe, or with --once, it prints what it would show first and ends; a line has: queue NAME, ready, in flight, parked,
deliveries, repeated because a lease ran out, P99 of the time until a settle in ms, lease in ms; or advice, queue, code, what,
what to do.")]
pub struct TopArgs {
    /// How often it asks.
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse_ms)]
    interval: u64,
    /// Prints once and ends.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    remote: Remote,
}

/// What is on the screen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Overview,
    Queue,
    Advice,
}

/// What the user sees and has chosen.
#[derive(Default)]
struct Screen {
    page: Page,
    selected: usize,
    now: Snapshot,
    before: Option<Snapshot>,
    problem: Option<String>,
}

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Stay,
    Quit,
}

impl Screen {
    fn update(&mut self, read: anyhow::Result<Snapshot>) {
        match read {
            Ok(now) => {
                self.before = Some(std::mem::replace(&mut self.now, now)).filter(|before| before.at_ms > 0);
                self.problem = None;
            }
            Err(error) => self.problem = Some(escape(&format!("{error:#}"))),
        }
        self.selected = self.selected.min(self.now.queues.len().saturating_sub(1));
    }

    fn key(&mut self, key: Key) -> Next {
        match key {
            Key::Quit => return Next::Quit,
            Key::Back if self.page == Page::Overview => return Next::Quit,
            Key::Back | Key::Overview => self.page = Page::Overview,
            Key::Advice => self.page = Page::Advice,
            Key::Enter if !self.now.queues.is_empty() => self.page = Page::Queue,
            Key::Up => self.selected = self.selected.saturating_sub(1),
            Key::Down => self.selected = (self.selected + 1).min(self.now.queues.len().saturating_sub(1)),
            Key::Enter => {}
        }
        Next::Stay
    }
}

/// A key that means something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Up,
    Down,
    Enter,
    Advice,
    Overview,
    Back,
    Quit,
}

/// The keys in what a terminal in raw mode sent at once.
fn keys(bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        let key = match first {
            0x1b => match after {
                [b'[' | b'O', b'A', ..] => Some(Key::Up),
                [b'[' | b'O', b'B', ..] => Some(Key::Down),
                // Escape alone; any other sequence means nothing.
                [] => Some(Key::Back),
                _ => None,
            },
            b'k' => Some(Key::Up),
            b'j' => Some(Key::Down),
            b'\r' | b'\n' => Some(Key::Enter),
            b'a' => Some(Key::Advice),
            b'o' => Some(Key::Overview),
            // Control-C and Control-D: in raw mode they are no signals.
            b'q' | 0x03 | 0x04 => Some(Key::Quit),
            _ => None,
        };
        if *first == 0x1b {
            // The rest of the sequence up to its last letter.
            let end = rest.iter().position(|byte| byte.is_ascii_alphabetic() && *byte != b'O');
            rest = end.map_or(&[], |end| &rest[end + 1..]);
        }
        keys.extend(key);
    }
    keys
}

pub async fn run(args: TopArgs) -> anyhow::Result<()> {
    let out = args.remote.output();
    let reader = Reader::connect(&args.remote).await?;
    let first = reader.read().await?;
    if args.once || !out.is_terminal() || out.is_json() {
        return print(&first, out);
    }
    let mut screen = Screen::default();
    screen.update(Ok(first));
    let _restored = Terminal::enter()?;
    live(&mut screen, &reader, Duration::from_millis(args.interval.max(100))).await
}

/// The terminal in raw mode, with a screen of its own; as it was before when this is dropped.
struct Terminal;

impl Terminal {
    fn enter() -> anyhow::Result<Self> {
        enable_raw_mode()?;
        let terminal = Self;
        execute!(std::io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that is gone.
        let _ = execute!(std::io::stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

/// Reads keys on a thread of its own, which ends with the process: a read of a terminal cannot be interrupted.
fn read_keys() -> mpsc::UnboundedReceiver<Key> {
    let (tell, told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok(count @ 1..) = std::io::stdin().read(&mut bytes) {
            for key in keys(&bytes[..count]) {
                if tell.send(key).is_err() {
                    return;
                }
            }
        }
    });
    told
}

async fn live(screen: &mut Screen, reader: &Reader, interval: Duration) -> anyhow::Result<()> {
    let mut keys = read_keys();
    let mut due = tokio::time::interval(interval);
    due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    due.tick().await;
    loop {
        draw(screen)?;
        tokio::select! {
            // Standard input was closed: there is no way to quit but a signal.
            key = keys.recv() => match key {
                Some(key) if screen.key(key) == Next::Stay => {}
                _ => return Ok(()),
            },
            _ = due.tick() => screen.update(reader.read().await),
        }
    }
}

fn draw(screen: &Screen) -> anyhow::Result<()> {
    let (width, height) = size()?;
    let mut out = std::io::stdout().lock();
    for (row, line) in (0..height).zip(view::lines(screen, usize::from(width), usize::from(height))) {
        queue!(out, MoveTo(0, row))?;
        write!(out, "{line}")?;
        queue!(out, Clear(ClearType::UntilNewLine))?;
    }
    queue!(out, Clear(ClearType::FromCursorDown))?;
    Ok(out.flush()?)
}

fn print(now: &Snapshot, out: Output) -> anyhow::Result<()> {
    if out.is_json() {
        return out.value(now);
    }
    let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let mut rows: Vec<Vec<String>> = Vec::new();
    for queue in &now.queues {
        let seen = &queue.seen;
        rows.push(vec![
            format!("queue {}", queue.name),
            queue.stats.ready.to_string(),
            queue.stats.in_flight.to_string(),
            queue.stats.parked.to_string(),
            seen.delivered.to_string(),
            seen.expired.to_string(),
            number(seen.held_p99_ms),
            queue.lease_ms.to_string(),
        ]);
    }
    for located in &now.advice.findings {
        let queue = located.queue.as_ref().map_or("-", |queue| queue.as_str());
        let finding = &located.finding;
        rows.push(vec![
            format!("advice {}", word(&finding.severity)),
            queue.to_owned(),
            finding.code.to_string(),
            escape(&finding.message),
            finding.remedy.clone(),
        ]);
    }
    out.rows(&[], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_move_between_the_pages() {
        let mut screen = Screen::default();
        screen.update(Ok(view::samples::snapshot(1_000, 0)));
        let mut press = |key| (screen.key(key), screen.page, screen.selected);
        assert_eq!(press(Key::Down), (Next::Stay, Page::Overview, 1));
        assert_eq!(press(Key::Down), (Next::Stay, Page::Overview, 1), "there are two queues");
        assert_eq!(press(Key::Enter), (Next::Stay, Page::Queue, 1));
        assert_eq!(press(Key::Advice), (Next::Stay, Page::Advice, 1));
        assert_eq!(press(Key::Back), (Next::Stay, Page::Overview, 1));
        assert_eq!(press(Key::Up), (Next::Stay, Page::Overview, 0));
        assert_eq!(press(Key::Quit).0, Next::Quit);
    }

    #[test]
    fn what_a_terminal_sends_is_understood() {
        for (bytes, expected) in [
            (&b"\x1b[A"[..], vec![Key::Up]),
            (b"\x1bOB\x1b[A", vec![Key::Down, Key::Up]),
            (b"jk\ra", vec![Key::Down, Key::Up, Key::Enter, Key::Advice]),
            (b"\x1b", vec![Key::Back]),
            (b"\x1b[5~", vec![]),
            (b"\x1b[1;5Aq", vec![Key::Quit]),
            (b"\x03", vec![Key::Quit]),
            (b"zz\xff", vec![]),
        ] {
            assert_eq!(keys(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_server_that_is_away_leaves_the_last_figures_on_the_screen() {
        let mut screen = Screen::default();
        screen.update(Ok(view::samples::snapshot(1_000, 0)));
        screen.update(Err(anyhow::anyhow!("nothing answers")));
        assert_eq!((screen.now.queues.len(), screen.problem.as_deref()), (2, Some("nothing answers")));
    }
}
