//! Export and import: a queue that was moved is as it was, and moving it again adds nothing.
//!
//! The cases export queues, delete them, make them again and import what was exported: to the store, the ids and places
//! are then those of another store.

use std::sync::Arc;

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, EntryState, ExportedItem, ExportedMessage, Fence,
    Imported, Json, Ledger, MessageState, OnDead, OnDoubt, Priority, QueueConfig, QueueName, Quota,
    RecordedOutcome, Resolution, SendError, Settlement, Tier, TransferScope,
};

use hapax_core::store::FailedAttempt;
use hapax_core::transfer::IMPORTED_MS_MIN;

use crate::trial::Trial;
use crate::values::{
    attribute, bodies, config, dedup, dying, fifo_config, group, in_group, now, redrive_from, reject, retry,
    seen, text,
};

pub(super) fn of(queue: &QueueName) -> TransferScope {
    TransferScope::Queue(queue.clone())
}

impl Trial {
    /// All that a scope holds, in pages of two.
    pub(super) async fn export(&self, from: &TransferScope) -> Vec<ExportedItem> {
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

    /// Receives and acks until nothing comes any more.
    async fn drained(&self, queue: &QueueName) -> Vec<String> {
        let mut got = Vec::new();
        loop {
            let batch = self.receive(queue, 10).await;
            if batch.is_empty() {
                return got;
            }
            for delivery in &batch {
                self.ack(queue, delivery).await;
            }
            got.extend(bodies(&batch));
        }
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

pub(super) fn messages(items: &[ExportedItem]) -> Vec<ExportedMessage> {
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
    t.settle(&jobs, &tried, Settlement::Retry { after_ms: Some(3_600_000), error: Some("no".into()) })
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
    let foreign = t.settle(&jobs, &flying, Settlement::Ack).await;
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
    let got = t.drained(&jobs).await;
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
    let mut got = t.drained(&jobs).await;
    got.retain(|body| body.starts_with('m'));
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

pub(super) async fn claim(ledger: &dyn Ledger, id: &EntryId, owner: &str) -> Claim {
    let request = ClaimRequest {
        on_doubt: OnDoubt::Park,
        ..ClaimRequest::new(id.clone(), owner.parse().unwrap(), 60_000)
    };
    ledger.claim(vec![request]).await.unwrap().remove(0).unwrap()
}

async fn end(ledger: &dyn Ledger, id: &EntryId, claim: Claim, ending: ClaimEnding) {
    let Claim::Granted(grant) = claim else { panic!("{claim:?}") };
    ledger.end(vec![EndClaim { id: id.clone(), token: grant.token, ending }]).await.unwrap()[0].unwrap();
}

pub(crate) async fn a_moved_entry_replays_and_an_open_claim_is_in_doubt(mut t: Trial) {
    let ledger = t.own_ledger();
    let id = |key: &str| EntryId::new("shop".parse().unwrap(), key.parse().unwrap());
    let (done, open) = (id("done"), id("open"));
    let outcome = RecordedOutcome::done(Json::parse(r#"{"paid":1}"#).unwrap());
    let claimed = claim(&*ledger, &done, "me").await;
    let ending = ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: 3_600_000 };
    end(&*ledger, &done, claimed, ending).await;
    let held = claim(&*ledger, &open, "me").await;

    let items = t.export(&TransferScope::Ledger).await;
    assert_eq!(items.len(), 2);
    assert_eq!(t.import(&TransferScope::Ledger, &items).await, 0, "both are there");
    end(&*ledger, &open, held, ClaimEnding::Release).await;
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

/// A release by a holder that took over leaves the doubt about the first one, so the copy has to know of the takeover.
pub(crate) async fn a_moved_entry_keeps_its_takeovers(t: Trial) {
    let ledger = t.own_ledger();
    let id = EntryId::new("shop".parse().unwrap(), "taken".parse().unwrap());
    let first = claim(&*ledger, &id, "first").await;
    end(&*ledger, &id, first, ClaimEnding::Doubt).await;
    let second = ClaimRequest::new(id.clone(), "second".parse().unwrap(), 60_000);
    let second = ledger.claim(vec![second]).await.unwrap().remove(0).unwrap();
    assert!(matches!(&second, Claim::Granted(grant) if grant.takeover), "{second:?}");
    end(&*ledger, &id, second, ClaimEnding::Doubt).await;
    let items = t.export(&TransferScope::Ledger).await;
    ledger.forget(&id, "suite").await.unwrap();
    assert_eq!(t.import(&TransferScope::Ledger, &items).await, 1);
    let entry = ledger.entry(&id).await.unwrap().unwrap();
    assert_eq!((entry.state, entry.takeovers), (EntryState::InDoubt, 1));
}

pub(crate) async fn a_message_that_was_parked_for_an_entry_goes_on_when_it_is_resolved(t: Trial) {
    let tier = QueueConfig { tier: Tier::EffectivelyOnce, ..config() };
    let (jobs, ledger) = (t.create("jobs", tier.clone()).await, t.own_ledger());
    t.send_all(&jobs, &["a"]).await;
    let delivery = t.one(&jobs).await;
    let id = EntryId::of_queue(&jobs, delivery.key.clone());
    let claimed = claim(&*ledger, &id, "me").await;
    end(&*ledger, &id, claimed, ClaimEnding::Doubt).await;
    t.settle(&jobs, &delivery, Settlement::Park { reason: "in doubt".into() }).await.unwrap();

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

/// A queue whose keys are its messages' `order`.
fn by_order() -> QueueConfig {
    QueueConfig { tier: Tier::EffectivelyOnce, key_pointer: Some("/order".into()), ..config() }
}

/// Completes the entry of a delivery, to be kept for a minute.
async fn complete_for_a_minute(ledger: &dyn Ledger, id: &EntryId) {
    let claimed = claim(ledger, id, "me").await;
    let outcome = RecordedOutcome::done(Json::parse("1").unwrap());
    end(ledger, id, claimed, ClaimEnding::Complete { outcome, ttl_ms: 60_000 }).await;
}

/// Imports a ledger and a queue in either order, with time between the two.
async fn import_in_order(
    t: &Trial,
    queue: &QueueName,
    entries: &[ExportedItem],
    items: &[ExportedItem],
    first: bool,
) {
    if first {
        assert_eq!(t.import(&TransferScope::Ledger, entries).await, entries.len());
        t.pass(600_000).await;
    }
    assert_eq!(t.import(&of(queue), items).await, items.len());
    if !first {
        t.pass(600_000).await;
        t.import(&TransferScope::Ledger, entries).await;
    }
    t.pass(600_000).await;
}

pub(crate) async fn an_entry_that_a_waiting_message_needs_is_moved_after_its_time(t: Trial) {
    let ledger = t.own_ledger();
    for (name, ledger_first) in [("jobs-a", true), ("jobs-b", false)] {
        let jobs = t.create(name, by_order()).await;
        t.send(&jobs, text(r#"{"order":7,"n":1}"#)).await;
        let first = t.one(&jobs).await;
        let id = EntryId::of_queue(&jobs, first.key.clone());
        complete_for_a_minute(&*ledger, &id).await;
        // Longer than anything that was imported is kept for itself.
        let later_ms = t.now_ms().await + 2 * IMPORTED_MS_MIN;
        t.send(&jobs, text(r#"{"order":7,"n":2}"#).deliver_at_ms(later_ms)).await;
        t.ack(&jobs, &first).await;
        t.pass(600_000).await;

        t.pause(&jobs).await;
        let (entries, items) = (t.export(&TransferScope::Ledger).await, t.export(&of(&jobs)).await);
        let entries: Vec<_> =
            entries.into_iter().filter(|item| matches!(item, ExportedItem::Entry(e) if e.id == id)).collect();
        assert_eq!(entries.len(), 1, "the message needs it");
        t.remake(&jobs, by_order()).await;
        ledger.forget(&id, "suite").await.ok();
        import_in_order(&t, &jobs, &entries, &items, ledger_first).await;
        t.pass(2 * IMPORTED_MS_MIN).await;
        assert_eq!(t.one(&jobs).await.key, id.key);
        let again = claim(&*ledger, &id, "other").await;
        assert!(matches!(again, Claim::Completed { .. }), "ledger first: {ledger_first}: {again:?}");
    }
}

pub(crate) async fn an_entry_that_a_dead_letter_needs_is_moved_after_its_time(t: Trial) {
    let ledger = t.own_ledger();
    for (name, ledger_first) in [("a", true), ("b", false)] {
        let dead = t.create(&format!("{name}-dead"), config()).await;
        let jobs = t.create(name, dying(&dead, 1, by_order())).await;
        t.send(&jobs, text(r#"{"order":7}"#)).await;
        let first = t.one(&jobs).await;
        let id = EntryId::of_queue(&jobs, first.key.clone());
        complete_for_a_minute(&*ledger, &id).await;
        t.settle(&jobs, &first, retry("its ack was lost")).await.unwrap();
        t.pass(600_000).await;

        t.pause(&dead).await;
        let (entries, letters) = (t.export(&TransferScope::Ledger).await, t.export(&of(&dead)).await);
        let entries: Vec<_> =
            entries.into_iter().filter(|item| matches!(item, ExportedItem::Entry(e) if e.id == id)).collect();
        assert_eq!(entries.len(), 1, "the dead letter needs it");
        t.set(&jobs, by_order()).await;
        t.remake(&dead, config()).await;
        t.set(&jobs, dying(&dead, 1, by_order())).await;
        ledger.forget(&id, "suite").await.ok();
        import_in_order(&t, &dead, &entries, &letters, ledger_first).await;
        t.redrive(redrive_from(&dead)).await;
        assert_eq!(t.one(&jobs).await.key, id.key);
        let again = claim(&*ledger, &id, "other").await;
        assert!(matches!(again, Claim::Completed { .. }), "ledger first: {ledger_first}: {again:?}");
    }
}

/// A group `g` with messages `m0` to `m2` that is halted for `m0`, which is among the dead letters.
struct Halted {
    jobs: QueueName,
    dead: QueueName,
    letters: Vec<ExportedItem>,
    waiting: Vec<ExportedItem>,
}

fn halting() -> QueueConfig {
    QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }
}

fn short_lived() -> QueueConfig {
    QueueConfig { retention_ms: 60_000, ..fifo_config() }
}

impl Halted {
    /// Exported so long after the death; dead letters are kept for a minute.
    async fn exported(t: &Trial, after_ms: u64) -> Self {
        let dead = t.create("dead.fifo", short_lived()).await;
        let jobs = t.create("jobs.fifo", dying(&dead, 1, halting())).await;
        for body in ["m0", "m1", "m2"] {
            t.send(&jobs, in_group("g", body)).await;
        }
        let first = t.receive(&jobs, 1).await.remove(0);
        t.settle(&jobs, &first, retry("broken")).await.unwrap();
        t.pass(after_ms).await;
        t.pause(&dead).await;
        t.pause(&jobs).await;
        let (letters, waiting) = (t.export(&of(&dead)).await, t.export(&of(&jobs)).await);
        assert_eq!(messages(&letters).len(), 1, "a group waits for it");
        Self { jobs, dead, letters, waiting }
    }

    async fn remake_jobs(&self, t: &Trial) {
        t.remake(&self.jobs, dying(&self.dead, 1, halting())).await;
    }

    async fn remake(&self, t: &Trial) {
        t.set(&self.jobs, halting()).await;
        t.remake(&self.dead, short_lived()).await;
        self.remake_jobs(t).await;
    }

    async fn runs_in_order_after_a_redrive(&self, t: &Trial) {
        assert_eq!(t.store().halted_groups(&self.jobs).await.unwrap().len(), 1);
        t.none(&self.jobs).await;
        t.store().resume_queue(&self.dead, "suite").await.unwrap();
        t.redrive(redrive_from(&self.dead)).await;
        assert_eq!(t.drained(&self.jobs).await, ["m0", "m1", "m2"]);
    }
}

pub(crate) async fn an_old_dead_letter_that_a_group_waits_for_is_moved(t: Trial) {
    let halted = Halted::exported(&t, 600_000).await;
    halted.remake(&t).await;
    t.import(&of(&halted.dead), &halted.letters).await;
    t.pass(10_000).await;
    t.import(&of(&halted.jobs), &halted.waiting).await;
    t.pass(600_000).await;
    halted.runs_in_order_after_a_redrive(&t).await;
}

pub(crate) async fn a_group_whose_dead_letter_stayed_is_halted_for_it(t: Trial) {
    let halted = Halted::exported(&t, 0).await;
    halted.remake_jobs(&t).await;
    t.import(&of(&halted.jobs), &halted.waiting).await;
    halted.runs_in_order_after_a_redrive(&t).await;
}

pub(crate) async fn a_group_does_not_run_on_when_its_dead_letter_is_missing(mut t: Trial) {
    let halted = Halted::exported(&t, 600_000).await;
    halted.remake(&t).await;
    // Not there yet: nothing of the group is taken, or its dead letter would come behind it.
    let early = t.try_import(&of(&halted.jobs), halted.waiting.clone()).await;
    assert!(early[..3].iter().all(Result::is_err), "{early:?}");
    // Gone before its group was there.
    t.import(&of(&halted.dead), &halted.letters).await;
    let letter = messages(&halted.letters).remove(0).id;
    t.store().discard(&halted.dead, vec![letter], "suite").await.unwrap();
    let missing = t.try_import(&of(&halted.jobs), halted.waiting.clone()).await;
    assert!(missing[0].as_ref().unwrap_err().to_string().contains(&letter.to_string()), "{missing:?}");
    assert!(missing[..3].iter().all(Result::is_err), "{missing:?}");
    t.none(&halted.jobs).await;

    halted.remake(&t).await;
    t.import(&of(&halted.dead), &halted.letters).await;
    t.import(&of(&halted.jobs), &halted.waiting).await;
    assert_eq!(t.store().halted_groups(&halted.jobs).await.unwrap().len(), 1);
    // What was decided stays decided when the import is repeated.
    t.store().discard(&halted.dead, vec![letter], "suite").await.unwrap();
    t.crash().await;
    assert_eq!(t.import(&of(&halted.dead), &halted.letters).await, 0);
    assert_eq!(t.import(&of(&halted.jobs), &halted.waiting).await, 0);
    assert_eq!(t.drained(&halted.jobs).await, ["m1", "m2"]);
}

pub(crate) async fn a_group_keeps_its_order_when_part_of_it_is_refused(t: Trial) {
    let jobs = t.fifo("jobs").await;
    // More than one request of the native API takes.
    let bodies_of = |count: usize| (0..count).map(|n| (n, format!("{n}").repeat(450_000)));
    t.send(&jobs, text("L".repeat(600_000)).group(group("g")).dedup(dedup("L"))).await;
    for (n, body) in bodies_of(8) {
        t.send(&jobs, text(body).group(group("g")).dedup(dedup(&format!("d{n}")))).await;
    }
    t.send(&jobs, in_group("free", "f")).await;
    t.pause(&jobs).await;
    let items = t.export(&of(&jobs)).await;
    t.remake(&jobs, QueueConfig { message_bytes_max: 500_000, ..fifo_config() }).await;
    let answers = t.try_import(&of(&jobs), items.clone()).await;
    assert!(matches!(answers[0], Err(SendError::TooLarge { .. })), "{:?}", answers[0]);
    for answer in &answers[1..9] {
        let refused = answer.as_ref().expect_err("it would be ahead of the first").to_string();
        assert!(refused.contains("group g") && refused.contains("repeat the import"), "{refused}");
    }
    assert_eq!(answers[9], Ok(Imported::Added), "another group");
    t.set(&jobs, fifo_config()).await;
    t.import(&of(&jobs), &items).await;
    let firsts: Vec<_> =
        seen(&t.browse(&jobs).await).iter().map(|body| body.chars().next().unwrap()).collect();
    assert_eq!(firsts, ['f', 'L', '0', '1', '2', '3', '4', '5', '6', '7']);
}

pub(crate) async fn numbers_that_leave_no_room_to_count_are_refused(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.pause(&jobs).await;
    let items = t.export(&of(&jobs)).await;
    t.remake(&jobs, config()).await;
    let message = messages(&items).remove(0);
    let with = |change: fn(&mut ExportedMessage)| {
        let mut message = message.clone();
        change(&mut message);
        ExportedItem::Message(Box::new(message))
    };
    let wrong = vec![
        with(|m| m.fence = Fence((1 << 52) + 1)),
        with(|m| m.fence = Fence::MAX),
        with(|m| m.deliveries = u32::MAX),
        with(|m| (m.attempts, m.deliveries) = (u32::MAX, u32::MAX)),
    ];
    for item in wrong {
        let answers = t.try_import(&of(&jobs), vec![item]).await;
        assert!(answers[0].is_err(), "{answers:?}");
    }
    let highest = with(|m| m.fence = Fence(1 << 52));
    assert_eq!(t.import(&of(&jobs), &[highest]).await, 1);
    t.crash().await;
    let delivery = t.one(&jobs).await;
    assert!(delivery.fence > Fence(1 << 52), "there is room above it");
    t.ack(&jobs, &delivery).await;
}

pub(crate) async fn an_entry_whose_takeovers_leave_no_room_is_refused(t: Trial) {
    let ledger = t.own_ledger();
    let id = EntryId::new("shop".parse().unwrap(), "k".parse().unwrap());
    complete_for_a_minute(&*ledger, &id).await;
    let mut items = t.export(&TransferScope::Ledger).await;
    ledger.forget(&id, "suite").await.unwrap();
    let ExportedItem::Entry(entry) = &mut items[0] else { panic!("{items:?}") };
    entry.takeovers = u32::MAX;
    assert!(t.try_import(&TransferScope::Ledger, items).await[0].is_err());
}

pub(crate) async fn a_page_of_the_largest_items_can_be_imported(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.pause(&jobs).await;
    let mut message = messages(&t.export(&of(&jobs)).await).remove(0);
    t.remake(&jobs, config()).await;
    // Each character of an error is six bytes of JSON.
    let error = Some("\u{1}".repeat(4_096));
    let failed = FailedAttempt { error, ..failed_once(&t).await };
    message.history = vec![failed; 20];
    (message.attempts, message.deliveries) = (20, 20);
    let many = |first: u128, message: &ExportedMessage| -> Vec<_> {
        let of = |n| ExportedMessage { id: hapax_core::MessageId(first + n), ..message.clone() };
        (0..20).map(|n| ExportedItem::Message(Box::new(of(n)))).collect()
    };
    let mut items = many(1, &message);
    // The largest body last, where a page is nearly full.
    message.body = vec![1; 1024 * 1024].into();
    items.extend(many(1_000, &message).drain(..3));
    assert_eq!(t.import(&of(&jobs), &items).await, 23);
    t.pause(&jobs).await;
    let (store, mut after, mut found) = (t.store(), None::<String>, 0);
    loop {
        let page = store.transfer().unwrap().export(&of(&jobs), after.as_deref(), 1_000).await.unwrap();
        let bytes = Json::of(&page).unwrap().as_str().len();
        assert!(bytes < 8 * 1024 * 1024, "{bytes} bytes fit into no request");
        found += page.items.len();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(found, 23);
}

async fn failed_once(t: &Trial) -> FailedAttempt {
    let queue = t.standard("failing").await;
    t.send_all(&queue, &["a"]).await;
    let delivery = t.one(&queue).await;
    t.settle(&queue, &delivery, retry("no")).await.unwrap();
    t.browse(&queue).await.remove(0).history.remove(0)
}

/// A group that was halted for longer than the retention has a whole one again when it continues, wherever it is then.
pub(crate) async fn what_a_group_kept_beyond_its_time_is_moved_with_its_new_retention(t: Trial) {
    const DAY_MS: u64 = 24 * 3_600_000;
    let kept = QueueConfig { retention_ms: 4 * DAY_MS, ..halting() };
    let jobs = t.create("jobs.fifo", kept.clone()).await;
    t.send_group(&jobs, "g", &["m0", "m1"]).await;
    let first = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &first, reject("never")).await.unwrap();
    t.pass(5 * DAY_MS).await;
    t.store().discard(&jobs, vec![first.id], "suite").await.unwrap();
    t.moved(&jobs, kept).await;
    t.pass(3 * DAY_MS).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["m1"]);
    t.pass(2 * DAY_MS).await;
    t.holds(&jobs, 0).await;
}

pub(crate) async fn an_import_keeps_to_the_quota(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b", "c"]).await;
    t.pause(&jobs).await;
    let items = t.export(&of(&jobs)).await;
    for quota in
        [Quota { messages_max: Some(2), bytes_max: None }, Quota { messages_max: None, bytes_max: Some(2) }]
    {
        t.remake(&jobs, QueueConfig { quota, ..config() }).await;
        let answers = t.try_import(&of(&jobs), items.clone()).await;
        assert_eq!(answers[..2], [Ok(Imported::Added), Ok(Imported::Added)]);
        let full = &answers[2];
        assert!(matches!(full, Err(SendError::QuotaExceeded { used: 2, max: 2, .. })), "{full:?}");
        assert_eq!(t.drained(&jobs).await, ["a", "b"]);
        assert_eq!(t.import(&of(&jobs), &items).await, 1, "there is room again");
        assert_eq!(seen(&t.browse(&jobs).await), ["c"]);
    }
}

/// Where it came from, nothing kept an entry for it.
pub(crate) async fn a_message_keeps_its_entry_where_handlers_make_claims(t: Trial) {
    let ledger = t.own_ledger();
    let plain = QueueConfig { tier: Tier::AtLeastOnce, ..by_order() };
    let jobs = t.create("jobs", plain).await;
    let later_ms = t.now_ms().await + 2 * IMPORTED_MS_MIN;
    t.send(&jobs, text(r#"{"order":7,"n":1}"#).deliver_at_ms(later_ms)).await;
    t.moved(&jobs, by_order()).await;
    t.send(&jobs, text(r#"{"order":7,"n":2}"#)).await;
    let first = t.one(&jobs).await;
    let id = EntryId::of_queue(&jobs, first.key.clone());
    complete_for_a_minute(&*ledger, &id).await;
    t.ack(&jobs, &first).await;
    t.pass(2 * IMPORTED_MS_MIN).await;
    assert_eq!(t.one(&jobs).await.key, id.key);
    let again = claim(&*ledger, &id, "other").await;
    assert!(matches!(again, Claim::Completed { .. }), "{again:?}");
}
