//! The broker of a run, started for it or given, and the run's topics.

use std::net::ToSocketAddrs as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hapax_faults::{FaultProxy, KafkaServer};
use hapax_kafka::wire::{Cluster, Connect};
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::delete_topics_request::DeleteTopicState;
use kafka_protocol::messages::{CreateTopicsRequest, DeleteTopicsRequest};
use kafka_protocol::protocol::StrBytes;

use super::site::PARTITIONS;

/// The URL that starts a broker.
const PRIVATE: &str = "private:kafka";
const SCHEME: &str = "kafka://";
/// Newest versions of the requests that are used.
const CREATE_TOPICS_MAX: i16 = 7;
const DELETE_TOPICS_MAX: i16 = 6;
const TOPICS_MS_MAX: i32 = 30_000;
/// How long the leaders of new topics are waited for.
const LEADERS: Duration = Duration::from_mins(1);
/// On a slow machine the only broker is not taken for dead: its partitions would have no leader. After a crash it waits for this time.
const BROKER_SESSION: &str = "broker.session.timeout.ms=60000";
/// A private broker accepts sessions of a second; others accept nothing below six by default.
const SESSION_MS_OWN: u64 = 3_000;
const SESSION_MS_GIVEN: u64 = 6_000;

/// A broker.
pub enum Broker {
    /// It ends with the run, and may be stopped and killed.
    Own(KafkaServer),
    /// Its addresses, and the way to it on which requests are hit.
    Given(String, FaultProxy),
}

impl Broker {
    /// Starts one, or takes the addresses out of a URL.
    pub fn start(url: &str, crashes: bool) -> anyhow::Result<Self> {
        if url == PRIVATE {
            let settings: &[&str] = if crashes { &[] } else { &[BROKER_SESSION] };
            return Ok(Self::Own(KafkaServer::start(settings).map_err(anyhow::Error::msg)?));
        }
        let addresses = url.strip_prefix(SCHEME).map(|rest| rest.trim_end_matches('/'));
        match addresses {
            Some(addresses) if !addresses.is_empty() && !addresses.contains(['/', '?', '@']) => {
                Ok(Self::Given(addresses.to_owned(), proxy_before(addresses)?))
            }
            _ => bail!(
                "{url} is no broker: {SCHEME}HOST:PORT,… names a plain listener without a user, and {PRIVATE} starts one"
            ),
        }
    }

    /// The brokers without a proxy between.
    pub fn addresses(&self) -> String {
        match self {
            Self::Own(server) => server.address().to_string(),
            Self::Given(addresses, _) => addresses.clone(),
        }
    }

    /// The way to the brokers on which requests are hit.
    pub fn proxy(&self) -> &FaultProxy {
        match self {
            Self::Own(server) => server.proxy(),
            Self::Given(_, proxy) => proxy,
        }
    }

    pub fn session_ms(&self) -> u64 {
        if self.is_own() { SESSION_MS_OWN } else { SESSION_MS_GIVEN }
    }

    pub fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// Kills it and starts it again, on the same data.
    pub fn restart(&self) -> anyhow::Result<()> {
        let Self::Own(server) = self else { return Ok(()) };
        server.kill();
        server.run().map_err(anyhow::Error::msg)
    }

    /// Stops it, or lets it continue.
    pub fn pause(&self, is_paused: bool) {
        match self {
            Self::Own(server) if is_paused => server.pause(),
            Self::Own(server) => server.resume(),
            Self::Given(..) => {}
        }
    }

    /// A connection that no fault breaks.
    pub fn cluster(&self) -> Cluster {
        Cluster::new(Connect::plain(self.addresses().split(',')))
    }
}

/// A proxy before the first of the brokers whose name is known.
fn proxy_before(addresses: &str) -> anyhow::Result<FaultProxy> {
    let mut known = addresses.split(',').filter_map(|address| address.to_socket_addrs().ok()?.next());
    let broker = known.next().with_context(|| format!("no address of {addresses} is known"))?;
    Ok(FaultProxy::start_before_kafka(broker)?)
}

/// Creates topics, with as many copies as the brokers have by default, and waits for their leaders.
pub async fn create_topics(cluster: &Cluster, names: &[String]) -> anyhow::Result<()> {
    let topic = |name: &String| {
        CreatableTopic::default()
            .with_name(StrBytes::from_string(name.clone()).into())
            .with_num_partitions(PARTITIONS)
            .with_replication_factor(-1)
    };
    let request = CreateTopicsRequest::default()
        .with_topics(names.iter().map(topic).collect())
        .with_timeout_ms(TOPICS_MS_MAX);
    let (answer, _) = cluster.call_any(&request, CREATE_TOPICS_MAX).await?;
    for made in answer.topics {
        if let Some(error) = made.error_code.err() {
            bail!("topic {} could not be created: {error}", made.name.as_str());
        }
    }
    let end = Instant::now() + LEADERS;
    for name in names {
        loop {
            cluster.forget_topic(name);
            let leaders = cluster.leaders(name).await;
            if matches!(&leaders, Ok(Ok(leaders)) if leaders.iter().all(|leader| leader.node.is_some())) {
                break;
            }
            if Instant::now() > end {
                leaders.context("the run's topics")?.context("the run's topics")?;
                bail!("topic {name} has partitions without a leader");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

/// Deletes topics.
pub async fn delete_topics(cluster: &Cluster, names: &[String]) -> anyhow::Result<()> {
    let topic = |name: &String| {
        DeleteTopicState::default().with_name(Some(StrBytes::from_string(name.clone()).into()))
    };
    let request = DeleteTopicsRequest::default()
        .with_topics(names.iter().map(topic).collect())
        .with_timeout_ms(TOPICS_MS_MAX);
    let (answer, _) = cluster.call_any(&request, DELETE_TOPICS_MAX).await?;
    for deleted in answer.responses {
        match deleted.error_code.err() {
            None | Some(ResponseError::UnknownTopicOrPartition) => {}
            Some(error) => bail!("a topic of the run is left behind: {error}"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_plain_listeners() {
        let given = |url| Broker::start(url, false).map(|broker| broker.addresses());
        assert_eq!(given("kafka://127.0.0.1:9092,127.0.0.1:9093").unwrap(), "127.0.0.1:9092,127.0.0.1:9093");
        for refused in [
            "kafka://",
            "kafka://localhost",
            "kafka://ann:pw@a:9092",
            "kafka://a:9092/topic",
            "redis://a",
            "private:redis",
        ] {
            assert!(given(refused).is_err(), "{refused}");
        }
    }
}
