//! Small named JSON documents with a revision. They are kept in one hash, so that a change and its count are atomic.

use async_trait::async_trait;
use hapax_core::documents::{BYTES_MAX, COUNT_MAX, PAGE_BYTES_MAX, TOTAL_BYTES_MAX};
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, ExpectedRevision, Json,
    Revision, StoreError,
};
use redis::Value;

use crate::RedisStore;
use crate::error::unexpected;
use crate::run::Call;
use crate::script::Script;

#[async_trait]
impl Documents for RedisStore {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        Ok(self.read_documents(vec![name.as_str().to_owned()]).await?.pop())
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        filter.validate()?;
        let names = self.names(&filter).await?;
        let (mut items, mut bytes) = (Vec::new(), 0);
        // A few at a time: a page of large documents is short.
        for part in names.iter().take(filter.limit).cloned().collect::<Vec<_>>().chunks(16) {
            for document in self.read_documents(part.to_vec()).await? {
                bytes += document.name.as_str().len() + document.value.as_str().len();
                if bytes > PAGE_BYTES_MAX && !items.is_empty() {
                    return Ok(page(items, true));
                }
                items.push(document);
            }
        }
        Ok(page(items, names.len() > filter.limit))
    }

    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let bytes = value.as_str().len();
        if bytes > BYTES_MAX {
            return Err(DocumentError::TooLarge { bytes: bytes as u64, bytes_max: BYTES_MAX as u64 });
        }
        self.base.begin()?;
        let (clock, wanted) = (self.base.runner.clock(), word(expected));
        let (count_max, bytes_max) = (COUNT_MAX.to_string(), TOTAL_BYTES_MAX.to_string());
        let args =
            [&clock, name.as_str(), value.as_str(), &wanted, &count_max, &bytes_max].map(str::as_bytes);
        let (status, rest) = self.change(Script::DocumentPut, &args).await?;
        match (status.as_str(), rest.as_slice()) {
            ("done", [revision]) => Ok(self::revision(revision)?.ok_or_else(|| unexpected("put_document"))?),
            ("full", [count, bytes]) => {
                let full = format!(
                    "it would have {count} documents with {bytes} bytes; the maximum is {COUNT_MAX} with {TOTAL_BYTES_MAX}"
                );
                Err(StoreError::Full(full).into())
            }
            ("conflict", [actual]) => Err(conflict(name, expected, self::revision(actual)?)),
            _ => Err(unexpected("put_document").into()),
        }
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        self.base.begin()?;
        let wanted = word(expected);
        let args = [name.as_str().as_bytes(), wanted.as_bytes()];
        let (status, rest) = self.change(Script::DocumentDelete, &args).await?;
        match (status.as_str(), rest.as_slice()) {
            ("done", [actual]) => Ok(revision(actual)?.is_some()),
            ("conflict", [actual]) => Err(conflict(name, expected, revision(actual)?)),
            _ => Err(unexpected("delete_document").into()),
        }
    }
}

impl RedisStore {
    async fn change(&self, script: Script, args: &[&[u8]]) -> Result<(String, Vec<String>), StoreError> {
        let keys = self.base.runner.keys.documents();
        let value = self.base.runner.one(Call::script(script, 0, &keys, args)).await?;
        let mut words: Vec<String> = redis::from_redis_value(value).map_err(|_| unexpected(script.name()))?;
        if words.is_empty() {
            return Err(unexpected(script.name()));
        }
        Ok((words.remove(0), words))
    }

    /// The names of a page in order, and one more if there is one.
    async fn names(&self, filter: &DocumentFilter) -> Result<Vec<String>, StoreError> {
        self.base.begin()?;
        let [_, _, names] = self.base.runner.keys.documents();
        let after = filter.after.as_ref().map(DocumentName::as_str).filter(|after| **after >= *filter.prefix);
        let min = match after {
            Some(after) => format!("({after}"),
            None => format!("[{}", filter.prefix),
        };
        let mut command = redis::cmd("ZRANGEBYLEX");
        command.arg(names).arg(min).arg("+").arg("LIMIT").arg(0).arg(filter.limit + 1);
        let value = self.base.runner.one(Call::read("documents", 0, command)).await?;
        let names: Vec<String> = redis::from_redis_value(value).map_err(|_| unexpected("documents"))?;
        Ok(names.into_iter().take_while(|name| name.starts_with(&filter.prefix)).collect())
    }

    /// The documents of these names that are there.
    async fn read_documents(&self, names: Vec<String>) -> Result<Vec<Document>, StoreError> {
        self.base.begin()?;
        let [_, documents, _] = self.base.runner.keys.documents();
        let mut command = redis::cmd("HMGET");
        command.arg(documents).arg(&names);
        let value = self.base.runner.one(Call::read("document", 0, command)).await?;
        let Value::Array(values) = value else { return Err(unexpected("document")) };
        let mut found = Vec::new();
        for (name, value) in names.iter().zip(values) {
            if let Value::BulkString(bytes) = value {
                found.push(document(name, &bytes).ok_or_else(|| damaged(name))?);
            }
        }
        Ok(found)
    }
}

fn damaged(name: &str) -> StoreError {
    StoreError::Damaged(format!("document {name} cannot be read"))
}

/// Revision, time and value, with spaces between.
fn document(name: &str, bytes: &[u8]) -> Option<Document> {
    let mut parts = std::str::from_utf8(bytes).ok()?.splitn(3, ' ');
    let (revision, modified_ms) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let value = Json::parse(parts.next()?).ok()?;
    Some(Document { name: name.parse().ok()?, revision: Revision(revision), modified_ms, value })
}

fn page(items: Vec<Document>, is_more: bool) -> DocumentPage {
    let next = items.last().filter(|_| is_more).map(|last| last.name.clone());
    DocumentPage { items, next }
}

fn word(expected: ExpectedRevision) -> String {
    match expected {
        ExpectedRevision::Any => "any".to_owned(),
        ExpectedRevision::Absent => "absent".to_owned(),
        ExpectedRevision::Revision(revision) => revision.0.to_string(),
    }
}

fn revision(text: &str) -> Result<Option<Revision>, StoreError> {
    match text {
        "" => Ok(None),
        text => text.parse().map(|number| Some(Revision(number))).map_err(|_| unexpected("document")),
    }
}

fn conflict(name: &DocumentName, expected: ExpectedRevision, actual: Option<Revision>) -> DocumentError {
    match expected.check(name, actual) {
        Err(error) => error,
        // Redis compared texts, and the check compares numbers: they agree.
        Ok(()) => unexpected("document").into(),
    }
}
