//! Listings are answered while the writer is busy.

use std::sync::mpsc;
use std::time::Duration;

use hapax_core::{QueueAdmin, QueueConfig, QueueName, StoreError};

use crate::writer::{Done, Job, Op};
use crate::{Embedded, Options};

fn name(number: u32) -> QueueName {
    QueueName::new(format!("queue-{number:05}")).unwrap()
}

/// Holds the writer inside a wave until the sender is dropped.
fn hold_writer(store: &Embedded) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel();
    let job: Job = Box::new(move |_, _| {
        begun.send(()).unwrap();
        let _ = held.recv();
        Box::new(drop) as Done
    });
    store.shared.inbox.push(Op::Job(job)).unwrap();
    begins.recv().unwrap();
    release
}

#[tokio::test]
async fn queues_are_listed_while_the_writer_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    for number in [2, 0, 1] {
        store.create_queue(&name(number), QueueConfig::default()).await.unwrap();
    }
    let changed = QueueConfig { delay_ms: 7, ..QueueConfig::default() };
    store.set_queue(&name(1), changed.clone(), None).await.unwrap();
    store.delete_queue(&name(0)).await.unwrap();

    let release = hold_writer(&store);
    let look = async {
        let listed = store.queues().await.unwrap();
        let names: Vec<_> = listed.iter().map(|info| info.name.clone()).collect();
        assert_eq!(names, [name(1), name(2)]);
        assert_eq!(listed[0].config, changed, "what was answered is seen");
        assert_eq!(store.queue(&name(1)).await.unwrap(), listed[0]);
        assert_eq!(store.queue(&name(0)).await, Err(StoreError::NoSuchQueue(name(0))));
    };
    tokio::time::timeout(Duration::from_secs(20), look).await.expect("a listing waits for the writer");
    drop(release);

    store.close();
    assert!(matches!(store.queues().await, Err(StoreError::Unavailable(_))));
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    assert_eq!(store.queues().await.unwrap().len(), 2, "also after a restart");
}

/// What a send costs while others list all queues of a store with many; run by hand, for its figures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a test"]
async fn measure_sends_beside_listings_of_30_000_queues() {
    use hapax_core::{NewMessage, QueueStore};
    let folder = tempfile::tempdir().unwrap();
    let store = std::sync::Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
    let create = |number| {
        let store = store.clone();
        async move { store.create_queue(&name(number), QueueConfig::default()).await.unwrap() }
    };
    for batch in 0..300 {
        let tasks: Vec<_> = (0..100).map(|number| tokio::spawn(create(batch * 100 + number))).collect();
        for task in tasks {
            task.await.unwrap();
        }
    }
    for listing in [false, true] {
        let lists = listing.then(|| {
            let store = store.clone();
            tokio::spawn(async move {
                loop {
                    assert_eq!(store.queues().await.unwrap().len(), 30_000);
                }
            })
        });
        let mut took = Vec::new();
        for _ in 0..300 {
            let start = std::time::Instant::now();
            store.send(&name(7), vec![NewMessage::new("x")]).await.unwrap();
            took.push(start.elapsed());
        }
        took.sort();
        let (p50, p99) = (took[150], took[297]);
        eprintln!("listings: {listing}; a send takes p50 {p50:?}, p99 {p99:?}");
        if let Some(lists) = lists {
            lists.abort();
        }
    }
}
