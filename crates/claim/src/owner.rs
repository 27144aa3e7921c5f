//! Who asks: a nonce that no other claim of any process has.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::Owner;

static PROCESS: LazyLock<u64> = LazyLock::new(|| {
    let mut nonce = [0u8; 8];
    // Without random numbers of the operating system, those seeded by time and address must do.
    getrandom::fill(&mut nonce).map_or_else(|_| fastrand::u64(..), |()| u64::from_le_bytes(nonce))
});
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Makes the owners of one holder's claims: its name, a nonce of this process, and a number. The same owner asking
/// again gets the same claim, so each claim has an owner of its own.
#[derive(Debug, Clone)]
pub struct Owners {
    prefix: String,
}

impl Owners {
    /// Owners under this name; of more than 64 visible ASCII characters, or others, only those that fit are kept.
    pub fn new(name: &str) -> Self {
        let name: String = name.chars().filter(char::is_ascii_graphic).take(64).collect();
        Self { prefix: format!("{name}-{:016x}", *PROCESS) }
    }

    /// The name with the process's nonce: the same for all of its owners.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// An owner that was never used.
    pub fn next(&self) -> Owner {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Owner::new(format!("{}/{number}", self.prefix)).expect("visible characters, and not too many")
    }
}
