//! The settings of brokers, group and topics, and what is refused of them.

use std::collections::HashMap;
use std::time::Duration;

use hapax_core::{Tier, policy};
use kafka_protocol::error::ParseResponseErrorCode as _;
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::incremental_alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{DescribeConfigsRequest, IncrementalAlterConfigsRequest, MetadataRequest};
use tokio::time::Instant;

use super::{ShareError, ShareOptions};
use crate::admin::AdminError;
use crate::refusal::Refusal;
use crate::wire::{Backoff, Cluster, Connect, text};

/// Kinds of resources with a configuration.
const TOPIC: i8 = 2;
const BROKER: i8 = 4;
const GROUP: i8 = 32;
/// Newest versions of the requests that are used.
const METADATA_MAX: i16 = 12;
const DESCRIBE_CONFIGS_MAX: i16 = 4;
const ALTER_CONFIGS_MAX: i16 = 1;
/// How long brokers may take to know a configuration that was set.
const TAKE_OVER_MAX: Duration = Duration::from_secs(10);
/// The operation that sets a value.
const SET: i8 = 0;
/// Bytes of a response beside its records.
const RESPONSE_ROOM: usize = 64 << 10;

/// What was read at the start.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// How long a record is locked.
    pub lock_ms: u64,
    /// The broker drops a record after this many deliveries.
    pub limit: u32,
    pub retention_ms: u64,
    pub dead_retention_ms: u64,
}

/// Reads the settings; an error if a guarantee does not hold with them.
pub(super) async fn check(options: &ShareOptions) -> Result<Settings, ShareError> {
    let mut refused = Vec::new();
    if !matches!(options.tier, Tier::AtLeastOnce | Tier::EffectivelyOnce) {
        let remedy = "the acknowledgement of a share group is no part of a transaction; use effectively-once with a \
                      ledger, or Kafka to database";
        refused.push(Refusal::new("tier", format!("{:?}", options.tier), remedy));
        return Err(ShareError::Refused(refused));
    }
    let cluster = Cluster::new(options.connect.clone());
    let level = cluster.versions().await?.feature("share.version");
    if level < 1 {
        let remedy = "share groups need Kafka 4.2 or later, and there: \
             kafka-features.sh --bootstrap-server HOST:PORT upgrade --feature share.version=1";
        refused.push(Refusal::new("share.version", level.to_string(), remedy));
        return Err(ShareError::Refused(refused));
    }
    check_topics(&cluster, options, &mut refused).await?;
    let group = configs(&cluster, GROUP, &options.group).await?;
    let number = |key: &str| group.get(key).and_then(|value| value.parse::<u64>().ok());
    let lock_ms = number("share.record.lock.duration.ms").unwrap_or(30_000).max(1);
    let limit = match number("share.delivery.count.limit") {
        Some(limit) => limit,
        None => broker_limit(&cluster).await?,
    };
    check_group(options, &group, &mut refused);
    check_retry(options, lock_ms, limit, &mut refused);
    if !refused.is_empty() {
        return Err(ShareError::Refused(refused));
    }
    let of_topic = configs(&cluster, TOPIC, &options.topic).await?;
    let bytes_max = options.connect.response_bytes_max;
    refused.extend(too_large(&options.topic, &of_topic, bytes_max));
    if let Some(topic) = &options.retry_topic {
        refused.extend(too_large(topic, &configs(&cluster, TOPIC, topic).await?, bytes_max));
    }
    if !refused.is_empty() {
        return Err(ShareError::Refused(refused));
    }
    Ok(Settings {
        lock_ms,
        limit: u32::try_from(limit).unwrap_or(u32::MAX),
        retention_ms: retention_ms(&of_topic),
        dead_retention_ms: retention_ms(&configs(&cluster, TOPIC, &options.dead_letter_topic).await?),
    })
}

async fn check_topics(
    cluster: &Cluster,
    options: &ShareOptions,
    refused: &mut Vec<Refusal>,
) -> Result<(), ShareError> {
    let named = [
        ("topic", Some(&options.topic)),
        ("dead_letter_topic", Some(&options.dead_letter_topic)),
        ("retry_topic", options.retry_topic.as_ref()),
    ];
    let mut seen: Vec<&String> = Vec::new();
    for (key, topic) in named {
        let Some(topic) = topic else { continue };
        if seen.contains(&topic) {
            refused.push(Refusal::new(
                key,
                topic,
                "it is named twice; topic, retries and dead letters differ",
            ));
            continue;
        }
        seen.push(topic);
        let asked = MetadataRequestTopic::default().with_name(Some(text(topic).into()));
        let request =
            MetadataRequest::default().with_topics(Some(vec![asked])).with_allow_auto_topic_creation(false);
        let (answer, _) = cluster.call_any(&request, METADATA_MAX).await?;
        if let Some(error) = answer.topics.first().and_then(|found| found.error_code.err()) {
            refused.push(Refusal::new(key, topic, format!("{error}; create it first")));
        }
    }
    Ok(())
}

fn check_group(options: &ShareOptions, group: &HashMap<String, String>, refused: &mut Vec<Refusal>) {
    let name = &options.group;
    let alter = |setting: &str| {
        format!(
            "kafka-configs.sh --bootstrap-server HOST:PORT --alter --group {name} --add-config {setting} (or \
             ShareOptions::configure_group)"
        )
    };
    let mut refuse = |key: &str, wanted: &str, accepted: bool, why: &str| {
        let value = group.get(key).map_or("", String::as_str);
        if value != wanted && !accepted {
            refused.push(Refusal::new(
                key,
                value,
                format!("{why}; run {}", alter(&format!("{key}={wanted}"))),
            ));
        }
    };
    refuse(
        "share.auto.offset.reset",
        "earliest",
        options.may_begin_at_end,
        "a new group would skip what was sent before its first member joined",
    );
    refuse(
        "share.isolation.level",
        "read_committed",
        options.may_read_uncommitted,
        "records of aborted transactions would be delivered",
    );
    // Brokers without the setting allow it.
    let renews = group.get("share.renew.acknowledge.enable").is_none_or(|value| value == "true");
    refuse(
        "share.renew.acknowledge.enable",
        "true",
        renews,
        "a handler that runs for longer than one lock would lose its record",
    );
}

fn check_retry(options: &ShareOptions, lock_ms: u64, limit: u64, refused: &mut Vec<Refusal>) {
    let attempts = u64::from(options.retry.max_attempts);
    if attempts == 0 || attempts + 1 > limit {
        let remedy = format!(
            "the broker drops a record at delivery {limit} (share.delivery.count.limit), so at most {} attempts can be made; \
             use at most that, or raise it: kafka-configs.sh --bootstrap-server HOST:PORT --alter --group {} --add-config \
             share.delivery.count.limit={}",
            limit.saturating_sub(1),
            options.group,
            attempts + 1,
        );
        refused.push(Refusal::new("retry.max_attempts", attempts.to_string(), remedy));
    }
    let longest_ms = (1..options.retry.max_attempts).map(|attempt| options.retry.ceiling_ms(attempt)).max();
    if let Some(longest_ms) = longest_ms
        && options.retry_topic.is_none()
        && longest_ms > lock_ms
    {
        let remedy = format!(
            "a delay may be {longest_ms} ms, and a record is locked for {lock_ms} ms; set retry_topic, or lower retry.cap_ms"
        );
        refused.push(Refusal::new("retry.cap_ms", options.retry.cap_ms.to_string(), remedy));
    }
}

/// A batch that does not fit into a response is never seen, and the broker drops it when it has been fetched often enough.
fn too_large(topic: &str, of_topic: &HashMap<String, String>, response_bytes_max: usize) -> Option<Refusal> {
    let largest: usize = of_topic.get("max.message.bytes")?.parse().ok()?;
    let needed = largest.saturating_add(RESPONSE_ROOM);
    (needed > response_bytes_max).then(|| {
        let remedy = format!(
            "a record of {topic} may be larger than a response, which has at most {response_bytes_max} bytes; raise \
             response_bytes_max of the connection to {needed}, or lower max.message.bytes of the topic"
        );
        Refusal::new("max.message.bytes", largest.to_string(), remedy)
    })
}

/// The smallest limit of all brokers.
async fn broker_limit(cluster: &Cluster) -> Result<u64, ShareError> {
    let request = MetadataRequest::default().with_topics(Some(Vec::new()));
    let (answer, _) = cluster.call_any(&request, METADATA_MAX).await?;
    let mut limit = None;
    for broker in &answer.brokers {
        let address = format!("{}:{}", broker.host, broker.port);
        let request = describe(BROKER, &broker.node_id.0.to_string());
        let (answer, _) = cluster.call_at(&address, &request, DESCRIBE_CONFIGS_MAX).await?;
        let mut found = answer.results.iter().flat_map(|result| &result.configs);
        let found = found.find(|config| config.name.as_str() == "group.share.delivery.count.limit");
        let value =
            found.and_then(|config| config.value.as_ref()).and_then(|value| value.parse::<u64>().ok());
        limit = match (limit, value) {
            (Some(limit), Some(value)) => Some(std::cmp::min(limit, value)),
            (limit, value) => limit.or(value),
        };
    }
    Ok(limit.unwrap_or(5))
}

fn retention_ms(of_topic: &HashMap<String, String>) -> u64 {
    // -1 is without an end.
    let ms = of_topic.get("retention.ms").and_then(|value| value.parse::<u64>().ok());
    ms.unwrap_or(policy::RETENTION_MS_MAX).clamp(policy::RETENTION_MS_MIN, policy::RETENTION_MS_MAX)
}

fn describe(kind: i8, name: &str) -> DescribeConfigsRequest {
    let resource = DescribeConfigsResource::default()
        .with_resource_type(kind)
        .with_resource_name(text(name))
        .with_configuration_keys(None);
    DescribeConfigsRequest::default().with_resources(vec![resource])
}

async fn configs(cluster: &Cluster, kind: i8, name: &str) -> Result<HashMap<String, String>, ShareError> {
    let (answer, _) = cluster.call_any(&describe(kind, name), DESCRIBE_CONFIGS_MAX).await?;
    let mut found = HashMap::new();
    for result in answer.results {
        if let Some(error) = result.error_code.err() {
            let what = format!("the configuration of {name}");
            return Err(AdminError::Refused { what, error }.into());
        }
        for config in result.configs {
            found.insert(
                config.name.to_string(),
                config.value.map(|value| value.to_string()).unwrap_or_default(),
            );
        }
    }
    Ok(found)
}

/// Sets values of a group's configuration.
pub(super) async fn set_group(
    connect: &Connect,
    group: &str,
    values: &[(&str, &str)],
) -> Result<(), ShareError> {
    let cluster = Cluster::new(connect.clone());
    let configs = values.iter().map(|(key, value)| {
        AlterableConfig::default()
            .with_name(text(key))
            .with_config_operation(SET)
            .with_value(Some(text(value)))
    });
    let resource = AlterConfigsResource::default()
        .with_resource_type(GROUP)
        .with_resource_name(text(group))
        .with_configs(configs.collect());
    let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
    let (answer, _) = cluster.call_any(&request, ALTER_CONFIGS_MAX).await?;
    if let Some(error) = answer.responses.iter().find_map(|response| response.error_code.err()) {
        return Err(AdminError::Refused { what: format!("the configuration of group {group}"), error }.into());
    }
    // The controller has accepted it; the brokers take it over a little later.
    let deadline = Instant::now() + TAKE_OVER_MAX;
    let mut backoff = Backoff::new();
    loop {
        let found = self::configs(&cluster, GROUP, group).await?;
        let is_set = values.iter().all(|(key, value)| found.get(*key).is_some_and(|known| known == value));
        if is_set || Instant::now() >= deadline {
            return Ok(());
        }
        backoff.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::policy::RetryPolicy;

    use super::*;

    fn options() -> ShareOptions {
        ShareOptions::new(Connect::plain(["localhost:1"]), "g", "t", "t-dead")
    }

    #[test]
    fn more_attempts_than_the_broker_makes_are_refused_with_the_remedy() {
        for (attempts, limit, is_refused) in [(4, 5, false), (5, 5, true), (0, 5, true), (9, 10, false)] {
            let retry = RetryPolicy { cap_ms: 1_000, ..RetryPolicy::default() }.attempts(attempts);
            let mut refused = Vec::new();
            check_retry(&ShareOptions { retry, ..options() }, 30_000, limit, &mut refused);
            assert_eq!(!refused.is_empty(), is_refused, "{attempts} of {limit}: {refused:?}");
            for refusal in refused {
                let text = refusal.to_string();
                assert!(text.contains("share.delivery.count.limit=") && text.contains("at most"), "{text}");
            }
        }
    }

    #[test]
    fn delays_beyond_a_lock_need_a_retry_topic() {
        let retry = RetryPolicy::exponential(1_000, 300_000).attempts(8);
        let without = ShareOptions { retry, ..options() };
        let with = ShareOptions { retry_topic: Some("t-retry".into()), ..without.clone() };
        for (options, is_refused) in [(without, true), (with, false)] {
            let mut refused = Vec::new();
            check_retry(&options, 30_000, 10, &mut refused);
            assert_eq!(!refused.is_empty(), is_refused, "{refused:?}");
            assert!(refused.iter().all(|refusal| refusal.remedy.contains("retry_topic")), "{refused:?}");
        }
    }

    #[test]
    fn a_group_that_skips_or_shows_too_much_is_refused() {
        let values = |reset: &str, isolation: &str, renew: &str| {
            let pairs = [
                ("share.auto.offset.reset", reset),
                ("share.isolation.level", isolation),
                ("share.renew.acknowledge.enable", renew),
            ];
            pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
        };
        let count = |options: &ShareOptions, group: HashMap<String, String>| {
            let mut refused = Vec::new();
            check_group(options, &group, &mut refused);
            refused.len()
        };
        assert_eq!(count(&options(), values("earliest", "read_committed", "true")), 0);
        assert_eq!(count(&options(), values("latest", "read_committed", "true")), 1);
        assert_eq!(count(&options(), values("earliest", "read_uncommitted", "true")), 1);
        assert_eq!(count(&options(), values("earliest", "read_committed", "false")), 1);
        let lax = ShareOptions { may_begin_at_end: true, may_read_uncommitted: true, ..options() };
        assert_eq!(count(&lax, values("latest", "read_uncommitted", "true")), 0);
    }
}
