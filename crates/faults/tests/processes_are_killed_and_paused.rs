//! A killed process runs no more; a paused process neither runs nor ends, and continues after a
//! resume.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use hapax_faults::{Process, rerun_test};

const CHILD: &str = "HAPAX_TEST_CHILD";

/// Not a test of its own: the body of the child process. It counts the lines of its input.
#[test]
fn child_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    println!("\nready");
    for (count, line) in std::io::stdin().lines().map_while(Result::ok).enumerate() {
        println!("\nheard {count} {line}");
        eprintln!("log of {line}");
    }
    println!("\nbye");
}

fn start() -> Process {
    let process = Process::start(rerun_test("child_process").env(CHILD, "1")).unwrap();
    process.wait_for_line("ready");
    process
}

#[test]
fn a_killed_process_ended_by_signal_9() {
    let mut process = start();
    process.write_line("a");
    assert_eq!(process.wait_for_prefix("heard"), "0 a");
    assert_eq!(process.kill().signal(), Some(9));
    assert_eq!(process.ended().and_then(|status| status.signal()), Some(9));
}

#[test]
fn a_paused_process_waits_and_continues() {
    let mut process = start();
    process.pause();
    process.write_line("a");
    let state = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    assert!(state.contains(") T "), "{state}");
    assert!(process.ended().is_none());
    process.resume();
    assert_eq!(process.wait_for_prefix("heard"), "0 a");
}

#[test]
fn the_end_gives_everything_that_was_printed() {
    let mut process = start();
    process.write_line("a");
    process.write_line("b");
    let (status, lines, log) = process.finish();
    assert!(status.success(), "{status}");
    assert!(
        lines.iter().any(|line| line == "heard 1 b") && lines.iter().any(|line| line == "bye"),
        "{lines:?}"
    );
    assert!(log.contains("log of b"), "{log}");
}

#[test]
fn a_dropped_process_is_dead() {
    let process = start();
    let id = process.id();
    drop(process);
    assert!(!Command::new("kill").args(["-0", &id.to_string()]).output().unwrap().status.success());
}
