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
use crate::layout;
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
    refusal("redis-layout"),
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
        self.problems(options, replicas).into_iter().next()
    }

    fn problems(&self, options: &Options, replicas: usize) -> Vec<OpenError> {
        let (node, mut found) = (|| self.address.clone(), Vec::new());
        if self.is_too_old() {
            found.push(OpenError::TooOld { node: node(), version: self.version.clone() });
        }
        if self.evicts() {
            found.push(OpenError::MayEvict { node: node(), policy: self.eviction.clone() });
        }
        match options.durability {
            Durability::Local => {
                let problem = |found| OpenError::Durability { node: node(), found };
                found.extend(self.not_on_disk().map(problem));
            }
            Durability::Replicated if options.replicas.is_none() && replicas == 0 => {
                found.push(OpenError::NoReplica { node: node() });
            }
            _ => {}
        }
        found
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
        for problem in self.problems(options, self.replicas as usize) {
            found.push(finding(problem.code(), problem.to_string(), problem.remedy()));
        }
        if self.evicted_keys > 0 {
            let message = format!("{node} has evicted {} keys since it was started", self.evicted_keys);
            let remedy = "if they were keys of the store, effects may repeat: set maxmemory-policy noeviction and give it memory";
            found.push(finding("redis-keys-evicted", message, remedy));
        }
        if options.durability == Durability::Process {
            let message = if self.aof {
                format!(
                    "the level `process` was chosen: a crash of the machine of {node} loses about a second"
                )
            } else {
                format!(
                    "the level `process` was chosen, and {node} has appendonly no: its end loses what no snapshot has"
                )
            };
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

/// Nodes that a finding names beside the first one.
const NAMED_MAX: usize = 3;

/// One finding for all nodes of which the same is true.
fn merged(findings: Vec<(&NodeFacts, Finding)>) -> Vec<Finding> {
    let mut all: Vec<(String, Finding, Vec<&str>)> = Vec::new();
    for (node, finding) in findings {
        let text = finding.message.replace(&node.address, "");
        match all.iter_mut().find(|(known, first, _)| *known == text && first.code == finding.code) {
            Some((_, _, others)) => others.push(&node.address),
            None => all.push((text, finding, Vec::new())),
        }
    }
    let told = |(_, mut finding, others): (String, Finding, Vec<&str>)| {
        let named = others.iter().take(NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
        match others.len().saturating_sub(NAMED_MAX) {
            0 if others.is_empty() => {}
            0 => finding.message.extend(["; the same of ", &named]),
            more => finding.message.extend(["; the same of ", &named, &format!(" and {more} more")]),
        }
        finding
    };
    all.into_iter().map(told).collect()
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
        let mut findings = Vec::new();
        facts.insert("durability".to_owned(), self.runner.options.durability.as_str().into());
        facts.insert("masters".to_owned(), all.len().into());
        facts.insert("replicas".to_owned(), all.iter().map(|node| node.replicas).sum::<u64>().into());
        facts.insert("memory_bytes".to_owned(), all.iter().map(|node| node.memory_bytes).sum::<u64>().into());
        for node in &all {
            facts.entry("server_version".to_owned()).or_insert_with(|| node.version.clone().into());
            facts.entry("eviction".to_owned()).or_insert_with(|| node.eviction.clone().into());
            findings.extend(node.findings(&self.runner.options).into_iter().map(|found| (node, found)));
        }
        let mut findings = merged(findings);
        if let Some(problem) = layout::problem(&self.runner).await? {
            findings.push(finding(problem.code(), problem.to_string(), problem.remedy()));
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
        // All that is to be mended is told at once.
        let both = NodeFacts { aof: false, ..always("allkeys-lru") };
        assert_eq!(codes(&both, Durability::Local), ["redis-may-evict", "redis-durability"]);
        assert_eq!(
            both.problem(&options(Durability::Local), 0).map(|problem| problem.code()),
            Some("redis-may-evict")
        );
    }

    #[test]
    fn what_is_true_of_several_nodes_is_told_once() {
        let nodes: Vec<NodeFacts> = ["a:1", "b:2", "c:3", "d:4", "e:5", "f:6"]
            .map(|address| NodeFacts { address: address.to_owned(), aof: address == "b:2", ..healthy() })
            .into();
        let of = |node: &NodeFacts| node.findings(&options(Durability::Process));
        let told =
            merged(nodes.iter().flat_map(|node| of(node).into_iter().map(move |one| (node, one))).collect());
        let told: Vec<&str> = told.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(
            told[0].contains("a:1 has appendonly no")
                && told[0].ends_with("the same of c:3, d:4, e:5 and 1 more"),
            "{told:?}"
        );
        assert!(told[1].contains("b:2") && told[1].ends_with("about a second"), "{told:?}");
    }

    /// One thing that is not right.
    type Change = fn(&mut NodeFacts);

    /// What is said about a server: what was found, and what to do.
    #[rustfmt::skip]
    const SAID: &[(&str, Durability, Change, &str, &str)] = &[
        (
            "redis-too-old", Durability::Local, |f| "6.2.14".clone_into(&mut f.version),
            "a:1 has version 6.2.14", "use Redis 7.0 or later, or Valkey",
        ),
        (
            "redis-may-evict", Durability::Local, |f| "allkeys-lfu".clone_into(&mut f.eviction),
            "a:1 has maxmemory-policy allkeys-lfu: it may evict entries, and a forgotten outcome is a second effect",
            "set maxmemory-policy noeviction",
        ),
        (
            "redis-durability", Durability::Local, |f| f.appendfsync = Some("everysec".to_owned()),
            "a:1 has appendfsync everysec, and the level `local` needs each change on the disk before it is answered",
            "set appendonly yes, appendfsync always and no-appendfsync-on-rewrite no; or choose hapax_durability=replicated, or process if a loss is acceptable",
        ),
        (
            "redis-no-replica", Durability::Replicated, |_| {},
            "a:1 has no replica, and the level `replicated` needs one", "add a replica, or choose hapax_durability=local",
        ),
        (
            "redis-keys-evicted", Durability::Local, |f| f.evicted_keys = 3,
            "a:1 has evicted 3 keys since it was started",
            "if they were keys of the store, effects may repeat: set maxmemory-policy noeviction and give it memory",
        ),
        (
            "redis-not-durable", Durability::Process, |_| {},
            "the level `process` was chosen: a crash of the machine of a:1 loses about a second",
            "use hapax_durability=local with appendfsync always, or replicated, for keys that must have one effect",
        ),
        (
            "redis-not-durable", Durability::Process, |f| f.aof = false,
            "the level `process` was chosen, and a:1 has appendonly no: its end loses what no snapshot has",
            "use hapax_durability=local with appendfsync always, or replicated, for keys that must have one effect",
        ),
        (
            "redis-not-durable", Durability::Replicated, |f| (f.replicas, f.aof) = (1, false),
            "a:1 has appendonly no: restarted before a replica takes its place, it is empty, and its replicas with it",
            "set appendonly yes",
        ),
        (
            "redis-replica-behind", Durability::Local, |f| f.replicas = 1,
            "a:1 has replicas, and the level `local` does not wait for them",
            "use hapax_durability=replicated; otherwise a failover forgets claims and outcomes, and fences may repeat",
        ),
        (
            "redis-replica-behind", Durability::Replicated, |f| (f.replicas, f.min_replicas_to_write) = (1, Some(0)),
            "a:1 has min-replicas-to-write 0: alone, it accepts what no replica has",
            "set min-replicas-to-write 1: claims that cannot be confirmed are then refused and not left unknown",
        ),
    ];

    #[test]
    fn each_finding_has_its_evidence_a_change_and_its_severity() {
        for (code, durability, change, message, remedy) in SAID {
            let mut facts = healthy();
            change(&mut facts);
            let found = facts.findings(&options(*durability));
            assert_eq!(found.len(), 1, "{found:?}");
            let said = (&*found[0].code, found[0].message.as_str(), found[0].remedy.as_str());
            assert_eq!(said, (*code, *message, *remedy));
            let (_, severity) = FINDING_CODES.iter().find(|(known, _)| known == code).unwrap();
            assert_eq!(found[0].severity, *severity, "{code}");
        }
        // The layout is that of the data, not of a server: `tests/layouts.rs` has it.
        for (code, _) in FINDING_CODES.iter().filter(|(code, _)| *code != "redis-layout") {
            assert!(SAID.iter().any(|said| said.0 == *code), "nothing is expected of {code}");
        }
    }

    #[test]
    fn a_version_is_compared_by_its_numbers() {
        for (version, is_too_old) in
            [("7.0.0", false), ("6.9.9", true), ("10.0.1", false), ("8.1", false), ("", true), ("7", false)]
        {
            let facts = NodeFacts { version: version.to_owned(), ..healthy() };
            assert_eq!(facts.is_too_old(), is_too_old, "{version}");
        }
    }
}
