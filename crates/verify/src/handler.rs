//! A run with a handler of your own, from a test of your own project.
//!
//! The handler runs in worker processes, which are your own program started again; they are killed, stopped and cut off. Its
//! effects are counted by the recorder: another process, that the handler calls in place of its third party.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::{Cx, IdempotencyKey, IntoOutcome};
use tokio::net::TcpStream;

use crate::fault::ROUND;
use crate::recorder::{EFFECTS, Paid, Payment};
use crate::report::Report;
use crate::roles::{self, ROLE_VARIABLE, Role, Site};
use crate::run::{Options, Progress, run};
use crate::wire::Connection;
use crate::worker;
use crate::workload::{self, HANDLER, Workload};

/// How long a handler waits for the answer to its call.
const CALL: Duration = Duration::from_secs(20);
/// Time of faults, unless the options say otherwise.
const TIME: Duration = Duration::from_secs(15);

/// A handler whose effects are counted while its processes are killed, stopped and cut off.
///
/// ```no_run
/// use hapax::{Cx, HandlerOutcome};
/// use hapax_verify::report::Verdict;
/// use hapax_verify::{Effects, Handler, Options, Payment};
///
/// struct Charge;
///
/// impl Handler for Charge {
///     type Outcome = HandlerOutcome<u64>;
///
///     async fn handle(&self, payment: Payment, cx: Cx, effects: Effects) -> HandlerOutcome<u64> {
///         // Where your handler calls its third party, with the key that is the same in every attempt.
///         match effects.call(&payment, Some(&cx.derived_key("charge"))).await {
///             Ok(receipt) => HandlerOutcome::Done(receipt),
///             Err(error) => HandlerOutcome::in_doubt(error),
///         }
///     }
/// }
///
/// # /*
/// #[test]
/// # */
/// fn a_charge_takes_effect_once() {
///     let options = Options::for_handler("hapax");
///     let report = hapax_verify::verify_in_test("a_charge_takes_effect_once", Charge, &options).unwrap();
///     assert_eq!(report.verdict, Verdict::Held, "{}", report.to_text());
/// }
/// # a_charge_takes_effect_once();
/// ```
///
/// Without the key, `None`, the verdict is `violated`: a call whose process was killed before its message was acked is
/// repeated, and counted twice.
pub trait Handler: Send + Sync + 'static {
    /// What it returns: a [`HandlerOutcome`](hapax::HandlerOutcome), or a `Result`.
    type Outcome: IntoOutcome + Send + 'static;

    /// Handles one message, as the handler of a worker at `effectively-once` whose doubts are retried. Translate the payment
    /// into a message of your own here, and replace what your handler calls by `effects`.
    fn handle(
        &self,
        payment: Payment,
        cx: Cx,
        effects: Effects,
    ) -> impl Future<Output = Self::Outcome> + Send;
}

/// The third party of a [`Handler`]: the recorder of the run. An effect and its record are one step.
#[derive(Debug, Clone)]
pub struct Effects {
    recorder: std::net::SocketAddr,
}

impl Effects {
    pub(crate) fn new(site: &Site) -> Self {
        Self { recorder: site.recorder }
    }

    /// The URL of the third party, for a handler with an HTTP client of its own. It takes `POST` requests whose body is the
    /// payment in JSON, and recognises the header `Idempotency-Key`.
    pub fn url(&self) -> String {
        format!("http://{}{EFFECTS}{HANDLER}", self.recorder)
    }

    /// Makes a payment; returns the receipt. A second call with the same key has no effect, and returns the first receipt; a
    /// call without a key always takes effect. After an error it is not known whether it did.
    pub async fn call(&self, payment: &Payment, key: Option<&IdempotencyKey>) -> anyhow::Result<u64> {
        let header = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
        let body = serde_json::to_vec(payment)?;
        let exchange = async {
            let mut connection = Connection::new(TcpStream::connect(self.recorder).await?);
            connection.ask_with(&format!("{EFFECTS}{HANDLER}"), &header, &body).await?;
            connection.read().await?.context("the recorder has closed the connection")
        };
        let answer = tokio::time::timeout(CALL, exchange).await.context("the recorder does not answer")??;
        if answer.status != 200 {
            bail!("the recorder answered {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
        }
        Ok(serde_json::from_slice::<Paid>(&answer.body)?.receipt)
    }
}

/// The user's handler.
#[derive(Debug, Clone)]
pub enum UserHandler {
    /// A command for the shell, run by `hapax work` for each message.
    Command(String),
    /// A program that calls [`verify`] or [`verify_in_test`], with the arguments that lead it there.
    Program(PathBuf, Vec<String>),
}

impl Options {
    /// The options of a run with a [`Handler`]: 15 seconds of all faults on a temporary store, and a random seed. `program` is
    /// the `hapax` program of the same version, which runs the servers, the producer and the recorder.
    pub fn for_handler(program: impl Into<PathBuf>) -> Self {
        let wanted =
            |workload: &Workload| workload.name == HANDLER || workload.is_control() && !workload.is_relayed();
        let seed = fastrand::u64(..1_000_000);
        Self {
            program: program.into(),
            store: None,
            ledger: None,
            workloads: workload::ALL.into_iter().filter(wanted).collect(),
            faults: ROUND.to_vec(),
            time: TIME,
            seed,
            handler: None,
            upstream: None,
            failover_command: None,
            preload: None,
            shared_store: false,
            history: None,
            command: format!("the same test with seed = {seed}"),
        }
    }
}

/// Runs a handler under faults, in a program of its own: in a test with `harness = false`, or an example. The program is
/// started again for each worker, without arguments, and has to call this function again; the call does not return there.
///
/// An error means that there is no verdict.
pub fn verify(handler: impl Handler, options: &Options) -> anyhow::Result<Report> {
    verify_again(handler, Vec::new(), options)
}

/// As [`verify`], in a `#[test]` that is not async. `test` is its full name, such as `payments::a_charge_takes_effect_once`.
pub fn verify_in_test(test: &str, handler: impl Handler, options: &Options) -> anyhow::Result<Report> {
    let arguments = ["--exact", test, "--nocapture", "--test-threads=1"].map(str::to_owned);
    verify_again(handler, arguments.to_vec(), options)
}

fn verify_again(handler: impl Handler, again: Vec<String>, options: &Options) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if std::env::var_os(ROLE_VARIABLE).is_some() {
        let Role::OwnHandler(site) = roles::begin()? else { bail!("not a role of this program") };
        runtime.block_on(worker::run_handler(&site, Arc::new(handler)))?;
        bail!("the worker ended");
    }
    check_version(&options.program)?;
    let this = std::env::current_exe().context("this program's own path")?;
    let options = Options { handler: Some(UserHandler::Program(this, again)), ..options.clone() };
    let mut tell = |progress: Progress<'_>| match progress {
        Progress::Phase(phase) => eprintln!("{phase}"),
        Progress::Fault(fault) => {
            let bit = if fault.bit { "" } else { ", did not bite" };
            eprintln!("{:>4}  {}{bit}", fault.number, fault.fault);
        }
    };
    runtime.block_on(run(&options, &mut tell))
}

/// The roles of a run are told in a form that is that of one version.
fn check_version(program: &Path) -> anyhow::Result<()> {
    let name = program.display();
    let asked = Command::new(program).arg("--version").output();
    let asked =
        asked.with_context(|| format!("the hapax program {name} does not run; install it, or name it"))?;
    let says = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    let needs = env!("CARGO_PKG_VERSION");
    if says.split_whitespace().nth(1) != Some(needs) {
        bail!("{name} is {says:?}; this library needs version {needs}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_another_version_is_refused() {
        let refused = check_version(Path::new("true")).unwrap_err().to_string();
        assert!(refused.contains("needs version"), "{refused}");
        assert!(check_version(Path::new("/no/such/program")).is_err());
    }
}
