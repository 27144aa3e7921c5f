//! Brokers that restart, connections that break, and a member that is fenced.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::share::{ShareOptions, headers};
use hapax_kafka::wire::{Cluster, Connect, CoordinatorKind};
use hapax_worker::{Cx, Worker};
use kafka_protocol::messages::ShareGroupHeartbeatRequest;
use kafka_protocol::protocol::StrBytes;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, LOCK, PATIENCE, is_empty};
use crate::{Case, alone, shared};

pub fn cases() -> Vec<Case> {
    vec![
        alone("records_are_processed_over_a_restart_of_the_broker", over_a_restart),
        alone("records_are_processed_over_broken_connections", over_broken_connections),
        shared("a_member_that_is_fenced_joins_again", a_member_that_is_fenced_joins_again),
    ]
}

const COUNT: u32 = 200;

/// Works on all records while something is done to the broker when half of them have run. Returns the numbers that ran.
fn work(broker: &Broker, options: ShareOptions, total: u32, disturb: impl AsyncFnOnce()) -> BTreeSet<u32> {
    let source = broker.source(options);
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let also = seen.clone();
    broker.block_on(async {
        let handler = move |number: u32, _: Cx| {
            let also = also.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                also.lock().unwrap().insert(number);
            }
        };
        let builder = Worker::from_source(source.clone()).handler(handler).concurrency(4);
        let worker = builder.build().await.unwrap();
        let watch = worker.watch();
        let end = async {
            let start = Instant::now();
            let wait = async |until: &dyn Fn() -> bool| {
                while !until() {
                    assert!(start.elapsed() < PATIENCE, "{:?}", watch.counts());
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            wait(&|| seen.lock().unwrap().len() >= 50).await;
            disturb().await;
            wait(&|| seen.lock().unwrap().len() == total as usize).await;
        };
        worker.run(end).await.unwrap();
        // What was settled without an answer may return once more; what a lost answer had locked, when its lock ends.
        let (start, mut last) = (Instant::now(), Instant::now());
        while last.elapsed() < LOCK + Duration::from_secs(1) {
            let receive = hapax_core::Receive { wait_ms: Some(0), ..hapax_core::Receive::up_to(100) };
            let found = hapax_core::Source::next(&*source, receive).await.unwrap();
            if found.is_empty() {
                continue;
            }
            assert!(start.elapsed() < PATIENCE, "{} records return", found.len());
            last = Instant::now();
            let acks = found.into_iter().map(|one| hapax_core::Settle::ack(one.receipt)).collect();
            hapax_core::Source::settle(&*source, acks).await.unwrap();
        }
    });
    seen.lock().unwrap().clone()
}

fn over_a_restart(broker: &Broker) {
    for (topic, signal) in [("over-a-kill", "KILL"), ("over-a-stop", "TERM")] {
        let options = broker.prepare(topic, 2);
        broker.send(topic, (0..COUNT).map(|number| number.to_string()));
        let seen = work(broker, options, COUNT, async || {
            tokio::task::block_in_place(|| {
                broker.stop(signal);
                broker.run().unwrap();
            });
        });
        assert_eq!(seen.len(), COUNT as usize, "{topic}");
        assert_eq!(broker.end(&format!("{topic}-dead")), 0, "{topic}");
    }
}

fn over_broken_connections(broker: &Broker) {
    let mut options = broker.prepare("broken", 2);
    options.connect = Connect::plain([broker.proxied().to_string()]);
    options.connect.request_timeout = Duration::from_secs(2);
    broker.send("broken", (0..COUNT).map(|number| number.to_string()));
    // ShareFetch (78), ShareAcknowledge (79) and ShareGroupHeartbeat (76): the answer is lost with its connection, or never
    // comes, or the request is there twice.
    let faults = [
        (Match::answer_to("Api78"), Action::Cut),
        (Match::answer_to("Api79"), Action::Cut),
        (Match::request("Api79"), Action::Cut),
        (Match::answer_to("Api79"), Action::Drop),
        (Match::request("Api79"), Action::Duplicate),
        (Match::request("Api78"), Action::Duplicate),
        (Match::answer_to("Api76"), Action::Cut),
    ];
    let total = COUNT + u32::try_from(faults.len()).unwrap();
    let producer: FutureProducer = broker.config().create().unwrap();
    let seen = work(broker, options, total, async || {
        for (number, (frame, action)) in (COUNT..).zip(faults) {
            let fault = broker.proxy().inject(frame, action).times(1);
            // There is one more to fetch and to acknowledge.
            let value = number.to_string();
            let record = FutureRecord::<(), _>::to("broken").payload(&value);
            producer.send(record, PATIENCE).await.unwrap();
            tokio::time::timeout(PATIENCE, fault.wait_for(1)).await.expect("the fault happens");
            fault.remove();
        }
    });
    assert_eq!(seen.len(), total as usize);
    // A record that meets four of the faults has used up its deliveries. It is not lost.
    for dead in broker.read("broken-dead", usize::try_from(broker.end("broken-dead")).unwrap()) {
        assert_eq!(dead.headers[headers::CAUSE], "expired", "{dead:?}");
    }
}

fn a_member_that_is_fenced_joins_again(broker: &Broker) {
    let options = broker.prepare("fenced", 1);
    broker.send("fenced", ["1".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        let first = crate::broker::next(&source, 1).await.remove(0);
        // Somebody else says that this member leaves: its next heartbeat is answered with UNKNOWN_MEMBER_ID.
        let cluster = Cluster::new(broker.connect());
        let coordinator = cluster.coordinator(CoordinatorKind::Group, "fenced").await.unwrap().unwrap();
        let leave = ShareGroupHeartbeatRequest::default()
            .with_group_id(StrBytes::from_static_str("fenced").into())
            .with_member_id(StrBytes::from_string(source.member().to_owned()))
            .with_member_epoch(-1);
        let (answer, _) = cluster.call_at(&coordinator, &leave, 1).await.unwrap();
        assert_eq!(answer.error_code, 0);
        // Its lock is the partition leader's, and holds.
        let settled =
            hapax_core::Source::settle(&*source, vec![hapax_core::Settle::ack(first.receipt)]).await;
        assert_eq!(settled.unwrap(), [Ok(hapax_core::Settled::Acked)]);
    });
    broker.send("fenced", ["2".to_owned()]);
    broker.block_on(async {
        let second = crate::broker::next(&source, 1).await.remove(0);
        assert_eq!(second.body, "2");
        hapax_core::Source::settle(&*source, vec![hapax_core::Settle::ack(second.receipt)]).await.unwrap();
        is_empty(&source).await;
    });
}
