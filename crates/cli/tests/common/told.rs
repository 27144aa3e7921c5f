//! What servers that share a store tell about messages that passed through several of them.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{PATIENCE, Server};

/// Asks until the answer has all of these words and none of `not`: a server writes what it saw within seconds.
fn tells(server: &Server, args: &[&str], words: &[&str], not: &[&str]) {
    let start = Instant::now();
    loop {
        let told = server.run(args);
        let text = format!("{}{}", told.stdout, told.stderr);
        let is_told = words.iter().all(|word| text.contains(word));
        if told.code == Some(0) && is_told && !not.iter().any(|word| text.contains(word)) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{args:?} has not {words:?}, or has {not:?}: {text}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Two servers deliver the same messages. Each tells the whole story, and so does a third one after the others are killed.
pub fn servers_tell_one_story(serve: impl Fn() -> Server) {
    let (mut one, mut two) = (serve(), serve());
    // A message that is retried, or whose lease ran out, is back at once.
    one.run(&["queue", "create", "jobs", "--lease", "5m", "--retry-base", "0s"]).ok();
    let sent = |body: &str| {
        let sent = one.run(&["send", "jobs", body, "--key", body, "--json"]).json();
        sent["id"].as_str().unwrap_or_else(|| panic!("{sent}")).to_owned()
    };
    let takes = |server: &Server, id: &str| {
        let got = server.run(&["receive", "jobs", "--wait", "20s", "--ack", "--json"]).json();
        assert_eq!(got[0]["id"], id, "{got}");
    };

    let expired = sent("expired");
    let held = one.run(&["receive", "jobs", "--lease", "1s", "--json"]).json();
    assert_eq!(held[0]["id"].as_str(), Some(expired.as_str()), "{held}");
    // It is held there: what the store knows of a message is gone with it.
    let again = two.run(&["receive", "jobs", "--wait", "20s", "--json"]).json();
    assert_eq!(again[0]["id"].as_str(), Some(expired.as_str()), "{again}");

    let returned = sent("returned");
    let worked = two.run(&["work", "jobs", "--once", "--", "sh", "-c", "echo busy >&2; exit 75"]);
    assert_eq!(worked.code, Some(0), "{worked:?}");
    takes(&one, &returned);

    let check = |server: &Server| {
        let elsewhere = "by another process";
        let done = "It is done: it was acked.";
        let ran_out =
            ["It was delivered 2 times", "ran out before it was settled", "A consumer holds it now"];
        let gave_back = ["It was delivered 2 times", "gave it back", "busy", done];
        // By the message's id and by its key.
        for name in [expired.as_str(), "expired"] {
            tells(server, &["why", "jobs", name], &ran_out, &[elsewhere, "gave it back"]);
        }
        for name in [returned.as_str(), "returned"] {
            tells(server, &["why", "jobs", name], &gave_back, &[elsewhere, "ran out"]);
        }
        let lines = ["delivery 1, attempt 1", "lease ran out", "delivery 2, attempt 2"];
        tells(server, &["message", "show", "jobs", &expired], &lines, &["delivered before"]);
        let lines = ["delivery 1, attempt 1", "returned", "busy", "delivery 2, attempt 2", "acked"];
        tells(server, &["message", "show", "jobs", &returned], &lines, &["delivered before"]);
    };
    check(&one);
    check(&two);
    for server in [&mut one, &mut two] {
        server.signal(Signal::KILL);
        server.wait();
    }
    check(&serve());
}
