//! A message that goes to another queue takes several steps. Its process may die behind each of them: the message is then in
//! one of both queues in the end, once, also if it was taken out of the target meanwhile.

mod common;

use std::sync::Arc;

use hapax_core::{
    Browse, CopyState, DeadLetterPolicy, FailureCause, Fence, GroupId, ManualClock, NewMessage, OnDead,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, RedriveRequest, RedriveState, Settle,
    Settled, Settlement, TransferScope,
};
use hapax_redis::{Options, RedisStore};

/// How long after its caller a sweep finishes a move, and more.
const LEFT_MS: u64 = 6_000;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_death_is_finished_whatever_step_its_process_died_behind,
        a_redrive_is_finished_whatever_step_its_process_died_behind,
        a_death_without_its_target_is_parked_whatever_step_its_process_died_behind,
        moves_that_many_finish_at_the_same_time_arrive_once,
        a_caller_that_was_slow_brings_nothing_again,
        a_target_that_is_made_again_meanwhile_does_not_get_what_is_parked,
        a_late_end_of_an_older_move_lets_a_younger_one_arrive_once,
        what_dies_while_its_target_is_closed_to_be_copied_arrives,
        a_move_that_cannot_end_holds_up_no_other,
        a_move_is_finished_though_fences_are_ahead_of_the_clock,
        fences_grow_from_queue_to_queue_though_the_clock_was_set_back,
        a_message_that_returns_takes_no_place_of_another,
        a_redrive_fails_when_its_target_is_deleted_on_the_way,
        a_letter_that_returns_from_its_way_still_halts_its_group,
        a_decision_is_told_though_its_process_died_before_it_told,
        ended_redrives_are_forgotten,
        a_group_that_continues_keeps_all_its_messages,
    ])
}

/// A store whose time a test moves, with `jobs` and its dead letters in different shards.
struct Shop {
    clock: Arc<ManualClock>,
    options: Options,
    store: RedisStore,
    jobs: QueueName,
    dead: QueueName,
}

impl Shop {
    async fn open() -> Self {
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let options = Options { clock: Some(clock.clone()), ..common::options() };
        let store = RedisStore::open(&common::url(common::shared()), options.clone()).await.unwrap();
        let (jobs, dead): (QueueName, QueueName) = ("jobs".parse().unwrap(), "jobs-dead".parse().unwrap());
        store.create_queue(&dead, QueueConfig::sqs()).await.unwrap();
        let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
        store.create_queue(&jobs, QueueConfig { dead_letter, ..QueueConfig::sqs() }).await.unwrap();
        Self { clock, options, store, jobs, dead }
    }

    /// Another process, after the first one has died.
    async fn later(&self) -> RedisStore {
        self.store.shut_down();
        let other = RedisStore::open(&common::url(common::shared()), self.options.clone()).await.unwrap();
        self.clock.advance_ms(LEFT_MS);
        other.clock_moved().await.unwrap();
        other.quiet().await;
        other
    }

    async fn reject_one(&self) -> Settled {
        self.store.send(&self.jobs, vec![NewMessage::new("job")]).await.unwrap();
        reject_first(&self.store, &self.jobs).await
    }

    /// A message that cannot arrive, since its dead-letter queue is closed for a copy. It was the first to leave `jobs`.
    async fn reject_one_that_is_held_up(&self) {
        let closed: QueueName = "closed".parse().unwrap();
        self.store.create_queue(&closed, QueueConfig::sqs()).await.unwrap();
        self.set_dead_letters(&closed).await;
        let from = CopyState::From { store: "elsewhere".to_owned() };
        let scope = TransferScope::Queue(closed.clone());
        self.store.transfer().unwrap().set_copy(&scope, Some(from), "test").await.unwrap();
        self.reject_one().await;
        self.set_dead_letters(&self.dead).await;
    }

    /// Rejects the first message; returns when its move waits behind this step.
    async fn reject_slowly(&self, step: u8) -> tokio::task::JoinHandle<Settled> {
        self.store.hold_a_move_behind_step(step);
        let (slow, jobs) = (self.store.clone(), self.jobs.clone());
        let slow = tokio::spawn(async move { reject_first(&slow, &jobs).await });
        while !self.store.is_a_move_held() {
            assert!(!slow.is_finished());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        slow
    }

    async fn set_dead_letters(&self, queue: &QueueName) {
        let dead_letter = Some(DeadLetterPolicy { queue: queue.clone() });
        let config = QueueConfig { dead_letter, ..QueueConfig::sqs() };
        self.store.set_queue(&self.jobs, config, None).await.unwrap();
    }
}

async fn reject_first(store: &RedisStore, queue: &QueueName) -> Settled {
    let got = store.receive(queue, Receive::up_to(1)).await.unwrap().remove(0);
    let reject = Settle::new(got.receipt, Settlement::Reject { reason: "bad".to_owned() });
    store.settle(queue, vec![reject]).await.unwrap().remove(0).unwrap()
}

fn redrive(from: &QueueName, to: Option<&QueueName>) -> RedriveRequest {
    RedriveRequest {
        from: from.clone(),
        to: to.cloned(),
        filter: hapax_core::RedriveFilter::default(),
        per_second: None,
        by: "ann".to_owned(),
    }
}

async fn bodies(store: &RedisStore, queue: &QueueName) -> Vec<String> {
    let page = store.browse(queue, Browse { limit: 100, ..Browse::default() }).await.unwrap();
    let body = |one: &hapax_core::MessageView| one.body.clone().unwrap_or_default();
    page.items.iter().map(|one| String::from_utf8_lossy(&body(one)).into_owned()).collect()
}

async fn count(store: &RedisStore, queue: &QueueName) -> u64 {
    let stats = store.stats(queue).await.unwrap();
    stats.ready + stats.delayed + stats.in_flight + stats.parked
}

/// Receives and acks what is there.
async fn drained(store: &RedisStore, queue: &QueueName) -> usize {
    let got = store.receive(queue, Receive::up_to(10)).await.unwrap();
    let acks = got.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
    for acked in store.settle(queue, acks).await.unwrap() {
        acked.unwrap();
    }
    got.len()
}

async fn a_death_is_finished_whatever_step_its_process_died_behind() {
    for step in 1..=3 {
        for takes in [false, true] {
            let shop = Shop::open().await;
            shop.store.end_moves_behind_step(step);
            assert_eq!(shop.reject_one().await, Settled::Dead, "step {step}");
            let stats = shop.store.stats(&shop.jobs).await.unwrap();
            assert_eq!((stats.ready, stats.delayed, stats.parked), (0, 0, 0), "it cannot be received twice");
            assert_eq!(
                stats.in_flight,
                u64::from(step < 3),
                "step {step}: it is counted until it has arrived"
            );
            let mut taken = 0;
            if takes {
                taken = drained(&shop.store, &shop.dead).await;
                assert_eq!(taken, usize::from(step >= 2), "it is there from the second step on");
            }
            let other = shop.later().await;
            taken += drained(&other, &shop.dead).await;
            assert_eq!(taken, 1, "step {step}, taken meanwhile: {takes}");
            assert_eq!((count(&other, &shop.jobs).await, count(&other, &shop.dead).await), (0, 0));
            other.clock_moved().await.unwrap();
            for left in ["moves", "moving", "bodies", "arrived", "decided"] {
                let pattern = format!("{}:*:{left}", shop.options.prefix);
                let keys = common::shared().cli(&["--scan", "--pattern", &pattern]).unwrap();
                assert_eq!(keys, "", "step {step}: nothing is left of it");
            }
        }
    }
}

async fn a_redrive_is_finished_whatever_step_its_process_died_behind() {
    for step in 1..=3 {
        let shop = Shop::open().await;
        assert_eq!(shop.reject_one().await, Settled::Dead);
        shop.store.end_moves_behind_step(step);
        let task = shop.store.start_redrive(redrive(&shop.dead, None)).await.unwrap();
        shop.store.quiet().await;
        let taken = drained(&shop.store, &shop.jobs).await;
        assert_eq!(taken, usize::from(step >= 2), "step {step}");
        // All letters have left, and it ends when the last one has arrived.
        shop.clock.advance_ms(2_000);
        shop.store.clock_moved().await.unwrap_or_default();
        let running = shop.store.redrives(&shop.dead).await.unwrap()[0].state == RedriveState::Running;
        assert_eq!(running, step < 3, "step {step}");
        let other = shop.later().await;
        assert_eq!(taken + drained(&other, &shop.jobs).await, 1, "step {step}");
        assert_eq!(count(&other, &shop.dead).await, 0);
        let task =
            other.redrives(&shop.dead).await.unwrap().into_iter().find(|one| one.id == task.id).unwrap();
        assert_eq!((task.state, task.moved, task.left), (RedriveState::Completed, 1, 0), "step {step}");
    }
}

async fn a_death_without_its_target_is_parked_whatever_step_its_process_died_behind() {
    for step in 0..=3 {
        let shop = Shop::open().await;
        shop.store.delete_queue(&shop.dead).await.unwrap();
        shop.store.end_moves_behind_step(step);
        shop.reject_one().await;
        let other = shop.later().await;
        let stats = other.stats(&shop.jobs).await.unwrap();
        assert_eq!((stats.parked, stats.ready), (1, 0), "step {step}");
        let page = other.browse(&shop.jobs, Browse { limit: 1, ..Browse::default() }).await.unwrap();
        assert_eq!(page.items[0].parked, Some((FailureCause::Rejected, Some("bad".to_owned()))));
        // A queue of that name that is made later does not get it too.
        other.create_queue(&shop.dead, QueueConfig::sqs()).await.unwrap();
        shop.clock.advance_ms(LEFT_MS);
        other.clock_moved().await.unwrap();
        assert_eq!(count(&other, &shop.dead).await, 0, "step {step}");
    }
}

async fn moves_that_many_finish_at_the_same_time_arrive_once() {
    let shop = Shop::open().await;
    shop.store.end_moves_behind_step(1);
    for _ in 0..20 {
        assert_eq!(shop.reject_one().await, Settled::Dead);
    }
    shop.store.shut_down();
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(RedisStore::open(&common::url(common::shared()), shop.options.clone()).await.unwrap());
    }
    shop.clock.advance_ms(LEFT_MS);
    let sweeps: Vec<_> = others
        .iter()
        .map(|other| {
            let other = other.clone();
            tokio::spawn(async move { other.clock_moved().await.unwrap() })
        })
        .collect();
    for sweep in sweeps {
        sweep.await.unwrap();
    }
    assert_eq!((count(&others[0], &shop.jobs).await, count(&others[0], &shop.dead).await), (0, 20));
}

/// Its move was finished by another process, and is remembered as long as an older one is open; after that, a number tells that it
/// has ended.
async fn a_caller_that_was_slow_brings_nothing_again() {
    for is_older_open in [true, false] {
        let shop = Shop::open().await;
        if is_older_open {
            shop.reject_one_that_is_held_up().await;
        }
        shop.store.send(&shop.jobs, vec![NewMessage::new("job")]).await.unwrap();
        let slow = shop.reject_slowly(1).await;
        // Another process finishes the move, and the message is taken out of the target.
        let other = RedisStore::open(&common::url(common::shared()), shop.options.clone()).await.unwrap();
        shop.clock.advance_ms(LEFT_MS);
        other.clock_moved().await.unwrap();
        assert_eq!(drained(&other, &shop.dead).await, 1);
        other.clock_moved().await.unwrap();
        shop.store.end_moves_behind_step(0);
        assert_eq!(slow.await.unwrap(), Settled::Dead);
        // The one that is held up is on its way out of `jobs`.
        let left = (count(&other, &shop.jobs).await, count(&other, &shop.dead).await);
        assert_eq!(left, (u64::from(is_older_open), 0), "an older move is open: {is_older_open}");
    }
}

/// One process has found no target and is about to park the message; another one comes to the same move after the target was
/// made again. Both must decide alike.
async fn a_target_that_is_made_again_meanwhile_does_not_get_what_is_parked() {
    let shop = Shop::open().await;
    shop.store.send(&shop.jobs, vec![NewMessage::new("job")]).await.unwrap();
    shop.store.delete_queue(&shop.dead).await.unwrap();
    let slow = shop.reject_slowly(2).await;
    let other = RedisStore::open(&common::url(common::shared()), shop.options.clone()).await.unwrap();
    other.create_queue(&shop.dead, QueueConfig::sqs()).await.unwrap();
    other.end_moves_behind_step(2);
    shop.clock.advance_ms(LEFT_MS);
    other.clock_moved().await.unwrap_or_default();
    shop.store.end_moves_behind_step(0);
    assert_eq!(slow.await.unwrap(), Settled::Parked);
    other.end_moves_behind_step(0);
    other.clock_moved().await.unwrap();
    assert_eq!((count(&other, &shop.jobs).await, count(&other, &shop.dead).await), (1, 0));
}

/// The end of the older move tells a smaller number than the younger one's, and comes after it.
async fn a_late_end_of_an_older_move_lets_a_younger_one_arrive_once() {
    let shop = Shop::open().await;
    let open = async || RedisStore::open(&common::url(common::shared()), shop.options.clone()).await.unwrap();
    shop.store.send(&shop.jobs, ["older", "younger"].map(NewMessage::new).to_vec()).await.unwrap();
    let older = shop.reject_slowly(1).await;
    let slow = Shop {
        store: open().await,
        clock: shop.clock.clone(),
        options: shop.options.clone(),
        jobs: shop.jobs.clone(),
        dead: shop.dead.clone(),
    };
    let younger = slow.reject_slowly(1).await;
    // The older one is ended in its source while the younger one is open, and stops there.
    shop.store.hold_a_move_behind_step(3);
    while !shop.store.is_a_move_held() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let other = open().await;
    shop.clock.advance_ms(LEFT_MS);
    other.clock_moved().await.unwrap();
    assert_eq!(drained(&other, &shop.dead).await, 2);
    shop.store.end_moves_behind_step(0);
    assert_eq!(older.await.unwrap(), Settled::Dead);
    slow.store.end_moves_behind_step(0);
    assert_eq!(younger.await.unwrap(), Settled::Dead);
    assert_eq!((count(&other, &shop.jobs).await, count(&other, &shop.dead).await), (0, 0));
}

/// The queues of a copy are closed one after the other, and all before the first is read.
async fn what_dies_while_its_target_is_closed_to_be_copied_arrives() {
    let shop = Shop::open().await;
    let to = CopyState::To { store: "elsewhere".to_owned(), complete: false };
    let scope = TransferScope::Queue(shop.dead.clone());
    shop.store.transfer().unwrap().set_copy(&scope, Some(to), "test").await.unwrap();
    assert_eq!(shop.reject_one().await, Settled::Dead);
    assert_eq!((count(&shop.store, &shop.jobs).await, bodies(&shop.store, &shop.dead).await.len()), (0, 1));
}

async fn a_move_that_cannot_end_holds_up_no_other() {
    let shop = Shop::open().await;
    shop.reject_one_that_is_held_up().await;
    shop.store.end_moves_behind_step(1);
    shop.reject_one().await;
    let other = shop.later().await;
    assert_eq!(count(&other, &shop.dead).await, 1);
    // The first one arrives when its target is open.
    let closed: QueueName = "closed".parse().unwrap();
    other.transfer().unwrap().set_copy(&TransferScope::Queue(closed.clone()), None, "test").await.unwrap();
    other.clock_moved().await.unwrap();
    assert_eq!((count(&other, &shop.jobs).await, count(&other, &closed).await), (0, 1));
}

async fn a_move_is_finished_though_fences_are_ahead_of_the_clock() {
    for set_back in [false, true] {
        let shop = Shop::open().await;
        if !set_back {
            // As after a copy from a store with larger fences, or behind the clock of another node.
            let ahead_us = (1_800_000_000_000 + 3_600_000) * 1000;
            shop.store.transfer().unwrap().raise_fence(Fence(ahead_us)).await.unwrap();
        }
        shop.store.end_moves_behind_step(1);
        shop.reject_one().await;
        if set_back {
            shop.clock.set_wall_ms(1_800_000_000_000 - 3_600_000);
        }
        let other = shop.later().await;
        assert_eq!(count(&other, &shop.dead).await, 1, "the clock was set back: {set_back}");
    }
}

/// Fences are counted for each shard. The shard of the dead letters has given out none so far, and the process that finishes
/// the move knows of none.
async fn fences_grow_from_queue_to_queue_though_the_clock_was_set_back() {
    let shop = Shop::open().await;
    shop.store.send(&shop.jobs, vec![NewMessage::new("job")]).await.unwrap();
    let first = shop.store.receive(&shop.jobs, Receive::up_to(1)).await.unwrap().remove(0);
    shop.clock.set_wall_ms(1_800_000_000_000 - 3_600_000);
    shop.store.end_moves_behind_step(1);
    let reject = Settle::new(first.receipt, Settlement::Reject { reason: "bad".to_owned() });
    shop.store.settle(&shop.jobs, vec![reject]).await.unwrap().remove(0).unwrap();
    shop.later().await;
    // A third process has not seen the move.
    let other = RedisStore::open(&common::url(common::shared()), shop.options.clone()).await.unwrap();
    let letter = other.receive(&shop.dead, Receive::up_to(1)).await.unwrap().remove(0);
    assert!(letter.fence > first.fence, "{:?} after {:?}", letter.fence, first.fence);
}

async fn a_message_that_returns_takes_no_place_of_another() {
    let shop = Shop::open().await;
    shop.store.delete_queue(&shop.dead).await.unwrap();
    shop.store.end_moves_behind_step(1);
    shop.reject_one().await;
    shop.store.delete_queue(&shop.jobs).await.unwrap();
    shop.store.create_queue(&shop.jobs, QueueConfig::sqs()).await.unwrap();
    let new = ["a", "b"].map(NewMessage::new).to_vec();
    shop.store.send(&shop.jobs, new).await.unwrap();
    let other = shop.later().await;
    other.send(&shop.jobs, vec![NewMessage::new("c")]).await.unwrap();
    assert_eq!(bodies(&other, &shop.jobs).await, ["a", "b", "job", "c"]);
    let stats = other.stats(&shop.jobs).await.unwrap();
    assert_eq!((stats.ready, stats.parked), (3, 1));
}

async fn a_redrive_fails_when_its_target_is_deleted_on_the_way() {
    for step in 0..=3 {
        let shop = Shop::open().await;
        let target: QueueName = "elsewhere".parse().unwrap();
        shop.store.create_queue(&target, QueueConfig::sqs()).await.unwrap();
        shop.reject_one().await;
        // The letter leaves and its process dies; the target is gone when another one comes.
        shop.store.end_moves_behind_step(1);
        let task = shop.store.start_redrive(redrive(&shop.dead, Some(&target))).await.unwrap();
        shop.store.quiet().await;
        shop.store.delete_queue(&target).await.unwrap();
        let other = shop.later().await;
        other.end_moves_behind_step(step);
        shop.clock.advance_ms(LEFT_MS);
        other.clock_moved().await.unwrap_or_default();
        other.end_moves_behind_step(0);
        other.clock_moved().await.unwrap();
        let tasks = other.redrives(&shop.dead).await.unwrap();
        assert_eq!((tasks[0].id, tasks[0].state), (task.id, RedriveState::Failed), "step {step}");
        assert_eq!((tasks[0].moved, tasks[0].left), (0, 1), "step {step}");
        assert_eq!(tasks[0].failure.as_deref(), Some("queue elsewhere was deleted"));
        assert_eq!(count(&other, &shop.dead).await, 1, "step {step}");
    }
}

/// A FIFO queue whose group `g` is halted for a dead letter, the queue of that letter, and a third one.
async fn halted(shop: &Shop) -> [QueueName; 3] {
    let [jobs, dead, target] = ["jobs.fifo", "dead.fifo", "other.fifo"].map(|name| name.parse().unwrap());
    shop.store.create_queue(&dead, QueueConfig::sqs_fifo()).await.unwrap();
    shop.store.create_queue(&target, QueueConfig::sqs_fifo()).await.unwrap();
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    let config = QueueConfig { dead_letter, on_dead: OnDead::HaltGroup, ..QueueConfig::sqs_fifo() };
    shop.store.create_queue(&jobs, config).await.unwrap();
    let group = GroupId::new("g").unwrap();
    let message = NewMessage::new("job").group(group.clone()).dedup("d".parse().unwrap());
    shop.store.send(&jobs, vec![message]).await.unwrap();
    reject_first(&shop.store, &jobs).await;
    assert_eq!(shop.store.halted_groups(&jobs).await.unwrap(), [group]);
    [jobs, dead, target]
}

async fn a_decision_is_told_though_its_process_died_before_it_told() {
    let shop = Shop::open().await;
    let [jobs, dead, target] = halted(&shop).await;
    // The letter has arrived elsewhere, which decides about it, and the queue with the group does not know.
    shop.store.end_moves_behind_step(3);
    shop.store.start_redrive(redrive(&dead, Some(&target))).await.unwrap();
    shop.store.quiet().await;
    assert_eq!((count(&shop.store, &dead).await, count(&shop.store, &target).await), (0, 1));
    assert_eq!(shop.store.halted_groups(&jobs).await.unwrap().len(), 1);
    let other = shop.later().await;
    assert_eq!(other.halted_groups(&jobs).await.unwrap(), []);
}

async fn a_letter_that_returns_from_its_way_still_halts_its_group() {
    let shop = Shop::open().await;
    let [jobs, dead, target] = halted(&shop).await;
    let group = GroupId::new("g").unwrap();
    shop.store.end_moves_behind_step(1);
    shop.store.start_redrive(redrive(&dead, Some(&target))).await.unwrap();
    shop.store.quiet().await;
    shop.store.delete_queue(&target).await.unwrap();
    let other = shop.later().await;
    assert_eq!(count(&other, &dead).await, 1);
    assert_eq!(other.halted_groups(&jobs).await.unwrap(), [group], "the letter was not decided about");
    // One that arrives elsewhere was.
    other.create_queue(&target, QueueConfig::sqs_fifo()).await.unwrap();
    other.start_redrive(redrive(&dead, Some(&target))).await.unwrap();
    other.quiet().await;
    assert_eq!((count(&other, &dead).await, count(&other, &target).await), (0, 1));
    assert_eq!(other.halted_groups(&jobs).await.unwrap(), []);
}

async fn ended_redrives_are_forgotten() {
    let shop = Shop::open().await;
    for _ in 0..105 {
        let task = shop.store.start_redrive(redrive(&shop.dead, None)).await.unwrap();
        shop.store.quiet().await;
        shop.store.cancel_redrive(task.id).await.unwrap();
    }
    let kept = shop.store.redrives(&shop.dead).await.unwrap();
    assert_eq!(kept.len(), 100);
    assert!(kept.windows(2).all(|pair| pair[0].id > pair[1].id), "the last ones");
}

async fn a_group_that_continues_keeps_all_its_messages() {
    let shop = Shop::open().await;
    let jobs: QueueName = "jobs.fifo".parse().unwrap();
    let retention_ms = 60_000;
    let config = QueueConfig { retention_ms, on_dead: OnDead::HaltGroup, ..QueueConfig::sqs_fifo() };
    shop.store.create_queue(&jobs, config).await.unwrap();
    let group = GroupId::new("g").unwrap();
    for part in 0..12 {
        let message = |n| {
            let message = NewMessage::new("job").group(group.clone());
            message.dedup(format!("{part}-{n}").parse().unwrap())
        };
        shop.store.send(&jobs, (0..100).map(message).collect()).await.unwrap();
    }
    assert_eq!(reject_first(&shop.store, &jobs).await, Settled::Parked);
    shop.clock.advance_ms(3 * retention_ms);
    shop.store.clock_moved().await.unwrap();
    shop.store.release_group(&jobs, &group).await.unwrap();
    for (part, kept) in [(2, 1_200), (2, 1)] {
        shop.clock.advance_ms(retention_ms / part + 1_000);
        shop.store.clock_moved().await.unwrap();
        assert_eq!(count(&shop.store, &jobs).await, kept, "one is parked");
    }
}
