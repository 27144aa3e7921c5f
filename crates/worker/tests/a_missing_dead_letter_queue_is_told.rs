//! A queue whose dead-letter queue was deleted is worked on: the worker says so when it starts, and what dies stays parked.

mod common;

use common::{Rig, dies_after, run_until};
use hapax_core::{MessageState, NewMessage, QueueAdmin as _, QueueConfig, Tier};
use hapax_worker::{Cx, HandlerOutcome};

#[tokio::test]
async fn the_worker_starts_and_warns() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        for config in [QueueConfig::sqs(), QueueConfig::fifo()] {
            let fifo = config.is_fifo();
            let rig = Rig::new(dies_after(1, QueueConfig { tier, ..config })).await;
            let build = async || {
                let reject = async |_: u32, _: Cx| HandlerOutcome::<()>::reject("never");
                rig.builder().handler(reject).build().await.unwrap()
            };
            let code = "dead-letter-queue-missing";
            assert!(build().await.warnings().iter().all(|found| found.code != code), "it is there");
            let dead = if fifo { "dead.fifo" } else { "dead" };
            rig.store.delete_queue(&dead.parse().unwrap()).await.unwrap();
            let worker = build().await;
            assert!(worker.warnings().iter().any(|found| found.code == code), "{:?}", worker.warnings());

            let message = NewMessage::new("1");
            let grouped = || message.clone().group("g".parse().unwrap()).dedup("d".parse().unwrap());
            rig.send(if fifo { grouped() } else { message.clone() }).await;
            run_until(worker, |counts| counts.rejected == 1).await;
            let left = rig.messages(rig.queue.as_str()).await;
            assert_eq!((left.len(), left[0].state), (1, MessageState::Parked), "{tier:?} fifo {fifo}");
        }
    }
}
