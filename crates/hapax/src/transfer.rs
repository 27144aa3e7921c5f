//! Moving queues and ledger between stores through a file of JSON lines.
//!
//! The file has a header, the queues with their configurations, the ledger's entries, the queues' items (see
//! [`ExportedItem`]), and a last line with their count, so that a file that was cut off is noticed. An import can be
//! repeated: what is there already is left as it is. The ledger comes first, so that no message is delivered before its
//! entry is there. When an item of a FIFO group is refused, the rest of the group is refused too, so that it keeps its
//! order when the import is repeated.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (old, new) = (tempfile::tempdir()?, tempfile::tempdir()?);
//! use hapax::Hapax;
//! use hapax::transfer::{ExportRequest, export, import};
//!
//! # let old = format!("embedded:{}", old.path().display());
//! # let new = format!("embedded:{}", new.path().display());
//! let (old, new) = (Hapax::open(&old).await?, Hapax::open(&new).await?);
//! let jobs = old.queue::<u64>("jobs")?;
//! jobs.ensure(hapax::QueueConfig::default()).await?;
//! jobs.send(&7).await?;
//!
//! let (mut file, request) = (Vec::new(), ExportRequest { pause: true, ..ExportRequest::default() });
//! export(old.store(), &request, &mut file).await?;
//! let report = import(new.store(), &mut file.as_slice(), "docs").await?;
//! assert_eq!((report.added, report.refused), (1, 0));
//! # Ok(())
//! # }
//! ```

use std::collections::HashMap;
use std::io::{BufRead, Read as _, Write};

use hapax_core::copy::CopyState;
use hapax_core::store::SharedStore;
use hapax_core::transfer::{PAGE_BYTES_MAX, RefusedGroups};
use hapax_core::{
    AdminError, ExportedItem, Fence, Imported, QueueConfig, QueueInfo, QueueName, QueuePause, SendError,
    StoreError, Transfer, TransferScope,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::copy::repeat;

/// The version of the file's format.
const FORMAT_VERSION: u32 = 1;
/// The longest line that is read: the largest message, escaped, with its history.
const LINE_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Items of one import call.
const BATCH_MAX: usize = 200;
/// What queues are closed for while they are exported, in the words of their refusals.
const EXPORT: &str = "a file (hapax export)";
/// How many refusals are kept in words.
const REFUSALS_MAX: usize = 100;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Header {
        version: u32,
        /// Every fence of the source is below this.
        fence: Fence,
    },
    Queue(Box<QueueLine>),
    Item {
        /// The ledger's, if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        queue: Option<QueueName>,
        item: ExportedItem,
    },
    End {
        items: u64,
    },
}

#[derive(Serialize, Deserialize)]
struct QueueLine {
    name: QueueName,
    config: QueueConfig,
    /// As it was before the export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    paused: Option<QueuePause>,
}

/// Why an export or import ended early. What was imported before stays; repeat the import to complete it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The store refused.
    #[error(transparent)]
    Store(#[from] AdminError),
    /// The store has neither export nor import.
    #[error("this store cannot be exported or imported")]
    NotSupported,
    /// The file cannot be read or written.
    #[error("the file: {0}")]
    Io(#[from] std::io::Error),
    /// A line of the file is not what is expected there.
    #[error("line {line}: {problem}")]
    Line {
        /// Counted from 1.
        line: u64,
        /// What is wrong.
        problem: String,
    },
}

impl TransferError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::NotSupported => "not-supported",
            Self::Io(_) => "unavailable",
            Self::Line { .. } => "invalid",
        }
    }
}

impl From<StoreError> for TransferError {
    fn from(error: StoreError) -> Self {
        Self::Store(error.into())
    }
}

/// What to export.
#[derive(Debug, Clone, Default)]
pub struct ExportRequest {
    /// Which queues; none: all of them, and the ledger.
    pub queues: Vec<QueueName>,
    /// Pauses queues that are not paused, and leaves them so. Without it such a queue is refused.
    pub pause: bool,
    /// Who asks, for the audit.
    pub by: String,
}

/// What an export wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ExportReport {
    /// Queues.
    pub queues: u64,
    /// Items of queues and ledger.
    pub items: u64,
    /// What is damaged in the store and was therefore not exported.
    pub damaged: Vec<String>,
}

/// What an import did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Items that are there now and were not before.
    pub added: u64,
    /// Items that were there, or had been imported before.
    pub already_there: u64,
    /// Items that were refused.
    pub refused: u64,
    /// Why; the first hundred.
    pub refusals: Vec<String>,
}

impl ImportReport {
    fn refuse(&mut self, error: &SendError) {
        self.refused += 1;
        if self.refusals.len() < REFUSALS_MAX {
            self.refusals.push(error.to_string());
        }
    }
}

fn transfer(store: &SharedStore) -> Result<&dyn Transfer, TransferError> {
    store.transfer().ok_or(TransferError::NotSupported)
}

fn write(to: &mut impl Write, line: &Line) -> Result<(), TransferError> {
    serde_json::to_writer(&mut *to, line).map_err(std::io::Error::from)?;
    Ok(to.write_all(b"\n")?)
}

/// Writes queues, and the ledger with them if no queue is named, as JSON lines. Stop workers and proxies before: a claim
/// that is held is exported as in doubt.
///
/// While they are exported the queues are closed, as for a [copy](crate::copy): every operation on them is refused, and time
/// does not change them, so that no message moves from a queue that is still to be read into one that was read. Then they are
/// paused. If the process dies meanwhile they stay closed, until the export is repeated or [`crate::copy::release`] opens them.
pub async fn export(
    store: &SharedStore,
    request: &ExportRequest,
    to: &mut impl Write,
) -> Result<ExportReport, TransferError> {
    let source = transfer(store)?;
    let mut queues = store.queues().await?;
    if let Some(missing) = request.queues.iter().find(|name| !queues.iter().any(|info| info.name == **name)) {
        return Err(StoreError::NoSuchQueue(missing.clone()).into());
    }
    queues.retain(|info| request.queues.is_empty() || request.queues.contains(&info.name));
    for info in queues.iter().filter(|info| info.paused.is_none()) {
        if request.pause {
            store.pause_queue(&info.name, &request.by, Some("exported")).await?;
        } else {
            // The store refuses it, because the queue is not paused.
            source.export(&TransferScope::Queue(info.name.clone()), None, 1).await?;
        }
    }
    let mut closed = Vec::new();
    let written = match close(source, &queues, &request.by, &mut closed).await {
        Ok(()) => export_queues(source, request, queues, to).await,
        Err(error) => Err(error),
    };
    let mut opened = Ok(());
    for scope in &closed {
        opened = opened.and(repeat(|| source.set_copy(scope, None, &request.by)).await);
    }
    let report = written?;
    opened?;
    Ok(report)
}

/// Closes the queues for the export. What is closed for a copy to another store stays as it is.
async fn close(
    source: &dyn Transfer,
    queues: &[QueueInfo],
    by: &str,
    closed: &mut Vec<TransferScope>,
) -> Result<(), TransferError> {
    let state = CopyState::To { store: EXPORT.to_owned(), complete: false };
    for info in queues {
        let before = info.paused.as_ref().and_then(|paused| paused.copy.as_ref());
        if before.is_none_or(|before| *before == state) {
            let scope = TransferScope::Queue(info.name.clone());
            closed.push(scope.clone());
            repeat(|| source.set_copy(&scope, Some(state.clone()), by)).await?;
        }
    }
    Ok(())
}

async fn export_queues(
    source: &dyn Transfer,
    request: &ExportRequest,
    queues: Vec<QueueInfo>,
    to: &mut impl Write,
) -> Result<ExportReport, TransferError> {
    let mut report = ExportReport { queues: queues.len() as u64, ..ExportReport::default() };
    // Read after the pause: no delivery has a higher fence.
    write(to, &Line::Header { version: FORMAT_VERSION, fence: source.fence_bound().await? })?;
    let queues = dead_letters_first(queues);
    for QueueInfo { name, config, paused, .. } in &queues {
        let paused = paused.clone().filter(|paused| !paused.copy_only);
        let (name, config) = (name.clone(), config.clone());
        write(to, &Line::Queue(Box::new(QueueLine { name, config, paused })))?;
    }
    if request.queues.is_empty() {
        export_scope(source, None, to, &mut report).await?;
    }
    for info in queues {
        export_scope(source, Some(info.name), to, &mut report).await?;
    }
    write(to, &Line::End { items: report.items })?;
    to.flush()?;
    Ok(report)
}

async fn export_scope(
    source: &dyn Transfer,
    queue: Option<QueueName>,
    to: &mut impl Write,
    report: &mut ExportReport,
) -> Result<(), TransferError> {
    let scope = queue.clone().map_or(TransferScope::Ledger, TransferScope::Queue);
    let mut after = None::<String>;
    loop {
        let page = source.export(&scope, after.as_deref(), BATCH_MAX).await?;
        for item in page.items {
            if let ExportedItem::Damaged { what, problem } = &item {
                report.damaged.push(format!("{what}: {problem}"));
                continue;
            }
            report.items += 1;
            write(to, &Line::Item { queue: queue.clone(), item })?;
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// Orders queues so that each comes behind its dead-letter queue, which has to be there first. Where they name each other,
/// the order among them is by name.
pub(crate) fn dead_letters_first(queues: Vec<QueueInfo>) -> Vec<QueueInfo> {
    let (mut ordered, mut left): (Vec<QueueInfo>, Vec<QueueInfo>) = (Vec::new(), queues);
    while !left.is_empty() {
        let waits = |info: &QueueInfo| {
            let dead = info.config.dead_letter.as_ref();
            dead.is_some_and(|dead| left.iter().any(|other| other.name == dead.queue))
        };
        let next = left.iter().position(|info| !waits(info)).unwrap_or(0);
        ordered.push(left.remove(next));
    }
    ordered
}

/// Reads what [`export`] wrote into a store: creates the queues that are missing, and takes over what is not there yet.
pub async fn import(
    store: &SharedStore,
    from: &mut impl BufRead,
    by: &str,
) -> Result<ImportReport, TransferError> {
    let (batch, groups) = (Vec::new(), HashMap::new());
    let mut importing =
        Importer { store, target: transfer(store)?, by, batch, bytes: 0, queue: None, groups };
    let (mut report, mut number, mut text, mut items) = (ImportReport::default(), 0, Vec::new(), 0);
    let wrong = |line: u64, problem: &str| TransferError::Line { line, problem: problem.to_owned() };
    loop {
        text.clear();
        number += 1;
        let read = from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut text)?;
        if read == 0 {
            importing.flush(&mut report).await?;
            let problem =
                "the file ends before its last line: part of it is missing; repeat with the whole file";
            return Err(wrong(number, problem));
        }
        if read as u64 == LINE_BYTES_MAX {
            return Err(wrong(number, "the line is longer than 16 MiB"));
        }
        let line = serde_json::from_slice(&text).map_err(|error| wrong(number, &error.to_string()))?;
        match line {
            Line::Header { version: FORMAT_VERSION, fence } if number == 1 => {
                importing.target.raise_fence(fence).await?;
            }
            _ if number == 1 => return Err(wrong(1, "this is no export of Hapax, or of another version")),
            Line::Header { .. } => return Err(wrong(number, "a second header")),
            Line::Queue(queue) => importing.create(*queue).await?,
            Line::Item { queue, item } => {
                items += 1;
                importing.add(queue, item, &mut report).await?;
            }
            Line::End { items: expected } => {
                importing.flush(&mut report).await?;
                let problem = format!("{items} items were read, {expected} were exported");
                return if items == expected { Ok(report) } else { Err(wrong(number, &problem)) };
            }
        }
    }
}

/// An import under way: items of one scope are collected and handed over together.
struct Importer<'a> {
    store: &'a SharedStore,
    target: &'a dyn Transfer,
    by: &'a str,
    queue: Option<QueueName>,
    batch: Vec<ExportedItem>,
    bytes: usize,
    /// The FIFO queues, each with the groups of which an item was refused.
    groups: HashMap<QueueName, RefusedGroups>,
}

impl Importer<'_> {
    async fn create(&mut self, line: QueueLine) -> Result<(), TransferError> {
        if line.config.is_fifo() {
            self.groups.insert(line.name.clone(), RefusedGroups::default());
        }
        self.store.create_queue(&line.name, line.config).await?;
        if let Some(paused) = line.paused {
            self.store.pause_queue(&line.name, self.by, paused.reason.as_deref()).await?;
        }
        Ok(())
    }

    async fn add(
        &mut self,
        queue: Option<QueueName>,
        item: ExportedItem,
        report: &mut ImportReport,
    ) -> Result<(), TransferError> {
        if queue != self.queue || self.batch.len() == BATCH_MAX || self.bytes > PAGE_BYTES_MAX {
            self.flush(report).await?;
        }
        // After the flush: it may have refused an item of the same group.
        let groups = queue.as_ref().and_then(|queue| self.groups.get(queue));
        if let Some(Err(error)) = groups.map(|groups| groups.check(&item)) {
            report.refuse(&error);
            return Ok(());
        }
        self.queue = queue;
        self.bytes += item.bytes();
        self.batch.push(item);
        Ok(())
    }

    async fn flush(&mut self, report: &mut ImportReport) -> Result<(), TransferError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let scope = self.queue.clone().map_or(TransferScope::Ledger, TransferScope::Queue);
        self.bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        let groups: Vec<_> = batch.iter().map(|item| item.group().cloned()).collect();
        for (answer, group) in self.target.import(&scope, batch).await?.into_iter().zip(groups) {
            match answer {
                Ok(Imported::Added) => report.added += 1,
                Ok(Imported::AlreadyThere) => report.already_there += 1,
                Err(error) => {
                    report.refuse(&error);
                    if let Some(groups) = self.queue.as_ref().and_then(|queue| self.groups.get_mut(queue)) {
                        groups.add(group);
                    }
                }
            }
        }
        Ok(())
    }
}
