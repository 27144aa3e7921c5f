//! The part of the state that survives a crash.

use std::collections::BTreeMap;

use super::{Disk, Shm};
use crate::faults::Crash;
use crate::locks::FileLocks;

impl Disk {
    pub(crate) fn crash(&mut self, crash: Crash) {
        if crash == Crash::Power {
            self.lose_power();
        }
        self.generation += 1;
        for inode in self.inodes.values_mut() {
            inode.open_handles = 0;
            inode.locks = FileLocks::default();
            inode.shm = Shm::default();
        }
        // Temporary files end with the process that had them open.
        let Self { inodes, names, deleted_unsynced, .. } = self;
        inodes.retain(|id, _| names.values().chain(deleted_unsynced.values()).any(|named| named == id));
    }

    /// There is one directory. As in the unix VFS it is synced when a new file is synced for the first time, and when
    /// SQLite deletes with a directory sync; in both cases all earlier creations and deletions become durable.
    pub(super) fn sync_directory(&mut self) {
        for id in self.names.values() {
            if let Some(inode) = self.inodes.get_mut(id) {
                inode.name_durable = true;
            }
        }
        for (_, id) in std::mem::take(&mut self.deleted_unsynced) {
            self.forget_if_unused(id);
        }
    }

    fn lose_power(&mut self) {
        let mut survivors = BTreeMap::new();
        for (name, id) in std::mem::take(&mut self.names) {
            let Some(inode) = self.inodes.get_mut(&id) else { continue };
            if inode.name_durable || self.loss_rng.bool() {
                inode.medium.lose_power(&mut self.loss_rng);
                inode.name_durable = true;
                survivors.insert(name, id);
            }
        }
        for (name, id) in std::mem::take(&mut self.deleted_unsynced) {
            let Some(inode) = self.inodes.get_mut(&id) else { continue };
            if !survivors.contains_key(&name) && self.loss_rng.bool() {
                inode.medium.lose_power(&mut self.loss_rng);
                survivors.insert(name, id);
            }
        }
        self.names = survivors;
    }
}
