//! What `hapax doctor` says about a store as a whole and the machine below it, with the trouble made for real: a disk that fails,
//! is full or is memory, a file that was damaged, a server of another version.

mod common;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use common::relay::relay_altered;
use common::{Server, hapax, preload};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

/// A test by its name, and whether it mounts a file system.
type Test = (&'static str, bool, fn());

const TESTS: &[Test] = &[
    ("a_store_that_stopped_is_told_until_the_server_is_started_again", false, stopped),
    ("a_disk_that_is_nearly_full_is_told_before_sends_are_refused", true, nearly_full),
    ("a_damaged_message_is_told", false, damaged),
    ("a_server_of_another_version_is_told", false, another_version),
];

fn main() -> ExitCode {
    let mounts = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    let missing = match mounts {
        Ok(done) if done.status.success() => None,
        Ok(done) => Some(format!("cannot mount: {}", String::from_utf8_lossy(&done.stderr))),
        Err(error) => Some(format!("needs unshare: {error}")),
    };
    let trial = |&(name, mounts, test): &Test| {
        let missing = missing.clone().filter(|_| mounts);
        Trial::ignorable_test(name, move || match missing {
            None => {
                test();
                Ok::<_, Failed>(Completion::Completed)
            }
            Some(why) => Ok(Completion::ignored_with(why)),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), TESTS.iter().map(trial).collect()).exit_code()
}

/// What was found about the store, each with its code and message, and the exit code.
fn found(endpoint: &str) -> (Vec<(String, String)>, Option<i32>) {
    let done = common::run(&tempdir().unwrap(), &["doctor", "--json", "--endpoint", endpoint]);
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let findings = report["store"]["findings"].as_array().unwrap().iter();
    (findings.map(|finding| (text(finding, "code"), text(finding, "message"))).collect(), done.code)
}

/// The message of a finding; `None`: it was not found.
fn message_of(server: &Server, code: &str) -> Option<String> {
    let (findings, _) = found(&server.endpoint);
    findings.into_iter().find(|(of, _)| of == code).map(|(_, message)| message)
}

/// A disk that fails a sync: the store stops, since it does not know what is durable.
fn stopped() {
    let tools = tempdir().unwrap();
    let (library, control) = (preload::library(tools.path()), tools.path().join("control"));
    fs::write(&control, b"n\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0").unwrap();
    let folder = tempdir().unwrap();
    let mut command = hapax(&folder, &["serve", "--listen", "127.0.0.1:0"]);
    command.env("LD_PRELOAD", library).env("VERIFY_FAULTS_CONTROL", &control);
    let mut server = Server::start_by(folder, command);
    server.run(&["queue", "create", "jobs"]).ok();
    server.run(&["send", "jobs", "kept"]).ok();
    assert_eq!(message_of(&server, "store-stopped"), None);

    let file = fs::File::options().write(true).open(&control).unwrap();
    file.write_all_at(b"f", 0).unwrap();
    assert_eq!(server.run(&["send", "jobs", "lost"]).code, Some(1));
    // The cause is gone; what it has left behind is not.
    file.write_all_at(b"n", 0).unwrap();
    let (findings, exit) = found(&server.endpoint);
    let (code, message) = &findings[0];
    assert_eq!((code.as_str(), exit), ("store-stopped", Some(1)), "a refusal comes first: {findings:?}");
    assert!(message.starts_with("the store has stopped: "), "{message}");
    let top = server.run(&["top", "--once"]);
    assert!(top.stdout.contains("\tstore-stopped\t"), "{top:?}");

    // What the remedy says helps.
    server.signal(Signal::KILL);
    server.wait();
    let folder = std::mem::replace(&mut server.folder, tempdir().unwrap());
    let server = Server::start_in(folder, &[]);
    assert_eq!(message_of(&server, "store-stopped"), None);
    assert!(server.run(&["receive", "jobs"]).ok().contains("kept"));
}

/// Fills a file system until this much is left.
fn leave(folder: &Path, mebibytes: u64) {
    let filler = folder.join("filler");
    let _ = fs::remove_file(&filler);
    let free = rustix::fs::statvfs(folder).unwrap();
    let bytes = free.f_bavail * free.f_frsize - (mebibytes << 20);
    fs::write(filler, vec![0; usize::try_from(bytes).unwrap()]).unwrap();
}

/// On a file system in memory of its own, which ends with the server.
fn nearly_full() {
    let folder = tempdir().unwrap();
    fs::create_dir(folder.path().join("hapax-data")).unwrap();
    let serve = hapax(&folder, &["serve", "--listen", "127.0.0.1:0"]);
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", "mount -t tmpfs -o size=200m tmpfs hapax-data && exec \"$@\"", "sh"]);
    command.arg(serve.get_program()).args(serve.get_args()).current_dir(folder.path());
    for (name, _) in serve.get_envs() {
        command.env_remove(name);
    }
    let server = Server::start_by(folder, command);
    let data = Path::new("/proc").join(server.process_id().to_string()).join("root");
    let data = data.join(server.folder.path().strip_prefix("/").unwrap()).join("hapax-data");
    server.run(&["queue", "create", "jobs"]).ok();
    let volatile = message_of(&server, "volatile-file-system");
    assert!(volatile.is_some_and(|message| message.contains("(tmpfs)")));

    leave(&data, 130);
    assert_eq!(message_of(&server, "disk-nearly-full"), None, "twice the reserve, and a little");
    leave(&data, 100);
    let message = message_of(&server, "disk-nearly-full").unwrap();
    let left: u64 =
        message.strip_prefix("the disk has ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((95..=100).contains(&left), "{message}");
    assert!(message.ends_with("below 64 MiB the store accepts no messages"), "{message}");
    server.run(&["send", "jobs", "there is room yet"]).ok();
    leave(&data, 50);
    let refused = server.run(&["send", "jobs", "no room"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("are left on the disk"), "{refused:?}");
    fs::remove_file(data.join("filler")).unwrap();
    assert_eq!(message_of(&server, "disk-nearly-full"), None);
}

/// A byte of a message is changed on the disk.
fn damaged() {
    const BODY: &str = "a body that is found in the file";
    let server = Server::start();
    server.run(&["send", "--create", "jobs", BODY]).ok();
    let folder = server.stop();
    let path = folder.path().join("hapax-data/hapax.db");
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(BODY.len()).position(|window| window == BODY.as_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().write_all_at(b"A", at as u64).unwrap();

    let server = Server::start_in(folder, &[]);
    assert_eq!(message_of(&server, "store-warning"), None, "a body is read when it is delivered");
    assert!(!server.run(&["receive", "jobs"]).stdout.contains("body"), "it is not delivered");
    let message = message_of(&server, "store-warning").unwrap();
    assert!(message.ends_with("its bytes do not match their checksum"), "{message}");
}

/// As far as the protocol tells it: the server's version is another in its answers.
fn another_version() {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    let theirs = OURS.replacen(|first: char| first.is_ascii_digit(), "9", 1);
    let server = Server::start();
    let (from, to) = (format!("\"version\":\"{OURS}\""), format!("\"version\":\"{theirs}\""));
    let endpoint = relay_altered(&server, |_| false, move |answer| answer.replace(&from, &to));
    let of_versions = |endpoint: &str| -> Vec<String> {
        let (findings, exit) = found(endpoint);
        assert_eq!(exit, Some(0));
        let found = findings.into_iter().filter(|(code, _)| code == "version-differs");
        found.map(|(_, message)| message).collect()
    };
    assert_eq!(of_versions(&endpoint), [format!("this program is version {OURS}, the server {theirs}")]);
    assert!(of_versions(&server.endpoint).is_empty());
}
