//! The store's time. It never goes back, even if the wall clock does.

use std::sync::Arc;

use hapax_core::Clock;

/// A point in the store's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Now {
    pub us: u64,
}

impl Now {
    pub fn ms(self) -> u64 {
        self.us / 1000
    }
}

/// `max(persisted, wall clock at open) + elapsed monotonic time`.
pub(crate) struct StoreTime {
    clock: Arc<dyn Clock>,
    base_us: u64,
    start_us: u64,
}

impl StoreTime {
    pub fn start(clock: Arc<dyn Clock>, persisted_ms: u64) -> Self {
        let base_us = clock.wall_ms().max(persisted_ms) * 1000;
        let start_us = clock.monotonic_us();
        Self { clock, base_us, start_us }
    }

    pub fn now(&self) -> Now {
        Now { us: self.base_us + (self.clock.monotonic_us() - self.start_us) }
    }

    /// How long a thread may sleep until the store's time is `until_ms`; `None` if the clock is moved by hand.
    pub fn sleep_until(&self, until_ms: u64) -> Option<std::time::Duration> {
        self.clock.sleep_for((until_ms * 1000).saturating_sub(self.now().us))
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::ManualClock;

    use super::*;

    #[test]
    fn time_goes_on_from_what_was_persisted_when_the_wall_clock_was_set_back() {
        let clock = Arc::new(ManualClock::at_ms(5_000));
        let time = StoreTime::start(clock.clone(), 9_000);
        assert_eq!(time.now().ms(), 9_000);
        clock.advance_ms(10);
        clock.set_wall_ms(1);
        assert_eq!(time.now().ms(), 9_010);
    }
}
