//! A cluster of three nodes, of which one at a time is killed while relays publish.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_faults::{KafkaServer, Process};
use hapax_kafka::wire::{Cluster, Connect, CoordinatorKind};

use crate::fixture::{Isolation, PATIENCE, Setting, Shop};
use crate::outbox::block_on;

const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// The coordinator of a bucket's transactions first, then a leader of the topic and of the positions, then the last node; the last one
/// ends cleanly. A relay is killed each time, too.
pub fn each_message_is_there_once_while_brokers_of_three_are_killed(setting: &Setting) {
    let nodes: &'static [KafkaServer; 3] = Box::leak(Box::new(KafkaServer::start_three().unwrap()));
    let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_string()).collect();
    let mut shop = Shop::new(&Setting { server: setting.server, broker: &nodes[0] });
    shop.brokers = addresses.join(",");
    let shop = shop;
    let relay = || -> Process { shop.relay_of(&shop.url_of(&shop.brokers), &[]) };
    let mut relays = [relay(), relay()];
    let (ended, mut killed) = (AtomicBool::new(false), BTreeSet::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                shop.enqueue(&KEYS, 2);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _ends = EndsAtDrop(&ended);
        for (step, signal) in ["KILL", "KILL", "TERM"].into_iter().enumerate() {
            until_more(&shop);
            let coordinator = coordinator(&addresses, &format!("{}/orders/0", shop.positions()));
            let fresh = (0..nodes.len()).find(|node| !killed.contains(node)).unwrap();
            let node = match step {
                0 => addresses.iter().position(|address| *address == coordinator).unwrap(),
                _ => fresh,
            };
            killed.insert(node);
            nodes[node].stop(signal);
            relays[step % 2].kill();
            relays[step % 2] = relay();
            until_more(&shop);
            nodes[node].run().unwrap();
            // With two nodes less, nothing could be written.
            shop.topics().wait_for_copies(3);
        }
        until_more(&shop);
    });
    assert_eq!(killed.len(), 3, "each node was stopped once");
    shop.until_published();
    shop.require_exact("after kills of brokers");
    assert!(shop.aborted() > 0, "no transaction was aborted: the run proves nothing");
}

struct EndsAtDrop<'a>(&'a AtomicBool);

impl Drop for EndsAtDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until readers see more than they did.
fn until_more(shop: &Shop) {
    let published = || shop.read(&shop.topic(), Isolation::Committed).len();
    let (before, start) = (published(), Instant::now());
    while published() < before + 100 {
        assert!(start.elapsed() < PATIENCE, "{} messages are published, and no more", published());
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn coordinator(addresses: &[String], id: &str) -> String {
    let start = Instant::now();
    loop {
        let cluster = Cluster::new(Connect::plain(addresses.iter().cloned()));
        match block_on(cluster.coordinator(CoordinatorKind::Transaction, id)) {
            Ok(Ok(address)) => return address,
            found => assert!(start.elapsed() < PATIENCE, "{found:?}"),
        }
    }
}
