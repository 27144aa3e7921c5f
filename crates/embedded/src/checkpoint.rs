//! Copies the WAL back into the database, off the writer's thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rusqlite::{Connection, ErrorCode};

use crate::OpenError;
use crate::storage::sqlite::DbLocation;

/// Where checkpoints run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checkpoint {
    /// On a thread of their own.
    Background,
    /// On the writer's thread, so that a simulation is deterministic.
    Inline,
}

/// What is wanted of the checkpointing thread and how it fares.
#[derive(Debug, Default)]
struct State {
    asked: bool,
    /// A pass is over and the writer has not yet asked how it went.
    done: bool,
    stop: bool,
    /// Stays, so that whoever looks last still learns of it.
    failed: Option<String>,
}

type StoreState = (Mutex<State>, Condvar);

/// The writer's handle on the checkpointing thread.
pub(crate) struct Checkpointer {
    shared: Arc<StoreState>,
    thread: Option<JoinHandle<()>>,
    inline: bool,
}

fn lock(shared: &StoreState) -> MutexGuard<'_, State> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checkpointer {
    pub fn start(place: &DbLocation, checkpoint: Checkpoint) -> Result<Self, OpenError> {
        let shared: Arc<StoreState> = Arc::default();
        let inline = checkpoint == Checkpoint::Inline;
        if inline {
            return Ok(Self { shared, thread: None, inline });
        }
        let db = place.connect()?;
        db.pragma_update(None, "wal_autocheckpoint", 0)?;
        db.pragma_update(None, "synchronous", "FULL")?;
        let theirs = shared.clone();
        let spawn = std::thread::Builder::new().name("hapax-checkpoint".into());
        let thread = spawn.spawn(move || serve(db, &theirs)).map_err(OpenError::Thread)?;
        Ok(Self { shared, thread: Some(thread), inline })
    }

    /// Why checkpoints stopped, if they did.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared).failed.clone()
    }

    /// Asks for a pass; `true` when one has just ended and only a rest remains.
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

    /// Waits for a pass that is under way. Its failure can still be asked for.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            lock(&self.shared).stop = true;
            self.shared.1.notify_one();
            let _ = thread.join();
        }
    }
}

fn serve(db: Connection, shared: &StoreState) {
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
            Ok(Pass::Ran) => state.done = true,
            // The writer asks again after its next commit.
            Ok(Pass::Full) => {}
            Err(error) => {
                // Closing would checkpoint again. A failed fsync must not be retried: it may then claim success.
                std::mem::forget(db);
                state.failed = Some(error.to_string());
                return;
            }
        }
    }
}

/// How a pass ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Ran,
    /// The database could not grow. Nothing is lost: the WAL still holds it all, and no fsync failed, so another try is
    /// safe.
    Full,
}

/// One pass; stops for nobody and copies what it can.
pub(crate) fn run(db: &Connection) -> rusqlite::Result<Pass> {
    match db.prepare_cached("PRAGMA wal_checkpoint(PASSIVE)")?.query_row([], |_| Ok(())) {
        Ok(()) => Ok(Pass::Ran),
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) => Ok(Pass::Full),
        Err(error) => Err(error),
    }
}
