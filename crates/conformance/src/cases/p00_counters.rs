//! Counters of several queues, asked for at once: they are those of each queue.

use hapax_core::{OnDead, QueueConfig, QueueName, QueueStats, Settled};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, fifo_config, now, queue, reject, text};

/// More queues than a store asks for together.
const MANY: usize = 120;

async fn stats_of(t: &Trial, names: &[QueueName]) -> Vec<Option<QueueStats>> {
    let all = t.within("stats_of", t.store().stats_of(names)).await.expect("stats_of");
    assert_eq!(all.len(), names.len(), "one answer per name");
    all
}

/// What a queue holds: ready, delayed, in flight, parked, halted.
fn held(stats: &QueueStats) -> [u64; 5] {
    [stats.ready, stats.delayed, stats.in_flight, stats.parked, stats.halted]
}

/// Queues in every state, with what each of them holds.
async fn every_state(t: &Trial) -> Vec<(QueueName, [u64; 5])> {
    let lapsed = t.standard("lapsed").await;
    t.send_all(&lapsed, &["lapsed"]).await;
    t.one(&lapsed).await;
    let lapsed_group = t.fifo("lapsed").await;
    t.send_group(&lapsed_group, "g", &["lapsed", "behind"]).await;
    assert_eq!(t.receive(&lapsed_group, 1).await.len(), 1);
    t.pass(LEASE_MS).await;

    let mixed = t.standard("mixed").await;
    t.send_all(&mixed, &["parked", "held", "ready", "ready, too"]).await;
    t.send(&mixed, text("delayed").delay_ms(600_000)).await;
    let got = t.receive_with(&mixed, hapax_core::Receive { lease_ms: Some(600_000), ..now(2) }).await;
    assert_eq!(t.settle(&mixed, &got[0], reject("no")).await, Ok(Settled::Parked));

    let paused = t.standard("paused").await;
    t.send_all(&paused, &["waits"]).await;
    t.store().pause_queue(&paused, "suite", None).await.unwrap();

    let (halted, dead) = t.with_dead(5, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&halted, "g", &["dies", "waits", "waits-too"]).await;
    t.send_group(&halted, "other", &["free"]).await;
    let got = t.receive(&halted, 1).await;
    t.settle(&halted, &got[0], reject("no")).await.unwrap();
    t.holds(&dead, 1).await;

    let deferred = t.fifo("deferred").await;
    t.send_group(&deferred, "g", &["hidden", "behind"]).await;
    let got = t.receive(&deferred, 1).await;
    let defer = hapax_core::Settlement::Defer { after_ms: 600_000 };
    t.settle(&deferred, &got[0], defer).await.unwrap();

    vec![
        (lapsed, [1, 0, 0, 0, 0]),
        (lapsed_group, [2, 0, 0, 0, 0]),
        (mixed, [2, 1, 1, 1, 0]),
        (paused, [1, 0, 0, 0, 0]),
        (halted, [3, 0, 0, 0, 2]),
        (dead, [1, 0, 0, 0, 0]),
        (deferred, [1, 1, 0, 0, 0]),
    ]
}

pub(crate) async fn counters_of_many_queues_are_those_of_each(t: Trial) {
    assert_eq!(stats_of(&t, &[]).await, []);
    let states = every_state(&t).await;
    let mut names: Vec<QueueName> = states.iter().map(|(name, _)| name.clone()).collect();
    for number in 0..MANY {
        let name = t.standard(&format!("many-{number}")).await;
        let bodies = ["x"; 3];
        t.send_all(&name, &bodies[..number % 4]).await;
        names.push(name);
    }
    t.store().delete_queue(&queue("many-7")).await.unwrap();
    names.push(queue("never-there"));
    // Any order, and a name twice.
    names.reverse();
    names.push(queue("mixed"));

    let at_once = stats_of(&t, &names).await;
    for (name, stats) in names.iter().zip(&at_once) {
        let alone = t.within("stats", t.store().stats(name)).await.ok();
        assert_eq!(*stats, alone, "{name}");
        let expected = states.iter().find(|(of, _)| of == name).map(|(_, expected)| *expected);
        let number = name.as_str().strip_prefix("many-").map(|number| number.parse::<u64>().unwrap());
        let expected = match number {
            Some(7) => None,
            Some(number) => Some([number % 4, 0, 0, 0, 0]),
            None => expected,
        };
        assert_eq!(stats.as_ref().map(held), expected, "{name}");
    }
    let mixed = at_once.last().unwrap().unwrap();
    assert_eq!(mixed.bytes, "parked".len() as u64 + 4 + 5 + 10 + 7);
    let totals = mixed.totals;
    assert_eq!((totals.sent, totals.delivered, totals.dead, totals.expired), (5, 2, 1, 0));
}

pub(crate) async fn counters_follow_what_another_handle_changes(t: Trial) {
    let (gone, again) = (t.standard("gone").await, t.standard("again").await);
    let (changed, other) = (t.standard("changed").await, t.other_handle());
    let names = [gone.clone(), again.clone(), changed.clone()];
    for name in &names {
        t.send_all(name, &["a", "b"]).await;
    }
    let ready = async || -> Vec<Option<u64>> {
        stats_of(&t, &names).await.iter().map(|stats| stats.map(|stats| stats.ready)).collect()
    };
    assert_eq!(ready().await, [Some(2), Some(2), Some(2)]);

    other.store().delete_queue(&gone).await.unwrap();
    other.store().delete_queue(&again).await.unwrap();
    other.standard("again").await;
    other.set(&changed, QueueConfig { delay_ms: 1, ..config() }).await;
    other.send(&changed, text("c").delay_ms(0)).await;
    assert_eq!(ready().await, [None, Some(0), Some(3)]);
}
