//! Whether the servers keep what the store promises: read when it is opened, watched while it is open, and reported by
//! `hapax doctor`.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hapax_core::policy::tier::{Finding, Severity};
use hapax_core::{Examination, StoreError};

use crate::OpenError;
use crate::connect::{Durability, Options};
use crate::node::{Node, pipeline};
use crate::run::{Runner, ask_all};
use crate::topology::field;

/// Time between two looks. A change of a setting is noticed after this time, not before.
const EVERY: Duration = Duration::from_secs(1);

/// How often a store that is opened looks for a replica that is connected and not known yet, and the pause between.
const CHECKS_MAX: usize = 20;
const CHECKS_PAUSE: Duration = Duration::from_millis(250);

/// The oldest version that the suites run on.
const VERSION_MIN: (u64, u64) = (7, 0);

const fn refusal(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Refusal)
}

const fn warning(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Warning)
}

/// Every code that an examination of Redis can find, with how grave it is.
pub const FINDING_CODES: &[(&str, Severity)] = &[
    refusal("redis-too-old"),
    refusal("redis-may-evict"),
    refusal("redis-durability"),
    refusal("redis-no-replica"),
    warning("redis-keys-evicted"),
    warning("redis-not-durable"),
    warning("redis-replica-behind"),
];

/// What one node says about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    pub address: String,
    pub version: String,
    pub eviction: String,
    pub evicted_keys: u64,
    pub memory_bytes: u64,
    pub aof: bool,
    /// `None`: this user may not read it.
    pub appendfsync: Option<String>,
    /// `yes`: changes are not brought to the disk while the file is rewritten.
    pub no_fsync_on_rewrite: Option<String>,
    pub replicas: u64,
    pub min_replicas_to_write: Option<u64>,
}

impl NodeFacts {
    /// Asks a node.
    pub async fn of(node: &Node) -> Result<Self, StoreError> {
        let mut asked = pipeline();
        asked.cmd("INFO");
        asked.cmd("CONFIG").arg("GET").arg("appendfsync");
        asked.cmd("CONFIG").arg("GET").arg("no-appendfsync-on-rewrite");
        asked.cmd("CONFIG").arg("GET").arg("min-replicas-to-write");
        let mut answers = ask_all(node, &asked).await?;
        let mut setting = || -> Option<String> {
            let value: HashMap<String, String> = redis::from_redis_value(answers.pop()?.ok()?).ok()?;
            value.into_values().next()
        };
        let (min_replicas, no_fsync_on_rewrite, appendfsync) = (setting(), setting(), setting());
        let info = match answers.pop() {
            Some(Ok(value)) => redis::from_redis_value::<String>(value).unwrap_or_default(),
            Some(Err(error)) => {
                return Err(StoreError::Unavailable(format!("{}: INFO: {error}", node.address)));
            }
            None => String::new(),
        };
        let number = |name: &str| field(&info, name).and_then(|text| text.parse().ok()).unwrap_or(0);
        let text = |name: &str| field(&info, name).unwrap_or_default().to_owned();
        let version =
            [text("valkey_version"), text("redis_version")].into_iter().find(|text| !text.is_empty());
        Ok(Self {
            address: node.address.clone(),
            version: version.unwrap_or_default(),
            eviction: text("maxmemory_policy"),
            evicted_keys: number("evicted_keys"),
            memory_bytes: number("used_memory"),
            aof: number("aof_enabled") == 1,
            appendfsync,
            no_fsync_on_rewrite,
            replicas: number("connected_slaves"),
            min_replicas_to_write: min_replicas.and_then(|text| text.parse().ok()),
        })
    }

    fn is_too_old(&self) -> bool {
        let mut parts = self.version.split('.').map(|part| part.parse::<u64>().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < VERSION_MIN
    }

    /// Policies that evict only keys with a time to live do not concern us: no key of the store has one.
    fn evicts(&self) -> bool {
        self.eviction.starts_with("allkeys")
    }

    /// Why the node cannot keep what the options promise.
    pub fn problem(&self, options: &Options, replicas: usize) -> Option<OpenError> {
        let node = self.address.clone();
        if self.is_too_old() {
            return Some(OpenError::TooOld { node, version: self.version.clone() });
        }
        if self.evicts() {
            return Some(OpenError::MayEvict { node, policy: self.eviction.clone() });
        }
        match options.durability {
            Durability::Local => self.not_on_disk().map(|found| OpenError::Durability { node, found }),
            Durability::Replicated if options.replicas.is_none() && replicas == 0 => {
                Some(OpenError::NoReplica { node })
            }
            _ => None,
        }
    }

    /// The setting because of which an answer may come before its change is on the disk.
    fn not_on_disk(&self) -> Option<String> {
        if !self.aof {
            return Some("appendonly no".to_owned());
        }
        let needed = [
            ("appendfsync", &self.appendfsync, "always"),
            ("no-appendfsync-on-rewrite", &self.no_fsync_on_rewrite, "no"),
        ];
        needed.into_iter().find_map(|(name, found, needed)| match found.as_deref() {
            Some(found) if found == needed => None,
            Some(found) => Some(format!("{name} {found}")),
            None => Some(format!("a setting {name} that this user may not read")),
        })
    }

    fn findings(&self, options: &Options) -> Vec<Finding> {
        let node = &self.address;
        let mut found = Vec::new();
        // An examination also asks for what a Cluster would allow: the replicas that are connected count.
        if let Some(problem) = self.problem(options, self.replicas as usize) {
            found.push(finding(problem.code(), problem.to_string(), problem.remedy()));
        }
        if self.evicted_keys > 0 {
            let message = format!("{node} has evicted {} keys since it was started", self.evicted_keys);
            let remedy = "if they were keys of the store, effects may repeat: set maxmemory-policy noeviction and give it memory";
            found.push(finding("redis-keys-evicted", message, remedy));
        }
        if options.durability == Durability::Process {
            let lost = if self.aof { "about a second" } else { "everything" };
            let message =
                format!("the level `process` was chosen: a crash of the machine of {node} loses {lost}");
            let remedy = "use hapax_durability=local with appendfsync always, or replicated, for keys that must have one effect";
            found.push(finding("redis-not-durable", message, remedy));
        }
        if options.durability == Durability::Replicated && !self.aof {
            let message = format!(
                "{node} has appendonly no: restarted before a replica takes its place, it is empty, and its replicas with it"
            );
            found.push(finding("redis-not-durable", message, "set appendonly yes"));
        }
        if self.replicas > 0 && options.durability != Durability::Replicated {
            let message = format!(
                "{node} has replicas, and the level `{}` does not wait for them",
                options.durability.as_str()
            );
            let remedy = "use hapax_durability=replicated; otherwise a failover forgets claims and outcomes, and fences may repeat";
            found.push(finding("redis-replica-behind", message, remedy));
        } else if self.replicas > 0 && self.min_replicas_to_write == Some(0) {
            let message =
                format!("{node} has min-replicas-to-write 0: alone, it accepts what no replica has");
            let remedy = "set min-replicas-to-write 1: claims that cannot be confirmed are then refused and not left unknown";
            found.push(finding("redis-replica-behind", message, remedy));
        }
        found
    }
}

fn finding(code: &'static str, message: String, remedy: &str) -> Finding {
    let known = FINDING_CODES.iter().find(|(known, _)| *known == code);
    let (code, severity) = known.copied().unwrap_or((code, Severity::Refusal));
    Finding { code: code.into(), severity, message, remedy: remedy.to_owned() }
}

/// Watches the servers of a store.
pub(crate) struct Guard {
    runner: Arc<Runner>,
    evicts: AtomicBool,
}

impl Guard {
    pub fn new(runner: Arc<Runner>) -> Self {
        Self { runner, evicts: AtomicBool::new(false) }
    }

    pub fn may_evict(&self) -> bool {
        self.evicts.load(Ordering::Relaxed)
    }

    async fn facts(&self) -> Result<Vec<NodeFacts>, StoreError> {
        let mut all = Vec::new();
        for master in self.runner.topology.masters() {
            all.push(NodeFacts::of(&*self.runner.topology.node(&master)?).await?);
        }
        Ok(all)
    }

    /// Looks once: refuses all calls while a server cannot keep what was promised. A Cluster whose replica has failed is not
    /// such a case: what it confirms alone is lost only with a second node.
    pub async fn look(&self) -> Result<Option<OpenError>, StoreError> {
        let options = &self.runner.options;
        let problem = self.facts().await?.iter().find_map(|facts| facts.problem(options, 1));
        self.evicts.store(matches!(problem, Some(OpenError::MayEvict { .. })), Ordering::Relaxed);
        let was_refused = self.runner.refusal().is_some();
        let why = problem
            .as_ref()
            .map(|problem| StoreError::Unavailable(format!("{problem}; {}", problem.remedy())));
        match &why {
            Some(why) if !was_refused => tracing::error!("the ledger refuses all calls: {why}"),
            None if was_refused => tracing::info!("the ledger accepts calls again"),
            _ => {}
        }
        self.runner.refuse(why);
        Ok(problem)
    }

    /// What the store is opened with.
    pub async fn check(&self) -> Result<(), OpenError> {
        for last in (0..CHECKS_MAX).rev() {
            match self.problem().await? {
                None => return Ok(()),
                // The nodes may not all have heard of it yet.
                Some((OpenError::NoReplica { .. }, 1..)) if last > 0 => {
                    tokio::time::sleep(CHECKS_PAUSE).await;
                    self.runner.topology.refresh_now().await?;
                }
                Some((problem, _)) => return Err(problem),
            }
        }
        Ok(())
    }

    /// Why the store cannot be opened, with the number of replicas that are connected there.
    async fn problem(&self) -> Result<Option<(OpenError, u64)>, StoreError> {
        for facts in self.facts().await? {
            let replicas = self.runner.topology.replicas(&facts.address).unwrap_or_default();
            if let Some(problem) = facts.problem(&self.runner.options, replicas) {
                return Ok(Some((problem, facts.replicas)));
            }
        }
        Ok(None)
    }

    /// The report of `hapax doctor`.
    pub async fn examine(&self) -> Result<Examination, StoreError> {
        self.runner.topology.refresh().await?;
        let all = self.facts().await?;
        let mut facts: BTreeMap<String, serde_json::Value> = BTreeMap::new();
        let mut findings: Vec<Finding> = Vec::new();
        facts.insert("durability".to_owned(), self.runner.options.durability.as_str().into());
        facts.insert("masters".to_owned(), all.len().into());
        facts.insert("replicas".to_owned(), all.iter().map(|node| node.replicas).sum::<u64>().into());
        facts.insert("memory_bytes".to_owned(), all.iter().map(|node| node.memory_bytes).sum::<u64>().into());
        for node in &all {
            facts.entry("server_version".to_owned()).or_insert_with(|| node.version.clone().into());
            facts.entry("eviction".to_owned()).or_insert_with(|| node.eviction.clone().into());
            findings.extend(node.findings(&self.runner.options));
        }
        findings.sort_by_key(|finding| finding.severity);
        Ok(Examination { facts, findings })
    }
}

/// Watches until the store is dropped or closed.
pub(crate) async fn run(guard: Weak<Guard>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(guard) = guard.upgrade() else { return };
        // The number of replicas that must confirm is a part of it.
        let refreshed = guard.runner.topology.refresh().await;
        if let Err(error) = refreshed.and(guard.look().await.map(|_| ())) {
            tracing::debug!(%error, "Redis could not be looked at; it is tried again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> NodeFacts {
        NodeFacts {
            address: "a:1".to_owned(),
            version: "7.0.15".to_owned(),
            eviction: "noeviction".to_owned(),
            aof: true,
            appendfsync: Some("always".to_owned()),
            no_fsync_on_rewrite: Some("no".to_owned()),
            ..NodeFacts::default()
        }
    }

    fn options(durability: Durability) -> Options {
        Options { durability, ..Options::default() }
    }

    /// Each code has one cause, and a healthy server has none.
    #[test]
    fn each_finding_has_its_cause() {
        let codes = |facts: &NodeFacts, durability| -> Vec<String> {
            facts
                .findings(&options(durability))
                .into_iter()
                .map(|finding| finding.code.into_owned())
                .collect()
        };
        let replicas = NodeFacts { replicas: 2, min_replicas_to_write: Some(1), ..healthy() };
        assert!(codes(&healthy(), Durability::Local).is_empty());
        assert!(codes(&replicas, Durability::Replicated).is_empty());
        let always = |policy: &str| NodeFacts { eviction: policy.to_owned(), ..healthy() };
        assert!(codes(&always("volatile-lru"), Durability::Local).is_empty(), "no key has a time to live");
        for (facts, durability, code) in [
            (NodeFacts { version: "6.2.14".to_owned(), ..healthy() }, Durability::Local, "redis-too-old"),
            (always("allkeys-lru"), Durability::Local, "redis-may-evict"),
            (NodeFacts { aof: false, ..healthy() }, Durability::Local, "redis-durability"),
            (
                NodeFacts { appendfsync: Some("everysec".to_owned()), ..healthy() },
                Durability::Local,
                "redis-durability",
            ),
            (NodeFacts { appendfsync: None, ..healthy() }, Durability::Local, "redis-durability"),
            (
                NodeFacts { no_fsync_on_rewrite: Some("yes".to_owned()), ..healthy() },
                Durability::Local,
                "redis-durability",
            ),
            (NodeFacts { no_fsync_on_rewrite: None, ..healthy() }, Durability::Local, "redis-durability"),
            (healthy(), Durability::Replicated, "redis-no-replica"),
            (NodeFacts { evicted_keys: 3, ..healthy() }, Durability::Local, "redis-keys-evicted"),
            (healthy(), Durability::Process, "redis-not-durable"),
            (NodeFacts { aof: false, ..healthy() }, Durability::Process, "redis-not-durable"),
            (NodeFacts { aof: false, ..replicas.clone() }, Durability::Replicated, "redis-not-durable"),
            (replicas.clone(), Durability::Local, "redis-replica-behind"),
            (
                NodeFacts { min_replicas_to_write: Some(0), ..replicas.clone() },
                Durability::Replicated,
                "redis-replica-behind",
            ),
        ] {
            assert_eq!(codes(&facts, durability), [code], "{facts:?}");
            assert!(FINDING_CODES.iter().any(|(known, _)| *known == code), "{code}");
        }
    }
}
