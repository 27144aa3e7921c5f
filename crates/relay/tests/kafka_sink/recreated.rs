//! Topics that are deleted and created again under a running relay: those of the messages, and that of the positions.

use std::time::Duration;

use hapax_faults::{Action, Match};

use crate::fixture::{Isolation, Setting, Shop};
use crate::outbox::block_on;

const POSITIONS: [(&str, &str); 1] = [("cleanup.policy", "compact")];

/// With fewer partitions than the relay knows of.
pub fn a_topic_that_is_created_again_gets_what_follows_once(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    shop.enqueue(&["a", "b", "c"], 3);
    shop.until_published();
    shop.require_exact("before the topic is deleted");
    shop.delete_topic(&shop.topic());
    shop.create_topic(&shop.topic(), 1, &[]);
    shop.enqueue(&["a", "b", "c"], 3);
    shop.until_published();
    let seen = shop.read(&shop.topic(), Isolation::Committed);
    for key in ["a", "b", "c"] {
        let of_key = seen.iter().filter(|record| record.key.as_deref() == Some(key));
        let values: Vec<&str> = of_key.map(|record| record.value.as_str()).collect();
        assert_eq!(values, ["4", "5", "6"], "key {key}");
    }
    relay.kill();
}

/// The relay has the list, and writes it as a whole.
pub fn a_positions_topic_that_is_created_again_repeats_nothing(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    shop.enqueue(&["a"], 3);
    shop.until_published();
    let partitions = shop.delete_topic(&shop.positions());
    shop.create_topic(&shop.positions(), partitions, &POSITIONS);
    shop.enqueue(&["a"], 3);
    shop.until_published();
    shop.require_exact("with new positions");
    relay.kill();
    let mut relay = shop.relay();
    shop.enqueue(&["a"], 3);
    shop.until_published();
    shop.require_exact("after a start with new positions");
    relay.kill();
}

/// Nothing is published without a list of what was published.
pub fn a_positions_topic_that_is_away_is_waited_for(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.proxied_relay();
    shop.enqueue(&["a"], 3);
    shop.until_published();
    let partitions = shop.delete_topic(&shop.positions());
    let label = format!("Produce {}", shop.positions());
    let tried = setting.broker.proxy().inject(Match::request(label), Action::Delay(Duration::ZERO));
    shop.enqueue(&["a"], 3);
    block_on(tried.wait_for(1));
    tried.remove();
    assert_eq!(shop.read(&shop.topic(), Isolation::Committed).len(), 3, "nothing is published meanwhile");
    shop.create_topic(&shop.positions(), partitions, &POSITIONS);
    shop.until_published();
    shop.require_exact("with new positions");
    relay.kill();
}
