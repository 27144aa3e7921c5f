//! Whether the operations on a ledger key are those of one register: there is an order of them, within their times, that a
//! single copy of the entry could have carried out (linearizability).
//!
//! The rules of [`super::claims`] compare pairs of operations, and name what is wrong. This finds what no pair shows, for
//! example a key that is granted after another process was answered with an outcome whose completion has no known answer.
//!
//! An operation without an answer may have been carried out or not. A claim without an answer only takes the right from
//! others, which makes no answer to them possible that was impossible before: it is left out. A completion without an answer
//! stays if its outcome was seen. When a lease ends is not part of this: a grant may follow another at any time. That one came
//! too early is a rule of [`super::claims`].

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester, SequentialSpec};

use super::{Anomaly, Findings, WITNESS_EVENTS_MAX};
use crate::history::{Act, Answer, ClaimStep, Event};

/// Steps of the search for one key. One order is found in as many steps as there are operations; the search is long only if
/// many overlap.
const STEPS_PER_KEY: u32 = 20_000;
/// Steps of the search for all keys of a history.
const STEPS_TOTAL: u32 = 5_000_000;
/// Completions of a key without an answer. The search tries all their orders, which the steps do not bound.
const UNANSWERED_MAX: usize = 4;

/// What is asked of the register.
#[derive(Debug, Clone, PartialEq)]
enum Op {
    Claim,
    Extend { fence: u64 },
    Complete { fence: u64, outcome: String },
}

/// What it answers.
#[derive(Debug, Clone, PartialEq)]
enum Ret {
    Granted { fence: u64 },
    Replayed { outcome: String },
    Busy,
    Done,
}

/// The register: one ledger entry.
#[derive(Debug, Clone, Default)]
struct Register {
    /// The newest holder's; 0 before the first.
    fence: u64,
    /// The fence and outcome of the completion.
    completed: Option<(u64, String)>,
    steps_left: Rc<Cell<u32>>,
}

impl Register {
    fn count_step(&self) -> bool {
        let left = self.steps_left.get();
        self.steps_left.set(left.saturating_sub(1));
        left > 0
    }
}

impl SequentialSpec for Register {
    type Op = Op;
    type Ret = Ret;

    /// Of an operation without an answer; only completions are such.
    fn invoke(&mut self, op: &Op) -> Ret {
        if let Op::Complete { fence, outcome } = op
            && *fence == self.fence
            && self.completed.is_none()
        {
            self.completed = Some((*fence, outcome.clone()));
        }
        Ret::Done
    }

    fn is_valid_step(&mut self, op: &Op, ret: &Ret) -> bool {
        if !self.count_step() {
            return false;
        }
        match (op, ret, &self.completed) {
            (Op::Claim, Ret::Granted { fence }, None) => {
                let is_new = *fence > self.fence;
                self.fence = *fence;
                is_new
            }
            (Op::Claim, Ret::Replayed { outcome }, Some((_, recorded))) => outcome == recorded,
            (Op::Claim, Ret::Busy, completed) => completed.is_none(),
            (Op::Extend { fence }, Ret::Done, None) => *fence == self.fence,
            (Op::Complete { fence, outcome }, Ret::Done, None) => {
                self.completed = Some((*fence, outcome.clone()));
                *fence == self.fence
            }
            // The same completion again.
            (Op::Complete { fence, outcome }, Ret::Done, Some((by, recorded))) => {
                fence == by && outcome == recorded
            }
            _ => false,
        }
    }
}

/// An operation of a key: when it began and, if it was answered, when that was, by the numbers of events.
struct Operation<'a> {
    op: Op,
    begins: &'a Event,
    ends: Option<(Ret, &'a Event)>,
}

/// Checks keys until the steps of all of them are used up.
pub struct Search {
    steps_left: u32,
}

impl Search {
    pub fn new() -> Self {
        Self { steps_left: STEPS_TOTAL }
    }

    /// Checks one key, whose events these are in their order.
    pub fn check(&mut self, id: &str, events: &[&Event], findings: &mut Findings) {
        let operations = operations(events);
        match self.is_linearizable(&operations, u64::MAX) {
            Some(true) => {}
            None => findings.undecided += 1,
            Some(false) => {
                let witness = self.witness(&operations);
                let says =
                    "no order of these operations is one that a single entry of the ledger could have \
                            carried out"
                        .to_owned();
                findings.add(Anomaly::RegisterNotLinearizable, id, says, &witness);
            }
        }
    }

    /// Whether there is an order of what had happened up to the event with this number; `None` if the search was given up.
    fn is_linearizable(&mut self, operations: &[Operation<'_>], until: u64) -> Option<bool> {
        let begun: Vec<(&Operation<'_>, Option<&(Ret, &Event)>)> = operations
            .iter()
            .filter(|operation| operation.begins.n <= until)
            .map(|operation| (operation, operation.ends.as_ref().filter(|(_, event)| event.n <= until)))
            .filter(|(operation, ends)| ends.is_some() || matches!(operation.op, Op::Complete { .. }))
            .collect();
        if begun.iter().filter(|(_, ends)| ends.is_none()).count() > UNANSWERED_MAX {
            return None;
        }
        let steps = Rc::new(Cell::new(STEPS_PER_KEY.min(self.steps_left)));
        let before = steps.get();
        let register = Register { steps_left: steps.clone(), ..Register::default() };
        let mut tester = LinearizabilityTester::new(register);
        // Each operation has a thread of its own: threads that ended before it began are those that come before it.
        let mut points: Vec<(u64, usize, Option<&Ret>)> = Vec::new();
        for (thread, (operation, ends)) in begun.iter().enumerate() {
            points.push((operation.begins.n, thread, None));
            points.extend(ends.map(|(ret, event)| (event.n, thread, Some(ret))));
        }
        points.sort_by_key(|(n, ..)| *n);
        for (_, thread, ret) in points {
            let noted = match ret {
                None => tester.on_invoke(thread, begun[thread].0.op.clone()),
                Some(ret) => tester.on_return(thread, ret.clone()),
            };
            noted.expect("an operation begins once, and ends after that");
        }
        let found = tester.is_consistent();
        self.steps_left -= before - steps.get();
        (found || steps.get() > 0).then_some(found)
    }

    /// The shortest beginning of a key's history that has no order; its last events, without answers that changed nothing.
    fn witness<'a>(&mut self, operations: &[Operation<'a>]) -> Vec<&'a Event> {
        let mut ends: Vec<u64> =
            operations.iter().filter_map(|operation| Some(operation.ends.as_ref()?.1.n)).collect();
        ends.sort_unstable();
        let wrong = ends.iter().find(|until| self.is_linearizable(operations, **until) == Some(false));
        let last = wrong.or(ends.last()).copied().unwrap_or_default();
        let mut shown: Vec<&Event> = Vec::new();
        let mut has_replay = false;
        for operation in operations.iter().filter(|operation| operation.begins.n <= last) {
            let end = operation.ends.as_ref().filter(|(_, event)| event.n <= last);
            let changes_nothing = match end {
                Some((Ret::Busy, _)) => true,
                Some((Ret::Replayed { .. }, _)) => std::mem::replace(&mut has_replay, true),
                Some(_) => false,
                None => !matches!(operation.op, Op::Complete { .. }),
            };
            if !changes_nothing || end.is_some_and(|(_, event)| event.n == last) {
                shown.push(operation.begins);
                shown.extend(end.map(|(_, event)| *event));
            }
        }
        shown.sort_by_key(|event| event.n);
        shown.split_off(shown.len().saturating_sub(WITNESS_EVENTS_MAX))
    }
}

/// The operations that matter for an order.
fn operations<'a>(events: &[&'a Event]) -> Vec<Operation<'a>> {
    let mut open: BTreeMap<&str, (Op, &'a Event)> = BTreeMap::new();
    let mut operations = Vec::new();
    let mut unanswered = Vec::new();
    let mut seen = BTreeSet::new();
    for event in events.iter().copied() {
        let Act::Claim { step, .. } = &event.event.act else { continue };
        let who = event.event.who.as_str();
        if *step == ClaimStep::Unanswered {
            // The claim is asked for again by the same owner: both are one operation.
            continue;
        }
        let begins = match step {
            ClaimStep::Ask => Some(Op::Claim),
            ClaimStep::Extend { fence } => Some(Op::Extend { fence: *fence }),
            ClaimStep::Complete { fence, outcome } => {
                Some(Op::Complete { fence: *fence, outcome: outcome.clone() })
            }
            _ => None,
        };
        if let Some(op) = begins {
            unanswered.extend(open.insert(who, (op, event)));
            continue;
        }
        let Some((op, begins)) = open.remove(who) else { continue };
        let ret = match step {
            ClaimStep::Granted { fence, .. } => Ret::Granted { fence: *fence },
            ClaimStep::Replayed { outcome } => {
                seen.insert(outcome.as_str());
                Ret::Replayed { outcome: outcome.clone() }
            }
            ClaimStep::Busy => Ret::Busy,
            ClaimStep::Extended { answer: Answer::Ok, .. }
            | ClaimStep::Completed { answer: Answer::Ok, .. } => Ret::Done,
            ClaimStep::Completed { answer: Answer::Unknown, .. } => {
                unanswered.push((op, begins));
                continue;
            }
            // Refused: nothing was changed. A lease that may have been extended may also not have been.
            _ => continue,
        };
        operations.push(Operation { op, begins, ends: Some((ret, event)) });
    }
    unanswered.extend(open.into_values());
    for (op, begins) in unanswered {
        if matches!(&op, Op::Complete { outcome, .. } if seen.contains(outcome.as_str())) {
            operations.push(Operation { op, begins, ends: None });
        }
    }
    operations
}
