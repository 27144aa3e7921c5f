//! What a record carries, and what is refused at the start.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hapax_core::outbox::NewOutboxMessage;
use hapax_faults::KafkaServer;
use hapax_relay::sink::{KafkaSink, SinkError};

use crate::fixture::{Isolation, Setting, Shop, create_topic};
use crate::outbox::block_on;

pub fn records_have_key_id_and_headers(setting: &Setting) {
    let shop = Shop::new(setting);
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let ids: Vec<String> = block_on(async {
        let (outbox, mut db) = (shop.database.outbox().await, shop.database.connect().await);
        let message = NewOutboxMessage::new("orders", "with").key("order-7").traceparent(traceparent);
        let message = message.header("tenant", "north").header("hapax-idempotency-key", "of the writer");
        let plain = NewOutboxMessage::new("orders", "without");
        vec![outbox.enqueue(&mut db, &message).await.unwrap(), outbox.enqueue(&mut db, &plain).await.unwrap()]
    });
    let mut relay = shop.relay();
    shop.until_published();
    relay.kill();
    let mut seen = shop.read(&shop.topic(), Isolation::Committed);
    seen.sort_by_key(|seen| seen.value.len());
    let headers: Vec<Vec<(&str, &str)>> = seen
        .iter()
        .map(|seen| seen.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect())
        .collect();
    assert_eq!(seen[0].key.as_deref(), Some("order-7"));
    assert_eq!(
        headers[0],
        [("hapax-idempotency-key", ids[0].as_str()), ("tenant", "north"), ("traceparent", traceparent)]
    );
    assert_eq!(
        (seen[1].key.as_deref(), &headers[1]),
        (None, &vec![("hapax-idempotency-key", ids[1].as_str())])
    );
    let now_ms = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
    let age_ms = now_ms - seen[0].timestamp_ms.unwrap();
    assert!(
        (0..Duration::from_mins(10).as_millis() as i64).contains(&age_ms),
        "when it was enqueued: {age_ms} ms ago"
    );
}

fn open(url: &str) -> Result<(), SinkError> {
    block_on(KafkaSink::open(url)).map(drop)
}

pub fn the_positions_topic_is_compacted_or_refused(setting: &Setting) {
    let at = |positions: &str| format!("kafka://{}?positions={positions}", setting.broker.address());
    open(&at("made-here")).unwrap();
    open(&at("made-here")).unwrap();
    create_topic(setting.broker, "deleted-by-age", 1, &[]);
    let error = open(&at("deleted-by-age")).unwrap_err().to_string();
    assert!(error.contains("cleanup.policy") && error.contains("\"delete\""), "{error}");
    assert!(
        error.contains("kafka-configs.sh --alter --topic deleted-by-age --add-config cleanup.policy=compact"),
        "{error}"
    );
    create_topic(
        setting.broker,
        "compressed",
        1,
        &[("cleanup.policy", "compact"), ("compression.type", "gzip")],
    );
    let error = open(&at("compressed")).unwrap_err().to_string();
    assert!(error.contains("compression.type") && error.contains("gzip"), "{error}");
    create_topic(setting.broker, "fine", 2, &[("cleanup.policy", "compact")]);
    open(&at("fine")).unwrap();
}

pub fn a_cluster_without_transaction_version_2_is_refused(_: &Setting) {
    let broker = KafkaServer::start_formatted(&[], &["--feature", "transaction.version=0"]).unwrap();
    let error = open(&format!("kafka://{}", broker.address())).unwrap_err().to_string();
    assert!(
        error.contains("transaction.version") && error.contains("--feature transaction.version=2"),
        "{error}"
    );
}
