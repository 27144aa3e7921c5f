//! Operations on queues: creating, changing, listing, deleting.

use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::{
    AdminError, Browse, Extend, NewMessage, QueueConfig, QueueKind, QueueName, Receipt, RedriveAllow, Settle,
    StoreError,
};

use crate::trial::Trial;
use crate::values::{config, dedup, dying, now, queue, receive_waiting, redrive_from, text};

fn dies_into(dead: &QueueName) -> QueueConfig {
    dying(dead, 3, config())
}

pub(crate) async fn creating_a_queue_twice_is_no_error_unless_its_settings_differ(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    assert_eq!(t.store().create_queue(&jobs, config()).await, Ok(false));
    let other = t.store().create_queue(&jobs, QueueConfig { delay_ms: 5, ..config() }).await;
    assert!(
        matches!(&other, Err(AdminError::Exists(name, field)) if *name == jobs && field == "delay_ms"),
        "{other:?}"
    );
    assert_eq!(t.config_of(&jobs).await, config());
    t.one(&jobs).await;
}

pub(crate) async fn a_missing_queue_is_named(t: Trial) {
    let gone = queue("gone");
    let no_such = StoreError::NoSuchQueue(gone.clone());
    let admin = AdminError::Store(no_such.clone());
    let receipt = Receipt::new("any").unwrap();
    let s = t.store();
    assert_eq!(s.send(&gone, vec![NewMessage::new("x")]).await, Err(no_such.clone()));
    assert_eq!(s.receive(&gone, now(1)).await, Err(no_such.clone()));
    assert_eq!(s.settle(&gone, vec![Settle::ack(receipt.clone())]).await, Err(no_such.clone()));
    assert_eq!(
        s.extend(&gone, vec![Extend { receipt, lease_ms: 1, own_lease: false }]).await,
        Err(no_such.clone())
    );
    assert_eq!(s.queue(&gone).await, Err(no_such.clone()));
    assert_eq!(s.stats(&gone).await, Err(no_such.clone()));
    assert_eq!(s.purge(&gone).await, Err(no_such.clone()));
    assert_eq!(s.delete_queue(&gone).await, Err(no_such.clone()));
    assert_eq!(s.browse(&gone, Browse { limit: 1, ..Browse::default() }).await, Err(no_such.clone()));
    assert_eq!(s.discard(&gone, Vec::new(), "suite").await, Err(no_such.clone()));
    assert_eq!(s.release(&gone, Vec::new()).await, Err(no_such.clone()));
    assert_eq!(s.halted_groups(&gone).await, Err(no_such.clone()));
    assert_eq!(s.set_queue(&gone, config(), None).await, Err(admin.clone()));
    assert_eq!(s.pause_queue(&gone, "suite", None).await, Err(no_such.clone()));
    assert_eq!(s.resume_queue(&gone, "suite").await, Err(no_such));
    assert_eq!(s.start_redrive(redrive_from(&gone)).await, Err(admin));
}

pub(crate) async fn a_waiting_receive_on_a_missing_queue_fails_at_once(t: Trial) {
    let got = t.within("receive", t.store().receive(&queue("gone"), receive_waiting(1))).await;
    assert_eq!(got, Err(StoreError::NoSuchQueue(queue("gone"))));
}

pub(crate) async fn a_setting_out_of_range_is_refused(t: Trial) {
    let long = QueueConfig { lease_ms: LEASE_MS_MAX + 1, ..config() };
    let created = t.store().create_queue(&queue("jobs"), long.clone()).await;
    assert!(matches!(created, Err(AdminError::Config { field: "lease_ms", .. })), "{created:?}");
    assert!(t.store().queues().await.unwrap().is_empty());

    let jobs = t.standard("jobs").await;
    let set = t.store().set_queue(&jobs, long, None).await;
    assert!(matches!(set, Err(AdminError::Config { field: "lease_ms", .. })), "{set:?}");
    let set = t.store().set_queue(&jobs, QueueConfig { kind: QueueKind::Fifo, ..config() }, None).await;
    assert!(matches!(set, Err(AdminError::Config { .. })), "the kind cannot change: {set:?}");
    assert_eq!(t.config_of(&jobs).await, config());
}

pub(crate) async fn a_dead_letter_queue_must_exist_and_be_of_the_same_kind(t: Trial) {
    let (jobs, dead) = (queue("jobs"), queue("dead"));
    let missing = t.store().create_queue(&jobs, dies_into(&dead)).await;
    assert!(matches!(missing, Err(AdminError::Config { .. })), "{missing:?}");
    t.standard("jobs").await;
    let missing = t.store().set_queue(&jobs, dies_into(&dead), None).await;
    assert!(matches!(missing, Err(AdminError::Config { .. })), "{missing:?}");

    let fifo = t.fifo("dead").await;
    let other_kind = t.store().set_queue(&jobs, dies_into(&fifo), None).await;
    assert!(matches!(other_kind, Err(AdminError::Config { .. })), "{other_kind:?}");

    t.standard("dead").await;
    t.set(&jobs, dies_into(&dead)).await;
    assert_eq!(t.config_of(&jobs).await, dies_into(&dead));
}

pub(crate) async fn a_dead_letter_queue_must_allow_its_source(t: Trial) {
    let dead = t.create("dead", QueueConfig { redrive_allow: RedriveAllow::None, ..config() }).await;
    let jobs = queue("jobs");
    let refused = t.store().create_queue(&jobs, dies_into(&dead)).await;
    assert!(matches!(refused, Err(AdminError::Config { .. })), "{refused:?}");

    let only =
        |name: &str| QueueConfig { redrive_allow: RedriveAllow::Queues(vec![queue(name)]), ..config() };
    t.set(&dead, only("other")).await;
    let refused = t.store().create_queue(&jobs, dies_into(&dead)).await;
    assert!(matches!(refused, Err(AdminError::Config { .. })), "{refused:?}");

    t.set(&dead, only("jobs")).await;
    assert_eq!(t.store().create_queue(&jobs, dies_into(&dead)).await, Ok(true));
}

pub(crate) async fn queues_are_listed_in_order_of_name_and_survive_a_restart(mut t: Trial) {
    for name in ["b", "c", "a"] {
        t.create(name, QueueConfig { tags: [("name".into(), name.into())].into(), ..config() }).await;
    }
    let before = t.store().queues().await.unwrap();
    assert_eq!(before.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    t.restart().await;
    assert_eq!(t.store().queues().await.unwrap(), before);
    t.crash().await;
    assert_eq!(t.store().queues().await.unwrap(), before);
    assert_eq!(t.store().queue(&queue("b")).await.unwrap(), before[1]);
}

pub(crate) async fn changed_settings_hold_at_once_and_through_a_restart(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let changed = QueueConfig { lease_ms: 5_000, delay_ms: 0, ..config() };
    t.set(&jobs, changed.clone()).await;
    t.send_all(&jobs, &["a"]).await;
    let first = t.one(&jobs).await;
    assert!((4_000..=5_000).contains(&first.lease_ms), "{}", first.lease_ms);
    t.restart().await;
    assert_eq!(t.config_of(&jobs).await, changed);
}

pub(crate) async fn a_deleted_queue_is_gone_and_its_name_starts_empty(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let message = || text("a").dedup(dedup("once"));
    t.send(&jobs, message()).await;
    t.send_all(&jobs, &["b"]).await;
    let held = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.store().delete_queue(&jobs).await, Ok(()));
    assert_eq!(t.store().receive(&jobs, now(1)).await, Err(StoreError::NoSuchQueue(jobs.clone())));
    t.restart().await;
    assert!(t.store().queues().await.unwrap().is_empty());

    t.standard("jobs").await;
    t.none(&jobs).await;
    assert!(t.browse(&jobs).await.is_empty());
    assert_eq!(t.stats(&jobs).await.bytes, 0);
    assert!(
        t.settle(&jobs, &held, hapax_core::Settlement::Ack).await.is_err(),
        "the old queue's receipt settles nothing"
    );
    assert!(!t.send(&jobs, message()).await.duplicate, "deduplication ids went with the queue");
    t.one(&jobs).await;
}

pub(crate) async fn queues_do_not_share_messages(t: Trial) {
    let (a, b) = (t.standard("a").await, t.standard("b").await);
    t.send_all(&a, &["for-a"]).await;
    t.none(&b).await;
    assert_eq!(t.one(&a).await.body, "for-a");
}
