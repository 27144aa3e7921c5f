//! What is refused before the first record.

use hapax_core::Tier;
use hapax_core::policy::RetryPolicy;
use hapax_kafka::share::{ShareError, ShareOptions, ShareSource};
use hapax_worker::{BuildError, Cx, Worker};

use crate::broker::Broker;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("settings_that_lose_records_are_refused", settings_that_lose_records_are_refused),
        shared("effectively_once_needs_a_ledger", effectively_once_needs_a_ledger),
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
