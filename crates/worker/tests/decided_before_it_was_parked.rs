//! An operator decides about a key in doubt after the worker was told of the doubt and before its message is parked: the
//! message goes on, wherever the ledger is. Nothing else would wake it.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Rig, run_until};
use hapax_core::{
    Batch, Claim, ClaimEnding, ClaimRequest, Delivery, EndClaim, EntryId, Extend, Ledger, MessageId,
    NewMessage, OnDoubt, QueueSource, Receive, RemainingLease, Resolution, Settle, SettleError, Settled,
    Settlement, Source, SourceDescription, StoreError, Tier,
};
use hapax_worker::{Cx, HandlerOutcome};

/// A queue whose operator decides just before the first message is parked.
struct DecidedBefore {
    inner: QueueSource,
    ledger: Arc<dyn Ledger>,
    id: EntryId,
    decided: AtomicBool,
}

#[async_trait::async_trait]
impl Source for DecidedBefore {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        self.inner.describe().await
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.inner.next(receive).await
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let parks = batch
            .iter()
            .any(|settle| matches!(settle.settlement, Settlement::Park { .. }) && settle.claim.is_none());
        if parks && !self.decided.swap(true, Ordering::SeqCst) {
            self.ledger.resolve(&self.id, Resolution::Absent, "eva").await.unwrap();
        }
        self.inner.settle(batch).await
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.inner.extend(batch).await
    }

    async fn release(&self, messages: Vec<MessageId>) -> Result<(), StoreError> {
        self.inner.release(messages).await
    }
}

async fn runs_after_the_decision(elsewhere: bool, met: bool) {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let ledger: Arc<dyn Ledger> = if elsewhere { rig.elsewhere.clone() } else { rig.store.clone() };
    let id = EntryId::of_queue(&rig.queue, "order-7".parse().unwrap());
    if met {
        let request = ClaimRequest::new(id.clone(), "before".parse().unwrap(), 60_000);
        let fingerprint = Some(blake3::hash(b"1").to_hex().as_str().parse().unwrap());
        let request = ClaimRequest { on_doubt: OnDoubt::Park, fingerprint, ..request };
        let claim = ledger.claim(vec![request]).await.unwrap();
        let Ok(Claim::Granted(grant)) = &claim[0] else { panic!("{claim:?}") };
        let end = EndClaim { id: id.clone(), token: grant.token.clone(), ending: ClaimEnding::Doubt };
        ledger.end(vec![end]).await.unwrap()[0].unwrap();
    }
    let source = Arc::new(DecidedBefore {
        inner: QueueSource::new(rig.store.clone(), rig.queue.clone()),
        ledger: ledger.clone(),
        id,
        decided: AtomicBool::new(false),
    });
    let builder = if elsewhere { rig.builder_elsewhere() } else { rig.builder() };
    let runs = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counted = runs.clone();
    let handler = move |_: u32, _: Cx| {
        let first = counted.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            if first && !met {
                HandlerOutcome::InDoubt { error: "no answer".into() }
            } else {
                HandlerOutcome::Done(7u32)
            }
        }
    };
    let worker =
        builder.source(source.clone()).on_doubt(OnDoubt::Park).handler(handler).build().await.unwrap();
    rig.send(NewMessage::new("1").idempotency_key(&"order-7".parse().unwrap())).await;
    let report = run_until(worker, |counts| counts.done == 1).await;
    assert!(source.decided.load(Ordering::SeqCst), "the operator came in between");
    assert_eq!(runs.load(Ordering::SeqCst), if met { 1 } else { 2 });
    let stats = rig.stats().await;
    assert_eq!((stats.parked, stats.totals.acked), (0, 1), "{report:?}");
}

#[tokio::test]
async fn in_the_store_of_the_queue() {
    runs_after_the_decision(false, true).await;
}

#[tokio::test]
async fn in_another_store() {
    runs_after_the_decision(true, true).await;
}

/// The handler's own doubt is recorded in the other store first: the decision may come before the park.
#[tokio::test]
async fn in_another_store_after_the_handlers_own_doubt() {
    runs_after_the_decision(true, false).await;
}
