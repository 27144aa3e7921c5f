//! `hapax doctor` on PostgreSQL, directly and through a server: settings, sessions, tables and privileges.

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::postgres::database;
use common::{Done, PATIENCE, Server, hapax, run};
use hapax_faults::{PgBouncer, PostgresServer, Process};
use serde_json::Value;
use tempfile::tempdir;

on_postgres![
    the_session_that_holds_xmin_is_named,
    a_prepared_transaction_and_a_replication_slot_that_hold_xmin_are_named,
    tables_settings_privileges_and_clocks_are_examined,
    an_outbox_that_is_not_published_is_reported,
    dead_rows_that_stay_are_counted,
    standbys_that_nothing_waits_for_are_counted,
    a_pooler_without_a_way_to_listen_is_told,
    a_commit_that_does_not_wait_is_made_to_wait,
    commits_still_wait_after_the_setting_was_changed,
    a_database_that_says_it_is_older_is_refused,
    a_server_that_does_not_sync_is_refused,
];

fn serve(url: &str) -> Server {
    Server::start_in(tempdir().unwrap(), &["--store", url, "--migrate"])
}

/// The report of the store itself and that of its server.
fn reports(server: &Server, url: &str) -> [Value; 2] {
    let parse =
        |done: Done| serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    let direct = parse(run(&server.folder, &["doctor", "--json", "--store", url]));
    [direct, parse(server.run(&["doctor", "--json"]))]
}

fn found(report: &Value, code: &str) -> Vec<String> {
    let findings = report["store"]["findings"].as_array().unwrap();
    let of_code = findings.iter().filter(|finding| finding["code"] == code);
    of_code.map(|finding| format!("{} {}", finding["message"], finding["remedy"])).collect()
}

fn the_session_that_holds_xmin_is_named(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let server = serve(&url);
    for report in reports(&server, &url) {
        assert!(found(&report, "xmin-held").is_empty(), "{report}");
    }
    let mut holder = postgres.session(&name).unwrap();
    let mut input = holder.stdin.take().unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    writeln!(
        input,
        "SET application_name = 'nightly-report'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_backend_pid();"
    )
    .unwrap();
    let pid = lines.next().unwrap().unwrap();
    postgres.sql(&name, BURN).unwrap();
    for report in reports(&server, &url) {
        let found = found(&report, "xmin-held");
        let of_holder: Vec<_> =
            found.iter().filter(|text| text.contains(&format!("session {pid} of "))).collect();
        assert_eq!(of_holder.len(), 1, "{report}");
        for part in [
            "of postgres",
            "nightly-report",
            "127.0.0.1",
            "since 20",
            &format!("pg_terminate_backend({pid})"),
        ] {
            assert!(of_holder[0].contains(part), "{part}: {found:?}");
        }
    }
    drop(input);
    holder.wait().unwrap();
    for report in reports(&server, &url) {
        let found = found(&report, "xmin-held");
        assert!(!found.iter().any(|text| text.contains(&format!("session {pid} of "))), "{report}");
    }
}

/// More transactions than may begin while something holds `xmin`. Each block is one of its own to the database's counter.
const BURN: &str = "CREATE TABLE burn (x int); DO $$ BEGIN FOR i IN 1..10001 LOOP
    BEGIN INSERT INTO burn VALUES (i); EXCEPTION WHEN OTHERS THEN RAISE; END; END LOOP; END $$";

/// What a standby with hot_standby_feedback says of itself, on a slot that is made for it: it holds this transaction. The slot
/// remembers it when the standby is gone. In the protocol of replication, since no program of PostgreSQL says it alone.
fn standby_that_holds(postgres: &PostgresServer, slot: &str, xid: u32) {
    postgres.sql("postgres", &format!("SELECT pg_create_physical_replication_slot('{slot}', true)")).unwrap();
    let end = postgres.sql("postgres", "SELECT pg_current_wal_flush_lsn()").unwrap();
    let mut stream = TcpStream::connect(postgres.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let framed =
        |kind: &[u8], content: &[u8]| [kind, &(content.len() as u32 + 4).to_be_bytes(), content].concat();
    let version = 196_608u32.to_be_bytes();
    let start = [&version[..], b"user\0postgres\0replication\0true\0\0"].concat();
    stream.write_all(&framed(b"", &start)).unwrap();
    wait_for_message(&mut stream, b'Z');
    let follow = format!("START_REPLICATION SLOT {slot} PHYSICAL {end}\0");
    stream.write_all(&framed(b"Q", follow.as_bytes())).unwrap();
    wait_for_message(&mut stream, b'W');
    // A time, the transaction with its epoch, and the same for the catalogues: none.
    let feedback = [&b"h"[..], &[0; 8], &xid.to_be_bytes(), &[0; 4], &[0; 8]].concat();
    stream.write_all(&framed(b"d", &feedback)).unwrap();
    let wait = |what: &str| {
        let sql = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}' AND {what}");
        let begun = Instant::now();
        while postgres.sql("postgres", &sql).unwrap() != "1" {
            assert!(begun.elapsed() < PATIENCE, "{slot}: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("xmin IS NOT NULL");
    drop(stream);
    wait("NOT active");
}

fn wait_for_message(stream: &mut TcpStream, kind: u8) {
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes(head[1..].try_into().unwrap());
        let mut content = vec![0; length as usize - 4];
        stream.read_exact(&mut content).unwrap();
        assert_ne!(head[0], b'E', "{}", String::from_utf8_lossy(&content));
        if head[0] == kind {
            return;
        }
    }
}

fn a_prepared_transaction_and_a_replication_slot_that_hold_xmin_are_named(_: &'static PostgresServer) {
    let postgres = PostgresServer::start(&["max_prepared_transactions=2"]).unwrap();
    let (url, name) = database(&postgres);
    let server = serve(&url);
    for report in reports(&server, &url) {
        assert!(found(&report, "xmin-held").is_empty(), "{report}");
    }
    let prepare = "BEGIN; CREATE TABLE booked (x int); PREPARE TRANSACTION 'booking-7'";
    let mut session = postgres.session(&name).unwrap();
    writeln!(session.stdin.take().unwrap(), "{prepare};").unwrap();
    assert!(session.wait().unwrap().success());
    let xid = postgres.sql(&name, "SELECT transaction FROM pg_prepared_xacts").unwrap().parse().unwrap();
    standby_that_holds(&postgres, "standby_7", xid);
    postgres.sql(&name, BURN).unwrap();
    let parts = [
        ["the prepared transaction booking-7 of postgres", "since 20", "ROLLBACK PREPARED 'booking-7'"],
        [
            "the replication slot standby_7 (not in use)",
            "transactions back",
            "pg_drop_replication_slot('standby_7')",
        ],
    ];
    for report in wait_for(&server, &url, "xmin-held", 2) {
        let found = found(&report, "xmin-held");
        for parts in parts {
            let says = |text: &&String| parts.iter().all(|part| text.contains(part));
            assert_eq!(found.iter().filter(says).count(), 1, "{parts:?}: {report}");
        }
    }
    // What the remedies say helps.
    postgres.sql(&name, "ROLLBACK PREPARED 'booking-7'").unwrap();
    for report in wait_for(&server, &url, "xmin-held", 1) {
        assert!(found(&report, "xmin-held")[0].contains("standby_7"), "{report}");
    }
    postgres.sql(&name, "SELECT pg_drop_replication_slot('standby_7')").unwrap();
    wait_for(&server, &url, "xmin-held", 0);
}

/// `hapax doctor`, directly and through the server, and the server's own advice say it.
fn an_outbox_that_is_not_published_is_reported(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let server = serve(&url);
    // A route is known once a relay of it has run.
    let to = ["--to", &server.endpoint, "--queue", "orders"];
    let mut command = hapax(&server.folder, &["relay", "--from", &url]);
    let mut relay = Process::start(command.args(to)).unwrap();
    let enqueue = "SELECT hapax.enqueue('orders.placed', 'order-7', 'seven'::text)";
    postgres.sql(&name, enqueue).unwrap();
    // The message is published, and its position recorded.
    let published = "SELECT count(*) FROM hapax.outbox_status() WHERE lag = 0";
    let start = Instant::now();
    while postgres.sql(&name, published).unwrap().trim() != "1" {
        assert!(start.elapsed() < PATIENCE, "the relay publishes nothing");
        std::thread::sleep(Duration::from_millis(50));
    }
    relay.kill();
    postgres.sql(&name, enqueue).unwrap();
    for report in reports(&server, &url) {
        assert!(found(&report, "relay-lags").is_empty(), "{report}");
    }
    // It has waited for two minutes.
    let older = "DO $$ BEGIN FOR i IN 0..63 LOOP FOR half IN 0..1 LOOP
        EXECUTE format('UPDATE hapax.outbox_%s_%s SET enqueued_us = enqueued_us - 120000000', lpad(i::text, 2, '0'), half);
        END LOOP; END LOOP; END $$";
    postgres.sql(&name, older).unwrap();
    for report in reports(&server, &url) {
        let found = found(&report, "relay-lags");
        assert!(
            matches!(&found[..], [one] if one.contains("route default: up to 1 are not published")),
            "{report}"
        );
    }
    let top = server.run(&["top", "--once"]).ok();
    assert!(top.contains("relay-lags"), "{top}");
}

/// Waits until both reports say this often that something was found.
fn wait_for(server: &Server, url: &str, code: &str, count: usize) -> [Value; 2] {
    let start = Instant::now();
    loop {
        let reports = reports(server, url);
        if reports.iter().all(|report| found(report, code).len() == count) {
            return reports;
        }
        assert!(start.elapsed() < PATIENCE, "{code}, {count} times: {reports:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn dead_rows_that_stay_are_counted(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let server = serve(&url);
    let die = |count: u32| {
        let sql = format!(
            "ALTER TABLE hapax.audit SET (autovacuum_enabled = off);
             INSERT INTO hapax.audit (at_ms, by, what) SELECT 1, 'a', 'b' FROM generate_series(1, {count});
             DELETE FROM hapax.audit"
        );
        postgres.sql(&name, &sql).unwrap();
    };
    // The counts of a session are known soon after its end.
    let dead = "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = 'hapax.audit'::regclass";
    let start = Instant::now();
    die(100_000);
    while postgres.sql(&name, dead).unwrap().trim() != "100000" {
        assert!(start.elapsed() < PATIENCE, "the dead rows are not counted");
        std::thread::sleep(Duration::from_millis(50));
    }
    wait_for(&server, &url, "dead-rows", 0);
    die(1);
    for report in wait_for(&server, &url, "dead-rows", 1) {
        assert!(found(&report, "dead-rows")[0].contains("audit (100001 dead, 0 live)"), "{report}");
    }
    // What the remedy says helps.
    postgres.sql(&name, "VACUUM hapax.audit").unwrap();
    wait_for(&server, &url, "dead-rows", 0);
}

fn standbys_that_nothing_waits_for_are_counted(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let server = serve(&url);
    wait_for(&server, &url, "replication-asynchronous", 0);
    // A program that follows the log, as a standby does.
    let folder = tempdir().unwrap();
    let address = postgres.address();
    let mut follow = std::process::Command::new(PostgresServer::programs().join("pg_receivewal"));
    follow.args(["--no-loop", "--username=postgres", "--host", &address.ip().to_string(), "--port"]);
    follow.arg(address.port().to_string()).arg("--directory").arg(folder.path());
    let mut follows = Process::start(&mut follow).unwrap();
    for report in wait_for(&server, &url, "replication-asynchronous", 1) {
        let found = found(&report, "replication-asynchronous");
        assert!(found[0].contains("1 standbys replicate asynchronously"), "{report}");
    }
    follows.kill();
    wait_for(&server, &url, "replication-asynchronous", 0);
}

fn a_pooler_without_a_way_to_listen_is_told(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    drop(serve(&url));
    let pooler = PgBouncer::start(postgres.address(), 3).unwrap();
    let through = url.replace(&postgres.address().to_string(), &pooler.address().to_string());
    let polling = format!("{through}?hapax_pooler=true");
    let listening = format!("{polling}&hapax_listen_url={}", url.replace(':', "%3A").replace('/', "%2F"));
    for (url, count) in [(&polling, 1), (&listening, 0)] {
        let server = Server::start_in(tempdir().unwrap(), &["--store", url]);
        for report in reports(&server, url) {
            assert_eq!(found(&report, "pooler-without-listen").len(), count, "{report}");
        }
    }
}

fn a_server_that_does_not_sync_is_refused(_: &'static PostgresServer) {
    let unsynced = PostgresServer::start(&["fsync=off"]).unwrap();
    let (url, _) = database(&unsynced);
    let server = serve(&url);
    for report in reports(&server, &url) {
        assert!(
            matches!(&found(&report, "fsync-off")[..], [one] if one.contains("fsync is off")),
            "{report}"
        );
        assert!(report["refusals"].as_u64() >= Some(1), "{report}");
    }
}

/// The setting of the database is not that of the store's sessions: there is nothing to warn of.
fn a_commit_that_does_not_wait_is_made_to_wait(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    postgres.sql("postgres", &format!("ALTER DATABASE {name} SET synchronous_commit = off")).unwrap();
    let server = serve(&url);
    for report in reports(&server, &url) {
        assert_eq!(report["store"]["synchronous_commit"], "on", "{report}");
        assert!(found(&report, "commit-not-synchronous").is_empty(), "{report}");
    }
    let pooler = PgBouncer::start(postgres.address(), 3).unwrap();
    let through = url.replace(&postgres.address().to_string(), &pooler.address().to_string());
    let through = format!("{through}?hapax_pooler=true");
    let server = Server::start_in(tempdir().unwrap(), &["--store", &through]);
    for report in reports(&server, &through) {
        assert_eq!(report["store"]["synchronous_commit"], "on", "{report}");
        assert!(found(&report, "commit-not-synchronous").is_empty(), "{report}");
    }
}

/// As far as its answers tell it: no server of that version is started.
fn a_database_that_says_it_is_older_is_refused(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let server = serve(&url);
    for report in reports(&server, &url) {
        assert!(found(&report, "database-too-old").is_empty(), "{report}");
    }
    let older = format!(
        "CREATE SCHEMA older; CREATE FUNCTION older.current_setting(text) RETURNS text LANGUAGE sql AS
           'SELECT CASE $1 WHEN ''server_version_num'' THEN ''140012'' ELSE pg_catalog.current_setting($1) END';
         ALTER DATABASE {name} SET search_path = older, pg_catalog, public"
    );
    postgres.sql(&name, &older).unwrap();
    let server = Server::start_in(tempdir().unwrap(), &["--store", &url]);
    for report in reports(&server, &url) {
        let found = found(&report, "database-too-old");
        assert!(
            matches!(&found[..], [one] if one.contains("140012") && one.contains("use PostgreSQL 15 or later")),
            "{report}"
        );
        assert!(report["refusals"].as_u64() >= Some(1), "{report}");
    }
}

/// An operator turns it off in the server's configuration while the store has sessions.
fn commits_still_wait_after_the_setting_was_changed(_: &'static PostgresServer) {
    let postgres = PostgresServer::start(&[]).unwrap();
    let (url, name) = database(&postgres);
    let server = serve(&url);
    server.run(&["send", "--create", "jobs", "before"]).ok();
    postgres.sql("postgres", "ALTER SYSTEM SET synchronous_commit = off").unwrap();
    postgres.sql("postgres", "SELECT pg_reload_conf()").unwrap();
    let start = Instant::now();
    while postgres.sql(&name, "SHOW synchronous_commit").unwrap().trim() != "off" {
        assert!(start.elapsed() < PATIENCE, "the setting is not read");
        std::thread::sleep(Duration::from_millis(20));
    }
    for _ in 0..10 {
        for report in reports(&server, &url) {
            assert_eq!(report["store"]["synchronous_commit"], "on", "{report}");
            assert!(found(&report, "commit-not-synchronous").is_empty(), "{report}");
        }
    }
}

fn tables_settings_privileges_and_clocks_are_examined(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let server = serve(&url);
    for report in reports(&server, &url) {
        let facts = &report["store"];
        assert!(
            facts["database_version"].as_str().unwrap().starts_with(|c: char| c.is_ascii_digit()),
            "{report}"
        );
        assert!(facts["kind"] == "postgres" && facts["synchronous_commit"] == "on", "{report}");
        assert_eq!(facts.get("not_examined"), None, "{report}");
        let off = postgres.sql(&name, "SHOW fsync").unwrap() == "off";
        assert_eq!(found(&report, "fsync-off").len(), usize::from(off), "{report}");
        for code in ["table-unlogged", "privilege-missing", "database-clock-differs", "dead-rows"] {
            assert!(found(&report, code).is_empty(), "{code}: {report}");
        }
    }
    let role = format!("role_{name}");
    let spoil = format!(
        "ALTER TABLE hapax.audit SET UNLOGGED; CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA hapax TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA hapax TO {role};
         GRANT ALL ON ALL SEQUENCES IN SCHEMA hapax TO {role}; REVOKE DELETE ON hapax.audit FROM {role};
         REVOKE EXECUTE ON FUNCTION hapax.doubt_cleared FROM PUBLIC;
         CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
           'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 60000000'"
    );
    postgres.sql(&name, &spoil).unwrap();
    let url = url.replace("postgres@", &format!("{role}@"));
    let limited = Server::start_in(tempdir().unwrap(), &["--store", &url]);
    for report in reports(&limited, &url) {
        for (code, says) in [
            ("table-unlogged", "audit"),
            ("privilege-missing", "DELETE on audit, EXECUTE on doubt_cleared"),
            ("database-clock-differs", "ahead of"),
        ] {
            assert!(
                matches!(found(&report, code).as_slice(), [only] if only.contains(says)),
                "{code}: {report}"
            );
        }
        assert!(report["refusals"].as_u64().unwrap() >= 2, "{report}");
    }
}
