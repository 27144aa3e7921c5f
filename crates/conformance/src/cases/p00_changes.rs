//! Changing a queue: compare-and-set of its configuration, intervals between purges and recreations, pauses.

use hapax_core::policy::INTERVAL_MS_MAX;
use hapax_core::{AdminError, QueueConfig, QueueInfo, QueueName, Revision};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, in_group, now, queue, receive_waiting, text};

impl Trial {
    async fn info(&self, name: &QueueName) -> QueueInfo {
        self.within("queue", self.store().queue(name)).await.expect("the queue exists")
    }
}

fn delayed(delay_ms: u64) -> QueueConfig {
    QueueConfig { delay_ms, ..config() }
}

pub(crate) async fn a_change_of_a_revision_that_is_not_the_newest_is_refused(t: Trial) {
    let jobs = t.standard("jobs").await;
    let first = t.info(&jobs).await.revision;
    let second = t.store().set_queue(&jobs, delayed(1), Some(first)).await.unwrap();
    assert!(second > first);
    assert_eq!(t.info(&jobs).await.revision, second);
    let stale = t.store().set_queue(&jobs, delayed(2), Some(first)).await;
    let what = format!("queue {jobs}");
    assert_eq!(stale, Err(AdminError::RevisionConflict { what, expected: first, actual: second }));
    assert_eq!(t.config_of(&jobs).await, delayed(1), "nothing was changed");
    let third = t.store().set_queue(&jobs, delayed(3), None).await.unwrap();
    assert!(third > second, "a change that expects nothing has a revision too");
}

pub(crate) async fn an_equal_configuration_keeps_its_revision(t: Trial) {
    let jobs = t.standard("jobs").await;
    let before = t.info(&jobs).await;
    assert_eq!(t.store().set_queue(&jobs, config(), Some(before.revision)).await, Ok(before.revision));
    assert_eq!(t.store().create_queue(&jobs, config()).await, Ok(false));
    assert_eq!(t.info(&jobs).await, before);
    let stale = t.store().set_queue(&jobs, config(), Some(Revision(before.revision.0 + 1))).await;
    assert!(matches!(stale, Err(AdminError::RevisionConflict { .. })), "{stale:?}");
}

pub(crate) async fn concurrent_changes_of_different_fields_lose_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    let change = |n: usize| {
        let (store, jobs) = (t.store(), jobs.clone());
        tokio::spawn(async move {
            loop {
                let QueueInfo { mut config, revision, .. } = store.queue(&jobs).await.unwrap();
                config.tags.insert(format!("tag-{n}"), "x".into());
                match store.set_queue(&jobs, config, Some(revision)).await {
                    Ok(_) => return,
                    Err(AdminError::RevisionConflict { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
    };
    for change in (0..20).map(change).collect::<Vec<_>>() {
        t.within("change", change).await.expect("a task");
    }
    assert_eq!(t.config_of(&jobs).await.tags.len(), 20);
}

pub(crate) async fn revisions_survive_a_restart_and_are_not_used_again(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let first = t.store().set_queue(&jobs, delayed(1), None).await.unwrap();
    t.restart().await;
    assert_eq!(t.info(&jobs).await.revision, first);
    t.store().delete_queue(&jobs).await.unwrap();
    t.standard("jobs").await;
    let again = t.info(&jobs).await.revision;
    assert!(
        again > first,
        "{again} after {first}: what was read of the old queue must not change the new one"
    );
    t.crash().await;
    assert_eq!(t.info(&jobs).await.revision, again);
}

fn too_soon<T: std::fmt::Debug>(answer: Result<T, AdminError>) -> u64 {
    match answer {
        Err(AdminError::TooSoon { retry_after_ms, .. }) => retry_after_ms,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn purges_keep_the_interval_that_is_asked_for(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    assert_eq!(
        t.store().purge_with_interval(&jobs, 60_000).await,
        Ok(0),
        "the first purge waits for nothing"
    );
    t.send_all(&jobs, &["a"]).await;
    assert!((1..=60_000).contains(&too_soon(t.store().purge_with_interval(&jobs, 60_000).await)));
    t.restart().await;
    assert!(
        too_soon(t.store().purge_with_interval(&jobs, 60_000).await) > 0,
        "the interval survives a restart"
    );
    assert_eq!(t.stats(&jobs).await.ready, 1, "a refused purge deletes nothing");
    t.advance(60_000).await;
    assert_eq!(t.store().purge_with_interval(&jobs, 60_000).await, Ok(1));
    assert_eq!(t.store().purge(&jobs).await, Ok(0), "a purge that asks for no interval is done");
    let other = t.standard("other").await;
    assert_eq!(
        t.store().purge_with_interval(&other, 60_000).await,
        Ok(0),
        "queues do not share the interval"
    );
    let long = t.store().purge_with_interval(&jobs, INTERVAL_MS_MAX + 1).await;
    assert!(matches!(long, Err(AdminError::Config { field: "interval_ms", .. })), "{long:?}");
}

pub(crate) async fn a_name_can_be_used_again_after_the_interval(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    assert_eq!(t.store().create_queue_with_interval(&jobs, config(), 60_000).await, Ok(false), "it is there");
    t.store().delete_queue(&jobs).await.unwrap();
    let created = t.store().create_queue_with_interval(&jobs, config(), 60_000).await;
    assert!((1..=60_000).contains(&too_soon(created)));
    t.crash().await;
    assert!(
        too_soon(t.store().create_queue_with_interval(&jobs, config(), 60_000).await) > 0,
        "it survives a crash"
    );
    assert_eq!(t.store().create_queue_with_interval(&queue("other"), config(), 60_000).await, Ok(true));
    t.advance(60_000).await;
    assert_eq!(t.store().create_queue_with_interval(&jobs, config(), 60_000).await, Ok(true));
    t.store().delete_queue(&jobs).await.unwrap();
    assert_eq!(t.store().create_queue(&jobs, config()).await, Ok(true), "no interval was asked for");
    let long = t.store().create_queue_with_interval(&queue("new"), config(), INTERVAL_MS_MAX + 1).await;
    assert!(matches!(long, Err(AdminError::Config { field: "interval_ms", .. })), "{long:?}");
}

pub(crate) async fn a_paused_queue_accepts_and_hands_out_nothing(t: Trial) {
    for jobs in [t.standard("jobs").await, t.fifo("jobs").await] {
        let send = |body: &'static str| if jobs.is_fifo() { in_group("g", body) } else { text(body) };
        t.send(&jobs, send("before")).await;
        let held = t.one(&jobs).await;
        t.store().pause_queue(&jobs, "ann", Some("upgrade")).await.unwrap();
        let paused = t.info(&jobs).await.paused.expect("a listing shows it");
        assert_eq!((paused.by.ends_with("ann"), paused.reason.as_deref()), (true, Some("upgrade")));
        assert!(
            t.store().queues().await.unwrap().iter().any(|info| info.name == jobs && info.paused.is_some())
        );
        t.send(&jobs, send("during")).await;
        assert_eq!(t.store().receive(&jobs, now(10)).await, Ok(Vec::new()));
        t.ack(&jobs, &held).await;
        assert_eq!(t.store().receive(&jobs, now(10)).await, Ok(Vec::new()));
        assert_eq!((t.stats(&jobs).await.ready, t.stats(&jobs).await.in_flight), (1, 0));
        t.store().resume_queue(&jobs, "ann").await.unwrap();
        assert_eq!(t.info(&jobs).await.paused, None);
        assert_eq!(&t.one(&jobs).await.body[..], b"during");
    }
}

pub(crate) async fn a_pause_survives_a_restart_and_changes_no_setting(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let before = t.info(&jobs).await;
    t.store().pause_queue(&jobs, "ann", None).await.unwrap();
    t.store().pause_queue(&jobs, "bob", Some("again")).await.unwrap();
    t.restart().await;
    t.crash().await;
    let after = t.info(&jobs).await;
    let paused = after.paused.clone().expect("still paused");
    assert_eq!((paused.by.ends_with("ann"), paused.reason), (true, None), "the first pause stands");
    assert_eq!(QueueInfo { paused: None, ..after }, before);
    assert_eq!(t.store().create_queue(&jobs, config()).await, Ok(false), "a pause is no other configuration");
    t.send_all(&jobs, &["a"]).await;
    assert_eq!(t.store().receive(&jobs, now(1)).await, Ok(Vec::new()));
    t.store().resume_queue(&jobs, "bob").await.unwrap();
    t.store().resume_queue(&jobs, "bob").await.expect("a queue that is not paused stays as it is");
    t.restart().await;
    t.one(&jobs).await;
}

pub(crate) async fn a_waiting_receive_waits_through_a_pause_and_wakes_when_it_ends(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.store().pause_queue(&jobs, "ann", None).await.unwrap();
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.send_all(&jobs, &["a"]).await;
    t.stats(&jobs).await;
    assert!(!waiting.is_over(), "it was served by a paused queue");
    t.store().resume_queue(&jobs, "ann").await.unwrap();
    assert_eq!(t.woken(waiting).await.len(), 1);
}

pub(crate) async fn leases_run_out_in_a_paused_queue(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.one(&jobs).await;
    t.store().pause_queue(&jobs, "ann", None).await.unwrap();
    t.pass(LEASE_MS).await;
    assert_eq!(t.store().receive(&jobs, now(1)).await, Ok(Vec::new()));
    assert_eq!(t.stats(&jobs).await.in_flight, 0);
    t.store().resume_queue(&jobs, "ann").await.unwrap();
    assert_eq!(t.one(&jobs).await.attempt, 2);
}
