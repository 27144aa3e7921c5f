//! Armed faults: which operation fails next.

/// A fault that fires once, at the nth operation after it was set.
#[derive(Debug, Default)]
pub(crate) struct OneShotFault(u64);

impl OneShotFault {
    /// `nth` is 1 for the very next operation; 0 disarms.
    pub(crate) fn set(&mut self, nth: u64) {
        self.0 = nth;
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0 > 0
    }

    /// Counts one operation; returns whether the fault fires at it.
    fn hit(&mut self) -> bool {
        if self.0 == 0 {
            return false;
        }
        self.0 -= 1;
        self.0 == 0
    }
}

/// All faults that a test can arm.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) read: OneShotFault,
    pub(crate) write: OneShotFault,
    pub(crate) short_write: OneShotFault,
    pub(crate) sync: OneShotFault,
    pub(crate) power_loss: OneShotFault,
    pub(crate) process_crash: OneShotFault,
    /// Only files whose name ends in this are counted and affected.
    pub(crate) suffix: String,
}

/// A crash at the current operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crash {
    Power,
    Process,
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    Done,
    Failed,
    Short,
}

impl Faults {
    pub(crate) fn any_set(&self) -> bool {
        [&self.read, &self.write, &self.short_write, &self.sync, &self.power_loss, &self.process_crash]
            .iter()
            .any(|fault| fault.is_set())
    }

    pub(crate) fn on_read(&mut self, name: &str) -> bool {
        self.covers(name) && self.read.hit()
    }

    pub(crate) fn on_write(&mut self, name: &str) -> WriteOutcome {
        if !self.covers(name) {
            return WriteOutcome::Done;
        }
        // Count the write for both faults, even if only one fires: each has its own start.
        match (self.write.hit(), self.short_write.hit()) {
            (true, _) => WriteOutcome::Failed,
            (false, true) => WriteOutcome::Short,
            (false, false) => WriteOutcome::Done,
        }
    }

    pub(crate) fn on_sync(&mut self, name: &str) -> bool {
        self.covers(name) && self.sync.hit()
    }

    /// Counts an operation that changes the disk: write, truncate, sync or delete.
    pub(crate) fn on_change(&mut self, name: &str) -> Option<Crash> {
        if !self.covers(name) {
            return None;
        }
        match (self.power_loss.hit(), self.process_crash.hit()) {
            (true, _) => Some(Crash::Power),
            (false, true) => Some(Crash::Process),
            (false, false) => None,
        }
    }

    fn covers(&self, name: &str) -> bool {
        name.ends_with(&self.suffix)
    }
}
