//! One process per folder.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::OpenError;

/// The lock files that this process holds, by device and inode: a process id in a file cannot tell two containers apart.
static HELD: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// Holds the folder as long as it lives. The operating system unlocks it when the process dies.
pub(crate) struct FolderLock {
    file: File,
    id: (u64, u64),
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        held().remove(&self.id);
        // Before the lock is free: whoever takes it next, in this process too, is recorded after this.
        let _ = self.file.unlock();
    }
}

fn held() -> MutexGuard<'static, BTreeSet<(u64, u64)>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FolderLock {
    pub fn take(folder: &Path) -> Result<Self, OpenError> {
        let io = |error| OpenError::Io { path: folder.to_owned(), error };
        // Only the owner may read messages; a folder that is there already keeps the rights it has.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
        let path = folder.join("hapax.lock");
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
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder =
                    if holder.is_empty() { "another process".into() } else { holder.trim().to_owned() };
                return Err(OpenError::InUse { folder: folder.to_owned(), holder });
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
}
