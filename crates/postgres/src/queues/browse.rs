//! Messages as an operator handles them: browse, discard, release; and halted groups.

use std::collections::BTreeSet;
use std::sync::Arc;

use hapax_core::{
    AdminError, Browse, Discarded, GroupId, MessageId, MessageState, MessageView, Page, QueueName,
    StoreError, validate,
};
use sqlx::{PgConnection, Row as _};

use super::admin::audit;
use super::row::{COLUMNS, Message, Table};
use super::transaction::{Effects, finish, work_on};
use super::write::{self, seqs_of, unhalt};
use super::{Inner, Queue, entries};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Statements that give the rows of a table in order of their places, behind `$2`, at most `$3` of them.
fn pages(table: Table) -> Vec<String> {
    let (name, letter) = (table.name(), table.letter());
    let of = |condition: &str, order: &str| {
        format!(
            "(SELECT '{letter}' AS place, {COLUMNS} FROM {name} WHERE queue_id = $1 AND {condition} ORDER BY {order} LIMIT $3)"
        )
    };
    match table {
        // Those that were never returned are at their places, priority by priority; the others have an index.
        Table::Ready => {
            let fresh = (0..10).map(|prio| of(&format!("prio = {prio} AND pos > $2 AND pos = seq"), "pos"));
            fresh.chain([of("seq > $2 AND pos <> seq", "seq")]).collect()
        }
        _ => vec![of("seq > $2", "seq")],
    }
}

async fn page(
    db: &mut PgConnection,
    name: &QueueName,
    browse: &Browse,
) -> Result<Page<MessageView>, Failure> {
    let queue = Queue::get(db, name).await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let tables: &[Table] = match browse.state {
        Some(MessageState::InFlight) => &[Table::Claim],
        Some(MessageState::Parked) => &[Table::Parked],
        Some(MessageState::Delayed) => &[Table::Due, Table::Fifo],
        Some(MessageState::Ready) => &[Table::Ready, Table::Fifo, Table::Due],
        None => &Table::ALL,
    };
    let mut after = browse.after.unwrap_or(0);
    let limit = browse.limit;
    let mut items: Vec<MessageView> = Vec::new();
    loop {
        let found = match browse.id {
            Some(id) => by_id(db, &queue, id).await?,
            None => behind(db, &queue, tables, after, limit + 1).await?,
        };
        let ended = browse.id.is_some() || found.len() <= limit;
        after = found.last().map_or(after, |(_, message)| message.seq);
        for (table, message) in found {
            let view = message.view(table, now_ms);
            if browse.state.is_none_or(|state| state == view.state)
                && view.sequence > browse.after.unwrap_or(0)
            {
                items.push(view);
            }
        }
        if ended || items.len() > limit {
            break;
        }
    }
    let more = items.len() > limit;
    items.truncate(limit);
    Ok(Page { next: items.last().filter(|_| more).map(|view| view.sequence), items })
}

/// Rows of a queue in order of their places.
pub(super) async fn behind(
    db: &mut PgConnection,
    queue: &Queue,
    tables: &[Table],
    after: u64,
    limit: usize,
) -> Result<Vec<(Table, Message)>, Failure> {
    let all: Vec<String> = tables.iter().flat_map(|table| pages(*table)).collect();
    let sql = format!("SELECT * FROM ({}) x ORDER BY seq LIMIT $3", all.join(" UNION ALL "));
    let rows = sqlx::query(&sql).bind(queue.id).bind(after as i64).bind(limit as i64).fetch_all(db).await?;
    Ok(rows.iter().map(Message::read_placed).collect::<Result<_, _>>()?)
}

async fn by_id(
    db: &mut PgConnection,
    queue: &Queue,
    id: MessageId,
) -> Result<Vec<(Table, Message)>, Failure> {
    let found = seqs_of(db, queue.id, &[id]).await?;
    let Some((_, seq)) = found.first() else { return Ok(Vec::new()) };
    let mut at = behind(db, queue, &Table::ALL, seq - 1, 1).await?;
    at.retain(|(_, message)| message.id == id);
    Ok(at)
}

async fn discard(
    db: &mut PgConnection,
    name: &QueueName,
    ids: &[MessageId],
    by: &str,
) -> Result<(Discarded, Effects), Failure> {
    let queue = Queue::get_open(db, name).await?;
    let seqs: Vec<u64> = seqs_of(db, queue.id, ids).await?.into_iter().map(|(_, seq)| seq).collect();
    let dead = queue.dead_letters(db).await?;
    let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, ids).await?;
    let mut discarded = Discarded::default();
    let mut gone = Vec::new();
    for seq in seqs {
        let Some(item) = work.items.get(&seq) else { continue };
        match item.table {
            Some(Table::Claim) => discarded.in_flight.push(item.message.id),
            Some(_) => gone.push((seq, item.message.id)),
            None => {}
        }
    }
    for (seq, _) in &gone {
        work.end(*seq);
    }
    discarded.count = gone.len() as u64;
    work.freed |= discarded.count > 0;
    let own: Vec<MessageId> = gone.iter().map(|(_, id)| *id).collect();
    if queue.config.is_fifo() && !own.is_empty() {
        unhalt(db, &queue, &own, work.now_ms).await?;
    }
    for id in &own {
        audit(db, by, format!("discarded message {id} of queue {name}")).await?;
    }
    let effects = finish(db, &work, &held).await?;
    Ok((discarded, effects))
}

pub(super) async fn release(
    db: &mut PgConnection,
    queue: &Queue,
    ids: &[MessageId],
) -> Result<(u64, Effects), Failure> {
    let seqs: Vec<u64> = seqs_of(db, queue.id, ids).await?.into_iter().map(|(_, seq)| seq).collect();
    // Groups elsewhere wait on: a release does not decide about a dead letter.
    let (mut work, held) = work_on(db, queue, None, &seqs, &[]).await?;
    let parked: Vec<(u64, MessageId, Vec<u8>)> = work
        .items
        .values()
        .filter(|item| item.table == Some(Table::Parked) && seqs.contains(&item.message.seq))
        .map(|item| (item.message.seq, item.message.id, entries::own(&queue.name, &item.message)))
        .collect();
    for (seq, ..) in &parked {
        work.release(*seq);
    }
    let own: Vec<MessageId> = parked.iter().map(|(_, id, _)| *id).collect();
    if queue.config.is_fifo() && !own.is_empty() {
        unhalt(db, queue, &own, work.now_ms).await?;
    }
    let effects = finish(db, &work, &held).await?;
    let keys: Vec<Vec<u8>> = parked.into_iter().map(|(.., entry)| entry).collect();
    entries::clear_failures(db, &keys).await?;
    Ok((keys.len() as u64, effects))
}

async fn release_group(
    db: &mut PgConnection,
    name: &QueueName,
    group: &GroupId,
) -> Result<Option<i32>, Failure> {
    let queue = Queue::get_open(db, name).await?;
    let groups = BTreeSet::from([(queue.id, group.clone())]);
    write::lock_groups(db, &groups).await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let freed = write::unhalt_group(db, &queue, group, now_ms).await?;
    write::announce(db, &groups, write::Change::default()).await?;
    Ok((!freed.is_empty()).then_some(queue.id))
}

impl Inner {
    pub(super) async fn browse(
        &self,
        name: &QueueName,
        browse: Browse,
    ) -> Result<Page<MessageView>, StoreError> {
        validate::page(browse.limit)?;
        let asked = name.clone();
        let listed = self
            .base
            .pool
            .run("browse", Access::Read, move |db| Box::pin(async move { page(db, &asked, &browse).await }));
        listed.await
    }

    pub(super) async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        validate::batch("ids", ids.len())?;
        let args = Arc::new((name.clone(), ids, by.to_owned()));
        let discarded = self.transact("discard", move |db| {
            let args = args.clone();
            Box::pin(async move { discard(db, &args.0, &args.1, &args.2).await }) as BoxFuture<'_, _>
        });
        let (discarded, effects) = discarded.await?;
        self.publish(&effects);
        Ok(discarded)
    }

    pub(super) async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        validate::batch("ids", ids.len())?;
        let args = Arc::new((name.clone(), ids));
        let released = self.transact("release", move |db| {
            let args = args.clone();
            Box::pin(async move {
                let queue = Queue::get_open(db, &args.0).await?;
                release(db, &queue, &args.1).await
            }) as BoxFuture<'_, _>
        });
        let (count, effects) = released.await?;
        self.publish(&effects);
        Ok(count)
    }

    pub(super) async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        let args = Arc::new((name.clone(), group.clone()));
        let released = self.transact("release a group", move |db| {
            let args = args.clone();
            Box::pin(async move { release_group(db, &args.0, &args.1).await }) as BoxFuture<'_, _>
        });
        match released.await? {
            Some(queue_id) => {
                self.freed(queue_id);
                self.sweeper.now();
                Ok(())
            }
            None => Err(AdminError::NotFound(format!("halted group {group}"))),
        }
    }

    pub(super) async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        let asked = name.clone();
        let listed = self.base.pool.run("list halted groups", Access::Read, move |db| {
            Box::pin(async move {
                let queue = Queue::get(db, &asked).await?;
                let sql = "SELECT DISTINCT grp FROM hapax.q_undecided WHERE queue_id = $1 ORDER BY grp";
                let rows = sqlx::query(sql).bind(queue.id).fetch_all(db).await?;
                let group = |row: &sqlx::postgres::PgRow| GroupId::new(row.get::<String, _>("grp")).ok();
                Ok(rows.iter().filter_map(group).collect())
            })
        });
        listed.await
    }
}
