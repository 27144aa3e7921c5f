//! What senders look for in their messages follows the configuration as it was committed.

use hapax_core::{QueueAdmin, QueueConfig, QueueName, Revision};

use crate::{Embedded, Options};

fn pointer(store: &Embedded, queue: &QueueName) -> Option<String> {
    store
        .state
        .catalogue
        .sender_hints(queue)
        .and_then(|sender_hints| sender_hints.pointer.as_deref().map(str::to_owned))
}

#[tokio::test]
async fn a_refused_change_leaves_what_senders_look_for() {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    let queue = QueueName::new("jobs").unwrap();
    let keyed = |at: &str| QueueConfig { key_pointer: Some(at.to_owned()), ..QueueConfig::default() };
    store.create_queue(&queue, keyed("/a")).await.unwrap();
    assert_eq!(pointer(&store, &queue).as_deref(), Some("/a"));
    store.create_queue(&queue, keyed("/b")).await.unwrap_err();
    assert_eq!(pointer(&store, &queue).as_deref(), Some("/a"));
    store.set_queue(&queue, keyed("/b"), Some(Revision(99))).await.unwrap_err();
    assert_eq!(pointer(&store, &queue).as_deref(), Some("/a"));
    store.set_queue(&queue, keyed("/b"), None).await.unwrap();
    assert_eq!(pointer(&store, &queue).as_deref(), Some("/b"));
    // One that wants nothing of its senders, and one that is gone.
    store.set_queue(&queue, QueueConfig::default(), None).await.unwrap();
    assert_eq!(pointer(&store, &queue), None);
    store.set_queue(&queue, keyed("/c"), None).await.unwrap();
    store.delete_queue(&queue).await.unwrap();
    assert_eq!(pointer(&store, &queue), None);
}
