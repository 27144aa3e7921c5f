//! The memory of one call is bounded in bytes, not only in messages.

use hapax_core::{Browse, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive};
use hapax_embedded::{Embedded, Options};

const MIB: usize = 1024 * 1024;

async fn twenty_large_messages() -> (tempfile::TempDir, Embedded, QueueName) {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path().join("store"), Options::default()).unwrap();
    let queue = QueueName::new("large").unwrap();
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    for _ in 0..20 {
        let sent = store.send(&queue, vec![NewMessage::new(vec![b'x'; MIB])]).await.unwrap();
        assert!(sent[0].is_ok());
    }
    (folder, store, queue)
}

#[tokio::test]
async fn a_receive_of_large_messages_gives_as_many_as_fit() {
    let (_folder, store, queue) = twenty_large_messages().await;
    let first = store.receive(&queue, Receive::up_to(1000)).await.unwrap();
    assert_eq!(first.len(), 16);
    assert_eq!(store.receive(&queue, Receive::up_to(1000)).await.unwrap().len(), 4);
}

#[tokio::test]
async fn a_page_of_large_messages_is_short_and_the_next_continues() {
    let (_folder, store, queue) = twenty_large_messages().await;
    let all = Browse { limit: 1000, ..Browse::default() };
    let page = store.browse(&queue, all.clone()).await.unwrap();
    assert_eq!(page.items.len(), 16);
    let rest = store.browse(&queue, Browse { after: page.next, ..all }).await.unwrap();
    assert_eq!((rest.items.len(), rest.next), (4, None));
}

#[tokio::test]
async fn a_page_never_shows_what_was_purged() {
    let (_folder, store, queue) = twenty_large_messages().await;
    store.purge(&queue).await.unwrap();
    for after in [None, Some(0), Some(u64::MAX)] {
        let page = store.browse(&queue, Browse { after, limit: 5, ..Browse::default() }).await.unwrap();
        assert!(page.items.is_empty(), "{after:?}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn only_the_owner_can_read_a_new_store_and_its_backups() {
    use std::os::unix::fs::PermissionsExt as _;
    let (folder, store, _) = twenty_large_messages().await;
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o077;
    assert_eq!(mode(&folder.path().join("store")), 0);
    let backup = folder.path().join("backup.db");
    store.backup(&backup).unwrap();
    assert_eq!(mode(&backup), 0);
}
