//! A producer and a consumer that obey lines of standard input. Each line but `go` is answered by one line: `ok …` or `error …`.
//! What happens meanwhile is told by lines that begin with `event`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use krafka::consumer::{
    AutoOffsetReset, Consumer, ConsumerRebalanceListener, GroupProtocol, IsolationLevel,
    PartitionAssignmentStrategy, TopicPartition,
};
use krafka::producer::{TopicPartitionOffset, TransactionalProducer};
use krafka::{Kafka, Record};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::{Notify, mpsc};

use crate::Result;

/// Longer than any case: a transaction ends because the case ends it.
const TRANSACTION_TIMEOUT: Duration = Duration::from_mins(1);
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(45);
/// The time that a group waits for a member that has to give partitions up.
const REBALANCE_TIMEOUT: Duration = Duration::from_mins(10);

struct Session {
    kafka: Kafka,
    producer: Option<TransactionalProducer>,
    consumer: Option<Consumer>,
    listener: Arc<Listener>,
}

/// Waits at changes of the assignment, if it is told to.
#[derive(Default)]
struct Listener {
    holds_assigned: AtomicBool,
    holds_revoked: AtomicBool,
    go: Notify,
}

impl Listener {
    async fn change(&self, name: &str, partitions: &[TopicPartition], holds: &AtomicBool) {
        let partitions: Vec<i32> = partitions.iter().map(|at| at.partition).collect();
        println!("event {name} {partitions:?}");
        if holds.load(Ordering::SeqCst) && !partitions.is_empty() {
            self.go.notified().await;
            println!("event {name} done");
        }
    }
}

impl ConsumerRebalanceListener for Listener {
    async fn on_partitions_assigned(&self, partitions: &[TopicPartition]) {
        self.change("assigned", partitions, &self.holds_assigned).await;
    }

    async fn on_partitions_revoked(&self, partitions: &[TopicPartition]) {
        self.change("revoked", partitions, &self.holds_revoked).await;
    }

    async fn on_partitions_lost(&self, partitions: &[TopicPartition]) {
        self.change("lost", partitions, &AtomicBool::new(false)).await;
    }
}

pub async fn run(kafka: Kafka) -> Result<()> {
    let listener = Arc::new(Listener::default());
    let mut session = Session { kafka, producer: None, consumer: None, listener: listener.clone() };
    let (sender, mut commands) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // While a command waits in the listener, too.
            if line == "go" {
                listener.go.notify_one();
            } else if sender.send(line).is_err() {
                break;
            }
        }
    });
    while let Some(command) = commands.recv().await {
        match session.obey(&command).await {
            Ok(answer) => println!("ok {answer}"),
            Err(error) => println!("error {}", error.to_string().replace('\n', " ")),
        }
    }
    // The case has ended; whatever is still open is no part of it.
    std::process::exit(0)
}

impl Session {
    fn producer(&self) -> Result<&TransactionalProducer> {
        Ok(self.producer.as_ref().ok_or("no producer")?)
    }

    fn consumer(&self) -> Result<&Consumer> {
        Ok(self.consumer.as_ref().ok_or("no consumer")?)
    }

    async fn obey(&mut self, command: &str) -> Result<String> {
        let words: Vec<&str> = command.split(' ').collect();
        let mut answer = String::new();
        match words[..] {
            ["producer", id, retry_ms] => {
                let producer = self.kafka.producer().transaction_timeout(TRANSACTION_TIMEOUT);
                let producer = producer.retry_backoff(Duration::from_millis(retry_ms.parse()?));
                let producer = producer.delivery_timeout(DELIVERY_TIMEOUT).build_transactional(id).await?;
                write!(answer, "{:?} {}", producer.transaction_version(), producer.producer_epoch())?;
                self.producer = Some(producer);
            }
            ["begin"] => self.producer()?.begin()?,
            ["send", topic, partition, value] => {
                let record = Record::new(topic, value.to_owned()).key("key").partition(partition.parse()?);
                let _ = self.producer()?.send(record).await?;
            }
            // Without waiting for an answer.
            ["enqueue", topic, partition, value] => {
                let record = Record::new(topic, value.to_owned()).key("key").partition(partition.parse()?);
                drop(self.producer()?.enqueue(record).await?);
            }
            // One for each partition.
            ["enqueue-many", topic, partitions, bytes] => {
                for partition in 0..partitions.parse::<i32>()? {
                    let record = Record::new(topic, vec![b'x'; bytes.parse()?]).partition(partition);
                    drop(self.producer()?.enqueue(record).await?);
                }
            }
            ["send-within", seconds, topic, value] => {
                let record = Record::new(topic, value.to_owned()).partition(0);
                let limit = Duration::from_secs(seconds.parse()?);
                match tokio::time::timeout(limit, self.producer()?.send(record)).await {
                    Ok(sent) => drop(sent?),
                    Err(_) => answer.push_str("no answer"),
                }
            }
            ["offset", topic, partition, next] => {
                let group = self.consumer()?.group_metadata().await.ok_or("no member of the group")?;
                let offset = TopicPartitionOffset::new(topic, partition.parse()?, next.parse()?);
                self.producer()?.send_offsets(&[offset], &group).await?;
            }
            ["commit"] => self.producer()?.commit().await?,
            ["abort"] => self.producer()?.abort().await?,
            ["state"] => write!(answer, "{:?}", self.producer()?.state())?,
            ["consumer", group, topic, protocol, reset] => {
                self.consumer = Some(self.join(group, topic, protocol, reset).await?);
            }
            ["hold", what] => {
                self.listener.holds_assigned.store(what == "assigned", Ordering::SeqCst);
                self.listener.holds_revoked.store(what == "revoked", Ordering::SeqCst);
            }
            ["poll", time_ms] => {
                let time = Duration::from_millis(time_ms.parse()?);
                for record in self.consumer()?.poll(time).await? {
                    let value =
                        String::from_utf8_lossy(record.value.as_deref().unwrap_or_default()).into_owned();
                    write!(answer, "{}/{value} ", record.partition)?;
                }
            }
            // As in a loop with `select!` or `timeout`: the call is dropped.
            ["poll-dropped-after", time_ms] => {
                let time = Duration::from_millis(time_ms.parse()?);
                let poll = self.consumer()?.poll(Duration::from_secs(1));
                let polled = tokio::time::timeout(time, poll).await;
                write!(answer, "{}", if polled.is_ok() { "polled" } else { "dropped" })?;
            }
            ["assignment"] => {
                let mut partitions: Vec<i32> =
                    self.consumer()?.assignment().await.into_values().flatten().collect();
                partitions.sort_unstable();
                write!(answer, "{partitions:?}")?;
            }
            _ => return Err(format!("unknown command: {command}").into()),
        }
        Ok(answer)
    }

    async fn join(&self, group: &str, topic: &str, protocol: &str, reset: &str) -> Result<Consumer> {
        let reset = match reset {
            "earliest" => AutoOffsetReset::Earliest,
            "none" => AutoOffsetReset::None,
            _ => AutoOffsetReset::Latest,
        };
        let consumer = self
            .kafka
            .consumer(group)
            .auto_offset_reset(reset)
            .isolation_level(IsolationLevel::ReadCommitted)
            .enable_auto_commit(false)
            .max_poll_interval(REBALANCE_TIMEOUT)
            .rebalance_listener(self.listener.clone());
        let consumer = match protocol {
            "classic" => {
                consumer.partition_assignment_strategy(PartitionAssignmentStrategy::CooperativeSticky)
            }
            _ => consumer.group_protocol(GroupProtocol::Consumer),
        };
        let consumer = consumer.build().await?;
        consumer.subscribe([topic]).await?;
        Ok(consumer)
    }
}
