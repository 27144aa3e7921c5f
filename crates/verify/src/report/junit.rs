//! The report for CI systems.

use std::fmt::Write as _;

use super::{Report, Row, Verdict};

pub fn junit(report: &Report) -> String {
    let bad = |row: &&Row| problem(row).is_some();
    let failures = report.workloads.iter().filter(bad).count();
    let mut out = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"hapax verify\" tests=\"{}\" failures=\"{failures}\" \
         time=\"{:.1}\">\n",
        report.workloads.len(),
        report.facts.seconds,
    );
    for row in &report.workloads {
        let _ = write!(out, "  <testcase classname=\"verify\" name=\"{}\"", escape(row.workload));
        match problem(row) {
            None => out.push_str("/>\n"),
            Some(problem) => {
                let _ = writeln!(out, ">\n    <failure message=\"{}\"/>\n  </testcase>", escape(&problem));
            }
        }
    }
    out.push_str("</testsuite>\n");
    out
}

/// What is wrong with a row: a violation, or a control that was not caught.
fn problem(row: &Row) -> Option<String> {
    match (row.control, row.verdict) {
        (false, Verdict::Held) | (true, Verdict::Violated) => None,
        (_, verdict) => {
            let why = row.why.clone().unwrap_or_else(|| {
                let first = row.findings.violations.first();
                first.map_or_else(String::new, |found| {
                    format!("{} of {}: {}", found.anomaly.name(), found.id, found.says)
                })
            });
            Some(format!("{}: {why}", verdict.name()))
        }
    }
}

/// Escapes text for XML and HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            char if char.is_control() => out.push('\u{fffd}'),
            char => out.push(char),
        }
    }
    out
}
