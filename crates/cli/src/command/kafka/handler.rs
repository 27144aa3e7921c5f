//! A command as the handler of a processor, by the conventions of `hapax work`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hapax_kafka::consumer::Record;
use hapax_kafka::partition::TopicPartition;
use hapax_kafka::processor::{Failure, Handler};
use hapax_kafka::producer::NewRecord;
use hapax_kafka::to_database::KEY_HEADER;
use tokio::sync::watch;

use super::file::OutputRecords;
use crate::command::work::environment;
use crate::command::work::process::{CommandResult, CommandRunner, HaltState, StopReason};
use crate::command::work::{EXIT_REJECT, EXIT_RETRY};
use crate::text::show_bytes;

/// Failures that are remembered for HAPAX_ATTEMPT.
const FAILURES_MAX: usize = 10_000;

/// Runs the command for each record.
pub struct CommandHandler {
    pub runner: CommandRunner,
    pub stale: Vec<OsString>,
    pub halt: watch::Receiver<HaltState>,
    pub output: Option<String>,
    pub output_records: OutputRecords,
    /// How often a record failed in this process.
    pub failures: HashMap<(TopicPartition, i64), u32>,
}

impl Handler for CommandHandler {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let place = (record.at.clone(), record.offset);
        let attempt = self.failures.get(&place).copied().unwrap_or(0) + 1;
        let env = variables(record, attempt, self.runner.run_max.unwrap_or_default());
        let body = record.value.clone().unwrap_or_default();
        let prefix = format!("{}:{}", record.at, record.offset);
        let result = self.runner.run(env, &self.stale, body, &prefix, self.halt.clone()).await;
        let result = result.map_err(|error| {
            Failure::Stop(format!("the command {} cannot be started: {error}", self.runner.program.display()))
        })?;
        let handled = self.outputs(record, &result, output);
        match &handled {
            Ok(()) => drop(self.failures.remove(&place)),
            Err(_) if self.failures.len() < FAILURES_MAX => drop(self.failures.insert(place, attempt)),
            Err(_) => {}
        }
        handled
    }
}

impl CommandHandler {
    /// What the command's end means.
    fn outputs(
        &self,
        record: &Record,
        result: &CommandResult,
        output: &mut Vec<NewRecord>,
    ) -> Result<(), Failure> {
        let words = words(result);
        match result.code {
            Some(0) => {}
            Some(EXIT_RETRY) => return Err(Failure::Retry(words)),
            Some(EXIT_REJECT) => return Err(Failure::Reject(words)),
            _ if result.stopped == Some(StopReason::ShutDown) => return Err(Failure::Stop(words)),
            _ => return Err(Failure::Retry(words)),
        }
        let Some(topic) = &self.output else { return Ok(()) };
        if result.stdout.is_open {
            let why =
                "its output may not be complete: something that it started holds its standard output open";
            return Err(Failure::Retry(why.to_owned()));
        }
        if result.stdout.is_cut() {
            let size = show_bytes(result.stdout.total);
            return Err(Failure::Reject(format!("its output of {size} is too large for a record")));
        }
        let printed = Bytes::from(result.stdout.bytes.clone());
        let new = |value: Bytes| NewRecord {
            topic: topic.clone(),
            key: record.key.clone(),
            value: Some(value),
            ..NewRecord::default()
        };
        match self.output_records {
            OutputRecords::Whole => {
                let value = without_line_end(&printed);
                output.extend((!value.is_empty()).then(|| new(value)));
            }
            OutputRecords::Lines => {
                let lines = printed.split(|byte| *byte == b'\n');
                let lines = lines.map(|line| without_line_end(&printed.slice_ref(line)));
                output.extend(lines.filter(|line| !line.is_empty()).map(new));
            }
        }
        Ok(())
    }
}

/// Without the end of the last line.
fn without_line_end(bytes: &Bytes) -> Bytes {
    let kept = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let kept = kept.strip_suffix(b"\r").unwrap_or(kept);
    bytes.slice_ref(kept)
}

/// How it ended, or what it said itself.
fn words(result: &CommandResult) -> String {
    let how = match (result.code, result.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    };
    let how = match result.stopped {
        Some(StopReason::TimedOut) => {
            format!("it ran for longer than limits.run_max_ms and was stopped: {how}")
        }
        Some(StopReason::ShutDown) => format!("it was stopped at the end of the drain: {how}"),
        None => how,
    };
    if result.stderr.is_empty() { how } else { format!("{how}: {}", result.stderr) }
}

/// The variables of a record: those of `hapax work` that a record has, and where it is.
fn variables(record: &Record, attempt: u32, run_max: Duration) -> Vec<(OsString, OsString)> {
    let deadline = SystemTime::now() + run_max;
    let deadline_ms = deadline.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis();
    let id = format!("{}/{}", record.at, record.offset);
    let text =
        |bytes: &[u8]| std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0')).map(str::to_owned);
    let key = record.header(KEY_HEADER).and_then(text).unwrap_or_else(|| id.clone());
    let mut variables: Vec<(String, String)> = [
        ("HAPAX_QUEUE", record.at.topic.to_string()),
        ("HAPAX_PARTITION", record.at.partition.to_string()),
        ("HAPAX_OFFSET", record.offset.to_string()),
        ("HAPAX_MESSAGE_ID", id),
        ("HAPAX_ATTEMPT", attempt.to_string()),
        ("HAPAX_IDEMPOTENCY_KEY", key),
        ("HAPAX_TOMBSTONE", u8::from(record.value.is_none()).to_string()),
        ("HAPAX_LEASE_DEADLINE", deadline_ms.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let group = record.key.as_deref().and_then(text);
    variables.extend(group.map(|group| ("HAPAX_GROUP".to_owned(), group)));
    let headers: Vec<(&str, String)> = record
        .headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), text(value.as_deref()?)?)))
        .collect();
    variables
        .extend(environment::text_variables(headers.iter().map(|(name, value)| (*name, value.as_str()))));
    variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_knows_its_record() {
        let record = Record {
            at: TopicPartition::new("orders", 2),
            offset: 7,
            timestamp_ms: None,
            key: Some("customer 1".into()),
            value: None,
            headers: vec![
                ("trace.id".to_owned(), Some("t".into())),
                ("bytes".to_owned(), Some(Bytes::from_static(&[0xff]))),
            ],
        };
        let variables = variables(&record, 3, Duration::from_secs(1));
        let shown = |name: &str| {
            let found = variables.iter().find(|(found, _)| found == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        for (name, value) in [
            ("HAPAX_QUEUE", Some("orders")),
            ("HAPAX_PARTITION", Some("2")),
            ("HAPAX_OFFSET", Some("7")),
            ("HAPAX_MESSAGE_ID", Some("orders/2/7")),
            ("HAPAX_IDEMPOTENCY_KEY", Some("orders/2/7")),
            ("HAPAX_ATTEMPT", Some("3")),
            ("HAPAX_TOMBSTONE", Some("1")),
            ("HAPAX_GROUP", Some("customer 1")),
            ("HAPAX_ATTR_TRACE_ID", Some("t")),
            ("HAPAX_ATTR_BYTES", None),
        ] {
            assert_eq!(shown(name).as_deref(), value, "{name}");
        }
    }
}
