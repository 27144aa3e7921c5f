//! Each violation in the shortest history that has it, and the histories beside it that are right.

use hapax_verify::check::{Anomaly, Findings, WITNESS_EVENTS_MAX, check};
use hapax_verify::history::{Act, Answer, Caused, ClaimStep, Effect, Event, NewEvent, Place};
use hapax_verify::workload::Workload;

const PAYMENTS: &str = "payments";

/// Builds a history; numbers are given in the order of the calls.
#[derive(Default)]
struct History(Vec<Event>);

impl History {
    fn add(mut self, who: &str, act: Act) -> Self {
        let n = self.0.len() as u64 + 1;
        let event = NewEvent { who: who.into(), workload: PAYMENTS.into(), act };
        self.0.push(Event { n, ms: n, event });
        self
    }

    fn intent(self, number: u64) -> Self {
        self.add("p", Act::Intent { id: id(number), account: "a".into(), number })
    }

    fn sent(self, number: u64, answer: Answer) -> Self {
        self.add("p", Act::Send { id: id(number), answer })
    }

    /// An intent that was accepted.
    fn accepted(self, number: u64) -> Self {
        self.intent(number).sent(number, Answer::Ok)
    }

    fn call(self, number: u64, fence: u64, effect: Effect) -> Self {
        let receipt = fence * 100;
        let (deliveries, takeover) = (1, false);
        let (id, account) = (id(number), "a".into());
        self.add("w", Act::Call { id, account, number, fence, deliveries, takeover, effect, receipt })
    }

    /// A delivery of a payment's message that was asked for at this time, with a lease of 100 ms; it was received just now.
    fn delivered(self, number: u64, fence: u64, asked_ms: u64) -> Self {
        let (id, message, deliveries, lease_ms) = (id(number), format!("m{number}"), 1, 100);
        self.add("w", Act::Delivered { id, message, fence, deliveries, asked_ms, lease_ms })
    }

    fn acked(self, number: u64, fence: u64, answer: Answer) -> Self {
        self.acked_in(1, number, fence, answer)
    }

    /// The same in another delivery of the message.
    fn acked_in(self, deliveries: u32, number: u64, fence: u64, answer: Answer) -> Self {
        let (id, message, error) = (id(number), format!("m{number}"), None);
        let (ack, ran) = (true, true);
        self.add("w", Act::Settle { id, message, fence, ack, answer, ran, deliveries, error })
    }

    fn drained(self, empty: bool) -> Self {
        self.add("d", Act::Drained { empty, why: None })
    }

    fn left(self, number: u64, place: Place) -> Self {
        self.add("d", Act::Left { id: id(number), place })
    }

    fn entry(self, number: u64, outcome: u64) -> Self {
        self.add("d", Act::Entry { id: id(number), completed: true, outcome: Some(outcome) })
    }

    fn claim(self, who: &str, step: ClaimStep) -> Self {
        self.add(who, Act::Claim { id: "k".into(), step })
    }

    fn granted(self, who: &str, fence: u64) -> Self {
        self.claim(who, ClaimStep::Ask).claim(who, ClaimStep::Granted { fence, lease_ms: 0 })
    }

    fn completed(self, who: &str, fence: u64, answer: Answer) -> Self {
        let outcome = format!("by {who}");
        self.claim(who, ClaimStep::Complete { fence, outcome })
            .claim(who, ClaimStep::Completed { fence, answer })
    }

    fn replayed(self, who: &str, outcome: &str) -> Self {
        self.claim(who, ClaimStep::Ask).claim(who, ClaimStep::Replayed { outcome: outcome.into() })
    }

    #[track_caller]
    fn is(&self, fifo: bool, expected: &[Anomaly]) -> Findings {
        self.is_of(Workload { fifo, ..Workload::named(PAYMENTS).unwrap() }, expected)
    }

    #[track_caller]
    fn is_of(&self, workload: Workload, expected: &[Anomaly]) -> Findings {
        let findings = check(&self.0, &workload);
        let found: Vec<Anomaly> = findings.counts.keys().copied().collect();
        assert_eq!(found, expected, "{findings:#?}");
        for violation in &findings.violations {
            assert!(!violation.witness.is_empty() && violation.witness.len() <= WITNESS_EVENTS_MAX);
            assert!(violation.witness.is_sorted_by_key(|event| event.n));
        }
        findings
    }
}

fn id(number: u64) -> String {
    format!("a-{number}")
}

#[test]
fn what_is_right_is_not_a_violation() {
    let right = History::default()
        .accepted(1)
        .call(1, 5, Effect::Moved)
        .acked(1, 5, Answer::Unknown)
        .call(1, 9, Effect::Known)
        .acked(1, 9, Answer::Ok)
        .entry(1, 500)
        // Of unknown outcome, and without effect.
        .intent(2)
        .sent(2, Answer::Unknown)
        // Of unknown outcome, and with effect.
        .intent(3)
        .sent(3, Answer::Unknown)
        .call(3, 11, Effect::Moved);
    let findings = right.is(true, &[]);
    assert_eq!((findings.intents, findings.accepted, findings.effects, findings.unknown), (3, 1, 2, 1));
    assert_eq!(findings.suppressed, 1);
    History::default().is(true, &[]);
}

#[test]
fn accepted_but_lost() {
    let lost = History::default().accepted(1).acked(1, 5, Answer::Ok);
    let findings = lost.is(false, &[Anomaly::AcceptedButLost]);
    assert_eq!(findings.violations[0].witness.len(), 3);
    for place in [Place::Parked, Place::InDoubt] {
        let accounted = History::default().accepted(1).left(1, place);
        assert_eq!(accounted.is(false, &[]).left, 1);
    }
    let waiting = History::default().accepted(1).left(1, Place::Waiting);
    assert_eq!(waiting.is(false, &[]).unsettled, 1);
    History::default().intent(1).sent(1, Answer::Failed).is(false, &[]);
}

#[test]
fn left_uncounted() {
    let rejected = || History::default().accepted(1).call(1, 5, Effect::Closed);
    for place in [Place::Dead, Place::Parked, Place::InDoubt, Place::Waiting] {
        let late = rejected().add("d", Act::Drained { empty: false, why: None }).left(1, place);
        assert_eq!(late.is(false, &[]).unsettled, 1, "there was no time to make the payment");
        let uncounted = rejected().add("d", Act::Drained { empty: true, why: None }).left(1, place);
        let findings = uncounted.is(false, &[Anomaly::LeftUncounted]);
        assert_eq!(findings.violations[0].witness.len(), 3);
    }
    // Made, and not acked in time: that is accounted for.
    let made = History::default().accepted(1).call(1, 5, Effect::Moved);
    made.add("d", Act::Drained { empty: true, why: None }).left(1, Place::Waiting).is(false, &[]);
}

#[test]
fn effect_twice() {
    let twice = History::default().accepted(1).call(1, 5, Effect::Moved).call(1, 9, Effect::Moved);
    let findings = twice.is(false, &[Anomaly::EffectTwice]);
    let shown: Vec<u64> = findings.violations[0].witness.iter().map(|event| event.n).collect();
    assert_eq!(shown, [1, 3, 4], "the intent and both effects");
}

#[test]
fn a_witness_is_short_and_violations_are_counted_beyond_it() {
    let mut many = History::default().accepted(1);
    for fence in 1..=40 {
        many = many.call(1, fence, Effect::Moved).acked(1, fence, Answer::Failed);
    }
    for number in 2..=20 {
        many = many.accepted(number).call(number, 100 + number, Effect::Moved);
        many = many.call(number, 200 + number, Effect::Moved);
    }
    let findings = many.is(false, &[Anomaly::EffectTwice]);
    assert_eq!((findings.total(), findings.violations.len()), (20, 3));
}

#[test]
fn effect_without_intent() {
    History::default().call(1, 5, Effect::Moved).is(false, &[Anomaly::EffectWithoutIntent]);
    let before = History::default().call(1, 5, Effect::Moved).accepted(1);
    before.is(false, &[Anomaly::EffectWithoutIntent]);
    let other = Act::Intent { id: id(1), account: "b".into(), number: 1 };
    let other = History::default().add("p", other).call(1, 5, Effect::Moved);
    other.is(false, &[Anomaly::EffectWithoutIntent]);
}

#[test]
fn order_violated() {
    let history = || History::default().accepted(1).accepted(2).accepted(3);
    let wrong = history().call(1, 5, Effect::Moved).call(3, 6, Effect::Moved).call(2, 7, Effect::Moved);
    let findings = wrong.is(true, &[Anomaly::OrderViolated]);
    assert!(findings.violations[0].says.contains("payment 2 of a was made after payment 3"));
    wrong.is(false, &[]);
    // A zombie that comes late moves nothing.
    let late = history().call(1, 5, Effect::Moved).call(2, 6, Effect::Moved).call(3, 7, Effect::Moved);
    late.call(1, 4, Effect::Known).is(true, &[]);
}

#[test]
fn stale_settle_accepted() {
    let paid = || History::default().accepted(1).call(1, 5, Effect::Moved);
    let both = paid().acked(1, 9, Answer::Ok).acked(1, 5, Answer::Ok);
    both.is(false, &[Anomaly::StaleSettleAccepted]);
    paid().acked(1, 9, Answer::Ok).acked(1, 5, Answer::Failed).is(false, &[]);
    paid().acked(1, 5, Answer::Ok).acked(1, 5, Answer::Ok).is(false, &[]);
    // The holder of a newer delivery is refused, because the ack of the older one has ended the message.
    let stale = paid().acked_in(1, 1, 5, Answer::Ok).acked_in(2, 1, 9, Answer::Failed);
    let findings = stale.is(false, &[Anomaly::StaleSettleAccepted]);
    assert!(findings.violations[0].says.contains("there is a delivery with fence 9"), "{findings:#?}");
    // Or it is delivered again although it had ended: no ack of it is needed to see that.
    let again = paid().acked_in(1, 1, 5, Answer::Ok).call(1, 9, Effect::Known);
    again.acked_in(2, 1, 9, Answer::Unknown).is(false, &[Anomaly::StaleSettleAccepted]);
}

#[test]
fn the_fence_of_a_message_does_not_grow_with_its_deliveries() {
    let paid = || History::default().accepted(1).call(1, 5, Effect::Moved);
    paid().acked_in(1, 1, 5, Answer::Unknown).acked_in(2, 1, 9, Answer::Ok).is(false, &[]);
    for smaller in [4, 5] {
        let wrong = paid().acked_in(1, 1, 5, Answer::Unknown).acked_in(2, 1, smaller, Answer::Unknown);
        wrong.is(false, &[Anomaly::FenceBackwards]);
    }
    // A power cut takes the count of a delivery back: the next one has its number, and a larger fence.
    let cut = Act::FaultBegins { number: 1, fault: "power cut of the server".into() };
    let cut = paid().acked_in(2, 1, 5, Answer::Unknown).add("d", cut);
    cut.acked_in(1, 1, 9, Answer::Ok).is(false, &[]);
}

#[test]
fn failed_but_done() {
    let settled = |history: History, message: &str, fence| {
        let (id, message, error) = (id(1), message.to_owned(), None);
        let (ack, answer, ran, deliveries) = (true, Answer::Ok, true, 1);
        history.add("w", Act::Settle { id, message, fence, ack, answer, ran, deliveries, error })
    };
    let of = |first| {
        let sent = History::default().intent(1).sent(1, first).sent(1, Answer::Ok).call(1, 5, Effect::Moved);
        settled(sent, "m1", 5)
    };
    settled(of(Answer::Failed), "m2", 9).is(false, &[Anomaly::FailedButDone]);
    settled(of(Answer::Unknown), "m2", 9).is(false, &[]);
    of(Answer::Failed).is(false, &[]);
    // One producer was killed, and its last sends are not known.
    settled(of(Answer::Failed), "m2", 9).intent(1).is(false, &[]);
    let twice = Act::FaultBegins { number: 1, fault: "SendMessage: request duplicated".into() };
    settled(of(Answer::Failed), "m2", 9).add("d", twice).is(false, &[]);
}

#[test]
fn completion_lost() {
    let acked = || History::default().accepted(1).call(1, 5, Effect::Moved).acked(1, 5, Answer::Ok);
    acked().drained(true).entry(1, 500).is(false, &[]);
    acked().drained(true).is(false, &[Anomaly::CompletionLost]);
    let open = Act::Entry { id: id(1), completed: false, outcome: None };
    acked().drained(true).add("d", open).is(false, &[Anomaly::CompletionLost]);
    // It was acked after the entries were read.
    let late = History::default().accepted(1).call(1, 5, Effect::Moved).drained(false);
    late.acked(1, 5, Answer::Ok).is(false, &[]);
    // The inbox of a transaction is in another database.
    acked().drained(true).is_of(Workload { name: PAYMENTS, ..Workload::named("transfers").unwrap() }, &[]);
}

#[test]
fn a_stale_completion_is_accepted() {
    let history = || History::default().granted("a", 5).granted("b", 9);
    history().completed("a", 5, Answer::Ok).is(false, &[Anomaly::StaleSettleAccepted]);
    history().completed("a", 5, Answer::Failed).completed("b", 9, Answer::Ok).is(false, &[]);
    // It began before the newer claim was granted. Then it came first, and the claim had to be answered with the outcome; or
    // it came second, and was stale: no pair of events shows which, and one of the two answers is wrong.
    let concurrent = History::default()
        .granted("a", 5)
        .claim("a", ClaimStep::Complete { fence: 5, outcome: "by a".into() })
        .granted("b", 9)
        .claim("a", ClaimStep::Completed { fence: 5, answer: Answer::Ok });
    concurrent.is(false, &[Anomaly::RegisterNotLinearizable]);
}

#[test]
fn a_stale_extension_is_accepted() {
    let extended = |history: History, answer| {
        history
            .claim("a", ClaimStep::Extend { fence: 1 })
            .claim("a", ClaimStep::Extended { fence: 1, answer, lease_ms: 0 })
    };
    let taken_over = || History::default().granted("a", 1).granted("b", 2);
    extended(taken_over(), Answer::Ok).is(false, &[Anomaly::StaleSettleAccepted]);
    extended(taken_over(), Answer::Failed).is(false, &[]);
    extended(History::default().granted("a", 1), Answer::Ok).granted("b", 2).is(false, &[]);
}

#[test]
fn published_not_marked() {
    let made = || History::default().accepted(1).call(1, 5, Effect::Moved);
    made().left(1, Place::Unmarked).is(false, &[Anomaly::PublishedNotMarked]);
    made().left(1, Place::Outbox).is(false, &[]);
    let late = History::default().accepted(1).left(1, Place::Outbox).is(false, &[]);
    assert_eq!(late.unsettled, 1, "there was no time to publish it");
}

#[test]
fn fence_backwards() {
    History::default().granted("a", 9).granted("b", 5).is(false, &[Anomaly::FenceBackwards]);
    History::default().granted("a", 9).granted("b", 9).is(false, &[Anomaly::FenceBackwards]);
    // Both were asked for before either was answered.
    let concurrent = History::default()
        .claim("a", ClaimStep::Ask)
        .claim("b", ClaimStep::Ask)
        .claim("a", ClaimStep::Granted { fence: 9, lease_ms: 0 })
        .claim("b", ClaimStep::Granted { fence: 5, lease_ms: 0 });
    concurrent.is(false, &[]);
    let same = History::default().accepted(1).call(1, 5, Effect::Moved).call(1, 5, Effect::Known);
    same.is(false, &[Anomaly::FenceBackwards]);
}

#[test]
fn granted_while_held() {
    let lease_ms = 100;
    let held = |until_other: u64| {
        let mut history = History::default().claim("a", ClaimStep::Ask);
        history = history.claim("a", ClaimStep::Granted { fence: 5, lease_ms });
        history = history.claim("b", ClaimStep::Ask).claim("b", ClaimStep::Granted { fence: 9, lease_ms });
        // Asked for at 1 ms; the lease of the first lasts to 101 ms at least.
        history.0[3].ms = until_other;
        history
    };
    let findings = held(90).is(false, &[Anomaly::GrantedWhileHeld]);
    assert!(findings.violations[0].says.contains("11 ms before the lease of fence 5 ended"), "{findings:#?}");
    held(97).is(false, &[]);
    held(300).is(false, &[]);
    // The first learns of its grant after the second.
    let late = History::default()
        .claim("a", ClaimStep::Ask)
        .granted("b", 9)
        .claim("a", ClaimStep::Granted { fence: 5, lease_ms });
    late.is(false, &[Anomaly::GrantedWhileHeld]);
}

#[test]
fn delivered_while_leased() {
    let again = |at_ms: u64| {
        let mut history = History::default().delivered(1, 5, 1).delivered(2, 7, 1).delivered(1, 9, 2);
        history.0[2].ms = at_ms;
        history
    };
    let findings = again(90).is(false, &[Anomaly::GrantedWhileHeld]);
    assert!(findings.violations[0].says.contains("11 ms before the lease of fence 5 ended"), "{findings:#?}");
    assert_eq!(findings.total(), 1, "another message is delivered meanwhile");
    again(97).is(false, &[]);
    again(300).is(false, &[]);
    // The first learns of its delivery after the second.
    History::default().delivered(1, 9, 1).delivered(1, 5, 1).is(false, &[Anomaly::GrantedWhileHeld]);
    // What was not synced when its store was killed may be delivered early.
    for fault in ["kill -9 of the store", "power cut of the server", "failover: kill -9"] {
        let fault = Act::FaultBegins { number: 1, fault: fault.into() };
        again(90).add("d", fault).is(false, &[]);
    }
}

#[test]
fn granted_while_the_lease_was_extended() {
    let extended = |until_other: u64| {
        let mut history = History::default().granted("a", 5).claim("a", ClaimStep::Extend { fence: 5 });
        // Asked for at 3 ms.
        history = history.claim("a", ClaimStep::Extended { fence: 5, answer: Answer::Ok, lease_ms: 100 });
        history = history.granted("b", 9);
        history.0[5].ms = until_other;
        history
    };
    let findings = extended(90).is(false, &[Anomaly::GrantedWhileHeld]);
    assert!(findings.violations[0].says.contains("13 ms before the lease of fence 5 ended"), "{findings:#?}");
    extended(103).is(false, &[]);
}

#[test]
fn granted_while_a_holder_of_an_earlier_claim_has_time_left() {
    let lease_ms = |lease_ms, fence| ClaimStep::Granted { fence, lease_ms };
    let mut history = History::default().claim("a", ClaimStep::Ask).claim("a", lease_ms(300, 5));
    history = history.claim("b", ClaimStep::Ask).claim("c", ClaimStep::Ask);
    history = history.claim("c", lease_ms(10, 9)).claim("b", lease_ms(10, 7));
    // The claim between the two was heard of late.
    (history.0[4].ms, history.0[5].ms) = (290, 310);
    let findings = history.is(false, &[Anomaly::GrantedWhileHeld]);
    assert!(findings.violations[0].says.contains("fence 9 was granted"), "{findings:#?}");
}

#[test]
fn what_a_fault_has_hit_is_counted() {
    let hit = |history: History| history.is(false, &[]).hit;
    assert_eq!(hit(History::default().accepted(1).call(1, 5, Effect::Moved).acked(1, 5, Answer::Ok)), 0);
    assert_eq!(hit(History::default().intent(1).sent(1, Answer::Unknown)), 1);
    let again = |sends| {
        let mut history = History::default().intent(1).call(1, 5, Effect::Moved);
        for _ in 0..sends {
            history = history.sent(1, Answer::Ok);
        }
        let (id, message, error) = (id(1), "m2".to_owned(), None);
        let (ack, answer, ran, deliveries, fence) = (true, Answer::Ok, false, 1, 9);
        history.add("w", Act::Settle { id, message, fence, ack, answer, ran, deliveries, error })
    };
    assert_eq!((hit(again(1)), hit(again(2))), (1, 0), "a producer that repeats itself is no fault");
    // A process is killed with a claim, and never heard of again.
    let ended = Act::FaultEnds { number: 1, hits: 1, caused: Caused::default() };
    assert_eq!(hit(History::default().granted("a", 5).add("d", ended.clone())), 1);
    assert_eq!(hit(History::default().granted("a", 5).completed("a", 5, Answer::Ok).add("d", ended)), 0);
    let mut late = History::default().granted("a", 5);
    late.0[1].ms = 1_500;
    assert_eq!(hit(late), 1);
}

#[test]
fn a_key_that_ended_is_granted_again_or_ends_twice() {
    let ended = || History::default().granted("a", 5).completed("a", 5, Answer::Ok);
    ended().granted("b", 9).is(false, &[Anomaly::EffectTwice]);
    let twice = History::default().granted("a", 5).granted("b", 9);
    let twice = twice.completed("b", 9, Answer::Ok).completed("a", 5, Answer::Ok);
    twice.is(false, &[Anomaly::EffectTwice, Anomaly::StaleSettleAccepted]);
    ended().completed("a", 5, Answer::Ok).is(false, &[]);
}

#[test]
fn register_not_linearizable() {
    let wrong = |history: History, events: usize| {
        let findings = history.is(false, &[Anomaly::RegisterNotLinearizable]);
        assert_eq!(findings.violations[0].witness.len(), events, "{findings:#?}");
    };
    // The completion's answer was lost; a duplicate has seen its outcome, so the key is not free any more.
    let seen = || {
        let unknown = History::default().granted("a", 5).completed("a", 5, Answer::Unknown);
        unknown.replayed("b", "by a")
    };
    seen().is(false, &[]);
    wrong(seen().granted("c", 9), 7);
    // Its process was killed instead, before it was answered.
    let killed = || {
        let outcome = "by a".to_owned();
        History::default().granted("a", 5).claim("a", ClaimStep::Complete { fence: 5, outcome })
    };
    killed().replayed("b", "by a").is(false, &[]);
    killed().granted("c", 9).is(false, &[]);
    wrong(killed().replayed("b", "by a").granted("c", 9), 7);
    // An entry that has ended is busy again.
    let busy = |history: History| history.claim("b", ClaimStep::Ask).claim("b", ClaimStep::Busy);
    wrong(busy(History::default().granted("a", 5).completed("a", 5, Answer::Ok)), 6);
    busy(History::default().granted("a", 5)).completed("a", 5, Answer::Ok).is(false, &[]);
    // A holder that was taken over completes after a duplicate has seen the outcome of the other.
    let over = History::default().granted("a", 5).granted("b", 9).completed("b", 9, Answer::Unknown);
    over.replayed("c", "by b").is(false, &[]);
}

#[test]
fn the_search_for_an_order_is_bounded() {
    // Each asks before any is answered, and the last answer fits nowhere: all orders of the others would have to be tried.
    let mut history = History::default().granted("a", 1);
    let names: Vec<String> = (0..24).map(|number| format!("w{number}")).collect();
    for name in &names {
        history = history.claim(name, ClaimStep::Ask);
    }
    for name in &names {
        history = history.claim(name, ClaimStep::Busy);
    }
    let fits = || history.0.clone();
    let findings = History(fits()).is(false, &[]);
    assert_eq!(findings.undecided, 0);
    let outcome = "by a".to_owned();
    let wrong = History(fits()).claim("a", ClaimStep::Complete { fence: 1, outcome }).replayed("b", "by a");
    let findings = wrong.claim("c", ClaimStep::Ask).claim("c", ClaimStep::Busy).is(false, &[]);
    assert_eq!(findings.undecided, 1, "it is said, and no violation is made up");
}

#[test]
fn outcome_differs() {
    let ended = || History::default().granted("a", 5).completed("a", 5, Answer::Ok);
    ended().replayed("b", "by a").is(false, &[]);
    ended().replayed("b", "by c").is(false, &[Anomaly::OutcomeDiffers]);
    let unknown = || History::default().granted("a", 5).completed("a", 5, Answer::Unknown);
    unknown().replayed("b", "by a").is(false, &[]);
    unknown().replayed("b", "by b").is(false, &[Anomaly::OutcomeDiffers]);
    // A duplicate is answered before the completion is, and with the outcome of another holder.
    let early = |outcome: &str| {
        let asked = History::default().granted("a", 5).claim("b", ClaimStep::Ask);
        let asked = asked.claim("c", ClaimStep::Complete { fence: 4, outcome: "by c".into() });
        let asked = asked.claim("a", ClaimStep::Complete { fence: 5, outcome: "by a".into() });
        let answered = asked.claim("b", ClaimStep::Replayed { outcome: outcome.into() });
        answered.claim("a", ClaimStep::Completed { fence: 5, answer: Answer::Ok })
    };
    early("by a").is(false, &[]);
    early("by c").is(false, &[Anomaly::OutcomeDiffers]);
    let paid = || History::default().accepted(1).call(1, 5, Effect::Moved);
    paid().entry(1, 500).is(false, &[]);
    paid().entry(1, 501).is(false, &[Anomaly::OutcomeDiffers]);
    // Each answer counts, not only the last one.
    paid().entry(1, 501).entry(1, 500).is(false, &[Anomaly::OutcomeDiffers]);
}

#[test]
fn responses_through_a_proxy_differ() {
    let response = |history: History, digest| history.add("p", Act::Response { id: id(1), digest });
    let paid = || History::default().accepted(1).call(1, 5, Effect::Moved);
    let of = |name| Workload { name: PAYMENTS, ..Workload::named(name).unwrap() };
    response(response(paid(), 7), 7).is_of(of("charges"), &[]);
    response(response(paid(), 7), 8).is_of(of("charges"), &[Anomaly::OutcomeDiffers]);
    // A service that recognises the key may be asked again, and answer in other words.
    response(response(paid(), 7), 8).is_of(of("charges-keyed"), &[]);
}

#[test]
fn dead_letter_unaccounted() {
    let closed = || History::default().accepted(1).call(1, 5, Effect::Closed);
    assert_eq!(closed().left(1, Place::Dead).is(false, &[]).left, 1);
    History::default().accepted(1).left(1, Place::Dead).is(false, &[Anomaly::DeadLetterUnaccounted]);
    let paid = closed().call(1, 9, Effect::Moved).left(1, Place::Dead);
    paid.is(false, &[Anomaly::DeadLetterUnaccounted]);
    closed().is(false, &[Anomaly::AcceptedButLost]);
}

#[test]
fn duplicate_accepted() {
    let act = |message: &str, fence| {
        let (id, message, error) = (id(1), message.to_owned(), None);
        let (ack, answer, ran, deliveries) = (true, Answer::Ok, true, 1);
        Act::Settle { id, message, fence, ack, answer, ran, deliveries, error }
    };
    let paid = || History::default().accepted(1).call(1, 5, Effect::Moved).add("w", act("m1", 5));
    paid().add("w", act("m2", 9)).is(true, &[Anomaly::DuplicateAccepted]);
    // Without a deduplication id a second send is a second message.
    paid().add("w", act("m2", 9)).is(false, &[]);
}

/// Records of transactions, as a reader of committed records sees them.
mod on_kafka {
    use super::*;
    use hapax_verify::history::TransactionEnd::{self, Aborted, Committed, Unknown};

    fn shown(history: History, number: u64, transaction: &str) -> History {
        let (id, account, transaction) = (id(number), "a".into(), transaction.into());
        let offset = history.0.len() as i64;
        history.add("r", Act::Shown { id, account, number, transaction, partition: 0, offset })
    }

    fn ended(history: History, transaction: &str, records: u64, end: TransactionEnd) -> History {
        let (transaction, intended) = (transaction.into(), false);
        history.add("p", Act::Transaction { transaction, records, end, intended })
    }

    fn read_to_end(history: History) -> History {
        history.add("d", Act::Drained { empty: true, why: None })
    }

    #[test]
    fn what_is_shown_is_an_effect() {
        let one = || History::default().accepted(1);
        read_to_end(shown(one(), 1, "t1")).is(true, &[]);
        read_to_end(one()).is(true, &[Anomaly::AcceptedButLost]);
        let twice = shown(shown(one(), 1, "t1"), 1, "t2");
        assert_eq!(twice.is(true, &[Anomaly::EffectTwice]).effects, 2);
        shown(History::default(), 1, "t1").is(true, &[Anomaly::EffectWithoutIntent]);
        let swapped = shown(shown(one().accepted(2), 2, "t1"), 1, "t2");
        swapped.is(true, &[Anomaly::OrderViolated]);
    }

    #[test]
    fn an_aborted_record_is_not_shown() {
        let one = || ended(History::default().accepted(1), "t1", 1, Aborted);
        let right = read_to_end(shown(ended(one(), "t2", 1, Committed), 1, "t2"));
        assert_eq!(right.is(true, &[]).suppressed, 1, "the record that was written in vain");
        let wrong = read_to_end(shown(ended(one(), "t2", 0, Committed), 1, "t1"));
        wrong.is(true, &[Anomaly::AbortedShown]);
    }

    #[test]
    fn a_transaction_is_shown_as_a_whole() {
        let two = || shown(History::default().accepted(1).intent(2), 1, "t1");
        for end in [Committed, Unknown] {
            let torn = ended(two(), "t1", 2, end);
            torn.is(true, &[]);
            read_to_end(torn).is(true, &[Anomaly::TransactionTorn]);
            read_to_end(ended(shown(two(), 2, "t1"), "t1", 2, end)).is(true, &[]);
        }
        // What was not answered may have been aborted; what was committed was not.
        let none = |end| read_to_end(ended(History::default().intent(1), "t1", 1, end));
        none(Unknown).is(true, &[]);
        none(Committed).is(true, &[Anomaly::TransactionTorn]);
    }
}
