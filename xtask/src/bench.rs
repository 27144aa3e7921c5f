//! The benchmarks, by name.

use std::path::Path;
use std::process::ExitCode;

/// A benchmark: a `[[bench]]` target of a crate.
#[derive(Debug, PartialEq, Eq)]
pub struct Bench {
    /// Its name on the command line.
    pub name: &'static str,
    /// The package that holds it.
    pub package: &'static str,
    /// The bench target in that package.
    pub target: &'static str,
}

/// Every benchmark; add a new one here and to the help text.
pub const BENCHES: &[Bench] = &[
    Bench { name: "embedded", package: "hapax-embedded", target: "lifecycle" },
    Bench { name: "ledger", package: "hapax-embedded", target: "ledger" },
    Bench { name: "server", package: "hapax-server", target: "server" },
    Bench { name: "proxy", package: "hapax-http", target: "proxy" },
    Bench { name: "worker", package: "hapax-worker", target: "worker" },
    Bench { name: "postgres", package: "hapax-postgres", target: "postgres" },
    Bench { name: "redis", package: "hapax-redis", target: "redis" },
    Bench { name: "relay", package: "hapax-relay", target: "relay" },
    Bench { name: "kafka", package: "hapax-kafka", target: "kafka" },
    Bench { name: "tiers", package: "hapax", target: "tiers" },
];

/// Runs a benchmark without a time limit, because its duration is unknown, and in the foreground, so that an interrupt
/// reaches it.
pub fn run(root: &Path, bench: &Bench, passed_on: &[String]) -> ExitCode {
    let mut command = crate::cargo(root);
    command.args(["bench", "--package", bench.package, "--all-features", "--bench", bench.target, "--"]);
    match command.args(passed_on).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("error: the {} benchmark failed ({status})", bench.name);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: cargo could not be started: {error}");
            ExitCode::FAILURE
        }
    }
}
