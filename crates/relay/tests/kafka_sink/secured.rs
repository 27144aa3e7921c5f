//! The sink over TLS and SASL, with a user that has only the rights of a relay.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Instant;

use hapax_faults::{KafkaOperation, KafkaResource, KafkaServer, Process, RedisTls};
use hapax_relay::sink::KafkaSink;

use crate::fixture::{PATIENCE, Setting, Shop};
use crate::outbox::block_on;

const KEYS: [&str; 3] = ["a", "b", "c"];

/// What a relay needs. The transactional ids begin with the name of the positions topic.
const RIGHTS: [(KafkaOperation, KafkaResource); 6] = [
    (KafkaOperation::Read, KafkaResource::Topic),
    (KafkaOperation::Write, KafkaResource::Topic),
    (KafkaOperation::Create, KafkaResource::Topic),
    (KafkaOperation::DescribeConfigs, KafkaResource::Topic),
    (KafkaOperation::Write, KafkaResource::TransactionalId),
    (KafkaOperation::Describe, KafkaResource::TransactionalId),
];

fn secured() -> &'static (KafkaServer, RedisTls) {
    static BROKER: OnceLock<(KafkaServer, RedisTls)> = OnceLock::new();
    BROKER.get_or_init(|| {
        let tls = RedisTls::new().unwrap();
        (KafkaServer::start_secured(&tls, &[]).unwrap(), tls)
    })
}

/// The sink of a shop by another listener.
fn url(shop: &Shop, scheme: &str, user: &str, listener: SocketAddr, mechanism: &str) -> String {
    let plain = shop.url(listener);
    let place = plain.strip_prefix("kafka://").unwrap();
    format!("{scheme}://{user}{place}{mechanism}")
}

pub fn a_relay_publishes_over_tls_and_every_mechanism(setting: &Setting) {
    let (broker, tls) = secured();
    let setting = Setting { server: setting.server, broker };
    for (scheme, user, listener, mechanism) in [
        ("kafkas", "", "TLS", ""),
        ("kafka", "alice:alice-secret@", "SASL", ""),
        ("kafka", "alice:alice-secret@", "SASL", "&sasl=SCRAM-SHA-256"),
        ("kafkas", "alice:alice-secret@", "BOTH", "&sasl=SCRAM-SHA-512"),
        ("kafkas", "alice:alice-secret@", "BOTH", "&sasl=PLAIN"),
    ] {
        let shop = Shop::new(&setting);
        for (operation, on) in RIGHTS {
            broker.allow("alice", operation, on, &shop.name);
        }
        let sink = url(&shop, scheme, user, broker.secured(listener), mechanism);
        // The authority is not among those of the system.
        let authority = tls.authority();
        let start = || -> Process { shop.relay_of(&sink, &[("SSL_CERT_FILE", authority.as_path())]) };
        let mut relay = start();
        shop.enqueue(&KEYS, 3);
        shop.until_published();
        relay.kill();
        // Another one takes over what is there.
        let mut relay = start();
        shop.enqueue(&KEYS, 3);
        shop.until_published();
        relay.kill();
        shop.require_exact(&sink);
    }
}

/// Without rights, without its password, and without TLS.
pub fn a_missing_right_is_told_at_the_start(setting: &Setting) {
    let (broker, _) = secured();
    let shop = Shop::new(&Setting { server: setting.server, broker });
    let open = |url: &str| block_on(KafkaSink::open(url)).map(drop).unwrap_err().to_string();
    let sasl = |user: &str| url(&shop, "kafka", user, broker.secured("SASL"), "");
    let refused = open(&sasl("bob:bob-secret@"));
    assert!(refused.contains("TopicAuthorizationFailed") && refused.contains("kafka-topics.sh"), "{refused}");
    let refused = open(&sasl("bob:wrong@"));
    assert!(refused.contains("rejected the authentication") && !refused.contains("wrong"), "{refused}");
    // The authority is not among those of the system.
    let refused = open(&url(&shop, "kafkas", "", broker.secured("TLS"), ""));
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    for (operation, on) in RIGHTS {
        broker.allow("bob", operation, on, &shop.name);
    }
    let start = Instant::now();
    // A rule is accepted by the controller, and a moment later known to the broker.
    while let Err(error) = block_on(KafkaSink::open(&sasl("bob:bob-secret@"))) {
        assert!(start.elapsed() < PATIENCE, "{error}");
    }
}
