//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

/// The benchmark to run.
pub struct Args {
    /// Body sizes, in bytes.
    pub bytes: Vec<usize>,
    /// Numbers of lifecycles in flight.
    pub in_flight: Vec<usize>,
    /// Messages in the deep queue; 0 skips it.
    pub depth: u64,
    pub rounds: usize,
    /// Duration of one contestant's turn.
    pub time: Duration,
    pub markdown: bool,
    /// Folder of the stores: must be on a real disk, otherwise the syncs cost nothing.
    pub folder: PathBuf,
    /// Only open this store, print its figures and exit; the benchmark starts itself with this option.
    pub open: Option<PathBuf>,
    /// Measure nothing: run this many lifecycles, one at a time, for a profiler.
    pub count: Option<usize>,
    /// With `count`: behind an observed store, with traces of one message in a hundred.
    pub observed: bool,
}

const USAGE: &str = "use --quick, --markdown, --bytes 256,4096, --in-flight 1,10,100,1000, --depth 1000000, \
                     --rounds 15, --ms 200, --count 1000, --observed";

impl Args {
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let default = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let mut parsed = Self {
            bytes: vec![256, 4096],
            in_flight: vec![1, 10, 100, 1000],
            depth: 1_000_000,
            rounds: 15,
            time: Duration::from_millis(200),
            markdown: false,
            folder: std::env::var_os("TMPDIR").map_or(default, PathBuf::from),
            open: None,
            count: None,
            observed: false,
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut numbers = || -> Result<Vec<usize>, String> {
                let value = args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"))?;
                let numbers = value.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
                numbers.map_err(|error| format!("{arg} {value}: {error}; {USAGE}"))
            };
            match arg.as_str() {
                // Passed by cargo.
                "--bench" => {}
                "--quick" => {
                    parsed.bytes = vec![256];
                    parsed.in_flight = vec![1, 100];
                    parsed.depth = 20_000;
                    parsed.rounds = 2;
                    parsed.time = Duration::from_millis(100);
                }
                "--open" => parsed.open = Some(args.next().ok_or("--open needs a folder")?.into()),
                "--markdown" => parsed.markdown = true,
                "--bytes" => parsed.bytes = numbers()?,
                "--in-flight" => parsed.in_flight = numbers()?,
                "--depth" => parsed.depth = numbers()?[0] as u64,
                "--count" => parsed.count = Some(numbers()?[0]),
                "--observed" => parsed.observed = true,
                "--rounds" => parsed.rounds = numbers()?[0].max(1),
                "--ms" => parsed.time = Duration::from_millis(numbers()?[0] as u64),
                _ => return Err(format!("unknown argument {arg}; {USAGE}")),
            }
        }
        Ok(parsed)
    }
}
