//! Instructions per message, counted by Valgrind in separate processes: independent of the machine's load.

use std::path::Path;
use std::process::Command;

use crate::contestant::{Contestant, Rig};

/// The child process of [`count`].
pub async fn child(contestant: Contestant, folder: &Path, messages: usize, in_flight: usize) {
    let rig = Rig::open(contestant, folder).await;
    println!("{}", rig.run(messages, in_flight).await);
}

/// Whether instructions can be counted here; the error is the reason why not.
pub fn possible() -> Result<(), String> {
    match Command::new("valgrind").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("valgrind failed: {}", output.status)),
        Err(error) => Err(format!("valgrind cannot be started ({error}); install it")),
    }
}

/// Instructions per message. Two processes open equal stores and handle few and many messages: the difference removes
/// the common cost of opening, starting and ending.
pub async fn count(contestant: Contestant, folder: &Path, in_flight: usize, few: usize, many: usize) -> f64 {
    let mut counted = Vec::new();
    for messages in [few, many] {
        let folder = folder.join(format!("{}-{messages}", contestant.name()));
        let rig = Rig::open(contestant, &folder).await;
        // A worker may take a few more messages than requested.
        rig.fill(many + 4 * in_flight + 1_024).await;
        drop(rig);
        counted.push(run(contestant, &folder, messages, in_flight));
        std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    }
    (counted[1].0 - counted[0].0) / (counted[1].1 - counted[0].1)
}

/// Instructions of a whole process, and the number of messages that it handled.
fn run(contestant: Contestant, folder: &Path, messages: usize, in_flight: usize) -> (f64, f64) {
    let program = std::env::current_exe().expect("a program knows where it is");
    let output = Command::new("valgrind")
        // Schedule threads fairly, as on an idle machine.
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", "--fair-sched=try"])
        .arg(program)
        .args(["--child", contestant.name(), &messages.to_string(), "--in-flight", &in_flight.to_string()])
        .arg("--folder")
        .arg(folder)
        .output()
        .expect("valgrind can be started");
    let (said, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
    let refs = told.lines().find_map(|line| line.split_once("I   refs:")).expect("a count").1;
    let instructions = refs.trim().replace(',', "").parse().expect("a number");
    (instructions, said.trim().parse().expect("a number"))
}
