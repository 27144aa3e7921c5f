//! Databases of a private PostgreSQL server, for tests that run the real binary on them.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use hapax_faults::PostgresServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The server of this test binary; `Err`: why there is none.
pub fn shared() -> Result<&'static PostgresServer, &'static str> {
    static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match std::env::var("HAPAX_TEST_POSTGRES") {
        Ok(url) => Ok(PostgresServer::given(&url)),
        Err(_) => PostgresServer::start_in_memory(),
    });
    server.as_ref().map_err(String::as_str)
}

/// A test by its name.
pub type Test = (&'static str, fn(&'static PostgresServer));

/// Runs tests by their names. Without PostgreSQL each is reported as ignored, with the reason.
pub fn main(tests: &[Test]) -> ExitCode {
    main_with(tests, Vec::new())
}

/// The same with more tests.
pub fn main_with(tests: &[Test], more: Vec<Trial>) -> ExitCode {
    let trial = |&(name, test): &Test| {
        Trial::ignorable_test(name, move || match shared() {
            Ok(server) => {
                test(server);
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    let tests = tests.iter().map(trial).chain(more).collect();
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// The URL of a new, empty database.
pub fn database(server: &PostgresServer) -> (String, String) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("cli_{}_{number}", std::process::id());
    server.sql("postgres", &format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")).unwrap();
    (server.url(&name), name)
}

/// Lists tests by their names.
#[macro_export]
macro_rules! on_postgres {
    ($($name:ident),+ $(,)?) => {
        fn main() -> std::process::ExitCode {
            common::postgres::main(&[$((stringify!($name), $name)),+])
        }
    };
}
