//! Kafka to PostgreSQL while processes are killed and stopped, and the broker is killed: one row for each record. A naive
//! consumer beside it, which commits its offsets after its writes, has duplicates.

use std::process::Command;
use std::time::{Duration, Instant};

use hapax_faults::{PostgresServer, Process};
use hapax_kafka::consumer::ConsumerConfig;
use hapax_kafka::to_database::{ToDatabase, ToDatabaseOptions};
use hapax_kafka::wire::Connect;
use hapax_postgres::{InboxOptions, Options, PostgresInbox, PostgresStore};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord};
use sqlx::Connection as _;

use crate::broker::{Broker, PATIENCE, Protocol};
use crate::{Case, alone};

/// Selects what a child process does.
const CHILD: &str = "HAPAX_TEST_KAFKA_CHILD";
/// Has the topic of a child process, which is also the name of its group.
const TOPIC: &str = "HAPAX_TEST_TOPIC";
const PARTITIONS: i32 = 3;
const SESSION: Duration = Duration::from_secs(4);
/// After this many writes the naive consumer stops before its commit, where it is killed.
const NAIVE_STOP: usize = 25;

pub fn cases() -> Vec<Case> {
    vec![
        alone("one_row_for_each_record_under_kills_and_pauses", |broker| {
            one_row_for_each_record(broker, Protocol::Classic);
        }),
        alone("one_row_for_each_record_if_the_broker_assigns_the_partitions", |broker| {
            one_row_for_each_record(broker, Protocol::Consumer);
        }),
    ]
}

/// Runs as a child process, if this is one.
pub fn child() {
    let Ok(kind) = std::env::var(CHILD) else { return };
    let given = |name: &str| std::env::var(name).expect("given by the parent");
    let (broker, database) = (given("HAPAX_TEST_BROKER"), given("HAPAX_TEST_DATABASE"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match kind.as_str() {
            "once" => once(&broker, &database, &given(TOPIC), Protocol::Classic).await,
            "once-by-broker" => once(&broker, &database, &given(TOPIC), Protocol::Consumer).await,
            naive => read_naively(&broker, &database, &given(TOPIC), naive == "naive-stops").await,
        }
    });
    std::process::exit(0);
}

async fn once(broker: &str, database: &str, topic: &str, protocol: Protocol) {
    loop {
        let store = PostgresStore::open(database, Options::default()).await.unwrap();
        // What a stopped process has begun ends soon.
        let options = InboxOptions { idle_max: Duration::from_secs(2), ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&store, options).unwrap();
        let mut consumer = ConsumerConfig::new(broker, topic, &[topic]);
        consumer.session_timeout = SESSION;
        consumer.properties = vec![protocol.property()];
        let run = ToDatabase::new(Connect::plain([broker]), consumer, &inbox, |record, db| {
            Box::pin(async move {
                let insert = "INSERT INTO once (value, record_offset, partition)
                              SELECT $1, $2, $3 FROM pg_sleep(0.002)";
                let value = String::from_utf8(record.value.as_deref().unwrap_or_default().to_vec())?;
                let insert = sqlx::query(insert).bind(value).bind(record.offset).bind(record.at.partition);
                insert.execute(db).await?;
                Ok(())
            })
        });
        let options = ToDatabaseOptions { batch_records_max: 10, ..ToDatabaseOptions::default() };
        let ended = run.options(options).run(std::future::pending()).await;
        eprintln!("ended: {ended:?}");
    }
}

async fn read_naively(broker: &str, database: &str, topic: &str, stops: bool) {
    let consumer: BaseConsumer = rdkafka::ClientConfig::new()
        .set("bootstrap.servers", broker)
        .set("group.id", format!("{topic}-naive"))
        .set("session.timeout.ms", SESSION.as_millis().to_string())
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    consumer.subscribe(&[topic]).unwrap();
    let mut db = sqlx::PgConnection::connect(database).await.unwrap();
    let mut written = 0;
    loop {
        let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) else { continue };
        let value = String::from_utf8_lossy(record.payload().unwrap_or_default()).into_owned();
        sqlx::query("INSERT INTO naive (value) VALUES ($1)").bind(value).execute(&mut db).await.unwrap();
        written += 1;
        if stops && written == NAIVE_STOP {
            println!("\nbefore the commit");
            std::future::pending::<()>().await;
        }
        // The one that is killed has not come to its first commit.
        if !stops {
            let _ = consumer.commit_message(&record, CommitMode::Async);
        }
    }
}

struct Scene<'a> {
    topic: String,
    broker: &'a Broker,
    database: PostgresServer,
    producer: FutureProducer,
    produced: usize,
}

impl Scene<'_> {
    fn start(&self, kind: &str) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env(CHILD, kind)
            .env(TOPIC, &self.topic)
            .env("HAPAX_TEST_BROKER", self.broker.address().to_string());
        Process::start(command.env("HAPAX_TEST_DATABASE", self.database.url("postgres"))).unwrap()
    }

    fn produce(&mut self, count: usize) {
        for number in self.produced..self.produced + count {
            let partition = i32::try_from(number).unwrap() % PARTITIONS;
            let value = number.to_string();
            let record = FutureRecord::<(), _>::to(&self.topic).partition(partition).payload(&value);
            self.broker.block_on(self.producer.send(record, PATIENCE)).unwrap();
        }
        self.produced += count;
    }

    fn count(&self, what: &str) -> usize {
        self.database.sql("postgres", &format!("SELECT count({what}")).unwrap().trim().parse().unwrap()
    }

    fn wait(&self, what: &str, count: usize) {
        let start = Instant::now();
        while self.count(what) < count {
            assert!(start.elapsed() < PATIENCE, "{what}: {} of {count}", self.count(what));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn one_row_for_each_record(broker: &Broker, protocol: Protocol) {
    let topic = format!("to-postgres-{}", protocol.name());
    broker.create_topic(&topic, PARTITIONS);
    let database = PostgresServer::start_in_memory().unwrap();
    let tables = "CREATE TABLE once (id bigserial, value text, record_offset bigint, partition int);
                  CREATE TABLE naive (value text)";
    database.sql("postgres", tables).unwrap();
    let (url, options) = (database.url("postgres"), Options::default());
    broker.block_on(hapax_postgres::migrate(&url, &options, false)).unwrap();
    let producer = broker.config().create().unwrap();
    let mut scene = Scene { topic, broker, database, producer, produced: 0 };
    scene.produce(300);

    let once = if protocol == Protocol::Consumer { "once-by-broker" } else { "once" };
    let (mut first, mut second, mut naive) =
        (scene.start(once), scene.start(once), scene.start("naive-stops"));
    // Killed in the middle.
    scene.wait("*) FROM once", 40);
    first.kill();
    naive.wait_for_line("before the commit");
    naive.kill();
    let _third = scene.start(once);
    let _naive = scene.start("naive");
    // Stopped until others have done its part, then woken: it finds that the position has moved.
    scene.wait("*) FROM once", 100);
    second.pause();
    scene.wait("*) FROM once", 300);
    scene.produce(60);
    second.resume();
    broker.kill();
    broker.run().unwrap();
    scene.produce(60);
    scene.wait("*) FROM once", 420);
    scene.wait("DISTINCT value) FROM naive", 420);
    second.kill();

    assert_eq!((scene.count("*) FROM once"), scene.count("DISTINCT value) FROM once")), (420, 420));
    let behind =
        "*) FROM (SELECT record_offset - lag(record_offset) OVER (PARTITION BY partition ORDER BY id) AS step
                  FROM once) x WHERE step <> 1";
    assert_eq!(scene.count(behind), 0, "in the order of the log");
    let naive = scene.count("*) FROM naive");
    println!("420 records: 420 rows; the naive consumer made {naive}");
    assert!(naive > 420, "the naive consumer is the control: it must show duplicates");
}
