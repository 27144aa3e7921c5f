//! The payments example holds its promises: each bank sees the payments that its checks make possible, despite crashes.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The example's program. `cargo test` builds it together with the tests; a narrower call (`--test …`) does not, so it
/// is built here if it is missing or older than its source.
fn example() -> PathBuf {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified()).ok();
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/payments");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/payments");
    let sources = std::fs::read_dir(source).unwrap().map(|file| file.unwrap().path());
    let newest = sources.filter_map(|file| changed(&file)).max();
    if changed(&program) < newest {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--package", "hapax", "--example", "payments"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "the example does not build");
    }
    program
}

/// A row of the table, by the number of its column.
fn row<'a>(table: &'a str, bank: &str) -> Vec<&'a str> {
    let row = table.lines().find(|line| line.split_whitespace().next() == Some(bank));
    row.unwrap_or_else(|| panic!("no row {bank}: {table}")).split_whitespace().collect()
}

#[test]
fn each_bank_sees_what_its_checks_make_possible() {
    let output = Command::new(example()).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}\n{complaints}");
    assert!(!said.contains("FAILED"), "{said}");

    // bank, on doubt, payments, sends, crashes after a payment, calls, takeovers, moved, doubles, in doubt, missing
    let number = |bank, column: usize| -> f64 { row(&said, bank)[column].parse().unwrap() };
    for bank in ["keyed", "fenced", "trusting"] {
        assert!(number(bank, 3) > number(bank, 2), "duplicates were sent: {said}");
        assert!(number(bank, 4) >= 1.0, "a crash fell between payment and record: {said}");
    }
    assert_eq!((number("keyed", 7), number("keyed", 8), number("keyed", 10)), (40.0, 0.0, 0.0), "{said}");
    assert!(number("keyed", 5) > 40.0 && number("keyed", 6) > 0.0, "the bank was asked again: {said}");
    assert!(number("fenced", 8) >= 1.0 && number("fenced", 7) > 40.0, "{said}");
    assert_eq!((number("trusting", 6), number("trusting", 8)), (0.0, 0.0), "{said}");
    assert!(number("trusting", 9) >= 1.0 && number("trusting", 10) <= number("trusting", 9), "{said}");
    assert!(said.contains("hapax ledger resolve 'queue/trusting'"), "{said}");
}
