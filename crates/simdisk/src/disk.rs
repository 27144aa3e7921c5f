//! The disk behind the VFS: names, files, handles, and the effect of crashes. Safe code; `vfs` and `io` translate
//! SQLite's calls.

mod crash;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fastrand::Rng;
use rusqlite::ffi;

use crate::Counters;
use crate::faults::{Faults, WriteOutcome};
use crate::locks::{Busy, FileLocks, Level, ShmLocks};
use crate::medium::Medium;

/// The error is a SQLite result code.
pub(crate) type Result<T> = std::result::Result<T, i32>;
pub(crate) type HandleId = u64;
type InodeId = u64;

/// A region of shared memory. This crate never accesses the atomics: they only provide memory that SQLite may change
/// through several pointers under Rust's rules, with the alignment that SQLite needs.
pub(crate) type Region = Arc<[AtomicU64]>;

/// An open file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    id: HandleId,
    inode: InodeId,
    /// The disk's generation at open. Each crash starts a new generation and invalidates all older handles.
    generation: u64,
    read_only: bool,
}

#[derive(Debug, Default)]
struct Inode {
    /// Empty for a temporary file.
    name: String,
    /// Its directory entry survives power loss.
    name_durable: bool,
    medium: Medium,
    open_handles: u32,
    locks: FileLocks,
    shm: Shm,
}

/// The WAL-index of a database. It is never stored on the medium: it ends with the last handle, or at a crash.
#[derive(Debug, Default)]
struct Shm {
    regions: Vec<Region>,
    locks: ShmLocks,
    attached: Vec<HandleId>,
}

/// The disk's whole state.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) faults: Faults,
    pub(crate) counters: Counters,
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) sync_lies: bool,
    generation: u64,
    last_id: u64,
    names: BTreeMap<String, InodeId>,
    /// Files deleted without a directory sync: a power loss may restore them.
    deleted_unsynced: BTreeMap<String, InodeId>,
    inodes: BTreeMap<InodeId, Inode>,
    loss_rng: Rng,
    /// Separate from `loss_rng`: the number of SQLite's random requests must not change which data a power loss takes.
    sqlite_rng: Rng,
}

impl Disk {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        Self {
            faults: Faults::default(),
            counters: Counters::default(),
            capacity_bytes: None,
            sync_lies: false,
            generation: 0,
            last_id: 0,
            names: BTreeMap::new(),
            deleted_unsynced: BTreeMap::new(),
            inodes: BTreeMap::new(),
            loss_rng: rng.fork(),
            sqlite_rng: rng.fork(),
        }
    }

    // Names.

    /// Opens `name`, or a new temporary file if there is no name. `flags` are `SQLITE_OPEN_*`.
    pub(crate) fn open(&mut self, name: Option<&str>, flags: i32) -> Result<Handle> {
        let has = |flag| flags & flag != 0;
        let found = name.and_then(|name| self.names.get(name).copied());
        let inode = match found {
            Some(_) if has(ffi::SQLITE_OPEN_CREATE) && has(ffi::SQLITE_OPEN_EXCLUSIVE) => {
                return Err(ffi::SQLITE_CANTOPEN);
            }
            Some(inode) => inode,
            None if name.is_none() || has(ffi::SQLITE_OPEN_CREATE) => self.create(name, Medium::default()),
            None => return Err(ffi::SQLITE_CANTOPEN),
        };
        let id = self.next_id();
        self.inodes.get_mut(&inode).ok_or(ffi::SQLITE_CANTOPEN)?.open_handles += 1;
        Ok(Handle { id, inode, generation: self.generation, read_only: has(ffi::SQLITE_OPEN_READONLY) })
    }

    /// Puts a file with durable content on the disk; replaces an existing file of that name.
    pub(crate) fn install(&mut self, name: &str, bytes: &[u8]) {
        let replaced = self.names.remove(name);
        self.deleted_unsynced.remove(name);
        let inode = self.create(Some(name), Medium::durable(bytes));
        if let Some(inode) = self.inodes.get_mut(&inode) {
            inode.name_durable = true;
        }
        if let Some(replaced) = replaced {
            self.forget_if_unused(replaced);
        }
    }

    /// Closes a handle. Does nothing for a handle from before a crash.
    pub(crate) fn close(&mut self, handle: Handle, delete: bool) {
        self.shm_unmap(handle);
        let Ok(inode) = self.alive(handle) else { return };
        inode.locks.unlock(handle.id, Level::None);
        inode.open_handles -= 1;
        if delete {
            let name = std::mem::take(&mut inode.name);
            self.names.remove(&name);
        }
        self.forget_if_unused(handle.inode);
    }

    pub(crate) fn delete(&mut self, name: &str, sync_dir: bool) -> Result<()> {
        let Some(&id) = self.names.get(name) else { return Err(ffi::SQLITE_IOERR_DELETE_NOENT) };
        // A delete has no handle, so a thread from before a crash could still delete a journal. SQLite deletes a
        // journal only under a lock on the database, and a crash drops all locks: without a lock, the call is from
        // before the crash.
        let main = name.strip_suffix("-wal").or_else(|| name.strip_suffix("-journal"));
        if let Some(main) = main.and_then(|main| self.names.get(main)).and_then(|id| self.inodes.get(id))
            && !main.locks.any_held()
        {
            return Err(ffi::SQLITE_IOERR_DELETE);
        }
        if let Some(crash) = self.faults.on_change(name) {
            self.crash(crash);
            return Err(ffi::SQLITE_IOERR);
        }
        self.names.remove(name);
        if self.inodes.get(&id).is_some_and(|inode| inode.name_durable) {
            self.deleted_unsynced.insert(name.to_owned(), id);
        }
        self.forget_if_unused(id);
        if sync_dir {
            self.sync_directory();
        }
        Ok(())
    }

    /// As in the unix VFS: an empty file counts as missing.
    pub(crate) fn exists(&self, name: &str) -> bool {
        self.content(name).is_some_and(|content| !content.is_empty())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    pub(crate) fn content(&self, name: &str) -> Option<&[u8]> {
        let inode = self.inodes.get(self.names.get(name)?)?;
        Some(inode.medium.live())
    }

    pub(crate) fn flip(&mut self, name: &str, offset: u64) -> bool {
        let Some(inode) = self.names.get(name).and_then(|id| self.inodes.get_mut(id)) else { return false };
        inode.medium.flip(offset)
    }

    // Bytes.

    /// Fills `buf`. Beyond the end of the file it is filled with zeros, and the result is `SQLITE_IOERR_SHORT_READ`.
    pub(crate) fn read(&mut self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<()> {
        let Self { faults, counters, .. } = self;
        let inode = Self::find(&mut self.inodes, self.generation, handle)?;
        counters.reads += 1;
        if faults.on_read(&inode.name) {
            return Err(ffi::SQLITE_IOERR_READ);
        }
        let count = inode.medium.read(offset, buf);
        counters.bytes_read += count as u64;
        if count == buf.len() {
            return Ok(());
        }
        buf[count..].fill(0);
        Err(ffi::SQLITE_IOERR_SHORT_READ)
    }

    pub(crate) fn write(&mut self, handle: Handle, offset: u64, bytes: &[u8]) -> Result<()> {
        let free_bytes = self.free_bytes();
        let inode = Self::find(&mut self.inodes, self.generation, handle)?;
        if handle.read_only {
            return Err(ffi::SQLITE_READONLY);
        }
        self.counters.writes += 1;
        let room = (inode.medium.live().len() as u64).saturating_add(free_bytes).saturating_sub(offset);
        let fits = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let (count, answer) = match self.faults.on_write(&inode.name) {
            WriteOutcome::Failed => (0, Err(ffi::SQLITE_IOERR_WRITE)),
            WriteOutcome::Short => (fits.min(bytes.len() / 2), Err(ffi::SQLITE_FULL)),
            WriteOutcome::Done if fits < bytes.len() => (fits, Err(ffi::SQLITE_FULL)),
            WriteOutcome::Done => (fits, Ok(())),
        };
        inode.medium.write(offset, &bytes[..count]);
        self.counters.bytes_written += count as u64;
        if let Some(crash) = self.faults.on_change(&inode.name) {
            self.crash(crash);
            return Err(ffi::SQLITE_IOERR);
        }
        answer
    }

    pub(crate) fn truncate(&mut self, handle: Handle, len: u64) -> Result<()> {
        let free_bytes = self.free_bytes();
        let inode = Self::find(&mut self.inodes, self.generation, handle)?;
        if handle.read_only {
            return Err(ffi::SQLITE_READONLY);
        }
        if len.saturating_sub(inode.medium.live().len() as u64) > free_bytes {
            return Err(ffi::SQLITE_FULL);
        }
        inode.medium.truncate(len);
        if let Some(crash) = self.faults.on_change(&inode.name) {
            self.crash(crash);
            return Err(ffi::SQLITE_IOERR);
        }
        Ok(())
    }

    pub(crate) fn sync(&mut self, handle: Handle) -> Result<()> {
        let inode = Self::find(&mut self.inodes, self.generation, handle)?;
        self.counters.syncs += 1;
        if let Some(crash) = self.faults.on_change(&inode.name) {
            self.crash(crash);
            return Err(ffi::SQLITE_IOERR);
        }
        if self.faults.on_sync(&inode.name) {
            inode.medium.fail_sync();
            return Err(ffi::SQLITE_IOERR_FSYNC);
        }
        if self.sync_lies {
            return Ok(());
        }
        inode.medium.sync();
        if !inode.name_durable && !inode.name.is_empty() {
            self.sync_directory();
        }
        Ok(())
    }

    pub(crate) fn size(&mut self, handle: Handle) -> Result<u64> {
        Ok(self.alive(handle)?.medium.live().len() as u64)
    }

    /// `u64::MAX` without a capacity.
    pub(crate) fn free_bytes(&self) -> u64 {
        let Some(capacity) = self.capacity_bytes else { return u64::MAX };
        // The blocks of a deleted file are free at once, even if a power loss may restore the file.
        let is_deleted = |id: &InodeId| self.deleted_unsynced.values().any(|deleted| deleted == id);
        let held = self.inodes.iter().filter(|(id, inode)| inode.open_handles > 0 || !is_deleted(id));
        capacity.saturating_sub(held.map(|(_, inode)| inode.medium.live().len() as u64).sum())
    }

    // Locks and shared memory.

    pub(crate) fn lock(&mut self, handle: Handle, level: Level) -> Result<()> {
        self.alive(handle)?.locks.lock(handle.id, level).map_err(|Busy| ffi::SQLITE_BUSY)
    }

    /// Also allowed on a handle from before a crash: it holds no lock.
    pub(crate) fn unlock(&mut self, handle: Handle, to: Level) {
        if let Ok(inode) = self.alive(handle) {
            inode.locks.unlock(handle.id, to);
        }
    }

    pub(crate) fn is_reserved(&mut self, handle: Handle) -> Result<bool> {
        Ok(self.alive(handle)?.locks.is_reserved())
    }

    /// The region `index`; `None` if it does not exist and `extend` is false.
    pub(crate) fn shm_map(
        &mut self,
        handle: Handle,
        index: usize,
        bytes: usize,
        extend: bool,
    ) -> Result<Option<Region>> {
        let shm = &mut self.alive(handle)?.shm;
        if !shm.attached.contains(&handle.id) {
            shm.attached.push(handle.id);
        }
        while extend && shm.regions.len() <= index {
            shm.regions.push((0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect());
        }
        Ok(shm.regions.get(index).cloned())
    }

    pub(crate) fn shm_lock(&mut self, handle: Handle, slots: u8, exclusive: bool) -> Result<()> {
        let locks = &mut self.alive(handle)?.shm.locks;
        let locked = if exclusive {
            locks.lock_exclusive(handle.id, slots)
        } else {
            locks.lock_shared(handle.id, slots)
        };
        locked.map_err(|Busy| ffi::SQLITE_BUSY)
    }

    pub(crate) fn shm_unlock(&mut self, handle: Handle, slots: u8) {
        if let Ok(inode) = self.alive(handle) {
            inode.shm.locks.unlock(handle.id, slots);
        }
    }

    pub(crate) fn shm_unmap(&mut self, handle: Handle) {
        let Ok(inode) = self.alive(handle) else { return };
        inode.shm.locks.forget(handle.id);
        inode.shm.attached.retain(|id| *id != handle.id);
        if inode.shm.attached.is_empty() {
            inode.shm = Shm::default();
        }
    }

    pub(crate) fn fill_random(&mut self, buf: &mut [u8]) {
        self.sqlite_rng.fill(buf);
    }

    // Inodes.

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn create(&mut self, name: Option<&str>, medium: Medium) -> InodeId {
        let id = self.next_id();
        let name = name.unwrap_or_default().to_owned();
        if !name.is_empty() {
            self.names.insert(name.clone(), id);
        }
        self.inodes.insert(id, Inode { name, medium, ..Inode::default() });
        id
    }

    fn alive(&mut self, handle: Handle) -> Result<&mut Inode> {
        Self::find(&mut self.inodes, self.generation, handle)
    }

    fn find(inodes: &mut BTreeMap<InodeId, Inode>, generation: u64, handle: Handle) -> Result<&mut Inode> {
        if handle.generation != generation {
            return Err(ffi::SQLITE_IOERR);
        }
        inodes.get_mut(&handle.inode).ok_or(ffi::SQLITE_IOERR)
    }

    fn forget_if_unused(&mut self, id: InodeId) {
        let named = self.names.values().chain(self.deleted_unsynced.values()).any(|named| *named == id);
        if !named && self.inodes.get(&id).is_some_and(|inode| inode.open_handles == 0) {
            self.inodes.remove(&id);
        }
    }
}
