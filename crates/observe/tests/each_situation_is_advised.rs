//! Each rule about what happens in a queue, in its situation, made on a real store; and the same without the cause. [`SITUATIONS`] says
//! where the others are.

mod common;

use common::Rig;
use hapax_core::{
    ClaimEnding, ClaimRequest, EndClaim, EntryId, Extend, Fingerprint, GroupId, IdempotencyKey, Ledger as _,
    NewMessage, OnDead, Owner, QueueAdmin as _, QueueConfig, QueueStore as _, Receive, Settle, Settlement,
    Tier,
};

/// Rules of the advisor, and the tests that make their situations on real stores and servers.
const SITUATIONS: &[(&str, &str)] = &[
    // What happens in a queue.
    ("leases-expire", "cli/tests/a_short_lease_is_explained_and_mended.rs"),
    ("leases-expire", "observe/tests/each_situation_is_advised.rs"),
    ("lease-below-p99", "observe/tests/each_situation_is_advised.rs"),
    ("lease-below-p99", "cli/tests/a_short_lease_is_explained_and_mended.rs"),
    ("scaling-loses-leases", "observe/tests/each_situation_is_advised.rs"),
    ("lease-far-above-work", "observe/tests/each_situation_is_advised.rs"),
    ("poison-messages", "observe/tests/each_situation_is_advised.rs"),
    ("messages-die", "observe/tests/each_situation_is_advised.rs"),
    ("messages-die", "conformance/src/observed_cases/o01_two_processes.rs"),
    ("groups-halted", "observe/tests/each_situation_is_advised.rs"),
    ("groups-halted", "conformance/src/observed_cases/o00_one_process.rs"),
    ("keys-collide", "observe/tests/each_situation_is_advised.rs"),
    ("ledger-never-hit", "observe/tests/each_situation_is_advised.rs"),
    ("hot-group", "observe/tests/each_situation_is_advised.rs"),
    ("queue-grows", "observe/tests/each_situation_is_advised.rs"),
    ("retention-drops-messages", "observe/tests/each_situation_is_advised.rs"),
    // What is true of a store.
    ("store-stopped", "cli/tests/each_trouble_of_a_store_is_advised.rs"),
    ("store-paused", "cli/tests/doctor_says_what_cannot_hold.rs"),
    ("store-warning", "cli/tests/each_trouble_of_a_store_is_advised.rs"),
    ("version-differs", "cli/tests/each_trouble_of_a_store_is_advised.rs"),
    ("doubt-waits", "observe/tests/each_situation_is_advised.rs"),
    ("keys-reused", "observe/tests/each_situation_is_advised.rs"),
    ("ran-unprotected", "cli/tests/servers_share_redis.rs"),
    // What a store stands on.
    ("volatile-file-system", "cli/tests/each_trouble_of_a_store_is_advised.rs"),
    ("disk-nearly-full", "cli/tests/each_trouble_of_a_store_is_advised.rs"),
    ("clock-behind", "cli/tests/doctor_says_what_cannot_hold.rs"),
    ("many-in-doubt", "embedded/tests/ledger_doubt_is_bounded.rs"),
    ("database-too-old", "cli/tests/doctor_examines_the_database.rs"),
    ("fsync-off", "cli/tests/doctor_examines_the_database.rs"),
    ("table-unlogged", "cli/tests/doctor_examines_the_database.rs"),
    ("privilege-missing", "cli/tests/doctor_examines_the_database.rs"),
    ("replication-asynchronous", "cli/tests/doctor_examines_the_database.rs"),
    ("xmin-held", "cli/tests/doctor_examines_the_database.rs"),
    ("dead-rows", "cli/tests/doctor_examines_the_database.rs"),
    ("database-clock-differs", "cli/tests/doctor_examines_the_database.rs"),
    ("pooler-without-listen", "cli/tests/doctor_examines_the_database.rs"),
    ("redis-too-old", "cli/tests/servers_share_redis.rs"),
    ("redis-may-evict", "cli/tests/servers_share_redis.rs"),
    ("redis-durability", "cli/tests/servers_share_redis.rs"),
    ("redis-no-replica", "redis/tests/redis_outages.rs"),
    ("redis-layout", "redis/tests/layouts.rs"),
    ("redis-keys-evicted", "cli/tests/servers_share_redis.rs"),
    ("redis-not-durable", "cli/tests/servers_share_redis.rs"),
    ("redis-replica-behind", "cli/tests/servers_share_redis.rs"),
    ("relay-lags", "cli/tests/doctor_examines_the_database.rs"),
    ("relay-lags", "cli/tests/relays_of_a_file_that_lag.rs"),
    // What a worker finds when it starts.
    ("ledger-ttl-too-short", "worker/tests/outcomes_outlive_their_messages.rs"),
    ("ledger-ttl-below-redrive", "worker/tests/outcomes_outlive_their_messages.rs"),
];

/// Rules about stores and what they stand on whose situation no test makes, and why.
const NOT_MADE: &[(&str, &str)] = &[
    ("network-file-system", "a test cannot mount one: the store is told that it is on one"),
    (
        "commit-not-synchronous",
        "the store's sessions set synchronous_commit, so that no change of the server's configuration makes it",
    ),
];

/// The files with the rules about stores and what they stand on. Rules about a configuration are pure, and are tested there.
const RULES: &[&str] = &[
    "core/src/policy/tier/store.rs",
    "embedded/src/environment.rs",
    "postgres/src/findings.rs",
    "redis/src/guard.rs",
];

fn text_of(file: &str) -> String {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::read_to_string(crates.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn every_rule_about_a_store_has_its_situation() {
    for file in RULES {
        let text = text_of(file);
        let codes: Vec<&str> = ["refusal(\"", "warning(\""]
            .iter()
            .flat_map(|rule| text.split(rule).skip(1).filter_map(|rest| Some(rest.split_once('"')?.0)))
            .collect();
        assert!(codes.len() >= 5, "{file}: {codes:?}");
        for rule in codes {
            let is_made = SITUATIONS.iter().any(|(code, _)| *code == rule);
            let is_not = NOT_MADE.iter().any(|(code, _)| *code == rule);
            assert!(is_made != is_not, "{file}: no test makes the situation of {rule}, and nothing says why");
        }
    }
}

#[test]
fn every_rule_about_what_happens_has_its_situation() {
    for (code, file) in SITUATIONS {
        let text = text_of(file);
        // This file has the table, too.
        let of_table = if file.ends_with("each_situation_is_advised.rs") {
            SITUATIONS.iter().filter(|(of, _)| of == code).count()
        } else {
            0
        };
        let found = text.matches(&format!("\"{code}\"")).count();
        assert!(found > of_table, "{file} has no test of {code}");
    }
    for rule in hapax_core::policy::tier::observed_codes() {
        assert!(SITUATIONS.iter().any(|(code, _)| *code == rule), "no test makes the situation of {rule}");
    }
}

fn config() -> QueueConfig {
    let mut config = QueueConfig { lease_ms: 10_000, ..QueueConfig::default() };
    config.retry = hapax_core::policy::RetryPolicy::exponential(0, 0);
    config
}

async fn codes(rig: &Rig) -> Vec<String> {
    let about_policy = ["no-attempt-limit", "retries-at-once", "key-is-message-id"];
    let found = rig.advice().await.into_iter().map(|(code, ..)| code);
    found.filter(|code| !about_policy.contains(&code.as_str())).collect()
}

async fn finding(rig: &Rig, code: &str) -> (String, String) {
    let found = rig.advice().await;
    let found = found.iter().find(|(of, ..)| of == code).unwrap_or_else(|| panic!("no {code} in {found:?}"));
    (found.1.clone(), found.2.clone())
}

/// Works on `count` messages that take `held_ms` each; the lease decides whether they are delivered again meanwhile.
async fn work(rig: &Rig, count: usize, held_ms: u64) {
    for number in 0..count {
        rig.send(NewMessage::new("a")).await;
        let first = rig.receive("anna").await.unwrap();
        rig.clock.advance_ms(held_ms);
        let again = rig.receive("bert").await;
        let _ = rig.ack(&first).await;
        if let Some(again) = again {
            let _ = rig.ack(&again).await;
        }
        assert!(rig.receive("bert").await.is_none(), "{number}");
    }
}

#[tokio::test]
async fn a_lease_below_the_work_and_after_the_change_nothing() {
    let rig = Rig::new(config()).await;
    work(&rig, 20, 9_000).await;
    assert_eq!(codes(&rig).await, [""; 0]);
    work(&rig, 20, 11_000).await;
    let (message, remedy) = finding(&rig, "leases-expire").await;
    assert!(
        message.starts_with("lease 10 s, P99 1") && message.contains("20 settles came too late"),
        "{message}"
    );
    assert!(remedy.contains("set the lease to 20 s (`hapax queue set jobs --lease 20s`)"), "{remedy}");
    let longer = QueueConfig { lease_ms: 20_000, ..config() };
    rig.store.set_queue(&rig.queue, longer, None).await.unwrap();
    work(&rig, 20, 11_000).await;
    assert_eq!(codes(&rig).await, [""; 0], "the change has helped");
}

/// One consumer works on `count` messages, one after the other: nobody asks for a message whose lease is over.
async fn work_alone(rig: &Rig, count: usize, held_ms: u64) {
    for _ in 0..count {
        rig.send(NewMessage::new("a")).await;
        let delivery = rig.receive("anna").await.unwrap();
        rig.clock.advance_ms(held_ms);
        rig.ack(&delivery).await.unwrap();
    }
}

#[tokio::test]
async fn work_that_outlives_its_lease_before_anything_is_repeated() {
    let rig = Rig::new(config()).await;
    work_alone(&rig, 95, 100).await;
    work_alone(&rig, 4, 11_000).await;
    assert_eq!(codes(&rig).await, [""; 0], "four may be chance");
    work_alone(&rig, 1, 11_000).await;
    let (message, remedy) = finding(&rig, "lease-below-p99").await;
    let evidence = "5 of 100 settles in 1 min 4 s came after the end of their lease, 0 of them too late";
    assert!(message.starts_with("lease 10 s, P99 1") && message.contains(evidence), "{message}");
    assert!(remedy.contains("set the lease to 20 s (`hapax queue set jobs --lease 20s`)"), "{remedy}");

    // The same work by consumers that extend their leases.
    let longer = QueueConfig { lease_ms: 9_000, ..config() };
    rig.store.set_queue(&rig.queue, longer, None).await.unwrap();
    for _ in 0..20 {
        rig.send(NewMessage::new("a")).await;
        let delivery = rig.receive("anna").await.unwrap();
        rig.clock.advance_ms(6_000);
        let extend = Extend { receipt: delivery.receipt.clone(), lease_ms: 9_000, own_lease: false };
        rig.store.extend(&rig.queue, vec![extend]).await.unwrap().remove(0).unwrap();
        rig.clock.advance_ms(5_000);
        rig.ack(&delivery).await.unwrap();
    }
    assert_eq!(codes(&rig).await, [""; 0], "their leases did not end");
}

#[tokio::test]
async fn work_that_outlives_its_lease_on_a_store_of_several_processes() {
    let rig = Rig::shared(config()).await;
    work_alone(&rig, 20, 11_000).await;
    assert_eq!(codes(&rig).await, [""; 0], "another process may have extended the leases");
    work(&rig, 5, 11_000).await;
    let (message, _) = finding(&rig, "lease-below-p99").await;
    assert!(message.contains("5 of 30 settles") && message.contains("5 of them too late"), "{message}");
}

#[tokio::test]
async fn consumers_that_are_stopped_in_the_middle() {
    let rig = Rig::new(config()).await;
    for number in 0..12 {
        rig.send(NewMessage::new("a")).await;
        rig.receive(&format!("pod-{number}")).await.unwrap();
        rig.clock.advance_ms(10_001);
        let again = rig.receive("survivor").await.unwrap();
        rig.ack(&again).await.unwrap();
    }
    let (message, remedy) = finding(&rig, "scaling-loses-leases").await;
    assert!(message.contains("12 leases ran out") && remedy.contains("SIGTERM"), "{message}; {remedy}");
    assert!(!codes(&rig).await.contains(&"leases-expire".to_owned()), "one cause, one finding");
    assert_eq!(rig.store.observer().figures(&rig.queue).expired_near_scaling, 12);
}

#[tokio::test]
async fn a_lease_far_above_the_work() {
    let rig = Rig::new(QueueConfig { lease_ms: 300_000, ..config() }).await;
    work(&rig, 30, 100).await;
    assert_eq!(codes(&rig).await, [""; 0], "it costs nothing until a consumer dies");
    rig.send(NewMessage::new("a")).await;
    rig.receive("anna").await.unwrap();
    rig.clock.advance_ms(300_001);
    let again = rig.receive("bert").await.unwrap();
    rig.ack(&again).await.unwrap();
    let (message, remedy) = finding(&rig, "lease-far-above-work").await;
    assert!(message.contains("lease 5 min") && remedy.contains("--lease 30s"), "{message}; {remedy}");
}

#[tokio::test]
async fn a_message_that_always_fails() {
    let rig = Rig::new(config()).await;
    let id = rig.send(NewMessage::new("a")).await;
    for deliveries in 0..6 {
        assert_eq!(codes(&rig).await, [""; 0], "{deliveries} deliveries are not many");
        let delivery = rig.receive("anna").await.unwrap();
        rig.settle(&delivery, Settlement::Retry { after_ms: Some(0), error: Some("no".into()) })
            .await
            .unwrap();
    }
    let (message, remedy) = finding(&rig, "poison-messages").await;
    assert!(
        message.contains(&id.to_string()) && remedy.contains(&format!("hapax why jobs {id}")),
        "{message}; {remedy}"
    );
    let delivery = rig.receive("anna").await.unwrap();
    rig.ack(&delivery).await.unwrap();
    assert_eq!(codes(&rig).await, [""; 0], "it is done");

    // Parked, it costs no more work: the messages without a dead-letter queue are.
    rig.send(NewMessage::new("a")).await;
    for number in 0..7 {
        let delivery = rig.receive("anna").await.unwrap();
        let retry = Settlement::Retry { after_ms: Some(0), error: None };
        let settlement = if number < 6 { retry } else { Settlement::Reject { reason: "no".into() } };
        rig.settle(&delivery, settlement).await.unwrap();
    }
    let figures = rig.store.observer().figures(&rig.queue);
    assert_eq!((figures.died, figures.parked), (0, 1), "{figures:?}");
    assert_eq!(codes(&rig).await, [""; 0]);
}

#[tokio::test]
async fn messages_that_die_with_their_common_error() {
    let rig = Rig::new(config()).await;
    let dead = hapax_core::QueueName::new("dead").unwrap();
    rig.store.create_queue(&dead, QueueConfig::default()).await.unwrap();
    let dead_letter = Some(hapax_core::DeadLetterPolicy { queue: dead });
    rig.store.set_queue(&rig.queue, QueueConfig { dead_letter, ..config() }, None).await.unwrap();
    for number in 0..6 {
        rig.send(NewMessage::new("a")).await;
        let delivery = rig.receive("anna").await.unwrap();
        let reason = if number == 0 { "something else" } else { "no such card" };
        rig.settle(&delivery, Settlement::Reject { reason: reason.into() }).await.unwrap();
    }
    let (message, _) = finding(&rig, "messages-die").await;
    assert!(
        message.contains("6 messages died") && message.contains("5 of them with: no such card"),
        "{message}"
    );
}

fn in_group(group: &str, number: usize) -> NewMessage {
    NewMessage::new("a")
        .group(GroupId::new(group).unwrap())
        .dedup(format!("{group}-{number}").parse().unwrap())
}

#[tokio::test]
async fn a_halted_group_until_it_is_decided_about() {
    let mut rig = Rig::new(QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::sqs_fifo() }).await;
    for number in 0..3 {
        rig.send(in_group("g", number)).await;
    }
    assert!(!codes(&rig).await.contains(&"groups-halted".to_owned()));
    let first = rig.receive("anna").await.unwrap();
    rig.settle(&first, Settlement::Park { reason: "in doubt".into() }).await.unwrap();
    for _ in 0..2 {
        let (message, _) = finding(&rig, "groups-halted").await;
        assert!(message.starts_with("2 messages wait"), "{message}");
        rig.restart().await;
    }
    rig.store.release(&rig.queue, vec![first.id]).await.unwrap();
    assert!(!codes(&rig).await.contains(&"groups-halted".to_owned()));
}

#[tokio::test]
async fn one_group_with_most_of_the_deliveries() {
    let rig = Rig::new(QueueConfig::sqs_fifo()).await;
    for number in 0..220 {
        rig.send(in_group("hot", number)).await;
        if number % 10 == 0 {
            rig.send(in_group(&format!("g{number}"), 0)).await;
        }
    }
    for _ in 0..120 {
        let delivery = rig.receive("anna").await.unwrap();
        rig.ack(&delivery).await.unwrap();
    }
    let (message, _) = finding(&rig, "hot-group").await;
    assert!(message.contains("group hot has"), "{message}");
}

#[tokio::test]
async fn keys_that_collide_are_reused_or_in_doubt() {
    let rig = Rig::new(config().tier(Tier::EffectivelyOnce)).await;
    let key: IdempotencyKey = "same".parse().unwrap();
    let messages: Vec<_> = (0..101).map(|_| NewMessage::new("a").idempotency_key(&key)).collect();
    for batch in messages.chunks(50) {
        rig.store.send(&rig.queue, batch.to_vec()).await.unwrap();
    }
    let first = rig.receive("anna").await.unwrap();
    let grant = rig.granted(&first, "anna-1").await;
    for _ in 0..100 {
        let delivery = rig.receive("bert").await.unwrap();
        let _ = rig.claim(&delivery, "bert-1").await;
        rig.settle(&delivery, Settlement::Defer { after_ms: 60_000 }).await.unwrap();
    }
    let (message, _) = finding(&rig, "keys-collide").await;
    assert!(message.contains("100 claims met their key in progress"), "{message}");

    let entry = EntryId::of_queue(&rig.queue, key);
    let end = EndClaim { id: entry.clone(), token: grant.token, ending: ClaimEnding::Doubt };
    assert!(!codes(&rig).await.contains(&"doubt-waits".to_owned()));
    rig.store.end(vec![end]).await.unwrap().remove(0).unwrap();
    assert!(finding(&rig, "doubt-waits").await.0.starts_with("1 key is in doubt"));

    let claim = async |print: &str| {
        let fingerprint = Some(Fingerprint::new(print).unwrap());
        let id = EntryId::of_queue(&rig.queue, "other".parse().unwrap());
        let request =
            ClaimRequest { fingerprint, ..ClaimRequest::new(id, Owner::new(print).unwrap(), 60_000) };
        rig.store.claim(vec![request]).await.unwrap().remove(0)
    };
    claim("one").await.unwrap();
    assert!(!codes(&rig).await.contains(&"keys-reused".to_owned()));
    claim("two").await.unwrap_err();
    assert!(finding(&rig, "keys-reused").await.0.starts_with("1 claims had a key"));
}

#[tokio::test]
async fn a_ledger_that_never_stopped_anything_and_a_queue_that_grows() {
    let mut rig = Rig::new(config().tier(Tier::EffectivelyOnce)).await;
    let batch: Vec<_> = (0..100).map(|_| NewMessage::new("a")).collect();
    for round in 0..100 {
        rig.store.send(&rig.queue, batch.clone()).await.unwrap();
        let deliveries = rig.store.receive(&rig.queue, Receive::up_to(100)).await.unwrap();
        let claims = deliveries.iter().enumerate().map(|(number, delivery)| ClaimRequest {
            delivery: Some((rig.queue.clone(), delivery.receipt.clone())),
            ..ClaimRequest::new(
                EntryId::of_queue(&rig.queue, delivery.key.clone()),
                Owner::new(format!("{round}-{number}")).unwrap(),
                60_000,
            )
        });
        for granted in rig.store.claim(claims.collect()).await.unwrap() {
            granted.unwrap();
        }
        let settles = deliveries.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
        rig.store.settle(&rig.queue, settles).await.unwrap();
        let found = codes(&rig).await.contains(&"ledger-never-hit".to_owned());
        assert_eq!(found, round == 99, "{round}");
    }
    for round in 0..200 {
        let grows = codes(&rig).await.contains(&"queue-grows".to_owned());
        assert_eq!(grows, round >= 100, "{round}");
        rig.store.send(&rig.queue, batch.clone()).await.unwrap();
    }
    assert!(finding(&rig, "queue-grows").await.0.contains("20000 messages wait"));

    // What waits since before a restart does not grow by itself.
    rig.restart().await;
    assert_eq!(codes(&rig).await, [""; 0]);
    for round in 0..20 {
        let grows = codes(&rig).await.contains(&"queue-grows".to_owned());
        assert_eq!(grows, round >= 10, "{round}");
        rig.store.send(&rig.queue, batch.clone()).await.unwrap();
    }
    for _ in 0..11 {
        assert!(codes(&rig).await.contains(&"queue-grows".to_owned()));
        let deliveries = rig.store.receive(&rig.queue, Receive::up_to(100)).await.unwrap();
        let settles = deliveries.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
        rig.store.settle(&rig.queue, settles).await.unwrap();
    }
    assert_eq!(codes(&rig).await, [""; 0], "consumers keep up");
}

#[tokio::test]
async fn messages_that_were_too_old() {
    let rig = Rig::new(QueueConfig { retention_ms: 60_000, ..config() }).await;
    rig.send(NewMessage::new("a")).await;
    rig.send(NewMessage::new("a")).await;
    rig.clock.advance_ms(59_999);
    assert!(!codes(&rig).await.contains(&"retention-drops-messages".to_owned()));
    rig.clock.advance_ms(2);
    assert!(rig.receive("anna").await.is_none());
    let (message, _) = finding(&rig, "retention-drops-messages").await;
    assert_eq!(message, "2 messages were dropped because they were older than 1 min");
}
