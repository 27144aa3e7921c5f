//! A group that is halted is a finding, so that an operator learns of it before the callers do.

use hapax_core::{
    NewMessage, OnDead, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive, Settle, Settlement,
};
use hapax_embedded::{Embedded, Options};

async fn findings(store: &Embedded) -> Vec<(String, String)> {
    let found = store.examine().await.unwrap().findings.into_iter();
    found.filter(|finding| finding.code == "groups-halted").map(|f| (f.code.to_string(), f.message)).collect()
}

#[tokio::test]
async fn a_halted_group_is_a_finding_until_it_is_decided_about() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Embedded::open(folder.path(), Options::default()).unwrap();
    let jobs = QueueName::new("jobs.fifo").unwrap();
    let config = QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::sqs_fifo() };
    store.create_queue(&jobs, config).await.unwrap();
    for number in ["1", "2", "3"] {
        let message = NewMessage::new(number).group("g".parse().unwrap()).dedup(number.parse().unwrap());
        store.send(&jobs, vec![message]).await.unwrap().remove(0).unwrap();
    }
    assert_eq!(findings(&store).await, []);
    let got = store.receive(&jobs, Receive::up_to(1)).await.unwrap().remove(0);
    let park = Settle::new(got.receipt, Settlement::Park { reason: "in doubt".into() });
    store.settle(&jobs, vec![park]).await.unwrap().remove(0).unwrap();
    for _ in 0..2 {
        let found = findings(&store).await;
        assert_eq!(found.len(), 1);
        let message = &found[0].1;
        assert!(message.contains("jobs.fifo (1 group, 2 messages wait)"), "{message}");
        store.close();
        store = Embedded::open(folder.path(), Options::default()).unwrap();
    }
    store.release(&jobs, vec![got.id]).await.unwrap();
    assert_eq!(findings(&store).await, []);
}
