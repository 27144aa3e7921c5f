//! A cluster of three nodes: brokers are killed while processors run, and with them leaders, both coordinators and the controller. Each
//! output is there once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use hapax_faults::KafkaServer;
use hapax_kafka::wire::{Cluster, Connect, CoordinatorKind};
use libtest_mimic::Completion;

use crate::broker::{Broker, PATIENCE};
use crate::members::{Reader, fill, kind_of, start};
use crate::{Case, long};

pub fn cases() -> Vec<Case> {
    vec![long("each_output_is_there_once_while_brokers_of_three_are_killed", brokers_are_killed)]
}

fn brokers_are_killed() -> Completion {
    let broker = Broker::start_three();
    let (topic, partitions, count) = ("three", 6, 2_400);
    fill(&broker, topic, partitions, count);
    let mut reader = Reader::new(&broker, topic, partitions);
    let member =
        |number: usize| start(&broker.addresses(), topic, &format!("{topic}-{number}"), 10, kind_of(number));
    let mut members = [member(0), member(1)];
    let mut killed = BTreeSet::new();
    // The coordinator of a transaction, that of the group, and a node that was neither; the last one ends cleanly.
    for (step, signal) in ["KILL", "KILL", "TERM"].into_iter().enumerate() {
        reader.read_until(300 + 600 * step, &[&members[0], &members[1]]);
        let (kind, key) = match step {
            0 => (CoordinatorKind::Transaction, format!("{topic}-0")),
            _ => (CoordinatorKind::Group, format!("{topic}-group")),
        };
        let before = coordinator(&broker, kind, &key, None);
        let fresh = broker.nodes().position(|node| !killed.contains(&node.address()));
        let node = match step {
            2 => broker.nodes().nth(fresh.unwrap()),
            _ => broker.nodes().find(|node| node.address().to_string() == before),
        };
        let node: &KafkaServer = node.unwrap();
        killed.insert(node.address());
        node.stop(signal);
        if step < 2 {
            let after = coordinator(&broker, kind, &key, Some(&before));
            println!("{kind:?} coordinator of {key}: {before}, then {after}");
        }
        reader.read_until(600 + 600 * step, &[&members[0], &members[1]]);
        node.run().unwrap();
        // With two nodes less, nothing could be written.
        broker.topics().wait_for_copies(3);
    }
    assert!(killed.len() >= 2, "one node was stopped each time");
    reader.read_until(count, &[&members[0], &members[1]]);
    for member in &mut members {
        drop(member.take_stdin());
        assert!(member.wait().success(), "{}", member.log());
    }
    reader.check_end(topic, count, true);
    Completion::Completed
}

/// The address of a coordinator, once there is one that is not `before`.
fn coordinator(broker: &Broker, kind: CoordinatorKind, key: &str, before: Option<&str>) -> String {
    let begun = Instant::now();
    loop {
        let cluster = Cluster::new(Connect::plain(broker.addresses().split(',')));
        let found = broker.block_on(cluster.coordinator(kind, key));
        match &found {
            Ok(Ok(address)) if before != Some(address) => return address.clone(),
            _ => assert!(begun.elapsed() < PATIENCE, "the coordinator of {key} has not moved: {found:?}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
