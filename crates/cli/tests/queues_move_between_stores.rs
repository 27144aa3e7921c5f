//! `hapax export` and `hapax import`: a store's queues and ledger move to another store, through a file.

mod common;

use common::{Server, run};
use serde_json::Value;

/// Ids and bodies of what can be received from a queue of a store that no server has open.
fn received(folder: &tempfile::TempDir, store: &str, queue: &str) -> Vec<(String, String)> {
    let got = run(folder, &["receive", queue, "--max", "10", "--endpoint", store, "--json"]).ok();
    let got: Vec<Value> = got.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let got = got.iter().flat_map(|line| line.as_array().cloned().unwrap_or_else(|| vec![line.clone()]));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    got.map(|message| (text(&message["id"]), text(&message["body"]))).collect()
}

#[test]
fn a_store_moves_to_another_folder_and_again_adds_nothing() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--dead-letters"]).ok();
    server.run(&["queue", "create", "steps.fifo", "--dead-letters"]).ok();
    let mut ids = Vec::new();
    for body in ["a", "b", "c"] {
        let sent = server.run(&["send", "jobs", body, "--json"]).json();
        ids.push(sent["id"].as_str().unwrap().to_owned());
    }
    let (file, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = file.path().join("store.jsonl");
    let path = path.to_str().unwrap();

    let refused = server.run(&["export", "--to", path]).failed(1);
    assert!(refused.contains("is not paused") && refused.contains("pause it first"), "{refused}");
    let report = server.run(&["export", "--pause", "--to", path, "--json"]).json();
    assert_eq!((&report["queues"], &report["items"]), (&Value::from(4), &Value::from(3)), "{report}");
    assert!(server.run(&["export", "--to", path]).failed(1).contains("exists"), "no file is overwritten");
    let printed = server.run(&["export", "--queue", "jobs-dead", "--queue", "jobs"]).ok();
    assert_eq!(printed.lines().count(), 1 + 2 + 3 + 1, "header, queues, messages, end: {printed}");

    let target = "embedded:./other";
    let added = run(&folder, &["import", path, "--endpoint", target, "--json"]).json();
    assert_eq!((&added["added"], &added["refused"]), (&Value::from(3), &Value::from(0)), "{added}");
    let again = run(&folder, &["import", path, "--endpoint", target, "--json"]).json();
    assert_eq!((&again["added"], &again["already_there"]), (&Value::from(0), &Value::from(3)), "{again}");
    let shown = run(&folder, &["queue", "show", "jobs", "--endpoint", target, "--json"]).json();
    assert_eq!(shown["config"]["dead_letter"]["queue"], "jobs-dead", "{shown}");
    assert!(shown["paused"].is_null(), "it was paused only for the export");
    let got = received(&folder, target, "jobs");
    let expected: Vec<_> = ids.into_iter().zip(["a", "b", "c"].map(str::to_owned)).collect();
    assert_eq!(got, expected, "messages keep their ids and their order");
}

#[test]
fn a_file_that_is_cut_off_or_no_export_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    server.run(&["send", "jobs", "a"]).ok();
    let whole = server.run(&["export", "--pause"]).ok();
    let cut = whole.lines().take(3).collect::<Vec<_>>().join("\n") + "\n";
    for (content, expected) in [
        (cut.as_str(), "part of it is missing"),
        ("{\"queue\":1}\n", "line 1: "),
        ("{\"end\":{\"items\":0}}\n", "this is no export"),
        ("", "part of it is missing"),
        (&whole.replace("\"version\":1", "\"version\":2"), "another version"),
    ] {
        std::fs::write(folder.path().join("file"), content).unwrap();
        let refused = run(&folder, &["import", "file", "--endpoint", "embedded:./other"]).failed(1);
        assert!(refused.contains(expected), "{refused}");
    }
    // What was in the part that came is there; the whole adds the rest.
    std::fs::write(folder.path().join("file"), whole).unwrap();
    let report = run(&folder, &["import", "file", "--endpoint", "embedded:./other", "--json"]).json();
    assert_eq!(report["already_there"].as_u64().unwrap() + report["added"].as_u64().unwrap(), 1, "{report}");
}
