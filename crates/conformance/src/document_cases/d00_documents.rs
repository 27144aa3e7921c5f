//! Named JSON documents: compare-and-set, listing, durability.

use std::sync::Arc;

use hapax_core::documents::{BYTES_MAX, TOTAL_BYTES_MAX};
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, Documents, ExpectedRevision, Json, Revision,
    StoreError,
};

use crate::trial::Trial;

fn name(text: &str) -> DocumentName {
    DocumentName::new(text).expect("a document name")
}

fn json(text: &str) -> Json {
    Json::parse(text).expect("JSON")
}

/// JSON of exactly this many bytes.
fn large(bytes: usize) -> Json {
    json(&format!("\"{}\"", "x".repeat(bytes - 2)))
}

impl Trial {
    fn documents(&self) -> Arc<dyn Documents> {
        self.harness.documents().expect("a store with documents")
    }

    async fn put(
        &self,
        at: &str,
        value: &str,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let (documents, name) = (self.documents(), name(at));
        self.within("put", async move { documents.put_document(&name, json(value), expected).await }).await
    }

    async fn get(&self, at: &str) -> Option<Document> {
        self.documents().document(&name(at)).await.expect("a document can be read")
    }

    async fn listed(&self, filter: DocumentFilter) -> Vec<String> {
        let page = self.documents().documents(filter).await.expect("a listing");
        page.items.into_iter().map(|document| document.name.into()).collect()
    }
}

fn conflict(at: &str, expected: Option<Revision>, actual: Option<Revision>) -> DocumentError {
    DocumentError::Conflict { name: name(at), expected, actual }
}

pub(crate) async fn a_document_is_read_as_it_was_put(t: Trial) {
    let text = r#"{ "b":1,  "a":[true,null,"\u00e4",1.50] }"#;
    let revision = t.put("schedules/nightly", text, ExpectedRevision::Any).await.unwrap();
    let document = t.get("schedules/nightly").await.expect("it was put");
    assert_eq!((document.name, document.revision), (name("schedules/nightly"), revision));
    assert_eq!(document.value.as_str(), text, "byte for byte");
    assert!(document.modified_ms > 0);
    for value in ["null", "0", "\"\"", "[]"] {
        t.put("any", value, ExpectedRevision::Any).await.unwrap();
        assert_eq!(t.get("any").await.unwrap().value.as_str(), value);
    }
}

pub(crate) async fn what_is_not_there_is_none(t: Trial) {
    assert_eq!(t.get("gone").await, None);
    assert_eq!(t.documents().delete_document(&name("gone"), ExpectedRevision::Any).await, Ok(false));
    assert_eq!(t.documents().delete_document(&name("gone"), ExpectedRevision::Absent).await, Ok(false));
    assert!(t.listed(DocumentFilter::default()).await.is_empty());
}

pub(crate) async fn a_change_expects_what_it_read(t: Trial) {
    let first = t.put("a", "1", ExpectedRevision::Any).await.unwrap();
    let second = t.put("a", "2", ExpectedRevision::Revision(first)).await.unwrap();
    assert!(second > first);
    let stale = t.put("a", "3", ExpectedRevision::Revision(first)).await;
    assert_eq!(stale, Err(conflict("a", Some(first), Some(second))));
    let missing = t.put("b", "3", ExpectedRevision::Revision(first)).await;
    assert_eq!(missing, Err(conflict("b", Some(first), None)));
    let stale = t.documents().delete_document(&name("a"), ExpectedRevision::Revision(first)).await;
    assert_eq!(stale, Err(conflict("a", Some(first), Some(second))));
    assert_eq!(t.get("a").await.unwrap().value, json("2"));
    assert_eq!(t.documents().delete_document(&name("a"), ExpectedRevision::Revision(second)).await, Ok(true));
}

pub(crate) async fn what_must_not_exist_is_created_once(t: Trial) {
    let first = t.put("a", "1", ExpectedRevision::Absent).await.unwrap();
    assert_eq!(t.put("a", "2", ExpectedRevision::Absent).await, Err(conflict("a", None, Some(first))));
    assert_eq!(t.get("a").await.unwrap().value, json("1"));
}

pub(crate) async fn of_many_concurrent_changes_of_one_revision_one_wins(t: Trial) {
    let first = t.put("a", "0", ExpectedRevision::Absent).await.unwrap();
    let change = |n: usize| {
        let documents = t.documents();
        let value = json(&n.to_string());
        tokio::spawn(async move {
            documents.put_document(&name("a"), value, ExpectedRevision::Revision(first)).await
        })
    };
    let changes: Vec<_> = (1..=20).map(change).collect();
    let mut won = Vec::new();
    for (n, change) in changes.into_iter().enumerate() {
        match t.within("put", change).await.expect("a task") {
            Ok(revision) => won.push((n + 1, revision)),
            Err(DocumentError::Conflict { expected, .. }) => assert_eq!(expected, Some(first)),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(won.len(), 1, "{won:?}");
    let document = t.get("a").await.unwrap();
    assert_eq!((document.value, document.revision), (json(&won[0].0.to_string()), won[0].1));
}

pub(crate) async fn a_revision_is_never_used_twice(mut t: Trial) {
    let mut seen = Vec::new();
    for _ in 0..2 {
        seen.push(t.put("a", "1", ExpectedRevision::Absent).await.unwrap());
        seen.push(t.put("a", "1", ExpectedRevision::Any).await.unwrap());
        assert_eq!(t.documents().delete_document(&name("a"), ExpectedRevision::Any).await, Ok(true));
        t.restart().await;
    }
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
}

pub(crate) async fn a_deleted_document_is_gone(t: Trial) {
    t.put("a", "1", ExpectedRevision::Any).await.unwrap();
    assert_eq!(t.documents().delete_document(&name("a"), ExpectedRevision::Any).await, Ok(true));
    assert_eq!(t.documents().delete_document(&name("a"), ExpectedRevision::Any).await, Ok(false));
    assert_eq!(t.get("a").await, None);
    assert!(t.listed(DocumentFilter::default()).await.is_empty());
}

pub(crate) async fn a_refused_change_changes_nothing(t: Trial) {
    t.put("a", "1", ExpectedRevision::Any).await.unwrap();
    let before = t.get("a").await;
    let _ = t.put("a", "2", ExpectedRevision::Absent).await.unwrap_err();
    let _ = t
        .documents()
        .put_document(&name("a"), large(BYTES_MAX + 1), ExpectedRevision::Any)
        .await
        .unwrap_err();
    assert_eq!(t.get("a").await, before);
}

pub(crate) async fn documents_are_listed_in_order_of_name_by_prefix(t: Trial) {
    for at in ["b", "a/2", "a-x", "a/1", "ab", "a"] {
        t.put(at, "1", ExpectedRevision::Any).await.unwrap();
    }
    let all = t.listed(DocumentFilter::default()).await;
    assert_eq!(all, ["a", "a-x", "a/1", "a/2", "ab", "b"]);
    assert_eq!(t.listed(DocumentFilter::with_prefix("a/")).await, ["a/1", "a/2"]);
    assert_eq!(t.listed(DocumentFilter::with_prefix("a")).await.len(), 5);
    assert!(t.listed(DocumentFilter::with_prefix("c")).await.is_empty());
    assert!(t.listed(DocumentFilter::with_prefix("a%/?&")).await.is_empty(), "a prefix is text, no pattern");
}

pub(crate) async fn a_listing_goes_page_by_page(t: Trial) {
    let names: Vec<_> = (0..25).map(|n| format!("p/{n:02}")).collect();
    for at in &names {
        t.put(at, "1", ExpectedRevision::Any).await.unwrap();
    }
    t.put("q", "1", ExpectedRevision::Any).await.unwrap();
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let filter = DocumentFilter { prefix: "p/".into(), after, limit: 10 };
        let page = t.documents().documents(filter).await.unwrap();
        assert!(page.items.len() <= 10);
        seen.extend(page.items.into_iter().map(|document| String::from(document.name)));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, names);
    let early = DocumentFilter { after: Some(name("a")), ..DocumentFilter::with_prefix("q") };
    assert_eq!(t.listed(early).await, ["q"], "a name before the prefix leaves nothing out");
}

pub(crate) async fn a_page_of_large_documents_is_short(t: Trial) {
    for n in 0..20 {
        t.documents()
            .put_document(&name(&format!("d{n:02}")), large(BYTES_MAX), ExpectedRevision::Any)
            .await
            .unwrap();
    }
    let page =
        t.documents().documents(DocumentFilter { limit: 1_000, ..DocumentFilter::default() }).await.unwrap();
    assert!((1..20).contains(&page.items.len()), "{}", page.items.len());
    assert_eq!(page.next, page.items.last().map(|last| last.name.clone()));
}

pub(crate) async fn a_document_has_at_most_64_kibibytes(t: Trial) {
    t.documents().put_document(&name("a"), large(BYTES_MAX), ExpectedRevision::Any).await.unwrap();
    let refused = t.documents().put_document(&name("a"), large(BYTES_MAX + 1), ExpectedRevision::Any).await;
    let (bytes, bytes_max) = (BYTES_MAX as u64 + 1, BYTES_MAX as u64);
    assert_eq!(refused, Err(DocumentError::TooLarge { bytes, bytes_max }));
}

/// Names count too. What is replaced or deleted makes room, and its name is not listed any more.
pub(crate) async fn documents_have_room_for_16_mebibytes_together(t: Trial) {
    let put = async |at: &str, bytes| {
        t.documents().put_document(&name(at), large(bytes), ExpectedRevision::Any).await.map(|_| ())
    };
    let is_full = |answer| matches!(answer, Err(DocumentError::Store(StoreError::Full(_))));
    let each = "d000".len() + BYTES_MAX;
    let (count, left) = (TOTAL_BYTES_MAX / each, TOTAL_BYTES_MAX % each);
    for n in 0..count {
        put(&format!("d{n:03}"), BYTES_MAX).await.unwrap();
    }
    let last = left - "last".len();
    assert!(is_full(put("last", last + 1).await), "a byte too many");
    put("d000", BYTES_MAX).await.expect("the same size again");
    put("last", last).await.expect("all of it");
    assert!(is_full(put("more", 2).await));
    assert_eq!(t.documents().delete_document(&name("d000"), ExpectedRevision::Any).await, Ok(true));
    assert_eq!(t.listed(DocumentFilter { limit: 1, ..DocumentFilter::default() }).await, ["d001"]);
    put("more", BYTES_MAX).await.expect("there is room again");
    assert!(is_full(put("x", 2).await), "and no more than that");
}

pub(crate) async fn documents_survive_a_restart_and_a_crash(mut t: Trial) {
    t.put("kept", "[1]", ExpectedRevision::Any).await.unwrap();
    t.put("dropped", "[2]", ExpectedRevision::Any).await.unwrap();
    t.documents().delete_document(&name("dropped"), ExpectedRevision::Any).await.unwrap();
    let before = t.get("kept").await;
    t.restart().await;
    assert_eq!(t.get("kept").await, before);
    t.put("later", "[3]", ExpectedRevision::Absent).await.unwrap();
    t.crash().await;
    assert_eq!(t.get("kept").await, before);
    assert_eq!(t.listed(DocumentFilter::default()).await, ["kept", "later"]);
    let revision = before.unwrap().revision;
    t.put("kept", "[4]", ExpectedRevision::Revision(revision))
        .await
        .expect("the revision that was read before");
}

pub(crate) async fn a_listing_out_of_range_is_refused(t: Trial) {
    for limit in [0, 1_001] {
        let page = t.documents().documents(DocumentFilter { limit, ..DocumentFilter::default() }).await;
        assert!(matches!(page, Err(StoreError::Invalid(_))), "{page:?}");
    }
}
