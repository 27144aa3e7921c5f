//! The report for people.

use std::fmt::Write as _;

use super::{Report, Row, Verdict, tier_name};
use crate::history::Event;

pub fn text(report: &Report) -> String {
    let mut out = String::new();
    write(report, &mut out).expect("a string takes everything");
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let facts = &report.facts;
    writeln!(
        out,
        "{} operations, {} of them hit by faults; {} of {} faults bit; {:.0} s; seed {}; Hapax {} on {}\n",
        report.operations,
        report.faulted_operations,
        report.faults_that_bit,
        report.faults.len(),
        facts.seconds,
        facts.seed,
        facts.version,
        facts.store_name,
    )?;
    writeln!(
        out,
        "{:<13} {:<17} {:>8} {:>8} {:>6} {:>11} {:>5} {:>5} {:>6} {:>7}  verdict",
        "workload", "tier", "accepted", "effects", "hit", "suppressed", "left", "lost", "twice", "others"
    )?;
    for row in &report.workloads {
        write_row(row, out)?;
    }
    for row in report.workloads.iter().filter(|row| !row.control) {
        writeln!(out, "  {}: {}", row.workload, row.boundary)?;
    }
    for row in report.workloads.iter().filter(|row| row.findings.undecided > 0) {
        let keys = row.findings.undecided;
        writeln!(out, "  {}: {keys} keys were not searched for an order: too much overlaps", row.workload)?;
    }
    for (row, violation) in report.violations() {
        writeln!(
            out,
            "\n{} {} of {}: {}",
            row.workload,
            violation.anomaly.name(),
            violation.id,
            violation.says
        )?;
        for event in &violation.witness {
            writeln!(out, "  {}", line(event))?;
        }
    }
    let (naive, ours) = (report.violations_of(true), report.violations_of(false));
    writeln!(out, "\nviolations: naive = {naive}, Hapax = {ours}")?;
    let tiers = report.tiers.iter().map(|of| format!("{} {}", tier_name(of.tier), of.verdict.name()));
    writeln!(out, "tiers: {}", tiers.collect::<Vec<_>>().join(", "))?;
    writeln!(out, "{}: {}", report.verdict.name(), report.why)?;
    writeln!(out, "again: {}", facts.command)
}

fn write_row(row: &Row, out: &mut String) -> std::fmt::Result {
    use crate::check::Anomaly;
    let findings = &row.findings;
    let count = |anomaly| findings.counts.get(&anomaly).copied().unwrap_or_default();
    let (lost, twice) = (count(Anomaly::AcceptedButLost), count(Anomaly::EffectTwice));
    let tier = row.tier.map_or_else(|| "none".to_owned(), tier_name);
    let verdict = match (row.control, row.verdict) {
        (true, Verdict::Violated) => "caught".to_owned(),
        (true, _) => "NOT CAUGHT".to_owned(),
        (false, verdict) => row
            .why
            .as_ref()
            .map_or_else(|| verdict.name().to_owned(), |why| format!("{}: {why}", verdict.name())),
    };
    writeln!(
        out,
        "{:<13} {tier:<17} {:>8} {:>8} {:>6} {:>11} {:>5} {lost:>5} {twice:>6} {:>7}  {verdict}",
        row.workload,
        findings.accepted,
        findings.effects,
        findings.hit,
        findings.suppressed,
        findings.left,
        findings.total() - lost - twice,
    )
}

/// An event in one line.
pub fn line(event: &Event) -> String {
    let act = serde_json::to_string(&event.event.act).unwrap_or_default();
    format!("{:>8.3} s  {:<16} {act}", event.ms as f64 / 1_000.0, event.event.who)
}
