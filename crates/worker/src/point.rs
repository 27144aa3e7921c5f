//! Named points of a delivery's processing, where tests stop or kill the process.

use std::fmt;
use std::future::pending;
use std::str::FromStr;
use std::sync::Arc;

use tokio::sync::Notify;

/// A point that a delivery passes in its worker, in order. A testing aid: see
/// [`WorkerBuilder::hook`](crate::WorkerBuilder::hook).
///
/// ```
/// use hapax_worker::Point;
/// assert_eq!("after-effect".parse(), Ok(Point::AfterEffect));
/// assert_eq!(Point::ALL.len(), 10);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The delivery was received; nothing else has happened.
    AfterReceive,
    /// The claim was granted; the handler has not started (`effectively-once`).
    AfterClaim,
    /// The handler is about to start.
    BeforeEffect,
    /// Inside the handler, where it calls [`Cx::effect_point`](crate::Cx::effect_point).
    InEffect,
    /// The handler has returned; nothing is recorded.
    AfterEffect,
    /// Business write and outcome are written; their transaction is not committed (`transactional`).
    BeforeCommit,
    /// The transaction is committed; the delivery is not settled (`transactional`).
    AfterCommit,
    /// The outcome is about to be recorded and the delivery settled.
    BeforeSettle,
    /// The claim has ended; the delivery is not settled (`effectively-once` with its ledger in another store).
    AfterComplete,
    /// The delivery is settled.
    AfterSettle,
}

impl Point {
    /// All points, in the order in which a delivery passes them.
    pub const ALL: [Self; 10] = [
        Self::AfterReceive,
        Self::AfterClaim,
        Self::BeforeEffect,
        Self::InEffect,
        Self::AfterEffect,
        Self::BeforeCommit,
        Self::AfterCommit,
        Self::BeforeSettle,
        Self::AfterComplete,
        Self::AfterSettle,
    ];

    /// The point's name, for example `after-effect`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AfterReceive => "after-receive",
            Self::AfterClaim => "after-claim",
            Self::BeforeEffect => "before-effect",
            Self::InEffect => "in-effect",
            Self::AfterEffect => "after-effect",
            Self::BeforeCommit => "before-commit",
            Self::AfterCommit => "after-commit",
            Self::BeforeSettle => "before-settle",
            Self::AfterComplete => "after-complete",
            Self::AfterSettle => "after-settle",
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|point| point.name() == name);
        found.ok_or_else(|| format!("{name:?} is no point; use one of: {}", names()))
    }
}

/// Called at every point that a delivery passes.
pub type Hook = Arc<dyn Fn(Point) + Send + Sync>;

/// Stops at a point and never continues, like a crash, for tests inside one process.
pub(crate) struct Halt {
    pub at: Point,
    pub reached: Notify,
}

/// The observers of points.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    pub hook: Option<Hook>,
    pub halt: Option<Arc<Halt>>,
    /// Receives the result of each delivery.
    pub observer: Option<crate::testing::Observer>,
}

impl Hooks {
    /// Reports that a delivery passes a point.
    pub async fn pass(&self, point: Point) {
        if let Some(hook) = &self.hook {
            hook(point);
        }
        if let Some(halt) = self.halt.as_ref().filter(|halt| halt.at == point) {
            halt.reached.notify_one();
            pending::<()>().await;
        }
    }

    /// Reports a point from a thread that may block. `false`: the process is treated as dead from here.
    pub fn pass_blocking(&self, point: Point) -> bool {
        if let Some(hook) = &self.hook {
            hook(point);
        }
        match self.halt.as_ref().filter(|halt| halt.at == point) {
            Some(halt) => {
                halt.reached.notify_one();
                false
            }
            None => true,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.hook.is_none() && self.halt.is_none()
    }
}
