//! A message that cannot be read is parked as damaged and does not stop its queue; what an import remembers is forgotten.

mod common;

use std::sync::Arc;

use hapax_core::transfer::IMPORTED_MS_MIN;
use hapax_core::{
    Browse, FailureCause, GroupId, ManualClock, MessageState, MessageView, NewMessage, OnDead,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, SettleError, TransferScope,
};
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_damaged_message_is_parked_and_the_others_are_delivered,
        a_delivery_that_is_damaged_is_not_settled,
        a_group_continues_behind_a_damaged_message,
        a_group_is_halted_for_a_damaged_message_until_it_is_discarded,
        what_was_imported_is_forgotten_after_its_time,
    ])
}

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
