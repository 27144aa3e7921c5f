//! Calls of the queues' scripts and their answers.

use std::collections::VecDeque;
use std::sync::Arc;

use hapax_core::policy::Jitter;
use hapax_core::{OnDead, QueueConfig, QueueName, StoreError, Tier};
use redis::Value;

use super::{CHANGES_MAX, Known, Queues};
use crate::copy::refusal;
use crate::error::unexpected;
use crate::msgpack::{Item, pack, unpack};
use crate::run::Call;
use crate::script::{QueueScript, Script};

/// The arguments of each script, for the test of its header.
#[cfg(test)]
pub(crate) fn arguments(script: QueueScript) -> &'static [&'static str] {
    macro_rules! arguments {
        ($($name:literal),*) => { &["clock", "touch", "seed", "floor", "settings", $($name),*] };
    }
    match script {
        QueueScript::Send | QueueScript::Settle | QueueScript::Extend | QueueScript::Import => {
            arguments!("element...")
        }
        QueueScript::Receive => {
            arguments!("max", "lease_ms", "consumer", "ack", "attempt_id", "bytes_max")
        }
        QueueScript::Tick => arguments!("drop..."),
        QueueScript::Configure => arguments!("how", "config", "expected", "interval_ms", "by", "pause"),
        QueueScript::Clear => arguments!("how", "interval_ms"),
        QueueScript::Decide => arguments!("how", "by", "group", "id..."),
        QueueScript::View => arguments!("after", "limit", "state", "id"),
        QueueScript::Stats => arguments!("halted_max"),
        QueueScript::Move => arguments!("how", "move..."),
        QueueScript::Arrive => {
            arguments!("source", "move", "number", "kind", "old_id", "message", "body", "entry")
        }
        QueueScript::Redrive => arguments!("how", "id", "task", "cursor", "ends", "element..."),
    }
}

/// The keys of each script, for the test of its header.
#[cfg(test)]
pub(crate) fn keys(script: QueueScript) -> &'static [&'static str] {
    let entries: &[&str] = match script {
        QueueScript::Send | QueueScript::Settle | QueueScript::Decide | QueueScript::Import => &["entry..."],
        QueueScript::Arrive => &["entry"],
        _ => &[],
    };
    Vec::leak([crate::keys::QUEUE_KEYS.as_slice(), entries].concat())
}

/// The settings of a queue as the scripts read them. The revision `*` fits any.
pub(super) fn settings(revision: &str, name: &QueueName, config: &QueueConfig) -> Vec<u8> {
    let dead_letters = config.dead_letter.as_ref().map_or("-", |dead| dead.queue.as_str());
    let number = |value: u64| Item::Number(value.try_into().unwrap_or(i64::MAX));
    let quota = |max: Option<u64>| max.map_or(Item::Number(-1), number);
    let retry = &config.retry;
    pack(&[
        Item::Text(revision),
        Item::Text(name.as_str()),
        Item::Text(dead_letters),
        Item::Flag(config.is_fifo()),
        number(config.retention_ms),
        number(retry.max_attempts.into()),
        number(retry.base_ms),
        number(retry.cap_ms),
        Item::Flag(retry.jitter == Jitter::Full),
        Item::Flag(config.on_dead == OnDead::HaltGroup),
        number(config.dedup.window_ms),
        quota(config.quota.messages_max),
        quota(config.quota.bytes_max),
        Item::Flag(is_once(config)),
    ])
}

/// Whether the handlers of a queue make claims: the entries of its messages' keys are then kept as long as those live.
pub(super) fn is_once(config: &QueueConfig) -> bool {
    matches!(config.tier, Tier::EffectivelyOnce | Tier::Transactional)
}

/// Values of an answer, read one after the other.
pub(super) struct Fields {
    what: &'static str,
    values: VecDeque<Value>,
}

impl Fields {
    pub fn of(what: &'static str, value: Value) -> Result<Self, StoreError> {
        match value {
            Value::Array(values) => Ok(Self { what, values: values.into() }),
            _ => Err(unexpected(what)),
        }
    }

    pub fn unexpected(&self) -> StoreError {
        unexpected(self.what)
    }

    fn next(&mut self) -> Result<Value, StoreError> {
        self.values.pop_front().ok_or_else(|| unexpected(self.what))
    }

    /// The next value as values of its own.
    pub fn fields(&mut self) -> Result<Self, StoreError> {
        Self::of(self.what, self.next()?)
    }

    /// The next value as values of its own that a script has packed.
    pub fn unpacked(&mut self) -> Result<Self, StoreError> {
        let packed = self.bytes()?;
        Self::of(self.what, unpack(&packed).ok_or_else(|| self.unexpected())?)
    }

    /// The next value as a list of such.
    pub fn rows(&mut self) -> Result<Vec<Self>, StoreError> {
        let rows = self.fields()?.values;
        rows.into_iter().map(|row| Self::of(self.what, row)).collect()
    }

    pub fn bytes(&mut self) -> Result<Vec<u8>, StoreError> {
        match self.next()? {
            Value::BulkString(bytes) => Ok(bytes),
            _ => Err(self.unexpected()),
        }
    }

    pub fn text(&mut self) -> Result<String, StoreError> {
        String::from_utf8(self.bytes()?).map_err(|_| self.unexpected())
    }

    /// A text further behind, which is read again later.
    pub fn peek_text(&self, at: usize) -> Result<String, StoreError> {
        match self.values.get(at) {
            Some(Value::BulkString(bytes)) => String::from_utf8(bytes.clone()).map_err(|_| self.unexpected()),
            _ => Err(self.unexpected()),
        }
    }

    /// A text that may be missing.
    pub fn maybe_text(&mut self) -> Result<Option<String>, StoreError> {
        match self.values.front() {
            Some(Value::Nil) => self.next().map(|_| None),
            _ => self.text().map(Some),
        }
    }

    /// Whether the next value is missing; it is passed over then.
    pub fn is_none(&mut self) -> bool {
        let is_none = matches!(self.values.front(), Some(Value::Nil));
        if is_none {
            self.values.pop_front();
        }
        is_none
    }

    pub fn texts(&mut self) -> Result<Vec<String>, StoreError> {
        let mut fields = self.fields()?;
        (0..fields.values.len()).map(|_| fields.text()).collect()
    }

    pub fn parsed<T: std::str::FromStr>(&mut self) -> Result<T, StoreError> {
        self.text()?.parse().map_err(|_| self.unexpected())
    }

    pub fn signed(&mut self) -> Result<i64, StoreError> {
        match self.next()? {
            Value::Int(number) => Ok(number),
            _ => Err(self.unexpected()),
        }
    }

    pub fn number(&mut self) -> Result<u64, StoreError> {
        self.signed()?.try_into().map_err(|_| self.unexpected())
    }

    /// The last value, a number.
    pub fn last(&mut self) -> Result<u64, StoreError> {
        self.values.drain(..self.values.len().saturating_sub(1));
        self.number()
    }

    pub fn count(&mut self) -> Result<u32, StoreError> {
        self.number()?.try_into().map_err(|_| self.unexpected())
    }
}

/// An answer of a script.
pub(super) struct Answer {
    pub status: String,
    pub now_ms: u64,
    /// Messages that the script has set on their way.
    pub moves: Vec<String>,
    /// Old messages that a group elsewhere may wait for: sequence, id, queues.
    pub checks: Vec<[String; 3]>,
    /// How many messages were decided about that groups elsewhere may wait for.
    pub decisions: u64,
    /// Entries of the ledger whose doubt has ended.
    pub resumed: Vec<String>,
    /// What follows, according to the status.
    pub values: Fields,
    /// The queue as it was when the script ran.
    known: Option<Arc<Known>>,
}

impl Answer {
    pub fn read(what: &'static str, value: Value) -> Result<Self, StoreError> {
        let mut values = Fields::of(what, value)?;
        let (status, now_ms, moves) = (values.text()?, values.number()?, values.texts()?);
        let check = |mut row: Fields| Ok([row.text()?, row.text()?, row.text()?]);
        let checks = values.rows()?.into_iter().map(check).collect::<Result<_, StoreError>>()?;
        let (decisions, resumed) = (values.number()?, values.texts()?);
        Ok(Self { status, now_ms, moves, checks, decisions, resumed, values, known: None })
    }

    /// An error if the queue, or the ledger that it needs, is closed for a copy.
    pub fn check_open(mut self, name: &QueueName) -> Result<Self, StoreError> {
        match self.status.as_str() {
            "closed" => Err(refusal(&self.values.text()?, &format!("queue {name}"))),
            "ledger-closed" => Err(refusal(&self.values.text()?, "the ledger")),
            _ => Ok(self),
        }
    }
}

impl Answer {
    /// The settings by which the script has run.
    pub fn config(&self) -> Result<QueueConfig, StoreError> {
        self.known.as_ref().map(|known| known.config.clone()).ok_or_else(|| self.values.unexpected())
    }
}

impl Queues {
    /// A script on a queue. What all scripts need comes first.
    pub(super) fn call(&self, script: QueueScript, known: &Known, args: &[&[u8]]) -> Call {
        self.call_with(script, known, &[], args)
    }

    /// The same with entries of the ledger, which are in the shard of the queue.
    pub(super) fn call_with(
        &self,
        script: QueueScript,
        known: &Known,
        entries: &[String],
        args: &[&[u8]],
    ) -> Call {
        let (clock, seed) = (self.runner.clock(), fastrand::u32(..).to_string());
        let floor = self.fence_floor().to_string();
        let first = [
            clock.as_bytes(),
            self.runner.touch(),
            seed.as_bytes(),
            floor.as_bytes(),
            known.settings.as_slice(),
        ];
        let args = [&first, args].concat();
        if entries.is_empty() {
            return Call::script(Script::Queue(script), known.shard, &known.keys, &args);
        }
        let entries = entries.iter().map(|member| self.runner.keys.entry(known.shard, member));
        let keys: Vec<String> = known.keys.iter().cloned().chain(entries).collect();
        Call::script(Script::Queue(script), known.shard, &keys, &args)
    }

    /// Runs a script on a queue, with its settings of now. What the script has set on its way is brought to its end.
    pub(super) async fn ask(
        &self,
        script: QueueScript,
        name: &QueueName,
        args: impl Fn(&QueueConfig) -> Vec<Vec<u8>>,
    ) -> Result<Answer, StoreError> {
        self.ask_with(script, name, |config| (Vec::new(), args(config))).await
    }

    /// The same with entries of the ledger, by their names.
    pub(super) async fn ask_with(
        &self,
        script: QueueScript,
        name: &QueueName,
        args: impl Fn(&QueueConfig) -> (Vec<String>, Vec<Vec<u8>>),
    ) -> Result<Answer, StoreError> {
        for _ in 0..CHANGES_MAX {
            let known = self.known(name).await?;
            let (entries, args) = args(&known.config);
            let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
            let value = self.runner.one(self.call_with(script, &known, &entries, &args)).await?;
            let answer = Answer::read(script.name(), value)?.check_open(name)?;
            match answer.status.as_str() {
                "missing" => {
                    self.forget(name);
                    return Err(StoreError::NoSuchQueue(name.clone()));
                }
                "changed" => self.forget(name),
                _ => return Ok(Answer { known: Some(known), ..answer }),
            }
        }
        Err(StoreError::Unavailable(format!("the settings of queue {name} change all the time; try again")))
    }
}
