//! Topics whose records the broker compresses, and damaged ones, under a processor.

use std::time::Duration;

use hapax_faults::Match;
use hapax_kafka::consumer::{ConsumerConfig, ConsumerError, Record};
use hapax_kafka::processor::{
    Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError, Totals,
};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("processor_reads_gzip", |broker| is_read(broker, "gzip")),
        shared("processor_reads_snappy", |broker| is_read(broker, "snappy")),
        shared("processor_reads_lz4", |broker| is_read(broker, "lz4")),
        shared("processor_reads_zstd", |broker| is_read(broker, "zstd")),
        shared("processor_passes_no_batch_over_that_is_damaged", a_damaged_batch_is_not_passed_over),
    ]
}

const RECORDS: usize = 50;

/// Copies records into a topic that is compressed as well.
struct Copier(String);

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        output.push(NewRecord { value: record.value.clone(), ..NewRecord::new(&self.0, "key", "") });
        Ok(())
    }
}

fn values() -> Vec<String> {
    (0..RECORDS).map(|number| format!("{number} {}", "a long text ".repeat(50))).collect()
}

/// Fills a topic of this compression, and processes it until all records are seen in the output.
fn process(broker: &Broker, codec: &str) -> Result<Totals, ProcessorError> {
    let topic = format!("compressed-{codec}");
    let output = format!("{topic}-out");
    broker.create_topic_with(&topic, 1, &[("compression.type", codec)]);
    broker.create_topic_with(&output, 1, &[("compression.type", codec)]);
    broker.block_on(async {
        let address = broker.address().to_string();
        let config = ProducerConfig::new(Connect::plain([&address]), &format!("{topic}-fill"));
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        for value in values() {
            producer.send(NewRecord::new(&topic, "key", value)).await.unwrap();
        }
        producer.commit().await.unwrap();
        let producer = ProducerConfig::new(Connect::plain([&address]), &topic);
        let consumer = ConsumerConfig::new(&address, &topic, &[&topic]);
        let config = ProcessorConfig::default();
        let client = KafkaClient::connect(&consumer, producer, &config).await.unwrap();
        let all = async {
            while tokio::task::block_in_place(|| broker.read(&output, Isolation::Committed)).len() < RECORDS {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let run = Processor::new(config, client, Copier(output.clone())).run(std::future::pending());
        tokio::select! {
            ended = tokio::time::timeout(PATIENCE, run) => ended.expect("it reads, or it ends in time"),
            () = all => Ok(Totals::default()),
        }
    })
}

fn is_read(broker: &Broker, codec: &str) {
    process(broker, codec).unwrap();
    assert_eq!(broker.read(&format!("compressed-{codec}-out"), Isolation::Committed), values());
}

/// One letter of a value changes on its way from the broker, whose own checksum is right.
fn a_damaged_batch_is_not_passed_over(broker: &Broker) {
    let topic = "damaged";
    let output = format!("{topic}-out");
    broker.create_topic(topic, 1);
    broker.create_topic(&output, 1);
    let damage = broker.proxy().change(Match::answer_to(format!("Fetch {topic}")), |_, frame| {
        let found = frame.windows(6).position(|window| window == b"1 euro");
        if let Some(place) = found {
            frame[place] = b'9';
        }
    });
    let error = broker.block_on(async {
        let proxied = broker.proxied().to_string();
        let config = ProducerConfig::new(Connect::plain([&proxied]), &format!("{topic}-fill"));
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        producer.send(NewRecord::new(topic, "key", "1 euro")).await.unwrap();
        producer.commit().await.unwrap();
        let producer = ProducerConfig::new(Connect::plain([&proxied]), topic);
        let mut consumer = ConsumerConfig::new(&proxied, topic, &[topic]);
        consumer.properties = vec![("client.id".to_owned(), topic.to_owned())];
        let config = ProcessorConfig::default();
        let client = KafkaClient::connect(&consumer, producer, &config).await.unwrap();
        let run = Processor::new(config, client, Copier(output.clone())).run(std::future::pending());
        tokio::time::timeout(PATIENCE, run).await.expect("it ends in time").unwrap_err()
    });
    assert!(matches!(error, ProcessorError::Consumer(ConsumerError::Unreadable { .. })), "{error:?}");
    assert!(error.to_string().contains("a batch is damaged"), "{error}");
    assert!(damage.count() > 0);
    damage.remove();
    assert_eq!(broker.read(&output, Isolation::Committed), [""; 0]);
}
