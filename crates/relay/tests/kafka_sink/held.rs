//! Messages that were set aside, the length of the list, and an outbox that is restored.

use hapax_core::outbox::{NewOutboxMessage, OutboxStore as _};
use hapax_faults::{Action, Match};

use crate::fixture::{Isolation, Setting, Shop};
use crate::outbox::{Database, block_on};

fn enqueue_to(shop: &Shop, topic: &str, key: &str, bodies: &[&str]) {
    block_on(async {
        let (outbox, mut db) = (shop.database.outbox().await, shop.database.connect().await);
        for body in bodies {
            let message = NewOutboxMessage::new(topic, (*body).to_owned()).key(key);
            outbox.enqueue(&mut db, &message).await.unwrap();
        }
    });
}

fn values(shop: &Shop, topic: &str) -> Vec<String> {
    let read = shop.read(&format!("{}.{topic}", shop.name), Isolation::Committed);
    read.into_iter().map(|seen| seen.value).collect()
}

pub fn a_message_whose_topic_is_missing_is_parked(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    enqueue_to(&shop, "missing", "m", &["1", "2"]);
    enqueue_to(&shop, "not a topic", "n", &["1"]);
    // Others are not affected.
    shop.enqueue(&["a"], 3);
    shop.until("two keys are parked", |status| status.parked == 2 && status.lag == 0);
    shop.require_exact("beside parked messages");
    let parked =
        block_on(async { shop.database.outbox().await.held(Some("orders"), true, 10).await.unwrap() });
    let errors: Vec<&str> = parked.iter().filter_map(|(_, held)| held.error.as_deref()).collect();
    let missing =
        format!("the topic {}.missing does not exist; create it, then run: hapax outbox retry", shop.name);
    assert!(errors.iter().any(|error| error.starts_with(&missing)), "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("is not the name of a topic")), "{errors:?}");
    relay.kill();
}

/// Its key waits behind it. Small messages that are too large only together are published apart.
pub fn a_message_too_large_for_its_topic_is_parked(setting: &Setting) {
    let shop = Shop::new(setting);
    shop.create_topic(&format!("{}.small", shop.name), 1, &[("max.message.bytes", "1000")]);
    let (large, small) = ("x".repeat(2_000), "y".repeat(100));
    let bodies: Vec<String> = (0..30).map(|number| format!("{number} {small}")).collect();
    enqueue_to(&shop, "small", "many", &bodies.iter().map(String::as_str).collect::<Vec<_>>());
    enqueue_to(&shop, "small", "large", &[&large, "behind it"]);
    shop.enqueue(&["a"], 3);
    let mut relay = shop.relay();
    shop.until("one key is parked", |status| status.parked == 1 && status.held == 2 && status.lag == 0);
    shop.require_exact("beside a message that is too large");
    assert_eq!(values(&shop, "small"), bodies);
    let parked =
        block_on(async { shop.database.outbox().await.held(Some("orders"), true, 10).await.unwrap() });
    let errors: Vec<&str> = parked.iter().filter_map(|(_, held)| held.error.as_deref()).collect();
    assert!(matches!(errors[..], [error] if error.contains("MessageTooLarge")), "{errors:?}");
    relay.kill();
}

/// The relay dies after it has published a message that was set aside, and before the outbox has removed it.
pub fn a_held_message_is_published_once(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    enqueue_to(&shop, "late", "m", &["1", "2"]);
    shop.until("the key is parked", |status| status.parked == 1 && status.held == 2 && status.lag == 0);
    relay.kill();
    shop.create_topic(&format!("{}.late", shop.name), 1, &[]);
    let label = format!("EndTxn {}", shop.positions());
    let unanswered = setting.broker.proxy().inject(Match::answer_to(label), Action::Hold).times(1);
    let mut relay = shop.proxied_relay();
    block_on(async { shop.database.outbox().await.retry("orders", None, "test").await.unwrap() });
    block_on(unanswered.wait_for(1));
    relay.kill();
    unanswered.release();
    let mut relay = shop.relay();
    shop.until_published();
    assert_eq!(values(&shop, "late"), ["1", "2"]);
    relay.kill();
}

/// A list that does not forget would grow until no transaction can carry it.
pub fn the_list_of_published_messages_stays_short(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    for _ in 0..30 {
        shop.enqueue(&["a"], 10);
        shop.until_published();
    }
    relay.kill();
    shop.require_exact("thirty rounds");
    let lists = shop.read(&shop.positions(), Isolation::Committed);
    let longest = lists.iter().map(|seen| seen.value.lines().count()).max().unwrap();
    assert!(lists.len() >= 30, "{} transactions", lists.len());
    assert!(longest <= 1 + 2 * 10, "a list has {longest} lines, of 300 messages");
}

/// Numbers that were used before the backup was restored are those of other messages: the list knows messages by their ids.
pub fn a_restored_outbox_loses_no_message(setting: &Setting) {
    let shop = Shop::new(setting);
    let mut relay = shop.relay();
    shop.enqueue(&["a"], 2);
    shop.until_published();
    relay.kill();
    shop.database.refuse_connections();
    let backup = Database::copy_of(setting.server, &shop.database.name);
    shop.database.accept_connections();
    let mut relay = shop.relay();
    shop.enqueue(&["a"], 3);
    shop.until_published();
    relay.kill();
    shop.database.refuse_connections();
    let rename = |from: &str, to: &str| {
        setting.server.sql("postgres", &format!("ALTER DATABASE {from} RENAME TO {to}")).unwrap();
    };
    rename(&shop.database.name, &format!("{}_old", shop.database.name));
    rename(&backup.name, &shop.database.name);
    // They get the numbers of the last three.
    shop.enqueue(&["a"], 3);
    let mut relay = shop.relay();
    shop.until_published();
    relay.kill();
    shop.require_exact("new messages under old numbers");
}
