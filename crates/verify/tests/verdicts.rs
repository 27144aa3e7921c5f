//! Verdicts, and the forms of a report.

use hapax_verify::check::{Anomaly, Findings, check};
use hapax_verify::history::{Act, Answer, Caused, Effect, Event, NewEvent, Place};
use hapax_verify::report::{FaultSpan, Report, ReportedFault, RunFacts, Second, Verdict};
use hapax_verify::workload::Workload;

fn event(n: u64, workload: &str, act: Act) -> Event {
    Event { n, ms: n * 100, event: NewEvent { who: "w".into(), workload: workload.into(), act } }
}

fn paid(n: u64, workload: &str, times: u64) -> Vec<Event> {
    let (id, account) = ("<a>-1".to_owned(), "<a>".to_owned());
    let mut events = vec![
        event(n, workload, Act::Intent { id: id.clone(), account: account.clone(), number: 1 }),
        event(n + 1, workload, Act::Send { id: id.clone(), answer: Answer::Unknown }),
        event(n + 1, workload, Act::Send { id: id.clone(), answer: Answer::Ok }),
    ];
    for time in 0..times {
        let (id, account, fence) = (id.clone(), account.clone(), n * 10 + time + 1);
        let effect = Effect::Moved;
        let (number, deliveries, takeover, receipt) = (1, 1, false, time);
        let act = Act::Call { id, account, number, fence, deliveries, takeover, effect, receipt };
        events.push(event(n + 2 + time, workload, act));
    }
    events
}

fn report(ours: u64, naive: u64, bit: bool) -> Report {
    report_of(&["payments", "ack-after"], ours, naive, bit)
}

fn report_of(workloads: &[&str], ours: u64, naive: u64, bit: bool) -> Report {
    let workloads: Vec<Workload> = workloads.iter().map(|name| Workload::named(name).unwrap()).collect();
    let mut events = vec![event(1, "", Act::FaultBegins { number: 1, fault: "kill".into() })];
    events.extend(paid(2, "payments", ours));
    events.extend(paid(20, "ack-after", naive));
    events.push(event(40, "", Act::FaultEnds { number: 1, hits: 1, caused: Caused::default() }));
    report_on(&workloads, &events, bit)
}

fn report_on(workloads: &[Workload], events: &[Event], bit: bool) -> Report {
    let findings = workloads.iter().map(|workload| check(events, workload)).collect();
    judged(workloads, findings, events, bit)
}

fn judged(workloads: &[Workload], findings: Vec<Findings>, events: &[Event], bit: bool) -> Report {
    let facts = RunFacts {
        version: "1".into(),
        store: "embedded:x".into(),
        store_name: "embedded".into(),
        ledger: None,
        seed: 7,
        seconds: 1.5,
        command: "hapax verify --seed 7".into(),
    };
    let (caused, fault) = (Caused { sends_failed: 3, ..Caused::default() }, "kill -9 <b>".to_owned());
    let fault = ReportedFault { number: 1, fault, ms: 5, hits: 1, caused, bit, faulted: 3 };
    Report::new(facts, workloads, findings, vec![fault], events)
}

#[test]
fn each_verdict_has_its_reason() {
    assert_eq!(report(1, 2, true).verdict, Verdict::Held);
    assert_eq!(report(2, 2, true).verdict, Verdict::Violated);
    assert_eq!(report(1, 1, true).verdict, Verdict::Invalid);
    assert_eq!(report(1, 2, false).verdict, Verdict::Inconclusive);
    // A violation counts even if a control was not caught.
    assert_eq!(report(2, 1, true).verdict, Verdict::Violated);
    assert_eq!(report(0, 2, true).verdict, Verdict::Violated, "what was accepted is lost");
}

#[test]
fn a_run_that_could_not_wait_says_what_is_left_and_why() {
    let workloads: Vec<Workload> =
        ["payments", "ack-after"].map(|name| Workload::named(name).unwrap()).into();
    let mut events = paid(2, "payments", 1);
    events.extend(paid(20, "ack-after", 2));
    events.push(event(30, "payments", Act::Send { id: "b-1".into(), answer: Answer::Ok }));
    let why = Some("nothing moves".to_owned());
    events.push(event(31, "", Act::Drained { empty: false, why }));
    events.push(event(32, "payments", Act::Left { id: "b-1".into(), place: Place::Waiting }));
    let report = report_on(&workloads, &events, true);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let why = report.workloads[0].why.as_deref();
    assert_eq!(why, Some("messages were still waiting at the end: 1; nothing moves"));
    assert!(report.to_text().contains("nothing moves"), "{}", report.to_text());
    // What is left of a control shows nothing, and is nothing to wait for.
    let is_kept =
        |event: &Event| !matches!(&event.event.act, Act::Left { .. } | Act::Send { answer: Answer::Ok, .. });
    let mut events: Vec<Event> = events.into_iter().filter(is_kept).collect();
    events.push(event(33, "ack-after", Act::Left { id: "b-1".into(), place: Place::Waiting }));
    assert_eq!(report_on(&workloads, &events, true).verdict, Verdict::Held);
}

#[test]
fn every_control_has_to_be_caught() {
    let controls = ["payments", "ack-before", "ack-after"];
    let workloads: Vec<Workload> = controls.map(|name| Workload::named(name).unwrap()).into();
    let mut events = paid(2, "payments", 1);
    events.extend(paid(20, "ack-after", 2));
    events.extend(paid(30, "ack-before", 1));
    let report = report_on(&workloads, &events, true);
    assert_eq!(report.verdict, Verdict::Invalid);
    assert_eq!(report.why, "controls that were not caught: ack-before");
    assert_eq!(report.workloads[1].verdict, Verdict::Invalid);
    assert_eq!(report.workloads[0].verdict, Verdict::Held, "what was found of Hapax is still told");
}

#[test]
fn a_workload_without_an_effect_is_inconclusive() {
    let workloads: Vec<Workload> =
        ["payments", "accounts", "ack-after"].map(|name| Workload::named(name).unwrap()).into();
    let mut events = paid(2, "payments", 1);
    events.extend(paid(20, "ack-after", 2));
    let report = report_on(&workloads, &events, true);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    assert_eq!(report.why, "nothing was shown for accounts (nothing took effect)");
    assert_eq!(report.workloads[1].why.as_deref(), Some("nothing took effect"));
    assert_eq!(report.workloads[0].verdict, Verdict::Held);
}

#[test]
fn a_workload_that_no_fault_reached_is_inconclusive() {
    let workloads: Vec<Workload> =
        ["payments", "accounts", "ack-after"].map(|name| Workload::named(name).unwrap()).into();
    let mut events = paid(2, "payments", 1);
    events.extend(paid(20, "ack-after", 2));
    let is_answered = |event: &Event| !matches!(&event.event.act, Act::Send { answer: Answer::Unknown, .. });
    events.extend(paid(40, "accounts", 1).into_iter().filter(is_answered));
    let report = report_on(&workloads, &events, true);
    assert_eq!(
        (report.verdict, report.why.as_str()),
        (Verdict::Inconclusive, "nothing was shown for accounts (no fault reached it)")
    );
    assert_eq!(report.workloads[1].why.as_deref(), Some("no fault reached it"));
    assert_eq!(report.workloads[0].verdict, Verdict::Held);
}

#[test]
fn a_ledger_whose_keys_were_not_searched_is_inconclusive() {
    let workloads: Vec<Workload> = ["claims", "ack-after"].map(|name| Workload::named(name).unwrap()).into();
    let mut findings = vec![Findings::default(), check(&paid(20, "ack-after", 2), &workloads[1])];
    (findings[0].intents, findings[0].effects, findings[0].hit) = (10, 10, 1);
    for (undecided, verdict) in [(5, Verdict::Held), (6, Verdict::Inconclusive)] {
        findings[0].undecided = undecided;
        assert_eq!(judged(&workloads, findings.clone(), &[], true).verdict, verdict);
    }
}

#[test]
fn a_run_without_controls_is_invalid() {
    let report = report_of(&["payments"], 1, 2, true);
    assert_eq!((report.verdict, report.why.as_str()), (Verdict::Invalid, "there was no control"));
}

#[test]
fn the_text_has_naive_beside_hapax_and_the_witness() {
    let text = report(1, 2, true).to_text();
    assert!(text.contains("violations: naive = 1, Hapax = 0"), "{text}");
    assert!(text.contains("seed 7") && text.contains("again: hapax verify --seed 7"), "{text}");
    let text = report(2, 2, true).to_text();
    assert!(text.contains("payments effect-twice of <a>-1") && text.contains("\"kind\":\"call\""), "{text}");
}

#[test]
fn junit_and_html_are_escaped_and_small() {
    let report = report(2, 1, true);
    let junit = report.to_junit();
    assert!(junit.contains("tests=\"2\" failures=\"2\""), "{junit}");
    assert!(junit.contains("effect-twice of &lt;a&gt;-1"), "{junit}");
    let html = report.to_html();
    assert!(html.contains("<svg") && html.contains("kill -9 &lt;b&gt;") && !html.contains("<a>"), "{html}");
    assert!(!html.contains("<script") && !html.contains("http"), "{html}");
}

#[test]
fn the_page_of_a_long_run_stays_small() {
    let mut long = report(1, 2, true);
    let fault = long.faults[0].clone();
    long.faults = (0..20_000).map(|number| ReportedFault { number, ..fault.clone() }).collect();
    let span = FaultSpan { number: 1, from_ms: 1, until_ms: 2, recovery_ms: 1 };
    long.fault_spans = (0..20_000).map(|number| FaultSpan { number, ..span.clone() }).collect();
    long.timeline = vec![Second { effects: 100_000, suppressed: 7, faulted_sends: 0 }; 20_000];
    let violation = report(2, 2, true).workloads[0].findings.violations[0].clone();
    assert_eq!(violation.anomaly, Anomaly::EffectTwice);
    long.workloads[0].findings.violations = vec![violation; 24];
    let bytes = long.to_html().len();
    assert!(bytes <= 200_000, "{bytes} bytes");
}
