//! The command line.

use std::path::PathBuf;

use crate::contestant::Contestant;

/// The options of a run.
pub struct Args {
    /// Concurrent handlers.
    pub in_flight: Vec<usize>,
    pub rounds: usize,
    /// Messages of one turn at 64 in flight; turns at other numbers get fewer or more.
    pub messages: usize,
    /// Rounds of counting instructions; 0 skips it.
    pub counts: usize,
    pub markdown: bool,
    /// The folder of the stores: on a real disk, because on others syncs cost nothing.
    pub folder: PathBuf,
    /// Only handle this many messages of the store in `folder`, print their number and exit; the benchmark starts
    /// itself with this option.
    pub child: Option<(Contestant, usize)>,
}

const USAGE: &str =
    "use --quick, --markdown, --in-flight 1,64,1000, --rounds 11, --messages 6400, --counts 3";

impl Args {
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let default = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let mut parsed = Self {
            in_flight: vec![1, 64, 1000],
            rounds: 11,
            messages: 6_400,
            counts: 3,
            markdown: false,
            folder: std::env::var_os("TMPDIR").map_or(default, PathBuf::from),
            child: None,
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"));
            let number = |value: &str| {
                value.parse::<usize>().map_err(|error| format!("{arg} {value}: {error}; {USAGE}"))
            };
            match arg.as_str() {
                // Cargo passes it.
                "--bench" => {}
                "--quick" => {
                    parsed.in_flight = vec![1, 64];
                    parsed.rounds = 2;
                    parsed.messages = 640;
                    parsed.counts = 1;
                }
                "--markdown" => parsed.markdown = true,
                "--in-flight" => {
                    parsed.in_flight = value()?.split(',').map(number).collect::<Result<_, _>>()?;
                }
                "--rounds" => parsed.rounds = number(&value()?)?.max(1),
                "--messages" => parsed.messages = number(&value()?)?.max(64),
                "--counts" => parsed.counts = number(&value()?)?,
                "--folder" => parsed.folder = value()?.into(),
                "--child" => {
                    let name = value()?;
                    let contestant = Contestant::ALL.into_iter().find(|one| one.name() == name);
                    let contestant = contestant.ok_or_else(|| format!("{name:?} is no contestant"))?;
                    parsed.child = Some((contestant, number(&value()?)?));
                }
                _ => return Err(format!("unknown argument {arg}; {USAGE}")),
            }
        }
        if parsed.in_flight.contains(&0) {
            return Err(format!("--in-flight 0 does nothing; {USAGE}"));
        }
        Ok(parsed)
    }
}
