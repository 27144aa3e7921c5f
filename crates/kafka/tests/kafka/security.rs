//! TLS, SASL and access control lists, on the broker's other listeners.

use std::time::{Duration, Instant};

use hapax_faults::KafkaOperation::{self, Describe, Read, Write};
use hapax_faults::KafkaResource::{self, Group, Topic, TransactionalId};
use hapax_kafka::admin;
use hapax_kafka::consumer::{Consumer, ConsumerConfig, ConsumerError, Event, Record, StartAt};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig, ProducerError};
use hapax_kafka::security::{Security, TlsFiles};
use hapax_kafka::wire::{Cluster, Sasl, SaslMechanism};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_processor_runs_over_tls_and_every_mechanism", over_tls_and_every_mechanism),
        shared("a_client_certificate_is_the_user", a_client_certificate_is_the_user),
        shared("wrong_passwords_and_strange_certificates_are_refused", wrong_credentials),
        shared("a_missing_right_is_named_with_operation_and_resource", missing_rights),
    ]
}

fn security(broker: &Broker, tls: bool, sasl: Option<(SaslMechanism, &str)>) -> Security {
    let authority = Some(broker.tls().authority());
    let sasl = sasl.map(|(mechanism, user)| Sasl {
        mechanism,
        user: user.to_owned(),
        password: format!("{user}-secret"),
    });
    Security { tls: tls.then_some(TlsFiles { authority, identity: None }), sasl }
}

fn consumer(address: &str, name: &str, security: &Security) -> ConsumerConfig {
    let properties = security.properties();
    ConsumerConfig { properties, ..ConsumerConfig::new(address, name, &[name]) }
}

fn producer(address: &str, name: &str, security: &Security) -> ProducerConfig {
    let mut config = ProducerConfig::new(security.connect([address]).unwrap(), name);
    config.delivery_timeout = PATIENCE;
    config
}

struct Copier(String);

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        output.push(NewRecord { value: record.value.clone(), ..NewRecord::new(&self.0, "key", "") });
        Ok(())
    }
}

/// What a processor needs.
const RIGHTS: [(KafkaOperation, KafkaResource); 5] =
    [(Read, Topic), (Write, Topic), (Read, Group), (Write, TransactionalId), (Describe, TransactionalId)];

fn over_tls_and_every_mechanism(broker: &Broker) {
    for (operation, kind) in RIGHTS {
        broker.allow("alice", operation, kind, "secure-");
    }
    let (plain, sha256, sha512) =
        (SaslMechanism::Plain, SaslMechanism::ScramSha256, SaslMechanism::ScramSha512);
    for (name, listener, sasl) in [
        ("secure-tls", "TLS", None),
        ("secure-plain", "SASL", Some(plain)),
        ("secure-256", "SASL", Some(sha256)),
        ("secure-both-plain", "BOTH", Some(plain)),
        ("secure-both-512", "BOTH", Some(sha512)),
    ] {
        let security = security(broker, listener != "SASL", sasl.map(|mechanism| (mechanism, "alice")));
        is_processed(broker, name, listener, &security);
    }
}

/// Two records are copied by a processor.
fn is_processed(broker: &Broker, name: &str, listener: &str, security: &Security) {
    let output = format!("{name}-out");
    broker.create_topic(name, 1);
    broker.create_topic(&output, 1);
    let address = broker.secured(listener).to_string();
    broker.block_on(async {
        // The filling producer uses the same connection.
        let mut filler =
            Producer::connect(producer(&address, &format!("{name}-fill"), security)).await.unwrap();
        filler.begin().unwrap();
        filler.send(NewRecord::new(name, "key", "a")).await.unwrap();
        filler.send(NewRecord::new(name, "key", "b")).await.unwrap();
        filler.commit().await.unwrap();
        let config =
            ProcessorConfig { batch_time_max: Duration::from_millis(50), ..ProcessorConfig::default() };
        let (reader, writer) = (consumer(&address, name, security), producer(&address, name, security));
        let client = KafkaClient::connect(&reader, writer, &config).await.unwrap();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let processor = Processor::new(config, client, Copier(output.clone()));
        let run = tokio::spawn(processor.run(async { drop(ended.await) }));
        let start = Instant::now();
        while tokio::task::block_in_place(|| broker.read(&output, Isolation::Committed)) != ["a", "b"] {
            assert!(start.elapsed() < PATIENCE && !run.is_finished(), "{name}: {:?}", run.await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        drop(end);
        assert_eq!(run.await.unwrap().unwrap().records, 2, "{name}");
    });
}

/// By the producer's connections and by librdkafka's. Without a certificate a client at this listener may do everything.
fn a_client_certificate_is_the_user(broker: &Broker) {
    let identity = broker.tls().identity();
    let mut known = security(broker, true, None);
    known.tls.as_mut().unwrap().identity = Some((identity.clone(), identity));
    let name = "certified";
    let address = broker.secured("TLS").to_string();
    let error = broker.block_on(Producer::connect(producer(&address, name, &known))).unwrap_err();
    assert!(error.to_string().contains("the operation Write on transactional id certified"), "{error}");
    broker.create_topic("uncertified", 1);
    let denied = broker.block_on(async {
        let mut reader = Consumer::start(&consumer(&address, "uncertified", &known)).unwrap();
        ended(&mut reader).await
    });
    assert!(matches!(denied, ConsumerError::Refuses(_)), "{denied:?}");
    for (operation, kind) in RIGHTS {
        broker.allow("CN=localhost", operation, kind, name);
    }
    let start = Instant::now();
    // A rule is accepted by the controller, and a moment later known to the broker.
    while let Err(error) = broker.block_on(Producer::connect(producer(&address, name, &known))) {
        assert!(start.elapsed() < PATIENCE, "{error}");
    }
    is_processed(broker, name, "TLS", &known);
}

fn wrong_credentials(broker: &Broker) {
    let address = broker.secured("BOTH").to_string();
    broker.block_on(async {
        for mechanism in [SaslMechanism::Plain, SaslMechanism::ScramSha512] {
            let mut wrong = security(broker, true, Some((mechanism, "alice")));
            wrong.sasl.as_mut().unwrap().password = String::from("another");
            let error = Producer::connect(producer(&address, "wrong", &wrong)).await.unwrap_err();
            assert!(error.to_string().contains("rejected the authentication"), "{error}");
            assert!(!error.to_string().contains("another"), "the password is in the message: {error}");
        }
        let mut wrong = security(broker, true, Some((SaslMechanism::ScramSha256, "alice")));
        wrong.sasl.as_mut().unwrap().password = String::from("another");
        let mut reader = Consumer::start(&consumer(&address, "wrong", &wrong)).unwrap();
        let error = ended(&mut reader).await;
        assert!(matches!(&error, ConsumerError::Refuses(why) if why.contains("user, password")), "{error}");
        // The broker's authority is not among those of the system.
        let mut strange = security(broker, true, Some((SaslMechanism::Plain, "alice")));
        strange.tls = Some(TlsFiles::default());
        let mut config = producer(&address, "strange", &strange);
        config.delivery_timeout = Duration::from_millis(200);
        let error = Producer::connect(config).await.unwrap_err().to_string();
        assert!(error.contains("UnknownIssuer"), "{error}");
    });
}

async fn ended(consumer: &mut Consumer) -> ConsumerError {
    loop {
        match tokio::time::timeout(PATIENCE, consumer.next()).await.expect("it ends") {
            Event::Ended(error) => return error,
            Event::Assigned(assignment) => {
                let starts = vec![StartAt::NewGroup; assignment.partitions.len()];
                assignment.start(starts);
            }
            _ => {}
        }
    }
}

/// Right after right is given, and the next one that is missing is named.
fn missing_rights(broker: &Broker) {
    let name = "guarded";
    broker.create_topic(name, 1);
    let address = broker.secured("SASL").to_string();
    let bob = security(broker, false, Some((SaslMechanism::ScramSha256, "bob")));
    let attempt = || {
        broker.block_on(async {
            let mut config = producer(&address, name, &bob);
            config.delivery_timeout = Duration::from_secs(20);
            let mut producer = Producer::connect(config).await?;
            producer.begin()?;
            producer.send(NewRecord { partition: Some(0), ..NewRecord::new(name, "key", "a") }).await?;
            producer.flush().await?;
            producer.offsets(GroupMetadata::without_member(name), [(TopicPartition::new(name, 0), 1)])?;
            producer.commit().await
        })
    };
    let expect = |operation: &str, resource: &str| {
        let right = format!("the user needs the operation {operation} on {resource} {name};");
        let start = Instant::now();
        // A rule is accepted by the controller, and a moment later known to the broker.
        loop {
            let error: ProducerError = attempt().unwrap_err();
            let text = error.to_string();
            if text.contains(&right) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{text:?} instead of {right:?}");
        }
    };
    expect("Write", "transactional id");
    broker.allow("bob", Write, TransactionalId, name);
    broker.allow("bob", Describe, TransactionalId, name);
    expect("Write", "topic");
    broker.allow("bob", Describe, Topic, name);
    expect("Write", "topic");
    broker.allow("bob", Write, Topic, name);
    expect("Read", "group");
    let read = || {
        let mut reader = Consumer::start(&consumer(&address, name, &bob)).unwrap();
        broker.block_on(ended(&mut reader)).to_string()
    };
    let denied = read();
    assert!(denied.contains("the operation Read on group guarded;"), "{denied}");
    // And not a group without offsets.
    let cluster = Cluster::new(bob.connect([&address]).unwrap());
    let denied = broker.block_on(admin::lag(&cluster, name)).unwrap_err().to_string();
    assert!(denied.contains("group guarded") && denied.contains("kafka-acls.sh"), "{denied}");
    broker.allow("bob", Read, Group, name);
    expect("Read", "topic");
    let denied = read();
    assert!(denied.contains("the operation Read on topic guarded;"), "{denied}");
    broker.allow("bob", Read, Topic, name);
    let start = Instant::now();
    while let Err(error) = attempt() {
        assert!(start.elapsed() < PATIENCE, "{error}");
    }
}
