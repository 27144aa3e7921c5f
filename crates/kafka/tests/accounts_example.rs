//! The example with transfers between accounts: exact with `hapax-kafka`, wrong with librdkafka's transactions. It takes four
//! minutes, and runs when `HAPAX_LONG` is set.

use std::process::{Command, ExitCode};

use hapax_faults::{KafkaServer, example_program};
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

fn sums_are_exact_and_those_of_the_control_are_not() {
    let run = Command::new(example_program("kafka_accounts")).output().unwrap();
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
