//! A server that is killed, restarted or set up otherwise: errors at once, nothing lost, and no help needed afterwards.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{
    DURABLE, ask, claim, claim_patiently, completed, effect, end_patiently, entry_patiently, granted,
    granted_patiently, id, options, patiently, url,
};
use hapax_core::{
    Browse, Claim, ClaimEnding, ClaimError, ClaimRequest, Clock as _, EndClaim, EntryId, EntryState,
    Ledger as _, ManualClock, NewMessage, OnDoubt, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, Settle, StoreError, Tier,
};
use hapax_faults::RedisServer;
use hapax_redis::{Durability, Options, RedisStore};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_killed_server_loses_nothing_and_gives_held_claims_a_full_lease,
        another_process_that_opens_the_store_prolongs_no_lease,
        a_lapse_that_was_told_is_not_undone_by_a_restart,
        a_server_that_is_down_is_unavailable_at_once,
        kills_under_load_lose_and_repeat_nothing,
        what_the_server_does_not_keep_is_refused_at_the_start,
        an_eviction_policy_set_later_stops_the_ledger,
        a_durability_taken_back_later_stops_the_ledger,
        without_memory_claims_are_refused_and_ends_are_not,
        a_batch_that_was_sent_in_part_is_not_said_to_have_failed,
        scripts_that_were_flushed_are_loaded_again,
        open_claims_of_one_scope_are_bounded,
        a_damaged_entry_is_said_to_be_damaged,
        a_damaged_entry_does_not_stop_the_sweep,
        a_damaged_entry_leaves_no_batch_half_counted,
        callers_of_a_server_that_hangs_are_answered_together,
        what_was_sent_and_not_answered_is_unknown,
        callers_that_repeat_at_once_do_not_keep_the_store_from_recovering,
    ])
}

async fn a_killed_server_loses_nothing_and_gives_held_claims_a_full_lease() {
    let server = RedisServer::start(DURABLE).unwrap();
    let options = options();
    let store = RedisStore::open(&url(&server), options.clone()).await.unwrap();
    let paid = effect(&store, "paid").await;
    let held = granted(&store, ask("held", "ann")).await;
    for _ in 0..2 {
        server.kill();
        server.run().unwrap();
        let Claim::Granted(again) = claim_patiently(&store, ask("held", "ann")).await else { panic!("lost") };
        assert_eq!((&again.token, again.fence), (&held.token, held.fence), "nothing was lost");
        let entry = entry_patiently(&store, id("paid")).await.unwrap();
        assert_eq!((entry.state, entry.fence), (EntryState::Completed, paid.fence));
        assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), "\"paid\"");
    }
    let next = granted(&store, ask("next", "ann")).await;
    assert!(next.fence > held.fence, "fences grow through a crash");
    // The lease of a claim that was held during the restart ends one lease after the scripts were loaded again.
    let meta = server.cli(&["--scan", "--pattern", &format!("{}:*:meta", options.prefix)]).unwrap();
    let boots = meta.lines().filter(|key| !server.cli(&["HGET", key, "boot"]).unwrap().is_empty()).count();
    assert!(boots > 0, "the restart was noticed: {meta}");
}

async fn another_process_that_opens_the_store_prolongs_no_lease() {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let options = Options { clock: Some(clock.clone()), ..options() };
    let open = async || RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
    granted(&open().await, ask("held", "ann")).await;
    // The first one that finds the claim notes the term of the server, the others find it.
    for left_ms in [45_000, 30_000, 15_000] {
        clock.advance_ms(15_000);
        let held = claim(&open().await, ask("held", "bob")).await;
        let Ok(Claim::InProgress { retry_after_ms }) = held else { panic!("{held:?}") };
        assert_eq!(retry_after_ms, left_ms);
    }
}

/// A restart gives open claims a full lease, but not one that someone was told about as in doubt.
async fn a_lapse_that_was_told_is_not_undone_by_a_restart() {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let options = Options { clock: Some(clock.clone()), ..options() };
    let store = RedisStore::open(&url(common::shared()), options).await.unwrap();
    let state = async |key: &str| store.entry(&id(key)).await.unwrap().unwrap().state;
    for key in ["looked at", "claimed"] {
        granted(&store, ask(key, "ann")).await;
    }
    clock.advance_ms(60_000);
    assert_eq!(state("looked at").await, EntryState::InDoubt);
    let parking = ClaimRequest { on_doubt: OnDoubt::Park, ..ask("claimed", "bob") };
    let told = claim(&store, parking).await;
    assert!(matches!(told, Ok(Claim::InDoubt { .. })), "{told:?}");
    store.server_restarted().await.unwrap();
    assert_eq!(state("looked at").await, EntryState::InDoubt);
    assert_eq!(state("claimed").await, EntryState::InDoubt);
}

async fn a_server_that_is_down_is_unavailable_at_once() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    server.kill();
    for _ in 0..3 {
        // An answer that waited for the time limit of a connection or of an operation says so.
        match claim(&store, ask("new", "ann")).await {
            Err(ClaimError::Store(StoreError::Unavailable(why) | StoreError::OutcomeUnknown(why))) => {
                assert!(!why.contains("timed out"), "it waited: {why}");
            }
            other => panic!("{other:?}"),
        }
    }
    let refused = store.entry(&id("held")).await;
    assert!(refused.as_ref().is_err_and(StoreError::is_retryable), "{refused:?}");
    server.run().unwrap();
    let ended = end_patiently(&store, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
}

async fn kills_under_load_lose_and_repeat_nothing() {
    const WORKERS: usize = 4;
    const KEYS: usize = 25;
    // At `process` a kill may lose what was answered while an earlier sync was under way; `published_losses` counts that.
    let server = std::sync::Arc::new(RedisServer::start(DURABLE).unwrap());
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let mut all = JoinSet::new();
    for worker in 0..WORKERS {
        let store = store.clone();
        all.spawn(async move {
            for n in 0..KEYS {
                effect(&store, &format!("{worker}-{n}")).await;
            }
        });
    }
    for _ in 0..5 {
        let killing = server.clone();
        let kill = move || {
            killing.kill();
            killing.run().unwrap();
        };
        tokio::task::spawn_blocking(kill).await.unwrap();
    }
    all.join_all().await;
    for worker in 0..WORKERS {
        for n in 0..KEYS {
            let key = format!("{worker}-{n}");
            let entry = entry_patiently(&store, id(&key)).await.unwrap();
            assert_eq!((entry.state, entry.takeovers), (EntryState::Completed, 0), "{key}");
            assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), format!("{key:?}"));
        }
    }
    let stats = patiently(|| store.ledger_stats()).await;
    assert_eq!((stats.entries, stats.open), ((WORKERS * KEYS) as u64, 0));
}

async fn what_the_server_does_not_keep_is_refused_at_the_start() {
    use Durability::{Local, Process, Replicated};
    let server = RedisServer::start(DURABLE).unwrap();
    let open = async |durability| {
        let opened = RedisStore::open(&url(&server), Options { durability, ..options() }).await;
        opened.map(|store| store.ledger_capabilities()).map_err(|error| error.code())
    };
    let declared =
        async |durability| open(durability).await.map(|can| (can.durable, can.fence, can.may_evict));
    assert_eq!(declared(Local).await, Ok((true, true, false)));
    assert_eq!(declared(Process).await, Ok((false, false, false)));
    assert_eq!(declared(Replicated).await, Err("redis-no-replica"));
    server.cli(&["CONFIG", "SET", "appendfsync", "everysec"]).unwrap();
    assert_eq!(declared(Local).await, Err("redis-durability"));
    assert_eq!(declared(Process).await, Ok((false, false, false)));
    server.cli(&["CONFIG", "SET", "appendonly", "no", "appendfsync", "always"]).unwrap();
    assert_eq!(declared(Local).await, Err("redis-durability"));
    // While the file is rewritten, such a server does not bring its changes to the disk.
    server.cli(&["CONFIG", "SET", "appendonly", "yes", "no-appendfsync-on-rewrite", "yes"]).unwrap();
    assert_eq!(declared(Local).await, Err("redis-durability"));
    assert_eq!(declared(Process).await, Ok((false, false, false)));
    server.cli(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"]).unwrap();
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    for level in [Process, Local, Replicated] {
        assert_eq!(declared(level).await, Err("redis-may-evict"));
    }
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]).unwrap();
    assert_eq!(declared(Local).await, Ok((true, true, false)), "no key of ours has a time to live");
    // With a replica, `local` no longer declares fences that only grow, and `replicated` is possible.
    let replica = RedisServer::start(&[]).unwrap();
    let (host, port) = server.address().split_once(':').map(|(h, p)| (h.to_owned(), p.to_owned())).unwrap();
    replica.cli(&["REPLICAOF", &host, &port]).unwrap();
    let in_step = async || {
        let state = server.cli(&["INFO", "replication"]).unwrap().contains("state=online");
        if state { Ok(()) } else { Err(StoreError::Unavailable("not yet".to_owned())) }
    };
    patiently(in_step).await;
    assert_eq!(declared(Local).await, Ok((true, false, false)));
    assert_eq!(declared(Replicated).await, Ok((true, true, false)));
}

async fn an_eviction_policy_set_later_stops_the_ledger() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    effect(&store, "before").await;
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    // The store's own watch finds it, without help.
    let start = std::time::Instant::now();
    while !store.ledger_capabilities().may_evict {
        assert!(start.elapsed() < common::PATIENCE, "the policy is not noticed");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let refused = claim(&store, ask("new", "ann")).await;
    let Err(ClaimError::Store(StoreError::Unavailable(why))) = &refused else { panic!("{refused:?}") };
    assert!(why.contains("allkeys-lru") && why.contains("noeviction"), "{why}");
    assert!(store.end(vec![]).await.is_ok(), "nothing to do is nothing to refuse");
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    assert_eq!(store.look_at_servers().await, Ok(None));
    assert!(!store.ledger_capabilities().may_evict);
    effect(&store, "after").await;
}

async fn a_durability_taken_back_later_stops_the_ledger() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    for (setting, bad, good) in [
        ("appendfsync", "no", "always"),
        ("no-appendfsync-on-rewrite", "yes", "no"),
        ("appendonly", "no", "yes"),
    ] {
        server.cli(&["CONFIG", "SET", setting, bad]).unwrap();
        let found = patiently(|| store.look_at_servers()).await.expect(setting);
        assert_eq!(found.code(), "redis-durability");
        let refused = claim(&store, ask("new", "ann")).await;
        let Err(ClaimError::Store(StoreError::Unavailable(why))) = &refused else { panic!("{refused:?}") };
        assert!(why.contains(&format!("{setting} {bad}")), "{why}");
        server.cli(&["CONFIG", "SET", setting, good]).unwrap();
        assert_eq!(patiently(|| store.look_at_servers()).await, None);
        effect(&store, setting).await;
    }
}

async fn without_memory_claims_are_refused_and_ends_are_not() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    let refused = claim(&store, ask("new", "ann")).await;
    assert!(matches!(refused, Err(ClaimError::Store(StoreError::Full(_)))), "{refused:?}");
    assert_eq!(store.end(vec![completed("held", &held, "done")]).await, Ok(vec![Ok(())]));
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    effect(&store, "new").await;
}

/// A large batch takes several steps, and Redis runs out of memory behind the first ones.
async fn a_batch_that_was_sent_in_part_is_not_said_to_have_failed() {
    const BODY: usize = 64 * 1024;
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let jobs: QueueName = "jobs".parse().unwrap();
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let memory = server.cli(&["INFO", "memory"]).unwrap();
    let used = memory.lines().find_map(|line| line.trim().strip_prefix("used_memory:")).unwrap();
    let max = used.parse::<usize>().unwrap() + 400 * BODY;
    server.cli(&["CONFIG", "SET", "maxmemory", &max.to_string()]).unwrap();
    let batch = (0..1_000).map(|_| NewMessage::new("x".repeat(BODY))).collect();
    match store.send(&jobs, batch).await {
        Err(StoreError::OutcomeUnknown(why)) => assert!(why.contains("a part of the batch"), "{why}"),
        other => panic!("{other:?}"),
    }
    let stats = store.stats(&jobs).await.unwrap();
    assert!(0 < stats.ready && stats.ready < 1_000, "{stats:?}");
}

async fn scripts_that_were_flushed_are_loaded_again() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    server.cli(&["SCRIPT", "FLUSH"]).unwrap();
    assert_eq!(store.end(vec![completed("held", &held, "done")]).await, Ok(vec![Ok(())]));
    server.cli(&["SCRIPT", "FLUSH"]).unwrap();
    effect(&store, "next").await;
}

async fn open_claims_of_one_scope_are_bounded() {
    let options = Options { in_doubt_per_scope_max: 2, ..options() };
    let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
    let other = RedisStore::open(&url(common::shared()), options).await.unwrap();
    let first = granted(&store, ask("1", "ann")).await;
    granted(&other, ask("2", "ann")).await;
    let doubt = hapax_core::EndClaim { ending: hapax_core::ClaimEnding::Doubt, ..completed("1", &first, "") };
    assert_eq!(store.end(vec![doubt]).await, Ok(vec![Ok(())]));
    let refused = claim(&other, ask("3", "ann")).await;
    let Err(ClaimError::TooManyInDoubt { open, in_doubt, max, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!((open, in_doubt, max), (2, 1, 2));
    let elsewhere = hapax_core::EntryId::new("http/other".parse().unwrap(), "3".parse().unwrap());
    granted(&other, hapax_core::ClaimRequest { id: elsewhere, ..ask("3", "ann") }).await;
    store.forget(&id("1"), "test").await.unwrap();
    granted(&other, ask("3", "ann")).await;
}

async fn a_damaged_entry_is_said_to_be_damaged() {
    let options = options();
    let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
    granted(&store, ask("held", "ann")).await;
    let key = common::shared().cli(&["--scan", "--pattern", &format!("{}:*:e:*", options.prefix)]).unwrap();
    common::shared().cli(&["SET", &key, "garbage"]).unwrap();
    let answer = claim(&store, ask("held", "bob")).await;
    let Err(ClaimError::Store(StoreError::Damaged(why))) = &answer else { panic!("{answer:?}") };
    assert!(why.contains(&key), "{why}");
}

async fn a_damaged_entry_does_not_stop_the_sweep() {
    const HOUR_MS: u64 = 3_600_000;
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let options = Options { clock: Some(clock.clone()), ..options() };
    let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
    granted(&store, ask("damaged", "ann")).await;
    let key = common::shared().cli(&["--scan", "--pattern", &format!("{}:*:e:*", options.prefix)]).unwrap();
    effect(&store, "paid").await;
    granted(&store, ask("held", "ann")).await;
    common::shared().cli(&["SET", &key, "garbage"]).unwrap();
    clock.advance_ms(3 * HOUR_MS);
    store.clock_moved().await.unwrap();
    let stats = store.ledger_stats().await.unwrap();
    assert_eq!((stats.entries, stats.pruned), (2, 1), "the outcome was kept for an hour");
    let claimed = claim(&store, ask("held", "bob")).await;
    let Ok(Claim::Granted(grant)) = claimed else { panic!("its lease has ended: {claimed:?}") };
    assert!(grant.takeover);
    // It was not forgotten: an operator has to see it, and it is looked at again.
    let answer = claim(&store, ask("damaged", "bob")).await;
    assert!(matches!(&answer, Err(ClaimError::Store(StoreError::Damaged(_)))), "{answer:?}");
    let due =
        key.replace(key.split(":e:").nth(1).map(|member| format!("e:{member}")).unwrap().as_str(), "due");
    let due_ms = common::shared().cli(&["ZSCORE", &due, key.split(":e:").nth(1).unwrap()]).unwrap();
    assert_eq!(due_ms, (clock.wall_ms() + HOUR_MS).to_string());
}

/// Each caller is answered within the limits of one call, whatever their number. One after the other, these would take more
/// than three minutes.
async fn callers_of_a_server_that_hangs_are_answered_together() {
    const CALLERS: usize = 400;
    const LIMIT: Duration = Duration::from_millis(500);
    const PATIENCE: Duration = Duration::from_mins(1);
    for (durability, replicas) in [(Durability::Local, None), (Durability::Replicated, Some(1))] {
        let server = RedisServer::start(DURABLE).unwrap();
        let options = Options {
            durability,
            replicas,
            connections_max: 1,
            connect_timeout: LIMIT,
            operation_timeout: LIMIT,
            replication_timeout: LIMIT / 2,
            ..options()
        };
        let store = RedisStore::open(&url(&server), options).await.unwrap();
        server.pause();
        // The first round has a connection that was made before, the second one has none.
        for round in 0..2 {
            let mut all = JoinSet::new();
            for n in 0..CALLERS {
                let store = store.clone();
                all.spawn(async move { claim(&store, ask(&format!("{round}-{n}"), "ann")).await });
            }
            let answers = tokio::time::timeout(PATIENCE, all.join_all()).await;
            let answers = answers.unwrap_or_else(|_| panic!("{durability:?}, round {round}: they queue"));
            for answer in answers {
                assert!(answer.as_ref().is_err_and(ClaimError::is_retryable), "{answer:?}");
            }
        }
        server.resume();
        if durability == Durability::Local {
            effect(&store, "after").await;
        }
    }
}

async fn a_damaged_entry_leaves_no_batch_half_counted() {
    let server = RedisServer::start(DURABLE).unwrap();
    let options = options();
    let store = RedisStore::open(&url(&server), options.clone()).await.unwrap();
    let queue: QueueName = "jobs".parse().unwrap();
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
    store.create_queue(&queue, config).await.unwrap();
    let message = |key: &str| NewMessage::new(key.to_owned()).idempotency_key(&key.parse().unwrap());
    let entry = EntryId::of_queue(&queue, "bad".parse().unwrap());
    let token = granted(&store, ClaimRequest { id: entry.clone(), ..ask("bad", "ann") }).await.token;
    let key = server.cli(&["--scan", "--pattern", &format!("{}:*:e:*", options.prefix)]).unwrap();
    server.cli(&["RENAME", &key, "kept"]).unwrap();
    server.cli(&["SET", &key, "not an entry"]).unwrap();
    let sent = store.send(&queue, vec![message("good"), message("bad")]).await;
    assert!(matches!(&sent, Err(StoreError::Damaged(_))), "{sent:?}");
    let there = store.browse(&queue, Browse { limit: 10, ..Browse::default() }).await.unwrap().items.len();
    assert_eq!((there, store.stats(&queue).await.unwrap().ready), (0, 0), "nothing of the batch was added");

    // The same for a batch of settles: what was done is counted.
    server.cli(&["RENAME", "kept", &key]).unwrap();
    store.send(&queue, vec![message("good"), message("bad")]).await.unwrap();
    let got = store.receive(&queue, Receive::up_to(2)).await.unwrap();
    server.cli(&["SET", &key, "not an entry"]).unwrap();
    let mut settles: Vec<Settle> = got.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
    settles[1].claim = Some(EndClaim { id: entry, token, ending: ClaimEnding::Release });
    let settled = store.settle(&queue, settles).await;
    assert!(matches!(&settled, Err(StoreError::Damaged(_))), "{settled:?}");
    let there = store.browse(&queue, Browse { limit: 10, ..Browse::default() }).await.unwrap().items.len();
    let stats = store.stats(&queue).await.unwrap();
    assert_eq!((there, stats.in_flight, stats.totals.acked), (1, 1, 1), "the other one was acked");
}

/// The server does what it was sent, after the caller was answered.
async fn what_was_sent_and_not_answered_is_unknown() {
    let server = RedisServer::start(DURABLE).unwrap();
    let options = Options {
        operation_timeout: Duration::from_millis(500),
        replication_timeout: Duration::from_millis(100),
        ..options()
    };
    let store = RedisStore::open(&url(&server), options).await.unwrap();
    let jobs = "jobs".parse().unwrap();
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let held = granted_patiently(&store, ask("held", "ann")).await;
    patiently(|| store.send(&jobs, vec![NewMessage::new("first")])).await;
    server.pause();
    // One at a time: a connection that has failed is made again, and one to a paused server is never ready.
    let claimed = claim(&store, ask("new", "ann")).await;
    server.resume();
    assert!(matches!(claimed, Err(ClaimError::Store(StoreError::OutcomeUnknown(_)))), "{claimed:?}");
    let Claim::Granted(_) = claim_patiently(&store, ask("new", "ann")).await else { panic!("not granted") };
    server.pause();
    let ended = store.end(vec![completed("held", &held, "done")]).await;
    server.resume();
    assert!(matches!(ended, Err(StoreError::OutcomeUnknown(_))), "{ended:?}");
    assert_eq!(end_patiently(&store, completed("held", &held, "done")).await, Ok(()));
    server.pause();
    let sent = store.send(&jobs, vec![NewMessage::new("second")]).await;
    server.resume();
    assert!(matches!(sent, Err(StoreError::OutcomeUnknown(_))), "{sent:?}");
    server.pause();
    let read = store.entry(&id("held")).await;
    server.resume();
    assert!(read.as_ref().is_err_and(StoreError::is_retryable), "{read:?}");
}

/// All tasks of the store have the one thread on which the caller repeats its call.
async fn callers_that_repeat_at_once_do_not_keep_the_store_from_recovering() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = RedisStore::open(&url(&server), options()).await.unwrap();
    let end = std::time::Instant::now() + Duration::from_mins(1);
    let is_in_time = || std::time::Instant::now() < end;
    for (policy, is_accepted) in [("allkeys-lru", false), ("noeviction", true)] {
        server.cli(&["CONFIG", "SET", "maxmemory-policy", policy]).unwrap();
        while claim(&store, ask("key", "ann")).await.is_ok() != is_accepted {
            assert!(is_in_time(), "{policy} was not noticed");
        }
    }
}
