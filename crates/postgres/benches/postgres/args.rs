//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

/// The parts of the benchmark.
pub const PARTS: [&str; 8] =
    ["lifecycles", "clients", "depth", "ledger", "transactions", "complaints", "idle", "held"];

/// The benchmark to run.
pub struct Args {
    pub parts: Vec<String>,
    pub rounds: usize,
    /// Duration of one contestant's turn.
    pub time: Duration,
    /// Messages in the deep queue.
    pub depth: u64,
    /// How long a transaction is open while the queues work.
    pub held: Duration,
    /// Folder for the curve of the part `held`: a CSV file and an SVG file.
    pub plot: Option<PathBuf>,
    pub markdown: bool,
}

const USAGE: &str = "use --quick, --markdown, --only lifecycles,clients,depth,ledger,transactions,complaints,idle,held, --rounds 9, --ms 700, \
                     --depth 200000 (the target is for 1000000), --held-xmin 60s (the target is for 10m), --plot FOLDER";

impl Args {
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self {
            parts: PARTS.iter().map(|&part| part.to_owned()).collect(),
            rounds: 9,
            time: Duration::from_millis(700),
            depth: 200_000,
            held: Duration::from_mins(1),
            plot: None,
            markdown: false,
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"));
            match arg.as_str() {
                // Passed by cargo.
                "--bench" => {}
                "--quick" => {
                    (parsed.rounds, parsed.time) = (2, Duration::from_millis(200));
                    (parsed.depth, parsed.held) = (5_000, Duration::from_secs(6));
                }
                "--markdown" => parsed.markdown = true,
                "--only" => parsed.parts = parts(&value()?)?,
                "--rounds" => parsed.rounds = number(&arg, &value()?)?.max(1) as usize,
                "--ms" => parsed.time = Duration::from_millis(number(&arg, &value()?)?.max(1)),
                "--depth" => parsed.depth = number(&arg, &value()?)?,
                "--held-xmin" => parsed.held = duration(&value()?)?,
                "--plot" => parsed.plot = Some(value()?.into()),
                _ => return Err(format!("unknown argument {arg}; {USAGE}")),
            }
        }
        Ok(parsed)
    }

    pub fn wants(&self, part: &str) -> bool {
        self.parts.iter().any(|wanted| wanted == part)
    }
}

fn parts(list: &str) -> Result<Vec<String>, String> {
    let parts: Vec<String> = list.split(',').map(str::to_owned).collect();
    match parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        Some(unknown) => Err(format!("there is no part {unknown:?}; {USAGE}")),
        None => Ok(parts),
    }
}

fn number(arg: &str, value: &str) -> Result<u64, String> {
    value.parse().map_err(|error| format!("{arg} {value}: {error}; {USAGE}"))
}

/// Seconds, as `60s`, or minutes, as `10m`.
fn duration(value: &str) -> Result<Duration, String> {
    let (digits, unit_secs) = match value.strip_suffix('m') {
        Some(minutes) => (minutes, 60),
        None => (value.strip_suffix('s').unwrap_or(value), 1),
    };
    let count = number("--held-xmin", digits)?;
    if count == 0 {
        return Err(format!("--held-xmin {value}: at least one second; {USAGE}"));
    }
    Ok(Duration::from_secs(count * unit_secs))
}
