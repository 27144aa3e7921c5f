//! The command line of `cargo xtask`.

use crate::bench::{BENCHES, Bench};

/// Printed by `cargo xtask help`.
pub const HELP: &str = "\
The chores of the Hapax workspace.

Usage: cargo xtask <COMMAND>

Commands:
  test [--long] [FILTER]   Check format and lints, then build and run every test.
                           FILTER runs only the tests whose name contains it,
                           and the steps with clients and services likewise.
                           --long sets HAPAX_LONG=1: simulations run for longer.
  bench NAME [ARGS...]     Run a benchmark; ARGS are passed on to it.
                           NAME is one of: embedded, ledger, server, proxy, worker, postgres, redis, relay, kafka, tiers.
  help                     Print this.

Examples:
  cargo xtask test                   everything that must hold before a change is merged
  cargo xtask test lease_expiry      the tests with `lease_expiry` in their name
  cargo xtask test --long            the same tests, with long simulations
  cargo xtask test clients           real AWS clients against the real binary
  cargo xtask bench embedded         the embedded store beside a bare SQLite loop
  cargo xtask bench proxy            the idempotency proxy beside a plain hop
  cargo xtask bench relay            the outbox beside a plain transaction, the relay beside a poller

Environment:
  CI=true      anything skipped is a failure, except what needs a registry that is out of reach
  HAPAX_SEED   the seed that a failed simulation printed, to replay it

The last line of `test` is always `N passed, M failed, K skipped`.
Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
";

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Print the help.
    Help,
    /// Run the checks and tests.
    Test {
        /// Long simulations.
        long: bool,
        /// Only tests whose name contains this.
        filter: Option<String>,
    },
    /// Run one benchmark.
    Bench {
        /// The benchmark.
        bench: &'static Bench,
        /// Arguments for the benchmark itself.
        passed_on: Vec<String>,
    },
}

/// Parses the arguments after `cargo xtask`.
pub fn parse(args: &[String]) -> Result<Command, String> {
    let Some((command, rest)) = args.split_first() else { return Ok(Command::Help) };
    match command.as_str() {
        "help" | "--help" | "-h" => Ok(Command::Help),
        _ if matches!(rest.first().map(String::as_str), Some("--help" | "-h")) => Ok(Command::Help),
        "test" => parse_test(rest),
        "bench" => parse_bench(rest),
        other => Err(unknown("command", other, &["test", "bench", "help"])),
    }
}

fn parse_test(args: &[String]) -> Result<Command, String> {
    let (mut long, mut filter) = (false, None);
    for arg in args {
        match arg.as_str() {
            "--long" => long = true,
            flag if flag.starts_with('-') => return Err(unknown("option", flag, &["--long", "--help"])),
            _ if filter.is_some() => return Err(format!("`{arg}`: `test` takes one FILTER")),
            name => filter = Some(name.to_owned()),
        }
    }
    Ok(Command::Test { long, filter })
}

fn parse_bench(args: &[String]) -> Result<Command, String> {
    let names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
    let Some((name, rest)) = args.split_first() else {
        return Err(format!("`bench` needs a name: {}", names.join(", ")));
    };
    let bench =
        BENCHES.iter().find(|bench| bench.name == name).ok_or_else(|| unknown("benchmark", name, &names))?;
    // `cargo xtask bench embedded -- --quick` and the same without `--` are equivalent.
    let rest = rest.strip_prefix(&["--".to_owned()]).unwrap_or(rest);
    Ok(Command::Bench { bench, passed_on: rest.to_vec() })
}

fn unknown(kind: &str, given: &str, known: &[&str]) -> String {
    match nearest(given, known) {
        Some(name) => format!("unknown {kind} `{given}`; did you mean `{name}`?"),
        None => format!("unknown {kind} `{given}`; there are: {}", known.join(", ")),
    }
}

/// The known name nearest to `given`, if it is near enough to be a typing error.
fn nearest<'a>(given: &str, known: &[&'a str]) -> Option<&'a str> {
    let (distance, name) = known.iter().map(|name| (edits(given, name), *name)).min()?;
    (distance <= 2.max(name.len() / 3) && distance < name.len()).then_some(name)
}

/// The edit distance: insertions, deletions and replacements from `a` to `b`.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn test(long: bool, filter: Option<&str>) -> Command {
        Command::Test { long, filter: filter.map(str::to_owned) }
    }

    #[test]
    fn test_takes_a_flag_and_a_filter_in_any_order() {
        assert_eq!(parsed("test"), Ok(test(false, None)));
        assert_eq!(parsed("test --long"), Ok(test(true, None)));
        assert_eq!(parsed("test lease --long"), Ok(test(true, Some("lease"))));
        assert_eq!(parsed("test --long lease"), Ok(test(true, Some("lease"))));
    }

    #[test]
    fn test_refuses_what_it_does_not_know() {
        assert_eq!(parsed("test --lnog").unwrap_err(), "unknown option `--lnog`; did you mean `--long`?");
        assert_eq!(parsed("test a b").unwrap_err(), "`b`: `test` takes one FILTER");
    }

    #[test]
    fn bench_passes_the_rest_on() {
        for line in ["bench embedded --quick 5", "bench embedded -- --quick 5"] {
            let Ok(Command::Bench { bench, passed_on }) = parsed(line) else { panic!("{line}") };
            assert_eq!((bench.package, passed_on), ("hapax-embedded", vec!["--quick".into(), "5".into()]));
        }
    }

    #[test]
    fn an_unknown_benchmark_is_refused_with_the_known_names() {
        assert_eq!(
            parsed("bench").unwrap_err(),
            "`bench` needs a name: embedded, ledger, server, proxy, worker, postgres, redis, relay, kafka, tiers"
        );
        assert_eq!(
            parsed("bench zzz").unwrap_err(),
            "unknown benchmark `zzz`; there are: embedded, ledger, server, proxy, worker, postgres, redis, relay, kafka, tiers"
        );
        assert_eq!(parsed("bench sever").unwrap_err(), "unknown benchmark `sever`; did you mean `server`?");
    }

    #[test]
    fn an_unknown_command_is_refused_with_the_nearest() {
        assert_eq!(parsed("tset").unwrap_err(), "unknown command `tset`; did you mean `test`?");
        assert_eq!(parsed("deploy").unwrap_err(), "unknown command `deploy`; there are: test, bench, help");
    }

    #[test]
    fn help_is_given_when_asked_for_or_when_nothing_is() {
        for line in ["", "help", "--help", "-h", "test --help", "bench -h"] {
            assert_eq!(parsed(line), Ok(Command::Help), "{line}");
        }
    }

    #[test]
    fn the_help_names_every_benchmark() {
        let names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
        assert!(HELP.contains(&format!("NAME is one of: {}.", names.join(", "))));
    }
}
