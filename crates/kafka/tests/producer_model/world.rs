//! The application with its producer machine, the network, and the invariants.

use std::collections::BTreeSet;

use hapax_kafka::machine::{Ending, Identity, Machine, State};
use stateright::{Model, Property};

use crate::broker::{Answer, Brokers, Request, Status, Unchecked};

/// How often each trouble may happen in a run.
#[derive(Clone, Copy)]
pub struct Bounds {
    pub inputs: u8,
    /// Requests without an answer in time.
    pub timeouts: u8,
    /// Requests that arrive twice.
    pub repeats: u8,
    pub aborts: u8,
    pub crashes: u8,
    /// Transactions that the coordinator times out.
    pub expiries: u8,
    /// Batches and offsets are sent while others are not answered.
    pub is_ahead: bool,
}

/// A rule of the producer that a run breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A repeated batch gets the next sequence.
    NewSequence,
    /// An unanswered commit is given up, and its input is taken again without asking for the offsets.
    AbortUnansweredCommit,
    /// Offsets are sent in the middle and at the end of a transaction.
    OffsetsTwice,
}

pub struct Copier {
    pub bounds: Bounds,
    pub broken: Option<Broken>,
    pub unchecked: Option<Unchecked>,
}

/// A request on its way. The application waits only for the last attempt of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flight {
    attempt: u8,
    request: Request,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    brokers: Brokers,
    network: BTreeSet<Flight>,
    machine: Machine<usize>,
    /// Requests that the application waits for: the batches of both partitions and the offsets may be under way at the same time.
    waiting: BTreeSet<Flight>,
    attempt: u8,
    /// The commit was sent more than once.
    uncertain: bool,
    /// Batches of this transaction that were formed, and whether its offsets were sent.
    formed: u8,
    offsets_sent: bool,
    transaction: u8,
    position: u8,
    left: [u8; 5],
    // What the application was told or decided, by transaction.
    committed: BTreeSet<u8>,
    aborted: BTreeSet<u8>,
    given_up: bool,
}

const TIMEOUTS: usize = 0;
const REPEATS: usize = 1;
const ABORTS: usize = 2;
const CRASHES: usize = 3;
const EXPIRIES: usize = 4;

#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// The application's next request, also while others are not answered.
    Next,
    Abort,
    /// A request is not answered in time and is sent again.
    Repeat(Flight),
    GiveUp,
    Crash,
    /// A request arrives; `stays`: and will arrive once more.
    Arrive(Flight, bool),
    Mark(usize),
    Complete,
    Expire,
}

impl World {
    fn send(&mut self, request: Request) {
        self.attempt += 1;
        let flight = Flight { attempt: self.attempt, request };
        self.network.insert(flight);
        self.waiting.insert(flight);
    }

    fn epoch(&self) -> i16 {
        self.machine.identity().map_or(-1, |identity| identity.epoch)
    }

    fn take(&mut self, trouble: usize) {
        self.left[trouble] -= 1;
    }

    fn produce(&mut self, partition: usize) {
        let Ok(batch) = self.machine.batch(partition, 1) else { return };
        self.formed += 1;
        self.send(Request::Produce {
            epoch: batch.identity.epoch,
            partition,
            sequence: batch.sequence,
            transaction: self.transaction,
            input: self.position,
        });
    }

    fn offsets(&mut self, next: u8) {
        self.offsets_sent = true;
        self.send(Request::Offsets { epoch: self.epoch(), transaction: self.transaction, next });
    }

    /// Whether the application has a next request: it waits for answers only before a transaction and before its commit.
    fn has_next(&self, copier: &Copier) -> bool {
        let finished = match self.machine.state() {
            State::Fenced => true,
            State::Ready => self.position >= copier.bounds.inputs,
            _ => false,
        };
        let is_ahead = copier.bounds.is_ahead && self.machine.state() == State::Open;
        !finished && (self.waiting.is_empty() || is_ahead)
    }

    /// The next request of the application.
    fn next(&mut self, copier: &Copier) {
        match self.machine.state() {
            State::Uninitialised | State::Unknown => self.send(Request::Init),
            State::Ready if self.position < copier.bounds.inputs => {
                self.machine.begin().expect("ready");
                self.transaction += 1;
                (self.formed, self.offsets_sent) = (0, false);
                self.uncertain = false;
                self.produce(0);
            }
            State::Open if copier.broken == Some(Broken::OffsetsTwice) && !self.offsets_sent => {
                self.offsets(self.position);
            }
            State::Open if self.formed < 2 => self.produce(usize::from(self.formed)),
            State::Open => {
                self.machine.seal(true).expect("open");
                self.offsets(self.position + 1);
            }
            State::Sealed => match self.machine.commit() {
                Ok(Ending::Request(identity)) => {
                    self.send(Request::End { epoch: identity.epoch, commit: true });
                }
                _ => unreachable!("a transaction with records is not empty"),
            },
            _ => {}
        }
    }

    fn abort(&mut self) {
        self.waiting.clear();
        self.aborted.insert(self.transaction);
        if let Ok(Ending::Request(identity)) = self.machine.abort() {
            self.send(Request::End { epoch: identity.epoch, commit: false });
        }
    }

    /// A request is sent once more.
    fn repeat(&mut self, copier: &Copier, flight: Flight) {
        let mut request = flight.request;
        self.waiting.remove(&flight);
        self.take(TIMEOUTS);
        if let Request::End { commit: true, .. } = request {
            self.uncertain = true;
        }
        if copier.broken == Some(Broken::OffsetsTwice)
            && self.machine.state() == State::Open
            && matches!(request, Request::Offsets { .. })
        {
            // The first offsets are not waited for: the ones at the end count.
            return;
        }
        if let (Some(Broken::NewSequence), Request::Produce { sequence, .. }) = (copier.broken, &mut request)
        {
            *sequence += 1;
        }
        self.send(request);
    }

    fn give_up(&mut self, copier: &Copier) {
        self.take(TIMEOUTS);
        self.waiting.clear();
        self.machine.give_up();
        self.given_up = copier.broken != Some(Broken::AbortUnansweredCommit);
    }

    fn crash(&mut self) {
        self.take(CRASHES);
        self.waiting.clear();
        self.machine = Machine::default();
        self.given_up = true;
    }

    fn answered(&mut self, request: Request, answer: Answer) {
        let identity = |epoch| Identity { producer_id: 1, epoch };
        match (request, answer) {
            (_, Answer::Busy | Answer::Begun) => unreachable!("requests wait for an answer"),
            (Request::Init, Answer::Done(epoch)) => {
                if self.machine.initialised(identity(epoch)).is_ok() && self.given_up {
                    self.given_up = false;
                    self.position = self.brokers.committed_offset();
                }
            }
            (Request::Produce { partition, .. }, Answer::Done(_)) => self.machine.batch_written(&partition),
            (Request::Offsets { .. }, Answer::Done(_)) => {}
            (Request::End { commit, .. }, Answer::Done(epoch)) => {
                if self.machine.ended(identity(epoch)).is_ok() && commit {
                    self.committed.insert(self.transaction);
                    self.position += 1;
                }
            }
            (Request::End { commit: true, .. }, _) if self.uncertain => {
                self.machine.give_up();
                self.given_up = true;
            }
            (Request::Produce { .. } | Request::Offsets { .. }, Answer::Refused) => {
                self.machine.fail();
                self.abort();
            }
            (_, Answer::Stale | Answer::Refused) => {
                self.waiting.clear();
                self.machine.fenced();
            }
        }
    }

    fn visible(&self, partition: usize) -> Vec<(u8, u8)> {
        self.brokers.logs[partition].visible()
    }
}

impl Model for Copier {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        let bounds = self.bounds;
        vec![World {
            brokers: Brokers::new(),
            network: BTreeSet::new(),
            machine: Machine::default(),
            waiting: BTreeSet::new(),
            attempt: 0,
            uncertain: false,
            formed: 0,
            offsets_sent: false,
            transaction: 0,
            position: 0,
            left: [bounds.timeouts, bounds.repeats, bounds.aborts, bounds.crashes, bounds.expiries],
            committed: BTreeSet::new(),
            aborted: BTreeSet::new(),
            given_up: true,
        }]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        let state = world.machine.state();
        if world.has_next(self) {
            steps.push(Step::Next);
        }
        if world.left[TIMEOUTS] > 0 {
            for flight in &world.waiting {
                steps.push(Step::Repeat(*flight));
                if matches!(flight.request, Request::End { commit: true, .. }) {
                    steps.push(Step::GiveUp);
                }
            }
        }
        if world.left[ABORTS] > 0 && matches!(state, State::Open | State::Sealed) {
            steps.push(Step::Abort);
        }
        if world.left[CRASHES] > 0 && state != State::Uninitialised {
            steps.push(Step::Crash);
        }
        for flight in &world.network {
            steps.push(Step::Arrive(*flight, false));
            if world.left[REPEATS] > 0 {
                steps.push(Step::Arrive(*flight, true));
            }
        }
        steps.extend(world.brokers.unmarked().into_iter().map(Step::Mark));
        if matches!(world.brokers.status, Status::Prepared(_)) && world.brokers.unmarked().is_empty() {
            steps.push(Step::Complete);
        }
        if world.left[EXPIRIES] > 0 && world.brokers.status == Status::Ongoing {
            steps.push(Step::Expire);
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut world = world.clone();
        match step {
            Step::Next => world.next(self),
            Step::Abort => {
                world.take(ABORTS);
                world.abort();
            }
            Step::Repeat(flight) => world.repeat(self, flight),
            Step::GiveUp => world.give_up(self),
            Step::Crash => world.crash(),
            Step::Arrive(flight, stays) => {
                let answer = world.brokers.handle(flight.request, self.unchecked);
                match answer {
                    // A busy broker is asked again until it is not: as if the request had arrived later.
                    Answer::Busy => return None,
                    Answer::Begun => return Some(world),
                    _ => {}
                }
                if stays {
                    world.take(REPEATS);
                } else {
                    world.network.remove(&flight);
                }
                if world.waiting.remove(&flight) {
                    world.answered(flight.request, answer);
                }
            }
            Step::Mark(partition) => world.brokers.mark(partition),
            Step::Complete => world.brokers.complete(),
            Step::Expire => {
                world.take(EXPIRIES);
                world.brokers.expire();
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no aborted record is visible", |_, world: &World| {
                let visible = |partition| world.visible(partition).into_iter();
                !(0..3).flat_map(visible).any(|(transaction, _)| world.aborted.contains(&transaction))
            }),
            Property::always("no record is doubled", |_, world: &World| {
                (0..2).all(|partition| {
                    let mut inputs: Vec<u8> =
                        world.visible(partition).into_iter().map(|seen| seen.1).collect();
                    let all = inputs.len();
                    inputs.dedup();
                    inputs.len() == all && inputs.is_sorted()
                })
            }),
            Property::always("no committed record is lost", |_, world: &World| {
                !world.brokers.is_settled()
                    || world.committed.iter().all(|transaction| {
                        (0..3).all(|partition| {
                            world.visible(partition).iter().any(|(seen, _)| seen == transaction)
                        })
                    })
            }),
            Property::always("records and offset agree", |_, world: &World| {
                let inputs = |partition| world.visible(partition).into_iter().map(|seen| seen.1);
                let offset = world.brokers.committed_offset();
                !world.brokers.is_settled() || (inputs(0).eq(0..offset) && inputs(1).eq(0..offset))
            }),
            Property::sometimes("reached: all inputs are committed", |copier: &Copier, world: &World| {
                world.brokers.committed_offset() == copier.bounds.inputs
                    && world.left[ABORTS] == 0
                    && world.left[CRASHES] == 0
                    && world.left[EXPIRIES] == 0
            }),
            Property::sometimes("reached: all requests are under way", |copier: &Copier, world: &World| {
                let count = if copier.bounds.is_ahead { 3 } else { 1 };
                world.machine.state() == State::Sealed && world.waiting.len() == count
            }),
            Property::sometimes("reached: a commit given up was committed", |_, world: &World| {
                world.machine.state() == State::Unknown && world.brokers.committed_offset() > world.position
            }),
            Property::sometimes("reached: a transaction after one that was given up", |_, world: &World| {
                world.machine.state() == State::Open && world.transaction > 1 && world.committed.is_empty()
            }),
        ]
    }
}
