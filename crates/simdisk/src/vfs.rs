//! The VFS methods as SQLite calls them, and the registration.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rusqlite::ffi;

use crate::DiskState;
use crate::disk::Result;
use crate::io::{SqliteFile, guard, set_closed, set_open};

const PATH_BYTES_MAX: c_int = 1024;

/// The longest real sleep. SQLite's busy handler counts the sleeps that it requested: a busy timeout of 5 s requests
/// about 60 of them. If each were only a yield, the timeout would end before a lock holder on a loaded machine ran
/// once.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// 2026-01-01 in milliseconds of the Julian day: the start of the simulated clock, which advances only by SQLite's
/// sleeps.
const START_JULIAN_MS: i64 = 212_633_985_600_000;

const MS_PER_DAY: f64 = 86_400_000.0;

/// A registered VFS. Dropping it unregisters it.
#[derive(Debug)]
pub(crate) struct Registration {
    name: String,
    /// Leaked, together with its name and its reference to the disk: a connection may use it for any time.
    vfs: *mut ffi::sqlite3_vfs,
}

// SAFETY: the pointer is only passed to sqlite3_vfs_unregister, which takes SQLite's own mutex.
unsafe impl Send for Registration {}
// SAFETY: as above; nothing is read through the pointer.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers a VFS under a name that is unique in this process.
    pub(crate) fn new(disk: &Weak<DiskState>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let name = format!("hapax-simdisk-{}", LAST.fetch_add(1, Ordering::Relaxed) + 1);
        let z_name = CString::new(name.clone()).unwrap_or_default().into_raw();
        let vfs = Box::into_raw(Box::new(ffi::sqlite3_vfs {
            iVersion: 2,
            szOsFile: size_of::<SqliteFile>() as c_int,
            mxPathname: PATH_BYTES_MAX,
            pNext: std::ptr::null_mut(),
            zName: z_name,
            pAppData: Box::into_raw(Box::new(disk.clone())).cast(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: Some(get_last_error),
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: a complete VFS that is never freed.
        let code = unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        assert_eq!(code, ffi::SQLITE_OK, "SQLite refused the simulated disk");
        Self { name, vfs }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, and never freed, so connections that still use it are safe.
        unsafe { ffi::sqlite3_vfs_unregister(self.vfs) };
    }
}

/// # Safety
/// `vfs` was created by `Registration::new`.
unsafe fn disk_of(vfs: *mut ffi::sqlite3_vfs) -> Result<Arc<DiskState>> {
    // SAFETY: `new` put a boxed Weak there and nothing frees or changes it.
    let disk = unsafe { &*(*vfs).pAppData.cast::<Weak<DiskState>>() };
    disk.upgrade().ok_or(ffi::SQLITE_IOERR)
}

/// # Safety
/// `path` is null or a C string that lives through `'a`.
unsafe fn path_of<'a>(path: *const c_char) -> Result<Option<&'a str>> {
    if path.is_null() {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(path) }.to_str().map(Some).map_err(|_| ffi::SQLITE_CANTOPEN)
}

unsafe extern "C" fn open(
    vfs: *mut ffi::sqlite3_vfs,
    path: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    flags_out: *mut c_int,
) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes szOsFile bytes. After a failed open it calls xClose unless the methods are null.
        unsafe { set_closed(file) };
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        // SAFETY: null or a C string, by the contract of xOpen.
        let path = unsafe { path_of(path) }?;
        let handle = disk.lock().open(path, flags)?;
        let delete_on_close = path.is_some() && flags & ffi::SQLITE_OPEN_DELETEONCLOSE != 0;
        // SAFETY: as for `set_closed`.
        unsafe { set_open(file, disk, handle, delete_on_close) };
        // SAFETY: null, or a writable pointer for the result.
        if let Some(flags_out) = unsafe { flags_out.as_mut() } {
            *flags_out = flags;
        }
        Ok(())
    })
}

unsafe extern "C" fn delete(vfs: *mut ffi::sqlite3_vfs, path: *const c_char, sync_dir: c_int) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        // SAFETY: a C string, by the contract of xDelete.
        let path = unsafe { path_of(path) }?.ok_or(ffi::SQLITE_MISUSE)?;
        disk.lock().delete(path, sync_dir != 0)
    })
}

unsafe extern "C" fn access(
    vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    _flags: c_int,
    answer: *mut c_int,
) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        // SAFETY: a C string, by the contract of xAccess.
        let path = unsafe { path_of(path) }?.ok_or(ffi::SQLITE_MISUSE)?;
        let exists = disk.lock().exists(path);
        // SAFETY: SQLite passes a writable pointer for the result.
        unsafe { answer.write(c_int::from(exists)) };
        Ok(())
    })
}

/// There are no directories to resolve: a file is identified by exactly the name that it was opened with.
unsafe extern "C" fn full_pathname(
    _vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    out_bytes: c_int,
    out: *mut c_char,
) -> c_int {
    guard(|| {
        // SAFETY: a C string, by the contract of xFullPathname.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
        if path.len() > usize::try_from(out_bytes).unwrap_or(0) {
            return Err(ffi::SQLITE_CANTOPEN);
        }
        // SAFETY: `out` is SQLite's own buffer of `out_bytes` bytes, which is large enough.
        unsafe { out.copy_from_nonoverlapping(path.as_ptr().cast(), path.len()) };
        Ok(())
    })
}

unsafe extern "C" fn randomness(vfs: *mut ffi::sqlite3_vfs, bytes: c_int, out: *mut c_char) -> c_int {
    let code = guard(|| {
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: SQLite passes `bytes` writable bytes; they are zeroed first, because they may be uninitialized.
        let out = unsafe {
            out.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes)
        };
        disk.lock().fill_random(out);
        Ok(())
    });
    if code == ffi::SQLITE_OK { bytes } else { 0 }
}

unsafe extern "C" fn sleep(vfs: *mut ffi::sqlite3_vfs, micros: c_int) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        let asked_us = u64::try_from(micros).unwrap_or(0);
        disk.slept_us.fetch_add(asked_us, Ordering::Relaxed);
        std::thread::sleep(SLEEP_MAX.min(Duration::from_micros(asked_us)));
        Ok(())
    });
    micros
}

unsafe extern "C" fn current_time_int64(vfs: *mut ffi::sqlite3_vfs, out: *mut i64) -> c_int {
    guard(|| {
        // SAFETY: SQLite passes the VFS that it was given.
        let disk = unsafe { disk_of(vfs) }?;
        let slept_ms = disk.slept_us.load(Ordering::Relaxed) / 1000;
        // SAFETY: SQLite passes a writable pointer for the result.
        unsafe { out.write(START_JULIAN_MS + slept_ms as i64) };
        Ok(())
    })
}

unsafe extern "C" fn current_time(vfs: *mut ffi::sqlite3_vfs, out: *mut f64) -> c_int {
    let mut julian_ms = 0;
    // SAFETY: the same VFS, and a local variable for the result.
    let code = unsafe { current_time_int64(vfs, &raw mut julian_ms) };
    // SAFETY: SQLite passes a writable pointer for the result.
    unsafe { out.write(julian_ms as f64 / MS_PER_DAY) };
    code
}

unsafe extern "C" fn get_last_error(_vfs: *mut ffi::sqlite3_vfs, _bytes: c_int, _out: *mut c_char) -> c_int {
    0
}
