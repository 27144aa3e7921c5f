//! What is refused before the first record.

use std::time::Instant;

use hapax_core::policy::RetryPolicy;
use hapax_core::{Receive, Source as _, StoreError, Tier};
use hapax_kafka::share::{ShareError, ShareOptions, ShareSource};
use hapax_kafka::wire::Connect;
use hapax_worker::{BuildError, Cx, Worker};
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;

use crate::broker::{Broker, PATIENCE, next};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("settings_that_lose_records_are_refused", settings_that_lose_records_are_refused),
        shared("effectively_once_needs_a_ledger", effectively_once_needs_a_ledger),
        shared("what_does_not_fit_into_a_response_is_not_dropped", what_does_not_fit_is_not_dropped),
    ]
}

fn refusal(broker: &Broker, options: ShareOptions) -> String {
    let refused = broker.block_on(ShareSource::connect(options)).unwrap_err();
    assert!(matches!(refused, ShareError::Refused(_)), "{refused}");
    refused.to_string()
}

fn settings_that_lose_records_are_refused(broker: &Broker) {
    let options = broker.prepare("refused", 1);
    let unconfigured = ShareOptions { group: "refused-other".into(), ..options.clone() };
    let text = refusal(broker, unconfigured.clone());
    for part in [
        "share.auto.offset.reset = \"latest\"",
        "share.isolation.level = \"read_uncommitted\"",
        "--add-config",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let accepted = ShareOptions { may_begin_at_end: true, may_read_uncommitted: true, ..unconfigured };
    broker.block_on(async { ShareSource::connect(accepted).await.unwrap().close().await });
    for attempts in [0, 5] {
        let retry = RetryPolicy { cap_ms: 1_000, ..RetryPolicy::default() }.attempts(attempts);
        let text = refusal(broker, ShareOptions { retry, ..options.clone() });
        assert!(text.contains("retry.max_attempts") && text.contains("at most 4"), "{text}");
    }
    let retry = RetryPolicy { cap_ms: 60_000, base_ms: 4_000, ..options.retry };
    let text = refusal(broker, ShareOptions { retry, ..options.clone() });
    assert!(text.contains("retry_topic") && text.contains("3000 ms"), "{text}");
    for tier in [Tier::Transactional, Tier::AtMostOnce] {
        let text = refusal(broker, ShareOptions { tier, ..options.clone() });
        assert!(text.contains("effectively-once"), "{text}");
    }
    let text = refusal(broker, ShareOptions { dead_letter_topic: "nowhere".into(), ..options.clone() });
    assert!(text.contains("dead_letter_topic = \"nowhere\"") && text.contains("create it"), "{text}");
    let text = refusal(broker, ShareOptions { retry_topic: Some("refused-dead".into()), ..options });
    assert!(text.contains("named twice"), "{text}");
}

fn effectively_once_needs_a_ledger(broker: &Broker) {
    let options = ShareOptions { tier: Tier::EffectivelyOnce, ..broker.prepare("no-ledger", 1) };
    let source = broker.source(options);
    broker.block_on(async {
        let builder = Worker::from_source(source).handler(|_: u32, _: Cx| async {});
        let Err(BuildError::Tier(found)) = builder.build().await else { panic!("it needs a ledger") };
        assert_eq!(found[0].code, "ledger-missing");
    });
}

/// Each time that a record is fetched counts as a delivery, also if the response is not read, and the broker drops a record after
/// some deliveries. So such a topic is refused; a record that is larger than the topic says now ends the source.
fn what_does_not_fit_is_not_dropped(broker: &Broker) {
    let topic = "share-large";
    let options = broker.prepare(topic, 1);
    let connect = Connect { response_bytes_max: 300_000, ..broker.connect() };
    let small = ShareOptions { connect, ..options.clone() };
    let text = refusal(broker, small.clone());
    assert!(text.contains("max.message.bytes = \"1048588\"") && text.contains("to 1114124"), "{text}");
    broker.send(topic, ["x".repeat(400_000)]);
    broker.block_on(async {
        let admin: AdminClient<DefaultClientContext> = broker.config().create().unwrap();
        let lower = AlterConfig::new(ResourceSpecifier::Topic(topic)).set("max.message.bytes", "200000");
        admin.alter_configs([&lower], &AdminOptions::new()).await.unwrap().remove(0).unwrap();
        let start = Instant::now();
        // The broker may tell the old value for a moment.
        let source = loop {
            match ShareSource::connect(small.clone()).await {
                Ok(source) => break source,
                Err(refused) => assert!(start.elapsed() < PATIENCE, "{refused}"),
            }
        };
        let problem = loop {
            let receive = Receive { wait_ms: Some(1_000), ..Receive::up_to(1) };
            match source.next(receive).await {
                Err(StoreError::Invalid(problem)) => break problem,
                other => assert!(start.elapsed() < PATIENCE, "it is too large, and fetched again: {other:?}"),
            }
        };
        assert!(problem.contains("raise response_bytes_max"), "{problem}");
        source.close().await;
        let source = ShareSource::connect(options).await.unwrap();
        let found = next(&source, 1).await;
        assert_eq!(
            (found[0].body.len(), found[0].deliveries),
            (400_000, 2),
            "delivered once, and not dropped"
        );
        source.close().await;
    });
}
