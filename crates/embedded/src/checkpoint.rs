//! Checkpoints the WAL on a thread of its own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rusqlite::{Connection, ErrorCode};

use crate::OpenError;
use crate::storage::sqlite::DbLocation;

/// Where checkpoints run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checkpoint {
    /// On a separate thread.
    Background,
    /// On the writer's thread, so that a simulation is deterministic.
    Inline,
}

/// Requests to the checkpointing thread and its results.
#[derive(Debug, Default)]
struct CheckpointRequests {
    asked: bool,
    /// A pass has ended and the writer has not yet noticed.
    done: bool,
    stop: bool,
    /// Never cleared, so that every later check sees the failure.
    failed: Option<String>,
}

type SharedRequests = (Mutex<CheckpointRequests>, Condvar);

/// The writer's handle on the checkpointing thread.
pub(crate) struct Checkpointer {
    shared: Arc<SharedRequests>,
    thread: Option<JoinHandle<()>>,
    inline: bool,
}

fn lock(shared: &SharedRequests) -> MutexGuard<'_, CheckpointRequests> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checkpointer {
    pub fn start(location: &DbLocation, checkpoint: Checkpoint) -> Result<Self, OpenError> {
        let shared: Arc<SharedRequests> = Arc::default();
        let inline = checkpoint == Checkpoint::Inline;
        if inline {
            return Ok(Self { shared, thread: None, inline });
        }
        let db = location.connect()?;
        db.pragma_update(None, "wal_autocheckpoint", 0)?;
        db.pragma_update(None, "synchronous", "FULL")?;
        let theirs = shared.clone();
        let spawn = std::thread::Builder::new().name("hapax-checkpoint".into());
        let thread = spawn.spawn(move || serve(db, &theirs)).map_err(OpenError::Thread)?;
        Ok(Self { shared, thread: Some(thread), inline })
    }

    /// Why checkpoints stopped, or `None`.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared).failed.clone()
    }

    /// Requests a pass. Returns `true` if one has just ended and only the newest pages remain to be copied.
    pub fn ask(&self) -> bool {
        if self.inline {
            return true;
        }
        let mut state = lock(&self.shared);
        if std::mem::take(&mut state.done) {
            return true;
        }
        if !state.asked {
            state.asked = true;
            self.shared.1.notify_one();
        }
        false
    }

    /// Waits for a running pass. Its failure can still be queried.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            lock(&self.shared).stop = true;
            self.shared.1.notify_one();
            let _ = thread.join();
        }
    }
}

fn serve(db: Connection, shared: &SharedRequests) {
    loop {
        let mut state = lock(shared);
        while !state.asked && !state.stop {
            state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stop {
            return;
        }
        drop(state);
        let ran = run(&db);
        let mut state = lock(shared);
        state.asked = false;
        match ran {
            Ok(CheckpointPass::Ran) => state.done = true,
            // The writer requests another pass after its next commit.
            Ok(CheckpointPass::Full) => {}
            Err(error) => {
                // Closing would checkpoint again. A failed fsync must not be retried: the retry may report success
                // wrongly.
                std::mem::forget(db);
                state.failed = Some(error.to_string());
                return;
            }
        }
    }
}

/// How a pass ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckpointPass {
    Ran,
    /// The database could not grow. Nothing is lost: the WAL still holds all pages, and no fsync failed, so a retry is
    /// safe.
    Full,
}

/// One pass: copies what it can without blocking readers or writers.
pub(crate) fn run(db: &Connection) -> rusqlite::Result<CheckpointPass> {
    match db.prepare_cached("PRAGMA wal_checkpoint(PASSIVE)")?.query_row([], |_| Ok(())) {
        Ok(()) => Ok(CheckpointPass::Ran),
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) => Ok(CheckpointPass::Full),
        Err(error) => Err(error),
    }
}
