//! What clients were told, and whether the store agrees.

use std::collections::{BTreeMap, BTreeSet};

use rusqlite::{Connection, OpenFlags};

use super::rig::{DATABASE, Rig};

/// Messages by the number in their body.
#[derive(Default)]
pub struct Ledger {
    pub next: u64,
    /// Sends that were acknowledged and not yet acked.
    pub there: BTreeSet<u64>,
    /// Acked, refused, or missing after an unknown outcome: must never appear again.
    pub gone: BTreeSet<u64>,
    pub maybe_sent: BTreeSet<u64>,
    pub maybe_acked: BTreeSet<u64>,
    pub fence_max: u64,
    /// The fence of the latest delivery of each message; cleared at a power loss, which may undo a delivery.
    pub latest: BTreeMap<u64, u64>,
    /// Acknowledged claims: the newest of each number.
    pub granted: BTreeMap<u64, u64>,
    /// Claims that were completed for sure.
    pub completed: BTreeMap<u64, u64>,
    /// Acks that were to complete a claim: message, delivery, claim.
    pub pairs: Vec<(u64, u64, u64)>,
}

impl Ledger {
    pub fn body(number: u64, filler: usize) -> Vec<u8> {
        let mut body = format!("{number} ").into_bytes();
        body.resize(body.len() + filler, b'.');
        body
    }

    pub fn number(body: &[u8]) -> Option<u64> {
        std::str::from_utf8(body).ok()?.split(' ').next()?.parse().ok()
    }

    pub fn delivered(&mut self, number: u64, fence: u64) {
        assert!(fence > self.fence_max, "fence {fence} after {}", self.fence_max);
        assert!(!self.gone.contains(&number), "message {number} was delivered after it was settled");
        assert!(self.there.contains(&number) || self.maybe_sent.contains(&number), "{number} was never sent");
        self.fence_max = fence;
        self.latest.insert(number, fence);
    }

    pub fn acked(&mut self, number: u64, fence: u64) {
        let latest = self.latest.get(&number);
        assert!(latest.is_none_or(|latest| *latest == fence), "a stale receipt settled message {number}");
        self.there.remove(&number);
        self.maybe_acked.remove(&number);
        self.gone.insert(number);
    }

    /// Acknowledged claims and completions must exist; an ack and its completion exist both or neither.
    fn verify_claims(&self, rig: &Rig) -> Result<(), String> {
        let (entries, in_flight) =
            claims(rig).map_err(|error| format!("the ledger cannot be read: {error}"))?;
        let newest = |number: u64| entries.iter().rev().find(|(_, (of, _))| *of == number);
        for (number, fence) in &self.granted {
            // A newer one may have been granted to a client that did not get the answer.
            if newest(*number).is_none_or(|(found, _)| found < fence) {
                return Err(format!("the claim {fence} of {number} is lost"));
            }
        }
        for (number, fence) in &self.completed {
            if entries.get(fence) != Some(&(*number, true)) {
                return Err(format!("the completion {fence} of {number} is lost"));
            }
        }
        for (seq, delivery, claim) in &self.pairs {
            let completed = entries.get(claim).is_some_and(|(_, completed)| *completed);
            if completed && in_flight.get(seq) == Some(delivery) {
                return Err(format!("claim {claim} is completed and message {seq} was not acked"));
            }
        }
        Ok(())
    }

    /// Compares the rows on the disk with the answers. Unknown outcomes are known afterwards.
    pub fn verify(&mut self, rig: &Rig) -> Result<(), String> {
        let rows = rows(rig).map_err(|error| format!("the rows cannot be read: {error}"))?;
        let mut found = BTreeSet::new();
        for body in rows {
            let number = Self::number(&body).ok_or("a body that nobody sent")?;
            if !found.insert(number) {
                return Err(format!("message {number} is there twice"));
            }
        }
        self.verify_claims(rig)?;
        if let Some(back) = found.intersection(&self.gone).next() {
            return Err(format!("message {back} came back"));
        }
        let unsure: BTreeSet<_> = self.maybe_acked.union(&self.maybe_sent).copied().collect();
        if let Some(lost) = self.there.iter().find(|n| !found.contains(n) && !unsure.contains(n)) {
            return Err(format!("message {lost} is lost"));
        }
        if let Some(unknown) = found.iter().find(|n| !self.there.contains(n) && !self.maybe_sent.contains(n))
        {
            return Err(format!("message {unknown} was never sent"));
        }
        let all: BTreeSet<_> = self.there.union(&unsure).copied().collect();
        self.gone.extend(all.difference(&found));
        self.there = found;
        self.maybe_sent.clear();
        self.maybe_acked.clear();
        Ok(())
    }
}

/// Entries by fence: number and whether it is completed; deliveries in flight by message: fence.
type Claims = (BTreeMap<u64, (u64, bool)>, BTreeMap<u64, u64>);

fn claims(rig: &Rig) -> rusqlite::Result<Claims> {
    let db = Connection::open_with_flags_and_vfs(DATABASE, OpenFlags::default(), rig.disk.vfs_name())?;
    let tables: i64 =
        db.query_row("SELECT count(*) FROM sqlite_schema WHERE name = 'ledger'", [], |row| row.get(0))?;
    assert_eq!(tables, 1);
    let mut statement = db.prepare("SELECT fence, substr(key, 2), state FROM ledger")?;
    let number = |text: String| text.parse::<u64>().expect("a key of ours");
    let entry = |row: &rusqlite::Row<'_>| {
        Ok((row.get::<_, i64>(0)? as u64, (number(row.get(1)?), row.get::<_, i64>(2)? == 2)))
    };
    let entries = statement.query_map([], entry)?.collect::<rusqlite::Result<_>>()?;
    let mut statement = db.prepare("SELECT seq, fence FROM message WHERE state = 2")?;
    let in_flight =
        |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64));
    let in_flight = statement.query_map([], in_flight)?.collect::<rusqlite::Result<_>>()?;
    Ok((entries, in_flight))
}

fn rows(rig: &Rig) -> rusqlite::Result<Vec<Vec<u8>>> {
    let db = Connection::open_with_flags_and_vfs(DATABASE, OpenFlags::default(), rig.disk.vfs_name())?;
    let sound: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    assert_eq!(sound, "ok");
    let (messages, bodies): (i64, i64) =
        db.query_row("SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM body)", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
    assert_eq!(messages, bodies, "a message without a body, or a body without a message");
    let mut statement = db.prepare("SELECT body FROM message JOIN body USING (seq)")?;
    statement.query_map([], |row| row.get(0))?.collect()
}
