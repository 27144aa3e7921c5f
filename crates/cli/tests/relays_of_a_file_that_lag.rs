//! `hapax doctor --outbox`: an outbox in a SQLite file whose messages are not published.

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, Server, hapax, run};
use hapax::SqliteOutbox;
use hapax::core::outbox::NewOutboxMessage;
use hapax_faults::Process;

const OUTBOX: &str = "sqlite:./shop.db";

/// What is said about relays that lag.
fn found(server: &Server) -> Vec<String> {
    let report = server.run(&["doctor", "--outbox", OUTBOX, "--json"]).json();
    let findings = report["store"]["findings"].as_array().unwrap().clone();
    let lags = findings.iter().filter(|finding| finding["code"] == "relay-lags");
    lags.map(|finding| finding["message"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_file_whose_messages_wait_is_told() {
    let server = Server::start();
    let mut db = rusqlite::Connection::open(server.folder.path().join("shop.db")).unwrap();
    db.busy_timeout(PATIENCE).unwrap();
    db.pragma_update(None, "journal_mode", "wal").unwrap();
    SqliteOutbox::create_tables(&db).unwrap();
    let mut enqueue = || {
        let tx = db.transaction().unwrap();
        SqliteOutbox::enqueue(&tx, &NewOutboxMessage::new("orders.placed", "seven").key("order-7")).unwrap();
        tx.commit().unwrap();
    };
    enqueue();
    // A route is known once a relay of it has run.
    let mut command = hapax(&server.folder, &["relay", "--from", OUTBOX]);
    let to = ["--to", &server.endpoint, "--queue", "orders"];
    let mut relay = Process::start(command.args(to)).unwrap();
    let start = Instant::now();
    loop {
        let routes = run(&server.folder, &["outbox", "status", "--from", OUTBOX, "--json"]).json();
        if routes[0]["lag"] == 0 {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the relay publishes nothing: {routes}");
        std::thread::sleep(Duration::from_millis(50));
    }
    relay.kill();
    enqueue();
    assert_eq!(found(&server), Vec::<String>::new(), "it has just been enqueued");
    // It has waited for two minutes.
    db.execute("UPDATE hapax_outbox SET enqueued_ms = enqueued_ms - 120000", []).unwrap();
    let told = found(&server);
    assert!(
        matches!(&told[..], [one] if one.contains("by route default: up to 1 are not published")),
        "{told:?}"
    );
    let lines = server.run(&["doctor", "--outbox", OUTBOX]).ok();
    assert!(
        lines.contains("\twarning\trelay-lags\t") && lines.contains("docs/errors/relay-lags.md"),
        "{lines}"
    );
}
