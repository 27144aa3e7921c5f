//! Queues and the ledger while they are copied to another store or from one: closed, and not changed by time.

use hapax_core::copy::{LEDGER_COPY, check_open, pause_for_copy};
use hapax_core::{
    AdminError, CopyState, DocumentName, ExpectedRevision, Json, QueueName, StoreError, TransferScope,
};

use super::{Engine, Queue, RedriveState};
use crate::record::Record;
use crate::time::Now;

impl Queue {
    pub fn is_closed(&self) -> bool {
        self.paused.as_ref().is_some_and(|paused| paused.copy.is_some())
    }
}

impl Engine {
    /// The queue of a name, unless it is closed.
    pub fn find_open(&self, name: &QueueName) -> Result<u32, StoreError> {
        let id = self.find(name)?;
        check_open(name, self.queue(id).paused.as_ref())?;
        Ok(id)
    }

    /// The queue of a name, unless it is closed because it was copied to another store.
    pub fn find_for_import(&self, name: &QueueName) -> Result<u32, StoreError> {
        let id = self.find(name)?;
        match self.queue(id).paused.as_ref().and_then(|paused| paused.copy.as_ref()) {
            Some(state @ CopyState::To { .. }) => Err(state.refusal(&format!("queue {name}"))),
            _ => Ok(id),
        }
    }

    /// Why the ledger is closed, if it is.
    pub fn ledger_copy(&self) -> Option<&CopyState> {
        self.documents.ledger_copy.as_ref()
    }

    /// Refuses what a closed ledger does not do.
    pub fn check_ledger(&self) -> Result<(), StoreError> {
        self.ledger_copy().map_or(Ok(()), |state| Err(state.ledger_refusal()))
    }

    /// Queues that were closed since the last call, and with `None` the ledger: calls may wait on them.
    pub fn take_closed(&mut self) -> Vec<(Option<u32>, StoreError)> {
        std::mem::take(&mut self.closed)
    }

    pub fn set_copy(
        &mut self,
        now: Now,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        match scope {
            TransferScope::Queue(name) => self.set_queue_copy(now, name, state, by),
            TransferScope::Ledger => self.set_ledger_copy(now, state, by),
        }
    }

    fn set_queue_copy(
        &mut self,
        now: Now,
        name: &QueueName,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let id = self.find(name)?;
        let moves = |task: &super::Task| {
            let info = &task.info;
            info.state == RedriveState::Running && (info.from == *name || info.to.as_ref() == Some(name))
        };
        if let Some(task) = self.tasks.values().find(|task| state.is_some() && moves(task)) {
            return Err(AdminError::RedriveRunning(task.info.from.clone()));
        }
        let before = self.queue(id).paused.clone();
        let pause = pause_for_copy(before.clone(), state, now.ms(), by);
        if pause == before {
            return Ok(());
        }
        let what = match pause.as_ref().and_then(|pause| pause.copy.as_ref()) {
            Some(state) => {
                let refusal = state.refusal(&format!("queue {name}"));
                self.closed.push((Some(id), refusal.clone()));
                format!("closed queue {name}: {refusal}")
            }
            None => format!("opened queue {name} after a copy"),
        };
        self.set_paused(now, id, hapax_core::policy::truncate(by, 256).to_owned(), pause, what);
        Ok(())
    }

    fn set_ledger_copy(&mut self, now: Now, state: Option<CopyState>, by: &str) -> Result<(), AdminError> {
        if self.ledger_copy() == state.as_ref() {
            return Ok(());
        }
        let name = DocumentName::new(LEDGER_COPY).expect("a valid name");
        let what = if let Some(state) = state {
            let refusal = state.ledger_refusal();
            self.closed.push((None, refusal.clone()));
            let value = Json::of(&state).map_err(|error| StoreError::Invalid(error.to_string()))?;
            self.put_document(now, &name, value, ExpectedRevision::Any)
                .map_err(|error| AdminError::Refused(error.to_string()))?;
            format!("closed the ledger: {refusal}")
        } else {
            self.delete_document(&name, ExpectedRevision::Any)
                .map_err(|error| AdminError::Refused(error.to_string()))?;
            "opened the ledger after a copy".to_owned()
        };
        let by = hapax_core::policy::truncate(by, 256).to_owned();
        self.wave.records.push(Record::Audit { at_ms: now.ms(), by, what });
        Ok(())
    }

    /// A store whose ledger is closed was copied as a whole: a new queue would be forgotten there.
    pub fn check_new_queue(&self) -> Result<(), StoreError> {
        self.ledger_copy().map_or(Ok(()), |state| Err(state.refusal("the store")))
    }
}
