//! An import of a FIFO group of which one item is refused, over more than one batch.

use hapax::transfer::{ExportRequest, export, import};
use hapax::{Hapax, QueueConfig, QueueName};
use hapax_core::{Browse, NewMessage};

fn message(group: &str, number: usize, body: String) -> NewMessage {
    NewMessage::new(body).group(group.parse().unwrap()).dedup(format!("{group}{number}").parse().unwrap())
}

#[tokio::test]
async fn items_behind_a_refused_one_of_their_group_wait_for_the_repeated_import() {
    let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let old = Hapax::open(&format!("embedded:{}", old.path().display())).await.unwrap();
    let new = Hapax::open(&format!("embedded:{}", new.path().display())).await.unwrap();
    let jobs: QueueName = "jobs.fifo".parse().unwrap();
    old.store().create_queue(&jobs, QueueConfig::fifo()).await.unwrap();
    let mut messages = vec![message("g", 0, "L".repeat(2_000))];
    // Two batches and a bit.
    messages.extend((1..450).map(|number| message("g", number, number.to_string())));
    messages.push(message("free", 0, "f".into()));
    old.store().send(&jobs, messages).await.unwrap();
    let (mut file, request) = (Vec::new(), ExportRequest { pause: true, ..ExportRequest::default() });
    export(old.store(), &request, &mut file).await.unwrap();
    let file = String::from_utf8(file).unwrap();

    let limit = |bytes: u64| format!("\"message_bytes_max\":{bytes}");
    let given = limit(QueueConfig::fifo().message_bytes_max);
    assert!(file.contains(&given));
    let smaller = file.replacen(&given, &limit(1_024), 1);
    let report = import(new.store(), &mut smaller.as_bytes(), "test").await.unwrap();
    // The other group's message and all deduplication ids.
    assert_eq!((report.added, report.refused), (1 + 451, 450), "{:?}", report.refusals);

    new.store().set_queue(&jobs, QueueConfig::fifo(), None).await.unwrap();
    let report = import(new.store(), &mut file.as_bytes(), "test").await.unwrap();
    assert_eq!((report.added, report.refused), (450, 0), "{:?}", report.refusals);
    let page =
        new.store().browse(&jobs, Browse { state: None, id: None, after: None, limit: 1_000 }).await.unwrap();
    let body = |at: usize| page.items[at].body.clone().unwrap();
    assert_eq!((&body(0)[..], &body(1)[..1], &body(2)[..]), (&b"f"[..], &b"L"[..], &b"1"[..]));
}
