//! State shared by two servers on one store, and the rights of a key limited to some queues.

use hapax_core::{DeadLetterPolicy, NewMessage, QueueConfig, QueueStore as _, Receive, Settle, Settlement};
use hapax_embedded::{Embedded, Options};

use super::*;
use crate::auth::Authenticator;
use crate::config::{AuthConfig, KeyConfig, Secret};
use crate::sqs::model::Action;

fn store(folder: &std::path::Path) -> Arc<Embedded> {
    Arc::new(Embedded::open(folder, Options::default()).unwrap())
}

/// A server's operations on a store.
fn server(store: &Arc<Embedded>) -> Operations {
    let config =
        SqsConfig { purge_interval_ms: 60_000, recreate_interval_ms: 60_000, ..SqsConfig::default() };
    let names = Names::new(&config.account, &config.region).unwrap();
    let (_, shutdown) = tokio::sync::watch::channel(false);
    Operations::new(&config, names, store.clone(), Shutdown::from(shutdown))
}

fn identity(queues: &[&str]) -> Identity {
    let key = KeyConfig {
        id: "AK".into(),
        secret: Some(Secret::new("s")),
        secret_file: None,
        secret_env: None,
        queues: queues.iter().map(|queue| (*queue).to_owned()).collect(),
        actions: vec!["*".into()],
    };
    let auth = Authenticator::new(&AuthConfig { keys: vec![key], ..AuthConfig::default() }).unwrap();
    let mut headers = http::HeaderMap::new();
    headers.insert(http::header::AUTHORIZATION, "Bearer AK:s".parse().unwrap());
    auth.bearer(&headers).unwrap()
}

async fn call(
    server: &Operations,
    identity: &Identity,
    action: &str,
    body: serde_json::Value,
) -> Result<Output> {
    let address = "127.0.0.1:1".parse().unwrap();
    let peer = Peer { address, local: address, tls: false };
    let budget = ConnectionBudget::unbounded();
    let context = CallContext {
        identity: identity.clone(),
        peer,
        host: "localhost",
        path_queue: None,
        budget: &budget,
        trace: None,
    };
    let body = body.to_string();
    let call = Call::from_json(Action::from_name(action).unwrap(), body.as_bytes())?;
    server.call(&context, call).await
}

fn url(queue: &str) -> String {
    format!("http://localhost/000000000000/{queue}")
}

fn arn(queue: &str) -> String {
    format!("arn:aws:sqs:us-east-1:000000000000:{queue}")
}

#[track_caller]
fn refused(answer: Result<Output>, kind: ErrorKind) {
    let error = answer.expect_err("it is refused");
    assert_eq!(error.kind.wire().code, kind.wire().code);
}

#[tokio::test]
async fn intervals_hold_between_servers_and_through_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let all = identity(&["*"]);
    let first = store(folder.path());
    let (one, other) = (server(&first), server(&first));
    call(&one, &all, "CreateQueue", serde_json::json!({"QueueName": "jobs"})).await.unwrap();
    call(&one, &all, "PurgeQueue", serde_json::json!({"QueueUrl": url("jobs")})).await.unwrap();
    let purge = serde_json::json!({"QueueUrl": url("jobs")});
    refused(call(&other, &all, "PurgeQueue", purge.clone()).await, ErrorKind::PurgeQueueInProgress);
    first.close();
    drop((one, other, first));

    let second = store(folder.path());
    let later = server(&second);
    refused(call(&later, &all, "PurgeQueue", purge.clone()).await, ErrorKind::PurgeQueueInProgress);
    call(&later, &all, "DeleteQueue", purge).await.unwrap();
    let create = serde_json::json!({"QueueName": "jobs"});
    refused(call(&server(&second), &all, "CreateQueue", create).await, ErrorKind::QueueDeletedRecently);
}

#[tokio::test]
async fn concurrent_changes_through_two_servers_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let servers = [Arc::new(server(&store)), Arc::new(server(&store))];
    let all = identity(&["*"]);
    call(&servers[0], &all, "CreateQueue", serde_json::json!({"QueueName": "jobs"})).await.unwrap();
    let tag = |n: usize| {
        let (server, all) = (servers[n % 2].clone(), all.clone());
        tokio::spawn(async move {
            let tags = serde_json::json!({"QueueUrl": url("jobs"), "Tags": {format!("tag-{n}"): "x"}});
            call(&server, &all, "TagQueue", tags).await.map(drop)
        })
    };
    for task in (0..16).map(tag).collect::<Vec<_>>() {
        task.await.unwrap().unwrap();
    }
    let info = store.queue(&QueueName::new("jobs").unwrap()).await.unwrap();
    assert_eq!(info.config.tags.len(), 16);
}

#[tokio::test]
async fn a_key_of_some_queues_moves_nothing_into_another_and_sees_no_other_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let server = server(&store);
    let name = |queue: &str| QueueName::new(queue).unwrap();
    store.create_queue(&name("dead"), QueueConfig::default()).await.unwrap();
    let dead_letter = Some(DeadLetterPolicy { queue: name("dead") });
    for queue in ["mine", "theirs"] {
        let config = QueueConfig { dead_letter: dead_letter.clone(), ..QueueConfig::default() };
        store.create_queue(&name(queue), config).await.unwrap();
        store.send(&name(queue), vec![NewMessage::new("x")]).await.unwrap();
        let got = store.receive(&name(queue), Receive::up_to(1)).await.unwrap().remove(0);
        let reject = Settle::new(got.receipt, Settlement::Reject { reason: "bad".into() });
        store.settle(&name(queue), vec![reject]).await.unwrap();
    }
    let (some, all) = (identity(&["mine", "dead"]), identity(&["*"]));
    let home = serde_json::json!({"SourceArn": arn("dead")});
    refused(call(&server, &some, "StartMessageMoveTask", home.clone()).await, ErrorKind::AccessDenied);
    let there = serde_json::json!({"SourceArn": arn("dead"), "DestinationArn": arn("theirs")});
    refused(call(&server, &some, "StartMessageMoveTask", there.clone()).await, ErrorKind::AccessDenied);
    assert_eq!(store.stats(&name("dead")).await.unwrap().ready, 2, "nothing was moved");

    let Output::Sources(page) =
        call(&server, &some, "ListDeadLetterSourceQueues", serde_json::json!({"QueueUrl": url("dead")}))
            .await
            .unwrap()
    else {
        panic!("a list of sources")
    };
    assert_eq!(page.urls, [url("mine")]);
    call(&server, &all, "StartMessageMoveTask", there).await.unwrap();
    let Output::Moves(moves) = call(&server, &some, "ListMessageMoveTasks", home).await.unwrap() else {
        panic!("a list of moves")
    };
    assert!(moves.is_empty(), "a move into a queue that is not the key's");
}
