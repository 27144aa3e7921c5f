//! When to look again: at once while there is something, soon after, and less often when nothing comes.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(5);
/// Between two looks while something came recently.
const RECENT: Duration = Duration::from_millis(20);
/// How long "recently" is, in looks without a result.
const RECENT_LOOKS: u32 = 1_000;

#[derive(Debug)]
pub struct Pace {
    idle_looks: u32,
    longest: Duration,
}

impl Pace {
    pub fn new(longest: Duration) -> Self {
        Self { idle_looks: 0, longest }
    }

    /// Something was found.
    pub fn found(&mut self) {
        self.idle_looks = 0;
    }

    /// Nothing was found: how long to wait.
    pub fn idle(&mut self) -> Duration {
        self.idle_looks = self.idle_looks.saturating_add(1);
        let wait = SHORTEST * self.idle_looks.min(4);
        if self.idle_looks < RECENT_LOOKS { wait.min(RECENT).min(self.longest) } else { self.longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_outbox_is_looked_at_less_and_less() {
        let mut pace = Pace::new(Duration::from_millis(200));
        let waits: Vec<u128> = (0..5).map(|_| pace.idle().as_millis()).collect();
        assert_eq!(waits, [5, 10, 15, 20, 20]);
        for _ in 0..RECENT_LOOKS {
            pace.idle();
        }
        assert_eq!(pace.idle(), Duration::from_millis(200));
        pace.found();
        assert_eq!(pace.idle(), SHORTEST);
    }
}
