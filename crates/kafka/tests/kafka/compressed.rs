//! Topics whose records the broker compresses, under a processor.

use std::time::Duration;

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
        shared("processor_passes_no_batch_over_that_it_cannot_read", zstd_is_refused),
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

fn zstd_is_refused(broker: &Broker) {
    let error = process(broker, "zstd").unwrap_err();
    assert!(matches!(error, ProcessorError::Consumer(ConsumerError::Unreadable { .. })), "{error:?}");
    assert!(error.to_string().contains("compressed with zstd, which this build does not read"), "{error}");
}
