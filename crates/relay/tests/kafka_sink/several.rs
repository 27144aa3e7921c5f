//! Several relays: stopped ones that wake, and ones that are killed while others run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};

use crate::fixture::{PATIENCE, Setting, Shop};
use crate::outbox::block_on;

const KEYS: [&str; 3] = ["a", "b", "c"];

/// It has sent its records, and wakes when another relay has published them.
pub fn a_relay_that_is_stopped_inside_a_transaction_is_fenced(setting: &Setting) {
    let shop = Shop::new(setting);
    let label = format!("EndTxn {}", shop.positions());
    let held = setting.broker.proxy().inject(Match::request(label), Action::Hold).times(1);
    let stopped = shop.proxied_relay();
    shop.enqueue(&KEYS[..1], 4);
    block_on(held.wait_for(1));
    stopped.pause();
    let mut next = shop.relay();
    shop.until_published();
    shop.require_exact("while it is stopped");
    assert!(shop.aborted() > 0, "its transaction was not aborted");
    held.release();
    stopped.resume();
    shop.enqueue(&KEYS, 3);
    shop.until_published();
    // Both run now, and share the buckets.
    shop.require_exact("after it woke");
    next.kill();
    drop(stopped);
}

/// It has taken a bucket over, and stops before it sends the next messages of it. When it wakes, another relay has published them,
/// and the list of what was published has forgotten them.
pub fn a_relay_that_is_stopped_before_its_records_is_fenced(setting: &Setting) {
    // It waits for the answer that it was stopped before, however long the others take.
    let mut shop = Shop::new(setting);
    shop.request_timeout = PATIENCE;
    let mut stopped = shop.proxied_relay();
    shop.enqueue(&KEYS[..1], 2);
    shop.until_published();
    let label = format!("Produce {}", shop.positions());
    let held = setting.broker.proxy().inject(Match::request(label.as_str()), Action::Hold).times(1);
    let answered = setting.broker.proxy().inject(Match::answer_to(label), Action::Delay(Duration::ZERO));
    shop.enqueue(&KEYS[..1], 2);
    block_on(held.wait_for(1));
    stopped.pause();
    let mut next = shop.relay();
    for _ in 0..3 {
        shop.enqueue(&KEYS[..1], 1);
        shop.until_published();
    }
    held.release();
    stopped.resume();
    block_on(answered.wait_for(1));
    // It publishes the next ones alone, so what it had begun before is over.
    next.kill();
    shop.enqueue(&KEYS[..1], 2);
    shop.until_published();
    stopped.kill();
    shop.require_exact("after it woke");
}

/// It has read messages from the outbox and stops before it takes their bucket over. When it wakes, another relay has published
/// them, and the list of what was published has forgotten them.
pub fn a_relay_that_wakes_before_it_takes_over_publishes_nothing(setting: &Setting) {
    // It waits for the answer that it was stopped before, however long the others take.
    let mut shop = Shop::new(setting);
    shop.request_timeout = PATIENCE;
    let label = format!("InitProducerId {}", shop.positions());
    let held = setting.broker.proxy().inject(Match::request(label.as_str()), Action::Hold).times(1);
    let fencing = setting.broker.proxy().inject(Match::answer_to(label), Action::Delay(Duration::ZERO));
    let mut stopped = shop.proxied_relay();
    shop.enqueue(&KEYS[..1], 4);
    block_on(held.wait_for(1));
    stopped.pause();
    let mut next = shop.relay();
    for _ in 0..3 {
        // Each time the list forgets what the outbox has recorded before.
        shop.enqueue(&KEYS[..1], 1);
        shop.until_published();
    }
    held.release();
    stopped.resume();
    block_on(fencing.wait_for(1));
    // It publishes the next ones alone, so what it had begun before is over.
    next.kill();
    shop.enqueue(&KEYS[..1], 2);
    shop.until_published();
    stopped.kill();
    shop.require_exact("after it woke");
}

pub fn relays_that_are_killed_and_stopped_publish_once(setting: &Setting) {
    let shop = Arc::new(Shop::new(setting));
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let ended = Arc::new(AtomicBool::new(false));
    let writer = {
        let (shop, ended) = (shop.clone(), ended.clone());
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                shop.enqueue(&keys, 2);
            }
        })
    };
    let mut random = fastrand::Rng::with_seed(17);
    let mut relays = [shop.relay(), shop.relay()];
    let start = Instant::now();
    for _ in 0..if crate::outbox::is_long() { 60 } else { 8 } {
        assert!(start.elapsed() < 10 * PATIENCE);
        std::thread::sleep(Duration::from_millis(random.u64(300..1_500)));
        let which = random.usize(..relays.len());
        if random.bool() {
            relays[which].kill();
            relays[which] = shop.relay();
        } else {
            // Longer than its lease.
            relays[which].pause();
            std::thread::sleep(Duration::from_millis(random.u64(1_200..2_500)));
            relays[which].resume();
        }
    }
    ended.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    shop.until_published();
    shop.require_exact("after kills and stops");
}
