//! A simulated disk, as a SQLite VFS, for crash and fault tests that one seed reproduces.
//!
//! Files live in memory. For each the disk knows what the process reads (*live*), what is on the medium (*durable*),
//! and each write and truncate between the two. `fsync` carries the latter over; [`SimDisk::power_loss`] lets the seed
//! decide which of them arrived, sector by sector; [`SimDisk::process_crash`] keeps them all, as an operating system
//! does that survives. After either, handles of before are dead and the files can be opened anew.
//!
//! ```
//! use hapax_simdisk::SimDisk;
//! use rusqlite::{Connection, OpenFlags};
//!
//! let disk = SimDisk::new(42);
//! let open = || Connection::open_with_flags_and_vfs("a.db", OpenFlags::default(), disk.vfs_name());
//! let db = open()?;
//! db.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE t (n); INSERT INTO t VALUES (1)")?;
//! disk.power_loss();
//! assert!(db.execute("INSERT INTO t VALUES (2)", []).is_err());
//! assert_eq!(open()?.query_row("SELECT sum(n) FROM t", [], |row| row.get::<_, i64>(0))?, 1);
//! # Ok::<(), rusqlite::Error>(())
//! ```
//!
//! # What the model assumes
//! - A torn write damages no byte outside it (SQLite's powersafe overwrite, as its unix VFS claims); within it, any
//!   subset of 512-byte sectors may arrive, in any order relative to other unsynced writes.
//! - There is one directory. It is synced by the first honest fsync of a new file and by a delete for which SQLite asks
//!   it; until then power loss may undo that a file was created or deleted.
//! - The WAL's shared memory is never on the medium.
//!
//! # What is not simulated
//! Directories, permissions, memory-mapped reads, and time: the clock that SQLite asks stands still but for its naps.

#![warn(missing_docs)]

mod disk;
mod faults;
mod io;
mod locks;
mod medium;
mod vfs;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::ffi;

use crate::disk::Disk;
use crate::faults::{Crash, Faults};
use crate::vfs::Registration;

/// A disk in memory. Clones are the same disk.
///
/// Every `..._at(n)` fault counts operations of its kind from the call on, `n = 1` being the next, fires once, and
/// replaces what was set before; 0 disarms it. [`SimDisk::only_files_ending_in`] narrows what is counted.
#[derive(Debug, Clone)]
pub struct SimDisk(Arc<DiskState>);

/// What the disk and its open files share.
#[derive(Debug)]
struct DiskState {
    disk: Mutex<Disk>,
    slept_us: AtomicU64,
    registration: Registration,
}

impl DiskState {
    /// A panic while the lock was held has been answered as an I/O error; the disk goes on.
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What has been asked of the disk so far, failed requests included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls to read.
    pub reads: u64,
    /// Calls to write.
    pub writes: u64,
    /// Calls to fsync, honest or not.
    pub syncs: u64,
    /// Bytes that reads found.
    pub bytes_read: u64,
    /// Bytes that writes left in a file.
    pub bytes_written: u64,
}

impl SimDisk {
    /// An empty disk, registered with SQLite under a name of its own.
    pub fn new(seed: u64) -> Self {
        Self(Arc::new_cyclic(|disk| DiskState {
            disk: Mutex::new(Disk::new(seed)),
            slept_us: AtomicU64::new(0),
            registration: Registration::new(disk),
        }))
    }

    /// What to open connections with. It is valid while a clone of this disk, or a connection to it, is alive.
    pub fn vfs_name(&self) -> &str {
        self.0.registration.name()
    }

    // Crashes.

    /// The power fails now. Of each unsynced change the seed decides what reached the medium; handles die, locks and
    /// shared memory are gone.
    pub fn power_loss(&self) {
        self.0.lock().crash(Crash::Power);
    }

    /// The process dies now (kill -9) and the operating system lives on: nothing written is lost, handles die, locks
    /// and shared memory are gone. What was unsynced still is.
    pub fn process_crash(&self) {
        self.0.lock().crash(Crash::Process);
    }

    /// Power fails during the nth change (write, truncate, fsync or delete) from now, which is itself unsynced.
    pub fn power_loss_at(&self, nth: u64) {
        self.0.lock().faults.power_loss.set(nth);
    }

    /// The process dies during the nth change (write, truncate, fsync or delete) from now. A write or truncate is done
    /// by then; an fsync or delete is not.
    pub fn process_crash_at(&self, nth: u64) {
        self.0.lock().faults.process_crash.set(nth);
    }

    // Faults.

    /// The nth fsync from now fails with `SQLITE_IOERR_FSYNC`, and what it should have saved never becomes durable: as
    /// on Linux, later fsyncs succeed without it, and it is read as if all were well until power is lost.
    pub fn fail_sync_at(&self, nth: u64) {
        self.0.lock().faults.sync.set(nth);
    }

    /// While true, fsync answers OK and makes nothing durable.
    pub fn lie_on_sync(&self, lie: bool) {
        self.0.lock().sync_lies = lie;
    }

    /// The nth write from now fails with `SQLITE_IOERR_WRITE` and writes nothing.
    pub fn fail_write_at(&self, nth: u64) {
        self.0.lock().faults.write.set(nth);
    }

    /// The nth write from now writes the first half of its bytes and fails with `SQLITE_FULL`.
    pub fn short_write_at(&self, nth: u64) {
        self.0.lock().faults.short_write.set(nth);
    }

    /// The nth read from now fails with `SQLITE_IOERR_READ`.
    pub fn fail_read_at(&self, nth: u64) {
        self.0.lock().faults.read.set(nth);
    }

    /// From now on the `..._at` faults count and strike only files whose name ends in `suffix`, such as `-wal`; all
    /// files with an empty one.
    pub fn only_files_ending_in(&self, suffix: &str) {
        suffix.clone_into(&mut self.0.lock().faults.suffix);
    }

    /// True while a fault that was set has not fired: how a sweep over `n` knows that it went past the end.
    pub fn faults_pending(&self) -> bool {
        self.0.lock().faults.any_set()
    }

    /// Disarms every `..._at` fault, widens them to all files again, and makes fsync honest.
    pub fn clear_faults(&self) {
        let mut disk = self.0.lock();
        disk.faults = Faults::default();
        disk.sync_lies = false;
    }

    // Space.

    /// The size of the disk in bytes; none for no limit, which is the default. A write that would grow past it writes
    /// what fits and fails with `SQLITE_FULL`.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.0.lock().capacity_bytes = bytes;
    }

    /// What is left of the capacity; `u64::MAX` without one.
    pub fn free_bytes(&self) -> u64 {
        self.0.lock().free_bytes()
    }

    // Looking in from outside.

    /// The names of all files, sorted.
    pub fn files(&self) -> Vec<String> {
        self.0.lock().names()
    }

    /// A file's live content.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        self.0.lock().content(path).map(<[u8]>::to_vec)
    }

    /// Puts a file on the disk, durably, in place of any of that name. For files that no connection has open.
    pub fn install(&self, path: &str, bytes: &[u8]) {
        self.0.lock().install(path, bytes);
    }

    /// The offsets at which `needle` occurs in the live content; overlapping ones too.
    pub fn find(&self, path: &str, needle: &[u8]) -> Vec<u64> {
        if needle.is_empty() {
            return Vec::new();
        }
        let disk = self.0.lock();
        let windows = disk.content(path).unwrap_or_default().windows(needle.len());
        windows.enumerate().filter(|(_, window)| *window == needle).map(|(at, _)| at as u64).collect()
    }

    /// Inverts a byte, on the medium too; false if the file has no such byte. A connection that has the page in its
    /// cache will not see it.
    pub fn flip_byte(&self, path: &str, offset: u64) -> bool {
        self.0.lock().flip(path, offset)
    }

    /// What has been asked of the disk since it was made.
    pub fn counters(&self) -> Counters {
        self.0.lock().counters
    }
}

/// Seeds SQLite's own random numbers, for the whole process; 0 returns to real ones.
///
/// They are in the WAL's salts, so without this two runs decide alike what is lost but differ in bytes. Other tests of
/// the process draw from the same numbers: a test that compares bytes wants a test binary to itself.
pub fn seed_sqlite_randomness(seed: u32) {
    // SAFETY: with this op the variadic arguments are an int and a database, which may be null.
    unsafe {
        ffi::sqlite3_test_control(
            ffi::SQLITE_TESTCTRL_PRNG_SEED,
            seed as std::ffi::c_int,
            std::ptr::null_mut::<ffi::sqlite3>(),
        );
    }
}
