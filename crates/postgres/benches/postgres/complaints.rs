//! What users of other queues on PostgreSQL complain about, as figures: receives from many groups, and writers that wake up
//! receives.

use std::time::{Duration, Instant};

use hapax_core::{
    GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle,
};
use hapax_postgres::{Options, PostgresStore};
use tokio::task::JoinSet;

use crate::args::Args;
use crate::measure::{median, table, thousands};
use crate::server::Server;

const GROUPS: usize = 1_000;
const RECEIVES: usize = 40;
const WRITERS: usize = 16;
const WAITING: usize = 100;

pub async fn run(args: &Args, server: &mut Server) {
    server.create("hapax_complaints", "SELECT 1").await;
    groups(args, server).await;
    wake_ups(args, server).await;
}

async fn open(server: &Server) -> PostgresStore {
    let options = Options { migrate: true, ..Options::default() };
    PostgresStore::open(&server.url("hapax_complaints"), options).await.expect("the store opens")
}

/// A receive of one message, acked, from a thousand groups with one message each, and with many.
async fn groups(args: &Args, server: &Server) {
    let store = open(server).await;
    let each = (args.depth as usize / GROUPS).clamp(1, 200);
    let mut queues = Vec::new();
    for (name, each) in [("few.fifo", 1), ("many.fifo", each)] {
        let name: QueueName = name.parse().expect("a name");
        store.create_queue(&name, QueueConfig::sqs_fifo()).await.expect("a queue");
        for at in 0..each {
            let message = |group: usize| {
                let id = format!("{group}-{at}").parse().expect("an id");
                NewMessage::new("x").group(GroupId::new(format!("g{group}")).expect("a group")).dedup(id)
            };
            let messages = (0..GROUPS).map(message).collect();
            let sent = store.send(&name, messages).await.expect("they are sent");
            assert!(sent.iter().all(Result::is_ok));
        }
        queues.push(name);
    }
    let mut times: [Vec<f64>; 2] = Default::default();
    for round in 0..args.rounds {
        for at in 0..2 {
            let at = (at + round) % 2;
            for _ in 0..RECEIVES {
                let start = Instant::now();
                let got = store.receive(&queues[at], Receive::up_to(1)).await.expect("it is received");
                times[at].push(start.elapsed().as_secs_f64() * 1e6);
                let acks = got.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
                store.settle(&queues[at], acks).await.expect("it is acked");
            }
        }
    }
    let [few, many] = times.map(median);
    let row = vec![format!("{few:.0}"), format!("{many:.0}"), format!("{:.2}", many / few)];
    let many = format!("p50 us, {each} messages in each");
    let columns = ["p50 us, one message in each", &many, "many of one"];
    table(args.markdown, &format!("A receive of one client from {GROUPS} groups"), &columns, &[row]);
}

/// Messages a second of writers, while receives of another process wait for other messages and while none waits.
async fn wake_ups(args: &Args, server: &Server) {
    let (writer, waiter) = (open(server).await, open(server).await);
    let (jobs, other): (QueueName, QueueName) =
        ("jobs".parse().expect("a name"), "other".parse().expect("a name"));
    for name in [&jobs, &other] {
        writer.create_queue(name, QueueConfig::sqs()).await.expect("a queue");
    }
    let mut rates: [Vec<f64>; 2] = Default::default();
    for round in 0..=args.rounds {
        for at in 0..2 {
            let waits = (at + round) % 2 == 1;
            let mut waiting = JoinSet::new();
            for _ in 0..if waits { WAITING } else { 0 } {
                let (store, name) = (waiter.clone(), other.clone());
                let ask = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
                waiting.spawn(async move { store.receive(&name, ask).await.map(drop) });
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            let rate = write(&writer, &jobs, args.time).await;
            // The first round warms up.
            if round > 0 {
                rates[usize::from(waits)].push(rate);
            }
        }
    }
    let ratio = median(rates[1].iter().zip(&rates[0]).map(|(on, off)| on / off));
    let rate = |rates: &[f64]| thousands(median(rates.iter().copied()));
    let row = vec![rate(&rates[0]), rate(&rates[1]), format!("{ratio:.2}")];
    let columns = ["none waits", "100 wait in another process", "of none"];
    table(args.markdown, &format!("Messages a second of {WRITERS} writers, one in a call"), &columns, &[row]);
}

async fn write(store: &PostgresStore, name: &QueueName, time: Duration) -> f64 {
    let (start, mut writers) = (Instant::now(), JoinSet::new());
    for _ in 0..WRITERS {
        let (store, name) = (store.clone(), name.clone());
        writers.spawn(async move {
            let mut sent = 0u32;
            while start.elapsed() < time {
                store.send(&name, vec![NewMessage::new("x")]).await.expect("it is sent");
                sent += 1;
            }
            sent
        });
    }
    let sent: u32 = writers.join_all().await.into_iter().sum();
    f64::from(sent) / start.elapsed().as_secs_f64()
}
