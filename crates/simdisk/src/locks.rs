//! The locks of each handle: the lock levels of a database file, and the eight slots of the WAL's shared memory.
//!
//! Nothing blocks here. A lock that is not available is `Busy`, and SQLite's busy handler decides.

use std::collections::BTreeMap;

use crate::disk::HandleId;

/// Another handle holds a conflicting lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Busy;

/// SQLite's lock levels, with the numbers of `SQLITE_LOCK_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    None,
    Shared,
    Reserved,
    Pending,
    Exclusive,
}

impl Level {
    pub(crate) fn from_sqlite(level: i32) -> Option<Self> {
        [Self::None, Self::Shared, Self::Reserved, Self::Pending, Self::Exclusive]
            .get(usize::try_from(level).ok()?)
            .copied()
    }
}

/// The locks on one file. A handle without an entry holds none.
#[derive(Debug, Default)]
pub(crate) struct FileLocks(BTreeMap<HandleId, Level>);

impl FileLocks {
    pub(crate) fn lock(&mut self, handle: HandleId, wanted: Level) -> Result<(), Busy> {
        let held = self.0.get(&handle).copied().unwrap_or(Level::None);
        if held >= wanted {
            return Ok(());
        }
        let others = self
            .0
            .iter()
            .filter(|(id, _)| **id != handle)
            .map(|(_, level)| *level)
            .max()
            .unwrap_or(Level::None);
        match wanted {
            Level::Shared | Level::Exclusive if others >= Level::Pending => return Err(Busy),
            Level::Reserved | Level::Pending if others >= Level::Reserved => return Err(Busy),
            Level::Exclusive if others > Level::None => {
                // Current readers may finish, but PENDING admits no new ones, so a writer cannot starve.
                self.0.insert(handle, Level::Pending);
                return Err(Busy);
            }
            _ => {}
        }
        self.0.insert(handle, wanted);
        Ok(())
    }

    /// Lowers the lock to `to`; never raises it.
    pub(crate) fn unlock(&mut self, handle: HandleId, to: Level) {
        match self.0.get(&handle) {
            Some(_) if to == Level::None => _ = self.0.remove(&handle),
            Some(held) if *held > to => _ = self.0.insert(handle, to),
            _ => {}
        }
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.0.values().any(|level| *level >= Level::Reserved)
    }

    pub(crate) fn any_held(&self) -> bool {
        !self.0.is_empty()
    }
}

/// The shared-memory slots that one handle has locked, one bit per slot.
#[derive(Debug, Default, Clone, Copy)]
struct Slots {
    shared: u8,
    exclusive: u8,
}

/// The locks on the slots of one WAL-index.
#[derive(Debug, Default)]
pub(crate) struct ShmLocks(BTreeMap<HandleId, Slots>);

impl ShmLocks {
    pub(crate) fn lock_shared(&mut self, handle: HandleId, slots: u8) -> Result<(), Busy> {
        if self.others(handle).any(|held| held.exclusive & slots != 0) {
            return Err(Busy);
        }
        self.0.entry(handle).or_default().shared |= slots;
        Ok(())
    }

    pub(crate) fn lock_exclusive(&mut self, handle: HandleId, slots: u8) -> Result<(), Busy> {
        if self.others(handle).any(|held| (held.exclusive | held.shared) & slots != 0) {
            return Err(Busy);
        }
        self.0.entry(handle).or_default().exclusive |= slots;
        Ok(())
    }

    pub(crate) fn unlock(&mut self, handle: HandleId, slots: u8) {
        if let Some(held) = self.0.get_mut(&handle) {
            held.shared &= !slots;
            held.exclusive &= !slots;
        }
    }

    pub(crate) fn forget(&mut self, handle: HandleId) {
        self.0.remove(&handle);
    }

    fn others(&self, handle: HandleId) -> impl Iterator<Item = &Slots> {
        self.0.iter().filter(move |(id, _)| **id != handle).map(|(_, held)| held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_a_pending_writer_keeps_new_ones_out() {
        let mut locks = FileLocks::default();
        locks.lock(1, Level::Shared).unwrap();
        locks.lock(2, Level::Shared).unwrap();
        locks.lock(1, Level::Reserved).unwrap();
        assert!(locks.is_reserved());
        assert_eq!(locks.lock(2, Level::Reserved), Err(Busy));
        locks.lock(3, Level::Shared).unwrap();
        assert_eq!(locks.lock(1, Level::Exclusive), Err(Busy));
        assert_eq!(locks.lock(4, Level::Shared), Err(Busy));
        locks.unlock(2, Level::None);
        locks.unlock(3, Level::None);
        locks.lock(1, Level::Exclusive).unwrap();
        locks.unlock(1, Level::Shared);
        locks.lock(4, Level::Shared).unwrap();
        locks.unlock(1, Level::None);
        locks.unlock(4, Level::None);
        assert!(!locks.any_held());
    }

    #[test]
    fn shared_memory_slots_are_independent() {
        let mut locks = ShmLocks::default();
        locks.lock_shared(1, 0b1000).unwrap();
        locks.lock_shared(2, 0b1000).unwrap();
        assert_eq!(locks.lock_exclusive(1, 0b1000), Err(Busy));
        locks.lock_exclusive(1, 0b0011).unwrap();
        assert_eq!(locks.lock_exclusive(2, 0b0010), Err(Busy));
        assert_eq!(locks.lock_shared(2, 0b0001), Err(Busy));
        locks.unlock(1, 0b0001);
        locks.lock_shared(2, 0b0001).unwrap();
        locks.forget(1);
        locks.lock_exclusive(2, 0b0010).unwrap();
    }
}
