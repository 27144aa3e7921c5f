//! Locks a folder, so that only one process opens it.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::OpenError;

/// The file inside a store's folder whose lock is the right to open it.
const LOCK: &str = "hapax.lock";

/// Before the address in the second line of the lock file.
const ENDPOINT: &str = "endpoint ";

/// More of a lock file than this is not read: it holds two short lines.
const NOTE_BYTES_MAX: u64 = 4096;

/// The lock files that this process holds, by device and inode: a process id in a file cannot tell two containers apart.
static HELD: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// Locks the folder until it is dropped. The operating system unlocks it if the process dies.
pub(crate) struct FolderLock {
    file: File,
    id: (u64, u64),
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        held().remove(&self.id);
        // The entry was removed before the unlock, so that the next holder, also in this process, is recorded after it.
        let _ = self.file.unlock();
    }
}

fn held() -> MutexGuard<'static, BTreeSet<(u64, u64)>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FolderLock {
    pub fn take(folder: &Path) -> Result<Self, OpenError> {
        let io = |error| OpenError::Io { path: folder.to_owned(), error };
        // Only the owner may read messages. An existing folder keeps its permissions.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
        let path = folder.join(LOCK);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        let id = (metadata.dev(), metadata.ino());
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if held().contains(&id) => {
                return Err(OpenError::OpenHere { folder: folder.to_owned() });
            }
            Err(TryLockError::WouldBlock) => {
                let (holder, endpoint) = read_note(&file);
                return Err(OpenError::InUse { folder: folder.to_owned(), holder, endpoint });
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        let note = format!("process {} on {}\n", std::process::id(), host());
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(note.as_bytes()))
            .map_err(io)?;
        held().insert(id);
        Ok(Self { file, id })
    }
}

/// Adds to the lock file of a folder that this process holds where its store can be reached over HTTP. The line that names
/// the process stays as it is, so that a reader finds it at any moment.
pub(crate) fn announce(folder: &Path, endpoint: &str) -> io::Result<()> {
    // Locks of this kind belong to the open file: closing another handle of it does not unlock.
    let mut file = OpenOptions::new().append(true).open(folder.join(LOCK))?;
    file.write_all(format!("{ENDPOINT}{endpoint}\n").as_bytes())
}

/// What a lock file says about its holder, and the last address that this announced.
fn read_note(file: &File) -> (String, Option<String>) {
    let mut note = String::new();
    // What cannot be read leaves the holder unnamed; the folder is in use all the same.
    let _ = file.take(NOTE_BYTES_MAX).read_to_string(&mut note);
    let holder = note.lines().next().map(str::trim).filter(|line| !line.is_empty());
    let endpoint = note.lines().filter_map(|line| line.strip_prefix(ENDPOINT)).next_back();
    (holder.unwrap_or("another process").to_owned(), endpoint.map(|url| url.trim().to_owned()))
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl OpenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::InUse { .. } | Self::OpenHere { .. } => "store-in-use",
            Self::NetworkFileSystem { .. } => "network-file-system",
            _ => "cannot-open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_opening_in_the_same_process_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let held = FolderLock::take(folder.path()).unwrap();
        for _ in 0..2 {
            let error = FolderLock::take(folder.path()).err().unwrap();
            assert!(matches!(error, OpenError::OpenHere { .. }), "{error}");
        }
        let note = std::fs::read_to_string(folder.path().join("hapax.lock")).unwrap();
        assert!(note.starts_with(&format!("process {} on ", std::process::id())), "{note}");
        drop(held);
        FolderLock::take(folder.path()).unwrap();
    }

    #[test]
    fn the_note_names_the_last_address_and_only_that_of_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let note = || read_note(&File::open(folder.path().join(LOCK)).unwrap());
        let held = FolderLock::take(folder.path()).unwrap();
        let process = format!("process {} on {}", std::process::id(), host());
        assert_eq!(note(), (process.clone(), None));
        announce(folder.path(), "http://127.0.0.1:1").unwrap();
        announce(folder.path(), "http://127.0.0.1:2").unwrap();
        assert_eq!(note(), (process.clone(), Some("http://127.0.0.1:2".to_owned())));
        drop(held);
        let _held = FolderLock::take(folder.path()).unwrap();
        assert_eq!(note(), (process, None), "the next holder has not said anything yet");
        std::fs::write(folder.path().join(LOCK), "").unwrap();
        assert_eq!(note(), ("another process".to_owned(), None));
    }
}
