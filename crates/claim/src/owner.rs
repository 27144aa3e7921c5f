//! Owners: nonces that are unique among all claims of all processes.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::Owner;

static PROCESS: LazyLock<u64> = LazyLock::new(|| {
    let mut nonce = [0u8; 8];
    // If the operating system has no random numbers, fall back to those seeded by time and address.
    getrandom::fill(&mut nonce).map_or_else(|_| fastrand::u64(..), |()| u64::from_le_bytes(nonce))
});
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Generates the owners of one holder's claims: its name, a nonce of this process, and a number. A repeated claim by
/// the same owner gets the same grant, so each claim has its own owner.
#[derive(Debug, Clone)]
pub struct Owners {
    prefix: String,
}

impl Owners {
    /// Owners with this name as a prefix. Only visible ASCII characters are kept, at most 64.
    pub fn new(name: &str) -> Self {
        let name: String = name.chars().filter(char::is_ascii_graphic).take(64).collect();
        Self { prefix: format!("{name}-{:016x}", *PROCESS) }
    }

    /// The name with the process's nonce: the same for all of its owners.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A new owner.
    pub fn next(&self) -> Owner {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Owner::new(format!("{}/{number}", self.prefix)).expect("visible characters, and not too many")
    }
}
