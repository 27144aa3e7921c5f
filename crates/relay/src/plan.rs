//! What is to be done with the messages of a round: pure functions.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use hapax_core::outbox::{BucketRange, HeldMessage, OutboxMessage, PublishAnswer, topic_matches};

/// Keys that are set aside, by bucket.
pub type HeldKeys = BTreeMap<u16, HashSet<String>>;

pub fn is_held(keys: &HeldKeys, message: &OutboxMessage) -> bool {
    message.ordered_key().is_some_and(|key| keys.get(&message.bucket).is_some_and(|keys| keys.contains(key)))
}

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is to be published.
    Publish,
    /// It is to be set aside: its key is held, or it is not to be delivered yet.
    Hold,
    /// It was published, is set aside, or is of another route.
    Done,
}

#[derive(Debug)]
pub struct Item {
    pub message: OutboxMessage,
    pub step: Step,
}

/// The messages of a round, in the order in which they were read.
#[derive(Debug)]
pub struct Round {
    pub items: Vec<Item>,
    /// How far each bucket was read.
    ends: BTreeMap<u16, u64>,
}

impl Round {
    /// Plans what was read from these ranges, at most `rows` and about `bytes` of each bucket.
    pub fn new(
        messages: Vec<OutboxMessage>,
        ranges: &[BucketRange],
        (rows, bytes): (usize, usize),
        topics: &[String],
        keys: &HeldKeys,
        sink_delays: bool,
    ) -> Self {
        let mut ends = BTreeMap::new();
        for range in ranges {
            let of = messages.iter().filter(|message| message.bucket == range.bucket);
            let (count, size) =
                of.clone().fold((0, 0), |(count, size), message| (count + 1, size + message.body.len()));
            // Behind the last message are only numbers that were rolled back.
            let is_all = count < rows && size < bytes;
            let last = of.map(|message| message.number).max().unwrap_or(range.after);
            ends.insert(range.bucket, if is_all { range.through } else { last });
        }
        let step = |message: &OutboxMessage| {
            if !topics.iter().any(|pattern| topic_matches(pattern, &message.topic)) {
                Step::Done
            } else if is_held(keys, message) || (message.deliver_at_ms.is_some() && !sink_delays) {
                Step::Hold
            } else {
                Step::Publish
            }
        };
        let items = messages.into_iter().map(|message| Item { step: step(&message), message }).collect();
        Self { items, ends }
    }

    /// How far each bucket is done: everything up to there was published or set aside.
    pub fn positions(&self) -> BTreeMap<u16, u64> {
        let mut positions = self.ends.clone();
        // The first one that is not done, from the back.
        for item in self.items.iter().rev().filter(|item| item.step != Step::Done) {
            positions.insert(item.message.bucket, item.message.number - 1);
        }
        positions
    }

    /// The positions of a round that is over.
    pub fn ends(&self) -> BTreeMap<u16, u64> {
        self.ends.clone()
    }

    /// Forgets buckets that are not ours any more.
    pub fn drop_buckets(&mut self, lost: &BTreeSet<u16>) {
        self.items.retain(|item| !lost.contains(&item.message.bucket));
        self.ends.retain(|bucket, _| !lost.contains(bucket));
    }

    /// Messages to be published next: indices of at most `max` for each of at most `calls` calls, in order. A bucket, and so a
    /// key, is in one call only.
    pub fn next(&self, max: usize, calls: usize) -> Vec<Vec<usize>> {
        let mut next = vec![Vec::new(); calls];
        let open = self.items.iter().enumerate().filter(|(_, item)| item.step == Step::Publish);
        for (index, item) in open {
            let call = &mut next[usize::from(item.message.bucket) % calls];
            if call.len() < max {
                call.push(index);
            }
        }
        next.retain(|call| !call.is_empty());
        if hapax_core::mutant::is("relay-out-of-order") {
            for call in &mut next {
                call.reverse();
            }
        }
        next
    }

    /// Takes the sink's answers. Returns what is to be set aside, with everything that follows it under the same key, and
    /// what the sink said if it takes nothing now.
    pub fn answered(
        &mut self,
        indices: &[usize],
        answers: Vec<PublishAnswer>,
        mut retry_ms: impl FnMut() -> u64,
    ) -> Answered {
        let mut answered = Answered::default();
        let mut blocked: HashSet<(u16, String)> = HashSet::new();
        for (&index, answer) in indices.iter().zip(answers) {
            let item = &mut self.items[index];
            let held = |parked, retry_after_ms, error: String| HeldMessage {
                message: item.message.clone(),
                attempts: 1,
                parked,
                retry_after_ms,
                error: Some(error),
            };
            match answer {
                PublishAnswer::Published => {
                    answered.published += 1;
                    item.step = Step::Done;
                }
                PublishAnswer::Duplicate => {
                    answered.duplicates += 1;
                    item.step = Step::Done;
                }
                PublishAnswer::Refused(error) => {
                    answered.refused += 1;
                    answered.hold.push(held(true, None, error));
                    item.step = Step::Hold;
                }
                PublishAnswer::Failed(error) => {
                    answered.failed += 1;
                    answered.problem = Some(error.clone());
                    answered.hold.push(held(false, Some(retry_ms()), error));
                    item.step = Step::Hold;
                }
                PublishAnswer::Unavailable(error) => answered.unavailable = Some(error),
                PublishAnswer::NotTried => {}
            }
            if item.step == Step::Hold
                && let Some(key) = item.message.ordered_key()
            {
                blocked.insert((item.message.bucket, key.to_owned()));
            }
        }
        if !blocked.is_empty() {
            for item in self.items.iter_mut().filter(|item| item.step == Step::Publish) {
                let key = item.message.ordered_key().map(|key| (item.message.bucket, key.to_owned()));
                if key.is_some_and(|key| blocked.contains(&key)) {
                    item.step = Step::Hold;
                    answered.hold.push(behind(&item.message));
                }
            }
        }
        answered.hold.sort_by_key(|held| (held.message.bucket, held.message.number));
        answered
    }
}

/// What the answers of a sink mean.
#[derive(Debug, Default)]
pub struct Answered {
    pub published: usize,
    pub duplicates: usize,
    pub refused: usize,
    pub failed: usize,
    pub hold: Vec<HeldMessage>,
    /// The last failure.
    pub problem: Option<String>,
    pub unavailable: Option<String>,
}

/// A message that waits behind an earlier one of its key, or for its time.
pub fn behind(message: &OutboxMessage) -> HeldMessage {
    HeldMessage { message: message.clone(), attempts: 0, parked: false, retry_after_ms: None, error: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bucket: u16, number: u64, key: &str) -> OutboxMessage {
        OutboxMessage {
            bucket,
            number,
            id: format!("{bucket}-{number}"),
            topic: "t".into(),
            key: (!key.is_empty()).then(|| key.to_owned()),
            body: "body".into(),
            headers: BTreeMap::new(),
            deliver_at_ms: None,
            enqueued_ms: 0,
        }
    }

    fn round(messages: Vec<OutboxMessage>, through: u64) -> Round {
        let ranges =
            [BucketRange { bucket: 1, after: 0, through }, BucketRange { bucket: 2, after: 3, through }];
        Round::new(messages, &ranges, (100, 1_000), &["*".to_owned()], &HeldKeys::new(), true)
    }

    #[test]
    fn a_position_passes_gaps_and_stops_before_what_is_open() {
        let mut round = round(vec![message(1, 2, "a"), message(1, 5, "b"), message(1, 7, "c")], 9);
        assert_eq!(round.positions(), [(1, 1), (2, 9)].into());
        round.items[0].step = Step::Done;
        round.items[2].step = Step::Done;
        assert_eq!(round.positions()[&1], 4);
        round.items[1].step = Step::Done;
        assert_eq!(round.positions()[&1], 9);
    }

    #[test]
    fn a_bucket_that_was_cut_off_ends_at_its_last_message() {
        let ranges = [BucketRange { bucket: 1, after: 0, through: 9 }];
        let messages = || vec![message(1, 2, ""), message(1, 4, "")];
        for (limits, end) in [((3, 1_000), 9), ((2, 1_000), 4), ((3, 8), 4)] {
            let mut round = Round::new(messages(), &ranges, limits, &["*".into()], &HeldKeys::new(), true);
            round.items.iter_mut().for_each(|item| item.step = Step::Done);
            assert_eq!(round.positions()[&1], end, "{limits:?}");
        }
    }

    #[test]
    fn what_follows_a_failed_message_waits_behind_it() {
        let mut round = round((1..=6).map(|n| message(1, n, ["a", "b", ""][n as usize % 3])).collect(), 6);
        // a: 3, 6; b: 1, 4; without a key: 2, 5
        let indices = round.next(4, 1).remove(0);
        let answers = vec![
            PublishAnswer::Refused("no".into()),
            PublishAnswer::Failed("later".into()),
            PublishAnswer::Published,
            PublishAnswer::NotTried,
        ];
        let answered = round.answered(&indices, answers, || 7);
        let held: Vec<_> = answered
            .hold
            .iter()
            .map(|held| (held.message.number, held.parked, held.retry_after_ms))
            .collect();
        assert_eq!(held, [(1, true, None), (2, false, Some(7)), (4, false, None)]);
        assert_eq!(round.next(9, 1), [[4, 5]], "other keys go on, and what has none");
    }

    #[test]
    fn messages_of_held_keys_other_topics_and_later_times_are_not_published() {
        use Step::{Done, Hold, Publish};
        let ranges = [BucketRange { bucket: 1, after: 0, through: 9 }];
        let mut messages =
            vec![message(1, 1, "held"), message(1, 2, "free"), message(2, 3, "held"), message(1, 4, "x")];
        messages[3].deliver_at_ms = Some(1);
        messages.push(OutboxMessage { topic: "other".into(), ..message(1, 5, "free") });
        let keys = HeldKeys::from([(1, HashSet::from(["held".to_owned()]))]);
        let steps = |delays| {
            let round = Round::new(messages.clone(), &ranges, (100, 1_000), &["t".into()], &keys, delays);
            round.items.iter().map(|item| item.step).collect::<Vec<_>>()
        };
        assert_eq!(steps(false), [Hold, Publish, Publish, Hold, Done]);
        assert_eq!(steps(true)[3], Publish, "the sink keeps it back");
    }

    #[test]
    fn a_bucket_is_in_one_call_only() {
        let messages = (0..12).map(|number| message(number % 4, u64::from(number) + 1, "a")).collect();
        let ranges: Vec<_> = (0..4).map(|bucket| BucketRange { bucket, after: 0, through: 12 }).collect();
        let round = Round::new(messages, &ranges, (100, 1_000), &["*".to_owned()], &HeldKeys::new(), true);
        assert_eq!(round.next(9, 2), [vec![0, 2, 4, 6, 8, 10], vec![1, 3, 5, 7, 9, 11]]);
        assert_eq!(round.next(2, 3), [vec![0, 3], vec![1, 5], vec![2, 6]]);
        assert_eq!(round.next(1, 8).len(), 4, "no call without messages");
    }

    #[test]
    fn an_unavailable_sink_leaves_everything_open() {
        let mut round = round(vec![message(1, 1, "a"), message(1, 2, "a")], 2);
        let answers = vec![PublishAnswer::Unavailable("down".into()), PublishAnswer::NotTried];
        let answered = round.answered(&[0, 1], answers, || 7);
        assert_eq!((answered.unavailable.as_deref(), answered.hold.len()), (Some("down"), 0));
        assert_eq!(round.next(9, 1), [[0, 1]]);
        round.drop_buckets(&[1].into());
        assert_eq!((round.next(9, 1).len(), round.positions()), (0, [(2, 2)].into()));
    }
}
