//! Runs scripts: on the node of their shard, again where the node had moved or was not ready, and with the confirmations that
//! the store's level asks for.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::future::join_all;
use hapax_core::StoreError;
use redis::{Cmd, RedisResult, Value};
use tokio::time::{Instant, timeout_at};

use crate::connect::{Durability, Options};
use crate::error::{Access, Remedy, lost, remedy};
use crate::keys::{Keys, SHARDS, Shard};
use crate::node::{NoAnswer, Node, pipeline};
use crate::script::{BOOT, Script};
use crate::topology::{Topology, field, following};

/// How often a call is asked again, and the pause before it in milliseconds: together about two seconds.
const PAUSES_MS: &[u64] = &[0, 0, 20, 50, 100, 200, 400, 600, 600];
/// The pause while the slot of a call moves. It is asked until its time is over: a slot is moved in a moment, or in as many
/// seconds as it has thousands of keys.
const MOVING_PAUSE_MS: u64 = 100;
/// How often a node that cannot be reached is asked again: a caller should not wait for a server that is down.
const UNREACHABLE_MAX: usize = 1;

/// Why open claims may get a full lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Boot {
    /// A store was opened; the servers may have been replaced before.
    Opened,
    /// The node has taken the place of another.
    TookOver,
    /// The node has lost its scripts, hence was restarted.
    Restarted,
}

/// A command for one shard.
#[derive(Clone)]
pub(crate) struct Call {
    what: &'static str,
    shard: Shard,
    access: Access,
    command: Cmd,
}

impl Call {
    /// A script with its keys and arguments.
    pub fn script(script: Script, shard: Shard, keys: &[String], args: &[&[u8]]) -> Self {
        let mut command = redis::cmd("EVALSHA");
        let keys = script.keys(keys);
        command.arg(script.sha()).arg(keys.clone().count());
        for key in keys {
            command.arg(key);
        }
        command.arg(args);
        Self { what: script.name(), shard, access: Access::Write, command }
    }

    /// A command that changes nothing.
    pub fn read(what: &'static str, shard: Shard, command: Cmd) -> Self {
        Self { what, shard, access: Access::Read, command }
    }
}

/// The keys and arguments that callers pass to a script, for the test of its header.
#[cfg(test)]
pub(crate) fn contract(script: Script) -> (&'static [&'static str], &'static [&'static str]) {
    const DOCUMENTS: &[&str] = &["meta", "documents", "names"];
    macro_rules! entry {
        ($($more:literal),*) => {
            &["meta", "all", "open", "due", "scopes", "needs", "resumed", $($more),*]
        };
    }
    match script {
        Script::Claim => (
            entry!("entry", "messages", "waits"),
            &[
                "clock",
                "touch",
                "scope",
                "key",
                "owner",
                "fingerprint",
                "lease_ms",
                "parks",
                "nonce",
                "open_max",
                "queue",
                "sequence",
                "message",
            ],
        ),
        Script::Renew => (entry!("entry"), &["clock", "touch", "fence", "nonce", "lease_ms"]),
        Script::Finish => (
            entry!("entry"),
            &["clock", "touch", "fence", "nonce", "ending", "failed", "value", "omitted", "ttl_ms"],
        ),
        Script::Look => (entry!("entry"), &["clock", "touch"]),
        Script::Decide => (
            entry!("entry", "audit"),
            &["clock", "touch", "decision", "failed", "value", "omitted", "ttl_ms", "nonce", "by", "what"],
        ),
        Script::Sweep => (entry!("entry..."), &["clock", "touch"]),
        Script::Import => (
            entry!("entry"),
            &[
                "clock",
                "touch",
                "scope",
                "key",
                "owner",
                "fingerprint",
                "claimed",
                "takeovers",
                "stage",
                "at",
                "ttl_ms",
                "parks",
                "value",
                "omitted",
                "nonce",
                "imported_ms",
                "ttl_max",
            ],
        ),
        Script::Shard => (&["meta", "audit"], &["how", "value", "by", "what"]),
        Script::DocumentPut => (DOCUMENTS, &["clock", "name", "value", "expected", "count_max", "bytes_max"]),
        Script::DocumentDelete => (DOCUMENTS, &["name", "expected"]),
        Script::Queue(script) => (crate::queues::keys(script), crate::queues::arguments(script)),
    }
}

/// A call on its way.
struct Pending {
    at: usize,
    call: Call,
    /// The node to ask out of turn, while its slot is being moved.
    asking: Option<String>,
    unreachable: usize,
    /// Its slot was being moved when it was asked, now or before.
    is_moving: bool,
    problem: String,
}

impl Pending {
    fn new((at, call): (usize, Call)) -> Self {
        Self { at, call, asking: None, unreachable: 0, is_moving: false, problem: String::new() }
    }

    fn not_ready(&self) -> StoreError {
        let what = self.call.what;
        StoreError::Unavailable(format!("{what}: Redis is not ready: {}", self.problem))
    }
}

/// Runs calls.
pub(crate) struct Runner {
    pub topology: Topology,
    pub keys: Keys,
    pub options: Options,
    /// Why all calls are refused.
    refusal: RwLock<Option<StoreError>>,
}

impl Runner {
    pub fn new(topology: Topology, keys: Keys, options: Options) -> Self {
        Self { topology, keys, options, refusal: RwLock::default() }
    }

    /// Refuses all calls from now on, or none.
    pub fn refuse(&self, why: Option<StoreError>) {
        *self.refusal.write().unwrap_or_else(PoisonError::into_inner) = why;
    }

    pub fn refusal(&self) -> Option<StoreError> {
        self.refusal.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first argument of each script of the ledger: empty for the clock of Redis.
    pub fn clock(&self) -> String {
        self.options.clock.as_ref().map_or_else(String::new, |clock| (clock.wall_ms() * 1000).to_string())
    }

    /// The second argument: whether each answer needs a write of its own.
    pub fn touch(&self) -> &'static [u8] {
        if self.options.durability == Durability::Replicated { b"1" } else { b"0" }
    }

    /// One answer per call, in their order.
    pub async fn run(self: &Arc<Self>, calls: Vec<Call>) -> Vec<Result<Value, StoreError>> {
        let answers = match self.refusal() {
            Some(refusal) => calls.iter().map(|_| Err(refusal.clone())).collect(),
            None => self.ask_until_answered(calls).await,
        };
        if answers.iter().any(Result::is_err) {
            // Errors may be there at once. A caller that repeats its call at once must not keep the tasks from running that
            // connect again and find that calls can be accepted, if all have one thread.
            tokio::task::yield_now().await;
        }
        answers
    }

    async fn ask_until_answered(self: &Arc<Self>, calls: Vec<Call>) -> Vec<Result<Value, StoreError>> {
        let mut answers: Vec<Option<Result<Value, StoreError>>> = calls.iter().map(|_| None).collect();
        let mut open: Vec<Pending> = calls.into_iter().enumerate().map(Pending::new).collect();
        let end = Instant::now() + self.options.call_limit();
        // An attempt that begins later would have too little time for its answer, and an unknown outcome.
        let latest = end - self.options.call_limit() / 4;
        let last = std::iter::repeat(&MOVING_PAUSE_MS);
        for (tried, pause_ms) in PAUSES_MS.iter().chain(last).enumerate() {
            if tried >= PAUSES_MS.len() {
                for pending in open.extract_if(.., |pending| !pending.is_moving) {
                    answers[pending.at] = Some(Err(pending.not_ready()));
                }
            }
            let pause = Duration::from_millis(*pause_ms);
            if open.is_empty() || (tried > 0 && Instant::now() + pause >= latest) {
                break;
            }
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            // Boxed: with all its callers the future would be too deep for the compiler.
            open = Box::pin(self.attempt(open, &mut answers, end)).await;
        }
        for pending in open {
            answers[pending.at] = Some(Err(pending.not_ready()));
        }
        answers.into_iter().map(|answer| answer.expect("each call is answered or pending")).collect()
    }

    /// One call.
    pub async fn one(self: &Arc<Self>, call: Call) -> Result<Value, StoreError> {
        self.run(vec![call]).await.remove(0)
    }

    /// Asks once, until this time at most; returns the calls to ask again.
    async fn attempt(
        self: &Arc<Self>,
        open: Vec<Pending>,
        answers: &mut [Option<Result<Value, StoreError>>],
        end: Instant,
    ) -> Vec<Pending> {
        let mut groups: BTreeMap<String, Vec<Pending>> = BTreeMap::new();
        for pending in open {
            let address = pending.asking.clone().or_else(|| self.topology.owner(pending.call.shard));
            groups.entry(address.unwrap_or_default()).or_default().push(pending);
        }
        let asked = groups.into_iter().map(|(address, group)| self.ask(address, group, end));
        let (mut again, mut stale, mut load) = (Vec::new(), Stale::No, Vec::new());
        for (address, mut pending, answered) in join_all(asked).await.into_iter().flatten() {
            pending.asking = None;
            let remedy = match answered {
                Ok(value) => {
                    answers[pending.at] = Some(Ok(value));
                    continue;
                }
                Err((remedy, problem)) => {
                    pending.problem = problem;
                    remedy
                }
            };
            pending.is_moving |= matches!(remedy, Remedy::Ask(_) | Remedy::Moving);
            match remedy {
                Remedy::Moved(to) => {
                    self.topology.moved(pending.call.shard, &self.topology.named(&to, &address));
                    stale = Stale::Surely;
                }
                Remedy::Ask(to) => pending.asking = Some(self.topology.named(&to, &address)),
                Remedy::Load => load.push(address),
                Remedy::Unknown => stale = Stale::Surely,
                Remedy::Later | Remedy::Moving => stale = stale.max(Stale::Perhaps),
                Remedy::Unreachable if pending.unreachable < UNREACHABLE_MAX => {
                    pending.unreachable += 1;
                    stale = stale.max(Stale::Perhaps);
                }
                Remedy::Unreachable => {
                    let problem =
                        format!("{}: Redis cannot be reached: {}", pending.call.what, pending.problem);
                    answers[pending.at] = Some(Err(StoreError::Unavailable(problem)));
                    continue;
                }
                Remedy::Lost => {
                    // The node may have been replaced. The next call should know.
                    let runner = self.clone();
                    tokio::spawn(async move { runner.topology.refresh().await });
                    answers[pending.at] =
                        Some(Err(lost(pending.call.what, pending.call.access, &pending.problem)));
                    continue;
                }
                Remedy::Final(error) => {
                    answers[pending.at] = Some(Err(error));
                    continue;
                }
            }
            again.push(pending);
        }
        let prepared = timeout_at(end, self.prepare(stale, load)).await;
        if let Ok(Err(error)) = prepared {
            tracing::debug!(%error, "Redis is not ready for the next attempt");
            for pending in &mut again {
                pending.problem = format!("{}; {error}", pending.problem);
            }
        }
        again
    }

    /// Looks the nodes up again and loads scripts, before the next attempt.
    async fn prepare(&self, stale: Stale, mut load: Vec<String>) -> Result<(), StoreError> {
        let refreshed = match stale {
            Stale::No => Ok(()),
            Stale::Perhaps => self.topology.refresh().await,
            Stale::Surely => self.topology.refresh_now().await,
        };
        load.sort_unstable();
        load.dedup();
        let loading = load.iter().map(|address| self.load_scripts(address, Boot::TookOver));
        join_all(loading).await.into_iter().fold(refreshed, Result::and)
    }

    /// Sends the calls of one node.
    async fn ask(
        &self,
        address: String,
        group: Vec<Pending>,
        end: Instant,
    ) -> Vec<(String, Pending, Answered)> {
        let node = match self.topology.node(&address) {
            Ok(node) if !address.is_empty() => node,
            _ => return all(&address, group, &Remedy::Unreachable, "no node is known for its slot"),
        };
        if !node.is_ready() {
            return all(&address, group, &Remedy::Load, "its scripts are to be loaded first");
        }
        let Some(confirmed_by) = self.confirmed_by(&address) else {
            return all(&address, group, &Remedy::Unknown, "it is not known as a master");
        };
        let mut sent = pipeline();
        for pending in &group {
            if pending.asking.is_some() {
                sent.cmd("ASKING");
            }
            sent.add_command(pending.call.command.clone());
        }
        let answers = match confirmed_by {
            By::Node => node.ask_until(&sent, end).await,
            By::NodeAlone => {
                sent.cmd("INFO").arg("replication");
                node.ask_until(&sent, end).await
            }
            By::Replicas(count) => {
                sent.cmd("WAIT").arg(count).arg(self.options.replication_timeout.as_millis() as u64);
                node.ask_alone(&sent, end).await
            }
        };
        let mut answers = match answers {
            Ok(answers) => answers,
            Err(NoAnswer::Unreachable(problem)) => {
                return all(&address, group, &Remedy::Unreachable, &problem);
            }
            Err(NoAnswer::Busy(problem)) => {
                let busy = Remedy::Final(StoreError::Overloaded(problem.clone()));
                return all(&address, group, &busy, &problem);
            }
            Err(NoAnswer::Lost(problem)) => return all(&address, group, &Remedy::Lost, &problem),
        };
        let (confirmed, replicas) = match confirmed_by {
            By::Node => (0, 0),
            By::NodeAlone => match unexpected_replicas(answers.pop()) {
                0 if self.is_alone_still(&address, &group, end).await => (0, 0),
                count => (0, count.max(1)),
            },
            By::Replicas(count) => (confirmations(answers.pop().as_ref()), count),
        };
        let mut answers = answers.into_iter();
        let answered = |pending: Pending| {
            if pending.asking.is_some() {
                answers.next();
            }
            let answer = match answers.next() {
                Some(Ok(_)) if confirmed < replicas => {
                    Err(unconfirmed(pending.call.what, confirmed, replicas))
                }
                Some(Ok(value)) => Ok(value),
                Some(Err(error)) => Err((remedy(pending.call.what, &error), format!("{address}: {error}"))),
                None => Err((Remedy::Lost, "an answer is missing".to_owned())),
            };
            (address.clone(), pending, answer)
        };
        group.into_iter().map(answered).collect()
    }

    /// What has to confirm a change on a node; `None`: that is not known.
    fn confirmed_by(&self, address: &str) -> Option<By> {
        if self.options.durability != Durability::Replicated {
            return Some(By::Node);
        }
        Some(match self.topology.replicas(address)? {
            0 => By::NodeAlone,
            count => By::Replicas(count),
        })
    }

    /// Whether a master that was known to have no replica when it was asked is still the one, and still without. A node that was
    /// paused does not know that a replica has returned and taken its place, so the others are asked, after its answer.
    async fn is_alone_still(&self, address: &str, group: &[Pending], end: Instant) -> bool {
        let looked_up = timeout_at(end, self.topology.refresh_now()).await;
        let is_owner = |pending: &Pending| {
            pending.asking.is_some() || self.topology.owner(pending.call.shard).as_deref() == Some(address)
        };
        matches!(looked_up, Ok(Ok(())))
            && self.topology.replicas(address) == Some(0)
            && group.iter().all(is_owner)
    }

    /// Makes a node ready that was restarted or has taken the place of another: open claims get a full lease there, and the
    /// scripts are loaded if they are missing.
    pub async fn load_scripts(&self, address: &str, cause: Boot) -> Result<(), StoreError> {
        let node = self.topology.node(address)?;
        let asked_at = Instant::now();
        let mut loaded_at = node.loading.lock().await;
        if loaded_at.is_some_and(|at| at >= asked_at) {
            return Ok(());
        }
        let (began, takeovers) = (Instant::now(), node.takeovers());
        let mut asked = pipeline();
        asked.cmd("SCRIPT").arg("EXISTS").arg(Script::ALL.map(Script::sha).as_slice());
        let found: Vec<u64> = match ask_all(&node, &asked).await?.pop() {
            Some(Ok(value)) => redis::from_redis_value(value).unwrap_or_default(),
            Some(Err(error)) => return Err(StoreError::Unavailable(format!("{address}: {error}"))),
            None => Vec::new(),
        };
        let is_complete = found.len() == Script::ALL.len() && found.iter().all(|there| *there == 1);
        // A server that is restarted loses its scripts, and a replica never had them.
        self.boot(&node, if is_complete { cause } else { Boot::Restarted }).await?;
        if !is_complete {
            let mut loading = pipeline();
            for script in Script::ALL {
                loading.cmd("SCRIPT").arg("LOAD").arg(script.text());
            }
            for loaded in ask_all(&node, &loading).await? {
                loaded
                    .map_err(|error| StoreError::Unavailable(format!("{address}: SCRIPT LOAD: {error}")))?;
            }
        }
        node.is_now_ready(takeovers);
        *loaded_at = Some(began);
        Ok(())
    }

    /// Gives every open claim on a node a full lease from now on, unless that was done since the node became a master: each
    /// time it gets a new replication id.
    pub async fn boot(&self, node: &Node, cause: Boot) -> Result<(), StoreError> {
        let unavailable = |why: &str| StoreError::Unavailable(format!("{}: {why}", node.address));
        let mut asked = pipeline();
        asked.cmd("INFO").arg("replication");
        let info = match ask_all(node, &asked).await?.pop() {
            Some(Ok(value)) => redis::from_redis_value::<String>(value).unwrap_or_default(),
            Some(Err(error)) => return Err(unavailable(&error.to_string())),
            None => String::new(),
        };
        let term = field(&info, "master_replid").ok_or_else(|| unavailable("INFO has no master_replid"))?;
        let cause = match cause {
            Boot::Opened => "opened",
            Boot::TookOver => "took over",
            Boot::Restarted => "restarted",
        };
        let mut asked = pipeline();
        for shard in 0..SHARDS {
            asked.cmd("EVAL").arg(BOOT).arg(1).arg(self.keys.meta(shard));
            asked.arg(self.clock()).arg(term).arg(cause);
        }
        for answer in ask_all(node, &asked).await? {
            match answer {
                Ok(_) => {}
                // Another node has that shard.
                Err(error) if ["MOVED", "ASK", "CLUSTERDOWN"].contains(&error.code().unwrap_or_default()) => {
                }
                Err(error) => return Err(unavailable(&error.to_string())),
            }
        }
        Ok(())
    }
}

/// Whether the map of the nodes is out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stale {
    No,
    Perhaps,
    Surely,
}

/// What confirms a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// The answer itself.
    Node,
    /// The same, since there is no replica. The node, and then the others, say whether that is still true.
    NodeAlone,
    /// This number of replicas.
    Replicas(usize),
}

type Answered = Result<Value, (Remedy, String)>;

fn all(
    address: &str,
    group: Vec<Pending>,
    remedy: &Remedy,
    problem: &str,
) -> Vec<(String, Pending, Answered)> {
    let failed = |pending| (address.to_owned(), pending, Err((remedy.clone(), problem.to_owned())));
    group.into_iter().map(failed).collect()
}

/// The answer of WAIT; 0 if it failed.
fn confirmations(answer: Option<&RedisResult<Value>>) -> usize {
    match answer {
        Some(Ok(Value::Int(count))) => usize::try_from(*count).unwrap_or_default(),
        _ => 0,
    }
}

/// Replicas of a node that was taken for one without them. A node that does not say counts as one with a replica.
fn unexpected_replicas(info: Option<RedisResult<Value>>) -> usize {
    let info = info.and_then(Result::ok).and_then(|info| redis::from_redis_value::<String>(info).ok());
    info.and_then(|info| following(&info)).unwrap_or(1)
}

fn unconfirmed(what: &str, confirmed: usize, replicas: usize) -> (Remedy, String) {
    let problem = format!("{what}: {confirmed} of {replicas} replicas have confirmed it in time");
    (Remedy::Final(StoreError::OutcomeUnknown(problem.clone())), problem)
}

/// The answers of one node, which has to be reached.
pub(crate) async fn ask_all(
    node: &Node,
    asked: &redis::Pipeline,
) -> Result<Vec<RedisResult<Value>>, StoreError> {
    node.ask(asked).await.map_err(|problem| match problem {
        NoAnswer::Unreachable(problem) | NoAnswer::Busy(problem) | NoAnswer::Lost(problem) => {
            StoreError::Unavailable(format!("Redis cannot be reached: {problem}"))
        }
    })
}
