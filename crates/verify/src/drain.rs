//! The end of a run: waits until nothing is waiting any more, and reports what is left.

use std::time::{Duration, Instant};

use anyhow::bail;
use hapax::core::{EntryFilter, EntryState, EntryView, MessageView, Scope};
use hapax::{Browse, Hapax, QueueName};

use crate::cluster::Cluster;
use crate::history::{Act, Place};
use crate::operator::Doubts;
use crate::orders;
use crate::recorder::{Payment, Reporter};
use crate::roles;
use crate::run::Progress;
use crate::waiting::{Open, Patience, count_open};
use crate::worker::transfers;
use crate::workload::{Shape, Workload};
use crate::{check, fault};

/// How long the rest of the controls is waited for, when nothing else is waiting: what they leave shows nothing.
const CONTROLS_MAX: Duration = Duration::from_secs(20);
/// How long a relay may take to mark the next of what was published, when nothing else is waiting.
const MARKED: Duration = Duration::from_secs(15);
const PAGE: usize = 1_000;

/// Stops the producer, and waits until nothing is waiting any more; then reports what is left.
pub async fn drain(
    cluster: &mut Cluster,
    reporter: &Reporter,
    workloads: &[Workload],
    doubts: &mut Doubts,
    tell: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<()> {
    cluster.stop_producer();
    reporter.open_accounts(true).await?;
    let hapax = cluster.connect().await?;
    let mut end = End::new(Instant::now());
    while end.is_open() {
        cluster.check_alive()?;
        // What cannot be counted now is counted the next time.
        let counted = count_open(&hapax, cluster, reporter, workloads, doubts).await;
        end.note(&counted, Instant::now());
        if end.is_slow(Instant::now()) {
            tell(Progress::Phase(
                "this machine is slow: workers are started again with a longer lease".into(),
            ));
            cluster.calm_down()?;
            let act = Act::Operator { action: "lengthen leases".into(), count: 0 };
            reporter.report("", vec![act]).await?;
            end.calmed_down();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    reporter.report("", vec![Act::Drained { empty: end.is_empty(), why: end.why.clone() }]).await?;
    if cluster.has_relay() && !end.is_empty() {
        let place = if end.is_unmarked { Place::Unmarked } else { Place::Outbox };
        let left = roles::repeat(|| orders::list_unpublished(cluster.site())).await?;
        let acts = left.into_iter().map(|id| Act::Left { id, place }).collect();
        reporter.report(orders::WORKLOAD, acts).await?;
    }
    // A store that was just cut off may need some time.
    let cluster: &Cluster = cluster;
    for workload in workloads {
        // Read as often as it takes, and reported once: a bank's table that is reported twice looks like effects that
        // happened twice.
        let rest = roles::repeat(|| list_rest(&hapax, cluster, workload)).await?;
        for part in rest.chunks(PAGE) {
            reporter.report(workload.name, part.to_vec()).await?;
        }
    }
    Ok(())
}

/// Decides when the run ends.
struct End {
    /// Not before this: what the last fault has delayed arrives until then.
    earliest: Instant,
    patience: Patience,
    /// How often in succession nothing was waiting.
    idle: u32,
    /// Since when only controls have something.
    controls: Option<Instant>,
    /// What the outbox has as not published while nothing else is waiting, and since when it became no less.
    unmarked: Option<(u64, Instant)>,
    is_unmarked: bool,
    /// Whether leases and timeouts are long by now. Before that, a relay may only be slow.
    is_calm: bool,
    why: Option<String>,
}

impl End {
    fn new(now: Instant) -> Self {
        let patience = Patience::new(now);
        let (controls, unmarked, why) = (None, None, None);
        let earliest = now + fault::STILL_ON_ITS_WAY;
        Self { earliest, patience, idle: 0, controls, unmarked, is_unmarked: false, is_calm: false, why }
    }

    /// Whether leases and timeouts seem too short for this machine.
    fn is_slow(&self, now: Instant) -> bool {
        self.is_open() && !self.is_calm && self.controls.is_none() && self.patience.is_slow(now)
    }

    fn calmed_down(&mut self) {
        (self.is_calm, self.unmarked) = (true, None);
    }

    fn is_open(&self) -> bool {
        !self.is_empty() && self.why.is_none()
    }

    /// Nothing was waiting, twice: a message may be between two places.
    fn is_empty(&self) -> bool {
        self.idle >= 2
    }

    fn note(&mut self, counted: &anyhow::Result<Vec<Open>>, now: Instant) {
        let open = match counted {
            Ok(open) => open,
            Err(error) => {
                self.why = self.patience.note(Err(error), now);
                return;
            }
        };
        let ours: Vec<&Open> = open.iter().filter(|open| !open.is_control).collect();
        let total: u64 = ours.iter().map(|open| open.total()).sum();
        if total > 0 {
            (self.idle, self.controls) = (0, None);
            self.why = self.patience.note(Ok(&ours), now);
            let unpublished: u64 = ours.iter().map(|open| open.unpublished).sum();
            self.unmarked = match self.unmarked {
                _ if total != unpublished => None,
                Some((least, since)) if total >= least => Some((least, since)),
                _ => Some((total, now)),
            };
            let unmarked = self.unmarked.filter(|_| self.is_calm);
            if unmarked.is_some_and(|(_, since)| now.duration_since(since) >= MARKED) {
                self.is_unmarked = true;
                let time = MARKED.as_secs();
                self.why = Some(format!("for {time} s the outbox has the same {total} as not published"));
            }
            return;
        }
        self.unmarked = None;
        let controls = *self.controls.get_or_insert(now);
        let is_idle = open.is_empty() || now.duration_since(controls) >= CONTROLS_MAX;
        let is_idle = is_idle && now >= self.earliest;
        self.idle = if is_idle { self.idle + 1 } else { 0 };
    }
}

/// What is left in queues and ledger, and what a bank's own table says.
async fn list_rest(hapax: &Hapax, cluster: &Cluster, workload: &Workload) -> anyhow::Result<Vec<Act>> {
    if !workload.has_queue() {
        return Ok(Vec::new());
    }
    let site = cluster.site();
    let queue = workload.queue(&site.run);
    let mut acts = Vec::new();
    for message in browse(hapax, &queue).await? {
        let place = if message.parked.is_some() { Place::Parked } else { Place::Waiting };
        acts.extend(payment_of(&message).map(|id| Act::Left { id, place }));
    }
    if let Some(dead) = workload.dead_queue(&site.run) {
        let place = Place::Dead;
        let dead = browse(hapax, &dead).await?;
        acts.extend(dead.iter().filter_map(payment_of).map(|id| Act::Left { id, place }));
    }
    if workload.shape == Shape::Transactional {
        acts.extend(transfers::read(site).await?);
    }
    if check::lists_entries(workload) {
        let ledger = match &site.ledger {
            Some(url) => Hapax::open(url).await?,
            None => hapax.clone(),
        };
        for entry in entries(&ledger, &queue).await? {
            let id = entry.id.key.to_string();
            if entry.state == EntryState::InDoubt {
                acts.push(Act::Left { id: id.clone(), place: Place::InDoubt });
            }
            let value = entry.outcome.and_then(|outcome| outcome.value);
            let outcome = value.and_then(|value| value.get::<u64>().ok());
            acts.push(Act::Entry { id, completed: entry.state == EntryState::Completed, outcome });
        }
    }
    Ok(acts)
}

fn payment_of(message: &MessageView) -> Option<String> {
    let body = message.body.as_ref()?;
    serde_json::from_slice::<Payment>(body).ok().map(|payment| payment.id)
}

async fn browse(hapax: &Hapax, queue: &QueueName) -> anyhow::Result<Vec<MessageView>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = hapax.store().browse(queue, Browse { after, limit: PAGE, ..Browse::default() }).await?;
        all.extend(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

async fn entries(hapax: &Hapax, queue: &QueueName) -> anyhow::Result<Vec<EntryView>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let scope = Some(Scope::of_queue(queue));
        let filter = EntryFilter { scope, state: None, after, limit: PAGE };
        let page = hapax.ledger().entries(filter).await?;
        all.extend(page.items);
        if all.len() > 10_000_000 {
            bail!("the ledger's listing does not end");
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(workload: &'static str, unpublished: u64, is_control: bool) -> Open {
        let mut open = Open::default();
        (open.workload, open.unpublished, open.is_control) = (workload, unpublished, is_control);
        open
    }

    #[test]
    fn a_run_ends_when_nothing_was_waiting_twice() {
        let begin = Instant::now();
        let mut end = End::new(begin);
        end.note(&Ok(Vec::new()), begin);
        end.note(&Ok(Vec::new()), begin);
        assert!(end.is_open(), "a request that was delayed may arrive");
        let now = begin + fault::STILL_ON_ITS_WAY;
        end.note(&Ok(Vec::new()), now);
        assert!(end.is_open(), "a message may be between two places");
        end.note(&Ok(vec![open("orders", 1, false)]), now);
        end.note(&Ok(Vec::new()), now);
        assert!(end.is_open(), "not twice in succession");
        end.note(&Ok(Vec::new()), now);
        assert!(end.is_empty() && !end.is_open() && end.why.is_none());
    }

    #[test]
    fn the_rest_of_controls_is_waited_for_but_not_long() {
        let now = Instant::now();
        let mut end = End::new(now);
        let rest = || Ok(vec![open("publish-mark", 3, true)]);
        let at = |seconds| now + Duration::from_secs(seconds);
        for seconds in [0, 10, 19] {
            end.note(&rest(), at(seconds));
            assert!(end.is_open());
        }
        // Something of Hapax is waiting again: the time begins again.
        end.note(&Ok(vec![open("orders", 1, false)]), at(19));
        for seconds in [20, 39] {
            end.note(&rest(), at(seconds));
            assert!(end.is_open());
        }
        end.note(&rest(), at(40));
        end.note(&rest(), at(41));
        assert!(end.is_empty());
    }

    #[test]
    fn what_a_relay_never_marks_is_told_apart_from_what_it_is_slow_with() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut slow = End::new(now);
        for left in 1..=10 {
            slow.note(&Ok(vec![open("orders", 11 - left, false)]), at(left * 10));
            assert!(slow.is_open(), "it becomes less");
        }
        let mut never = End::new(now);
        let rest = || Ok(vec![open("orders", 7, false)]);
        never.note(&rest(), at(0));
        never.note(&rest(), at(9));
        assert!(!never.is_slow(at(9)));
        never.note(&rest(), at(16));
        assert!(never.is_open() && never.is_slow(at(16)), "the relay may only be slow");
        never.calmed_down();
        never.note(&rest(), at(17));
        never.note(&rest(), at(31));
        assert!(never.is_open() && !never.is_slow(at(31)));
        never.note(&rest(), at(32));
        assert!(!never.is_open() && never.is_unmarked && !never.is_empty());
    }
}
