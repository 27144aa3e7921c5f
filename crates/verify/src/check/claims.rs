//! Rules on the keys of a ledger. An operation is recorded before it begins and after it was answered, so one that begins
//! after another was answered comes after it in real time.

use std::collections::BTreeMap;

use super::register::Search;
use super::{Anomaly, Findings};
use crate::history::{Act, Answer, ClaimStep, Event};

/// An operation that takes longer was hit by a fault: others wait, or it is repeated.
const LATE_MS: u64 = 1_000;
/// How much the times of the recorder and of the store may be rounded.
const ROUNDING_MS: u64 = 5;

/// A grant, by the recorder's clock.
struct Held<'a> {
    fence: u64,
    /// It had been granted by then; `None` of an extension, which is no grant.
    by_ms: Option<u64>,
    /// It had not ended before this: the time that was left is counted from before the claim, or more time, was asked for.
    until_ms: u64,
    event: &'a Event,
}

#[derive(Default)]
struct Key<'a> {
    /// The largest fence that was granted so far, and its event.
    granted: Option<(u64, &'a Event)>,
    /// All grants and extensions.
    held: Vec<Held<'a>>,
    /// The accepted completion: fence, outcome, event.
    completed: Option<(u64, String, &'a Event)>,
    /// Outcomes that someone asked to be recorded, by fence.
    asked: BTreeMap<u64, (String, &'a Event)>,
    /// The outcome that a duplicate was answered with.
    replayed: Option<(String, &'a Event)>,
    /// For each process: what was granted, and whether the key had ended, when it began its operation.
    begun: BTreeMap<&'a str, Begun<'a>>,
    /// For each process that has begun an operation, or holds the key: its last event.
    open: BTreeMap<&'a str, &'a Event>,
    events: Vec<&'a Event>,
    violations: u64,
}

#[derive(Default, Clone)]
struct Begun<'a> {
    ms: u64,
    granted: Option<(u64, &'a Event)>,
    ended: Option<&'a Event>,
}

/// Checks the keys of a workload. `last_fault` is the number of the event with which the last fault ended.
pub fn check(own: &[&Event], last_fault: u64, findings: &mut Findings) {
    let mut keys: BTreeMap<&str, Key<'_>> = BTreeMap::new();
    for event in own {
        let Act::Claim { id, step } = &event.event.act else { continue };
        let is_new = !keys.contains_key(id.as_str());
        let key = keys.entry(id).or_default();
        findings.intents += u64::from(is_new);
        findings.operations += u64::from(!matches!(
            step,
            ClaimStep::Ask | ClaimStep::Unanswered | ClaimStep::Extend { .. } | ClaimStep::Complete { .. }
        ));
        key.events.push(event);
        findings.hit += u64::from(key.is_hit(step, event));
        let before = findings.total();
        key.step(id, step, event, findings);
        key.violations += findings.total() - before;
    }
    for (id, key) in &mut keys {
        let before = findings.total();
        key.check_leases(id, findings);
        key.violations += findings.total() - before;
        // Processes that were killed in the middle: they began, or held the key, and were never heard of again.
        findings.hit += key.open.values().filter(|event| event.n < last_fault).count() as u64;
    }
    let mut search = Search::new();
    // A violation that has a name is not reported twice.
    for (id, key) in keys.iter().filter(|(_, key)| key.violations == 0) {
        search.check(id, &key.events, findings);
    }
}

impl<'a> Key<'a> {
    fn step(&mut self, id: &str, step: &'a ClaimStep, event: &'a Event, findings: &mut Findings) {
        let who = event.event.who.as_str();
        match step {
            ClaimStep::Ask | ClaimStep::Extend { .. } => self.begin(who, event),
            ClaimStep::Extended { fence, answer: Answer::Ok, lease_ms } => {
                let begun = self.begun.get(who).cloned().unwrap_or_default();
                let until_ms = begun.ms + lease_ms;
                self.held.push(Held { fence: *fence, by_ms: None, until_ms, event });
                if let Some((newer, shown)) = begun.granted.filter(|(newer, _)| newer > fence) {
                    let says = format!(
                        "an extension with fence {fence} was accepted after fence {newer} was granted"
                    );
                    findings.add(Anomaly::StaleSettleAccepted, id, says, &[shown, event]);
                }
            }
            ClaimStep::Extended { .. } | ClaimStep::Busy | ClaimStep::Unanswered => {}
            ClaimStep::Granted { fence, lease_ms } => {
                let begun = self.begun.get(who).cloned().unwrap_or_default();
                let until_ms = begun.ms + lease_ms;
                self.held.push(Held { fence: *fence, by_ms: Some(event.ms), until_ms, event });
                if let Some((earlier, shown)) = begun.granted.filter(|(earlier, _)| fence <= earlier) {
                    let says = format!("fence {fence} was granted after fence {earlier}");
                    findings.add(Anomaly::FenceBackwards, id, says, &[shown, event]);
                }
                if let Some(ended) = begun.ended {
                    let says = "the key was granted again after its completion".to_owned();
                    findings.add(Anomaly::EffectTwice, id, says, &[ended, event]);
                }
                if self.granted.is_none_or(|(largest, _)| *fence > largest) {
                    self.granted = Some((*fence, event));
                }
            }
            ClaimStep::Replayed { outcome } => {
                findings.suppressed += 1;
                self.replay(id, outcome, event, findings);
            }
            ClaimStep::Complete { fence, outcome } => {
                self.begin(who, event);
                self.asked.insert(*fence, (outcome.clone(), event));
            }
            ClaimStep::Completed { fence, answer } => self.complete(id, *fence, *answer, event, findings),
        }
    }

    /// Whether an operation was hit by a fault: its answer was lost or late. Notes what is open.
    fn is_hit(&mut self, step: &ClaimStep, event: &'a Event) -> bool {
        let who = event.event.who.as_str();
        match step {
            ClaimStep::Ask | ClaimStep::Extend { .. } | ClaimStep::Complete { .. } => {
                self.open.insert(who, event);
                return false;
            }
            ClaimStep::Unanswered => return true,
            ClaimStep::Granted { .. } | ClaimStep::Extended { .. } => {
                self.open.insert(who, event);
            }
            ClaimStep::Replayed { .. } | ClaimStep::Busy | ClaimStep::Completed { .. } => {
                self.open.remove(who);
            }
        }
        let is_unknown = matches!(
            step,
            ClaimStep::Extended { answer: Answer::Unknown, .. }
                | ClaimStep::Completed { answer: Answer::Unknown, .. }
        );
        is_unknown || self.begun.get(who).is_some_and(|begun| event.ms - begun.ms >= LATE_MS)
    }

    fn begin(&mut self, who: &'a str, event: &Event) {
        let ended = self.completed.as_ref().map(|(_, _, event)| *event);
        self.begun.insert(who, Begun { ms: event.ms, granted: self.granted, ended });
    }

    /// A lease lasts as long as its holder was told, whatever any clock says.
    fn check_leases(&mut self, id: &str, findings: &mut Findings) {
        self.held.sort_by_key(|held| held.fence);
        // Of those with a smaller fence, the one that lasts longest.
        let mut longest: Option<&Held<'_>> = None;
        for later in self.held.chunk_by(|one, other| one.fence == other.fence) {
            let granted = later.iter().find_map(|held| Some((held.by_ms?, held)));
            if let (Some(earlier), Some((by_ms, granted))) = (longest, granted)
                && by_ms + ROUNDING_MS < earlier.until_ms
            {
                let says = format!(
                    "fence {} was granted at the latest {} ms before the lease of fence {} ended",
                    granted.fence,
                    earlier.until_ms - by_ms,
                    earlier.fence
                );
                findings.add(Anomaly::GrantedWhileHeld, id, says, &[earlier.event, granted.event]);
            }
            longest = longest.into_iter().chain(later).max_by_key(|held| held.until_ms);
        }
    }

    fn replay(&mut self, id: &str, outcome: &str, event: &'a Event, findings: &mut Findings) {
        let earlier = match (&self.completed, &self.replayed) {
            (Some((_, known, shown)), _) if known != outcome => Some((known, *shown)),
            (_, Some((known, shown))) if known != outcome => Some((known, *shown)),
            _ => None,
        };
        if let Some((known, shown)) = earlier {
            let says = format!("a duplicate was answered {outcome:?}, after {known:?}");
            findings.add(Anomaly::OutcomeDiffers, id, says, &[shown, event]);
        } else if !self.asked.values().any(|(asked, _)| asked == outcome) {
            let says = format!("a duplicate was answered {outcome:?}, which was never recorded");
            findings.add(Anomaly::OutcomeDiffers, id, says, &[event]);
        }
        self.replayed.get_or_insert((outcome.to_owned(), event));
    }

    fn complete(&mut self, id: &str, fence: u64, answer: Answer, event: &'a Event, findings: &mut Findings) {
        if answer != Answer::Ok {
            return;
        }
        findings.accepted += 1;
        let begun = self.begun.get(event.event.who.as_str()).cloned().unwrap_or_default();
        let asked = self.asked.get(&fence);
        if let Some((newer, shown)) = begun.granted.filter(|(newer, _)| *newer > fence) {
            let says =
                format!("a completion with fence {fence} was accepted after fence {newer} was granted");
            let shown: Vec<&Event> =
                [shown, event].into_iter().chain(asked.map(|(_, event)| *event)).collect();
            findings.add(Anomaly::StaleSettleAccepted, id, says, &shown);
        }
        let outcome = asked.map(|(outcome, _)| outcome.clone()).unwrap_or_default();
        match &self.completed {
            Some((earlier, _, shown)) if *earlier != fence => {
                let says = format!("completions with fences {earlier} and {fence} were both accepted");
                findings.add(Anomaly::EffectTwice, id, says, &[shown, event]);
            }
            Some(_) => {}
            None => {
                findings.effects += 1;
                if let Some((replayed, shown)) = self.replayed.as_ref().filter(|(known, _)| *known != outcome)
                {
                    let says = format!("duplicates were answered {replayed:?}, the outcome is {outcome:?}");
                    findings.add(Anomaly::OutcomeDiffers, id, says, &[shown, event]);
                }
                self.completed = Some((fence, outcome, event));
            }
        }
    }
}
