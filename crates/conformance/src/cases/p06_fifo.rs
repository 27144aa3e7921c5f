//! Point 6: FIFO groups.

use hapax_core::{QueueConfig, Receive, SendError, SettleError, Settled, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, dedup, dying, exactly, fifo_config, group, in_group, now, seen, text};

pub(crate) async fn a_group_is_received_in_the_order_of_its_sends(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    for pair in [["a", "b"], ["c", "d"], ["e", "f"]] {
        let sent = t.send_group(&jobs, "g", &pair).await;
        assert!(sent[0].sequence < sent[1].sequence);
    }
    let mut got = Vec::new();
    for _ in 0..3 {
        let batch = t.receive(&jobs, 2).await;
        got.extend(bodies(&batch));
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
        t.restart().await;
    }
    assert_eq!(got, ["a", "b", "c", "d", "e", "f"]);
}

pub(crate) async fn one_receive_may_take_several_of_a_group_in_order(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&got), ["a", "b", "c"]);
    assert!(got.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
}

pub(crate) async fn a_group_is_blocked_while_any_of_its_batch_is_in_flight(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 2).await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[0]).await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[1]).await;
    assert_eq!(t.one(&jobs).await.body, "c");
}

pub(crate) async fn other_groups_are_not_blocked(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["g1", "g2"]).await;
    t.receive(&jobs, 1).await;
    t.send_group(&jobs, "h", &["h1", "h2"]).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["h1", "h2"]);
    t.none(&jobs).await;
}

pub(crate) async fn each_group_keeps_its_order_when_groups_are_mixed(t: Trial) {
    let jobs = t.fifo("jobs").await;
    for round in 0..5 {
        for name in ["g", "h", "i"] {
            t.send_group(&jobs, name, &[&format!("{name}{round}")]).await;
        }
    }
    let mut got = Vec::new();
    while got.len() < 15 {
        let batch = t.receive(&jobs, 4).await;
        assert!(!batch.is_empty(), "all were acked, so something is ready: {got:?}");
        got.extend(bodies(&batch));
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
    }
    for name in ["g", "h", "i"] {
        let own: Vec<_> = got.iter().filter(|body| body.starts_with(name)).cloned().collect();
        assert_eq!(own, (0..5).map(|round| format!("{name}{round}")).collect::<Vec<_>>());
    }
}

pub(crate) async fn a_failure_inside_a_batch_returns_the_rest_uncounted(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c", "d"]).await;
    let got = t.receive(&jobs, 3).await;
    t.ack(&jobs, &got[0]).await;
    assert_eq!(t.fail(&jobs, &got[1], "boom").await, Settled::Returned { after_ms: 0 });
    let late = t.settle(&jobs, &got[2], Settlement::Ack).await;
    assert!(
        matches!(late, Err(SettleError::Stale | SettleError::NotInFlight | SettleError::Expired)),
        "{late:?}"
    );
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["b", "c", "d"]);
    assert_eq!(again.iter().map(|d| d.attempt).collect::<Vec<_>>(), [2, 1, 1]);
    assert_eq!(t.settle(&jobs, &got[2], Settlement::Ack).await, Err(SettleError::Stale));
}

pub(crate) async fn a_failure_leaves_earlier_messages_of_its_batch_in_flight(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    t.fail(&jobs, &got[1], "boom").await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[0]).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["b", "c"]);
}

pub(crate) async fn a_failure_of_one_group_leaves_the_others_of_its_receive(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["g1"]).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    let got = t.receive(&jobs, 10).await;
    let find = |body: &str| got.iter().find(|d| d.body == body.as_bytes()).expect("received");
    t.fail(&jobs, find("g1"), "boom").await;
    t.ack(&jobs, find("h1")).await;
    assert_eq!(t.one(&jobs).await.body, "g1");
}

pub(crate) async fn order_holds_when_a_batch_runs_out_of_its_lease(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c", "d"]).await;
    t.receive(&jobs, 3).await;
    t.hidden_for(&jobs, LEASE_MS).await;
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b", "c", "d"]);
    assert_eq!(
        again.iter().map(|d| d.attempt).collect::<Vec<_>>(),
        [2, 1, 1, 1],
        "one attempt of a batch failed"
    );
    assert_eq!(again.iter().map(|d| d.deliveries).collect::<Vec<_>>(), [2, 2, 2, 1]);
}

/// As recorded from AWS: of a batch of three, the one whose visibility was extended stays hidden, and with it those behind
/// it; those before it come again.
pub(crate) async fn a_lease_of_its_own_outlives_those_before_it(t: Trial) {
    for (extended, again) in [(0, vec![]), (1, vec!["a"]), (2, vec!["a", "b"])] {
        let jobs = t.fifo(&format!("jobs-{extended}")).await;
        t.send_group(&jobs, "g", &["a", "b", "c"]).await;
        let got = t.receive(&jobs, 10).await;
        t.set_visibility(&jobs, &got[extended], 4 * LEASE_MS).await;
        // A heartbeat of the whole batch does not make it a part of the batch again.
        for delivery in &got {
            let lease_ms = if delivery.body == got[extended].body { 4 * LEASE_MS } else { LEASE_MS };
            t.extend(&jobs, delivery, lease_ms).await.unwrap();
        }
        t.advance(2 * LEASE_MS).await;
        assert_eq!(bodies(&t.receive(&jobs, 10).await), again, "message {extended} has a lease of its own");
        t.ack(&jobs, &got[extended]).await;
    }
}

pub(crate) async fn the_end_of_a_lease_of_its_own_takes_nothing_back(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 10).await;
    t.extend(&jobs, &got[1], 4 * LEASE_MS).await.unwrap();
    t.set_visibility(&jobs, &got[0], LEASE_MS).await;
    t.advance(2 * LEASE_MS).await;
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a"]);
    t.ack(&jobs, &got[1]).await;
    // The next delivery is part of a batch again.
    t.send_group(&jobs, "g", &["c"]).await;
    t.extend(&jobs, &again[0], 0).await.unwrap();
    let batch = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&batch), ["a", "c"]);
    t.extend(&jobs, &batch[1], 4 * LEASE_MS).await.unwrap();
    t.advance(2 * LEASE_MS).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "c"], "the batch's lease ended with its first");
}

pub(crate) async fn a_lease_of_its_own_is_lost_with_a_failure_before_it(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 10).await;
    t.set_visibility(&jobs, &got[1], 4 * LEASE_MS).await;
    t.fail(&jobs, &got[0], "boom").await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"], "nothing overtakes what failed");
}

pub(crate) async fn a_backing_off_head_blocks_its_group(mut t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { retry: exactly(1_000, 0), ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Returned { after_ms: 1_000 });
    t.restart().await;
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"]);
}

pub(crate) async fn a_deferred_head_blocks_its_group(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &got, Settlement::Defer { after_ms: 1_000 }).await.unwrap();
    t.hidden_for(&jobs, 1_000).await;
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b"]);
    assert_eq!(again[0].attempt, 1);
}

pub(crate) async fn a_delayed_head_blocks_its_group(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { delay_ms: 1_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a"]).await;
    t.set(&jobs, fifo_config()).await;
    t.send_group(&jobs, "g", &["b"]).await;
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"]);
}

pub(crate) async fn a_message_given_back_comes_again_first(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.extend(&jobs, &got, 0).await.unwrap();
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b"]);
    assert_eq!(again[0].attempt, 2);
}

pub(crate) async fn a_blocked_group_stays_blocked_through_a_crash(mut t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 60_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.crash().await;
    t.none(&jobs).await;
    t.ack(&jobs, &got).await;
    assert_eq!(t.one(&jobs).await.body, "b");
}

pub(crate) async fn a_repeated_receive_attempt_gives_the_same_deliveries(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let receive = Receive { attempt_id: Some("try-1".into()), ..now(2) };
    let first = t.receive_with(&jobs, receive.clone()).await;
    t.advance(LEASE_MS / 2).await;
    let again = t.receive_with(&jobs, receive).await;
    let told = |all: &[hapax_core::Delivery]| {
        all.iter().map(|d| (d.id, d.receipt.clone(), d.fence, d.attempt)).collect::<Vec<_>>()
    };
    assert_eq!(told(&again), told(&first));
    assert_eq!(bodies(&again), ["a", "b"]);
    t.none(&jobs).await;
    let other = Receive { attempt_id: Some("try-2".into()), ..now(2) };
    assert!(t.receive_with(&jobs, other).await.is_empty(), "another attempt finds the group blocked");
    // The repetition restarted the lease.
    t.hidden_for(&jobs, LEASE_MS).await;
    assert_eq!(t.receive(&jobs, 1).await[0].attempt, 2);
}

pub(crate) async fn a_repeated_receive_attempt_can_be_settled(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let receive = Receive { attempt_id: Some("try-1".into()), ..now(1) };
    let first = t.receive_with(&jobs, receive.clone()).await.remove(0);
    t.receive_with(&jobs, receive).await;
    t.ack(&jobs, &first).await;
    assert_eq!(t.one(&jobs).await.body, "b");
}

pub(crate) async fn a_fifo_message_needs_a_group_and_an_identity_and_takes_no_delay(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let batch = vec![
        text("no group").dedup(dedup("1")),
        text("no identity").group(group("g")),
        in_group("g", "delayed").delay_ms(1_000),
        in_group("g", "good"),
    ];
    let sent = t.send_batch(&jobs, batch).await;
    for refused in &sent[..3] {
        assert!(matches!(refused, Err(SendError::Invalid(_))), "{refused:?}");
    }
    assert!(sent[3].is_ok());
    assert_eq!(t.one(&jobs).await.body, "good");
}

pub(crate) async fn a_visibility_of_zero_leaves_the_rest_of_the_batch_in_flight(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 2).await;
    t.extend(&jobs, &got[0], 0).await.unwrap();
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a"], "nothing is in flight before it; b is before c");
    assert_eq!(again[0].attempt, 2);
    t.ack(&jobs, &got[1]).await;
    t.none(&jobs).await;
    t.ack(&jobs, &again[0]).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["c"]);
}

pub(crate) async fn a_parked_message_takes_back_the_rest_of_its_batch(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    let park = Settlement::Park { reason: "in doubt".into() };
    assert_eq!(t.settle(&jobs, &got[0], park).await, Ok(Settled::Parked));
    assert!(t.settle(&jobs, &got[1], Settlement::Ack).await.is_err(), "it was taken back");
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["b", "c"], "on_dead is continue");
    assert_eq!(again.iter().map(|d| (d.attempt, d.deliveries)).collect::<Vec<_>>(), [(1, 2), (1, 2)]);
}

pub(crate) async fn a_group_that_failed_waits_behind_the_other_groups(t: Trial) {
    let jobs = t.fifo("jobs").await;
    for name in ["g", "h", "i"] {
        t.send_group(&jobs, name, &[&format!("{name}1"), &format!("{name}2")]).await;
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        let got = t.receive(&jobs, 1).await.remove(0);
        seen.extend(bodies(std::slice::from_ref(&got)));
        t.fail(&jobs, &got, "boom").await;
    }
    assert_eq!(seen, ["g1", "h1", "i1"]);
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(got.body, "g1", "and comes again after them, in its own order");
    t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    assert_eq!(t.receive(&jobs, 1).await[0].body, "h1", "a deferred one yields likewise");
}

/// Receives up to three messages at a time until the queue is empty. A batch with the poison message crashes, so its
/// lease expires.
async fn work_off(t: &Trial, jobs: &hapax_core::QueueName, one_by_one: bool) -> Vec<String> {
    let mut acked = Vec::new();
    for _ in 0..60 {
        let got = t.receive(jobs, 3).await;
        if got.is_empty() {
            let stats = t.stats(jobs).await;
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                return acked;
            }
            t.pass(LEASE_MS).await;
            continue;
        }
        let poison = got.iter().position(|d| d.body.starts_with(b"poison"));
        let done = match poison {
            Some(at) if one_by_one => &got[..at],
            Some(_) => &[],
            None => &got[..],
        };
        for delivery in done {
            t.ack(jobs, delivery).await;
            acked.extend(bodies(std::slice::from_ref(delivery)));
        }
        if poison.is_some() {
            t.pass(LEASE_MS).await;
        }
    }
    panic!("still not empty: {acked:?}");
}

pub(crate) async fn healthy_messages_do_not_die_with_a_poison_neighbour(t: Trial) {
    let sent = [["poison", "b", "c", "d"], ["a", "poison", "c", "d"], ["a", "b", "c", "poison"]];
    for (at, (bodies, one_by_one)) in
        sent.iter().flat_map(|bodies| [(bodies, true), (bodies, false)]).enumerate()
    {
        for limit in [1, 2, 3] {
            let name = format!("n{at}-{limit}");
            let dead = t.create(&format!("{name}-dead.fifo"), fifo_config()).await;
            let jobs = t.create(&format!("{name}.fifo"), dying(&dead, limit, fifo_config())).await;
            t.send_group(&jobs, "g", bodies).await;
            let mut acked = work_off(&t, &jobs, one_by_one).await;
            let died = seen(&t.browse(&dead).await);
            assert_eq!(died, ["poison"], "{bodies:?}, one by one: {one_by_one}, limit {limit}");
            acked.sort();
            let mut healthy: Vec<_> = bodies.iter().filter(|body| **body != "poison").collect();
            healthy.sort();
            assert_eq!(acked.iter().collect::<Vec<_>>(), healthy);
        }
    }
}

pub(crate) async fn a_discarded_head_frees_its_group(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let sent = t.send_group(&jobs, "g", &["head", "next"]).await;
    let head = t.receive(&jobs, 1).await.remove(0);
    let refused = t.store().discard(&jobs, vec![sent[0].id], "suite").await.unwrap();
    assert_eq!((refused.count, refused.in_flight), (0, vec![sent[0].id]), "its consumer has it");
    t.settle(&jobs, &head, Settlement::Retry { after_ms: Some(600_000), error: None }).await.unwrap();
    t.none(&jobs).await;
    let discarded = t.store().discard(&jobs, vec![sent[0].id], "suite").await.unwrap();
    assert_eq!((discarded.count, discarded.in_flight), (1, Vec::new()));
    assert_eq!(t.one(&jobs).await.body, "next");
}
