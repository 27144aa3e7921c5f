//! A message that cannot be read is parked as damaged and does not stop its queue; what imports, sends and receives remember, and
//! entries of the ledger, are forgotten in time; and what operators decide is written down.

mod common;

use std::sync::Arc;

use hapax_core::transfer::IMPORTED_MS_MIN;
use hapax_core::{
    Browse, ClaimEnding, ClaimRequest, EndClaim, EntryId, FailureCause, GroupId, Json, Ledger as _,
    ManualClock, MessageState, MessageView, NewMessage, OnDead, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, Receive, RecordedOutcome, Settle, SettleError, Tier, TransferScope,
};
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_damaged_message_is_parked_and_the_others_are_delivered,
        a_delivery_that_is_damaged_is_not_settled,
        a_damaged_message_that_names_another_one_gets_an_id_of_its_own,
        a_delivery_that_is_damaged_is_not_counted_in_its_group,
        a_group_continues_behind_a_damaged_message,
        a_group_is_halted_for_a_damaged_message_until_it_is_discarded,
        nothing_is_left_of_messages_that_are_done,
        what_was_imported_is_forgotten_after_its_time,
        windows_end_in_time_though_no_sweep_has_come_by,
        entries_are_pruned_behind_a_hundred_that_messages_need,
        entries_are_pruned_behind_a_hundred_that_a_restart_has_prolonged,
        decisions_are_written_down_with_who_made_them,
    ])
}

/// How long a deduplication id is remembered by default, and the attempt of a receive.
const FIVE_MINUTES_MS: u64 = 300_000;

/// A store with a queue, and the name of a key of that queue.
struct Setup {
    store: RedisStore,
    prefix: String,
    jobs: QueueName,
    clock: Arc<ManualClock>,
}

impl Setup {
    async fn new(config: QueueConfig) -> Self {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let options = Options { clock: Some(clock.clone()), ..common::options() };
        let prefix = options.prefix.clone();
        let store = RedisStore::open(&common::url(common::shared()), options).await.unwrap();
        let jobs: QueueName = if config.is_fifo() { "jobs.fifo" } else { "jobs" }.parse().unwrap();
        store.create_queue(&jobs, config).await.unwrap();
        Self { store, prefix, jobs, clock }
    }

    fn key(&self, queue: &QueueName, name: &str) -> String {
        let pattern = format!("{}:*:q:{queue}:{name}", self.prefix);
        common::shared().cli(&["--scan", "--pattern", &pattern]).unwrap()
    }

    /// Keeps this number of bytes of a message.
    fn damage(&self, sequence: u64, kept: usize) {
        let script = "return redis.call('HSET', KEYS[1], ARGV[1], \
                      string.sub(redis.call('HGET', KEYS[1], ARGV[1]), 1, tonumber(ARGV[2])))";
        let (key, sequence) = (self.key(&self.jobs, "m"), format!("{sequence:016}"));
        let damaged = common::shared().cli(&["EVAL", script, "1", &key, &sequence, &kept.to_string()]);
        assert_eq!(damaged.unwrap(), "0", "it was there");
    }

    /// Puts other bytes in the place of a message.
    fn overwrite(&self, sequence: u64, with: &str) {
        let (key, sequence) = (self.key(&self.jobs, "m"), format!("{sequence:016}"));
        assert_eq!(common::shared().cli(&["HSET", &key, &sequence, with]).unwrap(), "0", "it was there");
    }

    async fn send(&self, group: Option<&str>, bodies: &[&str]) -> Vec<u64> {
        let message = |body: &&str| {
            let message = NewMessage::new((*body).to_owned());
            match group {
                Some(group) => message.group(group.parse().unwrap()).dedup(body.parse().unwrap()),
                None => message,
            }
        };
        let sent = self.store.send(&self.jobs, bodies.iter().map(message).collect()).await.unwrap();
        sent.into_iter().map(|sent| sent.unwrap().sequence).collect()
    }

    async fn receive(&self) -> Vec<String> {
        let got = self.store.receive(&self.jobs, Receive::up_to(10)).await.unwrap();
        got.iter().map(|one| String::from_utf8(one.body.to_vec()).unwrap()).collect()
    }

    async fn parked(&self) -> Vec<MessageView> {
        let browse = Browse { state: Some(MessageState::Parked), limit: 10, ..Browse::default() };
        let items = self.store.browse(&self.jobs, browse).await.unwrap().items;
        for one in &items {
            let (cause, error) = one.parked.clone().unwrap();
            assert_eq!(cause, FailureCause::Damaged);
            let named = format!("message {:016} of queue {} cannot be read", one.sequence, self.jobs);
            assert_eq!(error, Some(named));
        }
        items
    }

    async fn discard(&self, views: &[MessageView]) {
        let ids = views.iter().map(|view| view.id).collect();
        self.store.discard(&self.jobs, ids, "ann").await.unwrap();
    }
}

async fn a_damaged_message_is_parked_and_the_others_are_delivered() {
    let t = Setup::new(QueueConfig::sqs()).await;
    let all = t.send(None, &["first", "second", "third", "fourth"]).await;
    let before = t.store.stats(&t.jobs).await.unwrap();
    let ids: Vec<_> = {
        let page = t.store.browse(&t.jobs, Browse { limit: 10, ..Browse::default() }).await.unwrap();
        page.items.iter().map(|one| one.id).collect()
    };
    // Of the first nothing is left, of the second its id.
    t.damage(all[0], 0);
    t.damage(all[1], 60);
    assert_eq!(t.receive().await, ["third", "fourth"]);
    let parked = t.parked().await;
    assert_eq!(parked.iter().map(|one| one.sequence).collect::<Vec<_>>(), all[..2]);
    assert!(parked[0].id != ids[0] && parked[1].id == ids[1], "{parked:?}");
    assert_eq!(parked[1].body.as_deref(), Some(b"second".as_slice()), "the body is as it was");
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.ready, stats.in_flight, stats.parked, stats.totals.damaged), (0, 2, 2, 2));
    let named = parked.iter().map(|one| one.id).collect();
    assert_eq!(t.store.release(&t.jobs, named).await, Ok(0), "what it was for is not known");
    t.discard(&parked).await;
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.in_flight, stats.parked), (2, 0));
    let left = "thirdfourth".len() as u64;
    assert_eq!((before.bytes, stats.bytes), (left + "firstsecond".len() as u64, left));
}

async fn a_delivery_that_is_damaged_is_not_settled() {
    let t = Setup::new(QueueConfig::sqs()).await;
    let all = t.send(None, &["first", "second"]).await;
    let got = t.store.receive(&t.jobs, Receive::up_to(10)).await.unwrap();
    t.damage(all[0], 60);
    let acks = got.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
    let settled = t.store.settle(&t.jobs, acks).await.unwrap();
    assert!(settled[0].is_err() && settled[0] != Err(SettleError::Gone), "{settled:?}");
    assert!(settled[1].is_ok(), "the others are settled: {settled:?}");
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.in_flight, stats.parked), (0, 1));
    // One whose lease ends is found by the sweep.
    let all = t.send(None, &["third"]).await;
    assert_eq!(t.receive().await, ["third"]);
    t.damage(all[0], 3);
    t.clock.advance_ms(3_600_000);
    t.store.clock_moved().await.unwrap();
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.ready, stats.in_flight, stats.parked), (0, 0, 2));
}

async fn a_damaged_message_that_names_another_one_gets_an_id_of_its_own() {
    let t = Setup::new(QueueConfig::sqs()).await;
    let all = t.send(None, &["first", "second"]).await;
    let first = {
        let page = t.store.browse(&t.jobs, Browse { limit: 1, ..Browse::default() }).await.unwrap();
        page.items[0].id
    };
    t.overwrite(all[1], &format!("something about {first}"));
    let got = t.store.receive(&t.jobs, Receive::up_to(10)).await.unwrap();
    assert_eq!(got.iter().map(|one| one.id).collect::<Vec<_>>(), [first]);
    let parked = t.parked().await;
    assert_eq!(parked.iter().map(|one| one.sequence).collect::<Vec<_>>(), all[1..]);
    assert_ne!(parked[0].id, first);
    t.discard(&parked).await;
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.in_flight, stats.parked), (1, 0), "the other one is as it was");
    let acked = t.store.settle(&t.jobs, vec![Settle::ack(got[0].receipt.clone())]).await.unwrap();
    assert!(acked[0].is_ok(), "{acked:?}");
}

async fn a_delivery_that_is_damaged_is_not_counted_in_its_group() {
    let t = Setup::new(QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::fifo() }).await;
    let all = t.send(Some("g"), &["first", "second", "third"]).await;
    assert_eq!(t.store.receive(&t.jobs, Receive::up_to(1)).await.unwrap().len(), 1);
    t.damage(all[0], 60);
    t.clock.advance_ms(3_600_000);
    t.store.clock_moved().await.unwrap();
    // Its group is known when it is looked at next.
    t.send(Some("g"), &["fourth"]).await;
    assert_eq!(t.receive().await, [""; 0], "the group is halted");
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.in_flight, stats.parked, stats.halted), (0, 1, 3), "{stats:?}");
}

async fn a_group_continues_behind_a_damaged_message() {
    let t = Setup::new(QueueConfig { on_dead: OnDead::Continue, ..QueueConfig::fifo() }).await;
    let all = t.send(Some("g"), &["first", "second", "third"]).await;
    t.damage(all[0], 0);
    assert_eq!(t.receive().await, ["second", "third"]);
    assert_eq!(t.parked().await[0].group, Some("g".parse().unwrap()));
    t.damage(all[1], 60);
    // The leases end, and then the pauses before the next attempts.
    for _ in 0..2 {
        t.clock.advance_ms(3_600_000);
        t.store.clock_moved().await.unwrap();
    }
    assert_eq!(t.receive().await, ["third"]);
    let parked = t.parked().await;
    assert_eq!(parked.len(), 2);
    t.discard(&parked).await;
    let stats = t.store.stats(&t.jobs).await.unwrap();
    assert_eq!((stats.ready, stats.in_flight, stats.parked, stats.halted), (0, 1, 0, 0));
}

async fn a_group_is_halted_for_a_damaged_message_until_it_is_discarded() {
    let t = Setup::new(QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::fifo() }).await;
    let all = t.send(Some("g"), &["first", "second"]).await;
    t.send(Some("h"), &["other"]).await;
    t.damage(all[0], 60);
    assert_eq!(t.receive().await, ["other"]);
    let group: GroupId = "g".parse().unwrap();
    assert_eq!(t.store.halted_groups(&t.jobs).await.unwrap(), [group]);
    t.discard(&t.parked().await).await;
    assert_eq!(t.receive().await, ["second"]);
    assert!(t.store.halted_groups(&t.jobs).await.unwrap().is_empty());
}

/// Empty sets and tables do not exist in Redis, so a key that stays holds something of a message.
async fn nothing_is_left_of_messages_that_are_done() {
    for config in [QueueConfig::sqs(), QueueConfig::sqs_fifo()] {
        let group = config.is_fifo().then_some("g");
        let t = Setup::new(config).await;
        let keys = || {
            let found = t.key(&t.jobs, "*");
            let mut names: Vec<_> =
                found.lines().filter_map(|key| Some(key.rsplit_once(':')?.1.to_owned())).collect();
            names.sort_unstable();
            names
        };
        let before = keys();
        assert_eq!(before, ["info"]);
        for how in ["acked", "purged", "discarded"] {
            let long = how.repeat(10_000);
            t.send(group, &[how, &format!("{how}-2")]).await;
            t.store.send(&t.jobs, vec![in_group(group, how, &long)]).await.unwrap().remove(0).unwrap();
            assert!(keys().len() > 4, "{how}: {:?}", keys());
            match how {
                "acked" => {
                    let got = t.store.receive(&t.jobs, Receive::up_to(10)).await.unwrap();
                    let settles = got.into_iter().map(|one| Settle::ack(one.receipt)).collect();
                    assert!(t.store.settle(&t.jobs, settles).await.unwrap().iter().all(Result::is_ok));
                }
                "purged" => assert_eq!(t.store.purge(&t.jobs).await, Ok(3)),
                _ => {
                    let browse = Browse { limit: 10, ..Browse::default() };
                    let all = t.store.browse(&t.jobs, browse).await.unwrap().items;
                    t.discard(&all).await;
                }
            }
            // What windows remember is forgotten in time.
            t.clock.advance_ms(FIVE_MINUTES_MS);
            t.store.clock_moved().await.unwrap();
            assert_eq!(keys(), before, "{how}");
        }
    }
}

fn in_group(group: Option<&str>, dedup: &str, body: &str) -> NewMessage {
    let message = NewMessage::new(body.to_owned());
    match group {
        Some(group) => message.group(group.parse().unwrap()).dedup(format!("{dedup}-long").parse().unwrap()),
        None => message,
    }
}

async fn what_was_imported_is_forgotten_after_its_time() {
    let t = Setup::new(QueueConfig::sqs()).await;
    t.send(None, &["job"]).await;
    t.store.pause_queue(&t.jobs, "ann", None).await.unwrap();
    let transfer = t.store.transfer().unwrap();
    let page = transfer.export(&TransferScope::Queue(t.jobs.clone()), None, 10).await.unwrap();
    let copy: QueueName = "copy".parse().unwrap();
    t.store.create_queue(&copy, QueueConfig::sqs()).await.unwrap();
    let to = TransferScope::Queue(copy.clone());
    let import = async || transfer.import(&to, page.items.clone()).await.unwrap();
    let count = async || t.store.stats(&copy).await.unwrap().ready;
    import().await;
    assert_eq!(count().await, 1);
    let got = t.store.receive(&copy, Receive::up_to(1)).await.unwrap().remove(0);
    t.store.settle(&copy, vec![Settle::ack(got.receipt)]).await.unwrap().remove(0).unwrap();
    t.clock.advance_ms(IMPORTED_MS_MIN - 1);
    t.store.clock_moved().await.unwrap();
    import().await;
    assert_eq!(count().await, 0, "it was imported before");
    t.clock.advance_ms(2);
    t.store.clock_moved().await.unwrap();
    assert_eq!(t.key(&copy, "side"), "", "nothing is left");
    assert_eq!(t.key(&copy, "tries_at"), "");
}

/// A sweep comes once a second, and only removes what no script counts any more.
async fn windows_end_in_time_though_no_sweep_has_come_by() {
    let setup = Setup::new(QueueConfig { lease_ms: 3_600_000, ..QueueConfig::sqs() }).await;
    let send = async || {
        let message = NewMessage::new("job").dedup("once".parse().unwrap());
        setup.store.send(&setup.jobs, vec![message]).await.unwrap().remove(0).unwrap().duplicate
    };
    let receive = async || {
        let attempt = Receive { attempt_id: Some("try-1".to_owned()), ..Receive::up_to(1) };
        setup.store.receive(&setup.jobs, attempt).await.unwrap().remove(0).id
    };
    assert!(!send().await);
    let first = receive().await;
    setup.clock.advance_ms(FIVE_MINUTES_MS - 1);
    assert!(send().await);
    assert_eq!(receive().await, first);
    setup.clock.advance_ms(1);
    assert!(!send().await, "the id is forgotten");
    assert_ne!(receive().await, first, "the attempt is forgotten");
    assert_ne!(setup.key(&setup.jobs, "dedup"), "");
    setup.clock.advance_ms(FIVE_MINUTES_MS);
    setup.store.clock_moved().await.unwrap();
    assert_eq!((setup.key(&setup.jobs, "dedup"), setup.key(&setup.jobs, "dedup_at")), Default::default());
}

/// As many as one step of a sweep looks at.
const STEP: usize = 100;

/// Claims a key and completes it, to be kept for so long.
async fn complete(store: &RedisStore, id: &EntryId, ttl_ms: u64) {
    let grant = common::granted(store, ClaimRequest::new(id.clone(), "ann".parse().unwrap(), 60_000)).await;
    let outcome = RecordedOutcome::done(Json::of("paid").unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms };
    let end = EndClaim { id: id.clone(), token: grant.token, ending };
    assert_eq!(store.end(vec![end]).await.unwrap(), [Ok(())]);
}

async fn entries_are_pruned_behind_a_hundred_that_messages_need() {
    let t = Setup::new(QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() }).await;
    let bodies: Vec<String> = (0..STEP).map(|n| n.to_string()).collect();
    t.send(None, &bodies.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let got = t.store.receive(&t.jobs, Receive::up_to(STEP)).await.unwrap();
    assert_eq!(got.len(), STEP);
    for delivery in got {
        complete(&t.store, &EntryId::of_queue(&t.jobs, delivery.key), 1_000).await;
    }
    t.clock.advance_ms(1);
    complete(&t.store, &EntryId::of_queue(&t.jobs, "free".parse().unwrap()), 1_000).await;
    t.clock.advance_ms(1_000);
    t.store.clock_moved().await.unwrap();
    assert_eq!(t.store.ledger_stats().await.unwrap().entries, STEP as u64);
}

async fn entries_are_pruned_behind_a_hundred_that_a_restart_has_prolonged() {
    let t = Setup::new(QueueConfig::sqs()).await;
    for n in 0..STEP {
        common::granted(&t.store, common::ask(&n.to_string(), "ann")).await;
    }
    complete(&t.store, &common::id("free"), 60_001).await;
    t.clock.advance_ms(30_000);
    t.store.server_restarted().await.unwrap();
    t.clock.advance_ms(30_001);
    t.store.clock_moved().await.unwrap();
    let stats = t.store.ledger_stats().await.unwrap();
    assert_eq!((stats.entries, stats.open), (STEP as u64, STEP as u64));
}

async fn decisions_are_written_down_with_who_made_them() {
    let t = Setup::new(QueueConfig::sqs()).await;
    t.send(None, &["job"]).await;
    t.store.pause_queue(&t.jobs, "ann", None).await.unwrap();
    t.store.resume_queue(&t.jobs, "bob").await.unwrap();
    let page = t.store.browse(&t.jobs, Browse { limit: 1, ..Browse::default() }).await.unwrap();
    t.discard(&page.items).await;
    complete(&t.store, &common::id("paid"), 60_000).await;
    t.store.forget(&common::id("paid"), "eve").await.unwrap();
    let keys = common::shared().cli(&["--scan", "--pattern", &format!("{}:*:audit", t.prefix)]).unwrap();
    let read = |key: &str| common::shared().cli(&["XRANGE", key, "-", "+"]).unwrap();
    let written: Vec<String> = keys.lines().map(read).collect();
    let written: Vec<&str> = written.iter().flat_map(|text| text.lines()).collect();
    for (by, what) in [
        ("ann", "pause queue jobs"),
        ("bob", "resume queue jobs"),
        ("ann", "discard in queue jobs"),
        ("eve", "forgot the ledger's entry orders paid"),
    ] {
        let is_there =
            written.windows(3).any(|three| three[0] == by && three[1] == "what" && three[2] == what);
        assert!(is_there, "{what} by {by}: {written:?}");
    }
}
