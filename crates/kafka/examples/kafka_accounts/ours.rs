//! A stage with the processor of `hapax-kafka`.

use std::time::Duration;

use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{NewRecord, ProducerConfig};
use hapax_kafka::wire::Connect;

use crate::stage::{BATCH, Settings, Work};

struct StageHandler {
    work: Work,
    output: String,
}

impl Handler for StageHandler {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = String::from_utf8_lossy(record.value.as_deref().unwrap_or_default());
        let (records, handled) = self.work.handle(&value);
        output.extend(records.into_iter().map(|(key, value)| NewRecord::new(&self.output, key, value)));
        Ok(handled?)
    }
}

/// Runs until it is killed, or another process takes its transactional id.
pub fn run(settings: &Settings) {
    let mut producer = ProducerConfig::new(Connect::plain([&settings.address]), &settings.transactional_id());
    producer.connect.request_timeout = Duration::from_secs(3);
    // Outputs are sent at once, so that a transaction that is aborted has left some of them in the log.
    producer.buffer_bytes_max = 100;
    let mut consumer = ConsumerConfig::new(&settings.address, &settings.group(), &[&settings.input()]);
    // The member keeps its partitions while it restarts.
    consumer.properties = vec![("group.instance.id".to_owned(), "0".to_owned())];
    let config = ProcessorConfig {
        batch_records_max: BATCH,
        batch_time_max: settings.batch_time_max(),
        ..ProcessorConfig::default()
    };
    let handler = StageHandler { work: Work::new(settings.stage), output: settings.output() };
    let ended = crate::block_on(async {
        let client = KafkaClient::connect(&consumer, producer, &config).await?;
        Processor::new(config, client, handler).run(std::future::pending()).await
    });
    eprintln!("the stage ended: {ended:?}");
}
