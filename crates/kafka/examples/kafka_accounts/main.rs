//! Transfers between accounts over three topics: no money appears or disappears, whatever is killed or delayed.
//!
//! ```text
//!  transfers --[split]--> postings --[post]--> statements
//!  7 ada bob 30           7 ada -30            7 ada -30
//!                         7 bob  30            7 bob  30
//! ```
//!
//! Each stage is a process with a transactional producer; in each transaction are the stage's output and the offsets of its input. The
//! stages run three times:
//!
//! 1. the processor of `hapax-kafka`, while stages are killed (SIGKILL) at random;
//! 2. the same, behind a proxy that delays one request to commit until the next transaction is open;
//! 3. the same program with librdkafka's transactions, behind the same proxy: it publishes a transaction that it has aborted.
//!
//! It starts a broker of its own: `cargo run -p hapax-kafka --features consumer --example kafka_accounts`.

mod librdkafka;
mod ours;
mod stage;
mod statements;

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use hapax_faults::{Action, KafkaServer, Match};
use hapax_kafka::producer::NewRecord;
use hapax_kafka::publisher::Publisher;
use hapax_kafka::wire::Connect;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

use stage::{Settings, Stack, Stage, Transfer};
use statements::{Statements, Verdict};

/// Time for anything that is waited for.
const PATIENCE: Duration = Duration::from_mins(5);
const PARTITIONS: i32 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.is_empty() {
        let Some(settings) = Settings::parse(&arguments) else {
            eprintln!("kafka_accounts starts its stages itself; it has no arguments");
            return ExitCode::from(2);
        };
        match settings.stack {
            Stack::Ours => ours::run(&settings),
            Stack::Librdkafka => librdkafka::run(&settings),
        }
        // A stage runs until it is killed.
        return ExitCode::FAILURE;
    }
    if let Err(why) = KafkaServer::jars() {
        eprintln!("{why}, or set HAPAX_TEST_KAFKA_JARS to a folder with the jars of a broker");
        return ExitCode::from(2);
    }
    println!("starting a broker");
    let broker = match KafkaServer::start(&[]) {
        Ok(broker) => broker,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    let killed = Run::new(&broker, "killed", Stack::Ours, 1_200).killed_at_random();
    killed.print("hapax-kafka, stages killed at random");
    let ours = Run::new(&broker, "delayed", Stack::Ours, 200).with_a_delayed_commit();
    ours.print("hapax-kafka, a commit delayed");
    let theirs = Run::new(&broker, "control", Stack::Librdkafka, 200).with_a_delayed_commit();
    theirs.print("librdkafka's transactions, a commit delayed");
    if killed.aborted == 0 {
        println!("no transaction was aborted: the first run proves nothing");
        return ExitCode::FAILURE;
    }
    match (killed.is_exact() && ours.is_exact(), theirs.is_exact()) {
        (true, false) => ExitCode::SUCCESS,
        (true, true) => {
            println!("librdkafka was right this time: the delayed commit did not reach an open transaction");
            ExitCode::FAILURE
        }
        (false, _) => ExitCode::FAILURE,
    }
}

/// One run of the stages.
struct Run<'b> {
    broker: &'b KafkaServer,
    name: &'static str,
    stack: Stack,
    transfers: Vec<Transfer>,
}

impl<'b> Run<'b> {
    /// Creates the topics and writes the transfers.
    fn new(broker: &'b KafkaServer, name: &'static str, stack: Stack, count: u64) -> Self {
        let admin: AdminClient<DefaultClientContext> = config(broker).create().expect("a client");
        let names = ["transfers", "postings", "statements"].map(|topic| format!("{name}-{topic}"));
        // Transfers have one partition, so that each transaction of the first stage has the same ones in every run.
        let topics: Vec<NewTopic<'_>> = names
            .iter()
            .zip([1, PARTITIONS, PARTITIONS])
            .map(|(topic, partitions)| NewTopic::new(topic, partitions, TopicReplication::Fixed(1)))
            .collect();
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        let mut random = fastrand::Rng::with_seed(7);
        let transfers: Vec<Transfer> = (0..count).map(|id| Transfer::random(id, &mut random)).collect();
        block_on(async {
            for made in admin.create_topics(&topics, &options).await.expect("the broker answers") {
                made.expect("the topic is made");
            }
            let connect = Connect::plain([broker.address().to_string()]);
            let mut publisher = Publisher::idempotent(connect).await.expect("the broker answers");
            let record = |transfer: &Transfer| NewRecord::new(&names[0], transfer.from, transfer.to_string());
            publisher.publish(transfers.iter().map(record).collect()).await.expect("the broker takes them");
        });
        Self { broker, name, stack, transfers }
    }

    fn start(&self, stage: Stage, proxied: bool) -> Child {
        let address = if proxied { self.broker.proxied() } else { self.broker.address() };
        let settings =
            Settings { stack: self.stack, stage, address: address.to_string(), run: self.name.to_owned() };
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        command.args(settings.arguments()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the stage starts")
    }

    fn killed_at_random(self) -> Verdict {
        let mut random = fastrand::Rng::with_seed(11);
        let mut stages = Stages([
            (Stage::Split, self.start(Stage::Split, false)),
            (Stage::Post, self.start(Stage::Post, false)),
        ]);
        let mut statements = Statements::new(&config(self.broker), self.name);
        let (mut kills, mut next_kill) = (0, Instant::now() + Duration::from_secs(2));
        let start = Instant::now();
        while statements.transfers() < self.transfers.len() && start.elapsed() < PATIENCE {
            statements.read_for(Duration::from_millis(100));
            if kills < 6 && Instant::now() >= next_kill {
                let which = random.usize(..stages.0.len());
                stages.kill(which);
                stages.0[which].1 = self.start(stages.0[which].0, false);
                kills += 1;
                next_kill = Instant::now() + Duration::from_millis(random.u64(500..2_500));
            }
        }
        drop(stages);
        statements.verdict(&self.transfers, PATIENCE)
    }

    /// The proxy holds the first commit of the first stage. The client repeats it, and begins the next transaction, in which a
    /// transfer fails: the transaction is to be aborted. Before the abort, the broker gets the commit that was held.
    fn with_a_delayed_commit(self) -> Verdict {
        let label = format!("EndTxn {}", Stage::Split.transactional_id(self.name));
        let proxy = self.broker.proxy();
        let commit = proxy.inject(Match::request(label.as_str()), Action::Hold).times(1);
        // The repeated commit passes; the next request is the abort.
        let abort = proxy.inject(Match::request(label.as_str()), Action::Hold).after(1).times(1);
        let answers = proxy.inject(Match::answer_to(label), Action::Delay(Duration::ZERO));
        let mut stages = Stages([
            (Stage::Split, self.start(Stage::Split, true)),
            (Stage::Post, self.start(Stage::Post, false)),
        ]);
        block_on(async {
            abort.wait_for(1).await;
            let answered = answers.count();
            commit.release();
            answers.wait_for(answered + 1).await;
            abort.release();
        });
        let mut statements = Statements::new(&config(self.broker), self.name);
        let start = Instant::now();
        while statements.transfers() < self.transfers.len() && start.elapsed() < PATIENCE {
            statements.read_for(Duration::from_millis(100));
            // One that ends with an error is started again, as a supervisor would.
            for which in 0..stages.0.len() {
                if stages.0[which].1.try_wait().is_ok_and(|ended| ended.is_some()) {
                    let stage = stages.0[which].0;
                    stages.0[which].1 = self.start(stage, stage == Stage::Split);
                }
            }
        }
        drop(stages);
        statements.verdict(&self.transfers, PATIENCE)
    }
}

/// The processes of a run; they end with it.
struct Stages([(Stage, Child); 2]);

impl Stages {
    fn kill(&mut self, which: usize) {
        // It may have ended by itself.
        let _ = self.0[which].1.kill();
        let _ = self.0[which].1.wait();
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        for which in 0..self.0.len() {
            self.kill(which);
        }
    }
}

fn config(broker: &KafkaServer) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", broker.address().to_string());
    config
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}
