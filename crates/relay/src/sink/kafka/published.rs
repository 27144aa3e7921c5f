//! What the positions topic remembers of a bucket: the messages that were published, and that the outbox may give again.
//!
//! It is a list of what *was* published, and not a watermark with exceptions: a message that the list does not have is published,
//! so that whatever is missing in it repeats a message and loses none.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hapax_core::outbox::OutboxMessage;

/// The first line of a value.
const FORMAT: &str = "hapax-relay 1";
/// What stands behind a message that was set aside before it was published.
const HELD: &str = "held";
/// Maximum size of a value, which has to fit into a record: about 20,000 messages. A round of a relay has 2,000 by default, and
/// what is set aside is released one by one.
const VALUE_BYTES_MAX: usize = 900_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    number: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Read by its number: not given again once the outbox has recorded a position behind it.
    Read,
    /// Held by the outbox, and given again until it is released.
    Held,
    Released,
}

/// The published messages of a bucket, by their ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Published {
    entries: BTreeMap<String, Entry>,
}

impl Published {
    /// Reads a value of the positions topic.
    pub fn parse(value: &[u8]) -> Result<Self, String> {
        let wrong = |line: &str| format!("the line {line:?} cannot be read");
        let value = std::str::from_utf8(value).map_err(|error| error.to_string())?;
        let mut lines = value.lines();
        match lines.next() {
            Some(FORMAT) => {}
            other => {
                return Err(format!(
                    "it begins with {:?} instead of {FORMAT:?}: it was written by another version or program",
                    other.unwrap_or_default()
                ));
            }
        }
        let mut entries = BTreeMap::new();
        for line in lines {
            let mut words = line.split(' ');
            let number = words.next().and_then(|number| number.parse().ok()).ok_or_else(|| wrong(line))?;
            let id = words.next().filter(|id| !id.is_empty()).ok_or_else(|| wrong(line))?;
            let state = match words.next() {
                None => State::Read,
                Some(HELD) => State::Held,
                Some(_) => return Err(wrong(line)),
            };
            entries.insert(id.to_owned(), Entry { number, state });
        }
        Ok(Self { entries })
    }

    /// The value for the positions topic; `None` if there are more messages than a record can hold.
    pub fn value(&self) -> Option<String> {
        let value = self.text();
        (value.len() <= VALUE_BYTES_MAX).then_some(value)
    }

    fn text(&self) -> String {
        let mut value = format!("{FORMAT}\n");
        for (id, Entry { number, state }) in &self.entries {
            let held = if *state == State::Read { "" } else { " held" };
            // Writing to a string cannot fail.
            let _ = writeln!(value, "{number} {id}{held}");
        }
        value
    }

    pub fn contains(&self, message: &OutboxMessage) -> bool {
        self.entries.contains_key(&message.id)
    }

    pub fn has_held(&self) -> bool {
        self.entries.values().any(|entry| entry.state == State::Held)
    }

    /// These are published now.
    pub fn add<'m>(&mut self, messages: impl IntoIterator<Item = &'m OutboxMessage>, held: bool) {
        let state = if held { State::Held } else { State::Read };
        for OutboxMessage { id, number, .. } in messages {
            self.entries.insert(id.clone(), Entry { number: *number, state });
        }
    }

    /// The outbox holds this one no more.
    pub fn released(&mut self, id: &str) {
        if let Some(entry) = self.entries.get_mut(id).filter(|entry| entry.state == State::Held) {
            entry.state = State::Released;
        }
    }

    /// The outbox holds none but these.
    pub fn released_except(&mut self, is_held: impl Fn(&str) -> bool) {
        for (id, entry) in &mut self.entries {
            if entry.state == State::Held && !is_held(id) {
                entry.state = State::Released;
            }
        }
    }

    /// Forgets what the outbox does not give again, since it has recorded this position. What was released may still be read
    /// by its number.
    pub fn forget(&mut self, recorded: u64) {
        self.entries.retain(|_, entry| entry.state == State::Held || entry.number > recorded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::sample;

    fn numbers(published: &Published) -> Vec<u64> {
        published.entries.values().map(|entry| entry.number).collect()
    }

    #[test]
    fn a_value_is_read_as_it_was_written() {
        let mut published = Published::default();
        assert_eq!(Published::parse(published.text().as_bytes()), Ok(published.clone()));
        published.add([&sample(3, None)], false);
        published.add([&sample(1, None)], true);
        let value = published.value().unwrap();
        assert_eq!(
            value,
            "hapax-relay 1\n1 00000000-0000-4000-8000-000000000001 held\n3 00000000-0000-4000-8000-000000000003\n"
        );
        assert_eq!(Published::parse(value.as_bytes()), Ok(published));
        for wrong in ["", "hapax-relay 2\n", "hapax-relay 1\nx", "hapax-relay 1\n1 ", "hapax-relay 1\n1 a b"]
        {
            assert!(Published::parse(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_list_that_no_record_can_hold_is_not_written() {
        let mut published = Published::default();
        for number in 0..25_000 {
            published.add([&sample(number, None)], false);
        }
        assert_eq!(published.value(), None);
        published.forget(10_000);
        assert!(published.value().is_some_and(|value| value.lines().count() == 15_000));
    }

    #[test]
    fn a_message_is_forgotten_when_the_outbox_cannot_give_it_again() {
        let mut published = Published::default();
        published.add([&sample(1, None), &sample(5, None)], false);
        published.add([&sample(2, None), &sample(6, None)], true);
        published.forget(4);
        assert_eq!(numbers(&published), [2, 5, 6], "2 is held by the outbox");
        published.released(&sample(2, None).id);
        published.released(&sample(6, None).id);
        published.forget(4);
        assert_eq!(numbers(&published), [5, 6], "6 was released, and may still be read by its number");
        published.forget(6);
        assert_eq!(numbers(&published), [0; 0]);
    }

    #[test]
    fn what_a_predecessor_released_is_found_in_the_outbox() {
        let mut published = Published::default();
        published.add([&sample(1, None), &sample(2, None)], true);
        assert!(published.has_held());
        published.released_except(|id| id.ends_with('2'));
        published.forget(9);
        assert_eq!(numbers(&published), [2]);
    }
}
