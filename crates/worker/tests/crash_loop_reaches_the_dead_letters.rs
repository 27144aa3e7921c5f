//! A message that kills its worker, or makes its handler panic, in every attempt: dead after the maximum number of
//! attempts of its queue.

mod common;

use common::{Rig, dies_after, run_until};
use hapax_core::{FailureCause, NewMessage, QueueConfig, Tier};
use hapax_worker::testing::Trial;
use hapax_worker::{Cx, HandlerOutcome, Point};

#[tokio::test]
async fn by_panics() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::new(dies_after(3, QueueConfig { tier, ..QueueConfig::sqs() })).await;
        rig.send(NewMessage::new("1")).await;
        let boom = |_: u32, cx: Cx| async move {
            assert!(cx.attempt() > 3, "poison at attempt {}", cx.attempt());
        };
        let worker = rig.builder().handler(boom).build().await.unwrap();
        let report = run_until(worker, |counts| counts.panics == 3).await;
        assert!(report.drained);
        let dead = rig.messages("dead").await.pop().unwrap();
        let why = dead.dead.unwrap();
        assert_eq!((why.cause, why.attempts), (FailureCause::Retry, 3), "{tier:?}");
        assert!(why.error.unwrap().contains("poison at attempt 3"));
        assert_eq!(dead.history.len(), 3);
        assert!(dead.history.iter().all(|failed| failed.consumer.as_deref().unwrap().starts_with("worker-")));
    }
}

#[tokio::test]
async fn crashes_count_as_attempts() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::new(dies_after(2, QueueConfig { tier, ..QueueConfig::sqs() })).await;
        let handler = async |_: u32, cx: Cx| -> HandlerOutcome<()> {
            cx.effect_point().await;
            HandlerOutcome::Done(())
        };
        let trial = Trial::new(rig.builder().handler(handler));
        trial.send(NewMessage::new("1")).await.unwrap();
        for _ in 0..2 {
            trial.crash_at(Point::InEffect).await.unwrap();
        }
        common::until("it is dead", async || rig.messages("dead").await.len() == 1).await;
        let dead = rig.messages("dead").await.pop().unwrap().dead.unwrap();
        assert_eq!((dead.cause, dead.attempts), (FailureCause::Expired, 2), "{tier:?}");
        assert_eq!(rig.messages("jobs").await, []);
    }
}
