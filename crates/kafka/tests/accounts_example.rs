//! The example with transfers between accounts: exact with `hapax-kafka`, wrong with librdkafka's transactions. It takes four
//! minutes, and runs when `HAPAX_LONG` is set.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use hapax_faults::KafkaServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() -> ExitCode {
    let trial = Trial::ignorable_test("sums_are_exact_and_those_of_the_control_are_not", || {
        if std::env::var_os("HAPAX_LONG").is_none() {
            return Ok(Completion::ignored_with("declared: set HAPAX_LONG to run it"));
        }
        if let Err(why) = KafkaServer::jars() {
            return Ok(Completion::ignored_with(why));
        }
        sums_are_exact_and_those_of_the_control_are_not();
        Ok::<_, Failed>(Completion::Completed)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

/// The example's program. `cargo test` builds it together with the tests; a narrower call (`--test …`) does not, so it is
/// built here if it is missing or older than its source.
fn example() -> PathBuf {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified()).ok();
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/kafka_accounts");
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = std::fs::read_dir(manifest.join("examples/kafka_accounts")).unwrap();
    let newest = sources.filter_map(|file| changed(&file.unwrap().path())).max();
    if changed(&program) < newest {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = ["build", "-p", "hapax-kafka", "--all-features", "--example", "kafka_accounts"];
        let built = Command::new(cargo).args(arguments).current_dir(manifest).status().unwrap();
        assert!(built.success(), "the example does not compile");
    }
    program
}

fn sums_are_exact_and_those_of_the_control_are_not() {
    let run = Command::new(example()).output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    for (line, verdict) in [
        ("hapax-kafka, stages killed at random: ", "exact"),
        ("hapax-kafka, a commit delayed: ", "exact"),
        ("librdkafka's transactions, a commit delayed: ", "WRONG"),
    ] {
        assert!(text.contains(&format!("{line}{verdict}")), "{text}");
    }
}
