//! Backups, written by the server into one folder. A keyless server answers every program of its machine, so a path that
//! the caller may choose freely would let any of them write files as the server's user.

use std::ffi::OsStr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Writes a backup of the store to a new file; says in words why it could not. It may block.
pub type Backup = Arc<dyn Fn(&Path) -> Result<(), String> + Send + Sync>;

/// How and where the native API writes backups.
#[derive(Clone)]
pub struct Backups {
    /// The folder for backups, absolute. It is made when it is needed.
    pub folder: PathBuf,
    /// The setting that names the folder, for refusals: `store.embedded.backup_folder`.
    pub setting: &'static str,
    /// Writes one.
    pub write: Backup,
}

impl Backups {
    /// The file that a caller names: by its name, or by its path directly inside the folder.
    pub(super) fn file(&self, to: &str) -> Result<PathBuf, String> {
        let path = Path::new(to);
        let named = path.strip_prefix(&self.folder).unwrap_or(path);
        let mut components = named.components();
        match (components.next(), components.next()) {
            // Compared with the text, since `components` drops a trailing slash and inner dots.
            (Some(Component::Normal(name)), None) if name == OsStr::new(named) && !to.contains('\0') => {
                Ok(self.folder.join(name))
            }
            _ => Err(format!(
                "to: {to:?} is no place for a backup: this server writes backups into {} only; give the name of a new file \
                 there, or let the server's configuration name another folder ({})",
                self.folder.display(),
                self.setting
            )),
        }
    }

    /// Writes a backup. Blocks.
    pub(super) fn take(&self, file: &Path) -> Result<(), String> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        made.map_err(|error| format!("the folder {} cannot be made: {error}", self.folder.display()))?;
        (self.write)(file)
    }
}
