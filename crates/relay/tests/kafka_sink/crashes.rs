//! Relays that are killed between any two requests, and a broker that is killed.

use hapax_faults::{Action, Match};

use crate::fixture::{Setting, Shop};
use crate::outbox::block_on;

const KEYS: [&str; 3] = ["a", "b", "c"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    Answer,
}

/// A request of a relay: how often it passes, and what is held then.
const POINTS: [(&str, u64, Side); 13] = [
    ("InitProducerId", 0, Side::Request),
    ("InitProducerId", 1, Side::Answer),
    ("ListOffsets", 0, Side::Request),
    ("ListOffsets", 2, Side::Answer),
    ("Fetch", 0, Side::Request),
    ("Fetch", 0, Side::Answer),
    ("Produce", 0, Side::Request),
    ("Produce", 0, Side::Answer),
    ("Produce", 1, Side::Answer),
    ("EndTxn", 0, Side::Request),
    ("EndTxn", 1, Side::Request),
    ("EndTxn", 0, Side::Answer),
    ("EndTxn", 2, Side::Answer),
];

/// The relay is killed while the proxy holds one of its requests, or the answer to it. The next relay publishes, and then the
/// broker gets the late request.
pub fn a_relay_killed_at_each_request_publishes_once(setting: &Setting) {
    let shop = Shop::new(setting);
    // There is something to read in the positions from the beginning.
    shop.enqueue(&KEYS, 2);
    let mut relay = shop.relay();
    shop.until_published();
    relay.kill();
    let mut aborted = 0;
    for (request, after, side) in POINTS {
        let context = format!("{side:?} of {request} {after}");
        // A request without a transactional id has the client's name.
        let label = match request {
            "ListOffsets" | "Fetch" => format!("{request} hapax"),
            _ => format!("{request} {}", shop.positions()),
        };
        let on = match side {
            Side::Request => Match::request(label),
            Side::Answer => Match::answer_to(label),
        };
        let held = setting.broker.proxy().inject(on, Action::Hold).after(after).times(1);
        let mut relay = shop.proxied_relay();
        shop.enqueue(&KEYS, 3);
        block_on(held.wait_for(1));
        relay.kill();
        let mut next = shop.relay();
        shop.enqueue(&KEYS, 1);
        shop.until_published();
        held.release();
        shop.enqueue(&KEYS, 1);
        shop.until_published();
        next.kill();
        shop.require_exact(&context);
        let all = shop.aborted();
        if request == "EndTxn" && side == Side::Request {
            assert!(all > aborted, "{context}: no transaction was aborted, the run proves nothing");
        }
        aborted = all;
    }
}

/// The broker has committed, and the outbox does not know: only the positions tell the next relay.
pub fn a_relay_that_dies_after_its_commit_repeats_nothing(setting: &Setting) {
    let shop = Shop::new(setting);
    for round in 0..3 {
        let label = format!("EndTxn {}", shop.positions());
        let unanswered = setting.broker.proxy().inject(Match::answer_to(label), Action::Hold);
        let mut relay = shop.proxied_relay();
        shop.enqueue(&KEYS, 4);
        // Of each bucket of the keys, or of the first ones.
        block_on(unanswered.wait_for(1));
        relay.kill();
        unanswered.remove();
        let mut next = shop.relay();
        shop.until_published();
        next.kill();
        shop.require_exact(&format!("round {round}"));
    }
}

pub fn a_killed_broker_is_waited_for(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    shop.enqueue(&KEYS, 5);
    shop.until_published();
    // Once while the relay is idle, and once while it waits for its commit.
    for idle in [true, false] {
        let mut proxied = None;
        let label = format!("EndTxn {}", shop.positions());
        let held = setting.broker.proxy().inject(Match::request(label), Action::Hold).times(1);
        if !idle {
            relay.kill();
            proxied = Some(shop.proxied_relay());
            shop.enqueue(&KEYS, 5);
            block_on(held.wait_for(1));
        }
        held.remove();
        setting.broker.kill();
        shop.enqueue(&KEYS, 5);
        setting.broker.run().unwrap();
        shop.until_published();
        shop.require_exact(&format!("idle {idle}"));
        if let Some(mut proxied) = proxied {
            proxied.kill();
        }
    }
}
