//! Small named JSON documents with a revision.

use async_trait::async_trait;
use hapax_core::documents::{BYTES_MAX, COUNT_MAX, PAGE_BYTES_MAX, TOTAL_BYTES_MAX};
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, ExpectedRevision, Json,
    Revision, StoreError,
};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::PostgresStore;
use crate::error::{Access, Failure};

#[async_trait]
impl Documents for PostgresStore {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        let name = name.clone();
        let read = self.base.pool.repeat("document", Access::Read, move |connection| {
            let name = name.clone();
            Box::pin(async move {
                let sql = "SELECT name, revision, modified_ms, value FROM hapax.document WHERE name = $1";
                let row = sqlx::query(sql).bind(name.as_str()).fetch_optional(connection).await?;
                row.as_ref().map(document).transpose()
            })
        });
        read.await
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        filter.validate()?;
        let read = self.base.pool.repeat("documents", Access::Read, move |connection| {
            let filter = filter.clone();
            Box::pin(async move { page(connection, &filter).await })
        });
        read.await
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
        let changed = self.change_document(name, expected, Some(value)).await?;
        expected.check(name, changed.actual)?;
        changed.revision.ok_or_else(|| {
            let (count, bytes) = (changed.count, changed.bytes);
            let full = format!(
                "it would have {count} documents with {bytes} bytes; the maximum is {COUNT_MAX} with {TOTAL_BYTES_MAX}"
            );
            StoreError::Full(full).into()
        })
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        let changed = self.change_document(name, expected, None).await?;
        expected.check(name, changed.actual)?;
        Ok(changed.actual.is_some())
    }
}

/// What a change did.
struct Changed {
    /// The new revision; `None` if it was refused or deleted.
    revision: Option<Revision>,
    /// The revision before.
    actual: Option<Revision>,
    count: i64,
    bytes: i64,
}

impl PostgresStore {
    async fn change_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
        value: Option<Json>,
    ) -> Result<Changed, StoreError> {
        let name = name.clone();
        let expected = match expected {
            ExpectedRevision::Any => None,
            ExpectedRevision::Absent => Some(0),
            ExpectedRevision::Revision(revision) => Some(revision.0 as i64),
        };
        let change = self.base.pool.repeat("document", Access::Write, move |connection| {
            let (name, value) = (name.clone(), value.clone());
            Box::pin(async move {
                let sql = "SELECT revision, actual, coalesce(total_count, 0), coalesce(total_bytes, 0)
                           FROM hapax.document_change($1, $2, $3, $4, $5)";
                let row = sqlx::query(sql)
                    .bind(name.as_str())
                    .bind(expected)
                    .bind(value.as_ref().map(Json::as_str))
                    .bind(COUNT_MAX as i64)
                    .bind(TOTAL_BYTES_MAX as i64)
                    .fetch_one(connection)
                    .await?;
                let revision = |at: usize| -> Result<Option<Revision>, sqlx::Error> {
                    Ok(row.try_get::<Option<i64>, _>(at)?.map(|revision| Revision(revision as u64)))
                };
                let (revision, actual) = (revision(0)?, revision(1)?);
                Ok(Changed { revision, actual, count: row.try_get(2)?, bytes: row.try_get(3)? })
            })
        });
        change.await
    }
}

/// One page: first the sizes, then the documents that fit.
async fn page(connection: &mut PgConnection, filter: &DocumentFilter) -> Result<DocumentPage, Failure> {
    let sql = "WITH sized AS (
                 SELECT name, row_number() OVER (ORDER BY name) AS number,
                        sum(octet_length(name) + octet_length(value)) OVER (ORDER BY name) AS bytes
                 FROM (SELECT name, value FROM hapax.document
                       WHERE starts_with(name, $1) AND ($2::text IS NULL OR name > $2)
                       ORDER BY name LIMIT $3 + 1) x)
               SELECT d.name, d.revision, d.modified_ms, d.value, (SELECT count(*) FROM sized) AS found
               FROM sized s JOIN hapax.document d ON d.name = s.name
               WHERE s.number = 1 OR (s.number <= $3 AND s.bytes <= $4) ORDER BY d.name";
    let rows = sqlx::query(sql)
        .bind(&filter.prefix)
        .bind(filter.after.as_ref().map(DocumentName::as_str))
        .bind(filter.limit as i64)
        .bind(PAGE_BYTES_MAX as i64)
        .fetch_all(connection)
        .await?;
    let found = rows.first().map(|row| row.try_get::<i64, _>("found")).transpose()?.unwrap_or_default();
    let items = rows.iter().map(document).collect::<Result<Vec<_>, _>>()?;
    let next = items.last().filter(|_| found > items.len() as i64).map(|last| last.name.clone());
    Ok(DocumentPage { items, next })
}

fn document(row: &PgRow) -> Result<Document, Failure> {
    let name: &str = row.try_get("name")?;
    let damaged = || StoreError::Damaged(format!("the document {name:?}"));
    Ok(Document {
        name: DocumentName::new(name).map_err(|_| damaged())?,
        revision: Revision(row.try_get::<i64, _>("revision")? as u64),
        modified_ms: row.try_get::<i64, _>("modified_ms")? as u64,
        value: Json::parse(row.try_get("value")?).map_err(|_| damaged())?,
    })
}
