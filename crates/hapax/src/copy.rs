//! Copying a store to another one: queues, messages and ledger, directly, and so that it can be repeated.
//!
//! The source is closed first and stays closed: sends, receives, settles and claims are refused there, and name the target.
//! A queue of the target is closed until everything is there and the checksums of both sides are equal; then all of them
//! are opened. After a crash the same call continues: what is there already is not added again. [`release`] opens the
//! source again.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (old, new) = (tempfile::tempdir()?, tempfile::tempdir()?);
//! use hapax::Hapax;
//! use hapax::copy::{CopyRequest, copy};
//!
//! # let old = format!("embedded:{}", old.path().display());
//! # let new = format!("embedded:{}", new.path().display());
//! let request = CopyRequest::new(&old, &new, "docs");
//! let (old, new) = (Hapax::open(&old).await?, Hapax::open(&new).await?);
//! let jobs = old.queue::<u64>("jobs")?;
//! jobs.ensure(hapax::QueueConfig::default()).await?;
//! jobs.send(&7).await?;
//!
//! let report = copy(old.store(), new.store(), &request, &mut |_| {}).await?;
//! assert_eq!(report.items(), 1);
//! assert!(jobs.send(&8).await.is_err(), "the source is closed");
//! assert_eq!(new.queue::<u64>("jobs")?.receive(hapax::Receive::up_to(10)).await?.len(), 1);
//! # Ok(())
//! # }
//! ```

mod plan;

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use hapax_core::copy::Checksum;
use hapax_core::store::SharedStore;
use hapax_core::{
    AdminError, CopyState, ExportedItem, Imported, QueueName, Scope, SendError, StoreError, Transfer,
    TransferScope,
};
use serde::Serialize;
use thiserror::Error;

pub use plan::{CopyPlan, PlannedQueue, plan};

/// Items of one page.
const PAGE_MAX: usize = 500;
/// How often a call is repeated that failed for a while.
const TRIES_MAX: u32 = 12;
/// The longest pause before it is repeated.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What to copy.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// Which queues, and the entries of the ledger in their scopes; none: all queues, and the whole ledger.
    pub queues: Vec<QueueName>,
    /// The name of the source, which the target's refusals give; without secrets.
    pub from: String,
    /// The name of the target, which the source's refusals give; without secrets. A copy is continued under the same name.
    pub to: String,
    /// Who asks, for the audit.
    pub by: String,
}

impl CopyRequest {
    /// A copy of everything. Passwords and keys in the URLs are left out.
    pub fn new(from: &str, to: &str, by: &str) -> Self {
        let (from, to) = (crate::without_secrets(from), crate::without_secrets(to));
        Self { queues: Vec::new(), from, to, by: by.to_owned() }
    }

    fn closed(&self, complete: bool) -> CopyState {
        CopyState::To { store: self.to.clone(), complete }
    }

    fn filling(&self) -> CopyState {
        CopyState::From { store: self.from.clone() }
    }

    fn whole(&self) -> bool {
        self.queues.is_empty()
    }
}

/// Why a copy ended early. What was copied stays, and the source stays closed; repeat the copy to complete it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// A store refused, or could not be reached.
    #[error("{side}: {error}")]
    Store {
        /// `the source` or `the target`.
        side: &'static str,
        /// Why.
        error: AdminError,
    },
    /// A store has neither export nor import.
    #[error("{0} cannot be copied: it has no export and import")]
    NotSupported(&'static str),
    /// The copy is not possible as things are. Nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// The target did not take an item.
    #[error("the target refused an item of {what}: {problem}")]
    Item {
        /// For example `queue jobs`.
        what: String,
        /// Why.
        problem: String,
    },
    /// The two sides are not equal.
    #[error(
        "{what} differs after the copy: {source_items} items with checksum {source_sum} in the source, {target_items} with \
         {target_sum} in the target; delete it in the target and repeat, or open the source again with `hapax copy --release`"
    )]
    Differs {
        /// For example `queue jobs`.
        what: String,
        /// Items of the source.
        source_items: u64,
        /// Their checksum.
        source_sum: String,
        /// Items of the target.
        target_items: u64,
        /// Their checksum.
        target_sum: String,
    },
}

impl CopyError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store { error, .. } => error.code(),
            Self::NotSupported(_) => "not-supported",
            Self::Refused(_) | Self::Item { .. } => "refused",
            Self::Differs { .. } => "revision-conflict",
        }
    }
}

fn in_source(error: impl Into<AdminError>) -> CopyError {
    CopyError::Store { side: "the source", error: error.into() }
}

fn in_target(error: impl Into<AdminError>) -> CopyError {
    CopyError::Store { side: "the target", error: error.into() }
}

/// What a copy has just done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyProgress {
    /// This is closed in the source.
    Closed(String),
    /// This is there in the target, closed and perhaps not complete.
    Created(String),
    /// A page was copied.
    Page {
        /// For example `queue jobs`.
        what: String,
        /// Items so far.
        items: u64,
        /// Items when the copy began.
        total: u64,
    },
    /// Both sides are equal.
    Verified(String),
    /// It is marked as complete in the source.
    Completed(String),
    /// It is open in the target.
    Opened(String),
}

/// One part of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CopiedPart {
    /// `ledger`, or `queue` and its name.
    pub what: String,
    /// Messages and halted groups, or entries.
    pub items: u64,
    /// Deduplication ids that the queue remembers.
    pub remembered: u64,
    /// How many of all these this run added.
    pub added: u64,
    /// Of both sides; `None`: an earlier run had completed it.
    pub checksum: Option<String>,
}

/// What a copy did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// The ledger first, then the queues.
    pub parts: Vec<CopiedPart>,
    /// What is damaged in the source and was therefore not copied.
    pub damaged: Vec<String>,
}

impl CopyReport {
    /// Messages, halted groups and entries of the ledger.
    pub fn items(&self) -> u64 {
        self.parts.iter().map(|part| part.items).sum()
    }

    /// What this run added to the target.
    pub fn added(&self) -> u64 {
        self.parts.iter().map(|part| part.added).sum()
    }
}

/// Repeats a call while its error is one that passes. Every call of a copy can be repeated.
pub(crate) async fn repeat<T, E, F>(mut call: impl FnMut() -> F) -> Result<T, AdminError>
where
    E: Into<AdminError>,
    F: Future<Output = Result<T, E>>,
{
    let mut tries = 0;
    loop {
        let error = match call().await {
            Ok(done) => return Ok(done),
            Err(error) => error.into(),
        };
        tries += 1;
        let passes = matches!(
            error,
            AdminError::Store(
                StoreError::Unavailable(_)
                    | StoreError::OutcomeUnknown(_)
                    | StoreError::Full(_)
                    | StoreError::Overloaded(_)
            )
        );
        if !passes || tries == TRIES_MAX {
            return Err(error);
        }
        tokio::time::sleep(PAUSE_MAX.min(Duration::from_millis(50 << tries))).await;
    }
}

fn transfer<'s>(store: &'s SharedStore, side: &'static str) -> Result<&'s dyn Transfer, CopyError> {
    store.transfer().ok_or(CopyError::NotSupported(side))
}

fn name_of(scope: &TransferScope) -> String {
    match scope {
        TransferScope::Queue(queue) => format!("queue {queue}"),
        TransferScope::Ledger => "the ledger".to_owned(),
    }
}

/// A copy under way.
struct Copier<'c> {
    source: &'c dyn Transfer,
    target: &'c dyn Transfer,
    request: &'c CopyRequest,
    tell: &'c mut (dyn FnMut(&CopyProgress) + Send),
    report: CopyReport,
}

/// Copies queues and ledger, or continues to; see the [module](self). `tell` is called after each step.
pub async fn copy(
    source: &SharedStore,
    target: &SharedStore,
    request: &CopyRequest,
    tell: &mut (dyn FnMut(&CopyProgress) + Send),
) -> Result<CopyReport, CopyError> {
    let plan = plan(source, target, request).await?;
    let (from, to) = (transfer(source, "the source")?, transfer(target, "the target")?);
    let mut copier = Copier { source: from, target: to, request, tell, report: CopyReport::default() };
    copier.close(&plan).await?;
    copier.check_not_same().await?;
    let bound = repeat(|| from.fence_bound()).await.map_err(in_source)?;
    repeat(|| to.raise_fence(bound)).await.map_err(in_target)?;
    for queue in plan.open_queues() {
        plan::create(target, queue, request).await?;
        (copier.tell)(&CopyProgress::Created(format!("queue {}", queue.info.name)));
    }
    copier.ledger(&plan).await?;
    for queue in &plan.queues {
        copier.queue(queue).await?;
    }
    copier.open(&plan).await?;
    Ok(copier.report)
}

/// Opens what was closed in a store for a copy: queues, or, if none is named, all of them and the ledger. Gives their names.
/// What was done in the target since is not brought back.
pub async fn release(store: &SharedStore, queues: &[QueueName], by: &str) -> Result<Vec<String>, CopyError> {
    let side = transfer(store, "the store")?;
    let infos = repeat(|| store.queues()).await.map_err(in_source)?;
    if let Some(missing) = queues.iter().find(|name| !infos.iter().any(|info| info.name == **name)) {
        return Err(in_source(StoreError::NoSuchQueue(missing.clone())));
    }
    let closed = |info: &&hapax_core::QueueInfo| {
        let named = queues.is_empty() || queues.contains(&info.name);
        named && info.paused.as_ref().is_some_and(|paused| paused.copy.is_some())
    };
    let mut scopes: Vec<TransferScope> =
        infos.iter().filter(closed).map(|info| TransferScope::Queue(info.name.clone())).collect();
    if queues.is_empty() && repeat(|| side.ledger_copy()).await.map_err(in_source)?.is_some() {
        scopes.push(TransferScope::Ledger);
    }
    for scope in &scopes {
        repeat(|| side.set_copy(scope, None, by)).await.map_err(in_source)?;
    }
    Ok(scopes.iter().map(name_of).collect())
}

impl Copier<'_> {
    /// Closes everything before anything is read: a message may die into another queue until then.
    async fn close(&mut self, plan: &CopyPlan) -> Result<(), CopyError> {
        let queues = plan.open_queues().map(|queue| TransferScope::Queue(queue.info.name.clone()));
        let ledger = (self.request.whole() && !plan.ledger_complete).then_some(TransferScope::Ledger);
        for scope in queues.chain(ledger) {
            let close = || self.source.set_copy(&scope, Some(self.request.closed(false)), &self.request.by);
            repeat(close).await.map_err(in_source)?;
            (self.tell)(&CopyProgress::Closed(name_of(&scope)));
        }
        Ok(())
    }

    /// A ledger that was closed in the source and is closed in the target for the same reason is one ledger.
    async fn check_not_same(&self) -> Result<(), CopyError> {
        let there = repeat(|| self.target.ledger_copy()).await.map_err(in_target)?;
        let CopyRequest { from, to, by, .. } = self.request;
        if !matches!(there, Some(CopyState::To { store, .. }) if store == *to) {
            return Ok(());
        }
        let scope = TransferScope::Ledger;
        repeat(|| self.source.set_copy(&scope, None, by)).await.map_err(in_source)?;
        Err(CopyError::Refused(format!("{from} and {to} lead to one store; its ledger is open again")))
    }

    /// The entries of the ledger that are copied, page by page.
    fn is_wanted(&self, scopes: &HashSet<Scope>, item: &ExportedItem) -> bool {
        let of_queue = |item: &ExportedItem| match item {
            ExportedItem::Entry(entry) => scopes.contains(&entry.id.scope),
            _ => true,
        };
        self.request.whole() || of_queue(item)
    }

    async fn ledger(&mut self, plan: &CopyPlan) -> Result<(), CopyError> {
        let scope = TransferScope::Ledger;
        if plan.ledger_complete || (!self.request.whole() && plan.open_queues().next().is_none()) {
            if self.request.whole() {
                self.report.parts.push(skipped(&scope));
            }
            return Ok(());
        }
        let scopes: HashSet<Scope> =
            plan.open_queues().map(|queue| Scope::of_queue(&queue.info.name)).collect();
        let (mut after, mut ids) = (None::<String>, HashSet::new());
        let (mut sum, mut part) = (Checksum::of_ledger(), skipped(&scope));
        loop {
            let page = repeat(|| self.source.export(&scope, after.as_deref(), PAGE_MAX));
            let page = page.await.map_err(in_source)?;
            let items = self.sound(page.items);
            let items: Vec<_> = items.into_iter().filter(|item| self.is_wanted(&scopes, item)).collect();
            for item in &items {
                sum.add(item);
                ids.extend(hash_of(item));
            }
            part.added += self.import(&scope, items).await?;
            self.tell_page(&scope, sum.items(), plan.entries);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        part.items = sum.items();
        if self.request.whole() {
            let there = self.sum_of_target(&scope, Checksum::of_ledger(), Some(&ids)).await?;
            part.checksum = Some(sum.to_string());
            self.compare(&scope, &sum, &there)?;
            self.complete(&scope).await?;
        }
        // Else the ledger is open, and what was copied by an earlier run may have changed since.
        self.report.parts.push(part);
        Ok(())
    }

    async fn queue(&mut self, queue: &PlannedQueue) -> Result<(), CopyError> {
        let scope = TransferScope::Queue(queue.info.name.clone());
        let mut part = skipped(&scope);
        if queue.complete {
            self.report.parts.push(part);
            return Ok(());
        }
        let (mut sum, mut after) = (Checksum::of_queue(), None::<String>);
        loop {
            let page = repeat(|| self.source.export(&scope, after.as_deref(), PAGE_MAX));
            let page = page.await.map_err(in_source)?;
            let items = self.sound(page.items);
            let mut remembered = Vec::new();
            for item in &items {
                match item {
                    ExportedItem::Dedup(_) => remembered.push(item.clone()),
                    _ => sum.add(item),
                }
            }
            part.remembered += remembered.len() as u64;
            part.added += self.import(&scope, items).await?;
            // What the target remembers depends on its clock, so it is asked: nothing is left to add.
            let missing = self.import(&scope, remembered).await?;
            if missing > 0 {
                let problem = format!("{missing} deduplication ids were not kept");
                return Err(CopyError::Item { what: name_of(&scope), problem });
            }
            self.tell_page(&scope, sum.items(), queue.messages);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let there = self.sum_of_target(&scope, Checksum::of_queue(), None).await?;
        (part.items, part.checksum) = (sum.items(), Some(sum.to_string()));
        self.compare(&scope, &sum, &there)?;
        self.report.parts.push(part);
        Ok(())
    }

    /// Marks the queues as complete in the source, then opens them in the target. All of them at the end: a dead letter
    /// that is taken out of its queue earlier would be missing when its group is copied.
    async fn open(&mut self, plan: &CopyPlan) -> Result<(), CopyError> {
        for queue in &plan.queues {
            let scope = TransferScope::Queue(queue.info.name.clone());
            if !queue.complete {
                self.complete(&scope).await?;
            }
            if queue.filling || !queue.complete {
                let open = repeat(|| self.target.set_copy(&scope, None, &self.request.by));
                open.await.map_err(in_target)?;
                (self.tell)(&CopyProgress::Opened(name_of(&scope)));
            }
        }
        Ok(())
    }

    async fn complete(&mut self, scope: &TransferScope) -> Result<(), CopyError> {
        let state = self.request.closed(true);
        let complete = || self.source.set_copy(scope, Some(state.clone()), &self.request.by);
        repeat(complete).await.map_err(in_source)?;
        (self.tell)(&CopyProgress::Completed(name_of(scope)));
        Ok(())
    }

    /// Leaves out what is damaged, and reports it.
    fn sound(&mut self, items: Vec<ExportedItem>) -> Vec<ExportedItem> {
        let mut sound = Vec::with_capacity(items.len());
        for item in items {
            match item {
                ExportedItem::Damaged { what, problem } => {
                    self.report.damaged.push(format!("{what}: {problem}"));
                }
                item => sound.push(item),
            }
        }
        sound
    }

    /// Adds items to the target; says how many were new.
    async fn import(&mut self, scope: &TransferScope, items: Vec<ExportedItem>) -> Result<u64, CopyError> {
        if items.is_empty() {
            return Ok(0);
        }
        let answers = repeat(|| self.target.import(scope, items.clone())).await.map_err(in_target)?;
        let mut added = 0;
        for answer in answers {
            match answer {
                Ok(Imported::Added) => added += 1,
                Ok(Imported::AlreadyThere) => {}
                Err(error) => return Err(refused(scope, &error)),
            }
        }
        Ok(added)
    }

    /// The checksum of the target; of a ledger only these entries.
    async fn sum_of_target(
        &self,
        scope: &TransferScope,
        mut sum: Checksum,
        ids: Option<&HashSet<u128>>,
    ) -> Result<Checksum, CopyError> {
        let mut after = None::<String>;
        loop {
            let page = repeat(|| self.target.export(scope, after.as_deref(), PAGE_MAX));
            let page = page.await.map_err(in_target)?;
            for item in &page.items {
                let own = |ids: &HashSet<u128>| hash_of(item).is_some_and(|hash| ids.contains(&hash));
                if !matches!(item, ExportedItem::Dedup(_)) && ids.is_none_or(own) {
                    sum.add(item);
                }
            }
            after = page.next;
            if after.is_none() {
                return Ok(sum);
            }
        }
    }

    fn compare(&mut self, scope: &TransferScope, here: &Checksum, there: &Checksum) -> Result<(), CopyError> {
        if here == there {
            (self.tell)(&CopyProgress::Verified(name_of(scope)));
            return Ok(());
        }
        Err(CopyError::Differs {
            what: name_of(scope),
            source_items: here.items(),
            source_sum: here.to_string(),
            target_items: there.items(),
            target_sum: there.to_string(),
        })
    }

    fn tell_page(&mut self, scope: &TransferScope, items: u64, total: u64) {
        (self.tell)(&CopyProgress::Page { what: name_of(scope), items, total: total.max(items) });
    }
}

fn hash_of(item: &ExportedItem) -> Option<u128> {
    match item {
        ExportedItem::Entry(entry) => Some(entry.id.hash()),
        _ => None,
    }
}

fn skipped(scope: &TransferScope) -> CopiedPart {
    CopiedPart { what: name_of(scope), items: 0, remembered: 0, added: 0, checksum: None }
}

fn refused(scope: &TransferScope, error: &SendError) -> CopyError {
    CopyError::Item { what: name_of(scope), problem: error.to_string() }
}
