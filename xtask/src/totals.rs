//! Adds up the results of test binaries.

use std::ops::AddAssign;

/// Numbers of tests by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A test that a binary reported as ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// Its name.
    pub name: String,
    /// The reason in its `#[ignore = "..."]`.
    pub reason: String,
}

/// Reads the output of test binaries, in pieces of any size.
#[derive(Debug, Default)]
pub struct Reader {
    line: Vec<u8>,
    /// Number of test binaries that have reported a result.
    pub binaries: u64,
    /// The sum of their results.
    pub totals: Totals,
    /// The ignored tests so far.
    pub ignored: Vec<Ignored>,
    /// What failed.
    pub failures: Box<Failures>,
}

/// The failed tests of some binaries.
#[derive(Debug, Default)]
pub struct Failures {
    /// Their names.
    pub names: Vec<String>,
    /// What the binaries printed of them, bounded.
    pub details: Vec<String>,
    /// How many more lines are kept of this binary's; 0 outside of its list of failures.
    details_left: usize,
}

/// How many lines are kept of the failures of one binary, and of all.
const DETAILS_OF_BINARY_MAX: usize = 120;
const DETAILS_MAX: usize = 600;

impl Reader {
    /// Reads the next piece of output.
    pub fn read(&mut self, piece: &[u8]) {
        for byte in piece {
            if *byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.read_line(String::from_utf8_lossy(&line).trim_end());
            } else {
                self.line.push(*byte);
            }
        }
    }

    /// Adds what another has read.
    pub fn add(&mut self, other: Self) {
        self.binaries += other.binaries;
        self.totals += other.totals;
        self.ignored.extend(other.ignored);
        self.failures.names.extend(other.failures.names);
        self.failures.details.extend(other.failures.details);
        self.failures.details.truncate(DETAILS_MAX);
    }

    fn read_line(&mut self, line: &str) {
        self.failures.read_line(line);
        if let Some(totals) = result_line(line).or_else(|| pytest_line(line)) {
            self.binaries += 1;
            self.totals += totals;
        } else if let Some(totals) = node_line(line) {
            // Node reports its result in several lines; this is the first.
            self.binaries += u64::from(line.starts_with("# tests "));
            self.totals += totals;
        } else if let Some(ignored) = ignored_line(line).or_else(|| pytest_skipped_line(line)) {
            self.ignored.push(ignored);
        }
    }
}

impl Failures {
    /// Keeps the names of failed tests, and what a Rust test binary prints between its two lines `failures:`.
    fn read_line(&mut self, line: &str) {
        if let Some(name) = failed_line(line) {
            self.names.push(name);
        }
        if line == "failures:" && self.details_left == 0 {
            self.details_left = DETAILS_OF_BINARY_MAX;
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.details_left = 0;
        } else if self.details_left > 1 && self.details.len() < DETAILS_MAX {
            self.details_left -= 1;
            self.details.push(line.to_owned());
        }
    }
}

/// Whether a line says that a test of Rust passed. There are thousands, and they hide what failed.
pub fn is_passed_line(line: &[u8]) -> bool {
    line.starts_with(b"test ") && line.trim_ascii_end().ends_with(b"... ok")
}

/// Parses `test a::b ... FAILED`, pytest's `FAILED test_file.py::name - what` and node's `not ok 3 - name`.
fn failed_line(line: &str) -> Option<String> {
    let rust = || line.strip_prefix("test ")?.strip_suffix(" ... FAILED");
    let pytest = || line.strip_prefix("FAILED ").or_else(|| line.strip_prefix("ERROR "));
    let pytest = || pytest().filter(|name| name.contains(".py"));
    let node = || Some(line.trim_start().strip_prefix("not ok ")?.split_once(" - ")?.1);
    rust().or_else(pytest).or_else(node).map(|name| name.trim_end().to_owned())
}

/// Parses `1 failed, 410 passed, 2 errors in 32.74s`, with or without a frame of `=`.
fn pytest_line(line: &str) -> Option<Totals> {
    let (counts, time) = line.trim_matches(['=', ' ']).rsplit_once(" in ")?;
    let seconds = time.split(' ').next()?.strip_suffix('s')?;
    seconds.parse::<f64>().ok()?;
    let mut totals = Totals::default();
    for count in counts.split(", ") {
        let (number, what) = count.split_once(' ')?;
        let number: u64 = number.parse().ok()?;
        match what {
            "passed" | "xfailed" => totals.passed += number,
            "failed" | "error" | "errors" | "xpassed" => totals.failed += number,
            "skipped" => totals.skipped += number,
            "deselected" | "warning" | "warnings" => {}
            _ => return None,
        }
    }
    Some(totals)
}

/// Parses `SKIPPED [1] test_file.py:12: the reason`.
fn pytest_skipped_line(line: &str) -> Option<Ignored> {
    let (_, place) = line.strip_prefix("SKIPPED [")?.split_once("] ")?;
    let (name, reason) = place.split_once(": ")?;
    Some(Ignored { name: name.to_owned(), reason: reason.to_owned() })
}

/// Parses one line of node's summary in TAP: `# pass 9`.
fn node_line(line: &str) -> Option<Totals> {
    let (what, number) = line.strip_prefix("# ")?.split_once(' ')?;
    let number: u64 = number.parse().ok()?;
    let mut totals = Totals::default();
    match what {
        "pass" => totals.passed = number,
        "fail" | "cancelled" => totals.failed = number,
        "skipped" | "todo" => totals.skipped = number,
        "tests" => {}
        _ => return None,
    }
    Some(totals)
}

/// Parses `test result: ok. 3 passed; 0 failed; 1 ignored; ...`. A real result always starts at the beginning of its
/// line: a test's own output that quotes one is captured or indented.
fn result_line(line: &str) -> Option<Totals> {
    let (_verdict, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut totals = Totals::default();
    for count in counts.split("; ") {
        let (number, what) = count.split_once(' ')?;
        match what {
            "passed" => totals.passed = number.parse().ok()?,
            "failed" => totals.failed = number.parse().ok()?,
            "ignored" => totals.skipped = number.parse().ok()?,
            _ => {}
        }
    }
    Some(totals)
}

/// Parses `test a::b ... ignored, the reason`, or `ignored (the reason)` as the conformance suites print it.
fn ignored_line(line: &str) -> Option<Ignored> {
    let (name, how) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let reason = how.strip_prefix("ignored")?;
    let reason = match reason.strip_prefix(" (").and_then(|reason| reason.strip_suffix(')')) {
        Some(reason) => reason,
        None if reason.is_empty() => "no reason given",
        None => reason.strip_prefix(", ")?,
    };
    Some(Ignored { name: name.trim_end().to_owned(), reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 4 tests
test lease::expires ... ok
test lease::waits ... ignored, needs a second machine
test src/lib.rs - bare (line 3) ... ignored
test p06_fifo::order    ... ignored (declared: the store keeps no order)
test fence::grows ... FAILED

failures:
    fence::grows

test result: FAILED. 1 passed; 1 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.02s

   Doc-tests hapax_core

test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 1.02s
";

    fn read(pieces: impl Iterator<Item = impl AsRef<[u8]>>) -> Reader {
        let mut reader = Reader::default();
        for piece in pieces {
            reader.read(piece.as_ref());
        }
        reader
    }

    #[test]
    fn result_lines_add_up() {
        assert_eq!(read([OUTPUT].iter()).totals, Totals { passed: 13, failed: 1, skipped: 3 });
    }

    #[test]
    fn pieces_may_break_anywhere() {
        let by_byte = read(OUTPUT.as_bytes().chunks(1));
        assert_eq!(by_byte.totals, Totals { passed: 13, failed: 1, skipped: 3 });
        assert_eq!((by_byte.binaries, by_byte.ignored.len()), (2, 3));
    }

    #[test]
    fn ignored_tests_are_named_with_their_reason() {
        let ignored = |name: &str, reason: &str| Ignored { name: name.into(), reason: reason.into() };
        let expected = [
            ignored("lease::waits", "needs a second machine"),
            ignored("src/lib.rs - bare (line 3)", "no reason given"),
            ignored("p06_fifo::order", "declared: the store keeps no order"),
        ];
        assert_eq!(read([OUTPUT].iter()).ignored, expected);
    }

    #[test]
    fn failed_tests_are_named_with_what_they_said() {
        let output = "\
test a::b ... ok
test fence::grows    ... FAILED
failures:
---- fence::grows stdout ----
it shrank
failures:
    fence::grows
test result: FAILED. 1 passed; 1 failed; 0 ignored
FAILED test_a.py::test_b - assert 1 == 2
not ok 3 - a name
";
        let reader = read([output].iter());
        assert_eq!(reader.failures.names, ["fence::grows", "test_a.py::test_b - assert 1 == 2", "a name"]);
        assert_eq!(reader.failures.details, ["---- fence::grows stdout ----", "it shrank"]);
    }

    #[test]
    fn what_failures_say_is_bounded() {
        let one = format!("failures:\n{}test result: FAILED. 0 passed; 1 failed\n", "a line\n".repeat(1000));
        assert_eq!(read([&one].iter()).failures.details.len(), DETAILS_OF_BINARY_MAX - 1);
        assert_eq!(read(std::iter::repeat_n(&one, 10)).failures.details.len(), DETAILS_MAX);
    }

    #[test]
    fn only_passed_tests_are_passed_lines() {
        assert!(is_passed_line(b"test a::b    ... ok\n"));
        for line in ["test a::b ... FAILED\n", "test a ... ignored, slow\n", "nothing ... ok\n"] {
            assert!(!is_passed_line(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn the_results_of_pytest_are_counted() {
        let totals = |passed, failed, skipped| Totals { passed, failed, skipped };
        let output = "\
.....F [100%]
SKIPPED [1] behaviour/test_a.py:12: no such thing here
3 failed, 371 passed, 1 skipped, 10 errors in 18.06s
==================== 5 passed, 2 warnings in 76.41s (0:01:16) ====================
";
        let reader = read([output].iter());
        assert_eq!((reader.totals, reader.binaries), (totals(376, 13, 1), 2));
        let skipped = Ignored { name: "behaviour/test_a.py:12".into(), reason: "no such thing here".into() };
        assert_eq!(reader.ignored, [skipped]);
        assert_eq!(pytest_line("no tests ran in 0.01s"), None);
        assert_eq!(pytest_line("4 apples in 2 baskets"), None);
    }

    #[test]
    fn the_results_of_node_are_counted() {
        let output =
            "ok 1 - a\n1..9\n# tests 12\n# suites 0\n# pass 9\n# fail 1\n# cancelled 1\n# skipped 1\n";
        let reader = read([output].iter());
        assert_eq!((reader.totals, reader.binaries), (Totals { passed: 9, failed: 2, skipped: 1 }, 1));
    }

    #[test]
    fn other_lines_count_for_nothing() {
        let other =
            "  test result: ok. 5 passed; 0 failed\ntest result: odd\n\u{fffd}\ntest x ... ignoredly\n";
        let reader = read([other].iter());
        assert_eq!((reader.totals, reader.ignored), (Totals::default(), vec![]));
    }
}
