//! Where to begin to look. Rows that were deleted stay in the indexes until they are vacuumed, and while a transaction is
//! open anywhere in the database for long, that is for as long. So a look does not begin at the first entry of an index,
//! but behind what this process knows to be gone. What it may have missed, because a lower place was committed later or a
//! transaction was rolled back, is found by looking further back from time to time.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{Inner, Queue, lock};

/// How far back the usual look begins.
const LAG: Duration = Duration::from_millis(20);
/// How far back the other looks begin, and how often there is one; the last one begins at the first entry.
const BACK: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(100), Duration::from_secs(1000)];
/// Time between two marks of the last seconds.
const FINE: Duration = Duration::from_millis(5);

/// The places that were taken of one priority.
#[derive(Default)]
struct Taken {
    /// The highest place, and when it was taken: the last three seconds.
    recent: VecDeque<(Instant, u64)>,
    /// The same, one a second.
    older: VecDeque<(Instant, u64)>,
}

impl Taken {
    fn note(&mut self, now: Instant, pos: u64) {
        match self.recent.back_mut() {
            Some((at, last)) if now.saturating_duration_since(*at) < FINE => *last = pos.max(*last),
            Some((_, last)) if *last >= pos => {}
            _ => self.recent.push_back((now, pos)),
        }
        while let Some((at, pos)) =
            self.recent.front().copied().filter(|(at, _)| now.saturating_duration_since(*at) > 3 * BACK[0])
        {
            self.recent.pop_front();
            let last = self.older.back().map(|(last, _)| *last);
            if last.is_none_or(|last| at.saturating_duration_since(last) >= BACK[0]) {
                self.older.push_back((at, pos));
            }
        }
        while self.older.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > 3 * BACK[2]) {
            self.older.pop_front();
        }
    }

    /// The highest place that was taken before this time; 0 if that is not known.
    fn before(&self, then: Option<Instant>) -> u64 {
        let Some(then) = then else { return 0 };
        let marks = self.recent.iter().rev().chain(self.older.iter().rev());
        marks.filter(|(at, _)| *at <= then).map(|(_, pos)| *pos).next().unwrap_or(0)
    }
}

/// When the looks further back were made.
#[derive(Default)]
struct Looks([Option<Instant>; BACK.len()]);

impl Looks {
    /// How far back to look now; `None`: at everything. Twice as far as the time between two such looks: a place that was
    /// committed late is passed over until the next one, and must not be too far back by then.
    fn next(&mut self, now: Instant, usual: Duration) -> Option<Duration> {
        for level in (0..BACK.len()).rev() {
            if self.0[level].is_none_or(|last| now.saturating_duration_since(last) >= BACK[level]) {
                self.0[..=level].fill(Some(now));
                return (level + 1 < BACK.len()).then_some(2 * BACK[level]);
            }
        }
        Some(usual)
    }
}

/// Stands for a priority where the places are those of a FIFO queue's groups.
pub(super) const GROUPS: i16 = -1;

/// What a process knows of a queue.
#[derive(Default)]
pub(super) struct Floors {
    taken: HashMap<u8, Taken>,
    takes: HashMap<u8, Looks>,
    /// The places behind which a look without a take has found messages: the next take begins there.
    seen: HashMap<u8, u64>,
    /// The store's time at which no lease and no delay was over.
    swept_ms: u64,
    /// How often connections had broken when this was learned.
    epoch: u64,
    /// The earliest time behind which was looked since then.
    from_ms: Option<u64>,
    sweeps: Looks,
}

/// The priorities of a queue, each of which has places.
pub(super) fn priorities(queue: &Queue) -> Vec<i16> {
    if queue.config.is_fifo() { vec![GROUPS] } else { queue.priorities() }
}

/// Whether a look behind this place of a priority is not one at everything.
pub(super) fn is_bounded(place: &(i16, i64)) -> bool {
    place.1 > 0
}

impl Inner {
    /// For each priority, the place behind which to look for ready messages.
    pub(super) fn floors(&self, queue: &Queue, priorities: &[i16]) -> Vec<i64> {
        let epoch = self.base.pool.epoch();
        let (mut all, now) = (lock(&self.floors), Instant::now());
        let floors = all.entry(queue.id).or_default();
        if floors.epoch != epoch {
            // The server may have crashed, and forgotten receives: their messages are where they were.
            (floors.epoch, floors.taken) = (epoch, HashMap::new());
        }
        let Floors { taken, takes, .. } = floors;
        // A look further back is made once for each time, by a take or without.
        let floor = |priority: &i16| {
            let back = takes.entry(*priority as u8).or_default().next(now, LAG);
            let then = back.and_then(|back| now.checked_sub(back));
            taken.entry(*priority as u8).or_default().before(then) as i64
        };
        priorities.iter().map(floor).collect()
    }

    /// The same for a take.
    pub(super) fn take_floors(&self, queue: &Queue, priorities: &[i16]) -> Vec<i64> {
        let mut floors = self.floors(queue, priorities);
        let mut all = lock(&self.floors);
        let seen = std::mem::take(&mut all.entry(queue.id).or_default().seen);
        for (priority, floor) in priorities.iter().zip(&mut floors) {
            *floor = seen.get(&(*priority as u8)).map_or(*floor, |seen| (*seen as i64).min(*floor));
        }
        floors
    }

    /// Messages were seen behind these places, and not taken.
    pub(super) fn note_seen(&self, queue_id: i32, floors: impl Iterator<Item = (i16, i64)>) {
        let mut all = lock(&self.floors);
        let seen = &mut all.entry(queue_id).or_default().seen;
        for (priority, floor) in floors {
            let lowest = seen.entry(priority as u8).or_insert(u64::MAX);
            *lowest = (*lowest).min(floor as u64);
        }
    }

    /// Nothing is expected at these places of priorities and before.
    pub(super) fn note_taken(&self, queue: &Queue, upto: &[(i16, u64)]) {
        let (mut all, now) = (lock(&self.floors), Instant::now());
        let floors = all.entry(queue.id).or_default();
        for (priority, pos) in upto {
            floors.taken.entry(*priority as u8).or_default().note(now, *pos);
        }
    }

    /// The queue was deleted.
    pub(super) fn forget_places(&self, queue_id: i32) {
        lock(&self.floors).remove(&queue_id);
        lock(&self.noisy).remove(&queue_id);
    }

    /// Messages were put back at their places.
    pub(super) fn forget_taken(&self, queue_id: i32) {
        if let Some(floors) = lock(&self.floors).get_mut(&queue_id) {
            floors.taken.clear();
        }
    }

    /// The store's time behind which to look for leases and delays that are over.
    pub(super) fn sweep_from(&self, queue_id: i32) -> i64 {
        let mut all = lock(&self.floors);
        let floors = all.entry(queue_id).or_default();
        let from_ms = match floors.sweeps.next(Instant::now(), BACK[0]) {
            Some(back) => floors.swept_ms.saturating_sub(back.as_millis() as u64),
            None => 0,
        };
        floors.from_ms = Some(floors.from_ms.map_or(from_ms, |before_ms| before_ms.min(from_ms)));
        from_ms as i64
    }

    /// The earliest of these times since nothing was over: what was found to be over is behind it.
    pub(super) fn swept_from(&self, queue_id: i32) -> i64 {
        lock(&self.floors).get(&queue_id).and_then(|floors| floors.from_ms).unwrap_or(0) as i64
    }

    /// At this time of the store no lease and no delay was over. The clock may have been set back since.
    pub(super) fn note_swept(&self, queue_id: i32, now_ms: u64) {
        let mut all = lock(&self.floors);
        let floors = all.entry(queue_id).or_default();
        (floors.swept_ms, floors.from_ms) = (now_ms, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_lags_and_is_never_above_what_was_taken_before() {
        let (mut taken, start) = (Taken::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        for ms in (0..400_000).step_by(7) {
            taken.note(at(ms), ms);
        }
        for back_ms in [20, 1_000, 10_000, 100_000] {
            let then = 399_999 - back_ms;
            let floor = taken.before(Some(at(then)));
            assert!(floor <= then && floor + 1_100 > then, "{floor} at {then}");
        }
        assert_eq!(taken.before(None), 0);
        assert!(taken.recent.len() + taken.older.len() < 1_000, "what is remembered is bounded");
    }

    #[test]
    fn the_first_look_is_at_everything_and_the_others_go_back_by_turns() {
        let (mut looks, start) = (Looks::default(), Instant::now());
        let mut next = |secs: u64| looks.next(start + Duration::from_secs(secs), LAG);
        assert_eq!(next(0), None);
        assert_eq!(next(0), Some(LAG));
        assert_eq!(next(1), Some(2 * BACK[0]));
        assert_eq!(next(1), Some(LAG));
        assert_eq!(next(10), Some(2 * BACK[1]));
        assert_eq!(next(100), Some(2 * BACK[2]));
        assert_eq!(next(1000), None);
    }
}
