//! The page of metrics of the real binary, read by a real Prometheus with our alert rules: the page is well formed, the rules
//! and the dashboard name only metrics that exist, and an alert fires when its situation is there.

mod common;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use common::Server;
use hapax::core::metrics::{Metric, Metrics as _};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/monitoring/prometheus-rules.yml");
const DASHBOARD: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/monitoring/grafana-dashboard.json");

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(3);

/// A test by its name, and whether it needs Prometheus.
type Test = (&'static str, bool, fn());

const TESTS: &[Test] = &[
    ("rules_and_dashboard_name_only_metrics_that_exist", false, files_name_real_metrics),
    ("the_page_and_the_rules_pass_promtool", true, promtool_accepts_page_and_rules),
    ("an_alert_fires_when_a_message_dies", true, an_alert_fires),
];

fn main() -> ExitCode {
    let missing = Command::new("promtool").arg("--version").output().err();
    let missing = missing.map(|error| format!("needs Prometheus: {error}"));
    let trial = |&(name, needs_prometheus, test): &Test| {
        let missing = missing.clone().filter(|_| needs_prometheus);
        Trial::ignorable_test(name, move || match missing {
            None => {
                test();
                Ok::<_, Failed>(Completion::Completed)
            }
            Some(why) => Ok(Completion::ignored_with(why)),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), TESTS.iter().map(trial).collect()).exit_code()
}

/// The body of a GET.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{path}: {text}");
    body.to_owned()
}

/// Words that begin as our metrics do.
fn metric_names(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    text.split(|c| !is_part(c)).filter(|word| word.starts_with("hapax_")).collect()
}

fn files_name_real_metrics() {
    let declared = [
        hapax::core::StoreStatus::table(),
        hapax::core::QueueStats::table(),
        hapax::core::LedgerStats::table(),
        hapax_http::Counters::table(),
        hapax::relay::RelayCounts::table(),
        hapax::relay::RouteStatus::table(),
        hapax_observe::figures::DeliveryFigures::table(),
        vec![&hapax_observe::advice::FINDING],
    ];
    let mut known: BTreeSet<&str> = declared.concat().iter().map(|metric: &&Metric| metric.name).collect();
    let server = Server::start();
    let page = get(server.address(), "/metrics");
    known.extend(metric_names(&page));
    known.insert("hapax_relay_ready");
    #[cfg(feature = "kafka")]
    known.extend(hapax_kafka::processor::ProcessorCounts::table().iter().map(|metric| metric.name));
    #[cfg(not(feature = "kafka"))]
    known.insert("hapax_kafka_producer_fenced_total");
    for file in [RULES, DASHBOARD] {
        let text = std::fs::read_to_string(file).unwrap();
        let named = metric_names(&text);
        assert!(named.len() > 5, "{file} names metrics");
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} names metrics that do not exist: {unknown:?}");
    }
    serde_json::from_str::<Value>(&std::fs::read_to_string(DASHBOARD).unwrap()).expect("it is JSON");
}

/// A server with a queue and a message.
fn server_with_work() -> Server {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--dead-letters"]).ok();
    server.run(&["send", "jobs", "one"]).ok();
    server
}

fn promtool_accepts_page_and_rules() {
    let server = server_with_work();
    let page = get(server.address(), "/metrics");
    assert!(page.contains("hapax_queue_ready{queue=\"jobs\"} 1\n"), "{page}");
    let mut check = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let done = check.wait_with_output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{done:?}\n{page}");
    let done = Command::new("promtool").args(["check", "rules", RULES]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

/// A Prometheus that ends with the test.
struct Prometheus {
    child: Child,
    address: String,
    _folder: TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(scraped: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}\nrule_files: [{}]\n\
             scrape_configs:\n  - job_name: hapax\n    static_configs: [{{targets: [\"{scraped}\"]}}]\n",
            Path::new(RULES).canonicalize().unwrap().display()
        );
        std::fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        let [port] = hapax_faults::free_ports();
        let address = format!("127.0.0.1:{port}");
        let child = Command::new("prometheus")
            .current_dir(folder.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let started = Self { child, address, _folder: folder };
        started.until("it listens", |prometheus| TcpStream::connect(&prometheus.address).is_ok());
        started
    }

    fn until(&self, what: &str, reached: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !reached(self) {
            assert!(start.elapsed() < PATIENCE, "{what}: not in time");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Number of series that an expression without blanks and quotes gives.
    fn series(&self, expression: &str) -> usize {
        let text = get_chunked(&self.address, &format!("/api/v1/query?query={expression}"));
        let json: Value = serde_json::from_str(&text).unwrap();
        json["data"]["result"].as_array().map_or(0, Vec::len)
    }

    fn firing(&self) -> Vec<String> {
        let json: Value = serde_json::from_str(&get_chunked(&self.address, "/api/v1/alerts")).unwrap();
        let alerts = json["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| alert["labels"]["alertname"].as_str().unwrap().to_owned()).collect()
    }
}

/// The JSON of a response, whose transfer coding may surround it. Before Prometheus is ready it answers 503: empty JSON.
fn get_chunked(address: &str, path: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(address) else { return "{}".to_owned() };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    if text.contains(" 200 ") { body.to_owned() } else { "{}".to_owned() }
}

fn an_alert_fires() {
    let server = server_with_work();
    let prometheus = Prometheus::start(server.address());
    // The counter has to be seen before it grows: an increase is a difference.
    prometheus.until("it is scraped", |prometheus| prometheus.series("hapax_queue_dead_total") > 0);
    assert_eq!(prometheus.firing(), Vec::<String>::new());
    // Exit code 65 rejects the message.
    server.run(&["work", "jobs", "--until-empty", "--", "sh", "-c", "exit 65"]);
    prometheus
        .until("the alert fires", |prometheus| prometheus.firing().contains(&"HapaxMessagesDied".to_owned()));
}
