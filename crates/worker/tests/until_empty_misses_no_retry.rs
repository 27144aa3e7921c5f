//! A worker that stops when its queue is empty does not take an empty answer for the end if a delivery was still
//! running when it asked: that delivery may have put its message back since.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Rig, TIMEOUT, until};
use hapax_core::{
    Batch, Delivery, Extend, NewMessage, QueueSource, Receive, RemainingLease, Settle, SettleError, Settled,
    Source, SourceDescription, StoreError, Tier,
};
use hapax_worker::{Cx, HandlerOutcome, StopWhen};
use tokio::sync::Notify;

/// Holds back the first empty answer until the handler that runs meanwhile has put its message back.
struct LateAnswer {
    inner: QueueSource,
    calls: AtomicU32,
    asked: Arc<Notify>,
    put_back: Arc<Notify>,
}

#[async_trait::async_trait]
impl Source for LateAnswer {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        self.inner.describe().await
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        let answer = self.inner.next(receive).await?;
        if self.calls.fetch_add(1, Ordering::SeqCst) == 1 {
            assert!(answer.is_empty(), "the only message is in flight");
            self.asked.notify_one();
            self.put_back.notified().await;
        }
        Ok(answer)
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.inner.settle(batch).await
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.inner.extend(batch).await
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_retry_between_the_answer_and_the_look() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::tier(tier).await;
        rig.send(NewMessage::new("1")).await;
        let (asked, put_back) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let source = Arc::new(LateAnswer {
            inner: QueueSource::new(rig.store.clone(), rig.queue.clone()),
            calls: 0.into(),
            asked: asked.clone(),
            put_back: put_back.clone(),
        });
        let handler = {
            let asked = asked.clone();
            move |_: u32, cx: Cx| {
                let asked = asked.clone();
                async move {
                    if cx.delivery().deliveries > 1 {
                        return HandlerOutcome::Done(());
                    }
                    asked.notified().await;
                    HandlerOutcome::retry("not now")
                }
            }
        };
        let builder = rig.builder().source(source).handler(handler).concurrency(2);
        let worker = builder.stop_when(StopWhen::Empty).build().await.unwrap();
        let watch = worker.watch();
        let idle = async {
            until("the message is back", async || rig.stats().await.totals.retried == 1).await;
            // Until the worker has taken note of it as well.
            until("it was counted", async || watch.counts().retried == 1).await;
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            put_back.notify_one();
            std::future::pending::<()>().await;
        };
        let report = tokio::time::timeout(TIMEOUT, worker.run(idle)).await.unwrap().unwrap();
        assert_eq!((report.counts.done, rig.stats().await.ready), (1, 0), "{tier:?}: {report:?}");
    }
}
