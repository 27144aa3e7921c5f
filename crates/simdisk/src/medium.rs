//! The bytes of one file: as the process reads them, as the medium holds them, and the unsynced changes between the
//! two.

use fastrand::Rng;

/// The unit in which a real disk writes. Smaller than a page, so that a page can be torn.
const SECTOR_BYTES: u64 = 512;

/// A change that no successful fsync has covered yet.
#[derive(Debug)]
enum Unsynced {
    Write { offset: u64, bytes: Vec<u8> },
    Truncate { len: u64 },
}

/// The content of a file.
///
/// Invariant while no fsync has failed: `durable` with `unsynced` applied in order equals `live`. A failed fsync clears
/// `unsynced`, so from then on `live` contains bytes that no later fsync writes to the medium.
#[derive(Debug, Default)]
pub(crate) struct Medium {
    live: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
}

impl Medium {
    /// A file whose bytes are already on the medium.
    pub(crate) fn durable(bytes: &[u8]) -> Self {
        Self { live: bytes.to_vec(), durable: bytes.to_vec(), unsynced: Vec::new() }
    }

    pub(crate) fn live(&self) -> &[u8] {
        &self.live
    }

    /// Copies the bytes at `offset` into `buf` and returns their number.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        let Some(rest) = usize::try_from(offset).ok().and_then(|start| self.live.get(start..)) else {
            return 0;
        };
        let count = rest.len().min(buf.len());
        buf[..count].copy_from_slice(&rest[..count]);
        count
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        put(&mut self.live, offset, bytes);
        self.unsynced.push(Unsynced::Write { offset, bytes: bytes.to_vec() });
    }

    pub(crate) fn truncate(&mut self, len: u64) {
        self.live.resize(len as usize, 0);
        self.unsynced.push(Unsynced::Truncate { len });
    }

    /// A successful fsync.
    pub(crate) fn sync(&mut self) {
        for change in self.unsynced.drain(..) {
            match change {
                Unsynced::Write { offset, bytes } => put(&mut self.durable, offset, &bytes),
                Unsynced::Truncate { len } => self.durable.resize(len as usize, 0),
            }
        }
    }

    /// A failed fsync, as on Linux: the dirty pages are marked clean although they never reached the medium. The
    /// process still reads them, a later fsync "succeeds", and a power loss shows that they were lost.
    pub(crate) fn fail_sync(&mut self) {
        self.unsynced.clear();
    }

    /// Power loss: each unsynced change reaches the medium completely, not at all, or in some of its sectors.
    ///
    /// The probabilities are drawn once per file. With equal probabilities for every sector, a long log would never
    /// survive completely and never be lost completely, and a store must handle both cases.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        let kept_percent = [0, 20, 50, 80, 97, 100][rng.usize(..6)];
        let torn_percent = [0, 10, 50][rng.usize(..3)];
        for change in self.unsynced.drain(..) {
            let torn = rng.u8(..100) < torn_percent;
            let kept = rng.u8(..100) < kept_percent;
            match change {
                Unsynced::Write { offset, bytes } if torn => {
                    for (offset, sector) in sectors(offset, &bytes) {
                        if rng.bool() {
                            put(&mut self.durable, offset, sector);
                        }
                    }
                }
                Unsynced::Write { offset, bytes } if kept => put(&mut self.durable, offset, &bytes),
                Unsynced::Truncate { len } if kept => self.durable.resize(len as usize, 0),
                Unsynced::Write { .. } | Unsynced::Truncate { .. } => {}
            }
        }
        self.live.clone_from(&self.durable);
    }

    /// Inverts the byte at `offset` in memory and on the medium; false if the file is shorter.
    pub(crate) fn flip(&mut self, offset: u64) -> bool {
        let Some(byte) = usize::try_from(offset).ok().and_then(|at| self.live.get_mut(at)) else {
            return false;
        };
        *byte = !*byte;
        if let Some(byte) = self.durable.get_mut(offset as usize) {
            *byte = !*byte;
        }
        for change in &mut self.unsynced {
            if let Unsynced::Write { offset: start, bytes } = change
                && let Some(at) = offset.checked_sub(*start)
                && let Some(byte) = bytes.get_mut(at as usize)
            {
                *byte = !*byte;
            }
        }
        true
    }
}

/// Writes at any offset; a gap before it reads as zeros, as in a sparse file.
fn put(content: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let start = offset as usize;
    let end = start + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[start..end].copy_from_slice(bytes);
}

/// Splits a write at the sector boundaries of the file. Bytes outside of the write never change: the disk has powersafe
/// overwrite, which the unix VFS assumes of real disks too.
fn sectors(offset: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let mut at = offset;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let room = (SECTOR_BYTES - at % SECTOR_BYTES) as usize;
        let (sector, tail) = rest.split_at(room.min(rest.len()));
        let start = at;
        at += sector.len() as u64;
        rest = tail;
        Some((start, sector))
    })
}
