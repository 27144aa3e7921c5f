//! A simulated disk, as a SQLite VFS, for crash and fault tests that are reproducible from one seed.
//!
//! Files are in memory. For each file the disk holds the content that the process reads (*live*), the content on the
//! medium (*durable*), and each write and truncate between the two. `fsync` applies these to the medium. At a
//! [`SimDisk::power_loss`] the seed decides, sector by sector, which of them were applied; a [`SimDisk::process_crash`]
//! keeps them all, because the operating system survives. After either, all earlier handles are invalid and the files
//! can be opened again.
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
//! - There is one directory. It is synced by the first successful fsync of a new file and by a delete with SQLite's
//!   directory-sync flag; until then a power loss may undo the creation or deletion of a file.
//! - The WAL's shared memory is never on the medium.
//!
//! # What is not simulated
//! Directories, permissions, memory-mapped reads, and time: the clock that SQLite reads advances only by SQLite's
//! sleeps.

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

/// A disk in memory. Clones share the same disk.
///
/// Every `..._at(n)` fault counts operations of its kind from the call on (`n = 1` is the next one), fires once, and
/// replaces an earlier setting; 0 disarms it. [`SimDisk::only_files_ending_in`] restricts the counted files.
#[derive(Debug, Clone)]
pub struct SimDisk(Arc<DiskState>);

/// State shared by the disk and its open files.
#[derive(Debug)]
struct DiskState {
    disk: Mutex<Disk>,
    slept_us: AtomicU64,
    registration: Registration,
}

impl DiskState {
    /// A panic while the lock was held has been reported as an I/O error; the disk continues.
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counters of the disk's operations, including failed ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls to read.
    pub reads: u64,
    /// Calls to write.
    pub writes: u64,
    /// Calls to fsync, including those that fail or lie.
    pub syncs: u64,
    /// Bytes returned by reads.
    pub bytes_read: u64,
    /// Bytes that writes stored in a file.
    pub bytes_written: u64,
}

impl SimDisk {
    /// An empty disk, registered with SQLite under a unique name.
    pub fn new(seed: u64) -> Self {
        Self(Arc::new_cyclic(|disk| DiskState {
            disk: Mutex::new(Disk::new(seed)),
            slept_us: AtomicU64::new(0),
            registration: Registration::new(disk),
        }))
    }

    /// The VFS name to open connections with. Valid as long as a clone of this disk, or a connection to it, exists.
    pub fn vfs_name(&self) -> &str {
        self.0.registration.name()
    }

    // Crashes.

    /// The power fails now. For each unsynced change the seed decides which part reached the medium; handles become
    /// invalid, locks and shared memory are lost.
    pub fn power_loss(&self) {
        self.0.lock().crash(Crash::Power);
    }

    /// The process dies now (kill -9) and the operating system survives: no written data is lost, handles become
    /// invalid, locks and shared memory are lost. Unsynced changes stay unsynced.
    pub fn process_crash(&self) {
        self.0.lock().crash(Crash::Process);
    }

    /// The power fails during the nth change (write, truncate, fsync or delete) from now; that change is unsynced.
    pub fn power_loss_at(&self, nth: u64) {
        self.0.lock().faults.power_loss.set(nth);
    }

    /// The process dies during the nth change (write, truncate, fsync or delete) from now. A write or truncate has
    /// taken effect by then; an fsync or delete has not.
    pub fn process_crash_at(&self, nth: u64) {
        self.0.lock().faults.process_crash.set(nth);
    }

    // Faults.

    /// The nth fsync from now fails with `SQLITE_IOERR_FSYNC`, and its data never becomes durable: as on Linux, later
    /// fsyncs succeed without it, and reads return it normally until a power loss.
    pub fn fail_sync_at(&self, nth: u64) {
        self.0.lock().faults.sync.set(nth);
    }

    /// While true, fsync returns OK and makes nothing durable.
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

    /// From now on the `..._at` faults apply only to files whose name ends in `suffix`, such as `-wal`; an empty suffix
    /// means all files.
    pub fn only_files_ending_in(&self, suffix: &str) {
        suffix.clone_into(&mut self.0.lock().faults.suffix);
    }

    /// Whether an armed fault has not fired yet: a loop over `n` ends when the fault was not reached.
    pub fn faults_pending(&self) -> bool {
        self.0.lock().faults.any_set()
    }

    /// Disarms every `..._at` fault, applies them to all files again, and makes fsync truthful.
    pub fn clear_faults(&self) {
        let mut disk = self.0.lock();
        disk.faults = Faults::default();
        disk.sync_lies = false;
    }

    // Space.

    /// The size of the disk in bytes; `None` (default): no limit. A write beyond it writes the part that fits and fails
    /// with `SQLITE_FULL`.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.0.lock().capacity_bytes = bytes;
    }

    /// The free part of the capacity in bytes; `u64::MAX` without a capacity.
    pub fn free_bytes(&self) -> u64 {
        self.0.lock().free_bytes()
    }

    // Inspection by tests.

    /// The names of all files, sorted.
    pub fn files(&self) -> Vec<String> {
        self.0.lock().names()
    }

    /// A file's live content.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        self.0.lock().content(path).map(<[u8]>::to_vec)
    }

    /// Puts a durable file on the disk; replaces an existing file of that name. Only for files that are not open.
    pub fn install(&self, path: &str, bytes: &[u8]) {
        self.0.lock().install(path, bytes);
    }

    /// The offsets of `needle` in the live content, including overlapping occurrences.
    pub fn find(&self, path: &str, needle: &[u8]) -> Vec<u64> {
        if needle.is_empty() {
            return Vec::new();
        }
        let disk = self.0.lock();
        let windows = disk.content(path).unwrap_or_default().windows(needle.len());
        windows.enumerate().filter(|(_, window)| *window == needle).map(|(at, _)| at as u64).collect()
    }

    /// Inverts a byte, also on the medium; false if the file is shorter. A connection that has the page in its cache
    /// does not see the change.
    pub fn flip_byte(&self, path: &str, offset: u64) -> bool {
        self.0.lock().flip(path, offset)
    }

    /// The counters since the disk was created.
    pub fn counters(&self) -> Counters {
        self.0.lock().counters
    }
}

/// Seeds SQLite's own random numbers, for the whole process; 0 restores real randomness.
///
/// The WAL's salts contain them. Without this, two runs with the same seed lose the same data but differ in bytes. All
/// tests of the process share these numbers, so a test that compares bytes needs its own test binary.
pub fn seed_sqlite_randomness(seed: u32) {
    // SAFETY: for this operation the variadic arguments are an int and a database, which may be null.
    unsafe {
        ffi::sqlite3_test_control(
            ffi::SQLITE_TESTCTRL_PRNG_SEED,
            seed as std::ffi::c_int,
            std::ptr::null_mut::<ffi::sqlite3>(),
        );
    }
}
