//! Configuration that is refused before a connection is made, because a guarantee would not hold with it.
//!
//! Properties have the names that Kafka's own clients use.

use std::fmt;

/// A property that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The property.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Why, and what to do instead.
    pub remedy: String,
}

impl Refusal {
    /// A property, its value and the remedy.
    pub fn new(key: &str, value: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { key: key.to_owned(), value: value.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {:?} is refused: {}", self.key, self.value, self.remedy)
    }
}

/// All of them, a line each.
pub fn lines(refusals: &[Refusal]) -> String {
    refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("\n")
}

/// Properties that mean something to a consumer only.
const OF_CONSUMERS: [&str; 11] = [
    "isolation.level",
    "group.id",
    "group.instance.id",
    "auto.offset.reset",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "max.poll.records",
];
/// Properties that mean something to a producer only.
const OF_PRODUCERS: [&str; 8] = [
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "transactional.id",
    "transaction.timeout.ms",
    "max.in.flight.requests.per.connection",
    "max.in.flight",
    "linger.ms",
];
/// At this many requests in flight a broker no longer keeps the order of a producer's batches.
const IN_FLIGHT_MAX: u32 = 5;

/// Whether the group's partitions are assigned by the broker (KIP-848), and not by a member.
pub(crate) fn uses_consumer_protocol(properties: &[(String, String)]) -> bool {
    properties.iter().any(|(key, value)| key == "group.protocol" && value == "consumer")
}

/// What is refused of a consumer.
pub fn consumer(properties: &[(String, String)]) -> Vec<Refusal> {
    let by_broker = uses_consumer_protocol(properties);
    let remedy = |key: &str, value: &str| match (key, value) {
        ("session.timeout.ms" | "heartbeat.interval.ms" | "partition.assignment.strategy", _)
            if by_broker =>
        {
            Some(
                "with group.protocol = consumer the broker decides it (its group.consumer.* settings, or consumer.* of the group); leave it out",
            )
        }
        ("isolation.level", "read_committed")
        | ("enable.auto.commit" | "enable.auto.offset.store" | "allow.auto.create.topics", "false")
        | ("partition.assignment.strategy", "cooperative-sticky")
        | ("group.protocol", "classic" | "consumer") => None,
        ("isolation.level", _) => Some(
            "a reader of transactional topics would see records of aborted transactions; use read_committed",
        ),
        ("enable.auto.commit" | "enable.auto.offset.store", _) => Some(
            "offsets would be committed before the effects of their records; leave it out, offsets are committed with the effects",
        ),
        ("auto.offset.reset", _) => Some(
            "a lost offset would silently skip or repeat records; leave it out, and say where a new group begins",
        ),
        ("partition.assignment.strategy", _) => Some(
            "every rebalance would stop all partitions, and members with different strategies cannot share a group; leave it out, it is cooperative-sticky",
        ),
        ("group.protocol", _) => {
            Some("there is no such protocol; use consumer, or leave it out, it is classic")
        }
        ("allow.auto.create.topics", _) => {
            Some("a mistyped name would become a topic; create topics before they are read")
        }
        ("bootstrap.servers" | "group.id", _) => Some("it is given apart from the properties; leave it out"),
        (key, _) if OF_PRODUCERS.contains(&key) => Some("it is a property of producers; leave it out"),
        _ => None,
    };
    refused(properties, remedy)
}

/// What is refused of the consumer of a processor, whose offsets are committed in the broker's transaction.
///
/// A broker compares the member's epoch with that of the offsets, and nothing else. In the classic protocol every partition that moves
/// ends an epoch (a generation), so offsets of a partition that is another member's by now are refused. With the other protocol
/// (KIP-848) they need not be: a broker of 4.2 or later leaves the epoch of a member that has let go of one partition and is asked for the next,
/// and librdkafka 2.12 leaves a partition whose assignment is being decided out of the list that it sends when the coordinator was
/// away. Where positions are moved in a database from the value that was read (`to_database`), neither matters.
pub fn processor(properties: &[(String, String)]) -> Vec<Refusal> {
    let mut refused = consumer(properties);
    if uses_consumer_protocol(properties) {
        let remedy = "the broker would take offsets of a partition that another member has by then, and its records would take effect \
                      twice; leave it out, it is classic (to_database may use it)";
        refused.push(Refusal::new("group.protocol", "consumer", remedy));
    }
    refused
}

/// What is refused of a transactional producer. A batch may take `batch_ms` from its first record to its commit.
pub fn producer(properties: &[(String, String)], batch_ms: u64) -> Vec<Refusal> {
    let batch = format!(
        "the broker would abort a batch that takes its time: at least {batch_ms} ms, the bound of a batch, is needed"
    );
    let remedy = |key: &str, value: &str| match key {
        "acks" | "request.required.acks" if !matches!(value, "all" | "-1") => {
            Some("an acknowledged record could be lost with one broker; use all")
        }
        "enable.idempotence" if value != "true" => {
            Some("a repeated request could write a record twice; use true, or leave it out")
        }
        "max.in.flight.requests.per.connection" | "max.in.flight"
            if value.parse().map_or(true, |count: u32| count == 0 || count > IN_FLIGHT_MAX) =>
        {
            Some("the broker keeps the order of at most 5 requests in flight; use 1 to 5")
        }
        "transaction.timeout.ms" if value.parse().map_or(true, |ms: u64| ms < batch_ms) => {
            Some(batch.as_str())
        }
        "isolation.level" => {
            Some("it is a property of consumers, and does nothing here; set it on the readers")
        }
        key if OF_CONSUMERS.contains(&key) => Some("it is a property of consumers; leave it out"),
        _ => None,
    };
    let mut refusals = refused(properties, remedy);
    let id = properties.iter().find(|(key, _)| key == "transactional.id");
    refusals.extend(id.and_then(|(_, id)| unstable(id, std::process::id())));
    refusals
}

/// A `transactional.id` that would be another one after a restart: the transactions of the process before it would stay open
/// until they time out, and its late requests would not be fenced.
pub fn unstable(id: &str, pid: u32) -> Option<Refusal> {
    let refuse = |why: &str| {
        let remedy = format!(
            "{why}; use a name that the instance keeps over restarts, and that no other instance has, for example orders-1"
        );
        Some(Refusal::new("transactional.id", id, remedy))
    };
    if id.trim().is_empty() {
        return refuse("it is empty");
    }
    if id.contains("${") || id.contains("{{") || id.contains('%') {
        return refuse("it has a placeholder that was not replaced");
    }
    if has_uuid(id) {
        return refuse("it has a UUID, which looks like a new one for each start");
    }
    let number = |part: &str| part.parse::<u64>().ok();
    let numbers: Vec<u64> = id.split(|c: char| !c.is_ascii_digit()).filter_map(number).collect();
    // A small number is as likely an instance's.
    if pid > 99 && numbers.contains(&u64::from(pid)) {
        return refuse("it has the number of this process");
    }
    let is_time = |number: &u64| {
        (1_500_000_000..4_000_000_000).contains(number)
            || (1_500_000_000_000..4_000_000_000_000).contains(number)
    };
    if numbers.iter().any(is_time) {
        return refuse("it has a time");
    }
    None
}

fn has_uuid(text: &str) -> bool {
    let is_uuid = |window: &[u8]| {
        window.iter().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
    };
    text.as_bytes().windows(36).any(is_uuid)
}

fn refused<'r>(
    properties: &[(String, String)],
    remedy: impl Fn(&str, &str) -> Option<&'r str>,
) -> Vec<Refusal> {
    let check = |(key, value): &(String, String)| {
        remedy(key, value.trim()).map(|remedy| Refusal::new(key, value.as_str(), remedy))
    };
    properties.iter().filter_map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &str, value: &str) -> Vec<(String, String)> {
        vec![(key.to_owned(), value.to_owned())]
    }

    #[test]
    fn what_would_weaken_a_consumer_is_refused_with_key_value_and_remedy() {
        let table = [
            ("isolation.level", "read_uncommitted", "use read_committed"),
            ("enable.auto.commit", "true", "committed with the effects"),
            ("enable.auto.offset.store", "true", "committed with the effects"),
            ("auto.offset.reset", "latest", "say where a new group begins"),
            ("partition.assignment.strategy", "range", "cooperative-sticky"),
            ("group.protocol", "eager", "use consumer"),
            ("allow.auto.create.topics", "true", "create topics"),
            ("group.id", "orders", "given apart"),
            ("acks", "all", "property of producers"),
            ("transactional.id", "orders-1", "property of producers"),
        ];
        for (key, value, remedy) in table {
            let refused = consumer(&one(key, value));
            assert_eq!(refused.len(), 1, "{key}");
            let text = refused[0].to_string();
            assert!(text.starts_with(&format!("{key} = {value:?} is refused: ")), "{text}");
            assert!(text.contains(remedy), "{text}");
        }
        let fine = [
            ("isolation.level", "read_committed"),
            ("enable.auto.commit", "false"),
            ("fetch.min.bytes", "1"),
            ("security.protocol", "SASL_SSL"),
            ("group.instance.id", "orders-1"),
            ("group.protocol", "consumer"),
            ("group.protocol", "classic"),
            ("session.timeout.ms", "10000"),
        ];
        for (key, value) in fine {
            assert_eq!(consumer(&one(key, value)), [], "{key}");
        }
        for key in ["session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"] {
            let both = [one("group.protocol", "consumer"), one(key, "cooperative-sticky")].concat();
            let refused = consumer(&both);
            assert_eq!(refused.len(), 1, "{key}");
            assert!(refused[0].to_string().contains("the broker decides it"), "{}", refused[0]);
        }
        let refused = processor(&one("group.protocol", "consumer"));
        assert_eq!(refused.len(), 1);
        assert!(refused[0].to_string().contains("take effect twice"), "{}", refused[0]);
        assert_eq!(processor(&one("group.protocol", "classic")), []);
    }

    #[test]
    fn what_would_weaken_a_producer_is_refused_with_key_value_and_remedy() {
        let table = [
            ("isolation.level", "read_committed", "property of consumers"),
            ("group.id", "orders", "property of consumers"),
            ("auto.offset.reset", "earliest", "property of consumers"),
            ("acks", "1", "use all"),
            ("acks", "0", "use all"),
            ("request.required.acks", "1", "use all"),
            ("enable.idempotence", "false", "use true"),
            ("max.in.flight.requests.per.connection", "6", "use 1 to 5"),
            ("max.in.flight", "many", "use 1 to 5"),
            ("transaction.timeout.ms", "999", "at least 1000 ms"),
            ("transactional.id", "", "it is empty"),
            ("transactional.id", "orders-${HOSTNAME}", "placeholder"),
            ("transactional.id", "orders-0b51a6f0-6f5a-4b0e-9d7e-3f0a4ad2c8f1", "UUID"),
            ("transactional.id", "orders-1794000000", "a time"),
            ("transactional.id", "orders-1794000000123", "a time"),
        ];
        for (key, value, remedy) in table {
            let refused = producer(&one(key, value), 1_000);
            assert_eq!(refused.len(), 1, "{key}");
            let text = refused[0].to_string();
            assert!(text.starts_with(&format!("{key} = {value:?} is refused: ")), "{text}");
            assert!(text.contains(remedy), "{text}");
        }
        let fine = [
            ("acks", "all"),
            ("acks", "-1"),
            ("enable.idempotence", "true"),
            ("max.in.flight.requests.per.connection", "5"),
            ("transaction.timeout.ms", "1000"),
            ("transactional.id", "orders-1"),
            ("linger.ms", "5"),
        ];
        for (key, value) in fine {
            assert_eq!(producer(&one(key, value), 1_000), [], "{key}");
        }
    }

    #[test]
    fn the_number_of_this_process_makes_an_id_unstable() {
        assert!(unstable("orders-4711", 4711).unwrap().remedy.contains("number of this process"));
        assert_eq!(unstable("orders-4711", 4712), None);
        assert_eq!(unstable("orders-7", 7), None, "as likely the number of an instance");
    }
}
