//! What a copy has to do, and whether it can be done.

use hapax_core::store::SharedStore;
use hapax_core::{AdminError, CopyState, QueueInfo, QueueStats, StoreError, TransferScope};

use super::{CopyError, CopyRequest, in_source, in_target, repeat, transfer};
use crate::transfer::dead_letters_first;

/// A queue of the source.
#[derive(Debug, Clone)]
pub struct PlannedQueue {
    /// As it is in the source.
    pub info: QueueInfo,
    /// Messages in it.
    pub messages: u64,
    /// Messages of these that are in flight: they are copied as returned.
    pub in_flight: u64,
    /// An earlier run has copied it.
    pub complete: bool,
    /// It is in the target already, and closed there for this copy.
    pub filling: bool,
}

/// What a copy has to do.
#[derive(Debug, Clone)]
pub struct CopyPlan {
    /// The queues, each behind its dead-letter queue.
    pub queues: Vec<PlannedQueue>,
    /// Entries of the source's ledger.
    pub entries: u64,
    /// Entries of these that are held or in doubt: they are copied as in doubt.
    pub open_entries: u64,
    /// An earlier run has copied the ledger.
    pub ledger_complete: bool,
}

impl CopyPlan {
    /// The queues that are not complete.
    pub fn open_queues(&self) -> impl Iterator<Item = &PlannedQueue> {
        self.queues.iter().filter(|queue| !queue.complete)
    }
}

fn refused<T>(problem: impl Into<String>) -> Result<T, CopyError> {
    Err(CopyError::Refused(problem.into()))
}

fn state_of(info: &QueueInfo) -> Option<&CopyState> {
    info.paused.as_ref().and_then(|paused| paused.copy.as_ref())
}

/// Finds out what a copy has to do; changes nothing.
pub async fn plan(
    source: &SharedStore,
    target: &SharedStore,
    request: &CopyRequest,
) -> Result<CopyPlan, CopyError> {
    let (from, to) = (transfer(source, "the source")?, transfer(target, "the target")?);
    if request.from == request.to {
        return refused(format!("{} is both source and target of the copy", request.from));
    }
    if let Some(CopyState::To { store, .. }) = repeat(|| to.ledger_copy()).await.map_err(in_target)? {
        return refused(format!(
            "the target {} was itself copied to {store}; copy to a new store, or open it with `hapax copy --release`",
            request.to
        ));
    }
    let ledger = match repeat(|| from.ledger_copy()).await.map_err(in_source)? {
        Some(state) => done_before(request, "the ledger", &state)?,
        None => false,
    };
    let mut infos = repeat(|| source.queues()).await.map_err(in_source)?;
    if let Some(missing) = request.queues.iter().find(|name| !infos.iter().any(|info| info.name == **name)) {
        return Err(in_source(StoreError::NoSuchQueue(missing.clone())));
    }
    together(request, &infos)?;
    infos.retain(|info| request.whole() || request.queues.contains(&info.name));
    let mut queues = Vec::new();
    for info in dead_letters_first(infos) {
        queues.push(planned(source, target, request, info).await?);
    }
    let stats = repeat(|| source.ledger_stats()).await.map_err(in_source)?;
    Ok(CopyPlan {
        queues,
        entries: stats.entries,
        open_entries: stats.open,
        ledger_complete: request.whole() && ledger,
    })
}

/// Whether an earlier run of the same copy has completed this; another copy is refused.
fn done_before(request: &CopyRequest, what: &str, state: &CopyState) -> Result<bool, CopyError> {
    match state {
        CopyState::To { store, complete } if *store == request.to => Ok(*complete),
        CopyState::To { store, .. } => refused(format!(
            "{what} is copied to {store} already; complete that copy, or open the source with `hapax copy --release`"
        )),
        CopyState::From { store } => {
            refused(format!("{what} is itself being copied from {store}; complete that copy first"))
        }
    }
}

/// A queue and its dead-letter queue are copied together: a message may move from one to the other.
fn together(request: &CopyRequest, infos: &[QueueInfo]) -> Result<(), CopyError> {
    for info in infos {
        let Some(dead) = info.config.dead_letter.as_ref().map(|dead| &dead.queue) else { continue };
        let (here, there) = (request.queues.contains(&info.name), request.queues.contains(dead));
        if here != there && infos.iter().any(|info| info.name == *dead) {
            let missing = if here { dead } else { &info.name };
            return refused(format!(
                "{dead} is the dead-letter queue of {}: copy both, with --queue {missing} too",
                info.name
            ));
        }
    }
    Ok(())
}

async fn planned(
    source: &SharedStore,
    target: &SharedStore,
    request: &CopyRequest,
    info: QueueInfo,
) -> Result<PlannedQueue, CopyError> {
    let what = format!("queue {}", info.name);
    let complete = match state_of(&info) {
        Some(state) => done_before(request, &what, state)?,
        None => false,
    };
    let stats = repeat(|| source.stats(&info.name)).await.map_err(in_source)?;
    let filling = match repeat(|| target.queue(&info.name)).await {
        Ok(there) if state_of(&there) == Some(&request.filling()) => true,
        Ok(there) if !complete => {
            check_target(target, request, &info, &there).await?;
            false
        }
        Ok(_) | Err(AdminError::Store(StoreError::NoSuchQueue(_))) => false,
        Err(error) => return Err(in_target(error)),
    };
    Ok(PlannedQueue { messages: count(&stats), in_flight: stats.in_flight, complete, filling, info })
}

fn count(stats: &QueueStats) -> u64 {
    stats.ready + stats.delayed + stats.in_flight + stats.parked
}

/// Whether a queue that the target has already may take the messages: it is empty, and has the same configuration.
async fn check_target(
    target: &SharedStore,
    request: &CopyRequest,
    info: &QueueInfo,
    there: &QueueInfo,
) -> Result<(), CopyError> {
    let (name, to) = (&info.name, &request.to);
    if (there.created_ms, there.revision) == (info.created_ms, info.revision) {
        return refused(format!(
            "queue {name} is the same in both: {} and {to} lead to one store, or one of them is a backup of the other",
            request.from
        ));
    }
    if let Some(state) = state_of(there) {
        return refused(format!("the target {to}: {}", state.refusal(&format!("queue {name}"))));
    }
    if let Some(field) = there.config.first_difference(&info.config) {
        return refused(format!(
            "queue {name} exists in {to} with another configuration ({field} differs); delete it there first"
        ));
    }
    let stats = repeat(|| target.stats(name)).await.map_err(in_target)?;
    if count(&stats) > 0 {
        return refused(format!("queue {name} in {to} is not empty; delete it there, or empty it first"));
    }
    Ok(())
}

/// Makes a queue in the target, paused if it is in the source, and closes it. Safe to repeat.
pub(super) async fn create(
    target: &SharedStore,
    queue: &PlannedQueue,
    request: &CopyRequest,
) -> Result<(), CopyError> {
    if queue.filling {
        return Ok(());
    }
    let (to, info) = (transfer(target, "the target")?, &queue.info);
    repeat(|| target.create_queue(&info.name, info.config.clone())).await.map_err(in_target)?;
    let paused = info.paused.as_ref().filter(|paused| !paused.copy_only);
    if let Some(pause) = paused {
        let pause = || target.pause_queue(&info.name, &pause.by, pause.reason.as_deref());
        repeat(pause).await.map_err(in_target)?;
    }
    let scope = TransferScope::Queue(info.name.clone());
    repeat(|| to.set_copy(&scope, Some(request.filling()), &request.by)).await.map_err(in_target)?;
    // Something may have been sent between the creation and now.
    let stats = repeat(|| target.stats(&info.name)).await.map_err(in_target)?;
    if count(&stats) > 0 {
        repeat(|| to.set_copy(&scope, None, &request.by)).await.map_err(in_target)?;
        return refused(format!("queue {} in {} is not empty; delete it there first", info.name, request.to));
    }
    Ok(())
}
