//! The configuration file, the environment and the flags.

mod common;

use common::{Done, hapax, run};

const PRINT: [&str; 4] = ["serve", "--print-config", "--config", "hapax.toml"];

#[test]
fn an_unknown_key_is_refused_with_the_one_that_was_meant() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[limits]\nconections_max = 7\n").unwrap();
    let error = run(&folder, &["serve", "--config", "hapax.toml"]).failed(1);
    assert!(error.contains("hapax.toml:2: unknown key `conections_max`"), "{error}");
    assert!(error.contains("did you mean `connections_max`?"), "{error}");
    assert!(!folder.path().join("hapax-data").exists(), "nothing was made");
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(&folder, &["serve", "--config", "nowhere.toml"]).failed(1);
    assert!(error.contains("nowhere.toml"), "{error}");
}

#[test]
fn what_is_printed_means_the_same_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let text = "listen = \"127.0.0.1:9999\"\n[log]\nformat = \"json\"\n[[queue]]\nname = \"a.fifo\"\n\
                redrive_allow = { queues = [\"b.fifo\"] }\n";
    std::fs::write(folder.path().join("hapax.toml"), text).unwrap();
    let first = run(&folder, &PRINT).ok();
    assert!(first.contains("127.0.0.1:9999") && first.contains("a.fifo"), "{first}");
    std::fs::write(folder.path().join("hapax.toml"), &first).unwrap();
    assert_eq!(run(&folder, &PRINT).ok(), first);
    let defaults = run(&folder, &["serve", "--print-config"]).ok();
    assert!(defaults.contains("127.0.0.1:9324") && defaults.contains("embedded:./hapax-data"), "{defaults}");
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[sqs]\nregion = \"file\"\naccount = \"111111111111\"\n[limits]\nread_timeout_ms = 1\n";
    std::fs::write(folder.path().join("hapax.toml"), text).unwrap();
    let mut command = hapax(&folder, &PRINT);
    command.args(["--region", "flag"]).env("HAPAX_REGION", "environment").env("HAPAX_READ_TIMEOUT", "5s");
    let printed = Done::new(command.output().unwrap()).ok();
    for expected in ["region = \"flag\"", "read_timeout_ms = 5000", "account = \"111111111111\""] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
}

#[test]
fn secrets_are_not_printed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[[auth.keys]]\nid = \"AK\"\nsecret = \"hunter2\"\n")
        .unwrap();
    let mut command = hapax(&folder, &PRINT);
    command.env("HAPAX_KEY_ID", "BK").env("HAPAX_KEY_SECRET", "hunter3");
    let printed = Done::new(command.output().unwrap()).ok();
    assert!(printed.contains("AK") && printed.contains("BK") && !printed.contains("hunter"), "{printed}");
}
