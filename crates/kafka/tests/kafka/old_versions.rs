//! Clusters whose transactions are refused before the first record: a delayed request of one transaction could end the next one.

use std::time::{Duration, Instant};

use hapax_faults::KafkaServer;
use hapax_kafka::admin::{self, Wanted};
use hapax_kafka::consumer::ConsumerConfig;
use hapax_kafka::processor::{KafkaClient, ProcessorConfig};
use hapax_kafka::producer::{Producer, ProducerConfig, ResponseError};
use hapax_kafka::wire::{Cluster, Connect};
use kafka_protocol::error::ParseResponseErrorCode as _;
use kafka_protocol::messages::UpdateFeaturesRequest;
use kafka_protocol::messages::update_features_request::FeatureUpdateKey;
use kafka_protocol::protocol::StrBytes;
use libtest_mimic::Completion;

use crate::broker::PATIENCE;
use crate::{Case, long};

pub fn cases() -> Vec<Case> {
    vec![
        long("transaction_version_0_is_refused_until_it_is_upgraded", transaction_version_0_is_refused),
        long("kafka_3_is_refused", kafka_3_is_refused),
    ]
}

const FEATURE: &str = "transaction.version";

fn transaction_version_0_is_refused() -> Completion {
    let broker = KafkaServer::start_formatted(&[], &["--feature", "transaction.version=0"]).unwrap();
    block_on(async {
        is_refused(&broker, "0").await;
        // What the command does that the refusal names.
        set_version(&broker, 2, 1).await;
        producer(&broker).await.unwrap();
        set_version(&broker, 0, 2).await;
        is_refused(&broker, "0").await;
    });
    Completion::Completed
}

fn kafka_3_is_refused() -> Completion {
    if let Err(why) = KafkaServer::jars_of(KafkaServer::VERSION_3) {
        return Completion::ignored_with(why);
    }
    let broker = KafkaServer::start_version_3().unwrap();
    block_on(is_refused(&broker, "0"));
    Completion::Completed
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(future)
}

fn connect(broker: &KafkaServer) -> Connect {
    Connect::plain([broker.address().to_string()])
}

async fn producer(broker: &KafkaServer) -> Result<Producer, hapax_kafka::producer::ProducerError> {
    Producer::connect(ProducerConfig::new(connect(broker), "orders-1")).await
}

/// Producer, processor and `check` refuse, and name the command that upgrades the cluster.
async fn is_refused(broker: &KafkaServer, level: &str) {
    let command = format!(
        "kafka-features.sh --bootstrap-server {} upgrade --feature transaction.version=2",
        broker.address()
    );
    let names = |error: String| {
        let refused = format!("{FEATURE} = {level:?} is refused");
        assert!(error.contains(&refused) && error.contains(&command), "{error}");
    };
    names(producer(broker).await.unwrap_err().to_string());
    let config = ProcessorConfig::default();
    let consumer = ConsumerConfig::new(&broker.address().to_string(), "orders", &["orders"]);
    let settings = ProducerConfig::new(connect(broker), "orders-1");
    names(KafkaClient::connect(&consumer, settings, &config).await.unwrap_err().to_string());
    let found = admin::check(&Cluster::new(connect(broker)), &Wanted::default()).await.unwrap();
    let refused = found.refused.iter().find(|refused| refused.key == FEATURE).unwrap();
    assert_eq!(refused.value, level);
    assert!(refused.remedy.contains(&command), "{}", refused.remedy);
}

/// Upgrades (1) or downgrades (2) the cluster's transaction version, and waits until the broker tells it.
async fn set_version(broker: &KafkaServer, level: i16, upgrade_type: i8) {
    let cluster = Cluster::new(connect(broker));
    let update = FeatureUpdateKey::default()
        .with_feature(StrBytes::from_static_str(FEATURE))
        .with_max_version_level(level)
        .with_upgrade_type(upgrade_type);
    let request = UpdateFeaturesRequest::default().with_feature_updates(vec![update]).with_timeout_ms(60_000);
    let (answer, _) = cluster.call_any(&request, 1).await.unwrap();
    let error: Option<ResponseError> = answer.error_code.err();
    assert_eq!(error, None, "{:?}", answer.error_message);
    for result in answer.results {
        assert_eq!(result.error_code.err(), None, "{:?}", result.error_message);
    }
    let start = Instant::now();
    loop {
        // A connection asks only when it is made.
        let told = Cluster::new(connect(broker)).versions().await.unwrap().feature(FEATURE);
        if told == level {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "the broker tells {told}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
