//! For arbitrary input bytes there is no panic, and the response is one that an AWS SDK can parse.

use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::store::*;
use hapax_core::*;
use http_body_util::BodyExt as _;
use proptest::prelude::*;

use super::*;
use crate::config::AuthConfig;

/// A store in which no queue exists.
struct EmptyStore;

fn none<T>(queue: &QueueName) -> std::result::Result<T, StoreError> {
    Err(StoreError::NoSuchQueue(queue.clone()))
}

#[async_trait]
impl QueueStore for EmptyStore {
    fn capabilities(&self) -> Capabilities {
        unreachable!("the wire does not ask")
    }
    async fn send(&self, queue: &QueueName, _: Vec<NewMessage>) -> Batch<Sent, SendError> {
        none(queue)
    }
    async fn receive(&self, queue: &QueueName, _: Receive) -> std::result::Result<Vec<Delivery>, StoreError> {
        none(queue)
    }
    async fn settle(&self, queue: &QueueName, _: Vec<Settle>) -> Batch<Settled, SettleError> {
        none(queue)
    }
    async fn extend(&self, queue: &QueueName, _: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        none(queue)
    }
}

#[async_trait]
impl QueueAdmin for EmptyStore {
    async fn create_queue_with_interval(
        &self,
        _: &QueueName,
        _: QueueConfig,
        _: u64,
    ) -> std::result::Result<bool, AdminError> {
        Ok(true)
    }
    async fn queue(&self, name: &QueueName) -> std::result::Result<QueueInfo, StoreError> {
        none(name)
    }
    async fn set_queue(
        &self,
        name: &QueueName,
        _: QueueConfig,
        _: Option<Revision>,
    ) -> std::result::Result<Revision, AdminError> {
        Ok(none(name)?)
    }
    async fn pause_queue(
        &self,
        name: &QueueName,
        _: &str,
        _: Option<&str>,
    ) -> std::result::Result<(), StoreError> {
        none(name)
    }
    async fn resume_queue(&self, name: &QueueName, _: &str) -> std::result::Result<(), StoreError> {
        none(name)
    }
    async fn delete_queue(&self, name: &QueueName) -> std::result::Result<(), StoreError> {
        none(name)
    }
    async fn queues(&self) -> std::result::Result<Vec<QueueInfo>, StoreError> {
        Ok(Vec::new())
    }
    async fn stats(&self, name: &QueueName) -> std::result::Result<QueueStats, StoreError> {
        none(name)
    }
    async fn purge_with_interval(&self, name: &QueueName, _: u64) -> std::result::Result<u64, AdminError> {
        Ok(none(name)?)
    }
    async fn browse(
        &self,
        name: &QueueName,
        _: Browse,
    ) -> std::result::Result<Page<MessageView>, StoreError> {
        none(name)
    }
    async fn discard(
        &self,
        name: &QueueName,
        _: Vec<MessageId>,
        _: &str,
    ) -> std::result::Result<Discarded, StoreError> {
        none(name)
    }
    async fn release(&self, name: &QueueName, _: Vec<MessageId>) -> std::result::Result<u64, StoreError> {
        none(name)
    }
    async fn release_group(&self, name: &QueueName, _: &GroupId) -> std::result::Result<(), AdminError> {
        Ok(none(name)?)
    }
    async fn halted_groups(&self, name: &QueueName) -> std::result::Result<Vec<GroupId>, StoreError> {
        none(name)
    }
    async fn start_redrive(&self, request: RedriveRequest) -> std::result::Result<RedriveTask, AdminError> {
        Ok(none(&request.from)?)
    }
    async fn redrives(&self, from: &QueueName) -> std::result::Result<Vec<RedriveTask>, StoreError> {
        none(from)
    }
    async fn cancel_redrive(&self, id: u64) -> std::result::Result<RedriveTask, AdminError> {
        Err(AdminError::NotFound(format!("task {id}")))
    }
    async fn status(&self) -> std::result::Result<StoreStatus, StoreError> {
        Ok(StoreStatus::default())
    }
    async fn examine(&self) -> std::result::Result<Examination, StoreError> {
        Ok(Examination::default())
    }
    async fn close(&self) -> std::result::Result<(), StoreError> {
        Ok(())
    }
}

struct TestResponse {
    status: u16,
    kind: String,
    query_error: Option<String>,
    body: String,
}

/// Sends one request through the whole stack except the socket.
fn call(request: http::request::Builder, body: &[u8]) -> TestResponse {
    let (begin, shutdown) = tokio::sync::watch::channel(false);
    let auth = Arc::new(Authenticator::new(&AuthConfig::default()).unwrap());
    let shutdown = Shutdown::from(shutdown);
    let sqs = Sqs::new(&SqsConfig::default(), Arc::new(EmptyStore), auth, shutdown).unwrap();
    let (parts, ()) = request.body(()).unwrap().into_parts();
    let address = "127.0.0.1:1".parse().unwrap();
    let peer = Peer { address, local: address, tls: false };
    let budget = hapax_net::tracker::ConnectionBudget::unbounded();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answer = runtime.block_on(async {
        let response = sqs.handle(&parts, &Bytes::copy_from_slice(body), peer, &budget).await;
        let header = |name: &str| response.headers().get(name).map(|v| v.to_str().unwrap().to_owned());
        let (status, kind, query_error) =
            (response.status().as_u16(), header("content-type").unwrap(), header("x-amzn-query-error"));
        assert!(header("x-amzn-requestid").is_some());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        TestResponse { status, kind, query_error, body: String::from_utf8(bytes.to_vec()).unwrap() }
    });
    drop(begin);
    answer
}

fn json(target: &str, body: &[u8]) -> TestResponse {
    let request = Request::post("/").header("x-amz-target", target).header("host", "localhost");
    call(request.header("content-type", "application/x-amz-json-1.0"), body)
}

fn query(uri: &str, body: &[u8]) -> TestResponse {
    call(Request::post(uri).header("host", "localhost"), body)
}

/// Checks that an SDK can parse the response: a success, or an error in AWS's shape.
fn check(answer: &TestResponse) {
    if answer.kind == "application/x-amz-json-1.0" {
        let body: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
        if answer.status != 200 {
            assert!(body["__type"].as_str().unwrap().contains('#'), "{}", answer.body);
            assert!(body["message"].is_string(), "{}", answer.body);
            assert!(answer.query_error.as_ref().unwrap().contains(';'));
        }
    } else {
        assert_eq!(answer.kind, "text/xml");
        let root = if answer.status == 200 { "Response xmlns=" } else { "<ErrorResponse xmlns=" };
        assert!(answer.body.contains(root), "{}", answer.body);
        assert!(answer.body.chars().all(super::xml::is_xml));
        let (open, close) = (answer.body.matches('<').count(), answer.body.matches('>').count());
        assert_eq!(open, close, "{}", answer.body);
    }
}

/// A valid request of each protocol for every action, to mutate.
fn seed(action: Action) -> (String, String) {
    let url = "http://localhost/000000000000/q";
    let body = serde_json::json!({
        "QueueUrl": url, "QueueName": "q", "MessageBody": "hello", "DelaySeconds": 1,
        "MessageAttributes": { "a": { "DataType": "Number", "StringValue": "1" } },
        "Entries": [{ "Id": "1", "MessageBody": "x", "ReceiptHandle": "r", "VisibilityTimeout": 1 }],
        "ReceiptHandle": "r", "VisibilityTimeout": 5, "MaxNumberOfMessages": 10, "WaitTimeSeconds": 0,
        "AttributeNames": ["All"], "MessageAttributeNames": ["All"], "Tags": { "k": "v" }, "TagKeys": ["k"],
        "Label": "l", "AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"],
        "SourceArn": "arn:aws:sqs:us-east-1:000000000000:q", "TaskHandle": "e30=", "MaxResults": 1,
    });
    let form = format!(
        "Action={}&Version=2012-11-05&QueueUrl={url}&QueueName=q&MessageBody=hello&DelaySeconds=1\
         &MessageAttribute.1.Name=a&MessageAttribute.1.Value.DataType=String&MessageAttribute.1.Value.StringValue=x\
         &Attribute.1.Name=DelaySeconds&Attribute.1.Value=5&Tag.1.Key=k&Tag.1.Value=v&TagKey.1=k\
         &SendMessageBatchRequestEntry.1.Id=1&SendMessageBatchRequestEntry.1.MessageBody=x\
         &DeleteMessageBatchRequestEntry.1.Id=1&DeleteMessageBatchRequestEntry.1.ReceiptHandle=r\
         &ReceiptHandle=r&VisibilityTimeout=5&MaxNumberOfMessages=1&WaitTimeSeconds=0&AttributeName.1=All\
         &SourceArn=arn:aws:sqs:us-east-1:000000000000:q&TaskHandle=e30%3D&Label=l&AWSAccountId.1=1&ActionName.1=x",
        action.name()
    );
    (body.to_string(), form)
}

fn mutate(mut bytes: Vec<u8>, edits: &[(usize, u8, u8)]) -> Vec<u8> {
    for &(at, how, with) in edits {
        let at = at % bytes.len().max(1);
        match how % 4 {
            0 if !bytes.is_empty() => bytes[at] = with,
            1 => bytes.insert(at, with),
            2 if !bytes.is_empty() => drop(bytes.remove(at)),
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn any_action() -> impl Strategy<Value = Action> {
    proptest::sample::select(Action::ALL)
}

#[test]
fn every_action_is_known_to_both_protocols() {
    assert_eq!(Action::ALL.len(), 23);
    for &action in Action::ALL {
        let (body, form) = seed(action);
        for answer in
            [json(&format!("AmazonSQS.{}", action.name()), body.as_bytes()), query("/", form.as_bytes())]
        {
            check(&answer);
            assert!(
                !answer.body.contains("is not valid for this endpoint"),
                "{} {}",
                action.name(),
                answer.body
            );
            assert!(!answer.body.contains("SerializationException"), "{} {}", action.name(), answer.body);
        }
    }
}

#[test]
fn an_unknown_action_gets_an_error_in_its_protocol() {
    for target in ["AmazonSQS.Nothing", "Nothing", "AmazonSNS.Publish", ""] {
        let answer = json(target, b"{}");
        check(&answer);
        assert_eq!(answer.query_error.as_deref(), Some("InvalidAction;Sender"), "{target}");
    }
    let answer = query("/", b"Action=Nothing");
    assert!(answer.body.contains("<Code>InvalidAction</Code>"), "{}", answer.body);
    assert!(query("/", b"").body.contains("<Code>MissingAction</Code>"));
    let put = call(Request::put("/").header("host", "localhost"), b"");
    check(&put);
    assert_eq!(put.status, 400);
}

#[test]
fn a_missing_queue_is_told_in_each_protocol_s_words() {
    let answer = json("AmazonSQS.SendMessage", br#"{"QueueUrl":"http://h/1/q","MessageBody":"x"}"#);
    assert_eq!(answer.query_error.as_deref(), Some("AWS.SimpleQueueService.NonExistentQueue;Sender"));
    assert!(answer.body.contains("com.amazonaws.sqs#QueueDoesNotExist"));
    // The path alone may name the queue.
    let answer = query("/000000000000/q", b"Action=PurgeQueue");
    assert!(answer.body.contains("<Code>AWS.SimpleQueueService.NonExistentQueue</Code>"), "{}", answer.body);
    assert!(answer.body.contains("wsdl version"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_get_a_response(action in any_action(), body in proptest::collection::vec(any::<u8>(), 0..300)) {
        check(&json(&format!("AmazonSQS.{}", action.name()), &body));
        check(&query("/", &body));
    }

    #[test]
    fn mutated_json_gets_a_response(
        action in any_action(),
        edits in proptest::collection::vec((any::<usize>(), any::<u8>(), any::<u8>()), 1..6),
    ) {
        let body = mutate(seed(action).0.into_bytes(), &edits);
        check(&json(&format!("AmazonSQS.{}", action.name()), &body));
    }

    #[test]
    fn mutated_forms_get_a_response(
        action in any_action(),
        edits in proptest::collection::vec((any::<usize>(), any::<u8>(), any::<u8>()), 1..6),
    ) {
        check(&query("/", &mutate(seed(action).1.into_bytes(), &edits)));
    }

    #[test]
    fn arbitrary_values_get_a_response(action in any_action(), field in 0usize..20, text in ".{0,40}", number: i64) {
        let mut body: serde_json::Value = serde_json::from_str(&seed(action).0).unwrap();
        let fields = body.as_object_mut().unwrap();
        let name = fields.keys().nth(field % fields.len()).unwrap().clone();
        for value in [text.clone().into(), number.into(), serde_json::Value::Null, serde_json::json!([text])] {
            body[&name] = value;
            check(&json(&format!("AmazonSQS.{}", action.name()), body.to_string().as_bytes()));
        }
    }
}
