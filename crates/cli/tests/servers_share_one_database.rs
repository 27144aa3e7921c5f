//! The real binary on PostgreSQL: several servers, workers and proxies share one database, and outlive its restart.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::postgres::database;
use common::proxied::{post, request, two_proxies_execute_once};
use common::{Server, hapax, run};
use hapax_faults::{PostgresServer, ROLE_WITH_PASSWORD};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

on_postgres![
    two_servers_serve_the_same_queues,
    two_servers_tell_one_story,
    a_killed_server_loses_nothing,
    a_restart_of_the_database_loses_nothing_that_was_accepted,
    two_proxies_with_one_ledger_execute_once,
    commands_work_on_the_database_itself,
    the_schema_is_made_by_migrate_only,
    a_role_with_few_privileges_is_enough,
    passwords_come_from_the_environment_or_a_file_and_are_never_printed,
    what_only_the_embedded_store_has_is_refused,
];

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(3);

fn serve(url: &str) -> Server {
    Server::start_in(tempdir().unwrap(), &["--store", url, "--migrate"])
}

/// The first queue and what is in it, as a server shows it. Counters since the start are each server's own.
fn queue(server: &Server) -> Value {
    without_totals(server.run(&["queues", "--json"]).json())
}

fn without_totals(mut queues: Value) -> Value {
    let mut queue = queues[0].take();
    queue["stats"].as_object_mut().unwrap().remove("totals");
    queue
}

fn bodies(received: &Value) -> Vec<String> {
    received.as_array().unwrap().iter().map(|item| item["body"].as_str().unwrap().to_owned()).collect()
}

fn two_servers_serve_the_same_queues(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let (mut one, two) = (serve(&url), serve(&url));
    one.run(&["send", "--create", "jobs", "a"]).ok();
    two.run(&["send", "jobs", "b"]).ok();
    assert_eq!(queue(&one), queue(&two));
    assert_eq!(queue(&one)["stats"]["ready"], 2, "{}", queue(&one));
    let received = two.run(&["receive", "jobs", "--max", "2", "--ack", "--json"]).json();
    assert_eq!(bodies(&received).into_iter().collect::<BTreeSet<_>>(), ["a".into(), "b".into()].into());
    assert_eq!(queue(&one)["stats"]["ready"], 0, "{}", queue(&one));

    // A long poll at one server gets what arrives through the other.
    let (folder, endpoint) = (tempdir().unwrap(), &one.endpoint);
    let args = ["receive", "jobs", "--wait", "20s", "--ack", "--json", "--endpoint", endpoint];
    let poll = std::thread::scope(|scope| {
        let poll = scope.spawn(|| run(&folder, &args));
        two.run(&["send", "jobs", "c"]).ok();
        poll.join().unwrap()
    });
    assert_eq!(bodies(&poll.json()), ["c"]);
    one.signal(Signal::TERM);
    assert_eq!(one.wait().code(), Some(0), "a shutdown in good order");
}

fn two_servers_tell_one_story(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    common::told::servers_tell_one_story(|| serve(&url));
}

fn a_killed_server_loses_nothing(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let (mut one, two) = (serve(&url), serve(&url));
    one.run(&["send", "--create", "jobs", "a"]).ok();
    one.run(&["send", "jobs", "b"]).ok();
    let held = one.run(&["receive", "jobs", "--lease", "1s", "--json"]).json();
    one.signal(Signal::KILL);
    one.wait();
    two.run(&["send", "jobs", "c"]).ok();
    let mut seen = BTreeSet::new();
    let end = Instant::now() + PATIENCE;
    while seen.len() < 3 {
        let received = two.run(&["receive", "jobs", "--max", "3", "--wait", "1s", "--ack", "--json"]).json();
        seen.extend(bodies(&received));
        assert!(Instant::now() < end, "only {seen:?} came; {held} was held by the killed server's client");
    }
    assert_eq!(queue(&two)["stats"]["ready"], 0);
}

/// Sends with SQS's query protocol; the status of the answer.
fn send_status(address: &str, body: &str) -> u16 {
    let url = format!("http://{address}/000000000000/jobs");
    let line = format!("GET /?Action=SendMessage&QueueUrl={url}&MessageBody={body}");
    let answer = request(address, &line, &format!("host: {address}"));
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{answer}"))
}

fn a_restart_of_the_database_loses_nothing_that_was_accepted(_: &'static PostgresServer) {
    let postgres = PostgresServer::start(&[]).unwrap();
    let (url, _) = database(&postgres);
    // Its log is not read meanwhile, and must not fill the pipe.
    let args = ["--store", &url, "--migrate", "--log-level", "error"];
    let mut server = Server::start_in(tempdir().unwrap(), &args);
    server.run(&["queue", "create", "jobs"]).ok();
    let (stop, address) = (AtomicBool::new(false), server.address());
    let accepted = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut accepted = BTreeSet::new();
            for number in 0.. {
                let body = format!("m{number}");
                match send_status(address, &body) {
                    200 => drop(accepted.insert(body)),
                    // 500: the connection broke during the commit, so the outcome is unknown.
                    500 | 503 => {}
                    other => panic!("a database that is down is answered with 503, not {other}"),
                }
                if stop.load(Ordering::SeqCst) && !accepted.is_empty() {
                    return accepted;
                }
            }
            unreachable!()
        });
        postgres.stop("QUIT");
        // A connection that broke is noticed by its next use; of a send that was on its way the outcome is unknown.
        let end = Instant::now() + PATIENCE;
        while send_status(address, "while-down") != 503 {
            assert!(Instant::now() < end, "a database that is down is not answered with 503");
        }
        let native = request(address, "GET /v1/queues/jobs", &format!("host: {address}"));
        assert!(native.starts_with("http/1.1 503") || native.starts_with("HTTP/1.1 503"), "{native}");
        assert!(native.contains("unavailable"), "{native}");
        postgres.run().unwrap();
        let end = Instant::now() + PATIENCE;
        while send_status(address, "after") != 200 {
            assert!(Instant::now() < end, "the server did not come back by itself");
        }
        stop.store(true, Ordering::SeqCst);
        sender.join().unwrap()
    });
    assert!(server.is_running());
    let mut seen = BTreeSet::new();
    let end = Instant::now() + PATIENCE;
    while !accepted.is_subset(&seen) {
        let missing: Vec<_> = accepted.difference(&seen).collect();
        assert!(Instant::now() < end, "accepted, but lost: {missing:?}");
        // Another connection of the server may have been cut by the restart as well: then the call is repeated.
        let received = server.run(&["receive", "jobs", "--max", "1000", "--wait", "1s", "--ack", "--json"]);
        match received.code {
            Some(0) => seen.extend(bodies(&received.json())),
            _ => assert!(received.stderr.contains("unavailable"), "{received:?}"),
        }
    }
}

fn two_proxies_with_one_ledger_execute_once(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let folder = tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    let (two, _) = two_proxies_execute_once(&folder, &url);
    assert!(post(&two.address, "k").contains("idempotent-replayed: true"));
}

fn commands_work_on_the_database_itself(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let folder = tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    let on = |args: &[&str]| run(&folder, &[args, &["--endpoint", &url]].concat());
    on(&["send", "--create", "jobs", "a"]).ok();
    assert_eq!(on(&["queues", "--json"]).json()[0]["stats"]["ready"], 1);
    let worked = run(&folder, &["work", "--endpoint", &url, "jobs", "--until-empty", "--", "cat"]);
    assert_eq!(worked.code, Some(0), "{worked:?}");
    assert_eq!(on(&["queues", "--json"]).json()[0]["stats"]["ready"], 0);
    on(&["queue", "pause", "jobs"]).ok();
    on(&["queue", "resume", "jobs"]).ok();
    assert!(on(&["backup", "x.db"]).failed(1).contains("pg_dump"));
    assert!(on(&["resume"]).failed(1).contains("nothing to resume"));
}

fn the_schema_is_made_by_migrate_only(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let folder = tempdir().unwrap();
    let has_schema = || postgres.sql(&name, "SELECT to_regnamespace('hapax') IS NOT NULL").unwrap();
    let refused = run(&folder, &["serve", "--listen", "127.0.0.1:0", "--store", &url]).failed(1);
    assert!(refused.contains("hapax migrate"), "{refused}");
    let shown = run(&folder, &["migrate", "--store", &url, "--dry-run", "--json"]).json();
    assert!(shown["from"] == 0 && !shown["applied"].as_array().unwrap().is_empty(), "{shown}");
    assert_eq!(has_schema(), "f", "nothing was changed so far");
    let done = run(&folder, &["migrate", "--store", &url, "--json"]).json();
    assert_eq!((&done["applied"], &done["dry_run"]), (&shown["applied"], &Value::Bool(false)));
    assert_eq!(has_schema(), "t");
    let again = run(&folder, &["migrate", "--store", &url]).ok();
    assert!(again.contains("nothing to do"), "{again}");
    let wrong = run(&folder, &["migrate", "--store", "embedded:./data"]).failed(2);
    assert!(wrong.contains("migrates itself"), "{wrong}");
}

/// The statements of docs/postgres.md.
fn grant(postgres: &PostgresServer, database: &str, role: &str) {
    const DOCS: &str = include_str!("../../../docs/postgres.md");
    let (_, from) = DOCS.split_once("<!-- privileges -->\n```sql\n").unwrap();
    let (statements, _) = from.split_once("```").unwrap();
    let own = statements.replace("DATABASE shop", &format!("DATABASE {database}")).replace("app", role);
    postgres.sql(database, &own).unwrap();
}

fn a_role_with_few_privileges_is_enough(postgres: &'static PostgresServer) {
    let (url, name) = database(postgres);
    let folder = tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    let role = format!("role_{name}");
    postgres.sql(&name, &format!("CREATE ROLE {role} LOGIN")).unwrap();
    grant(postgres, &name, &role);
    let url = url.replace("postgres@", &format!("{role}@"));
    let server = Server::start_in(folder, &["--store", &url]);
    server.run(&["send", "--create", "jobs", "a"]).ok();
    let received = server.run(&["receive", "jobs", "--ack", "--json"]).json();
    assert_eq!(bodies(&received), ["a"]);
    server.run(&["queue", "purge", "jobs", "--yes"]).ok();
    server.run(&["queue", "delete", "jobs", "--yes"]).ok();
    let findings = server.run(&["doctor", "--json"]).stdout;
    assert!(!findings.contains("privilege-missing"), "{findings}");
    let denied = run(&server.folder, &["migrate", "--store", &url]).failed(1);
    assert!(denied.contains("lacks a privilege"), "{denied}");
}

fn passwords_come_from_the_environment_or_a_file_and_are_never_printed(postgres: &'static PostgresServer) {
    const SECRET: &str = "hunter2";
    let (url, name) = database(postgres);
    let folder = tempdir().unwrap();
    let sql = format!("CREATE ROLE {ROLE_WITH_PASSWORD} SUPERUSER LOGIN PASSWORD '{SECRET}'");
    postgres.sql(&name, &sql).unwrap();
    let url = url.replace("postgres@", &format!("{ROLE_WITH_PASSWORD}@"));
    let with_password = url.replace('@', &format!(":{SECRET}@"));
    let migrate = |url: &str| hapax(&folder, &["migrate", "--store", url]);
    let by_environment = migrate(&url).env("PGPASSWORD", SECRET).output().unwrap();
    assert!(by_environment.status.success(), "{by_environment:?}");
    let file = folder.path().join("password");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let by_file = format!("{url}?hapax_password_file={}", file.display());
    assert!(migrate(&by_file).output().unwrap().status.success());
    let server = Server::start_in(
        tempdir().unwrap(),
        &["--store", &url, "--postgres-password-file", &file.display().to_string()],
    );
    server.run(&["send", "--create", "jobs", "a"]).ok();

    let wrong = migrate(&url.replace('@', ":hunter22@")).output().unwrap();
    assert!(!wrong.status.success());
    let elsewhere = with_password.replace("127.0.0.1:", "127.0.0.1:1");
    let listen =
        format!("{with_password}?hapax_listen_url={}", with_password.replace(':', "%3A").replace('@', "%40"));
    for args in [
        &["serve", "--print-config", "--store", &with_password][..],
        &["serve", "--print-config", "--store", &listen],
        &["serve", "--print-config", "--store", &url, "--postgres-listen-url", &with_password],
        &["proxy", "--print-config", "--upstream", "http://x", "--ledger", &with_password],
        &["migrate", "--store", &with_password],
        &["migrate", "--store", &elsewhere],
        &["queues", "--endpoint", &elsewhere],
        &["doctor", "--store", &with_password],
        &["doctor", "--store", &elsewhere],
        &["restore", "x", "--store", &with_password],
        &["serve", "--store", &elsewhere, "--listen", "127.0.0.1:0"],
        &["serve", "--store", &with_password.replace("postgres:", "mysql:")],
        &["serve", "--help"],
    ] {
        let output = hapax(&folder, args).env("HAPAX_STORE", &with_password).output().unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!said.contains(SECRET), "{args:?} shows the password: {said}");
    }
    let mut banner = Server::start_in(tempdir().unwrap(), &["--store", &with_password]);
    let place = banner.line("  Data  ");
    assert!(place.contains(&name) && !place.contains(SECRET), "{place}");
    banner.signal(Signal::TERM);
    let rest = banner.rest().join("\n") + &banner.log();
    assert!(!rest.contains(SECRET), "{rest}");
    // What is printed can be used as the configuration, with the password from elsewhere.
    let printed = run(&folder, &["serve", "--print-config", "--store", &listen, "--migrate"]).ok();
    std::fs::write(folder.path().join("hapax.toml"), &printed).unwrap();
    assert_eq!(run(&folder, &["serve", "--print-config", "--config", "hapax.toml"]).ok(), printed);
}

fn what_only_the_embedded_store_has_is_refused(postgres: &'static PostgresServer) {
    let (url, _) = database(postgres);
    let folder = tempdir().unwrap();
    let refused = |args: &[&str], says: &str| {
        let done = run(&folder, &[&["serve", "--listen", "127.0.0.1:0"], args].concat());
        assert!(done.code == Some(1) && done.stderr.contains(says), "{args:?}: {done:?}");
    };
    refused(
        &["--store", &url, "--store-messages-max", "7"],
        "store.embedded.messages_max: only the embedded store",
    );
    refused(&["--store", &url, "--store-backup-folder", "x"], "store.embedded.backup_folder");
    refused(&["--migrate"], "store.postgres.migrate: only the PostgreSQL store");
    refused(
        &["--store", "http://127.0.0.1:1"],
        "names no store; use embedded:PATH, postgres://HOST/DATABASE or redis://HOST",
    );
    refused(&["--store", &url, "--postgres-connections-max", "1"], "connections_max");
    let server = Server::start_in(
        tempdir().unwrap(),
        &["--store", &url, "--migrate", "--store-in-doubt-per-scope-max", "3"],
    );
    assert!(
        server.run(&["backup", "x.db"]).stderr.contains("tools"),
        "{:?}",
        server.run(&["backup", "x.db"])
    );
    assert!(server.run(&["resume"]).stderr.starts_with("error: "));
    let restore = run(&folder, &["restore", "x", "--store", &url]).failed(2);
    assert!(restore.contains("only an embedded:PATH can be restored to"), "{restore}");
}
