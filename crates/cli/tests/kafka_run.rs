//! `hapax kafka run` with a real broker: the processor is killed, stopped and ended, and each output is there once.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hapax_faults::{Action, KafkaServer, Match, Process, RedisTls};
use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, StartAt};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::{Cluster, Connect};
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::{CreateTopicsRequest, DeleteTopicsRequest, DescribeGroupsRequest};
use kafka_protocol::protocol::StrBytes;
use libtest_mimic::{Arguments, Trial};
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_mins(3);

/// What the cases share.
struct Scene {
    broker: KafkaServer,
    tls: RedisTls,
    folder: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

fn main() {
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    // One broker for all, one case after the other.
    let trial = Trial::test("kafka_run", || {
        let tls = RedisTls::new().unwrap();
        let broker = KafkaServer::start_secured(&tls, &[]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let scene = Scene { broker, tls, folder, runtime };
        scene.refusals_are_explained();
        scene.a_killed_run_gives_each_output_once();
        scene.overlapping_transactions_have_three_ids_and_are_off_by_default();
        scene.two_slots_run_at_the_same_time();
        scene.a_topic_that_is_created_again_is_read_from_its_start();
        scene.rejected_records_go_to_the_dead_letters();
        scene.a_woken_zombie_ends_with_both_identities();
        scene.encrypted_and_authenticated();
        Ok(())
    });
    let trial = trial.with_ignored_flag(installed.is_err());
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

/// The page at an address `http://HOST:PORT/PATH`.
fn get(url: &str) -> String {
    use std::io::{Read as _, Write as _};
    let (host, path) = url.trim().strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

impl Scene {
    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A configuration, with the broker's address and what a case adds.
    fn config(&self, name: &str, more: &str) -> PathBuf {
        let address = self.broker.address();
        self.file(
            &format!("{name}.toml"),
            &format!(
                "brokers = \"{address}\"\ninput = [\"{name}\"]\noutput = \"{name}-out\"\ngroup = \"{name}\"\n\
                 transactional_id = \"{name}\"\n{more}"
            ),
        )
    }

    fn topics(&self, names: &[String], partitions: i32) {
        let cluster = Cluster::new(Connect::plain([self.broker.address().to_string()]));
        let topic = |name: &String| {
            let name = StrBytes::from_string(name.clone());
            CreatableTopic::default()
                .with_name(name.into())
                .with_num_partitions(partitions)
                .with_replication_factor(1)
        };
        let create = CreateTopicsRequest::default()
            .with_topics(names.iter().map(topic).collect())
            .with_timeout_ms(60_000);
        let (made, _) = self.runtime.block_on(cluster.call_any(&create, 5)).unwrap();
        assert!(made.topics.iter().all(|topic| topic.error_code == 0), "{made:?}");
    }

    /// Creates the topics of a case, and fills the input with numbers.
    fn fill(&self, name: &str, partitions: i32, count: usize) {
        self.topics(&[name.to_owned(), format!("{name}-out")], partitions);
        self.send(name, 0..count);
    }

    fn send(&self, name: &str, numbers: std::ops::Range<usize>) {
        self.runtime.block_on(async {
            let connect = Connect::plain([self.broker.address().to_string()]);
            let mut producer =
                Producer::connect(ProducerConfig::new(connect, &format!("fill-{name}"))).await.unwrap();
            producer.begin().unwrap();
            for number in numbers {
                producer
                    .send(NewRecord::new(name, format!("key {number}"), number.to_string()))
                    .await
                    .unwrap();
            }
            producer.commit().await.unwrap();
        });
    }

    /// The visible values of a topic, when there are at least as many.
    fn read(&self, topic: &str, count: usize, running: &Process) -> Vec<String> {
        self.runtime.block_on(async {
            let address = self.broker.address().to_string();
            let group = format!("reader-{}", fastrand::u64(..));
            let mut reader = Consumer::start(&ConsumerConfig::new(&address, &group, &[topic])).unwrap();
            let (start, mut seen) = (Instant::now(), Vec::new());
            // A little longer than the last one, so that one too many is seen.
            let mut last: Option<Instant> = None;
            loop {
                match tokio::time::timeout(Duration::from_millis(100), reader.next()).await {
                    Ok(Event::Assigned(assignment)) => {
                        let starts = vec![StartAt::NewGroup; assignment.partitions.len()];
                        assignment.start(starts);
                    }
                    Ok(Event::Record(record)) => {
                        let value = record.value.unwrap_or_default();
                        seen.push(String::from_utf8_lossy(&value).into_owned());
                    }
                    Ok(Event::Ended(error)) => panic!("{error}"),
                    Ok(_) | Err(_) => {}
                }
                assert!(
                    start.elapsed() < PATIENCE,
                    "{} of {count} in {topic}: {}",
                    seen.len(),
                    running.log()
                );
                if seen.len() >= count
                    && last.get_or_insert_with(Instant::now).elapsed() > Duration::from_millis(500)
                {
                    return seen;
                }
            }
        })
    }

    fn start(&self, config: &Path, flags: &[&str]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
        command.args(["kafka", "run", "--config"]).arg(config).args(flags).current_dir(self.folder.path());
        Process::start(&mut command).unwrap()
    }

    fn refusals_are_explained(&self) {
        let base = "input = [\"a\"]\ngroup = \"g\"\ntransactional_id = \"t\"\ncommand = [\"cat\"]\n";
        let table = [
            ("inputs = [\"a\"]", "unknown key `inputs`; did you mean `input`?"),
            ("[batch]\nrecord_max = 1", "unknown key `record_max`; did you mean `records_max`?"),
            ("[batch]\nrecords_max = 0", "batch.records_max is 0; 1 to 100000 is accepted"),
            ("concurrency = 101", "concurrency is 101; 1 to 100 is accepted"),
            ("input = [\"a\"]\noutput = \"a\"", "is an input too"),
            ("overlaps = true", "unknown key `overlaps`; did you mean `overlap`?"),
            ("overlap = \"yes\"", "overlap: invalid type: string \"yes\", expected true or false"),
            ("output_records = \"line\"", "did you mean `lines`?"),
            ("transactional_id = \"t-${HOSTNAME}\"", "placeholder that was not replaced"),
            ("[security]\nsasl = \"PLAIN\"", "sasl and user belong together"),
            ("group = \"g\"", "the file has no `input`"),
            ("input = [\"a\"]", "the file has no `group`"),
            ("input = [\"a\"]\ngroup = \"g\"", "the file has no `transactional_id`"),
            ("input = [\"a\"]\ngroup = \"g\"\ntransactional_id = \"t\"", "the file has no `command`"),
            (&format!("{base}[producer]\nacks = 1"), "acks = \"1\" is refused"),
            (
                &format!("{base}[producer]\n\"transaction.timeout.m\" = 1"),
                "did you mean transaction.timeout.ms?",
            ),
            (&format!("{base}[producer]\n\"transaction.timeout.ms\" = 1000"), "at least 18000 ms"),
            (&format!("{base}[consumer]\n\"isolation.level\" = \"read_uncommitted\""), "use read_committed"),
            (&base.replace("cat", "no-such-program"), "no folder of PATH has a program"),
            // The broker is asked only now.
            (base, "topic = \"a\" is refused: "),
        ];
        for (text, expected) in table {
            let path = self.file("refused.toml", text);
            let brokers = self.broker.address().to_string();
            let args = ["kafka", "run", "--brokers", &brokers, "--config", path.to_str().unwrap()];
            let said = common::run(&self.folder, &args);
            assert!(said.stderr.contains(expected), "{text}\n{said:?}");
            assert!(said.stdout.is_empty(), "{said:?}");
        }
        common::run(&self.folder, &["kafka", "run"]).failed(2);
    }

    fn a_killed_run_gives_each_output_once(&self) {
        let (name, count) = ("killed", 90);
        self.fill(name, 1, count);
        let runs = self.folder.path().join("runs");
        // Each run is noted. Some records fail at first, and their batches are repeated.
        let script = format!(
            "read n; echo $n >> {}; [ $((n % 20)) = 7 ] && [ $HAPAX_ATTEMPT = 1 ] && exit 75; echo out-$n",
            runs.display()
        );
        let config = self.config(
            name,
            &format!(
                "command = [\"sh\", \"-c\", '{script}']\n[batch]\nrecords_max = 10\ntime_max_ms = 5000\n"
            ),
        );
        let noted = || fs::read_to_string(&runs).unwrap_or_default().lines().count();
        let mut running = self.start(&config, &[]);
        for kills in 1..=2 {
            let start = Instant::now();
            while noted() < 35 * kills {
                assert!(start.elapsed() < PATIENCE, "{} runs: {}", noted(), running.log());
                std::thread::sleep(Duration::from_millis(10));
            }
            running.kill();
            running = self.start(&config, &["--metrics", "127.0.0.1:0"]);
        }
        let expected: Vec<String> = (0..count).map(|number| format!("out-{number}")).collect();
        assert_eq!(self.read(&format!("{name}-out"), count, &running), expected, "{}", running.log());
        assert!(noted() > count, "nothing was repeated: the run proves nothing");
        let log = running.log();
        let page = log.split("metrics at ").nth(1).unwrap().lines().next().unwrap();
        let shown = get(page);
        assert!(shown.contains("hapax_kafka_producer_fenced_total{group=\"killed\"} 0"), "{shown}");
        running.signal(Signal::TERM);
        let (status, lines, log) = running.finish();
        assert!(status.success(), "{log}");
        assert!(lines.last().is_some_and(|line| line.contains(" records in ")), "{lines:?}");
    }

    /// With `overlap` the commands of the second batch run while the first commit is held, and the other ids end transactions.
    fn overlapping_transactions_have_three_ids_and_are_off_by_default(&self) {
        let (count, batch) = (20, 5);
        for (name, setting) in [("overlapping", "overlap = true\n"), ("in-turn", "")] {
            self.fill(name, 1, count);
            let runs = self.folder.path().join(format!("{name}-runs"));
            let script = format!("read n; echo $n >> {}; echo $n", runs.display());
            let more = format!(
                "{setting}command = [\"sh\", \"-c\", '{script}']\n[batch]\nrecords_max = {batch}\ntime_max_ms = 60000\n"
            );
            let config = self.config(name, &more);
            let text = fs::read_to_string(&config).unwrap();
            let (address, proxied) = (self.broker.address().to_string(), self.broker.proxied().to_string());
            fs::write(&config, text.replace(&address, &proxied)).unwrap();
            let proxy = self.broker.proxy();
            let first = Match::request(format!("EndTxn {name}-0"));
            let held = proxy.inject(first, Action::Hold).times(1);
            let others = [2, 3].map(|number| Match::request(format!("EndTxn {name}-0.{number}")));
            let others = others.map(|other| proxy.inject(other, Action::Delay(Duration::ZERO)));
            let running = self.start(&config, &["--quiet"]);
            let noted = || fs::read_to_string(&runs).unwrap_or_default().lines().count();
            let expected = if setting.is_empty() { batch } else { 2 * batch };
            let start = Instant::now();
            while held.count() == 0 || noted() < expected {
                assert!(start.elapsed() < PATIENCE, "{name}: {} runs: {}", noted(), running.log());
                std::thread::sleep(Duration::from_millis(10));
            }
            held.release();
            let numbers: Vec<String> = (0..count).map(|number| number.to_string()).collect();
            assert_eq!(self.read(&format!("{name}-out"), count, &running), numbers, "{}", running.log());
            assert_eq!(noted(), count, "{name}: no batch was repeated");
            for other in others {
                assert_eq!(other.count() > 0, !setting.is_empty(), "{name}: {} ends", other.count());
                other.remove();
            }
            running.signal(Signal::TERM);
            let (status, _, log) = running.finish();
            assert!(status.success(), "{log}");
        }
    }

    /// Each has a partition. The command of one ends only after that of the other has begun.
    fn two_slots_run_at_the_same_time(&self) {
        let name = "slots";
        self.fill(name, 2, 0);
        let began = self.folder.path().join("began").display().to_string();
        let script = format!(
            "touch {began}-$HAPAX_PARTITION; until [ -e {began}-0 ] && [ -e {began}-1 ]; do sleep 0.05; done; cat"
        );
        let more = format!(
            "concurrency = 2\ncommand = [\"sh\", \"-c\", '{script}']\n[batch]\ntime_max_ms = 100\n[limits]\nrun_max_ms = 60000\n"
        );
        let config = self.config(name, &more);
        let running = self.start(&config, &["--quiet"]);
        let start = Instant::now();
        while self.members_with_partitions(name) < 2 {
            assert!(start.elapsed() < PATIENCE, "{}", running.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        self.send(name, 0..20);
        let mut seen: Vec<usize> = self
            .read(&format!("{name}-out"), 20, &running)
            .iter()
            .map(|value| value.parse().unwrap())
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..20).collect::<Vec<_>>(), "{}", running.log());
        running.signal(Signal::TERM);
        let (status, _, log) = running.finish();
        assert!(status.success(), "{log}");
    }

    fn members_with_partitions(&self, group: &str) -> usize {
        let cluster = Cluster::new(Connect::plain([self.broker.address().to_string()]));
        let groups = vec![StrBytes::from_string(group.to_owned()).into()];
        let request = DescribeGroupsRequest::default().with_groups(groups);
        // A coordinator that is just being made knows no members.
        let Ok((answer, _)) = self.runtime.block_on(cluster.call_any(&request, 5)) else { return 0 };
        let members = answer.groups.iter().flat_map(|group| &group.members);
        // Version, and the count of topics that are assigned.
        members
            .filter(|member| member.member_assignment.get(2..6).is_some_and(|count| count != [0; 4]))
            .count()
    }

    /// It has as many records as before, so nothing comes behind the position that the consumer has: only the topic's id tells.
    fn a_topic_that_is_created_again_is_read_from_its_start(&self) {
        let name = "recreated";
        self.fill(name, 1, 4);
        let config = self.config(name, "command = [\"cat\"]\n[batch]\ntime_max_ms = 100\n");
        let running = self.start(&config, &["--quiet"]);
        let output = format!("{name}-out");
        assert_eq!(self.read(&output, 4, &running), ["0", "1", "2", "3"], "{}", running.log());
        let cluster = Cluster::new(Connect::plain([self.broker.address().to_string()]));
        let delete = DeleteTopicsRequest::default()
            .with_topic_names(vec![StrBytes::from_static_str(name).into()])
            .with_timeout_ms(60_000);
        let (deleted, _) = self.runtime.block_on(cluster.call_any(&delete, 5)).unwrap();
        assert!(deleted.responses.iter().all(|topic| topic.error_code == 0), "{deleted:?}");
        self.topics(&[name.to_owned()], 1);
        self.send(name, 4..8);
        let expected: Vec<String> = (0..8).map(|number| number.to_string()).collect();
        assert_eq!(self.read(&output, 8, &running), expected, "{}", running.log());
        running.signal(Signal::TERM);
        let (status, _, log) = running.finish();
        assert!(status.success(), "{log}");
    }

    fn rejected_records_go_to_the_dead_letters(&self) {
        let name = "rejected";
        self.fill(name, 1, 6);
        self.topics(&[format!("{name}-dead")], 1);
        let script = "read n; [ $n = 2 ] && { echo not this one >&2; exit 65; }; [ $n = 4 ] && exit 1; echo $n; echo again";
        let config = self.config(
            name,
            &format!(
                "dead_letters = \"{name}-dead\"\noutput_records = \"lines\"\nattempts_max = 2\n\
                 command = [\"sh\", \"-c\", '{script}']\n[batch]\ntime_max_ms = 200\n"
            ),
        );
        let running = self.start(&config, &["--json"]);
        let expected: Vec<&str> = "0 again 1 again 3 again 5 again".split(' ').collect();
        assert_eq!(self.read(&format!("{name}-out"), 8, &running), expected, "{}", running.log());
        assert_eq!(self.read(&format!("{name}-dead"), 2, &running), ["2", "4"]);
        running.signal(Signal::TERM);
        let (status, lines, log) = running.finish();
        assert!(status.success(), "{log}");
        let report: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap();
        assert_eq!((&report["records"], &report["dead"]), (&6.into(), &2.into()), "{report}");
        // Without dead letters it ends there, and says where.
        let config = self.config(name, "new_group = \"earliest\"\ncommand = [\"false\"]\nattempts_max = 1\n");
        let text = fs::read_to_string(&config).unwrap().replace("group = \"rejected\"", "group = \"stops\"");
        fs::write(&config, text).unwrap();
        let (status, _, log) = self.start(&config, &[]).finish();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("rejected/0 at offset 0 failed 1 times: exit code 1"), "{log}");
    }

    /// The process is stopped in a transaction, another one with its id takes over, and it is woken.
    fn a_woken_zombie_ends_with_both_identities(&self) {
        let (name, count) = ("zombie", 300);
        // A partition for each of them, so that the woken one has something to do.
        self.fill(name, 2, count);
        let config = self.config(
            name,
            "command = [\"cat\"]\n[batch]\nrecords_max = 5\ntime_max_ms = 2000\n[limits]\nrun_max_ms = 3000\n\
             kill_after_ms = 1000\n[producer]\n\"transaction.timeout.ms\" = 10000\n[consumer]\n\"session.timeout.ms\" = 5000\n",
        );
        let output = format!("{name}-out");
        let mut zombie = self.start(&config, &["--quiet"]);
        self.read(&output, 5, &zombie);
        zombie.pause();
        let successor = self.start(&config, &["--quiet"]);
        self.read(&output, 30, &successor);
        zombie.resume();
        let status = zombie.wait();
        let log = zombie.log();
        assert_eq!(status.code(), Some(1), "{log}");
        let words =
            log.lines().find(|line| line.contains("was taken over")).unwrap_or_else(|| panic!("{log}"));
        assert!(words.contains("'zombie-0'") && words.matches("producer ").count() == 2, "{words}");
        assert!(log.contains("warning producer-fenced: 1 processors of group zombie"), "{log}");
        let mut seen: Vec<usize> =
            self.read(&output, count, &successor).iter().map(|value| value.parse().unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..count).collect::<Vec<_>>(), "{}", successor.log());
        successor.signal(Signal::TERM);
        let (status, _, log) = successor.finish();
        assert!(status.success(), "{log}");
    }

    /// The other commands use the same file.
    fn encrypted_and_authenticated(&self) {
        let name = "guarded";
        self.fill(name, 1, 1);
        let text = format!(
            "brokers = \"{}\"\ninput = [\"{name}\"]\ngroup = \"{name}\"\ntransactional_id = \"{name}\"\ncommand = [\"cat\"]\n\
             [security]\nca_file = \"{}\"\nsasl = \"SCRAM-SHA-512\"\nuser = \"alice\"\npassword_file = \"{}\"\n",
            self.broker.secured("BOTH"),
            self.tls.authority().display(),
            self.file("password", "alice-secret\n").display(),
        );
        let path = self.file("guarded.toml", &text);
        let path = path.to_str().unwrap();
        // She may not do anything yet, and is told what she lacks.
        let said = common::run(&self.folder, &["kafka", "check", "--config", path]);
        assert!(said.stdout.contains("the user needs the operation Describe"), "{said:?}");
        said.failed(1);
        let said = common::run(&self.folder, &["kafka", "transactions", "--config", path]);
        assert_eq!(said.ok(), "", "transactions that she may not see are not listed");
        let wrong = self.file("wrong.toml", &text.replace("/password", "/wrong-password"));
        self.file("wrong-password", "another");
        let said =
            common::run(&self.folder, &["kafka", "lag", "guarded", "--config", wrong.to_str().unwrap()]);
        assert!(said.failed(1).contains("rejected the authentication"));
    }
}
