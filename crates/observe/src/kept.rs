//! Lives in the store's documents, where every process that shares the store finds them, also after a restart.
//!
//! A life is in the document that its subject's hash names, one of [`DOCUMENTS`]. A document has at most
//! [`DOCUMENT_BYTES_MAX`]; the lives whose latest event is oldest are dropped first, and those older than [`KEPT_MS`].

use std::collections::HashMap;

use hapax_core::{
    DocumentError, DocumentFilter, DocumentName, Documents, ExpectedRevision, IdempotencyKey, Json,
    StoreError,
};
use serde::{Deserialize, Serialize};

use crate::life::{Life, Subject};
use crate::observer::Observer;

/// Number of documents.
pub const DOCUMENTS: u128 = 64;
/// Maximum size of one document.
pub const DOCUMENT_BYTES_MAX: usize = 48 * 1024;
/// Events are kept for seven days.
pub const KEPT_MS: u64 = 7 * 24 * 3600 * 1000;
/// The name of each document begins with this.
pub const PREFIX: &str = "history/";
/// How often a write is repeated because another process was faster.
const TRIES_MAX: usize = 5;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    lives: Vec<Life>,
}

fn name_of(subject: &Subject) -> DocumentName {
    let slot = subject.stable_hash() % DOCUMENTS;
    DocumentName::new(format!("{PREFIX}{slot:02}")).expect("digits are valid in a name")
}

/// Writes a part of what the observer has not written yet. What cannot be written is counted, and stays in memory.
pub async fn write(store: &(impl Documents + ?Sized), observer: &Observer) {
    let mut by_document: HashMap<DocumentName, Vec<Life>> = HashMap::new();
    for life in observer.take_unwritten() {
        by_document.entry(name_of(&life.subject)).or_default().push(life);
    }
    for (name, lives) in by_document {
        let count = lives.len();
        if let Err(error) = add(store, &name, lives, observer.now_ms()).await {
            observer.not_written(count);
            tracing::debug!(%error, %name, count, "histories were not written to the store");
        }
    }
}

async fn add(
    store: &(impl Documents + ?Sized),
    name: &DocumentName,
    lives: Vec<Life>,
    now_ms: u64,
) -> Result<(), DocumentError> {
    let mut tries = 0;
    loop {
        let found = store.document(name).await?;
        let expected = found
            .as_ref()
            .map_or(ExpectedRevision::Absent, |found| ExpectedRevision::Revision(found.revision));
        // What cannot be read was not written by this version; it is replaced.
        let mut kept: Kept = found.and_then(|found| found.value.get().ok()).unwrap_or_default();
        for life in &lives {
            match kept.lives.iter_mut().find(|known| known.subject == life.subject) {
                Some(known) => known.merge(life.clone()),
                None => kept.lives.push(life.clone()),
            }
        }
        let value =
            Json::of(&trimmed(kept, now_ms)).map_err(|error| StoreError::Invalid(error.to_string()))?;
        tries += 1;
        match store.put_document(name, value, expected).await {
            Err(DocumentError::Conflict { .. }) if tries < TRIES_MAX => {}
            done => return done.map(drop),
        }
    }
}

/// The latest lives, as many as fit.
fn trimmed(mut kept: Kept, now_ms: u64) -> Kept {
    kept.lives.sort_by_key(|life| std::cmp::Reverse(life.last_ms()));
    let mut bytes = 32;
    kept.lives.retain(|life| {
        let young = now_ms.saturating_sub(life.last_ms()) < KEPT_MS;
        let size = serde_json::to_vec(life).map_or(DOCUMENT_BYTES_MAX, |json| json.len() + 1);
        // One that is too large takes no room from the others.
        let fits = young && bytes + size <= DOCUMENT_BYTES_MAX;
        bytes += if fits { size } else { 0 };
        fits
    });
    kept
}

/// The life of a subject, as all processes saw it.
pub async fn read(store: &(impl Documents + ?Sized), subject: &Subject) -> Result<Option<Life>, StoreError> {
    let Some(found) = store.document(&name_of(subject)).await? else { return Ok(None) };
    let kept: Kept = found.value.get().unwrap_or_default();
    Ok(kept.lives.into_iter().find(|life| life.subject == *subject))
}

/// The lives that have this key. Reads all documents.
pub async fn read_key(
    store: &(impl Documents + ?Sized),
    key: &IdempotencyKey,
) -> Result<Vec<Life>, StoreError> {
    let mut lives = Vec::new();
    let mut filter = DocumentFilter::with_prefix(PREFIX);
    loop {
        let page = store.documents(filter.clone()).await?;
        for document in page.items {
            let kept: Kept = document.value.get().unwrap_or_default();
            lives.extend(kept.lives.into_iter().filter(|life| life.key.as_ref() == Some(key)));
        }
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return Ok(lives),
        }
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::MessageId;

    use super::*;
    use crate::life::Event;

    fn life(id: u128, at_ms: u64) -> Life {
        let mut life = Life::new(Subject::Message(MessageId(id)), None);
        life.push(at_ms, Event::Returned { error: Some("x".repeat(1_000)), after_ms: 0 });
        life
    }

    #[test]
    fn the_oldest_are_dropped_and_the_document_stays_small() {
        let now_ms = 2 * KEPT_MS;
        let lives: Vec<Life> = (0..100).map(|n| life(n, now_ms - n as u64)).collect();
        let kept = trimmed(Kept { lives }, now_ms);
        let json = Json::of(&kept).unwrap();
        assert!(
            json.as_str().len() <= DOCUMENT_BYTES_MAX && kept.lives.len() > 30,
            "{}",
            json.as_str().len()
        );
        assert_eq!(kept.lives[0].subject, Subject::Message(MessageId(0)), "the latest first");
        let old = trimmed(Kept { lives: vec![life(1, now_ms - KEPT_MS)] }, now_ms);
        assert!(old.lives.is_empty());
    }

    #[test]
    fn one_that_is_too_large_takes_no_other_along() {
        let now_ms = 2 * KEPT_MS;
        let mut large = life(0, now_ms);
        large.push(now_ms, Event::Died { error: Some("x".repeat(DOCUMENT_BYTES_MAX)) });
        let lives = vec![large, life(1, now_ms - 1), life(2, now_ms - 2)];
        let kept: Vec<_> =
            trimmed(Kept { lives }, now_ms).lives.into_iter().map(|life| life.subject).collect();
        assert_eq!(kept, [Subject::Message(MessageId(1)), Subject::Message(MessageId(2))]);
    }
}
