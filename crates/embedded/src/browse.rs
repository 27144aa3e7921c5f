//! Browsing messages without delivering them, with a reading connection on its own thread.

use std::sync::mpsc;

use hapax_core::{Attributes, Browse, MessageState, MessageView, Page, Priority, StoreError};
use rusqlite::{Connection, params};

use crate::OpenError;
use crate::ids::Ids;
use crate::record::{FLAG_DEAD, FLAG_HISTORY, State, parked_cause};
use crate::storage::sqlite::DbLocation;
use crate::storage::{self, FoundBody};

/// Maximum bytes of bodies in one page; a page with a single message may exceed it.
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

type ReadJob = Box<dyn FnOnce(&Connection) + Send>;

/// The reading thread.
pub(crate) struct Reader {
    jobs: Option<mpsc::Sender<ReadJob>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Reader {
    pub fn start(location: &DbLocation) -> Result<Self, OpenError> {
        let db = location.connect()?;
        db.pragma_update(None, "query_only", true)?;
        let (jobs, submitted) = mpsc::channel::<ReadJob>();
        let spawn = std::thread::Builder::new().name("hapax-reader".into());
        let serve = move || submitted.into_iter().for_each(|job| job(&db));
        Ok(Self { jobs: Some(jobs), thread: Some(spawn.spawn(serve).map_err(OpenError::Thread)?) })
    }

    pub fn submit(&self, job: ReadJob) -> Result<(), StoreError> {
        let gone = || StoreError::Unavailable("the store is closed".into());
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())
    }

    pub fn stop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The part of a queue to browse.
pub(crate) struct BrowseScope {
    pub queue: u32,
    pub purged_before: u64,
    /// Messages that the engine has parked because their rows are damaged; the rows themselves do not show that.
    pub damaged: Vec<u64>,
}

/// One page of a queue's messages, by position.
pub(crate) fn page(
    db: &Connection,
    ids: &Ids,
    scope: &BrowseScope,
    browse: &Browse,
    now_ms: u64,
) -> rusqlite::Result<Page<MessageView>> {
    // A delayed message that has become due is ready, although its row is not rewritten.
    let damaged: Vec<_> = scope.damaged.iter().map(u64::to_string).collect();
    let parked = format!("(state = 3 OR seq IN ({}))", damaged.join(", "));
    let state = match browse.state {
        None => "1",
        Some(MessageState::Ready) => "(state = 0 OR (state = 1 AND due_ms <= ?5))",
        Some(MessageState::Delayed) => "(state = 1 AND due_ms > ?5)",
        Some(MessageState::InFlight) => "state = 2",
        Some(MessageState::Parked) => &parked,
    };
    let only = if browse.id.is_some() { "seq = ?4" } else { "?4 IS NULL" };
    let seq = browse.id.map(|id| ids.seq(id).unwrap_or(0) as i64);
    let after =
        i64::try_from(browse.after.unwrap_or(0)).unwrap_or(i64::MAX).max(scope.purged_before as i64 - 1);
    let sql = format!(
        "SELECT {} FROM message WHERE queue = ?1 AND ord > ?2 AND {state} AND {only} AND ?5 >= 0 ORDER BY ord LIMIT ?3",
        storage::MESSAGE_COLUMNS
    );
    let limit = browse.limit as i64;
    let mut bytes = 0;
    let mut statement = db.prepare_cached(&sql)?;
    let mut rows = statement.query(params![scope.queue, after, limit + 1, seq, now_ms as i64])?;
    let (mut items, mut more) = (Vec::new(), false);
    while let Some(row) = rows.next()? {
        let view = view(db, ids, row, now_ms)?;
        bytes += view.body.as_ref().map_or(0, bytes::Bytes::len);
        // Large bodies make a page short.
        if items.len() == browse.limit || (bytes > PAGE_BYTES_MAX && !items.is_empty()) {
            more = true;
            break;
        }
        items.push(view);
    }
    let next = items.last().filter(|_| more).map(|last: &MessageView| last.sequence);
    if let Some(state) = browse.state {
        // A damaged row counts as parked, regardless of its stored state.
        items.retain(|item| item.state == state);
    }
    Ok(Page { items, next })
}

fn view(db: &Connection, ids: &Ids, row: &rusqlite::Row<'_>, now_ms: u64) -> rusqlite::Result<MessageView> {
    let (row, sound) = storage::message(row)?;
    let entry = row.entry;
    let (content, damage) = match storage::body(db, entry.seq)? {
        FoundBody::Sound(body) => (Some(body.content), None),
        FoundBody::Damaged(problem) => (None, Some(problem)),
    };
    let damage = if sound { damage } else { Some("its row does not match its checksum".into()) };
    let state = match entry.state {
        _ if !sound => MessageState::Parked,
        State::Ready => MessageState::Ready,
        State::Delayed if entry.due_ms <= now_ms => MessageState::Ready,
        State::Delayed => MessageState::Delayed,
        State::InFlight => MessageState::InFlight,
        State::Parked => MessageState::Parked,
    };
    let history = if entry.flags & FLAG_HISTORY == 0 { Vec::new() } else { storage::history(db, entry.seq)? };
    let parked = match parked_cause(entry.flags) {
        Some(hapax_core::FailureCause::Damaged) => Some((hapax_core::FailureCause::Damaged, damage)),
        Some(cause) => Some((cause, history.last().and_then(|failed| failed.error.clone()))),
        None if !sound => Some((hapax_core::FailureCause::Damaged, damage)),
        None => None,
    };
    let dead =
        if entry.flags & FLAG_DEAD == 0 { None } else { storage::dead(db, entry.seq)?.map(Into::into) };
    let attributes = content.as_ref().and_then(|content| content.attributes.as_deref());
    Ok(MessageView {
        id: ids.id(entry.seq),
        state,
        attributes: attributes.map_or_else(Attributes::new, parse_attributes),
        dedup: content.as_ref().and_then(|content| content.dedup.as_deref()).and_then(|id| id.parse().ok()),
        body: content.map(|content| content.body),
        attempts: entry.attempts,
        deliveries: entry.deliveries,
        sent_ms: entry.sent_ms,
        due_ms: entry.due_ms,
        sequence: entry.order,
        group: row.group,
        priority: Priority(entry.priority),
        dead,
        parked,
        history,
    })
}

/// Decodes stored attributes. This crate wrote them and a checksum covers them, so a failure is a defect; an operator
/// still gets the message.
pub(crate) fn parse_attributes(json: &str) -> Attributes {
    serde_json::from_str(json).unwrap_or_default()
}
