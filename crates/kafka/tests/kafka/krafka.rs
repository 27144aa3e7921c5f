//! A process with a producer and a consumer of krafka, which obeys lines.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Instant;

use hapax_faults::Process;

use crate::broker::PATIENCE;

#[path = "../common/krafka.rs"]
mod program;

/// The program, or why there is none.
pub static PROGRAM: LazyLock<Result<PathBuf, String>> = LazyLock::new(program::build);

pub struct Krafka {
    process: Process,
    /// What it told of beside its answers.
    pub events: Vec<String>,
}

impl Krafka {
    /// Starts it; `more` has the file of the authority if the listener is encrypted.
    pub fn start(address: &str, client: &str, request_timeout_ms: u32, more: &[&str]) -> Self {
        let program = PROGRAM.as_ref().expect("the cases are skipped without it");
        let mut command = Command::new(program);
        command.args(["session", address, client, &request_timeout_ms.to_string()]).args(more);
        Self { process: Process::start(&mut command).unwrap(), events: Vec::new() }
    }

    /// Sends a command, and does not wait for its answer.
    pub fn tell(&mut self, command: &str) {
        self.process.write_line(command);
    }

    /// The answer to the last command: what it returned, or its error.
    pub fn answer(&mut self) -> Result<String, String> {
        loop {
            let line = self.line();
            match line.split_once(' ') {
                Some(("ok", answer)) => return Ok(answer.trim().to_owned()),
                Some(("error", error)) => return Err(error.to_owned()),
                _ => self.events.push(line),
            }
        }
    }

    /// Waits until it tells of an event, in the course of a command.
    pub fn event(&mut self, text: &str) {
        loop {
            let line = self.line();
            let is_found = line.starts_with(&format!("event {text}"));
            assert!(line.starts_with("event"), "{text} is not told: {line}");
            self.events.push(line);
            if is_found {
                return;
            }
        }
    }

    /// Polls until a poll tells of an event; that poll is not over.
    pub fn poll_until_event(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            // A change of the assignment is applied at the beginning of a poll.
            self.tell("poll 200");
            let line = self.line();
            if line.starts_with(&format!("event {text}")) {
                return self.events.push(line);
            }
            assert!(line.starts_with("ok") && start.elapsed() < PATIENCE, "{text} is not told: {line}");
        }
    }

    fn line(&self) -> String {
        self.process.next_line().unwrap_or_else(|| panic!("it has ended: {}", self.process.log()))
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Result<String, String> {
        self.tell(command);
        self.answer()
    }

    /// Polls until the records of a poll and the assignment are as wanted.
    pub fn poll_until(&mut self, what: impl Fn(&str, &str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let records = self.ask("poll 200").unwrap();
            let assignment = self.ask("assignment").unwrap();
            if what(&records, &assignment) {
                return records;
            }
            assert!(start.elapsed() < PATIENCE, "it has {assignment} and {records:?}");
        }
    }
}
