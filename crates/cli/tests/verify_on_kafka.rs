//! `hapax verify --broker` on real brokers: it catches the controls, librdkafka's transactions among them, and finds nothing in the
//! processor. The known-bad variants of the processor are in `mutants_are_found.rs`.

mod common;

use std::time::Duration;

use common::{run, run_within};
use hapax_faults::KafkaServer;
use hapax_kafka::wire::{Cluster, Connect};
use kafka_protocol::messages::MetadataRequest;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

fn main() {
    // A round of faults takes minutes.
    let trial = |name: &str, is_long: bool, run: fn()| {
        Trial::ignorable_test(name, move || {
            if is_long && std::env::var_os("HAPAX_LONG").is_none() {
                return Ok(Completion::ignored_with("long: set HAPAX_LONG to run it"));
            }
            if let Err(why) = KafkaServer::jars() {
                return Ok(Completion::ignored_with(format!("needs Kafka: {why}")));
            }
            run();
            Ok::<_, Failed>(Completion::Completed)
        })
    };
    let trials = vec![
        trial("a_private_broker_is_broken_and_it_holds", true, a_private_broker_is_broken_and_it_holds),
        trial("a_whole_round_of_faults_bites_and_it_holds", true, a_whole_round_of_faults_bites_and_it_holds),
        trial("a_given_broker_is_left_as_it_was", true, a_given_broker_is_left_as_it_was),
        trial("what_cannot_be_run_is_refused", false, what_cannot_be_run_is_refused),
    ];
    let mut args = Arguments::from_args();
    // A run has half a dozen processes, and a broker.
    args.test_threads = Some(1);
    libtest_mimic::run(&args, trials).exit();
}

/// The rows of a report, by workload.
fn row<'r>(report: &'r Value, workload: &str) -> &'r Value {
    let rows = report["workloads"].as_array().unwrap();
    rows.iter().find(|row| row["workload"] == workload).unwrap_or_else(|| panic!("{workload}: {report:#}"))
}

/// However short a run is, and whatever its seed: its kills are aimed at the controls.
fn a_private_broker_is_broken_and_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let seed = std::env::var("HAPAX_TEST_SEED").unwrap_or_else(|_| "3".to_owned());
    let args = ["--broker", "private:kafka", "--librdkafka", "--for", "15s", "--seed", &seed];
    let report = held(&folder, &args);
    let ours = row(&report, "processor");
    assert!(ours["effects"].as_u64() > Some(100), "{ours:#}");
    // A send of unknown outcome, while the broker is stopped, may take effect.
    assert!(ours["accepted"].as_u64() <= ours["effects"].as_u64(), "{ours:#}");
    assert!(ours["suppressed"].as_u64() > Some(0), "records were written in vain: {ours:#}");
    assert!(found(&report, "produce-commit", "effect-twice"), "{report:#}");
    assert!(found(&report, "commit-produce", "accepted-but-lost"), "{report:#}");
    // A delayed commit shows a transaction that it is about to abort, and handles again.
    assert!(found(&report, "librdkafka", "effect-twice"), "{report:#}");
    // Kills are aimed at the controls, which were found; a transaction of the processor need not be open at that moment.
    let name = "EndTxn: request delayed into the next transaction";
    assert!(bit(&report, name), "{name}: {:#}", report["faults"]);
}

fn a_whole_round_of_faults_bites_and_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--broker", "private:kafka", "--librdkafka", "--for", "150s", "--seed", "3"];
    let report = held(&folder, &args);
    for name in [
        "EndTxn: ",
        "EndTxn: unanswered",
        "Produce: ",
        "TxnOffsetCommit: ",
        "AddOffsetsToTxn: ",
        "kill -9 of a processor",
        "pause of the broker",
        "zombie",
    ] {
        assert!(bit(&report, name), "{name}: {:#}", report["faults"]);
    }
}

/// The broker tells its own address, and the proxies keep the processors behind them nevertheless.
fn a_given_broker_is_left_as_it_was() {
    let broker = KafkaServer::start(&[]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let url = format!("kafka://{}", broker.address());
    let faults = "EndTxn: request dropped,EndTxn: response dropped,kill -9,of the broker";
    let report = held(&folder, &["--broker", &url, "--for", "12s", "--seed", "5", "--faults", faults]);
    assert!(
        bit(&report, "EndTxn: request dropped") || bit(&report, "EndTxn: response dropped"),
        "{report:#}"
    );
    assert!(!bit(&report, "pause of the broker"), "it is not ours: {report:#}");
    let cluster = Cluster::new(Connect::plain([broker.address().to_string()]));
    let all = MetadataRequest::default().with_topics(None);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (answer, _) = runtime.block_on(cluster.call_any(&all, 12)).unwrap();
    let names = answer.topics.iter().filter_map(|topic| topic.name.as_ref()).map(|name| name.as_str());
    let left: Vec<&str> = names.filter(|name| name.starts_with("hapax-verify")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Runs verify until it holds.
fn held(folder: &tempfile::TempDir, args: &[&str]) -> Value {
    let done = run_within(Duration::from_mins(8), folder, &[&["verify", "--json"], args].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    assert_eq!(done.code, Some(0), "{}\n{report:#}", done.stderr);
    assert_eq!(report["verdict"], "held", "{report:#}");
    eprintln!("{}", done.stderr);
    report
}

fn found(report: &Value, workload: &str, anomaly: &str) -> bool {
    row(report, workload)["counts"][anomaly].as_u64() > Some(0)
}

/// Whether a fault whose name begins so bit.
fn bit(report: &Value, name: &str) -> bool {
    let faults = report["faults"].as_array().unwrap();
    faults.iter().any(|fault| fault["bit"] == true && fault["fault"].as_str().unwrap().starts_with(name))
}

fn what_cannot_be_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], code, says: &str| {
        let said = run(&folder, &[&["verify"], args].concat());
        assert_eq!(said.code, Some(code), "{said:?}");
        assert!(said.stderr.contains(says), "{said:?}");
    };
    refused(&["--only", "processor"], 2, "needs --broker");
    refused(&["--broker", "private:kafka", "--only", "payments"], 2, "--only is one of: processor");
    refused(&["--broker", "private:kafka", "--store", "private:postgres"], 2, "cannot be used with");
    refused(&["--broker", "kafka://ann:pw@localhost:9092"], 1, "a plain listener without a user");
    refused(&["--broker", "private:kafka", "--faults", "nonsense"], 2, "no fault has such a name");
    let listed = run(&folder, &["verify", "--list"]).ok();
    assert!(
        listed.contains("processor\ttransactional") && listed.contains("EndTxn: request dropped"),
        "{listed}"
    );
    assert!(!listed.contains("librdkafka"), "a control of our own tests: {listed}");
}
