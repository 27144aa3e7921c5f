//! The payments example holds its promises: each bank sees the payments that its checks make possible, despite crashes.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use hapax_faults::{PostgresServer, RedisCluster, example_program};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() -> ExitCode {
    let on_postgres = |name, test: fn(PostgresServer)| {
        Trial::ignorable_test(name, move || match PostgresServer::start_in_memory() {
            Ok(server) => {
                test(server);
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    let trials = vec![
        Trial::test("each_bank_sees_what_its_checks_make_possible", || {
            each_bank_sees_what_its_checks_make_possible();
            Ok(())
        }),
        Trial::ignorable_test("each_bank_sees_the_same_while_a_master_is_killed", || {
            match Command::new("redis-server").arg("--version").output() {
                Ok(_) => {
                    each_bank_sees_the_same_while_a_master_is_killed();
                    Ok(Completion::Completed)
                }
                Err(why) => Ok(Completion::ignored_with(format!("needs Redis 7: {why}"))),
            }
        }),
        on_postgres("every_payment_once_while_the_server_is_killed", |server| {
            drop(server);
            every_payment_once_at_transactional(&["--postgres", "--seconds", "3"]);
        }),
        on_postgres("every_payment_once_while_sessions_are_ended", |server| {
            let url = server.url("postgres");
            every_payment_once_at_transactional(&["--postgres", &url, "--seconds", "3"]);
            let left =
                server.sql("postgres", "SELECT datname FROM pg_database WHERE datname ~ 'hapax'").unwrap();
            assert_eq!(left, "", "the example drops the database that it has made");
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A row of the table, by the number of its column.
fn row<'a>(table: &'a str, bank: &str) -> Vec<&'a str> {
    let row = table.lines().find(|line| line.split_whitespace().next() == Some(bank));
    row.unwrap_or_else(|| panic!("no row {bank}: {table}")).split_whitespace().collect()
}

/// Runs the example; returns what it printed.
fn run(args: &[&str]) -> String {
    let output = Command::new(example_program("payments")).args(args).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}\n{complaints}");
    assert!(!said.contains("FAILED"), "{said}");
    said
}

/// A short form of what takes a minute by default. The crashes that lose and repeat payments of the other two banks are at
/// named points, so that they happen however fast the machine is.
fn every_payment_once_at_transactional(args: &[&str]) {
    let said = run(args);
    // bank, payments, sends, runs, made, doubles, lost
    let numbers =
        |bank| -> Vec<u64> { row(&said, bank)[1..].iter().map(|cell| cell.parse().unwrap()).collect() };
    let [payments, sends, runs, made, doubles, lost] = numbers("transactional")[..] else { panic!("{said}") };
    assert_eq!((made, doubles, lost), (payments, 0, 0), "{said}");
    assert!(sends > payments, "duplicates were sent: {said}");
    assert!(runs > payments, "runs were begun and rolled back: {said}");
    let [payments, sends, _, _, doubles, lost] = numbers("ack-before")[..] else { panic!("{said}") };
    assert!(sends == payments && doubles == 0 && lost > 0, "{said}");
    let [payments, sends, _, _, doubles, lost] = numbers("ack-after")[..] else { panic!("{said}") };
    assert!(sends == payments && doubles > 0 && lost == 0, "{said}");
}

fn each_bank_sees_what_its_checks_make_possible() {
    check(&run(&[]));
}

/// The store is a Redis Cluster, one of whose masters is killed while workers are.
fn each_bank_sees_the_same_while_a_master_is_killed() {
    let settings = ["cluster-node-timeout 1500", "repl-diskless-sync-delay 0"];
    let cluster = RedisCluster::start(&settings).unwrap();
    let url = format!("{}?hapax_durability=replicated", cluster.url());
    let mut command = Command::new(example_program("payments"));
    command.args(["--store", &url]).stdout(Stdio::piped());
    let mut example = command.spawn().unwrap();
    let (mut said, mut is_killed) = (String::new(), false);
    for line in BufReader::new(example.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if line.contains("a worker died") && !is_killed {
            cluster.nodes[0].kill();
            is_killed = true;
            // Workers that start while a master has no replica are refused at this level, so the node has to return.
            let (start, patience) = (Instant::now(), Duration::from_mins(1));
            while !cluster.nodes[3].cli(&["ROLE"]).is_ok_and(|role| role.starts_with("master")) {
                assert!(start.elapsed() < patience, "the replica does not take over");
                std::thread::sleep(Duration::from_millis(50));
            }
            cluster.nodes[0].run().unwrap();
        }
        said.extend([&line, "\n"]);
    }
    assert!(example.wait().unwrap().success(), "{said}");
    assert!(is_killed, "{said}");
    check(&said);
}

fn check(said: &str) {
    // bank, on doubt, payments, sends, crashes after a payment, calls, takeovers, moved, doubles, in doubt, missing
    let number = |bank, column: usize| -> f64 { row(said, bank)[column].parse().unwrap() };
    for bank in ["keyed", "fenced", "trusting"] {
        assert!(number(bank, 3) > number(bank, 2), "duplicates were sent: {said}");
        assert!(number(bank, 4) >= 1.0, "a crash fell between payment and record: {said}");
    }
    assert_eq!((number("keyed", 7), number("keyed", 8), number("keyed", 10)), (40.0, 0.0, 0.0), "{said}");
    assert!(number("keyed", 5) > 40.0 && number("keyed", 6) > 0.0, "the bank was asked again: {said}");
    assert!(number("fenced", 8) >= 1.0 && number("fenced", 7) > 40.0, "{said}");
    assert_eq!((number("trusting", 6), number("trusting", 8)), (0.0, 0.0), "{said}");
    assert!(number("trusting", 9) >= 1.0 && number("trusting", 10) <= number("trusting", 9), "{said}");
    assert!(said.contains("hapax ledger resolve 'queue/trusting'"), "{said}");
}
