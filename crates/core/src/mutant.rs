//! Known-bad variants of Hapax, to see that `hapax verify` finds them. Only a build with the feature `mutants`, which no
//! release has, contains them; the variable `HAPAX_MUTANT` selects one.

/// The variable that selects a variant.
pub const VARIABLE: &str = "HAPAX_MUTANT";

/// Whether this variant is selected.
#[cfg(feature = "mutants")]
pub fn is(name: &str) -> bool {
    use std::sync::LazyLock;
    static SELECTED: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());
    SELECTED.as_deref() == Some(name)
}

/// Whether this variant is selected: never, in this build.
#[cfg(not(feature = "mutants"))]
#[inline]
pub const fn is(_name: &str) -> bool {
    false
}

/// The outcome of the call before, which is that of another key.
#[cfg(feature = "mutants")]
pub fn previous(outcome: &crate::RecordedOutcome) -> crate::RecordedOutcome {
    use std::sync::{Mutex, PoisonError};
    static LAST: Mutex<Option<crate::RecordedOutcome>> = Mutex::new(None);
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).replace(outcome.clone());
    last.unwrap_or_else(|| outcome.clone())
}

/// Time by the wall clock, which may be set while a lease lasts: a step ahead is taken for time that has passed, and one back for
/// none.
#[cfg(feature = "mutants")]
pub fn wall_us() -> u64 {
    use std::sync::{Mutex, PoisonError};
    use std::time::{SystemTime, UNIX_EPOCH};
    static LAST: Mutex<(u64, u64)> = Mutex::new((0, 0));
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let (before, passed) = *last;
    let passed = if before == 0 { 0 } else { passed + wall.saturating_sub(before) };
    *last = (wall, passed);
    passed
}
