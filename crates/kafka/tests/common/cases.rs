//! The cases of a test binary: one real broker for all of them.
//!
//! A case is `shared`, and runs beside others on topics and with ids of its own, or it is `alone`, because it disturbs all clients of
//! the broker; a `long` case has brokers of its own, and runs only if HAPAX_LONG is set. Without a broker all cases are skipped.

use std::ops::Deref;
use std::sync::{LazyLock, PoisonError, RwLock};

use hapax_faults::KafkaServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// A test of a binary with the broker `B`.
pub struct Case<B: 'static> {
    name: &'static str,
    run: Run<B>,
}

enum Run<B: 'static> {
    Shared(fn(&B)),
    Alone(fn(&B)),
    Long(fn() -> Completion),
}

/// A case that leaves the broker as it is.
pub fn shared<B>(name: &'static str, run: fn(&B)) -> Case<B> {
    Case { name, run: Run::Shared(run) }
}

/// A case that disturbs other clients of the broker.
pub fn alone<B>(name: &'static str, run: fn(&B)) -> Case<B> {
    Case { name, run: Run::Alone(run) }
}

/// A case with brokers of its own.
#[allow(dead_code, reason = "not all binaries have one")]
pub fn long<B>(name: &'static str, run: fn() -> Completion) -> Case<B> {
    Case { name, run: Run::Long(run) }
}

/// Whether others may run beside.
static BESIDE: RwLock<()> = RwLock::new(());

/// Runs the cases. The broker is started by the first one that needs it, and ends with this process.
pub fn run<B>(broker: &'static LazyLock<B>, cases: impl IntoIterator<Item = Case<B>>) -> !
where
    B: Deref<Target = KafkaServer> + Send + Sync,
{
    let mut arguments = Arguments::from_args();
    // Most of them wait: for sessions that end, members that join, requests that are late.
    arguments.test_threads = arguments.test_threads.or(Some(4));
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    let trials = cases.into_iter().map(|case| {
        let trial = Trial::ignorable_test(case.name, move || Ok::<_, Failed>(case.run.on(broker)));
        trial.with_ignored_flag(installed.is_err())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

impl<B: Deref<Target = KafkaServer> + Send + Sync> Run<B> {
    fn on(&self, broker: &'static LazyLock<B>) -> Completion {
        match self {
            Self::Shared(run) => {
                let _beside = BESIDE.read().unwrap_or_else(PoisonError::into_inner);
                run_on(&**broker, *run);
            }
            Self::Alone(run) => {
                let _alone = BESIDE.write().unwrap_or_else(PoisonError::into_inner);
                run_on(&**broker, *run);
            }
            Self::Long(_) if std::env::var_os("HAPAX_LONG").is_none() => {
                return Completion::ignored_with("long: set HAPAX_LONG to run it");
            }
            Self::Long(run) => {
                let _alone = BESIDE.write().unwrap_or_else(PoisonError::into_inner);
                return run();
            }
        }
        Completion::Completed
    }
}

/// Runs a case. If the broker has ended by itself, that is what is wrong: its log is told, and later cases do not wait for it.
fn run_on<B: Deref<Target = KafkaServer>>(broker: &B, run: fn(&B)) {
    assert!(!broker.has_ended(), "the broker has ended by itself");
    let _log = LogOfAnEnd(broker);
    run(broker);
}

struct LogOfAnEnd<'b>(&'b KafkaServer);

impl Drop for LogOfAnEnd<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.has_ended() {
            eprintln!("the broker has ended by itself: {}", self.0.log());
        }
    }
}
