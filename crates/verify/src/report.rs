//! The verdicts of a run, and their forms.

mod html;
mod junit;
mod text;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::{Findings, Violation};
use crate::history::{Act, Caused, Effect, Event};
use crate::workload::{Shape, Workload};

/// What a run shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Faults bit, and no violation was found.
    Held,
    /// A violation was found.
    Violated,
    /// Nothing was shown: no fault bit, too little happened, or not everything was settled in time.
    Inconclusive,
    /// A control was not caught, so the run would not have found a violation either.
    Invalid,
}

impl Verdict {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Violated => "violated",
            Self::Inconclusive => "inconclusive",
            Self::Invalid => "invalid",
        }
    }
}

/// The circumstances of a run.
#[derive(Debug, Clone, Serialize)]
pub struct RunFacts {
    /// Hapax's version.
    pub version: String,
    /// The store's URL, without secrets.
    pub store: String,
    /// The store's own name for itself.
    pub store_name: String,
    /// The URL of a ledger in another store, without secrets.
    pub ledger: Option<String>,
    /// The seed of the schedule.
    pub seed: u64,
    /// Duration of the whole run.
    pub seconds: f64,
    /// The command that repeats it.
    pub command: String,
}

/// A fault and what it caused.
#[derive(Debug, Clone, Serialize)]
pub struct ReportedFault {
    /// Its number in the schedule.
    pub number: u32,
    /// What it is.
    pub fault: String,
    /// Its duration with its aftermath, in milliseconds.
    pub ms: u64,
    /// Frames or processes that it hit.
    pub hits: u64,
    /// What it caused.
    pub caused: Caused,
    /// Whether it changed something.
    pub bit: bool,
    /// Operations whose answer was lost, late or repeated because of it.
    pub faulted: u64,
}

/// The result of one workload.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Its name.
    pub workload: &'static str,
    /// What it is.
    pub title: &'static str,
    /// The guarantee's boundary, or what is wrong with a control.
    pub boundary: &'static str,
    /// Its tier; none for a control.
    pub tier: Option<hapax::Tier>,
    /// Whether it is a control.
    pub control: bool,
    /// Its verdict; a control's is `violated` if it was caught.
    pub verdict: Verdict,
    /// Why it is inconclusive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What the checker found.
    #[serde(flatten)]
    pub findings: Findings,
}

/// The verdict of all workloads of a tier.
#[derive(Debug, Clone, Serialize)]
pub struct TierVerdict {
    /// The tier.
    pub tier: hapax::Tier,
    /// `held` only if it held in each workload, and the run is valid.
    pub verdict: Verdict,
    /// Its workloads.
    pub workloads: Vec<&'static str>,
}

/// A point of the timeline: one second.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Second {
    /// Effects.
    pub effects: u64,
    /// Duplicates that were suppressed.
    pub suppressed: u64,
    /// Sends whose answer was lost or which failed.
    pub faulted_sends: u64,
}

/// A fault in the timeline.
#[derive(Debug, Clone, Serialize)]
pub struct FaultSpan {
    /// Its number in the schedule.
    pub number: u32,
    /// Its begin and end, in milliseconds since the recorder's start.
    pub from_ms: u64,
    /// See `from_ms`.
    pub until_ms: u64,
    /// The longest time without an effect of Hapax's workloads that overlaps the fault.
    pub recovery_ms: u64,
}

/// The report of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The verdict of the whole run.
    pub verdict: Verdict,
    /// Why, in a sentence.
    pub why: String,
    /// Its circumstances.
    #[serde(flatten)]
    pub facts: RunFacts,
    /// Operations of all workloads.
    pub operations: u64,
    /// Operations whose answer was lost, late or repeated because of a fault.
    pub faulted_operations: u64,
    /// Faults that changed something.
    pub faults_that_bit: u64,
    /// One verdict for each tier.
    pub tiers: Vec<TierVerdict>,
    /// One row for each workload, controls last.
    pub workloads: Vec<Row>,
    /// The faults.
    pub faults: Vec<ReportedFault>,
    /// When each fault was.
    pub fault_spans: Vec<FaultSpan>,
    /// Throughput by second.
    pub timeline: Vec<Second>,
}

impl Report {
    /// Judges a run.
    pub fn new(
        facts: RunFacts,
        workloads: &[Workload],
        findings: Vec<Findings>,
        faults: Vec<ReportedFault>,
        events: &[Event],
    ) -> Self {
        let faults_that_bit = faults.iter().filter(|fault| fault.bit).count() as u64;
        let drained = events.iter().find_map(|event| match &event.event.act {
            Act::Drained { why, .. } => why.as_deref(),
            _ => None,
        });
        let row = |(workload, findings): (&Workload, Findings)| {
            let (verdict, why) = judge(workload, &findings, faults_that_bit, drained);
            Row {
                workload: workload.name,
                title: workload.title,
                boundary: workload.boundary,
                tier: (!workload.is_control()).then_some(workload.tier),
                control: workload.is_control(),
                verdict,
                why,
                findings,
            }
        };
        let rows: Vec<Row> = workloads.iter().zip(findings).map(row).collect();
        let (verdict, why) = judge_all(&rows);
        Self {
            verdict,
            why,
            facts,
            operations: rows.iter().map(|row| row.findings.operations).sum(),
            faulted_operations: faults.iter().map(|fault| fault.faulted).sum(),
            faults_that_bit,
            tiers: judge_tiers(&rows, verdict),
            workloads: rows,
            fault_spans: fault_spans(events),
            faults,
            timeline: timeline(events),
        }
    }

    /// For people.
    pub fn to_text(&self) -> String {
        text::text(self)
    }

    /// For CI systems: one test case for each workload.
    pub fn to_junit(&self) -> String {
        junit::junit(self)
    }

    /// One page that needs nothing else.
    pub fn to_html(&self) -> String {
        html::page(self)
    }

    /// Violations of the controls, or of the workloads under a guarantee.
    pub fn violations_of(&self, controls: bool) -> u64 {
        let rows = self.workloads.iter().filter(|row| row.control == controls);
        rows.map(|row| row.findings.total()).sum()
    }

    /// All witnesses of workloads under a guarantee.
    pub fn violations(&self) -> impl Iterator<Item = (&Row, &Violation)> {
        let rows = self.workloads.iter().filter(|row| !row.control);
        rows.flat_map(|row| row.findings.violations.iter().map(move |violation| (row, violation)))
    }
}

/// The verdict of a workload, and why. `drained` is why the run did not wait for the rest any longer.
fn judge(
    workload: &Workload,
    findings: &Findings,
    faults_that_bit: u64,
    drained: Option<&str>,
) -> (Verdict, Option<String>) {
    let inconclusive = |why: &str| (Verdict::Inconclusive, Some(why.to_owned()));
    if findings.total() > 0 {
        return (Verdict::Violated, None);
    }
    if workload.is_control() {
        return (Verdict::Invalid, Some("this control was not caught".to_owned()));
    }
    if faults_that_bit == 0 {
        return inconclusive("no fault changed anything");
    }
    if findings.effects == 0 {
        return inconclusive("nothing took effect");
    }
    // How the deliveries of a user's command ended is not seen, and runs on Kafka have a rule of their own.
    if findings.hit == 0 && workload.shape != Shape::Own && !workload.is_on_kafka() {
        return inconclusive("no fault reached it");
    }
    if findings.undecided * 2 > findings.intents {
        return inconclusive("most of its keys were not searched for an order: too much overlaps");
    }
    if workload.shape == Shape::Processor && findings.suppressed == 0 {
        return inconclusive("no transaction was aborted");
    }
    if findings.unsettled > 0 {
        let why = drained.map(|why| format!("; {why}")).unwrap_or_default();
        return inconclusive(&format!("messages were still waiting at the end: {}{why}", findings.unsettled));
    }
    (Verdict::Held, None)
}

fn judge_all(rows: &[Row]) -> (Verdict, String) {
    let names = |verdict: Verdict, control: bool| -> Vec<&str> {
        let of = rows.iter().filter(|row| row.verdict == verdict && row.control == control);
        of.map(|row| row.workload).collect()
    };
    let (violated, uncaught) = (names(Verdict::Violated, false), names(Verdict::Invalid, true));
    if !violated.is_empty() {
        return (Verdict::Violated, format!("violations in {}", violated.join(", ")));
    }
    if !uncaught.is_empty() {
        return (Verdict::Invalid, format!("controls that were not caught: {}", uncaught.join(", ")));
    }
    let is_open = |row: &&Row| row.verdict == Verdict::Inconclusive && !row.control;
    let with_reason = |row: &Row| format!("{} ({})", row.workload, row.why.as_deref().unwrap_or_default());
    let open: Vec<String> = rows.iter().filter(is_open).map(with_reason).collect();
    if !open.is_empty() {
        return (Verdict::Inconclusive, format!("nothing was shown for {}", open.join(", ")));
    }
    if names(Verdict::Violated, true).is_empty() {
        return (Verdict::Invalid, "there was no control".to_owned());
    }
    (Verdict::Held, "faults bit, every control was caught, and no violation was found".to_owned())
}

/// A verdict for each tier, weakest tier first. Nothing is shown by an invalid run.
fn judge_tiers(rows: &[Row], of_run: Verdict) -> Vec<TierVerdict> {
    use hapax::Tier;
    let judge = |tier: Tier| {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.tier == Some(tier)).collect();
        let has = |verdict: Verdict| rows.iter().any(|row| row.verdict == verdict);
        let verdict = if has(Verdict::Violated) {
            Verdict::Violated
        } else if of_run == Verdict::Invalid {
            Verdict::Invalid
        } else if has(Verdict::Inconclusive) {
            Verdict::Inconclusive
        } else {
            Verdict::Held
        };
        TierVerdict { tier, verdict, workloads: rows.iter().map(|row| row.workload).collect() }
    };
    let tiers = [Tier::AtLeastOnce, Tier::EffectivelyOnce, Tier::Transactional].map(judge);
    tiers.into_iter().filter(|of| !of.workloads.is_empty()).collect()
}

/// The name of a tier.
fn tier_name(tier: hapax::Tier) -> String {
    let name = serde_json::to_value(tier).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

fn timeline(events: &[Event]) -> Vec<Second> {
    let mut seconds: BTreeMap<u64, Second> = BTreeMap::new();
    // The director reports effects that it reads at the end, from a bank's own table: their time is not known.
    for event in events.iter().filter(|event| !event.event.who.starts_with(crate::run::DIRECTOR)) {
        let second = seconds.entry(event.ms / 1_000).or_default();
        match &event.event.act {
            act if act.effect().is_some() => second.effects += 1,
            Act::Call { effect: Effect::Known, .. } => second.suppressed += 1,
            Act::Settle { ack: true, ran: false, answer: crate::history::Answer::Ok, .. } => {
                second.suppressed += 1;
            }
            Act::Send { answer, .. } if *answer != crate::history::Answer::Ok => second.faulted_sends += 1,
            _ => {}
        }
    }
    let last = seconds.last_key_value().map_or(0, |(second, _)| *second + 1);
    (0..last).map(|second| seconds.get(&second).copied().unwrap_or_default()).collect()
}

fn fault_spans(events: &[Event]) -> Vec<FaultSpan> {
    let is_effect = |event: &&Event| {
        let control = Workload::named(&event.event.workload).is_none_or(|workload| workload.is_control());
        let timed = !event.event.who.starts_with(crate::run::DIRECTOR);
        !control && timed && event.event.act.effect().is_some()
    };
    let effects: Vec<u64> = events.iter().filter(is_effect).map(|event| event.ms).collect();
    let recovery = |from: u64, until: u64| {
        let gaps = effects.windows(2).filter(|gap| gap[1] >= from && gap[0] <= until);
        let longest = gaps.map(|gap| gap[1] - gap[0]).max();
        // Nothing had taken effect before: from its begin to the first.
        let first = || effects.iter().find(|ms| **ms >= from).map(|ms| ms - from);
        longest.or_else(first).unwrap_or_default()
    };
    let mut begun = BTreeMap::new();
    let mut spans = Vec::new();
    for event in events {
        match &event.event.act {
            Act::FaultBegins { number, .. } => drop(begun.insert(*number, event.ms)),
            Act::FaultEnds { number, .. } => {
                let from_ms = begun.get(number).copied().unwrap_or(event.ms);
                let recovery_ms = recovery(from_ms, event.ms);
                spans.push(FaultSpan { number: *number, from_ms, until_ms: event.ms, recovery_ms });
            }
            _ => {}
        }
    }
    spans
}
