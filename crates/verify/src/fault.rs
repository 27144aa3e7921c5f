//! The faults of a run, and their seeded schedule.

use std::fmt;
use std::time::Duration;

use hapax_faults::{Action, Match, Protocol};

use crate::recorder::EFFECTS;
use crate::workload::{LEASE_MS, Shape, Workload};

/// A process that can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The producer.
    Producer,
    /// One of the workers.
    Worker,
    /// A server.
    Server,
    /// The proxies.
    Proxy,
    /// The store's own server, where the run has started it.
    Store,
}

/// Whose connection to the server is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The producer's.
    Producers,
    /// The workers'.
    Workers,
    /// The relay's.
    Relays,
    /// That of servers and transactional workers to the store.
    Store,
    /// Those of callers to `hapax proxy`.
    Callers,
}

/// A fault on the wire: it hits only one kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireFault {
    /// Whose connection.
    pub side: Side,
    /// The request's name for readers.
    pub request: &'static str,
    /// Part of the request's label at the proxy.
    label: &'static str,
    /// Whether the answer is hit, and not the request.
    answer: bool,
    /// What the proxy does with it.
    pub action: Action,
}

impl WireFault {
    /// The protocol whose frames have its label; `None` for a label that fits everything.
    pub fn protocol(&self) -> Option<Protocol> {
        match (self.side, self.label) {
            (Side::Producers | Side::Workers | Side::Relays | Side::Callers, _) => Some(Protocol::Http),
            (Side::Store, "") => None,
            (Side::Store, "EVALSHA") => Some(Protocol::Redis),
            (Side::Store, _) => Some(Protocol::Postgres),
        }
    }

    /// The frames that it hits.
    pub fn on(&self) -> Match {
        if self.answer { Match::answer_to(self.label) } else { Match::request(self.label) }
    }
}

/// A point in the work of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayPoint {
    /// Its messages are on their way, and do not arrive.
    Publishing,
    /// Its messages are on their way. They arrive later, when another relay has published them.
    PublishingLate,
    /// Its messages are published, and it has not heard of it.
    Published,
}

/// A fault of the server's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    /// fsync fails with EIO; then the server is restarted.
    SyncFails,
    /// Writes fail with EIO; then the server is restarted.
    WriteFails,
    /// fsync takes most of a second.
    Slow,
    /// SIGKILL, and what was not synced is lost; then a restart.
    PowerCut,
}

/// How the leader of a store with replicas is lost, so that a replica takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaderLoss {
    /// SIGKILL; it returns as a replica.
    Kill,
    /// SIGSTOP until another leads, then SIGCONT: it still takes itself for the leader.
    Pause,
    /// By a command of the user's.
    Command,
}

/// The name of a fault that delays an order.
pub(crate) const OPEN_ORDER: &str = "order's transaction stays open, later ones commit";

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, then a restart.
    Kill(Target),
    /// A worker is stopped (SIGSTOP) past its lease, then continues (SIGCONT).
    Pause,
    /// SIGKILL of the relay at a point of its work, then a restart.
    KillRelay(RelayPoint),
    /// The transaction of an order has its number in the outbox and stays open, while orders with later numbers are committed.
    OpenOrder,
    /// One worker less for longer than a lease, then one more than before.
    Scale,
    /// Nothing passes between servers and store, in either direction; connections stay open.
    Partition,
    /// The store's leader is lost, and a replica takes over.
    Failover(LeaderLoss),
    /// A replica of the store receives and confirms nothing for a while.
    ReplicaCut,
    /// The server cannot make its files longer: writes fail as on a full disk. Then it is restarted.
    DiskFull,
    /// The server's disk breaks, by a library that is loaded into the process.
    Disk(DiskFault),
    /// The wall clocks of workers, producer, relay and of the embedded store's server are set, by the same library.
    ClockStep,
    /// Requests or answers are cut, dropped, delayed or duplicated.
    Wire(WireFault),
}

impl Fault {
    /// Whether a run needs it for its controls, whatever else it reaches.
    pub fn is_for_controls(&self) -> bool {
        matches!(self, Self::Kill(Target::Worker) | Self::KillRelay(_))
    }

    /// Whether it can change something in this workload.
    pub fn reaches(&self, workload: &Workload) -> bool {
        let claims = matches!(
            workload.shape,
            Shape::Worker(_) | Shape::Outbox | Shape::Own | Shape::Claims | Shape::Proxy(_)
        );
        match self {
            Self::Kill(Target::Producer) => workload.accounts() > 0,
            Self::Kill(Target::Proxy) => matches!(workload.shape, Shape::Proxy(_)),
            Self::Kill(Target::Worker) | Self::Pause | Self::Scale => {
                workload.has_queue() || workload.shape == Shape::Claims
            }
            Self::KillRelay(_) | Self::OpenOrder => workload.is_relayed(),
            Self::Wire(wire) => match (wire.side, wire.request) {
                (Side::Producers, _) => workload.has_queue() && !workload.is_relayed(),
                (Side::Workers, "DeleteMessage" | "ReceiveMessage") => workload.has_queue(),
                (Side::Workers, _) => claims,
                (Side::Callers, _) => matches!(workload.shape, Shape::Proxy(_)),
                (Side::Relays, _) => workload.is_relayed(),
                (Side::Store, _) => true,
            },
            _ => true,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill(Target::Producer) => f.write_str("kill -9 of the producer"),
            Self::Kill(Target::Worker) => f.write_str("kill -9 of a worker"),
            Self::Kill(Target::Server) => f.write_str("kill -9 of a server"),
            Self::Kill(Target::Proxy) => f.write_str("kill -9 of the proxies"),
            Self::Kill(Target::Store) => f.write_str("kill -9 of the store"),
            Self::Pause => f.write_str("pause of a worker past its lease"),
            Self::KillRelay(RelayPoint::Publishing) => f.write_str("kill -9 of the relay while it publishes"),
            Self::KillRelay(RelayPoint::PublishingLate) => {
                f.write_str("kill -9 of the relay, what it published arrives late")
            }
            Self::KillRelay(RelayPoint::Published) => {
                f.write_str("kill -9 of the relay after publishing, before marking")
            }
            Self::OpenOrder => write!(f, "an {OPEN_ORDER}"),
            Self::Scale => f.write_str("scale in to one worker, then out to three"),
            Self::Partition => f.write_str("partition between servers and store"),
            Self::Failover(LeaderLoss::Kill) => f.write_str("failover: kill -9 of the store's leader"),
            Self::Failover(LeaderLoss::Pause) => f.write_str("failover: pause of the store's leader"),
            Self::Failover(LeaderLoss::Command) => f.write_str("failover by your command"),
            Self::ReplicaCut => f.write_str("a replica of the store is cut off"),
            Self::DiskFull => f.write_str("disk full, then a restart of the server"),
            Self::Disk(DiskFault::SyncFails) => {
                f.write_str("fsync fails (EIO), then a restart of the server")
            }
            Self::Disk(DiskFault::WriteFails) => {
                f.write_str("writes fail (EIO), then a restart of the server")
            }
            Self::Disk(DiskFault::Slow) => f.write_str("slow disk"),
            Self::Disk(DiskFault::PowerCut) => {
                f.write_str("power cut of the server: what was not synced is lost")
            }
            Self::ClockStep => f.write_str("step of the wall clocks"),
            Self::Wire(wire) => write_wire(f, wire.request, wire.answer, wire.action),
        }
    }
}

/// The name of a fault on the wire.
pub(crate) fn write_wire(
    f: &mut fmt::Formatter<'_>,
    request: &str,
    answer: bool,
    action: Action,
) -> fmt::Result {
    let done = match action {
        Action::Cut => "cut",
        Action::Drop => "dropped",
        Action::Delay(time) if time > REORDER => "delayed past the timeout",
        Action::Delay(_) => "delayed, others overtake it",
        Action::Duplicate => "duplicated",
        Action::Repeat => "repeated later",
        Action::Hold => "held",
    };
    let what = if answer { "response" } else { "request" };
    write!(f, "{request}: {what} {done}")
}

/// Longer than the timeout of a request: the caller has given up, and the request still arrives.
pub(crate) const LATE: Action = Action::Delay(Duration::from_millis(1_800));

/// Shorter than any timeout: what is sent later on other connections arrives earlier.
const REORDER: Duration = Duration::from_millis(150);
const OVERTAKEN: Action = Action::Delay(REORDER);

const fn wire(side: Side, request: &'static str, label: &'static str, answer: bool, action: Action) -> Fault {
    Fault::Wire(WireFault { side, request, label, answer, action })
}

/// Each fault that a round has. Kills are more frequent: each hits only what is under way at that moment.
pub const ROUND: [Fault; 44] = [
    Fault::Kill(Target::Worker),
    Fault::Kill(Target::Worker),
    Fault::Kill(Target::Worker),
    Fault::Kill(Target::Producer),
    Fault::Kill(Target::Server),
    Fault::Kill(Target::Proxy),
    Fault::Kill(Target::Store),
    Fault::KillRelay(RelayPoint::Publishing),
    Fault::KillRelay(RelayPoint::PublishingLate),
    Fault::KillRelay(RelayPoint::Published),
    Fault::OpenOrder,
    Fault::Pause,
    Fault::Scale,
    Fault::Partition,
    Fault::Failover(LeaderLoss::Kill),
    Fault::Failover(LeaderLoss::Pause),
    Fault::Failover(LeaderLoss::Command),
    Fault::ReplicaCut,
    Fault::DiskFull,
    Fault::Disk(DiskFault::SyncFails),
    Fault::Disk(DiskFault::WriteFails),
    Fault::Disk(DiskFault::Slow),
    Fault::Disk(DiskFault::PowerCut),
    Fault::ClockStep,
    wire(Side::Producers, "SendMessage", "/messages", true, Action::Cut),
    wire(Side::Producers, "SendMessage", "/messages", false, Action::Cut),
    wire(Side::Producers, "SendMessage", "/messages", false, Action::Duplicate),
    wire(Side::Producers, "SendMessage", "/messages", true, Action::Drop),
    wire(Side::Producers, "SendMessage", "/messages", false, LATE),
    wire(Side::Callers, "request through the proxy", EFFECTS, true, Action::Cut),
    wire(Side::Workers, "DeleteMessage", "/settle", true, Action::Cut),
    wire(Side::Workers, "DeleteMessage", "/settle", false, Action::Duplicate),
    wire(Side::Workers, "DeleteMessage", "/settle", false, LATE),
    wire(Side::Workers, "ReceiveMessage", "/receive", true, Action::Cut),
    wire(Side::Workers, "claim", "/v1/claims 200", true, Action::Cut),
    wire(Side::Workers, "complete", "/claims/end", true, Action::Cut),
    wire(Side::Workers, "complete", "/claims/end", false, LATE),
    wire(Side::Store, "COMMIT", "COMMIT", true, Action::Cut),
    wire(Side::Store, "COMMIT", "COMMIT", false, Action::Cut),
    wire(Side::Store, "EVALSHA", "EVALSHA", true, Action::Cut),
    wire(Side::Store, "EVALSHA", "EVALSHA", false, Action::Cut),
    wire(Side::Store, "any call of the store", "", true, Action::Cut),
    wire(Side::Store, "any call of the store", "", false, OVERTAKEN),
    wire(Side::Store, "any call of the store", "", true, OVERTAKEN),
];

/// How long frames are hit.
pub const WINDOW: Duration = Duration::from_millis(1_200);
/// Frames hit in each part of a window.
pub const HITS_PER_PART: u64 = 16;
/// The parts of a window: a retry that follows at once is hit by the next part at most.
pub const PART: Duration = Duration::from_millis(100);

/// How long the effects of a fault are watched after it.
pub fn aftermath(fault: Fault) -> Duration {
    match fault {
        // What was under way returns when its lease ends.
        Fault::Kill(Target::Worker | Target::Server | Target::Store)
        | Fault::Failover(_)
        | Fault::DiskFull
        | Fault::Disk(_) => Duration::from_millis(LEASE_MS + 600),
        Fault::Kill(Target::Producer | Target::Proxy) => Duration::from_millis(300),
        // The dead relay's lease has to end before another one publishes.
        Fault::KillRelay(_) => Duration::from_millis(1_500),
        Fault::OpenOrder | Fault::Pause | Fault::Scale => Duration::from_millis(500),
        Fault::Partition | Fault::ReplicaCut | Fault::ClockStep => Duration::from_secs(1),
        Fault::Wire(wire) if matches!(wire.action, Action::Delay(_) | Action::Drop) => Duration::from_secs(1),
        Fault::Wire(_) => Duration::from_millis(200),
    }
}

/// How long a request that the last fault has delayed may still be on its way when that fault's aftermath is over.
pub const STILL_ON_ITS_WAY: Duration = Duration::from_secs(1);

/// How long there is one worker, and how long there are three.
pub const SCALED: Duration = Duration::from_millis(LEASE_MS * 13 / 10);

/// How long a partition lasts: past leases, and past the timeout of a request.
pub const PARTITIONED: Duration = Duration::from_millis(2_500);

/// How long a replica is cut off: past leases, and past the timeout of a request.
pub const REPLICA_CUT: Duration = Duration::from_millis(2_500);

/// How long the disk is slow.
pub const SLOW: Duration = Duration::from_millis(2_500);

/// Steps of the clocks in one fault, so that some fall into a short lease.
pub const CLOCK_STEPS: u32 = 6;
/// Time between two steps: longer than the lease of a claim on a key that several contend for.
pub const CLOCK_STEP: Duration = Duration::from_millis(200);

/// Offsets of wall clocks to the true time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockStep {
    /// Of clients with an even number, and of those with an odd one: up to an hour ahead or behind.
    pub clients_ms: [i64; 2],
    /// Of the server of the embedded store: up to a minute, which is many leases, and less than what deduplication
    /// remembers. A store that is opened with its clock ahead takes what is over by that clock for over.
    pub server_ms: i64,
}

impl ClockStep {
    /// The next offsets.
    pub fn random(random: &mut fastrand::Rng) -> Self {
        let mut client = || random.i64(-3_600_000..3_600_000);
        Self { clients_ms: [client(), client()], server_ms: random.i64(-60_000..60_000) }
    }
}

/// How long the disk is full, or fails.
pub const FULL: Duration = Duration::from_millis(800);

/// How long a worker is stopped.
pub fn pause(random: &mut fastrand::Rng) -> Duration {
    Duration::from_millis(LEASE_MS * 13 / 10 + random.u64(..LEASE_MS / 2))
}

/// The faults of a run in their order: whole rounds, each shuffled.
pub struct Schedule<F = Fault> {
    random: fastrand::Rng,
    round: Vec<F>,
    left: Vec<F>,
}

impl<F: Copy> Schedule<F> {
    /// The schedule of a seed. A round must not be empty.
    pub fn new(seed: u64, round: Vec<F>) -> Self {
        assert!(!round.is_empty(), "a round is not empty");
        Self { random: fastrand::Rng::with_seed(seed), round, left: Vec::new() }
    }

    /// The next fault.
    pub fn next_fault(&mut self) -> F {
        if self.left.is_empty() {
            self.left.clone_from(&self.round);
            self.random.shuffle(&mut self.left);
        }
        self.left.pop().expect("a round is not empty")
    }

    /// For the details of a fault: which of two workers, how long.
    pub fn random(&mut self) -> &mut fastrand::Rng {
        &mut self.random
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_schedule_and_each_round_has_every_fault() {
        let take = |seed| {
            let mut schedule = Schedule::new(seed, ROUND.to_vec());
            (0..ROUND.len() * 2).map(|_| schedule.next_fault()).collect::<Vec<_>>()
        };
        assert_eq!(take(7), take(7));
        assert_ne!(take(7), take(8));
        for round in take(7).chunks(ROUND.len()) {
            assert!(ROUND.iter().all(|fault| round.contains(fault)));
        }
    }

    #[test]
    fn each_fault_reaches_a_workload_and_some_do_not_reach_others() {
        use crate::workload::ALL;
        let ours = || ALL.iter().filter(|workload| !workload.is_control());
        for fault in ROUND {
            assert!(ours().any(|workload| fault.reaches(workload)), "{fault}");
        }
        let reaching = |name: &str| {
            let workload = Workload::named(name).unwrap();
            ROUND.iter().filter(|fault| fault.reaches(&workload)).map(ToString::to_string).collect::<Vec<_>>()
        };
        let (charges, claims) = (reaching("charges"), reaching("claims"));
        assert!(
            charges.iter().any(|fault| fault == "request through the proxy: response cut"),
            "{charges:?}"
        );
        assert!(
            !charges.iter().any(|fault| fault.contains("Message") || fault.contains("pause of a worker"))
        );
        assert!(!claims.iter().any(|fault| fault.contains("proxy: ") || fault.contains("of the producer")));
        assert!(charges.iter().chain(&claims).filter(|fault| fault.contains("claim: ")).count() == 2);
    }

    #[test]
    fn a_pause_is_longer_than_the_lease() {
        let mut random = fastrand::Rng::with_seed(1);
        assert!((0..100).all(|_| pause(&mut random) > Duration::from_millis(LEASE_MS)));
    }
}
