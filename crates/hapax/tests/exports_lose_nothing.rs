//! An export is one state of the store: time that passes between two of its pages moves nothing past it.

use std::io::Write;
use std::sync::Arc;

use hapax::core::copy::CopyState;
use hapax::core::{ManualClock, TransferScope};
use hapax::embedded::{Embedded, Options};
use hapax::transfer::{ExportRequest, TransferError, export, import};
use hapax::{DeadLetterPolicy, Hapax, NewMessage, QueueConfig, QueueName, Receive, RetryPolicy};

const LEASE_MS: u64 = 30_000;

fn name(text: &str) -> QueueName {
    QueueName::new(text).unwrap()
}

/// Writes to memory, and lets the clock pass the lease when the first item is written.
struct Late {
    written: Vec<u8>,
    clock: Arc<ManualClock>,
    moved: bool,
}

impl Write for Late {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.written.extend_from_slice(bytes);
        if !self.moved && String::from_utf8_lossy(&self.written).contains("{\"item\":") {
            self.moved = true;
            self.clock.advance_ms(LEASE_MS * 2);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Site {
    clock: Arc<ManualClock>,
    hapax: Hapax,
    _folder: tempfile::TempDir,
}

fn open() -> Site {
    let (folder, clock) = (tempfile::tempdir().unwrap(), Arc::new(ManualClock::at_ms(1_800_000_000_000)));
    let store =
        Embedded::open(folder.path(), Options { clock: clock.clone(), ..Options::default() }).unwrap();
    Site { clock, hapax: Hapax::with_store(Arc::new(store)), _folder: folder }
}

/// A queue whose only message is in flight for the last time, and its dead-letter queue, which has a message already.
async fn last_attempt(fifo: bool) -> (Site, QueueName, QueueName) {
    let site = open();
    let suffix = if fifo { ".fifo" } else { "" };
    let (jobs, dead) = (name(&format!("jobs{suffix}")), name(&format!("jobs-dead{suffix}")));
    let plain = if fifo { QueueConfig::fifo() } else { QueueConfig::default() };
    let config = QueueConfig {
        lease_ms: LEASE_MS,
        retry: RetryPolicy::at_once().attempts(1),
        dead_letter: Some(DeadLetterPolicy { queue: dead.clone() }),
        ..plain.clone()
    };
    let store = site.hapax.store();
    store.create_queue(&dead, plain).await.unwrap();
    store.create_queue(&jobs, config).await.unwrap();
    let message = |body: &'static str| {
        let message = NewMessage::new(body);
        if fifo { message.group("g".parse().unwrap()).dedup(body.parse().unwrap()) } else { message }
    };
    store.send(&dead, vec![message("old")]).await.unwrap().remove(0).unwrap();
    store.send(&jobs, vec![message("last")]).await.unwrap().remove(0).unwrap();
    assert_eq!(store.receive(&jobs, Receive::up_to(1)).await.unwrap().len(), 1);
    (site, jobs, dead)
}

async fn a_lease_that_ends_during_the_export(fifo: bool) {
    let (site, jobs, dead) = last_attempt(fifo).await;
    let store = site.hapax.store();
    let mut file = Late { written: Vec::new(), clock: site.clock.clone(), moved: false };
    let request = ExportRequest { pause: true, by: "test".into(), ..ExportRequest::default() };
    let report = export(store, &request, &mut file).await.unwrap();
    assert!(file.moved, "the lease has ended during the export");
    // Two messages, and in a FIFO queue the deduplication id of each.
    let items = if fifo { 4 } else { 2 };
    assert_eq!(report.items, items, "{}", String::from_utf8_lossy(&file.written));

    let target = open();
    let report = import(target.hapax.store(), &mut file.written.as_slice(), "test").await.unwrap();
    assert_eq!((report.added, report.refused), (items, 0), "{report:?}");

    // In the source the queues are paused as before, and time passes again.
    for queue in [&jobs, &dead] {
        let paused = store.queue(queue).await.unwrap().paused.expect("it stays paused");
        assert!(paused.copy.is_none(), "{paused:?}");
    }
    site.clock.advance_ms(LEASE_MS * 2);
    let (jobs, dead) = (store.stats(&jobs).await.unwrap(), store.stats(&dead).await.unwrap());
    assert_eq!((jobs.in_flight + jobs.ready, dead.ready), (0, 2), "{jobs:?} {dead:?}");
}

#[tokio::test]
async fn a_message_that_dies_during_the_export_is_in_it() {
    a_lease_that_ends_during_the_export(false).await;
}

#[tokio::test]
async fn a_fifo_message_that_dies_during_the_export_is_in_it() {
    a_lease_that_ends_during_the_export(true).await;
}

/// A file that cannot be written: the queues are open again.
struct Full;

impl Write for Full {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::StorageFull.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn after_a_failed_export_the_queues_are_open() {
    let (site, jobs, dead) = last_attempt(false).await;
    let store = site.hapax.store();
    let refused = export(store, &ExportRequest::default(), &mut Vec::new()).await.unwrap_err();
    assert!(refused.to_string().contains("pause it first"), "{refused}");
    assert!(store.queue(&jobs).await.unwrap().paused.is_none(), "a refused export changes nothing");

    let request = ExportRequest { pause: true, by: "test".into(), ..ExportRequest::default() };
    let failed = export(store, &request, &mut Full).await.unwrap_err();
    assert!(matches!(failed, TransferError::Io(_)), "{failed}");
    for queue in [&jobs, &dead] {
        assert!(store.queue(queue).await.unwrap().paused.unwrap().copy.is_none());
        store.send(queue, vec![NewMessage::new("more")]).await.unwrap().remove(0).unwrap();
    }
}

/// A process that died during an export leaves its queues closed. The next export takes them over and opens them. What is
/// closed for a copy to another store is exported, and stays closed.
#[tokio::test]
async fn an_export_that_was_killed_is_repeated() {
    let (site, jobs, dead) = last_attempt(false).await;
    let store = site.hapax.store();
    let request = ExportRequest { pause: true, by: "test".into(), ..ExportRequest::default() };
    let set = async |queue: &QueueName, other: &str| {
        let (scope, state) =
            (TransferScope::Queue(queue.clone()), CopyState::To { store: other.to_owned(), complete: false });
        store.transfer().unwrap().set_copy(&scope, Some(state), "test").await.unwrap();
    };
    set(&jobs, "a file (hapax export)").await;
    set(&dead, "postgres://elsewhere/shop").await;
    let refused = store.send(&jobs, vec![NewMessage::new("more")]).await.unwrap_err().to_string();
    assert!(refused.contains("a file (hapax export)"), "{refused}");
    assert_eq!(export(store, &request, &mut Vec::new()).await.unwrap().items, 2);
    let is_open =
        async |queue| store.queue(queue).await.unwrap().paused.is_none_or(|paused| paused.copy.is_none());
    assert!(is_open(&jobs).await && !is_open(&dead).await);
}
