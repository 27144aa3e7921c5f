//! Listings are answered while the writer is busy.

use std::sync::mpsc;
use std::time::Duration;

use hapax_core::{QueueAdmin, QueueConfig, QueueName, StoreError};

use crate::writer::{AfterWave, EngineJob, Op};
use crate::{Embedded, Options};

fn name(number: u32) -> QueueName {
    QueueName::new(format!("queue-{number:05}")).unwrap()
}

/// Holds the writer inside a wave until the sender is dropped.
fn hold_writer(store: &Embedded) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel();
    let job: EngineJob = Box::new(move |_, _| {
        begun.send(()).unwrap();
        let _ = held.recv();
        Box::new(drop) as AfterWave
    });
    store.state.op_queue.push(Op::Job(job)).unwrap();
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
