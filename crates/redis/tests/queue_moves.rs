//! A message that goes to another queue takes several steps. Its process may die behind each of them: the message is then in
//! one of both queues in the end, once, also if it was taken out of the target meanwhile.

mod common;

use std::sync::Arc;

use hapax_core::{
    DeadLetterPolicy, ManualClock, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, RedriveRequest, RedriveState, Settle, Settled, Settlement,
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
        let got = self.store.receive(&self.jobs, Receive::up_to(1)).await.unwrap().remove(0);
        let reject = Settle::new(got.receipt, Settlement::Reject { reason: "bad".to_owned() });
        self.store.settle(&self.jobs, vec![reject]).await.unwrap().remove(0).unwrap()
    }
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
            assert_eq!(count(&shop.store, &shop.jobs).await, 0, "it cannot be received twice");
            let mut taken = 0;
            if takes {
                taken = drained(&shop.store, &shop.dead).await;
                assert_eq!(taken, usize::from(step >= 2), "it is there from the second step on");
            }
            let other = shop.later().await;
            taken += drained(&other, &shop.dead).await;
            assert_eq!(taken, 1, "step {step}, taken meanwhile: {takes}");
            assert_eq!((count(&other, &shop.jobs).await, count(&other, &shop.dead).await), (0, 0));
        }
    }
}

async fn a_redrive_is_finished_whatever_step_its_process_died_behind() {
    for step in 1..=3 {
        let shop = Shop::open().await;
        assert_eq!(shop.reject_one().await, Settled::Dead);
        shop.store.end_moves_behind_step(step);
        let ask = RedriveRequest {
            from: shop.dead.clone(),
            to: None,
            filter: hapax_core::RedriveFilter::default(),
            per_second: None,
            by: "ann".to_owned(),
        };
        let task = shop.store.start_redrive(ask).await.unwrap();
        shop.store.quiet().await;
        let taken = drained(&shop.store, &shop.jobs).await;
        assert_eq!(taken, usize::from(step >= 2), "step {step}");
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
