//! The output of `hapax serve` when it starts, and when it refuses to start.

mod common;

use common::{Done, Server, hapax, run};

#[test]
fn the_first_start_prints_where_things_are_and_a_line_to_paste_that_works() {
    let mut server = Server::start();
    let data = server.line("  Data  ");
    assert!(data.contains("hapax-data"), "{data}");
    let aws = server.line("aws --endpoint-url");
    let boto3 = server.line("import boto3");
    let send = server.line(" send ");
    for line in [&aws, &boto3, &send] {
        assert!(line.contains(&server.endpoint), "{line}");
    }
    let pasted = std::process::Command::new("sh").args(["-c", &send]).output().unwrap();
    let id = Done::new(pasted).ok();
    let received = server.run(&["receive", "hello", "--ack"]).ok();
    assert!(received.starts_with(id.trim()) && received.contains("hello, world"), "{received}");

    let mut again = Server::start_in(server.stop(), &[]);
    again.line("  Data  ");
    again.signal(rustix::process::Signal::TERM);
    assert_eq!(again.rest(), [""; 0], "a later start does not explain itself again");
    assert!(again.wait().success());
}

#[test]
fn a_second_server_on_the_same_folder_is_refused_and_told_who_holds_it() {
    let server = Server::start();
    let error = run(&server.folder, &["serve", "--listen", "127.0.0.1:0"]).failed(1);
    assert!(error.contains("in use by") && error.contains("hapax-data"), "{error}");
}

#[test]
fn an_address_beyond_loopback_needs_keys() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(&folder, &["serve", "--listen", "0.0.0.0:0"]).failed(1);
    assert!(error.contains("without keys") && error.contains("--insecure"), "{error}");
}

#[test]
fn a_key_from_the_environment_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), "s3cret\n").unwrap();
    let server = Server::start_in(folder, &["--key-id", "AK", "--key-secret-file", "secret"]);
    let refused = server.run(&["queues"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(!refused.stderr.contains("s3cret"), "{refused:?}");
    let mut command = hapax(&server.folder, &["queues", "--json", "--endpoint", &server.endpoint]);
    let allowed = Done::new(command.env("HAPAX_TOKEN", "AK:s3cret").output().unwrap());
    assert_eq!(allowed.json(), serde_json::json!([]));
}

#[test]
fn queues_of_the_configuration_are_created_and_changed() {
    let folder = tempfile::tempdir().unwrap();
    let config = |lease_ms: u64| {
        format!(
            "[[queue]]\nname = \"jobs\"\nlease_ms = {lease_ms}\n\
             dead_letter = {{ queue = \"jobs-dead\" }}\n\
             [[queue]]\nname = \"jobs-dead\"\n"
        )
    };
    let file = folder.path().join("hapax.toml");
    std::fs::write(&file, config(7000)).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let lease = |server: &Server| {
        server.run(&["queue", "show", "jobs", "--json"]).json()["config"]["lease_ms"].clone()
    };
    assert_eq!(lease(&server), 7000);
    let folder = server.stop();
    std::fs::write(&file, config(8000)).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    assert_eq!(lease(&server), 8000);
}

#[test]
fn a_damaged_message_is_logged_and_not_delivered() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let id = server.run(&["send", "jobs", "a body that will be damaged"]).ok();
    let folder = server.stop();
    let file = folder.path().join("hapax-data/hapax.db");
    let mut bytes = std::fs::read(&file).unwrap();
    let sound = b"a body that will be damaged";
    let at = bytes.windows(sound.len()).position(|window| window == sound).expect("the body is in the file");
    bytes[at] ^= 1;
    std::fs::write(&file, bytes).unwrap();

    let mut server = Server::start_in(folder, &[]);
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "");
    assert!(server.run(&["parked", "list", "jobs"]).ok().contains(id.trim()));
    server.signal(rustix::process::Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    let logged = log.lines().find(|line| line.contains("ERROR") && line.contains(id.trim()));
    assert!(logged.is_some_and(|line| line.contains("damaged")), "{log}");
}
