//! One process per folder, and only on a disk of this machine.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::OpenError;

/// File systems whose locks and syncs cannot be relied on, as `/proc/self/mountinfo` names them.
const NETWORK: &[&str] = &[
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "ocfs2",
    "gfs2",
    "davfs",
    "virtiofs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.glusterfs",
    "fuse.rclone",
    "fuse.gcsfuse",
    "fuse.mount-s3",
    "fuse.cephfs",
    "fuse.davfs2",
    "fuse.juicefs",
    "fuse.weed",
    "fuse.goofys",
];

/// Holds the folder as long as it lives. The operating system lets go of it when the process dies.
pub(crate) struct FolderLock {
    _file: File,
}

impl FolderLock {
    pub fn take(folder: &Path) -> Result<Self, OpenError> {
        let io = |error| OpenError::Io { path: folder.to_owned(), error };
        // Messages are nobody else's business; a folder that is there already keeps the rights it has.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
        if let Some(kind) = network_file_system(folder) {
            return Err(OpenError::NetworkFileSystem { folder: folder.to_owned(), kind });
        }
        let path = folder.join("hapax.lock");
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
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
        Ok(Self { _file: file })
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The kind of network file system that the folder is on, if it is on one.
fn network_file_system(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    file_system(&mounts, &folder).filter(|kind| NETWORK.contains(&kind.as_str()))
}

/// The file system's kind by the longest mount point above the folder; the last of equal ones is on top.
fn file_system(mounts: &str, folder: &Path) -> Option<String> {
    let mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let point = PathBuf::from(unescape(before.split(' ').nth(4)?));
        let kind = after.split(' ').next()?.to_owned();
        folder.starts_with(&point).then(|| (point.components().count(), kind))
    };
    mounts
        .lines()
        .filter_map(mount)
        .enumerate()
        .max_by_key(|(at, (depth, _))| (*depth, *at))
        .map(|(_, (_, kind))| kind)
}

/// The kernel writes space, tab, newline and backslash as octal.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /mnt/share rw - nfs4 server:/x rw
41 22 0:41 / /mnt/share/local rw - xfs /dev/sdb1 rw
42 22 0:42 / /mnt/with\\040space rw - fuse.sshfs me@host:/ rw";

    #[test]
    fn the_nearest_mount_point_decides() {
        let kind = |path: &str| file_system(MOUNTS, Path::new(path)).unwrap();
        assert_eq!(kind("/home/me"), "ext4");
        assert_eq!(kind("/mnt/share/data"), "nfs4");
        assert_eq!(kind("/mnt/shared"), "ext4", "a name that only begins alike is another place");
        assert_eq!(kind("/mnt/share/local/data"), "xfs");
        assert_eq!(kind("/mnt/with space/x"), "fuse.sshfs");
        assert!(NETWORK.contains(&"nfs4") && NETWORK.contains(&"fuse.sshfs") && !NETWORK.contains(&"ext4"));
    }

    #[test]
    fn a_second_holder_is_told_who_the_first_is() {
        let folder = tempfile::tempdir().unwrap();
        let held = FolderLock::take(folder.path()).unwrap();
        let error = FolderLock::take(folder.path()).err().unwrap().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(held);
        FolderLock::take(folder.path()).unwrap();
    }
}
