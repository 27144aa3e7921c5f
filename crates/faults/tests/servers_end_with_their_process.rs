//! A private server ends when it is dropped, and when the process that started it is killed; a killed one starts again.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use hapax_faults::{PgBouncer, PostgresServer, Process, rerun_test};

const CHILD: &str = "HAPAX_TEST_CHILD";
const PATIENCE: Duration = Duration::from_mins(1);

/// PgBouncer before an address at which nothing listens: it accepts clients all the same.
fn pooler() -> PgBouncer {
    PgBouncer::start(SocketAddr::from(([127, 0, 0, 1], 1)), 1).unwrap()
}

/// Not a test of its own: the body of the child process.
#[test]
fn child_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let pooler = pooler();
    println!("\nlistens {}", pooler.address());
    // Until it is killed.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

#[test]
fn a_dropped_pooler_ends() {
    let pooler = pooler();
    let address = pooler.address();
    // Its shell is waited for, which ends after the program.
    drop(pooler);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn the_pooler_of_a_killed_process_ends() {
    let mut process = Process::start(rerun_test("child_process").env(CHILD, "1")).unwrap();
    let address: SocketAddr = process.wait_for_prefix("listens").trim().parse().unwrap();
    TcpStream::connect(address).unwrap();
    process.kill();
    let start = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(start.elapsed() < PATIENCE, "it still listens");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// PostgreSQL does not start while a process of the server before it holds its shared memory.
#[test]
fn a_killed_server_starts_again_when_its_last_process_has_ended() {
    let server = PostgresServer::start_in_memory().unwrap();
    server.sql("postgres", "CREATE TABLE kept (number int)").unwrap();
    let last = server
        .sql("postgres", "CHECKPOINT; SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'");
    let last = last.unwrap().lines().last().unwrap().to_owned();
    let signal = |signal: &str| {
        let sent = std::process::Command::new("kill").args([signal, &last]).status().unwrap();
        assert!(sent.success());
    };
    signal("-STOP");
    server.stop("KILL");
    std::thread::scope(|scope| {
        let started = scope.spawn(|| server.run());
        // However long this takes, the server starts in the end; the first attempt fails if this is long enough.
        std::thread::sleep(Duration::from_millis(500));
        signal("-KILL");
        started.join().unwrap().unwrap();
    });
    server.sql("postgres", "SELECT * FROM kept").unwrap();
}
