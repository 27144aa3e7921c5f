//! The report as one page: no script, nothing from the network.

use std::fmt::Write as _;

use super::junit::escape;
use super::{Report, Row, Verdict, tier_name};
use crate::report::text::line;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2330;background:#fff}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dde6;vertical-align:top}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.held,.caught{color:#176639}.violated,.invalid{color:#a11226}\
.inconclusive{color:#7a5300}pre{background:#f3f5f9;padding:.8rem;overflow:auto;font-size:12px}svg{width:100%;height:auto}\
.sum{font-size:1.1rem}.key{font-size:13px;margin-top:0}.key span{margin-left:.8rem}td b{white-space:nowrap}\
p,code{overflow-wrap:anywhere}.plot{overflow-x:auto}.plot svg{min-width:40rem}\
@media(max-width:48rem){table,tbody,tr,td,td.n{display:block;text-align:left}th{display:none}td{border:0;padding:.1rem 0}\
tr+tr{border-top:1px solid #d8dde6;padding:.5rem 0}td[data-l]::before{content:attr(data-l) ': ';opacity:.7}}\
@media(prefers-color-scheme:dark){body{background:#12161d;color:#e4e8ef}th,td,tr+tr{border-color:#333c4a}pre{background:#1b212b}\
.held,.caught{color:#6ed09a}.violated,.invalid{color:#ff8a98}.inconclusive{color:#e6b450}}";

/// Faults that are listed; a long run has many, and the page has to stay small.
const FAULTS_MAX: usize = 300;
/// Width of a fault's band that has room for its number.
const NUMBER_WIDTH: f64 = 16.0;
/// Points of the plot; a longer run is drawn with several seconds in one.
const POINTS_MAX: usize = 600;

pub fn page(report: &Report) -> String {
    let mut out = String::new();
    write(report, &mut out).expect("a string takes everything");
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let (facts, verdict) = (&report.facts, report.verdict.name());
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>hapax verify: {verdict}</title><style>{STYLE}</style>\n\
         <h1>hapax verify: <span class=\"{verdict}\">{verdict}</span></h1>\n<p class=\"sum\">Violations: naive programs \
         <b>{}</b>, Hapax <b>{}</b></p>\n<p>{}.</p>\n\
         <p>{} operations, {} of them hit by faults. {} of {} faults bit. {:.0} s, seed {}, Hapax {}, {} ({}).</p>\n\
         <p>Again: <code>{}</code></p>\n",
        grouped(report.violations_of(true)),
        grouped(report.violations_of(false)),
        escape(&sentence(&report.why)),
        grouped(report.operations),
        grouped(report.faulted_operations),
        report.faults_that_bit,
        report.faults.len(),
        facts.seconds,
        facts.seed,
        escape(&facts.version),
        escape(&facts.store_name),
        escape(&facts.store),
        escape(&facts.command),
    )?;
    let tier = |of: &super::TierVerdict| {
        let verdict = of.verdict.name();
        format!("{} <b class=\"{verdict}\">{verdict}</b>", tier_name(of.tier))
    };
    writeln!(out, "<p>Tiers: {}</p>", report.tiers.iter().map(tier).collect::<Vec<_>>().join(", "))?;
    write_workloads(report, out)?;
    out.push_str("<h2>Faults against throughput</h2>\n");
    out.push_str("<div class=\"plot\">");
    plot(report, out)?;
    write_violations(report, out)?;
    write_faults(report, out)?;
    out.push_str("</html>\n");
    Ok(())
}

fn write_workloads(report: &Report, out: &mut String) -> std::fmt::Result {
    out.push_str(
        "<table><tr><th>workload<th>boundary<th class=\"n\">accepted<th class=\"n\">effects<th class=\"n\">hit by \
         faults<th class=\"n\">duplicates suppressed<th class=\"n\">violations<th>verdict\n",
    );
    for row in &report.workloads {
        let (class, verdict) = shown(row);
        let why = row.why.as_ref().filter(|_| !row.control);
        let why = why.map(|why| format!("<br><small>{}</small>", escape(why))).unwrap_or_default();
        write!(
            out,
            "<tr><td>{}<br><small>{}{}</small><td>{}",
            escape(row.workload),
            escape(row.title),
            row.tier.map(|tier| format!(" ({})", tier_name(tier))).unwrap_or_default(),
            escape(row.boundary),
        )?;
        for (label, number) in [
            ("accepted", row.findings.accepted),
            ("effects", row.findings.effects),
            ("hit by faults", row.findings.hit),
            ("duplicates suppressed", row.findings.suppressed),
            ("violations", row.findings.total()),
        ] {
            write!(out, "<td class=\"n\" data-l=\"{label}\">{}", grouped(number))?;
        }
        writeln!(out, "<td class=\"{class}\"><b>{verdict}</b>{why}")?;
    }
    out.push_str("</table>\n");
    Ok(())
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A text that begins with a capital letter.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// The class and the text of a verdict.
fn shown(row: &Row) -> (&'static str, &'static str) {
    match (row.control, row.verdict) {
        (true, Verdict::Violated) => ("caught", "control: caught"),
        (true, _) => ("invalid", "control: not caught"),
        (false, verdict) => (verdict.name(), verdict.name()),
    }
}

/// Effects and suppressed duplicates per second, and the faults as bands behind them.
fn plot(report: &Report, out: &mut String) -> std::fmt::Result {
    let per_point = report.timeline.len().div_ceil(POINTS_MAX).max(1);
    let points: Vec<(u64, u64)> = report
        .timeline
        .chunks(per_point)
        .map(|part| {
            let len = part.len() as u64;
            let sum = |of: fn(&super::Second) -> u64| part.iter().map(of).sum::<u64>() / len;
            (sum(|second| second.effects), sum(|second| second.suppressed))
        })
        .collect();
    let (width, height) = (1_000.0, 220.0);
    let most = points.iter().map(|(effects, suppressed)| *effects.max(suppressed)).max().unwrap_or(0).max(1);
    let total_ms = (report.timeline.len().max(1) * 1_000) as f64;
    let at = |ms: f64| ms / total_ms * width;
    write!(
        out,
        "<svg viewBox=\"0 0 {width} {}\" role=\"img\" aria-label=\"Effects per second, with faults as bands\">",
        height + 20.0
    )?;
    for span in report.fault_spans.iter().take(FAULTS_MAX) {
        let (from, until) = (at(span.from_ms as f64), at(span.until_ms as f64));
        let fault = report.faults.iter().find(|fault| fault.number == span.number);
        let (name, bit) = fault.map_or(("", false), |fault| (fault.fault.as_str(), fault.bit));
        let colour = if bit { "#d9534f" } else { "#8a94a6" };
        write!(
            out,
            "<rect x=\"{from:.1}\" y=\"0\" width=\"{:.1}\" height=\"{height}\" fill=\"{colour}\" opacity=\"{}\"><title>{} \
             {}</title></rect>",
            (until - from).max(1.0),
            // Two tones, so that faults which follow each other can be told apart.
            if span.number.is_multiple_of(2) { ".10" } else { ".20" },
            span.number,
            escape(name),
        )?;
        if until - from >= NUMBER_WIDTH {
            write!(
                out,
                "<text x=\"{:.1}\" y=\"{}\" font-size=\"11\" fill=\"#8a94a6\" text-anchor=\"middle\">{}</text>",
                f64::midpoint(from, until),
                height - 4.0,
                span.number
            )?;
        }
    }
    let step = width / points.len().max(1) as f64;
    let line = |of: &dyn Fn(&(u64, u64)) -> u64| -> String {
        let place = |(number, point): (usize, &(u64, u64))| {
            let y = height - of(point) as f64 / most as f64 * (height - 10.0);
            format!("{:.1},{y:.1}", (number as f64 + 0.5) * step)
        };
        points.iter().enumerate().map(place).collect::<Vec<_>>().join(" ")
    };
    for (colour, points) in [("#2f6fd6", line(&|point| point.0)), ("#c07a16", line(&|point| point.1))] {
        write!(out, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{points}\"/>")?;
    }
    writeln!(
        out,
        "<text x=\"4\" y=\"12\" font-size=\"12\" fill=\"#8a94a6\">{2} per second</text><text x=\"4\" y=\"{0}\" font-size=\"12\" fill=\"#8a94a6\">0 s</text>\
         <text x=\"{width}\" y=\"{0}\" font-size=\"12\" fill=\"#8a94a6\" text-anchor=\"end\">{1} s</text></svg></div>\n\
         <p class=\"key\"><span style=\"color:#2f6fd6\">■</span> effects <span style=\"color:#c07a16\">■</span> duplicates \
         suppressed <span style=\"color:#d9534f\">■</span> a fault that bit, by its number below <span \
         style=\"color:#8a94a6\">■</span> one that did not</p>",
        height + 16.0,
        report.timeline.len(),
        grouped(most),
    )
}

fn write_violations(report: &Report, out: &mut String) -> std::fmt::Result {
    for (row, violation) in report.violations() {
        writeln!(
            out,
            "<h2 class=\"violated\">{}: {} of {}</h2><p>{}</p><pre>",
            escape(row.workload),
            violation.anomaly.name(),
            escape(&violation.id),
            escape(&violation.says)
        )?;
        for event in &violation.witness {
            writeln!(out, "{}", escape(&line(event)))?;
        }
        out.push_str("</pre>\n");
    }
    Ok(())
}

fn write_faults(report: &Report, out: &mut String) -> std::fmt::Result {
    out.push_str(
        "<h2>Faults</h2>\n<table><tr><th class=\"n\">#<th>fault<th class=\"n\">hit<th>caused<th class=\"n\">longest time \
         without an effect<th>bit\n",
    );
    for fault in report.faults.iter().take(FAULTS_MAX) {
        let caused: Vec<String> = fault
            .caused
            .named()
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        let span = report.fault_spans.iter().find(|span| span.number == fault.number);
        writeln!(
            out,
            "<tr><td class=\"n\">{}<td>{}<td class=\"n\" data-l=\"hit\">{}<td data-l=\"caused\">{}\
             <td class=\"n\" data-l=\"longest time without an effect\">{} ms<td data-l=\"bit\">{}",
            fault.number,
            escape(&fault.fault),
            fault.hits,
            caused.join(", "),
            span.map_or(0, |span| span.recovery_ms),
            if fault.bit { "yes" } else { "no" },
        )?;
    }
    out.push_str("</table>\n");
    if report.faults.len() > FAULTS_MAX {
        writeln!(out, "<p>{} more are in the JSON report.</p>", report.faults.len() - FAULTS_MAX)?;
    }
    Ok(())
}
