//! Workers in processes of their own that are killed: every record is processed, and with a ledger its effect happens once.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{OnDoubt, Tier};
use hapax_embedded::{Embedded, Options};
use hapax_faults::Process;
use hapax_kafka::share::{ShareOptions, ShareSource};
use hapax_kafka::wire::Connect;
use hapax_worker::{Cx, Point, Worker};

use crate::broker::{Broker, PATIENCE, is_empty, run_until};
use crate::{Case, shared};

/// Tells a process of this program to be a worker: address, topic, tier, the file of effects, and where it dies.
const CHILD: &str = "HAPAX_TEST_SHARE_CHILD";

/// Each worker that dies has one delivery that it has claimed and not completed, at most.
const DOUBTS_MAX: usize = 8;

pub fn cases() -> Vec<Case> {
    vec![
        shared("records_of_a_killed_worker_return", records_of_a_killed_worker_return),
        shared("an_effect_happens_once_though_workers_are_killed", an_effect_happens_once),
    ]
}

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn options(address: &str, topic: &str, tier: Tier) -> ShareOptions {
    ShareOptions { tier, ..crate::broker::options(Connect::plain([address]), topic) }
}

/// Works until it is killed, by the test or by itself at a point.
pub fn run_child() {
    let settings = std::env::var(CHILD).unwrap();
    let mut parts = settings.split(' ');
    let mut part = || parts.next().unwrap();
    let (address, topic, folder, point) = (part(), part(), part().to_owned(), part().to_owned());
    let tier = if point == "never" { Tier::AtLeastOnce } else { Tier::EffectivelyOnce };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let source = Arc::new(ShareSource::connect(options(address, topic, tier)).await.unwrap());
        let mut builder =
            Worker::from_source(source).concurrency(if tier == Tier::AtLeastOnce { 4 } else { 1 });
        if tier == Tier::EffectivelyOnce {
            let ledger = Embedded::open(Path::new(&folder).join("ledger"), Options::default()).unwrap();
            builder = builder.ledger(Arc::new(ledger)).on_doubt(OnDoubt::Park);
        }
        let effects = folder.clone();
        let handler = move |number: u32, _: Cx| {
            effect(&effects, number);
            let hangs = point == "never";
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
            }
        };
        let dies_at: Option<Point> = settings.rsplit(' ').next().unwrap().parse().ok();
        let dies = move |point: Point| {
            if Some(point) == dies_at && fastrand::u32(..3) == 0 {
                die();
            }
        };
        let worker = builder.handler(handler).hook(dies).build().await.unwrap();
        println!("ready");
        worker.run(std::future::pending()).await.unwrap();
    });
}

/// Ends this process as `kill -9` does.
fn die() {
    let id = std::process::id().to_string();
    let _ = std::process::Command::new("kill").args(["-9", &id]).status();
    std::thread::sleep(PATIENCE);
}

/// Writes down that the effect of this number has happened.
fn effect(folder: &str, number: u32) {
    let file = Path::new(folder).join("effects");
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    file.write_all(format!("{number}\n").as_bytes()).unwrap();
}

fn effects(folder: &Path) -> BTreeMap<u32, u32> {
    let text = std::fs::read_to_string(folder.join("effects")).unwrap_or_default();
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        *counts.entry(line.parse().unwrap()).or_insert(0) += 1;
    }
    counts
}

/// How many records have neither had their effect nor become a dead letter, because their claim was in doubt.
fn unfinished(broker: &Broker, folder: &Path, count: u32) -> usize {
    let mut left: std::collections::BTreeSet<u32> = (0..count).collect();
    left.retain(|number| !effects(folder).contains_key(number));
    if left.len() <= DOUBTS_MAX {
        let end = usize::try_from(broker.end("one-effect-dead")).unwrap();
        for dead in broker.read("one-effect-dead", end) {
            assert_eq!(dead.headers[hapax_kafka::share::headers::CAUSE], "in-doubt", "{dead:?}");
            left.remove(&dead.value.parse().unwrap());
        }
    }
    left.len()
}

fn child(broker: &Broker, topic: &str, folder: &Path, point: &str) -> Process {
    let settings = format!("{} {topic} {} {point}", broker.address(), folder.display());
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    Process::start(command.env(CHILD, settings)).unwrap()
}

fn records_of_a_killed_worker_return(broker: &Broker) {
    broker.prepare("killed", 1);
    broker.send("killed", (0..10).map(|number| number.to_string()));
    let folder = tempfile::tempdir().unwrap();
    let mut child = child(broker, "killed", folder.path(), "never");
    let start = Instant::now();
    while effects(folder.path()).len() < 4 {
        assert!(start.elapsed() < PATIENCE, "the worker did not begin: {}", child.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill();
    let source = broker.source(options(&broker.address().to_string(), "killed", Tier::AtLeastOnce));
    let (path, seen) = (folder.path().display().to_string(), Arc::new(std::sync::Mutex::new(Vec::new())));
    let also = seen.clone();
    broker.block_on(async {
        let handler = move |number: u32, cx: Cx| {
            effect(&path, number);
            also.lock().unwrap().push((number, cx.attempt()));
            async {}
        };
        let worker = Worker::from_source(source.clone()).handler(handler).build().await.unwrap();
        run_until(worker, |counts| counts.done == 10).await;
        is_empty(&source).await;
    });
    let counts = effects(folder.path());
    assert_eq!(counts.len(), 10);
    assert_eq!(counts.values().filter(|count| **count == 2).count(), 4, "those that had begun ran again");
}

/// Workers die between the completion in the ledger and the acknowledgement, and before they claim: what was completed is
/// not run again. One that was claimed meanwhile, and may or may not have run, is a dead letter in doubt.
fn an_effect_happens_once(broker: &Broker) {
    const COUNT: u32 = 60;
    broker.prepare("one-effect", 2);
    broker.send("one-effect", (0..COUNT).map(|number| number.to_string()));
    let folder = tempfile::tempdir().unwrap();
    // The broker counts each delivery, so the same record may meet three of them.
    for point in ["after-complete", "after-receive", "after-complete"] {
        let mut child = child(broker, "one-effect", folder.path(), point);
        let start = Instant::now();
        while child.ended().is_none() {
            assert!(start.elapsed() < PATIENCE, "the worker did not die: {}", child.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let killed = effects(folder.path()).len();
    assert!(killed > 0 && killed < COUNT as usize, "workers died in the middle: {killed}");
    let source = broker.source(options(&broker.address().to_string(), "one-effect", Tier::EffectivelyOnce));
    let path = folder.path().display().to_string();
    let report = broker.block_on(async {
        let ledger = Embedded::open(folder.path().join("ledger"), Options::default()).unwrap();
        let handler = move |number: u32, _: Cx| {
            effect(&path, number);
            async {}
        };
        let builder = Worker::from_source(source.clone()).ledger(Arc::new(ledger)).on_doubt(OnDoubt::Park);
        let worker = builder.handler(handler).concurrency(4).build().await.unwrap();
        let report =
            run_until(worker, |counts| counts.replayed > 0 && unfinished(broker, folder.path(), COUNT) == 0)
                .await;
        is_empty(&source).await;
        report
    });
    assert!(report.counts.done > 0, "{report:?}");
    let twice: Vec<_> = effects(folder.path()).into_iter().filter(|(_, count)| *count != 1).collect();
    assert_eq!(twice, [], "every effect once");
}
