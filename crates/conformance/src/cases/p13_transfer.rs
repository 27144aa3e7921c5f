//! Export and import: a queue that was moved is as it was, and moving it again adds nothing.
//!
//! The cases export queues, delete them, make them again and import what was exported: to the store, the ids and places
//! are then those of another store.

use std::sync::Arc;

use hapax_core::{
    Claim, ClaimEnd, ClaimRequest, Ending, EntryId, EntryState, ExportedItem, ExportedMessage, Fence, How,
    Imported, Json, Ledger, MessageState, OnDead, OnDoubt, Priority, QueueConfig, QueueName, RecordedOutcome,
    Resolution, SendError, Tier, TransferScope,
};

use crate::trial::Trial;
use crate::values::{
    attribute, bodies, config, dedup, dying, fifo_config, in_group, now, redrive_from, reject, retry, seen,
    text,
};

fn of(queue: &QueueName) -> TransferScope {
    TransferScope::Queue(queue.clone())
}

impl Trial {
    /// All that a scope holds, in pages of two.
    async fn export(&self, from: &TransferScope) -> Vec<ExportedItem> {
        let store = self.store();
        let transfer = store.transfer().expect("the case needs it");
        let (mut items, mut after) = (Vec::new(), None::<String>);
        loop {
            let page =
                self.within("export", transfer.export(from, after.as_deref(), 2)).await.expect("export");
            items.extend(page.items);
            after = page.next;
            if after.is_none() {
                return items;
            }
        }
    }

    async fn try_import(
        &self,
        to: &TransferScope,
        items: Vec<ExportedItem>,
    ) -> Vec<Result<Imported, SendError>> {
        let (store, count) = (self.store(), items.len());
        let import = store.transfer().expect("the case needs it").import(to, items);
        let answers = self.within("import", import).await.expect("import");
        assert_eq!(answers.len(), count, "one answer per item");
        answers
    }

    /// Imports everything; says how many were added.
    async fn import(&self, to: &TransferScope, items: &[ExportedItem]) -> usize {
        let answers = self.try_import(to, items.to_vec()).await;
        let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("it is accepted")).collect();
        answers.into_iter().filter(|imported| *imported == Imported::Added).count()
    }

    async fn pause(&self, queue: &QueueName) {
        self.within("pause", self.store().pause_queue(queue, "suite", None)).await.expect("pause");
    }

    /// Deletes a queue and makes it again with nothing in it.
    async fn remake(&self, queue: &QueueName, config: QueueConfig) {
        let store = self.store();
        self.within("delete", store.delete_queue(queue)).await.expect("delete");
        assert_eq!(self.within("create", store.create_queue(queue, config)).await, Ok(true));
    }

    /// Pauses, exports, remakes and imports a queue; gives what was exported.
    async fn moved(&self, queue: &QueueName, config: QueueConfig) -> Vec<ExportedItem> {
        self.pause(queue).await;
        let items = self.export(&of(queue)).await;
        self.remake(queue, config).await;
        assert_eq!(self.import(&of(queue), &items).await, items.len());
        items
    }

    fn own_ledger(&self) -> Arc<dyn Ledger> {
        self.harness.ledger().expect("the case needs a ledger")
    }
}

/// What stays of exported items when their places are another store's.
fn without_places(items: &[ExportedItem]) -> Vec<ExportedItem> {
    let mut items = items.to_vec();
    for item in &mut items {
        if let ExportedItem::Message(message) = item {
            message.sequence = 0;
        }
    }
    items
}

fn messages(items: &[ExportedItem]) -> Vec<ExportedMessage> {
    let message = |item: &ExportedItem| match item {
        ExportedItem::Message(message) => Some((**message).clone()),
        _ => None,
    };
    items.iter().filter_map(message).collect()
}

pub(crate) async fn only_a_paused_queue_is_exported(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let store = t.store();
    let refused = store.transfer().unwrap().export(&of(&jobs), None, 10).await;
    assert!(refused.unwrap_err().to_string().contains("pause it first"));
    t.pause(&jobs).await;
    assert_eq!(messages(&t.export(&of(&jobs)).await).len(), 1);
    for (after, limit) in [(None, 0), (None, 1001), (Some("x"), 10), (Some("m"), 10)] {
        let refused = store.transfer().unwrap().export(&of(&jobs), after, limit).await;
        assert!(refused.is_err(), "{after:?} {limit}: {refused:?}");
    }
}

pub(crate) async fn a_moved_message_is_as_it_was(t: Trial) {
    let keyed = QueueConfig { key_pointer: Some("/order".into()), ..config() };
    let jobs = t.create("jobs", keyed).await;
    t.send(&jobs, text("tried").attribute("k", attribute("v")).dedup(dedup("d"))).await;
    let tried = t.one(&jobs).await;
    t.settle(&jobs, &tried, How::Retry { after_ms: Some(3_600_000), error: Some("no".into()) })
        .await
        .unwrap();
    t.send(&jobs, text("parked")).await;
    let parked = t.one(&jobs).await;
    t.settle(&jobs, &parked, reject("never")).await.unwrap();
    t.send(&jobs, text(r#"{"order":7}"#).priority(Priority(3))).await;
    t.send(&jobs, hapax_core::NewMessage::new(vec![0, 255, 1])).await;
    t.send(&jobs, text("later").deliver_at_ms(t.now_ms().await + 7_200_000)).await;
    t.send(&jobs, text("flying").priority(Priority(9))).await;
    let flying = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(bodies(std::slice::from_ref(&flying)), ["flying"]);

    let before = t.browse(&jobs).await;
    // No pointer any more: the keys are those that were decided when the messages were sent.
    let exported = t.moved(&jobs, config()).await;
    t.pause(&jobs).await;
    let again = t.export(&of(&jobs)).await;
    assert_eq!(without_places(&again), without_places(&exported), "nothing was lost or changed");

    let after = t.browse(&jobs).await;
    assert_eq!(seen(&after), seen(&before), "the order is kept");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((before.id, &before.history, &before.parked), (after.id, &after.history, &after.parked));
        assert_eq!((before.attempts, before.deliveries), (after.attempts, after.deliveries));
        let state = if before.state == MessageState::InFlight { MessageState::Ready } else { before.state };
        assert_eq!(state, after.state, "in flight comes as returned");
    }
    t.store().resume_queue(&jobs, "suite").await.unwrap();
    let got = t.receive(&jobs, 10).await;
    assert_eq!(got.len(), 3, "{:?}", bodies(&got));
    let flown = got.iter().find(|d| d.id == flying.id).expect("it is delivered again");
    assert_eq!((flown.attempt, flown.deliveries), (2, 2), "its first delivery counts");
    assert!(flown.fence > flying.fence);
    let order = got.iter().find(|d| d.priority == Priority(3)).unwrap();
    assert_eq!(order.key.as_str(), "7");
    let foreign = t.settle(&jobs, &flying, How::Ack).await;
    assert!(foreign.is_err(), "a receipt of the source is not valid");
    assert_eq!(t.store().release(&jobs, vec![parked.id]).await, Ok(1), "it is found by its id");
}

pub(crate) async fn a_moved_fifo_queue_keeps_its_order(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    for (group, body) in [("a", "a0"), ("b", "b0"), ("a", "a1"), ("a", "a2"), ("b", "b1")] {
        t.send(&jobs, in_group(group, body)).await;
    }
    // In flight when it is moved, and followed by others of its group.
    assert_eq!(t.receive(&jobs, 1).await.len(), 1);
    t.moved(&jobs, fifo_config()).await;
    t.crash().await;
    let mut got = Vec::new();
    loop {
        let batch = t.receive(&jobs, 10).await;
        if batch.is_empty() {
            break;
        }
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
        got.extend(bodies(&batch));
    }
    let of_group =
        |group: &str| got.iter().filter(|body| body.starts_with(group)).cloned().collect::<Vec<_>>();
    assert_eq!(
        (of_group("a"), of_group("b")),
        (vec!["a0".into(), "a1".into(), "a2".into()], vec!["b0".into(), "b1".into()])
    );
}

pub(crate) async fn a_group_stays_halted_for_its_dead_letter_and_takes_it_back_in_order(mut t: Trial) {
    let halting = QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() };
    let (jobs, dead) = t.with_dead(1, halting.clone()).await;
    for body in ["m0", "m1", "m2"] {
        t.send(&jobs, in_group("g", body)).await;
    }
    t.send(&jobs, in_group("free", "f")).await;
    let first = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &first, retry("broken")).await.unwrap();
    let letter = t.browse(&dead).await.remove(0);

    t.pause(&dead).await;
    t.pause(&jobs).await;
    let (letters, waiting) = (t.export(&of(&dead)).await, t.export(&of(&jobs)).await);
    t.remake(&jobs, fifo_config()).await;
    t.remake(&dead, fifo_config()).await;
    t.set(&jobs, dying(&dead, 1, halting)).await;
    let too_early = t.try_import(&of(&jobs), waiting.clone()).await;
    assert!(too_early.iter().any(Result::is_err), "its dead letter is not there yet: {too_early:?}");
    t.remake(&jobs, dying(&dead, 1, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() })).await;
    assert_eq!(t.import(&of(&dead), &letters).await, letters.len());
    let again: Vec<_> = t.try_import(&of(&jobs), waiting.clone()).await;
    assert!(again.iter().all(Result::is_ok), "{again:?}");
    t.crash().await;

    let moved = t.browse(&dead).await.remove(0);
    assert_eq!((moved.id, &moved.dead, &moved.history), (letter.id, &letter.dead, &letter.history));
    assert_eq!(t.store().halted_groups(&jobs).await.unwrap().len(), 1);
    assert_eq!(t.import(&of(&jobs), &waiting).await, 0, "nothing is added twice");
    t.store().resume_queue(&dead, "suite").await.ok();
    t.redrive(redrive_from(&dead)).await;
    let mut got = Vec::new();
    loop {
        let batch = t.receive(&jobs, 10).await;
        if batch.is_empty() {
            break;
        }
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
        got.extend(bodies(&batch).into_iter().filter(|body| body.starts_with('m')));
    }
    assert_eq!(got, ["m0", "m1", "m2"]);
}

pub(crate) async fn a_group_stays_halted_for_its_parked_message(t: Trial) {
    let halting = QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() };
    let jobs = t.create("jobs.fifo", halting.clone()).await;
    for body in ["m0", "m1"] {
        t.send(&jobs, in_group("g", body)).await;
    }
    let first = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &first, reject("never")).await.unwrap();
    t.none(&jobs).await;
    t.moved(&jobs, halting).await;
    t.none(&jobs).await;
    assert_eq!(t.store().release(&jobs, vec![first.id]).await, Ok(1));
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["m0", "m1"]);
}

pub(crate) async fn an_import_that_is_repeated_adds_nothing(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b", "c", "d"]).await;
    t.pause(&jobs).await;
    let items = t.export(&of(&jobs)).await;
    t.remake(&jobs, config()).await;
    // Killed in the middle; what was imported meanwhile is consumed.
    assert_eq!(t.import(&of(&jobs), &items[..2]).await, 2);
    t.crash().await;
    let first = t.receive(&jobs, 1).await.remove(0);
    t.ack(&jobs, &first).await;
    t.send_all(&jobs, &["own"]).await;
    assert_eq!(t.import(&of(&jobs), &items).await, 2, "only the other two");
    assert_eq!(t.import(&of(&jobs), &items).await, 0);
    t.restart().await;
    assert_eq!(t.import(&of(&jobs), &items).await, 0, "what is gone stays gone");
    assert_eq!(seen(&t.browse(&jobs).await), ["b", "own", "c", "d"]);
    assert_eq!(t.receive(&jobs, 10).await.len(), 4);
}

pub(crate) async fn a_moved_queue_remembers_its_deduplication_ids(t: Trial) {
    let jobs = t.standard("jobs").await;
    let gone = t.send(&jobs, text("x").dedup(dedup("gone"))).await;
    let delivery = t.one(&jobs).await;
    t.ack(&jobs, &delivery).await;
    let waits = t.send(&jobs, text("y").dedup(dedup("waits"))).await;
    let items = t.moved(&jobs, config()).await;
    assert_eq!(items.iter().filter(|item| matches!(item, ExportedItem::Dedup(_))).count(), 2);
    for (id, first) in [("gone", gone.id), ("waits", waits.id)] {
        let again = t.send(&jobs, text("z").dedup(dedup(id))).await;
        assert!(again.duplicate, "{id} is remembered");
        assert_eq!(again.id, first, "and so is its message");
    }
    assert_eq!(t.import(&of(&jobs), &items).await, 0);
    assert_eq!(seen(&t.browse(&jobs).await), ["y"]);
    t.pass(config().dedup.window_ms).await;
    assert!(!t.send(&jobs, text("z").dedup(dedup("gone"))).await.duplicate, "its window is over");
}

pub(crate) async fn fences_of_the_target_exceed_those_of_the_source(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let before = t.receive(&jobs, 1).await.remove(0);
    let store = t.store();
    let bound = store.transfer().unwrap().fence_bound().await.unwrap();
    assert!(before.fence < bound);
    // As if the source's clock were an hour ahead.
    let ahead = Fence(bound.0 + 3_600_000_000);
    store.transfer().unwrap().raise_fence(ahead).await.unwrap();
    store.transfer().unwrap().raise_fence(bound).await.unwrap();
    drop(store);
    t.crash().await;
    assert!(t.receive(&jobs, 1).await.remove(0).fence >= ahead, "also after a crash");
    let store = t.store();
    let refused = store.transfer().unwrap().raise_fence(Fence::MAX).await;
    assert!(refused.is_err(), "no fence would be left");
}

pub(crate) async fn what_does_not_fit_is_refused_alone(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    t.pause(&jobs).await;
    let items = t.export(&of(&jobs)).await;
    t.remake(&jobs, config()).await;
    let mut broken = messages(&items);
    broken[0].attempts = 5;
    let damaged = ExportedItem::Damaged { what: "message x".into(), problem: "its bytes".into() };
    let batch = vec![damaged.clone(), ExportedItem::Message(Box::new(broken.remove(0))), items[1].clone()];
    let answers = t.try_import(&of(&jobs), batch).await;
    assert!(answers[0].is_err() && answers[1].is_err(), "{answers:?}");
    assert_eq!(answers[2], Ok(Imported::Added));
    assert!(t.try_import(&TransferScope::Ledger, vec![items[0].clone()]).await[0].is_err());
    assert_eq!(seen(&t.browse(&jobs).await), ["b"]);
    let store = t.store();
    let many = store.transfer().unwrap().import(&of(&jobs), vec![damaged; 1001]).await;
    assert!(many.unwrap_err().to_string().contains("1001 elements are too many"));
}

async fn claim(ledger: &dyn Ledger, id: &EntryId, owner: &str) -> Claim {
    let request = ClaimRequest {
        on_doubt: OnDoubt::Park,
        ..ClaimRequest::new(id.clone(), owner.parse().unwrap(), 60_000)
    };
    ledger.claim(vec![request]).await.unwrap().remove(0).unwrap()
}

async fn end(ledger: &dyn Ledger, id: &EntryId, claim: Claim, ending: Ending) {
    let Claim::Granted(grant) = claim else { panic!("{claim:?}") };
    ledger.end(vec![ClaimEnd { id: id.clone(), token: grant.token, ending }]).await.unwrap()[0].unwrap();
}

pub(crate) async fn a_moved_entry_replays_and_an_open_claim_is_in_doubt(mut t: Trial) {
    let ledger = t.own_ledger();
    let id = |key: &str| EntryId::new("shop".parse().unwrap(), key.parse().unwrap());
    let (done, open) = (id("done"), id("open"));
    let outcome = RecordedOutcome::done(Json::parse(r#"{"paid":1}"#).unwrap());
    let claimed = claim(&*ledger, &done, "me").await;
    let ending = Ending::Complete { outcome: outcome.clone(), ttl_ms: 3_600_000 };
    end(&*ledger, &done, claimed, ending).await;
    let held = claim(&*ledger, &open, "me").await;

    let items = t.export(&TransferScope::Ledger).await;
    assert_eq!(items.len(), 2);
    assert_eq!(t.import(&TransferScope::Ledger, &items).await, 0, "both are there");
    end(&*ledger, &open, held, Ending::Release).await;
    ledger.forget(&done, "suite").await.unwrap();
    assert_eq!(t.import(&TransferScope::Ledger, &items).await, 2);
    assert_eq!(t.import(&TransferScope::Ledger, &items).await, 0);
    drop(ledger);
    t.crash().await;
    let ledger = t.own_ledger();
    assert!(
        matches!(claim(&*ledger, &done, "other").await, Claim::Completed { outcome: o, .. } if o == outcome)
    );
    assert!(matches!(claim(&*ledger, &open, "other").await, Claim::InDoubt { .. }));
}

pub(crate) async fn a_message_that_was_parked_for_an_entry_goes_on_when_it_is_resolved(t: Trial) {
    let tier = QueueConfig { tier: Tier::EffectivelyOnce, ..config() };
    let (jobs, ledger) = (t.create("jobs", tier.clone()).await, t.own_ledger());
    t.send_all(&jobs, &["a"]).await;
    let delivery = t.one(&jobs).await;
    let id = EntryId::of_queue(&jobs, delivery.key.clone());
    let claimed = claim(&*ledger, &id, "me").await;
    end(&*ledger, &id, claimed, Ending::Doubt).await;
    t.settle(&jobs, &delivery, How::Park { reason: "in doubt".into() }).await.unwrap();

    t.pause(&jobs).await;
    let (entries, items) = (t.export(&TransferScope::Ledger).await, t.export(&of(&jobs)).await);
    t.remake(&jobs, tier).await;
    ledger.forget(&id, "suite").await.unwrap();
    assert_eq!(t.import(&of(&jobs), &items).await, items.len());
    assert_eq!(t.import(&TransferScope::Ledger, &entries).await, 1);
    assert_eq!(ledger.entry(&id).await.unwrap().unwrap().state, EntryState::InDoubt);
    t.none(&jobs).await;
    ledger.resolve(&id, Resolution::Absent, "suite").await.unwrap();
    let again = t.receive_with(&jobs, now(1)).await;
    assert_eq!(again.len(), 1, "it goes on");
    assert_eq!((again[0].id, &again[0].key), (delivery.id, &delivery.key));
}
