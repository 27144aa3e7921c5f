//! Every interleaving of a few workers, a restarting store and an operator, run through the real claim protocol.
//!
//! The workers misbehave in every way that real ones do: they lose answers, ask again, crash, pause past their lease
//! and then continue as zombies, complete late, complete twice. One thing they do not do: claim that nothing happened
//! after they acted. The invariants are checked only against variables beside the entry (the second half of `World`),
//! so that a mistake in the protocol cannot hide itself.

use hapax_core::ledger::protocol::{self, ClaimDecision, EntryChange, LedgerEntry};
use hapax_core::ledger::{TTL_MS_MIN, protocol::Stage};
use hapax_core::{
    ClaimEnding, ClaimRequest, EntryId, EntryState, Fence, Json, OnDoubt, Owner, QueueName, RecordedOutcome,
    Resolution,
};
use stateright::{Checker as _, Model, Property};

/// Longer than a tick, shorter than the run of the clock.
const LEASE_MS: u64 = 2;

/// The limits of the explored state space.
#[derive(Clone)]
struct Bounds {
    /// One per worker: its wish in case of doubt.
    workers: Vec<OnDoubt>,
    /// How often each worker may start, each time under a new owner.
    runs: u8,
    /// When the clock stops, in milliseconds.
    end_ms: u64,
    /// How often the store may crash and open again.
    restarts: u8,
    /// How often an operator may decide.
    resolutions: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Step {
    /// Has no claim, may request one.
    Idle,
    /// Asked; the answer was lost.
    Unanswered,
    /// Believes that it holds the claim, rightly or not.
    Holding { fence: Fence, told: bool, acted: bool },
    /// Takes no further action.
    Over,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Worker {
    run: u8,
    step: Step,
}

/// The author of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum By {
    Holder(Fence),
    Operator,
}

/// Violations of the invariants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Broken {
    TwoCompletions,
    CompletedRanAgain,
    StaleTokenWrote,
    DoubtTakenBack,
    DoubtHeldAgain,
    FenceNotGrown,
    LiveClaimTaken,
    ActedUntold,
    OwnerLockedOut,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    now_ms: u64,
    entry: Option<LedgerEntry>,
    fence: u64,
    workers: Vec<Worker>,
    restarts: u8,
    resolutions: u8,
    // The checker's own knowledge, independent of the entry.
    /// The last grantee that has neither lost nor ended the claim, and the time before which it cannot be taken.
    holder: Option<(Fence, usize, u8)>,
    held_until_ms: u64,
    /// The holder declared doubt.
    gave_up: bool,
    /// The author of the accepted completion.
    completed: Option<By>,
    /// Counted up to two: more make no difference.
    effects: u8,
    takeover: bool,
    operator_freed: bool,
    broken: Option<Broken>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Tick,
    Restart,
    Resolve {
        happened: bool,
    },
    Claim {
        worker: usize,
        lost: bool,
    },
    Act(usize),
    Renew(usize),
    Complete {
        worker: usize,
        lost: bool,
    },
    /// A second completion with another outcome.
    CompleteOtherwise(usize),
    Release(usize),
    Doubt(usize),
    Crash(usize),
}

fn id() -> EntryId {
    EntryId::of_queue(&QueueName::new("q").unwrap(), "k".parse().unwrap())
}

/// Workers and operators record the same outcome, so that only the fence distinguishes them.
fn complete() -> (RecordedOutcome, u64) {
    (RecordedOutcome::done(Json::of("paid").unwrap()), TTL_MS_MIN)
}

impl World {
    fn breaks(&mut self, rule: Broken) {
        self.broken.get_or_insert(rule);
    }

    fn claim(&mut self, worker: usize, on_doubt: OnDoubt, lost: bool) {
        let run = self.workers[worker].run;
        let owner = Owner::new(format!("{worker}.{run}")).unwrap();
        let request = ClaimRequest { on_doubt, ..ClaimRequest::new(id(), owner, LEASE_MS) };
        let (before, mut fence) = (self.fence, self.fence);
        let claimed = protocol::claim(self.entry.as_ref(), &request, self.now_ms, || {
            fence += 1;
            Fence(fence)
        });
        self.fence = fence;
        let own = self.holder.is_some_and(|(_, holder, of)| (holder, of) == (worker, run)) && !self.gave_up;
        let step = match claimed.expect("no fingerprints") {
            ClaimDecision::Granted { entry, takeover } => {
                if self.completed.is_some() {
                    self.breaks(Broken::CompletedRanAgain);
                }
                if own {
                    if self.holder.map(|(fence, ..)| fence) != Some(entry.fence) {
                        self.breaks(Broken::OwnerLockedOut);
                    }
                } else {
                    if entry.fence.0 <= before {
                        self.breaks(Broken::FenceNotGrown);
                    }
                    if self.is_held() {
                        self.breaks(Broken::LiveClaimTaken);
                    }
                    self.takeover |= takeover;
                }
                self.holder = Some((entry.fence, worker, run));
                self.held_until_ms = self.held_until_ms.max(self.now_ms + LEASE_MS);
                self.gave_up = false;
                let fence = entry.fence;
                self.entry = Some(entry);
                Step::Holding { fence, told: takeover, acted: false }
            }
            _ if own && self.completed.is_none() => {
                self.breaks(Broken::OwnerLockedOut);
                Step::Over
            }
            ClaimDecision::Completed { .. } => Step::Over,
            ClaimDecision::InProgress { .. } | ClaimDecision::InDoubt { .. } => Step::Idle,
        };
        self.workers[worker].step = if lost { Step::Unanswered } else { step };
    }

    fn act(&mut self, worker: usize) {
        let Step::Holding { fence, told, acted } = &mut self.workers[worker].step else { unreachable!() };
        *acted = true;
        let untold = !*told && self.holder.is_some_and(|(holder, ..)| holder == *fence);
        if untold && self.effects > 0 && !self.operator_freed {
            self.breaks(Broken::ActedUntold);
        }
        self.effects = (self.effects + 1).min(2);
    }

    fn renew(&mut self, worker: usize) {
        let Step::Holding { fence, .. } = self.workers[worker].step else { unreachable!() };
        if let Ok(entry) = protocol::renew(self.entry.as_ref(), fence, LEASE_MS, self.now_ms) {
            self.wrote_by(fence);
            if self.gave_up {
                self.breaks(Broken::DoubtTakenBack);
            }
            self.held_until_ms = self.now_ms + LEASE_MS;
            self.entry = Some(entry);
        } else {
            self.workers[worker].step = Step::Over;
        }
    }

    /// A write by anyone but the holder comes from a zombie.
    fn wrote_by(&mut self, fence: Fence) {
        if self.holder.is_none_or(|(holder, ..)| holder != fence) {
            self.breaks(Broken::StaleTokenWrote);
        }
    }

    fn end(&mut self, worker: usize, ending: &ClaimEnding, lost: bool) {
        let Step::Holding { fence, .. } = self.workers[worker].step else { unreachable!() };
        let ended = protocol::end(self.entry.as_ref(), fence, ending, self.now_ms);
        if matches!(ended, Ok(EntryChange::Write(_) | EntryChange::Delete)) {
            self.wrote_by(fence);
            match ending {
                ClaimEnding::Complete { .. } => {
                    if self.completed.is_some() {
                        self.breaks(Broken::TwoCompletions);
                    }
                    self.completed = Some(By::Holder(fence));
                }
                ClaimEnding::Release if self.gave_up => self.breaks(Broken::DoubtTakenBack),
                ClaimEnding::Release if ended == Ok(EntryChange::Delete) => self.holder = None,
                // A release after an earlier doubt restores the doubt.
                ClaimEnding::Release | ClaimEnding::Doubt => self.gave_up = true,
            }
        }
        // A repetition of the same completion may succeed; a different completion may not.
        let again = ended == Ok(EntryChange::Unchanged) && matches!(ending, ClaimEnding::Complete { .. });
        if again && self.completed != Some(By::Holder(fence)) {
            self.breaks(Broken::StaleTokenWrote);
        }
        match ended {
            Ok(EntryChange::Write(entry)) => self.entry = Some(entry),
            Ok(EntryChange::Delete) => self.entry = None,
            Ok(EntryChange::Unchanged) | Err(_) => {}
        }
        // A worker that declared doubt may continue, as a thread that cannot be stopped does, and may learn the
        // outcome.
        if !lost && *ending != ClaimEnding::Doubt {
            self.workers[worker].step = Step::Over;
        }
    }

    fn resolve(&mut self, happened: bool) {
        let resolution = if happened {
            let (outcome, ttl_ms) = complete();
            Resolution::Completed { outcome, ttl_ms }
        } else {
            Resolution::Absent
        };
        let mut fence = self.fence;
        let resolved = protocol::resolve(&id(), self.entry.as_ref(), &resolution, self.now_ms, || {
            fence += 1;
            Fence(fence)
        });
        let Ok(ended) = resolved else {
            if self.holder.is_some() && self.completed.is_none() && !self.is_held() {
                self.breaks(Broken::DoubtHeldAgain);
            }
            return;
        };
        self.fence = fence;
        self.resolutions += 1;
        if self.is_held() {
            self.breaks(Broken::LiveClaimTaken);
        }
        self.holder = None;
        self.gave_up = false;
        if happened {
            if self.completed.is_some() {
                self.breaks(Broken::TwoCompletions);
            }
            self.completed = Some(By::Operator);
        } else {
            self.operator_freed = true;
        }
        match ended {
            EntryChange::Write(entry) => self.entry = Some(entry),
            EntryChange::Delete => self.entry = None,
            EntryChange::Unchanged => {}
        }
    }

    /// Someone has the claim, and it cannot be taken yet.
    fn is_held(&self) -> bool {
        self.holder.is_some() && !self.gave_up && self.now_ms < self.held_until_ms
    }

    fn completed_late(&self) -> bool {
        let until_ms = self.held_until_ms;
        let late =
            |entry: &LedgerEntry| matches!(entry.stage, Stage::Completed { at_ms, .. } if at_ms >= until_ms);
        matches!(self.completed, Some(By::Holder(_))) && self.entry.as_ref().is_some_and(late)
    }

    fn held_unknown(&self) -> bool {
        self.holder.is_some_and(|(_, worker, _)| self.workers[worker].step == Step::Unanswered)
    }

    fn state(&self) -> Option<EntryState> {
        self.entry.as_ref().map(|entry| entry.state(self.now_ms))
    }
}

impl Model for Bounds {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let idle = Worker { run: 1, step: Step::Idle };
        vec![World {
            now_ms: 0,
            entry: None,
            fence: 0,
            workers: vec![idle; self.workers.len()],
            restarts: 0,
            resolutions: 0,
            holder: None,
            held_until_ms: 0,
            gave_up: false,
            completed: None,
            effects: 0,
            takeover: false,
            operator_freed: false,
            broken: None,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.broken.is_some() {
            return;
        }
        if world.now_ms < self.end_ms {
            actions.push(Action::Tick);
        }
        if world.restarts < self.restarts {
            actions.push(Action::Restart);
        }
        if world.resolutions < self.resolutions && world.entry.is_some() {
            actions.extend([true, false].map(|happened| Action::Resolve { happened }));
        }
        for (worker, Worker { step, .. }) in world.workers.iter().enumerate() {
            match step {
                Step::Idle => {
                    actions.extend([true, false].map(|lost| Action::Claim { worker, lost }));
                }
                Step::Unanswered => {
                    actions.extend([Action::Claim { worker, lost: false }, Action::Crash(worker)]);
                }
                Step::Holding { fence, acted, .. } => {
                    if world.completed.is_some() {
                        actions.push(Action::CompleteOtherwise(worker));
                    }
                    // A worker that gave the claim up may request it again as the same owner. Only the first grant
                    // does, to keep the state space finite.
                    if world.gave_up
                        && world.fence == 1
                        && world.holder.is_some_and(|(holder, ..)| holder == *fence)
                    {
                        actions.push(Action::Claim { worker, lost: false });
                    }
                    if !acted {
                        // A worker that acted never declares that nothing happened.
                        actions.extend([Action::Act(worker), Action::Release(worker)]);
                    }
                    actions.extend([Action::Renew(worker), Action::Doubt(worker), Action::Crash(worker)]);
                    actions.extend([true, false].map(|lost| Action::Complete { worker, lost }));
                }
                Step::Over => {}
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        match action {
            Action::Tick => next.now_ms += 1,
            Action::Restart => {
                next.restarts += 1;
                // The store ran when the lease ended, so it has recorded that: only a claim that is held is extended.
                let lapsed = next.entry.as_ref().and_then(|entry| entry.lapsed(next.now_ms));
                next.entry = lapsed.or(next.entry).map(|entry| entry.after_restart(next.now_ms));
                if next.is_held() {
                    next.held_until_ms = next.held_until_ms.max(next.now_ms + LEASE_MS);
                }
            }
            Action::Resolve { happened } => next.resolve(happened),
            Action::Claim { worker, lost } => next.claim(worker, self.workers[worker], lost),
            Action::Act(worker) => next.act(worker),
            Action::Renew(worker) => next.renew(worker),
            Action::Complete { worker, lost } => {
                let (outcome, ttl_ms) = complete();
                next.end(worker, &ClaimEnding::Complete { outcome, ttl_ms }, lost);
            }
            Action::CompleteOtherwise(worker) => {
                let outcome = RecordedOutcome::failed(Json::of("refused").unwrap());
                next.end(worker, &ClaimEnding::Complete { outcome, ttl_ms: TTL_MS_MIN }, true);
            }
            Action::Release(worker) => next.end(worker, &ClaimEnding::Release, false),
            Action::Doubt(worker) => next.end(worker, &ClaimEnding::Doubt, false),
            Action::Crash(worker) => {
                let worker = &mut next.workers[worker];
                worker.step = if worker.run < self.runs { Step::Idle } else { Step::Over };
                worker.run = (worker.run + 1).min(self.runs);
            }
        }
        // The history of a worker is irrelevant once it is over.
        for worker in next.workers.iter_mut().filter(|worker| worker.step == Step::Over) {
            worker.run = self.runs;
        }
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn never(rule: Broken, world: &World) -> bool {
            world.broken != Some(rule)
        }
        let mut all: Vec<Property<Self>> = vec![
            Property::always("one completion at most", |_, w| never(Broken::TwoCompletions, w)),
            Property::always("what is completed never runs again", |_, w| {
                never(Broken::CompletedRanAgain, w)
            }),
            Property::always("a stale token never writes", |_, w| never(Broken::StaleTokenWrote, w)),
            Property::always("a doubt is not taken back", |_, w| never(Broken::DoubtTakenBack, w)),
            Property::always("what is in doubt can be decided", |_, w| never(Broken::DoubtHeldAgain, w)),
            Property::always("fences grow with every grant", |_, w| never(Broken::FenceNotGrown, w)),
            Property::always("a live claim is not taken", |_, w| never(Broken::LiveClaimTaken, w)),
            Property::always("who may repeat an effect is told", |_, w| never(Broken::ActedUntold, w)),
            Property::always("a lost answer locks nobody out", |_, w| never(Broken::OwnerLockedOut, w)),
            Property::always("a second effect follows a takeover", |_, w: &World| {
                w.effects < 2 || w.takeover || w.operator_freed
            }),
            Property::always("what is recorded stays", |_, w: &World| match w.completed {
                Some(_) => matches!(&w.entry, Some(LedgerEntry { stage: Stage::Completed { .. }, .. })),
                None => !matches!(&w.entry, Some(LedgerEntry { stage: Stage::Completed { .. }, .. })),
            }),
            Property::sometimes("a claim is in doubt", |_, w: &World| w.state() == Some(EntryState::InDoubt)),
            Property::sometimes("a late completion counts", |_, w: &World| w.completed_late()),
            Property::sometimes("a claim is held unknown to its holder", |_, w: &World| w.held_unknown()),
            Property::sometimes("an effect is completed", |_, w: &World| {
                w.completed.is_some() && w.effects == 1
            }),
        ];
        if self.workers.iter().all(|on_doubt| *on_doubt == OnDoubt::Park) {
            all.push(Property::always(
                "parked: one effect at most unless an operator frees the key",
                |_, w: &World| w.effects < 2 || w.operator_freed,
            ));
        } else {
            all.push(Property::sometimes("a claim is taken over", |_, w: &World| w.takeover));
            all.push(Property::sometimes("a second effect happens", |_, w: &World| {
                w.effects > 1 && !w.operator_freed
            }));
        }
        if self.resolutions > 0 {
            all.push(Property::sometimes("an operator completes", |_, w: &World| {
                w.completed == Some(By::Operator)
            }));
            all.push(Property::sometimes("an operator frees the key", |_, w: &World| w.operator_freed));
        }
        all
    }
}

/// Explores every reachable world.
fn check(name: &str, bounds: Bounds) {
    let start = std::time::Instant::now();
    let checker = bounds.checker().threads(2).spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    println!("{name}: {states} states, {depth} deep, {:?}", start.elapsed());
    checker.assert_properties();
}

#[test]
fn two_workers_that_take_over() {
    let workers = vec![OnDoubt::Retry; 2];
    check("retry", Bounds { workers, runs: 2, end_ms: 3, restarts: 0, resolutions: 1 });
}

#[test]
fn two_workers_that_take_over_on_a_store_that_restarts() {
    let workers = vec![OnDoubt::Retry; 2];
    check("restart", Bounds { workers, runs: 1, end_ms: 3, restarts: 2, resolutions: 1 });
}

#[test]
fn two_workers_that_park() {
    let workers = vec![OnDoubt::Park; 2];
    check("park", Bounds { workers, runs: 2, end_ms: 3, restarts: 1, resolutions: 1 });
}

#[test]
fn one_that_takes_over_and_one_that_parks() {
    let workers = vec![OnDoubt::Retry, OnDoubt::Park];
    check("mixed", Bounds { workers, runs: 2, end_ms: 3, restarts: 0, resolutions: 1 });
}

#[test]
fn three_workers_that_take_over() {
    let workers = vec![OnDoubt::Retry; 3];
    check("three", Bounds { workers, runs: 1, end_ms: 3, restarts: 0, resolutions: 0 });
}
