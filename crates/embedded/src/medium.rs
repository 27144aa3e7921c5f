//! Detects the medium of a folder: a local disk, a network file system, or memory.

use std::path::{Path, PathBuf};

use crate::OpenError;

/// The medium that holds a store's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Medium {
    /// The file system's type, as the operating system names it.
    pub kind: String,
    /// It is reached over a network: its locks and syncs are not reliable.
    pub network: bool,
    /// It is memory: nothing survives a reboot.
    pub volatile: bool,
}

/// File systems without reliable locks and syncs, by their names in `/proc/self/mountinfo`.
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

/// File systems in memory.
const VOLATILE: &[&str] = &["tmpfs", "ramfs"];

/// File system numbers of `statfs`, used if the mounts cannot be read. FUSE is missing: its number does not show what
/// is behind it.
const MAGIC: &[(u32, &str)] = &[
    (0x6969, "nfs"),
    (0x517b, "smbfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb3"),
    (0x0102_1997, "9p"),
    (0x5346_414f, "afs"),
    (0x00c3_6400, "ceph"),
    (0x0bd0_0bd0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x7461_636f, "ocfs2"),
    (0x0116_1970, "gfs2"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
];

/// The medium of a folder, or of its nearest existing ancestor if it does not exist yet. `None` if the operating system
/// does not report it.
///
/// ```
/// let folder = tempfile::tempdir().unwrap();
/// let medium = hapax_embedded::medium(folder.path());
/// assert_eq!(medium, hapax_embedded::medium(folder.path().join("not/yet/there")));
/// ```
pub fn medium(folder: impl AsRef<Path>) -> Option<Medium> {
    let folder = std::path::absolute(folder.as_ref()).ok()?;
    // Links are followed, as they are when a file is opened there.
    let there = folder.ancestors().find_map(|above| above.canonicalize().ok())?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok();
    kind(mounts.as_deref(), &there).map(of_kind)
}

/// The type by the mounts; if those cannot be read, by `statfs`.
fn kind(mounts: Option<&str>, folder: &Path) -> Option<String> {
    mounts.and_then(|mounts| kind_by_mount(mounts, folder)).or_else(|| {
        let magic = rustix::fs::statfs(folder).ok()?.f_type;
        // The field's width and sign depend on the machine; the numbers have 32 bits.
        kind_by_magic(magic as u32).map(ToOwned::to_owned)
    })
}

/// Refuses a folder in which a store is not reliable, unless that is allowed; then returns a warning about the risk.
pub(crate) fn admit(
    folder: &Path,
    medium: Option<Medium>,
    allow_network: bool,
) -> Result<Option<String>, OpenError> {
    match medium {
        Some(Medium { kind, network: true, .. }) if allow_network => Ok(Some(format!(
            "the store is on a network file system ({kind}), as was allowed: a lost lock or sync may damage or lose \
             messages; move it to a local disk"
        ))),
        Some(Medium { kind, network: true, .. }) => {
            Err(OpenError::NetworkFileSystem { folder: folder.to_owned(), kind })
        }
        _ => Ok(None),
    }
}

fn of_kind(kind: String) -> Medium {
    let (network, volatile) = (NETWORK.contains(&kind.as_str()), VOLATILE.contains(&kind.as_str()));
    Medium { kind, network, volatile }
}

fn kind_by_magic(magic: u32) -> Option<&'static str> {
    MAGIC.iter().find(|(known, _)| *known == magic).map(|(_, kind)| *kind)
}

/// The file system's type by the longest mount point above the folder. Of equal mount points the last one is on top.
fn kind_by_mount(mounts: &str, folder: &Path) -> Option<String> {
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
    use crate::{Embedded, Options};
    use hapax_core::QueueAdmin as _;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /mnt/share rw - nfs4 server:/x rw
41 22 0:41 / /mnt/share/local rw - xfs /dev/sdb1 rw
42 22 0:42 / /mnt/with\\040space rw - fuse.sshfs me@host:/ rw
43 22 0:43 / /tmp rw - tmpfs tmpfs rw";

    fn nfs() -> Medium {
        of_kind("nfs4".into())
    }

    #[test]
    fn the_nearest_mount_point_decides() {
        let kind = |path: &str| kind_by_mount(MOUNTS, Path::new(path)).unwrap();
        assert_eq!(kind("/home/me"), "ext4");
        assert_eq!(kind("/mnt/share/data"), "nfs4");
        assert_eq!(kind("/mnt/shared"), "ext4", "a name that only begins alike is another place");
        assert_eq!(kind("/mnt/share/local/data"), "xfs");
        assert_eq!(kind("/mnt/with space/x"), "fuse.sshfs");
        assert_eq!(kind("/tmp/x"), "tmpfs");
    }

    #[test]
    fn kinds_are_told_apart_by_name_and_by_number() {
        let flags = |kind: &str| (of_kind(kind.into()).network, of_kind(kind.into()).volatile);
        assert_eq!(flags("nfs4"), (true, false));
        assert_eq!(flags("fuse.sshfs"), (true, false));
        assert_eq!(flags("tmpfs"), (false, true));
        assert_eq!(flags("ext4"), (false, false));
        assert_eq!(flags("fuse.ntfs-3g"), (false, false), "not every FUSE is far away");
        assert_eq!(kind_by_magic(0x6969), Some("nfs"));
        assert_eq!(kind_by_magic(0xef53), None, "ext4");
        for (magic, kind) in MAGIC {
            assert_eq!(kind_by_magic(*magic), Some(*kind));
            let (network, volatile) = flags(kind);
            assert!(network != volatile, "{kind} is known for one or the other");
        }
    }

    #[test]
    fn without_mounts_the_file_system_itself_is_asked() {
        // Device files are in memory on every Linux.
        assert_eq!(kind(None, Path::new("/dev")).as_deref(), Some("tmpfs"));
        assert_eq!(kind(Some(MOUNTS), Path::new("/dev")).as_deref(), Some("ext4"), "mounts know more");
    }

    #[test]
    fn a_network_file_system_is_refused_before_anything_is_made_there() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("store");
        let refused =
            Embedded::open(&folder, Options { medium: Some(nfs()), ..Options::default() }).err().unwrap();
        assert!(matches!(&refused, OpenError::NetworkFileSystem { kind, .. } if kind == "nfs4"), "{refused}");
        assert!(refused.to_string().contains("docs/errors/network-file-system.md"), "{refused}");
        assert!(!folder.exists());
    }

    #[tokio::test]
    async fn a_network_file_system_that_is_allowed_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { medium: Some(nfs()), allow_network_file_system: true, ..Options::default() };
        let store = Embedded::open(folder.path(), options).unwrap();
        let warnings = store.status().await.unwrap().warnings;
        assert!(
            warnings.iter().any(|warning| warning.contains("network file system (nfs4)")),
            "{warnings:?}"
        );
    }
}
