//! A share group over TLS and SASL, with a user that has only the rights of a worker.

use std::time::Instant;

use hapax_faults::KafkaOperation::{DescribeConfigs, Read, Write};
use hapax_faults::KafkaResource::{Group, Topic};
use hapax_faults::{KafkaOperation, KafkaResource};
use hapax_kafka::security::{Security, TlsFiles};
use hapax_kafka::share::{ShareOptions, ShareSource};
use hapax_kafka::wire::{Sasl, SaslMechanism};
use hapax_worker::{Cx, HandlerOutcome, Worker};

use crate::broker::{Broker, PATIENCE, options, run_until};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_worker_runs_over_tls_and_every_mechanism", over_tls_and_every_mechanism),
        shared("a_missing_right_or_password_is_told", missing_rights),
    ]
}

/// What a worker needs.
const RIGHTS: [(KafkaOperation, KafkaResource); 5] =
    [(Read, Topic), (Write, Topic), (DescribeConfigs, Topic), (Read, Group), (DescribeConfigs, Group)];

/// The options of a topic over another listener, with its topics and its group made.
fn prepared(broker: &Broker, name: &str, listener: &str, sasl: Option<Sasl>) -> ShareOptions {
    broker.prepare(name, 1);
    let authority = Some(broker.tls().authority());
    let tls = (listener != "SASL").then_some(TlsFiles { authority, identity: None });
    let connect = Security { tls, sasl }.connect([broker.secured(listener).to_string()]).unwrap();
    options(connect, name)
}

fn sasl(mechanism: SaslMechanism, user: &str, password: &str) -> Sasl {
    Sasl { mechanism, user: user.to_owned(), password: password.to_owned() }
}

/// One record is done, and one is rejected: its copy in the dead letters is written over the same connection.
fn over_tls_and_every_mechanism(broker: &Broker) {
    for (operation, on) in RIGHTS {
        broker.allow("alice", operation, on, "secured-");
    }
    let alice = |mechanism| Some(sasl(mechanism, "alice", "alice-secret"));
    for (name, listener, sasl) in [
        ("secured-tls", "TLS", None),
        ("secured-plain", "SASL", alice(SaslMechanism::Plain)),
        ("secured-256", "SASL", alice(SaslMechanism::ScramSha256)),
        ("secured-both-plain", "BOTH", alice(SaslMechanism::Plain)),
        ("secured-both-512", "BOTH", alice(SaslMechanism::ScramSha512)),
    ] {
        let options = prepared(broker, name, listener, sasl);
        broker.send(name, ["1".to_owned(), "2".to_owned()]);
        let source = connected(broker, &options);
        broker.block_on(async {
            let handler = |number: u32, _: Cx| async move {
                if number == 1 { HandlerOutcome::Done(()) } else { HandlerOutcome::reject("not this one") }
            };
            let worker = Worker::from_source(source).handler(handler).build().await.unwrap();
            let report = run_until(worker, |counts| counts.done == 1 && counts.rejected == 1).await;
            assert!(report.drained, "{name}: {report:?}");
        });
        let dead = broker.read(&format!("{name}-dead"), 1);
        assert_eq!(dead[0].value, "2", "{name}");
    }
}

/// A rule is accepted by the controller, and a moment later known to the broker.
fn connected(broker: &Broker, options: &ShareOptions) -> std::sync::Arc<ShareSource> {
    let start = Instant::now();
    loop {
        match broker.block_on(ShareSource::connect(options.clone())) {
            Ok(source) => return std::sync::Arc::new(source),
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
    }
}

/// At the start, before anything is delivered.
fn missing_rights(broker: &Broker) {
    let name = "guarded-share";
    let bob = |password: &str| Some(sasl(SaslMechanism::ScramSha256, "bob", password));
    let options = prepared(broker, name, "SASL", bob("bob-secret"));
    let refused = |options: &ShareOptions| {
        broker.block_on(ShareSource::connect(options.clone())).map(drop).unwrap_err().to_string()
    };
    let mut wrong = options.clone();
    wrong.connect.sasl = bob("another");
    let error = refused(&wrong);
    assert!(error.contains("rejected the authentication") && !error.contains("another"), "{error}");
    let error = refused(&options);
    assert!(error.contains("GroupAuthorizationFailed") && error.contains("DescribeConfigs"), "{error}");
    for (operation, on) in RIGHTS {
        broker.allow("bob", operation, on, name);
    }
    drop(connected(broker, &options));
}
