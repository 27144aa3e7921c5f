//! `hapax doctor`: the guarantees of store and queues, and the problems that prevent them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use comfy_table::{Attribute, Cell, Color};
use hapax::core::policy::tier::{Finding, StoreFacts, check_store};
use hapax::core::store::SharedStore;
use hapax::core::{Clock as _, Examination, Store as AllSeams, StoreError, SystemClock, Tier};
use hapax::embedded::{self, Environment};
use hapax::redis::RedisStore;
use hapax::{StoreUrl, without_secrets};
use hapax_client::wire::ServerStatus;
use hapax_observe::advice::{self, Advice, Known};
use serde::Serialize;
use serde_json::Value;

use crate::output::{Output, cells, note};
use crate::remote::Remote;
use crate::store::{Store, StoreOptions};
use crate::text::{escape, parse_ms, show_bytes, show_time, word};
use crate::tier::{COSTS_PAGE, TierCost, UNKNOWN_HERE, cost};
use crate::usage;

/// Checks the guarantees of queues against the features of their store, and suggests remedies.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax doctor
  hapax doctor --store embedded:./hapax-data      while no server runs
  hapax doctor --store postgres://localhost/shop  at any time
  hapax doctor --store redis+cluster://10.0.0.1?hapax_durability=replicated
  hapax doctor --producer-retry 1h
  hapax doctor --outbox sqlite:./shop.db
  hapax doctor --json | jq -r '.queues[] | select(.findings != []) | .name'

Each finding has a code and a page, docs/errors/CODE.md. Exit code 0 without refusals, 1 with.
In a pipe a line has: store or queue NAME, tier, then `sound`; or refusal or warning, code, what, what to do, page; or
for the store `fact`, name, value. Where not all of a queue could be seen, `nothing found` takes the place of `sound`, or
after findings `not seen`, with what and why. A tier that costs more or less than at-least-once has a line `cost`.")]
pub struct DoctorArgs {
    /// A store instead of a server: embedded:PATH, postgres://HOST/DATABASE or redis://HOST. It is opened briefly, as a
    /// server would open it.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// An outbox whose relays are looked after, too: postgres://HOST/DATABASE or sqlite:PATH. That of a store in
    /// PostgreSQL is looked at in any case.
    #[arg(long, value_name = "URL")]
    outbox: Option<String>,
    /// How long producers keep repeating a send without a response.
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    producer_retry: Option<u64>,
    #[command(flatten)]
    remote: Remote,
}

/// A finding and its page.
#[derive(Debug, Serialize)]
struct FindingItem {
    #[serde(flatten)]
    finding: Finding,
    page: String,
}

impl From<Finding> for FindingItem {
    fn from(finding: Finding) -> Self {
        Self { page: finding.page(), finding }
    }
}

#[derive(Debug, Serialize)]
struct QueueSection {
    name: String,
    tier: Tier,
    /// What the tier costs on this store, as a multiple of `at-least-once`.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<TierCost>,
    findings: Vec<FindingItem>,
    /// What could not be looked at, so that findings may be missing.
    not_seen: Vec<String>,
}

/// The known facts about the store; `None`: not known from here.
#[derive(Debug, Default, Serialize)]
struct StoreSection {
    place: String,
    kind: Option<String>,
    version: &'static str,
    server_version: Option<String>,
    messages: Option<u64>,
    /// The server does not show this key the figures and warnings of the whole store.
    status_withheld: bool,
    /// What the store says about itself and what it stands on.
    #[serde(flatten)]
    facts: BTreeMap<String, Value>,
    /// Why the store could not be examined.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_examined: Option<String>,
    findings: Vec<FindingItem>,
}

#[derive(Debug, Default, Serialize)]
struct DoctorReport {
    store: StoreSection,
    queues: Vec<QueueSection>,
    /// Why the queues could not be read.
    queues_unchecked: Option<String>,
    not_known: Vec<&'static str>,
    refusals: usize,
    warnings: usize,
}

/// Runs `hapax doctor`.
pub async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let local = args.store.as_deref().or(args.remote.is_store().then_some(args.remote.endpoint.as_str()));
    let mut report = match local {
        Some(url) => match url.parse() {
            Ok(StoreUrl::Embedded(path)) => examine_folder(url, &path, args.producer_retry).await?,
            Ok(StoreUrl::Postgres(_)) => examine_database(url, args.producer_retry).await?,
            Ok(StoreUrl::Redis(_)) => examine_redis(url, args.producer_retry).await?,
            _ => {
                return Err(usage(format!(
                    "--store {}: only embedded:PATH, postgres://HOST/DATABASE and redis://HOST can be looked at without a server",
                    without_secrets(url)
                )));
            }
        },
        None => examine_server(&args.remote, args.producer_retry).await?,
    };
    if let Some(url) = &args.outbox {
        report.store.add(relays_that_lag(url).await?);
    }
    let all = || report.queues.iter().flat_map(|queue| &queue.findings).chain(&report.store.findings);
    let refusals = all().filter(|item| item.finding.is_refusal()).count();
    (report.refusals, report.warnings) = (refusals, all().count() - refusals);
    if report.queues.iter().any(|queue| matches!(queue.tier, Tier::EffectivelyOnce | Tier::Transactional)) {
        report.not_known = UNKNOWN_HERE.to_vec();
    }
    let out = args.remote.output();
    if out.is_json() {
        out.value(&report)?;
    } else {
        print(&report, out)?;
    }
    match (&report.queues_unchecked, report.refusals) {
        (Some(why), _) => bail!("the queues were not checked: {why}"),
        (None, 0) => Ok(()),
        (None, 1) => bail!("1 refusal: what is wanted there cannot hold"),
        (None, many) => bail!("{many} refusals: what is wanted there cannot hold"),
    }
}

/// The routes of an outbox whose messages wait for too long.
async fn relays_that_lag(url: &str) -> anyhow::Result<Vec<Finding>> {
    let routes = hapax::relay::open_outbox(url).await?.status().await?;
    let now_ms = SystemClock::default().wall_ms();
    Ok(routes.iter().filter_map(|route| route.lag_finding(now_ms)).collect())
}

async fn examine_server(remote: &Remote, producer_retry_ms: Option<u64>) -> anyhow::Result<DoctorReport> {
    let client = remote.client().await?;
    let ServerStatus { version: theirs, status, withheld, .. } = client.server_status().await?;
    let place = client.endpoint().to_owned();
    let advised = client.advice(producer_retry_ms).await;
    let store: SharedStore = Arc::new(client);
    let ours = env!("CARGO_PKG_VERSION");
    let mut section = StoreSection {
        place,
        kind: Some(store.capabilities().name),
        version: ours,
        server_version: Some(theirs.clone()),
        messages: (!withheld).then_some(status.messages),
        status_withheld: withheld,
        ..StoreSection::default()
    };
    let versions = StoreFacts { versions: Some((ours.to_owned(), theirs)), ..StoreFacts::default() };
    section.add(check_store(&versions));
    // A key that may not see all of it, and a server that is too old to observe, leave it to this program.
    let advice = advised.ok().filter(|_| !withheld);
    match &advice {
        Some(advice) => section.add(advice.of_whole()),
        None => section.add(check_store(&StoreFacts { status, ..StoreFacts::default() })),
    }
    match store.examine().await {
        Ok(examination) => section.examined(examination),
        // A key without this right still gets the report about its queues.
        Err(error) => section.not_examined = Some(error.to_string()),
    }
    let mut report = DoctorReport { store: section, ..DoctorReport::default() };
    match queues(store.as_ref(), advice.as_ref(), producer_retry_ms).await {
        Ok(queues) => report.queues = queues,
        // What is known about the store is told all the same: it may have stopped.
        Err(error) => report.queues_unchecked = Some(format!("{error:#}")),
    }
    Ok(report)
}

/// What can be told about a store and its queues without a server that observes them. The counters of all queues are asked for
/// at once.
async fn advise(store: &dyn AllSeams, producer_retry_ms: Option<u64>) -> Result<Advice, StoreError> {
    let known = Known { producer_retry_ms, ..Known::default() };
    advice::of_store(store, &known, true).await
}

async fn examine_database(url: &str, producer_retry_ms: Option<u64>) -> anyhow::Result<DoctorReport> {
    let store = Store::open_existing(url, StoreOptions::default()).await?;
    let status = store.admin().status().await?;
    let mut section = StoreSection {
        place: store.location().to_owned(),
        kind: Some(store.admin().capabilities().name),
        version: env!("CARGO_PKG_VERSION"),
        messages: Some(status.messages),
        ..StoreSection::default()
    };
    let advice = advise(store.admin().as_ref(), producer_retry_ms).await?;
    section.add(advice.of_whole());
    section.examined(store.admin().examine().await?);
    let queues = queues(store.admin().as_ref(), Some(&advice), producer_retry_ms).await?;
    store.close().await;
    Ok(DoctorReport { store: section, queues, ..DoctorReport::default() })
}

/// The servers are examined without a store in them, so that those are reported in which none could be opened.
async fn examine_redis(url: &str, producer_retry_ms: Option<u64>) -> anyhow::Result<DoctorReport> {
    let place = without_secrets(url);
    let examined = RedisStore::examine_servers(url, hapax::redis::Options::default()).await;
    let examined = examined.with_context(|| place.clone())?;
    let version = env!("CARGO_PKG_VERSION");
    let mut section =
        StoreSection { place, kind: Some("redis".to_owned()), version, ..StoreSection::default() };
    section.examined(examined);
    let mut report = DoctorReport { store: section, ..DoctorReport::default() };
    match Store::open_existing(url, StoreOptions::default()).await {
        Ok(store) => {
            let status = store.admin().status().await?;
            report.store.messages = Some(status.messages);
            let advice = advise(store.admin().as_ref(), producer_retry_ms).await?;
            report.store.add(advice.of_whole());
            report.queues = queues(store.admin().as_ref(), Some(&advice), producer_retry_ms).await?;
            store.close().await;
        }
        // The examination has said why.
        Err(_) if report.store.findings.iter().any(|item| item.finding.is_refusal()) => {}
        Err(error) => report.queues_unchecked = Some(format!("{error:#}")),
    }
    Ok(report)
}

async fn examine_folder(
    url: &str,
    path: &Path,
    producer_retry_ms: Option<u64>,
) -> anyhow::Result<DoctorReport> {
    let options = StoreOptions::default();
    let environment = Environment::of(path, &options.embedded);
    let mut report = DoctorReport {
        store: StoreSection {
            place: path.display().to_string(),
            kind: Some("embedded".to_owned()),
            version: env!("CARGO_PKG_VERSION"),
            ..StoreSection::default()
        },
        ..DoctorReport::default()
    };
    match Store::open_existing(url, options).await {
        Ok(store) => {
            let status = store.admin().status().await?;
            report.store.messages = Some(status.messages);
            let advice = advise(store.admin().as_ref(), producer_retry_ms).await?;
            report.store.add(advice.of_whole());
            report.queues = queues(store.admin().as_ref(), Some(&advice), producer_retry_ms).await?;
            store.admin().close().await?;
        }
        Err(error) => match error.downcast_ref::<embedded::OpenError>() {
            Some(embedded::OpenError::InUse { holder, endpoint, .. }) => {
                let how = match endpoint {
                    Some(url) => format!("ask it: hapax doctor --endpoint {url}, or stop it"),
                    None => {
                        "stop it, or ask it if it has an HTTP address: hapax doctor --endpoint URL".to_owned()
                    }
                };
                report.queues_unchecked = Some(format!("the store is in use by {holder}; {how}"));
            }
            Some(embedded::OpenError::NetworkFileSystem { .. }) => {
                report.queues_unchecked = Some("the store is not opened on a network file system".to_owned());
            }
            _ => return Err(error),
        },
    }
    // Also for a store that could not be opened: a server that uses it need not be stopped.
    report.store.examined(environment.examine());
    Ok(report)
}

/// The findings about each queue. Where `advice` is not given, as far as they can be told from here.
async fn queues(
    store: &dyn AllSeams,
    advice: Option<&Advice>,
    producer_retry_ms: Option<u64>,
) -> anyhow::Result<Vec<QueueSection>> {
    let known = Known { producer_retry_ms, ..Known::default() };
    let mut sections = Vec::new();
    for info in store.queues().await? {
        let (findings, not_seen) = match advice {
            Some(advice) => advice.of_queue(&info.name),
            None => advice::of_queue(store, &known, &info).await,
        };
        let findings = findings.into_iter().map(FindingItem::from).collect();
        sections.push(QueueSection {
            name: info.name.to_string(),
            tier: info.config.tier,
            cost: cost(&store.capabilities().name, info.config.tier),
            findings,
            not_seen,
        });
    }
    Ok(sections)
}

impl QueueSection {
    /// What its tier costs, in words.
    fn cost(&self) -> Option<String> {
        self.cost.as_ref().map(ToString::to_string)
    }

    fn is_sound(&self) -> bool {
        self.findings.is_empty() && self.not_seen.is_empty()
    }

    /// What is said beside the findings: a queue is sound only if everything could be looked at.
    fn summary(&self) -> Option<Vec<String>> {
        let not_seen: Vec<String> = self.not_seen.iter().map(|what| escape(what)).collect();
        let word = match (self.findings.is_empty(), not_seen.is_empty()) {
            (true, true) => return Some(vec!["sound".to_owned()]),
            (false, true) => return None,
            (true, false) => "nothing found",
            (false, false) => "not seen",
        };
        Some(vec![word.to_owned(), not_seen.join("; ")])
    }
}

impl StoreSection {
    /// Adds findings, refusals first.
    fn add(&mut self, findings: Vec<Finding>) {
        self.findings.extend(findings.into_iter().map(FindingItem::from));
        self.findings.sort_by_key(|item| item.finding.severity);
    }

    fn examined(&mut self, examination: Examination) {
        self.facts = examination.facts;
        self.add(examination.findings);
    }

    /// The known facts, formatted for people.
    fn facts(&self) -> Vec<(String, String)> {
        let messages = match self.messages {
            None if self.status_withheld => Some("not allowed to see".to_owned()),
            messages => messages.map(|count| count.to_string()),
        };
        let place = [
            ("place", Some(escape(&self.place))),
            ("kind", self.kind.as_deref().map(escape)),
            ("version", Some(self.version.to_owned())),
            ("server's version", self.server_version.as_deref().map(escape)),
            ("messages", messages),
        ];
        let known = place.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        known.chain(self.facts.iter().map(|(name, value)| fact(name, value))).collect()
    }
}

/// One of the store's own facts, formatted for people; the suffix of its name determines the unit.
fn fact(name: &str, value: &Value) -> (String, String) {
    let words = |stem: &str| escape(&stem.replace('_', " "));
    match (name.strip_suffix("_bytes"), name.strip_suffix("_ms"), value.as_u64()) {
        (Some(stem), _, Some(bytes)) => (words(stem), show_bytes(bytes)),
        (_, Some("clock"), Some(ms)) => (words("clock"), show_time(ms)),
        _ => (words(name), escape(value.as_str().unwrap_or(&value.to_string()))),
    }
}

fn print(report: &DoctorReport, out: Output) -> anyhow::Result<()> {
    if out.is_terminal() {
        cells(table_rows(report))?;
    } else {
        out.rows(&[], lines(report))?;
    }
    if report.store.status_withheld {
        note("This key is not allowed to see the store's figures and warnings: it is for some queues only.");
    }
    if let Some(why) = &report.store.not_examined {
        note(&format!("What the store stands on is not known: {}", escape(why)));
    }
    if !report.not_known.is_empty() {
        note(&format!("Only its worker knows, and checks when it starts: {}.", report.not_known.join("; ")));
    }
    Ok(())
}

/// One line per fact and finding, for other programs.
fn lines(report: &DoctorReport) -> Vec<Vec<String>> {
    let store = || vec!["store".to_owned(), "-".to_owned()];
    let of_item = |item: &FindingItem| {
        let Finding { code, severity, message, remedy } = &item.finding;
        vec![word(severity), code.to_string(), escape(message), remedy.clone(), item.page.clone()]
    };
    let mut lines = Vec::new();
    for (name, value) in report.store.facts() {
        lines.push([store(), vec!["fact".to_owned(), name, value]].concat());
    }
    lines.extend(report.store.findings.iter().map(|item| [store(), of_item(item)].concat()));
    for queue in &report.queues {
        let start = || vec![format!("queue {}", queue.name), word(&queue.tier)];
        lines.extend(queue.findings.iter().map(|item| [start(), of_item(item)].concat()));
        lines.extend(queue.summary().map(|summary| [start(), summary].concat()));
        let cost = |words| [start(), vec!["cost".to_owned(), words, COSTS_PAGE.to_owned()]].concat();
        lines.extend(queue.cost().map(cost));
    }
    lines
}

/// In a terminal, more sound queues than this are counted and not listed.
const SOUND_LISTED_MAX: usize = 20;

fn table_rows(report: &DoctorReport) -> Vec<Vec<Cell>> {
    let bold = |text: &str| Cell::new(text).add_attribute(Attribute::Bold);
    let of_item = |item: &FindingItem| {
        let Finding { code, message, remedy, .. } = &item.finding;
        let (word, color) =
            if item.finding.is_refusal() { ("refusal", Color::Red) } else { ("warning", Color::Yellow) };
        let text = format!("{code}: {}\n-> {remedy}\n{}", escape(message), item.page);
        vec![Cell::new(word).fg(color), Cell::new(text)]
    };
    let mut rows = vec![vec![bold("store"), Cell::new("")]];
    let facts = report.store.facts();
    rows.extend(facts.iter().map(|(name, value)| vec![Cell::new(name), Cell::new(value)]));
    rows.extend(report.store.findings.iter().map(of_item));
    let sound = report.queues.iter().filter(|queue| queue.is_sound()).count();
    let lists_sound = sound <= SOUND_LISTED_MAX;
    for queue in report.queues.iter().filter(|queue| lists_sound || !queue.is_sound()) {
        rows.push(vec![Cell::new(""), Cell::new("")]);
        rows.push(vec![bold(&queue.name), Cell::new(word(&queue.tier))]);
        rows.extend(queue.findings.iter().map(of_item));
        if let Some(summary) = queue.summary() {
            let color = if queue.not_seen.is_empty() { Color::Green } else { Color::Yellow };
            rows.push(vec![Cell::new(&summary[0]).fg(color), Cell::new(summary[1..].join("; "))]);
        }
        let cost = |words| vec![Cell::new("cost"), Cell::new(format!("{words}\n{COSTS_PAGE}"))];
        rows.extend(queue.cost().map(cost));
    }
    if !lists_sound {
        rows.push(vec![Cell::new(""), Cell::new("")]);
        rows.push(vec![bold(&format!("{sound} queues")), Cell::new("sound").fg(Color::Green)]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use hapax::core::policy::tier::Severity;

    use super::*;

    #[test]
    fn many_sound_queues_do_not_hide_the_others() {
        let queue = |number: usize| QueueSection {
            name: format!("q-{number}"),
            tier: Tier::AtLeastOnce,
            cost: None,
            findings: Vec::new(),
            not_seen: Vec::new(),
        };
        let finding = Finding {
            code: "lease-zero".into(),
            severity: Severity::Refusal,
            message: "the lease is 0".into(),
            remedy: "set one".into(),
        };
        for (sound, listed) in [(20, true), (21, false)] {
            let mut queues: Vec<QueueSection> = (0..sound).map(queue).collect();
            queues.push(QueueSection { findings: vec![finding.clone().into()], ..queue(100) });
            queues.push(QueueSection { not_seen: vec!["its counters".to_owned()], ..queue(101) });
            let report = DoctorReport { queues, ..DoctorReport::default() };
            let firsts: Vec<String> = table_rows(&report).iter().map(|row| row[0].content()).collect();
            let has = |name: &str| firsts.iter().any(|first| first == name);
            assert!(has("q-100") && has("refusal") && has("q-101") && has("nothing found"), "{firsts:?}");
            assert_eq!((has("q-7"), has("21 queues")), (listed, !listed), "{firsts:?}");
        }
    }
}
