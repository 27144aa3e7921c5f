//! Queues and the ledger while they are copied to another store: closed, for every process and across restarts, and not
//! changed by time.

use hapax_core::{
    AdminError, ClaimEnding, CopyState, EndClaim, EntryId, Ledger, QueueConfig, QueueName, Renew, Resolution,
    ResolveError, Settle, Settled, Settlement, StoreError, TransferScope,
};

use super::p13_transfer::{claim, messages, of};
use crate::ledger_cases::l06_settle::{ask_for, entry_of, keyed, once};
use crate::trial::Trial;
use crate::values::{bodies, config, dying, now, receive_waiting, redrive_from, reject, text};

const OTHER: &str = "postgres://db.example/shop";

fn to(complete: bool) -> CopyState {
    CopyState::To { store: OTHER.into(), complete }
}

fn from() -> CopyState {
    CopyState::From { store: OTHER.into() }
}

/// Asserts that an operation was refused because of the copy.
#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, answer: Result<T, impl Into<AdminError>>) {
    match answer.map_err(Into::into) {
        Err(AdminError::Store(error @ StoreError::Moved(_))) => {
            assert!(error.to_string().contains(OTHER) && error.is_retryable(), "{what}: {error}");
        }
        other => panic!("{what} is not refused: {other:?}"),
    }
}

impl Trial {
    async fn set_copy(&self, scope: &TransferScope, state: Option<CopyState>) {
        let store = self.store();
        let set = store.transfer().expect("the case needs it").set_copy(scope, state, "suite");
        self.within("set_copy", set).await.expect("set_copy");
    }
}

pub(crate) async fn a_closed_queue_refuses_everything_and_names_the_other_store(mut t: Trial) {
    for (number, state) in [to(false), to(true), from()].into_iter().enumerate() {
        for fifo in [false, true] {
            let suffix = if fifo { ".fifo" } else { "" };
            let base = if fifo { crate::values::fifo_config() } else { config() };
            let dead = t.create(&format!("dead{number}{suffix}"), base.clone()).await;
            let jobs = t.create(&format!("jobs{number}{suffix}"), dying(&dead, 5, base.clone())).await;
            let message = |body: &str| {
                if fifo { crate::values::in_group(body, body) } else { text(body) }
            };
            for body in ["flying", "waits", "parks"] {
                t.send(&jobs, message(body)).await;
            }
            let flying = t.receive(&jobs, 1).await.remove(0);
            for queue in [&jobs, &dead] {
                t.set_copy(&of(queue), Some(state.clone())).await;
            }
            for crash in [false, true] {
                if crash {
                    t.crash().await;
                }
                closed_to_all(&t, &jobs, &dead, &flying, &base, message("new")).await;
            }
            // Nothing of that has changed anything.
            assert_eq!(t.browse(&jobs).await.len(), 3);
            for queue in [&dead, &jobs] {
                t.set_copy(&of(queue), None).await;
            }
            assert_eq!(t.store().queue(&jobs).await.unwrap().paused, None, "it was not paused before");
            t.send(&jobs, message("later")).await;
            assert_eq!(t.receive(&jobs, 10).await.len(), 3, "it continues, behind the delivery under way");
            t.store().delete_queue(&jobs).await.unwrap();
            t.store().delete_queue(&dead).await.unwrap();
        }
    }
}

/// Every operation that changes a queue or hands something out.
async fn closed_to_all(
    t: &Trial,
    jobs: &QueueName,
    dead: &QueueName,
    flying: &hapax_core::Delivery,
    base: &QueueConfig,
    message: hapax_core::NewMessage,
) {
    let store = t.store();
    refused("send", store.send(jobs, vec![message.clone()]).await);
    refused("a send with a delay", store.send(jobs, vec![message.delay_ms(5_000)]).await);
    refused("receive", store.receive(jobs, now(1)).await);
    refused("a waiting receive", store.receive(jobs, receive_waiting(1)).await);
    for settlement in [Settlement::Ack, reject("no"), Settlement::Defer { after_ms: 0 }] {
        refused("settle", store.settle(jobs, vec![Settle::new(flying.receipt.clone(), settlement)]).await);
    }
    let extend = hapax_core::Extend { receipt: flying.receipt.clone(), lease_ms: 60_000, own_lease: false };
    refused("extend", store.extend(jobs, vec![extend]).await);
    refused("purge", store.purge(jobs).await);
    refused("discard", store.discard(jobs, vec![flying.id], "suite").await);
    refused("release", store.release(jobs, vec![flying.id]).await);
    refused("release a group", store.release_group(jobs, &crate::values::group("waits")).await);
    refused("redrive", store.start_redrive(redrive_from(dead)).await);
    refused("set", store.set_queue(jobs, QueueConfig { delay_ms: 1, ..base.clone() }, None).await);
    refused("pause", store.pause_queue(jobs, "suite", None).await);
    refused("resume", store.resume_queue(jobs, "suite").await);
    let paused = store.queue(jobs).await.unwrap().paused.expect("a closed queue shows that it is");
    assert!(paused.copy.is_some());
}

pub(crate) async fn a_receive_that_waits_when_its_queue_is_closed_is_refused(t: Trial) {
    for paused in [false, true] {
        let jobs = t.standard(&format!("jobs-{paused}")).await;
        if paused {
            t.store().pause_queue(&jobs, "suite", Some("incident")).await.unwrap();
        }
        let waiting = t.wait(&jobs, receive_waiting(1)).await;
        t.set_copy(&of(&jobs), Some(to(false))).await;
        refused("a receive that waited", t.ended(waiting).await);
        t.set_copy(&of(&jobs), None).await;
        let pause = t.store().queue(&jobs).await.unwrap().paused;
        let reason = pause.and_then(|pause| pause.reason);
        assert_eq!(reason.as_deref(), paused.then_some("incident"), "its pause is as it was");
    }
}

pub(crate) async fn time_changes_nothing_in_a_closed_queue(mut t: Trial) {
    let short = QueueConfig { retention_ms: 120_000, ..config() };
    let dead = t.create("dead", config()).await;
    let jobs = t.create("jobs", dying(&dead, 1, short)).await;
    t.send_all(&jobs, &["flying", "ready"]).await;
    t.send(&jobs, text("later").delay_ms(30_000)).await;
    t.send(&jobs, text("known").dedup(crate::values::dedup("d"))).await;
    let flying = t.receive(&jobs, 1).await;
    assert_eq!(bodies(&flying), ["flying"]);
    for queue in [&jobs, &dead] {
        t.set_copy(&of(queue), Some(to(false))).await;
    }
    let before = t.export(&of(&jobs)).await;
    for crash in [false, true] {
        if crash {
            t.crash().await;
        }
        // Beyond the lease, the delay, the retention and the window.
        t.pass(1_800_000).await;
        assert_eq!(messages(&t.export(&of(&jobs)).await), messages(&before), "crash {crash}");
        assert!(t.browse(&dead).await.is_empty(), "nothing died");
    }
    for queue in [&dead, &jobs] {
        t.set_copy(&of(queue), None).await;
    }
    t.pass(1_000).await;
    t.none(&jobs).await;
    let letters = t.browse(&dead).await;
    assert_eq!(letters.len(), 1, "open again, its lease is over, and it was its last attempt");
}

pub(crate) async fn a_queue_is_not_closed_while_a_redrive_moves_its_messages(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    t.send_all(&jobs, &["a", "b", "c"]).await;
    for delivery in t.receive(&jobs, 10).await {
        t.settle(&jobs, &delivery, reject("no")).await.unwrap();
    }
    let slow = hapax_core::RedriveRequest { per_second: Some(1), ..redrive_from(&dead) };
    let task = t.try_redrive(slow).await.unwrap();
    let store = t.store();
    let transfer = store.transfer().unwrap();
    let closed = transfer.set_copy(&of(&dead), Some(to(false)), "suite").await;
    assert_eq!(closed, Err(AdminError::RedriveRunning(dead.clone())));
    assert_eq!(store.queue(&dead).await.unwrap().paused, None, "it stays open");
    store.cancel_redrive(task.id).await.unwrap();
    t.set_copy(&of(&dead), Some(to(false))).await;
}

pub(crate) async fn a_closed_ledger_refuses_claims_and_their_ends(mut t: Trial) {
    let id = |key: &str| EntryId::new("shop".parse().unwrap(), key.parse().unwrap());
    let held = {
        let ledger = t.harness.ledger().expect("the case needs a ledger");
        let hapax_core::Claim::Granted(held) = claim(&*ledger, &id("held"), "me").await else {
            panic!("a free key is granted")
        };
        held
    };
    t.set_copy(&TransferScope::Ledger, Some(to(true))).await;
    for crash in [false, true] {
        if crash {
            t.crash().await;
        }
        let (store, ledger) = (t.store(), t.harness.ledger().unwrap());
        let state = store.transfer().unwrap().ledger_copy().await.unwrap();
        assert_eq!(state, Some(to(true)));
        ledger_is_closed(&*ledger, &id, &held.token).await;
        refused("a new queue", store.create_queue(&crate::values::queue("new"), config()).await);
        assert_eq!(t.export(&TransferScope::Ledger).await.len(), 1, "it can be read");
    }
    t.set_copy(&TransferScope::Ledger, None).await;
    let ledger = t.harness.ledger().unwrap();
    let end = EndClaim { id: id("held"), token: held.token, ending: ClaimEnding::Release };
    assert_eq!(ledger.end(vec![end]).await.unwrap(), [Ok(())], "it continues");
}

/// The delivery is not settled either, so that both can be repeated.
pub(crate) async fn a_settle_ends_no_claim_in_a_closed_ledger(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let grant = t.grant(ask_for(&jobs, &got, "worker")).await;
    let end = EndClaim { id: entry_of(&jobs, &got), token: grant.token, ending: ClaimEnding::Release };
    let settle = || Settle { claim: Some(end.clone()), ..Settle::new(got.receipt.clone(), Settlement::Ack) };
    t.set_copy(&TransferScope::Ledger, Some(to(true))).await;
    let settled = t.store().settle(&jobs, vec![settle()]).await;
    assert!(matches!(settled, Err(StoreError::Moved(_))), "{settled:?}");
    assert_eq!(t.stats(&jobs).await.in_flight, 1);
    t.set_copy(&TransferScope::Ledger, None).await;
    assert_eq!(t.store().settle(&jobs, vec![settle()]).await, Ok(vec![Ok(Settled::Acked)]), "it continues");
}

async fn ledger_is_closed(ledger: &dyn Ledger, id: &impl Fn(&str) -> EntryId, token: &hapax_core::Token) {
    for key in ["new", "held"] {
        let request = hapax_core::ClaimRequest::new(id(key), "other".parse().unwrap(), 60_000);
        match ledger.claim(vec![request]).await {
            Err(error) => refused("claim", Err::<(), _>(error)),
            // One that meets a held key may be told so: it is granted nothing.
            Ok(answers) => match &answers[0] {
                Ok(hapax_core::Claim::InProgress { .. }) if key == "held" => {}
                Err(hapax_core::ClaimError::Store(error)) => refused("claim", Err::<(), _>(error.clone())),
                other => panic!("a claim of {key} in a closed ledger: {other:?}"),
            },
        }
    }
    let end = EndClaim { id: id("held"), token: token.clone(), ending: ClaimEnding::Release };
    refused("end", ledger.end(vec![end]).await);
    refused(
        "renew",
        ledger.renew(vec![Renew { id: id("held"), token: token.clone(), lease_ms: 60_000 }]).await,
    );
    for decided in [
        ledger.forget(&id("held"), "suite").await,
        ledger.resolve(&id("held"), Resolution::Absent, "suite").await,
    ] {
        match decided {
            Err(ResolveError::Store(error)) => refused("a decision", Err::<(), _>(error)),
            // What cannot be decided about is not changed either.
            Err(_) => {}
            Ok(()) => panic!("a decision changed a closed ledger"),
        }
    }
}

pub(crate) async fn a_queue_closed_on_one_handle_is_closed_on_the_other(t: Trial) {
    let other = t.other_handle();
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    // The other one knows the queue, and holds a delivery of it.
    let delivery = other.receive(&jobs, 1).await.remove(0);
    other.send(&jobs, text("c")).await;
    t.set_copy(&of(&jobs), Some(to(false))).await;
    t.set_copy(&TransferScope::Ledger, Some(to(false))).await;
    let store = other.store();
    refused("send", store.send(&jobs, vec![text("d")]).await);
    refused("ack", store.settle(&jobs, vec![Settle::new(delivery.receipt, Settlement::Ack)]).await);
    refused("receive", store.receive(&jobs, now(1)).await);
    let ledger = other.harness.ledger().unwrap();
    let request = hapax_core::ClaimRequest::new(
        EntryId::new("shop".parse().unwrap(), "k".parse().unwrap()),
        "me".parse().unwrap(),
        60_000,
    );
    refused("claim", ledger.claim(vec![request]).await);
    assert_eq!(t.browse(&jobs).await.len(), 3);
    t.set_copy(&TransferScope::Ledger, None).await;
    t.set_copy(&of(&jobs), None).await;
    assert_eq!(store.receive(&jobs, now(10)).await.unwrap().len(), 2, "open on the other handle too");
}

/// What it would take over would be missing in the copy. One that is a copy takes over what it is a copy of.
pub(crate) async fn a_queue_that_is_copied_to_another_store_imports_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.set_copy(&of(&jobs), Some(to(false))).await;
    let items = t.export(&of(&jobs)).await;
    t.set_copy(&of(&jobs), None).await;
    t.store().delete_queue(&jobs).await.unwrap();
    let copy = t.standard("copy").await;
    let store = t.store();
    let import = async || store.transfer().unwrap().import(&of(&copy), items.clone()).await;
    for state in [to(false), to(true)] {
        t.set_copy(&of(&copy), Some(state)).await;
        refused("import", import().await);
        assert!(t.browse(&copy).await.is_empty());
        t.set_copy(&of(&copy), None).await;
    }
    t.set_copy(&of(&copy), Some(from())).await;
    assert_eq!(import().await, Ok(vec![Ok(hapax_core::Imported::Added)]));
    assert_eq!(t.browse(&copy).await.len(), 1);
}

pub(crate) async fn a_doubt_that_ends_while_a_queue_is_closed_lets_its_messages_continue(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let grant = t.grant(ask_for(&jobs, &got, "worker")).await;
    let (ledger, id) = (t.harness.ledger().expect("the case needs a ledger"), entry_of(&jobs, &got));
    let end = EndClaim { id: id.clone(), token: grant.token, ending: ClaimEnding::Doubt };
    assert_eq!(ledger.end(vec![end]).await.unwrap(), [Ok(())]);
    t.settle(&jobs, &got, Settlement::Park { reason: "in doubt".into() }).await.unwrap();
    t.set_copy(&of(&jobs), Some(to(false))).await;
    ledger.resolve(&id, Resolution::Absent, "suite").await.unwrap();
    t.pass(1_000).await;
    t.set_copy(&of(&jobs), None).await;
    t.pass(1_000).await;
    assert_eq!(t.one(&jobs).await.id, got.id, "it continues");
}
