//! Point 6: what a death does to its FIFO group.

use hapax_core::{How, OnDead, QueueConfig, QueueName, Settled};

use crate::trial::{LEASE, Trial};
use crate::values::{bodies, fifo_config, group, redrive_from, reject, seen};

/// A queue whose groups stand still after a death, with the head `a` of group `g` dead and `b`, `c` behind it.
async fn halted(t: &Trial) -> (QueueName, QueueName) {
    let (jobs, dead) = t.with_dead(1, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    (jobs, dead)
}

async fn halted_groups(t: &Trial, jobs: &QueueName) -> Vec<String> {
    t.store().halted_groups(jobs).await.unwrap().iter().map(ToString::to_string).collect()
}

pub(crate) async fn by_default_a_group_goes_on_after_a_death(t: Trial) {
    let (jobs, dead) = t.with_dead(1, fifo_config()).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    assert_eq!(t.one(&jobs).await.body, "b");
    assert!(halted_groups(&t, &jobs).await.is_empty());
    let letter = t.one(&dead).await;
    assert_eq!((letter.body.as_ref(), letter.group.clone()), (b"a".as_slice(), Some(group("g"))));
}

pub(crate) async fn a_halted_group_stands_still_and_others_do_not(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    assert_eq!(t.one(&jobs).await.body, "h1");
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.crash().await;
    t.send_group(&jobs, "g", &["d"]).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.pass(LEASE).await;
    assert_eq!(seen(&t.holds(&dead, 2).await).len(), 2, "h1 died of its lease");
    t.none(&jobs).await;
}

pub(crate) async fn a_lease_that_runs_out_halts_a_group_too(t: Trial) {
    let (jobs, dead) = t.with_dead(1, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    t.receive(&jobs, 1).await;
    t.pass(LEASE).await;
    t.holds(&dead, 1).await;
    t.none(&jobs).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
}

pub(crate) async fn who_works_ahead_of_a_death_may_finish(t: Trial) {
    let (jobs, _) = t.with_dead(10, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    assert_eq!(t.settle(&jobs, &got[1], reject("bad")).await, Ok(Settled::Dead));
    assert!(t.settle(&jobs, &got[2], How::Ack).await.is_err(), "what was behind it came back");
    assert_eq!(t.settle(&jobs, &got[0], How::Ack).await, Ok(Settled::Acked));
    assert_eq!(seen(&t.browse(&jobs).await), ["c"]);
}

pub(crate) async fn a_rejection_halts_a_group_too(t: Trial) {
    let (jobs, _) = t.with_dead(10, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.settle(&jobs, &got, reject("bad")).await, Ok(Settled::Dead));
    t.none(&jobs).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
}

pub(crate) async fn a_released_group_goes_on_without_its_dead(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    t.store().release_group(&jobs, &group("g")).await.unwrap();
    assert!(halted_groups(&t, &jobs).await.is_empty());
    t.crash().await;
    assert!(halted_groups(&t, &jobs).await.is_empty());
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["b", "c"]);
    assert_eq!(seen(&t.browse(&dead).await), ["a"]);
}

pub(crate) async fn a_redriven_message_takes_its_old_place_in_a_halted_group(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let task = t.redrive(redrive_from(&dead)).await;
    assert_eq!((task.moved, task.left), (1, 0));
    assert!(halted_groups(&t, &jobs).await.is_empty());
    t.restart().await;
    let got = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&got), ["a", "b", "c"]);
    assert_eq!(got[0].attempt, 1);
    assert!(got.windows(2).all(|pair| pair[0].sequence < pair[1].sequence), "the sequence tells the order");
}

pub(crate) async fn a_redrive_elsewhere_leaves_the_group_halted(t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let other = t.fifo("other").await;
    t.redrive(hapax_core::RedriveRequest { to: Some(other.clone()), ..redrive_from(&dead) }).await;
    assert_eq!(t.one(&other).await.body, "a");
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.none(&jobs).await;
}
