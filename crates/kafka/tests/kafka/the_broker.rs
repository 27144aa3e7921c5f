//! What the other cases rely on: topics are read to their end, clients stay behind the proxy, records survive a kill.

use std::time::Duration;

use hapax_faults::{Action, Match};
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, alone, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("clients_stay_behind_the_proxy", clients_stay_behind_the_proxy),
        alone("a_killed_broker_keeps_its_records", a_killed_broker_keeps_its_records),
    ]
}

fn send(broker: &Broker, producer: &FutureProducer, topic: &str, value: &str, partition: i32) {
    let record = FutureRecord::<(), str>::to(topic).partition(partition).payload(value);
    broker.block_on(producer.send(record, PATIENCE)).unwrap();
}

fn clients_stay_behind_the_proxy(broker: &Broker) {
    broker.create_topic("behind", 1);
    let proxy = broker.proxied().to_string();
    let producer: FutureProducer =
        broker.config().set("bootstrap.servers", proxy).set("client.id", "behind").create().unwrap();
    let requests = broker.proxy().inject(Match::request("Produce behind"), Action::Delay(Duration::ZERO));
    let answers = broker.proxy().inject(Match::answer_to("Produce behind"), Action::Delay(Duration::ZERO));
    for value in ["a", "b"] {
        send(broker, &producer, "behind", value, 0);
    }
    assert_eq!((requests.count(), answers.count()), (2, 2));
    assert_eq!(broker.read("behind", Isolation::Uncommitted), ["a", "b"]);
    requests.remove();
    answers.remove();
}

fn a_killed_broker_keeps_its_records(broker: &Broker) {
    broker.create_topic("kept", 2);
    let producer: FutureProducer = broker.config().set("acks", "all").create().unwrap();
    send(broker, &producer, "kept", "a", 1);
    send(broker, &producer, "kept", "b", 0);
    broker.kill();
    broker.run().unwrap();
    send(broker, &producer, "kept", "c", 0);
    assert_eq!(broker.read("kept", Isolation::Committed), ["b", "c", "a"]);
}
