//! Sends and acks of standard queues. All that wait, of both kinds, go to the database together and share one sync of its
//! disk: for one queue by one statement, for several by one transaction.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::row::source_number;
use super::send::{Plain, Prepared};
use super::settle::Acks;
use crate::Base;
use crate::error::{Access, Failure};
use crate::merge::Merger;
use crate::transaction::Transaction;

/// A call that is merged with others.
pub(super) enum Write {
    Send(Plain),
    Ack(Acks),
}

/// The answer to a call.
#[derive(Clone)]
pub(super) enum Written {
    /// The places of the messages; `None`: the queue has changed.
    Sent(Option<Vec<u64>>),
    /// The deliveries that were ended, by place and fence.
    Acked(Vec<(u64, u64)>),
}

impl Written {
    pub(super) fn sent(self) -> Option<Vec<u64>> {
        match self {
            Self::Sent(places) => places,
            Self::Acked(_) => unreachable!("a send was asked for"),
        }
    }

    pub(super) fn acked(self) -> Vec<(u64, u64)> {
        match self {
            Self::Acked(ended) => ended,
            Self::Sent(_) => unreachable!("an ack was asked for"),
        }
    }
}

/// Weight of a batch: each ack has one, each message one for every KiB.
const WEIGHT_MAX: usize = 2_000;

pub(super) fn merger(base: &Base) -> Merger<Write, Written> {
    Merger::new(base.pool.clone(), "send or ack", Access::Write, WEIGHT_MAX, |db, calls| {
        Box::pin(async move { write_all(db, &calls).await })
    })
}

/// The sends of a batch to one queue, with the places of their calls.
struct Sends<'c> {
    calls: Vec<(usize, &'c Plain)>,
}

/// The acks of a batch in one queue, with the places of their calls.
struct AcksOfQueue<'c> {
    queue_id: i32,
    calls: Vec<(usize, &'c Acks)>,
}

async fn write_all(db: &mut PgConnection, calls: &[Write]) -> Result<Vec<Written>, Failure> {
    let mut sends: BTreeMap<(i32, i64), Sends<'_>> = BTreeMap::new();
    let mut acks: BTreeMap<i32, AcksOfQueue<'_>> = BTreeMap::new();
    let mut answers = Vec::with_capacity(calls.len());
    for (at, call) in calls.iter().enumerate() {
        match call {
            Write::Send(send) => {
                let of = sends.entry((send.queue.id, send.queue.version));
                of.or_insert_with(|| Sends { calls: Vec::new() }).calls.push((at, send));
                answers.push(Written::Sent(None));
            }
            Write::Ack(ack) => {
                let (queue_id, of) = (ack.queue_id, acks.entry(ack.queue_id));
                of.or_insert_with(|| AcksOfQueue { queue_id, calls: Vec::new() }).calls.push((at, ack));
                answers.push(Written::Acked(Vec::new()));
            }
        }
    }
    let (mut sends, mut acks) = (sends.into_values(), acks.into_values());
    let mut statements: Vec<_> = std::iter::from_fn(|| match (sends.next(), acks.next()) {
        (None, None) => None,
        both => Some(both),
    })
    .collect();
    if statements.len() == 1 {
        let (sends, acks) = statements.remove(0);
        write(db, sends, acks, &mut answers).await?;
    } else {
        let mut transaction = Transaction::begin(db).await?;
        let mut done = Ok(());
        for (sends, acks) in statements {
            done = write(&mut transaction, sends, acks, &mut answers).await;
            if done.is_err() {
                break;
            }
        }
        transaction.end(done).await?;
    }
    Ok(answers)
}

const SEND: &str = "SELECT hapax.q_send($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) AS sent";
const ACK: &str = "SELECT acked, fences FROM hapax.q_ack($1, $2, $3)";
const BOTH: &str =
    "SELECT acked, fences, sent FROM hapax.q_write($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";

/// One statement: sends to a queue, acks in a queue, or both.
async fn write(
    db: &mut PgConnection,
    sends: Option<Sends<'_>>,
    acks: Option<AcksOfQueue<'_>>,
    answers: &mut [Written],
) -> Result<(), Failure> {
    let sql = match (&sends, &acks) {
        (Some(_), None) => SEND,
        (None, _) => ACK,
        (Some(_), Some(_)) => BOTH,
    };
    let mut query = sqlx::query(sql);
    if let Some(acks) = &acks {
        query = acks.bind(query);
    }
    if let Some(sends) = &sends {
        query = sends.bind(query);
    }
    let row = query.fetch_one(db).await?;
    if let Some(acks) = acks {
        let (acked, fences): (Vec<i64>, Vec<i64>) = (row.try_get("acked")?, row.try_get("fences")?);
        acks.answer(acked.into_iter().zip(fences), answers);
    }
    if let Some(sends) = sends {
        sends.answer(row.try_get("sent")?, answers);
    }
    Ok(())
}

type PgQuery<'q> = Query<'q, Postgres, PgArguments>;

impl Sends<'_> {
    fn bind<'q>(&self, query: PgQuery<'q>) -> PgQuery<'q> {
        let queue = &self.calls[0].1.queue;
        let all: Vec<&Prepared> = self.calls.iter().flat_map(|(_, call)| &call.messages).collect();
        query
            .bind(queue.id)
            .bind(queue.version)
            .bind(of(&all, |m| m.high as i64))
            .bind(of(&all, |m| i16::from(m.priority.0)))
            .bind(of(&all, |m| m.bytes as i32))
            .bind(of(&all, |m| m.group.as_ref().map(|group| group.as_str().to_owned())))
            .bind(of(&all, |m| m.key.as_ref().map(|key| key.as_str().to_owned())))
            .bind(of(&all, |m| source_number(m.key_source)))
            .bind(of(&all, |m| m.attributes.clone()))
            .bind(of(&all, |m| m.body.to_vec()))
    }

    fn answer(self, places: Option<Vec<i64>>, answers: &mut [Written]) {
        let Some(places) = places else { return };
        let mut places = places.into_iter().map(|place| place as u64);
        for (at, call) in self.calls {
            answers[at] = Written::Sent(Some(places.by_ref().take(call.messages.len()).collect()));
        }
    }
}

/// A column of messages.
fn of<T>(all: &[&Prepared], column: impl Fn(&Prepared) -> T) -> Vec<T> {
    all.iter().map(|message| column(message)).collect()
}

impl AcksOfQueue<'_> {
    fn bind<'q>(&self, query: PgQuery<'q>) -> PgQuery<'q> {
        let named = self.calls.iter().flat_map(|(_, call)| &call.named);
        let mut named: Vec<(u64, u64)> = named.map(|named| (named.seq, named.fence)).collect();
        // Of a delivery's receipts only the newest is judged here; an older one is left to a closer look.
        named.sort_unstable_by_key(|(seq, fence)| (*seq, Reverse(*fence)));
        named.dedup_by_key(|(seq, _)| *seq);
        let (seqs, fences): (Vec<i64>, Vec<i64>) =
            named.into_iter().map(|(seq, fence)| (seq as i64, fence as i64)).unzip();
        query.bind(self.queue_id).bind(seqs).bind(fences)
    }

    fn answer(self, acked: impl Iterator<Item = (i64, i64)>, answers: &mut [Written]) {
        let mut acked: HashSet<(u64, u64)> = acked.map(|(seq, fence)| (seq as u64, fence as u64)).collect();
        for (at, call) in self.calls {
            let named = call.named.iter().map(|named| (named.seq, named.fence));
            // Of two acks of the same delivery, the first is told.
            answers[at] = Written::Acked(named.filter(|named| acked.remove(named)).collect());
        }
    }
}
