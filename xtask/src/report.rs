//! The report of a run of the steps.

use std::fmt;
use std::time::Duration;

use crate::suite::{Outcome, Skip};
use crate::totals::Totals;

/// The result of one step.
pub struct Row {
    /// The step.
    pub name: &'static str,
    /// How long it took.
    pub took: Duration,
    /// Its result.
    pub outcome: Outcome,
}

/// Skip reasons that are not a failure under `CI=true`: a store declares exactly which cases it cannot run, and its
/// suite fails if the declaration is wrong; long cases run with `--long`.
const ALLOWED_SKIP_REASONS: [&str; 2] = ["declared: ", "long: "];

/// A skipped step or test.
struct Skipped {
    name: String,
    reason: String,
    excused: bool,
}

impl Row {
    /// The step's share of the totals. A step without tests counts as one; a failed step counts at least one failure,
    /// even if all reported tests passed.
    pub fn totals(&self) -> Totals {
        match &self.outcome {
            Outcome::Skipped(_) => Totals { skipped: 1, ..Totals::default() },
            Outcome::Ran(ended) => {
                let mut totals = ended.results.totals;
                if ended.problem.is_some() {
                    totals.failed = totals.failed.max(1);
                } else if ended.results.binaries == 0 {
                    totals.passed = 1;
                }
                totals
            }
        }
    }

    fn status_word(&self) -> String {
        match &self.outcome {
            Outcome::Skipped(_) => "skipped".to_owned(),
            Outcome::Ran(ended) => match &ended.problem {
                Some(problem) => format!("FAILED ({problem})"),
                None if self.totals().failed > 0 => "FAILED".to_owned(),
                None => "ok".to_owned(),
            },
        }
    }

    fn skipped(&self) -> Vec<Skipped> {
        match &self.outcome {
            Outcome::Skipped(skip) => {
                let (reason, excused) = match skip {
                    Skip::Because(reason) => (reason.clone(), false),
                    Skip::RegistryOutOfReach(what) => (format!("registry out of reach: {what}"), true),
                };
                vec![Skipped { name: self.name.to_owned(), reason, excused }]
            }
            Outcome::Ran(ended) => {
                let ignored = ended.results.ignored.iter();
                ignored
                    .map(|test| Skipped {
                        name: format!("{}: {}", self.name, test.name),
                        reason: test.reason.clone(),
                        excused: ALLOWED_SKIP_REASONS.iter().any(|prefix| test.reason.starts_with(prefix)),
                    })
                    .collect()
            }
        }
    }
}

/// The results of all steps.
pub struct SuiteReport {
    /// One for each step, in order.
    pub rows: Vec<Row>,
    /// Whether a skip is a failure.
    pub ci: bool,
    /// The filter that the tests were run with.
    pub filter: Option<String>,
}

impl SuiteReport {
    fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for row in &self.rows {
            totals += row.totals();
        }
        totals.failed += u64::from(self.matched_nothing());
        totals
    }

    /// Why the whole run failed; empty if it succeeded.
    pub fn problems(&self) -> Vec<String> {
        let failed = self.rows.iter().filter(|row| row.totals().failed > 0);
        let mut problems: Vec<String> = failed.map(|row| format!("{} failed", row.name)).collect();
        if let Some(filter) = self.filter.as_deref().filter(|_| self.matched_nothing()) {
            problems.push(format!("no test has `{filter}` in its name"));
        }
        let unexcused = self.rows.iter().flat_map(Row::skipped).filter(|skipped| !skipped.excused).count();
        if self.ci && unexcused > 0 {
            problems.push(format!("{unexcused} skipped, which CI=true does not allow"));
        }
        problems
    }

    /// Whether there was a filter, and the test binaries ran without a single matching test.
    fn matched_nothing(&self) -> bool {
        let ran = self.rows.iter().filter_map(|row| match &row.outcome {
            Outcome::Ran(ended) if ended.results.binaries > 0 => Some(ended.results.totals),
            _ => None,
        });
        let all: Vec<Totals> = ran.collect();
        self.filter.is_some() && !all.is_empty() && all.iter().all(|totals| *totals == Totals::default())
    }
}

impl SuiteReport {
    /// The failed tests and what they said, so that the end of the output is enough to know what to mend.
    fn failures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            let Outcome::Ran(ended) = &row.outcome else { continue };
            for name in &ended.results.failures.names {
                writeln!(f, "  {}: {name}", row.name)?;
            }
            for line in &ended.results.failures.details {
                writeln!(f, "    | {line}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for SuiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max("step".len());
        writeln!(
            f,
            "\n{:width$}  {:>8}  {:>7}  {:>7}  {:>7}  result",
            "step", "seconds", "passed", "failed", "skipped"
        )?;
        for row in &self.rows {
            let (totals, seconds) = (row.totals(), row.took.as_secs_f64());
            let Totals { passed, failed, skipped } = totals;
            let verdict = row.status_word();
            writeln!(
                f,
                "{:width$}  {seconds:>8.1}  {passed:>7}  {failed:>7}  {skipped:>7}  {verdict}",
                row.name
            )?;
        }
        let skipped: Vec<Skipped> = self.rows.iter().flat_map(Row::skipped).collect();
        if !skipped.is_empty() {
            writeln!(f, "\nSKIPPED:")?;
            for Skipped { name, reason, .. } in &skipped {
                writeln!(f, "  {name}: {reason}")?;
            }
        }
        let problems = self.problems();
        if !problems.is_empty() {
            writeln!(f, "\nFAILED:")?;
            for problem in &problems {
                writeln!(f, "  {problem}")?;
            }
            self.failures(f)?;
        }
        // CI reads this line: it must be the last one, alone, in this format.
        let Totals { passed, failed, skipped } = self.totals();
        write!(f, "\n{passed} passed, {failed} failed, {skipped} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::ChildResult;
    use crate::totals::Reader;

    fn ran(name: &'static str, output: &str, problem: Option<&str>) -> Row {
        let mut results = Reader::default();
        results.read(output.as_bytes());
        let outcome = Outcome::Ran(ChildResult { problem: problem.map(str::to_owned), results });
        Row { name, took: Duration::from_millis(1250), outcome }
    }

    fn skipped(name: &'static str, skip: Skip) -> Row {
        Row { name, took: Duration::ZERO, outcome: Outcome::Skipped(skip) }
    }

    fn report(rows: Vec<Row>, ci: bool) -> SuiteReport {
        SuiteReport { rows, ci, filter: None }
    }

    fn last_line(report: &SuiteReport) -> String {
        report.to_string().lines().last().unwrap().to_owned()
    }

    #[test]
    fn the_last_line_is_the_sum() {
        let report = report(
            vec![
                ran("format", "", None),
                ran(
                    "tests",
                    "test a ... ignored, slow\ntest result: ok. 5 passed; 0 failed; 1 ignored\n",
                    None,
                ),
                skipped("python", Skip::Because("no Python".into())),
            ],
            false,
        );
        assert_eq!(last_line(&report), "6 passed, 0 failed, 2 skipped");
        assert_eq!(report.problems(), [""; 0]);
        let text = report.to_string();
        assert!(text.contains("  tests: a: slow\n  python: no Python\n"), "{text}");
        assert!(text.contains("tests        1.2        5        0        1  ok\n"), "{text}");
    }

    #[test]
    fn a_step_that_dies_without_a_word_is_a_failure() {
        let report =
            report(vec![ran("tests", "test result: ok. 5 passed; 0 failed\n", Some("signal: 6"))], false);
        assert_eq!(last_line(&report), "5 passed, 1 failed, 0 skipped");
        assert_eq!(report.problems(), ["tests failed"]);
        assert!(report.to_string().contains("FAILED (signal: 6)"));
    }

    #[test]
    fn failed_tests_are_named_at_the_end() {
        let output = "test a ... FAILED\nfailures:\n---- a stdout ----\nit broke\nfailures:\n    a\n\
                      test result: FAILED. 0 passed; 1 failed\n";
        let text = report(vec![ran("tests", output, Some("exit status: 101"))], false).to_string();
        let end = "  tests failed\n  tests: a\n    | ---- a stdout ----\n    | it broke\n\n0 passed, 1 failed, 0 skipped";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn ci_allows_no_skip_but_an_unreachable_registry() {
        let registry = || skipped("npm", Skip::RegistryOutOfReach("npm install failed".into()));
        assert_eq!(report(vec![registry()], true).problems(), [""; 0]);
        let rows = vec![registry(), skipped("python", Skip::Because("no Python".into()))];
        assert_eq!(report(rows, true).problems(), ["1 skipped, which CI=true does not allow"]);
        let ignored = "test a ... ignored, slow\ntest result: ok. 1 passed; 0 failed; 1 ignored\n";
        assert_eq!(report(vec![ran("tests", ignored, None)], true).problems().len(), 1);
        let declared = "test a ... ignored (declared: no order)\ntest b ... ignored (long: set HAPAX_LONG)\n\
                        test result: ok. 1 passed; 0 failed; 2 ignored\n";
        let report = report(vec![ran("tests", declared, None)], true);
        assert_eq!(
            (report.problems().len(), last_line(&report).as_str()),
            (0, "1 passed, 0 failed, 2 skipped")
        );
    }

    #[test]
    fn a_filter_that_matches_nothing_is_a_failure() {
        let filtered = |result: &str| SuiteReport {
            rows: vec![ran("format", "", None), ran("tests", result, None)],
            ci: false,
            filter: Some("lease".into()),
        };
        let nothing =
            filtered("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out\n");
        assert_eq!(nothing.problems(), ["no test has `lease` in its name"]);
        assert_eq!(last_line(&nothing), "1 passed, 1 failed, 0 skipped");
        assert_eq!(filtered("test result: ok. 1 passed; 0 failed\n").problems(), [""; 0]);
    }
}
