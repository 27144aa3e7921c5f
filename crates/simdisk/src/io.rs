//! The methods of an open file, as SQLite calls them.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rusqlite::ffi;

use crate::DiskState;
use crate::disk::{Handle, Region, Result};
use crate::locks::Level;

/// The smallest unit that SQLite must assume to be written at once.
const SECTOR_BYTES: c_int = 4096;

/// The memory that SQLite allocates for a file, `szOsFile` bytes; the base must come first.
#[repr(C)]
pub(crate) struct SqliteFile {
    base: ffi::sqlite3_file,
    /// From `Box::into_raw` at open; `close` turns it back into a `Box`.
    open: *mut OpenFile,
}

struct OpenFile {
    disk: Arc<DiskState>,
    handle: Handle,
    delete_on_close: bool,
    persist_wal: c_int,
    /// SQLite keeps raw pointers into the regions until it unmaps them, even after a crash removed them from the disk.
    regions: Vec<Region>,
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 2,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: Some(shm_map),
    xShmLock: Some(shm_lock),
    xShmBarrier: Some(shm_barrier),
    xShmUnmap: Some(shm_unmap),
    xFetch: None,
    xUnfetch: None,
};

/// Runs the body of a callback; a panic must not unwind into C.
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ffi::SQLITE_OK,
        Ok(Err(code)) => code,
        Err(_) => ffi::SQLITE_IOERR,
    }
}

/// Marks `file` as not open: SQLite will not call any of its methods.
///
/// # Safety
/// `file` points to at least `size_of::<SqliteFile>()` writable bytes.
pub(crate) unsafe fn set_closed(file: *mut ffi::sqlite3_file) {
    // SAFETY: guaranteed by the caller; both types are plain data, so writing needs no valid old value.
    unsafe {
        file.cast::<SqliteFile>().write(SqliteFile {
            base: ffi::sqlite3_file { pMethods: std::ptr::null() },
            open: std::ptr::null_mut(),
        });
    }
}

/// Makes `file` an open file.
///
/// # Safety
/// As [`set_closed`].
pub(crate) unsafe fn set_open(
    file: *mut ffi::sqlite3_file,
    disk: Arc<DiskState>,
    handle: Handle,
    delete_on_close: bool,
) {
    let open = Box::new(OpenFile { disk, handle, delete_on_close, persist_wal: 0, regions: Vec::new() });
    // SAFETY: guaranteed by the caller, as in `set_closed`.
    unsafe {
        file.cast::<SqliteFile>().write(SqliteFile {
            base: ffi::sqlite3_file { pMethods: &raw const METHODS },
            open: Box::into_raw(open),
        });
    }
}

/// # Safety
/// `file` was opened by this VFS and is not closed, and no other call on it is running. SQLite guarantees both: it
/// calls methods only between open and close, and a file belongs to one connection, whose mutex it holds.
unsafe fn open_file<'a>(file: *mut ffi::sqlite3_file) -> Result<&'a mut OpenFile> {
    // SAFETY: guaranteed by the caller: `set_open` wrote a SqliteFile there, whose pointer came from a Box.
    unsafe { (*file.cast::<SqliteFile>()).open.as_mut() }.ok_or(ffi::SQLITE_MISUSE)
}

fn unsigned(value: impl TryInto<u64>) -> Result<u64> {
    value.try_into().map_err(|_| ffi::SQLITE_MISUSE)
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xClose.
        let open: *mut OpenFile = unsafe { open_file(file) }?;
        // SAFETY: the pointer came from Box::into_raw in `set_open`; `set_closed` below clears it.
        let open = unsafe { Box::from_raw(open) };
        // SAFETY: SQLite's memory for the file outlives this call.
        unsafe { set_closed(file) };
        open.disk.lock().close(open.handle, open.delete_on_close);
        Ok(())
    })
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    buf: *mut c_void,
    amount: c_int,
    offset: i64,
) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xRead.
        let open = unsafe { open_file(file) }?;
        let amount = unsigned(amount)? as usize;
        // SAFETY: SQLite passes `amount` bytes; they are zeroed first, because SQLite's buffer may be uninitialized.
        let buf = unsafe {
            buf.cast::<u8>().write_bytes(0, amount);
            std::slice::from_raw_parts_mut(buf.cast::<u8>(), amount)
        };
        open.disk.lock().read(open.handle, unsigned(offset)?, buf)
    })
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    buf: *const c_void,
    amount: c_int,
    offset: i64,
) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xWrite.
        let open = unsafe { open_file(file) }?;
        // SAFETY: SQLite passes `amount` readable bytes, unchanged during the call.
        let bytes = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), unsigned(amount)? as usize) };
        open.disk.lock().write(open.handle, unsigned(offset)?, bytes)
    })
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, size: i64) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xTruncate.
        let open = unsafe { open_file(file) }?;
        open.disk.lock().truncate(open.handle, unsigned(size)?)
    })
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xSync.
        let open = unsafe { open_file(file) }?;
        open.disk.lock().sync(open.handle)
    })
}

unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, size: *mut i64) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xFileSize.
        let open = unsafe { open_file(file) }?;
        let bytes = open.disk.lock().size(open.handle)?;
        // SAFETY: SQLite passes a writable pointer for the result.
        unsafe { size.write(bytes as i64) };
        Ok(())
    })
}

unsafe extern "C" fn lock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xLock.
        let open = unsafe { open_file(file) }?;
        let level = Level::from_sqlite(level).ok_or(ffi::SQLITE_MISUSE)?;
        open.disk.lock().lock(open.handle, level)
    })
}

unsafe extern "C" fn unlock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xUnlock.
        let open = unsafe { open_file(file) }?;
        let level = Level::from_sqlite(level).ok_or(ffi::SQLITE_MISUSE)?;
        open.disk.lock().unlock(open.handle, level);
        Ok(())
    })
}

unsafe extern "C" fn check_reserved_lock(file: *mut ffi::sqlite3_file, reserved: *mut c_int) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xCheckReservedLock.
        let open = unsafe { open_file(file) }?;
        let answer = open.disk.lock().is_reserved(open.handle)?;
        // SAFETY: SQLite passes a writable pointer for the result.
        unsafe { reserved.write(c_int::from(answer)) };
        Ok(())
    })
}

unsafe extern "C" fn file_control(file: *mut ffi::sqlite3_file, op: c_int, arg: *mut c_void) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xFileControl.
        let open = unsafe { open_file(file) }?;
        match op {
            ffi::SQLITE_FCNTL_PERSIST_WAL => {
                // SAFETY: for this op the argument is a pointer to int.
                let value = unsafe { arg.cast::<c_int>().as_mut() }.ok_or(ffi::SQLITE_MISUSE)?;
                if *value >= 0 {
                    open.persist_wal = c_int::from(*value != 0);
                }
                *value = open.persist_wal;
                Ok(())
            }
            _ => Err(ffi::SQLITE_NOTFOUND),
        }
    })
}

unsafe extern "C" fn sector_size(_file: *mut ffi::sqlite3_file) -> c_int {
    SECTOR_BYTES
}

/// The same as the unix VFS, so that SQLite takes the same code paths here as in production: a torn write damages no
/// byte outside of it, and nothing more is promised.
unsafe extern "C" fn device_characteristics(_file: *mut ffi::sqlite3_file) -> c_int {
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

unsafe extern "C" fn shm_map(
    file: *mut ffi::sqlite3_file,
    index: c_int,
    region_bytes: c_int,
    extend: c_int,
    mapped: *mut *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes a writable pointer for the result.
        unsafe { mapped.write(std::ptr::null_mut()) };
        // SAFETY: an open file, by the contract of xShmMap.
        let open = unsafe { open_file(file) }?;
        let (index, bytes) = (unsigned(index)? as usize, unsigned(region_bytes)? as usize);
        let region = open.disk.lock().shm_map(open.handle, index, bytes, extend != 0)?;
        if let Some(region) = region {
            // SAFETY: as above. The region is kept alive below for as long as SQLite may use the pointer, and because
            // it consists of atomics it may be changed through the pointer.
            unsafe { mapped.write(region.as_ptr().cast_mut().cast()) };
            open.regions.push(region);
        }
        Ok(())
    })
}

unsafe extern "C" fn shm_lock(
    file: *mut ffi::sqlite3_file,
    first: c_int,
    count: c_int,
    flags: c_int,
) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xShmLock.
        let open = unsafe { open_file(file) }?;
        let end =
            first.checked_add(count).filter(|end| first >= 0 && count > 0 && *end <= ffi::SQLITE_SHM_NLOCK);
        let slots = ((1_u32 << end.ok_or(ffi::SQLITE_MISUSE)?) - (1_u32 << first)) as u8;
        let mut disk = open.disk.lock();
        if flags & ffi::SQLITE_SHM_UNLOCK != 0 {
            disk.shm_unlock(open.handle, slots);
            return Ok(());
        }
        disk.shm_lock(open.handle, slots, flags & ffi::SQLITE_SHM_EXCLUSIVE != 0)
    })
}

unsafe extern "C" fn shm_barrier(_file: *mut ffi::sqlite3_file) {
    fence(Ordering::SeqCst);
}

unsafe extern "C" fn shm_unmap(file: *mut ffi::sqlite3_file, _delete: c_int) -> c_int {
    guard(|| {
        // SAFETY: an open file, by the contract of xShmUnmap.
        let open = unsafe { open_file(file) }?;
        open.disk.lock().shm_unmap(open.handle);
        // SQLite uses no pointer into the regions after this call.
        open.regions.clear();
        Ok(())
    })
}
