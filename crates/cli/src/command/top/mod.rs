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

Keys: up and down choose a queue, Enter shows it, a shows the advice, where up and down move through the findings; Page Up,
Page Down, Home and End move further; Esc goes back, q quits. The first 200 queues by name are shown.
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
    /// The finding that the page of advice begins with.
    first_finding: usize,
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
        self.stay_within();
    }

    /// Moves through queues or findings, as far as there are any.
    fn move_by(&mut self, steps: isize) {
        let at = if self.page == Page::Advice { &mut self.first_finding } else { &mut self.selected };
        *at = at.saturating_add_signed(steps);
        self.stay_within();
    }

    fn stay_within(&mut self) {
        self.selected = self.selected.min(self.now.queues.len().saturating_sub(1));
        self.first_finding = self.first_finding.min(self.now.advice.findings.len().saturating_sub(1));
    }

    fn key(&mut self, key: Key) -> Next {
        match key {
            Key::Quit => return Next::Quit,
            Key::Back if self.page == Page::Overview => return Next::Quit,
            Key::Back | Key::Overview => self.page = Page::Overview,
            Key::Advice => {
                self.page = Page::Advice;
                self.first_finding = 0;
            }
            Key::Enter if !self.now.queues.is_empty() => self.page = Page::Queue,
            Key::Enter => {}
            Key::Up => self.move_by(-1),
            Key::Down => self.move_by(1),
            Key::PageUp => self.move_by(-PAGE_ROWS),
            Key::PageDown => self.move_by(PAGE_ROWS),
            Key::First => self.move_by(isize::MIN),
            Key::Last => self.move_by(isize::MAX),
        }
        Next::Stay
    }
}

/// Rows that Page Up and Page Down move.
const PAGE_ROWS: isize = 10;

/// A key that means something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    First,
    Last,
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
        keys.extend(match first {
            0x1b => {
                let (key, length) = sequence(after);
                rest = &after[length..];
                key
            }
            b'k' => Some(Key::Up),
            b'j' => Some(Key::Down),
            b'\r' | b'\n' => Some(Key::Enter),
            b'a' => Some(Key::Advice),
            b'o' => Some(Key::Overview),
            // Control-C and Control-D: in raw mode they are no signals.
            b'q' | 0x03 | 0x04 => Some(Key::Quit),
            _ => None,
        });
    }
    keys
}

/// The key of what follows an Escape, and how many bytes belong to it.
fn sequence(after: &[u8]) -> (Option<Key>, usize) {
    match after.split_first() {
        // Escape alone.
        None | Some((0x1b, _)) => (Some(Key::Back), 0),
        Some((b'[' | b'O', rest)) => {
            // Numbers, then one letter or `~`.
            let Some(end) = rest.iter().position(|byte| (b'@'..=b'~').contains(byte)) else {
                return (None, after.len());
            };
            let key = match &rest[..=end] {
                b"A" => Some(Key::Up),
                b"B" => Some(Key::Down),
                b"5~" => Some(Key::PageUp),
                b"6~" => Some(Key::PageDown),
                b"H" | b"1~" | b"7~" => Some(Key::First),
                b"F" | b"4~" | b"8~" => Some(Key::Last),
                _ => None,
            };
            (key, end + 2)
        }
        // A key together with Alt.
        Some(_) => (None, 1),
    }
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
    // A read may take long: keys are answered meanwhile.
    let next = || {
        Box::pin(async move {
            tokio::time::sleep(interval).await;
            reader.read().await
        })
    };
    let mut reading = next();
    loop {
        draw(screen)?;
        tokio::select! {
            // Standard input was closed: there is no way to quit but a signal.
            key = keys.recv() => match key {
                Some(key) if screen.key(key) == Next::Stay => {}
                _ => return Ok(()),
            },
            read = &mut reading => {
                screen.update(read);
                reading = next();
            }
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
    fn many_queues_and_findings_can_be_moved_through() {
        let mut now = view::samples::snapshot(1_000, 0);
        let (queue, located) = (now.queues[0].clone(), now.advice.findings[0].clone());
        now.queues = vec![queue; 200];
        now.advice.findings = vec![located; 25];
        let mut screen = Screen::default();
        screen.update(Ok(now.clone()));
        let mut press = |keys: &[Key]| {
            for key in keys {
                assert_eq!(screen.key(*key), Next::Stay);
            }
            (screen.selected, screen.first_finding)
        };
        assert_eq!(press(&[Key::PageDown, Key::PageDown, Key::Down]), (21, 0));
        assert_eq!(press(&[Key::PageUp]), (11, 0));
        assert_eq!(press(&[Key::Last]), (199, 0));
        assert_eq!(press(&[Key::First, Key::Up, Key::Down]), (1, 0));
        assert_eq!(press(&[Key::Advice, Key::PageDown, Key::Down]), (1, 11), "the chosen queue stays");
        assert_eq!(press(&[Key::Last]), (1, 24));
        assert_eq!(press(&[Key::Back, Key::Down]), (2, 24));
        assert_eq!(press(&[Key::Advice]), (2, 0), "from the first one again");
        press(&[Key::Last]);
        now.advice.findings.truncate(3);
        screen.update(Ok(now));
        assert_eq!(screen.first_finding, 2, "some are gone");
    }

    #[test]
    fn what_a_terminal_sends_is_understood() {
        for (bytes, expected) in [
            (&b"\x1b[A"[..], vec![Key::Up]),
            (b"\x1bOB\x1b[A", vec![Key::Down, Key::Up]),
            (b"jk\ra", vec![Key::Down, Key::Up, Key::Enter, Key::Advice]),
            (b"\x1b", vec![Key::Back]),
            (b"\x1b[5~q", vec![Key::PageUp, Key::Quit]),
            (b"\x1b[6~\x1b[H\x1bOF", vec![Key::PageDown, Key::First, Key::Last]),
            (b"\x1b[1~\x1b[4~j", vec![Key::First, Key::Last, Key::Down]),
            (b"\x1b[3~\x1b[15~k", vec![Key::Up]),
            (b"\x1b[1;5Aq", vec![Key::Quit]),
            (b"\x1b[", vec![]),
            (b"\x1bqj", vec![Key::Down]),
            (b"\x1b\x1b", vec![Key::Back, Key::Back]),
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
