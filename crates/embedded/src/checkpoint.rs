//! Copies the WAL back into the database, off the writer's thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rusqlite::Connection;

use crate::OpenError;
use crate::storage::sqlite::Place;

/// Where checkpoints run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checkpoint {
    /// On a thread of their own.
    Background,
    /// On the writer's thread, so that a simulation is deterministic.
    Inline,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Idle,
    Asked,
    /// A pass is over and the writer has not yet asked how it went.
    Done,
    Failed(String),
    Stop,
}

type Shared = (Mutex<State>, Condvar);

/// The writer's handle on the checkpointing thread.
pub(crate) struct Checkpointer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    inline: bool,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checkpointer {
    pub fn start(place: &Place, checkpoint: Checkpoint) -> Result<Self, OpenError> {
        let shared: Arc<Shared> = Arc::new((Mutex::new(State::Idle), Condvar::new()));
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
        match &*lock(&self.shared) {
            State::Failed(problem) => Some(problem.clone()),
            _ => None,
        }
    }

    /// Asks for a pass; `true` when one has just ended and only a rest remains.
    pub fn ask(&self) -> bool {
        if self.inline {
            return true;
        }
        let mut state = lock(&self.shared);
        let done = *state == State::Done;
        if done {
            *state = State::Idle;
        } else if *state == State::Idle {
            *state = State::Asked;
            self.shared.1.notify_one();
        }
        done
    }

    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            *lock(&self.shared) = State::Stop;
            self.shared.1.notify_one();
            let _ = thread.join();
        }
    }
}

fn serve(db: Connection, shared: &Shared) {
    loop {
        let mut state = lock(shared);
        while !matches!(*state, State::Asked | State::Stop) {
            state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if *state == State::Stop {
            return;
        }
        drop(state);
        let ran = run(&db);
        let mut state = lock(shared);
        if *state == State::Stop {
            return;
        }
        *state = match ran {
            Ok(()) => State::Done,
            Err(error) => {
                // Closing would checkpoint again. A failed fsync must not be retried: it may then claim success.
                std::mem::forget(db);
                *state = State::Failed(error.to_string());
                return;
            }
        };
    }
}

/// One pass; stops for nobody and copies what it can. A full disk is no failure: the WAL stays as it is, nothing was
/// synced that is not there, and the next pass may find room.
pub(crate) fn run(db: &Connection) -> rusqlite::Result<()> {
    let ran = db.prepare_cached("PRAGMA wal_checkpoint(PASSIVE)")?.query_row([], |_| Ok(()));
    match ran {
        Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) => Ok(()),
        ran => ran,
    }
}
