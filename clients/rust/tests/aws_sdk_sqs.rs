//! The AWS SDK for Rust against `hapax serve`, whose address is in `HAPAX_ENDPOINT`.

use std::time::{Duration, Instant};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry, MessageAttributeValue, MessageSystemAttributeName, QueueAttributeName,
    SendMessageBatchRequestEntry,
};

fn client() -> Client {
    let endpoint = std::env::var("HAPAX_ENDPOINT").expect("HAPAX_ENDPOINT; `cargo xtask test clients` sets it");
    let config = aws_sdk_sqs::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .endpoint_url(endpoint)
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .build();
    Client::from_conf(config)
}

async fn queue(client: &Client, name: &str) -> String {
    let created = client.create_queue().queue_name(name).send().await.unwrap();
    created.queue_url.unwrap()
}

#[tokio::test]
async fn a_message_makes_the_whole_round() {
    let client = client();
    let url = queue(&client, "rust-round").await;
    let text = MessageAttributeValue::builder().data_type("String").string_value("größe").build().unwrap();
    let bytes =
        MessageAttributeValue::builder().data_type("Binary").binary_value(Blob::new([0, 255])).build().unwrap();
    let sent = client
        .send_message()
        .queue_url(&url)
        .message_body("hello <&> 🎉")
        .message_attributes("text", text.clone())
        .message_attributes("bytes", bytes.clone())
        .send()
        .await
        .unwrap();
    let received = client
        .receive_message()
        .queue_url(&url)
        .wait_time_seconds(10)
        .message_attribute_names("All")
        .message_system_attribute_names(MessageSystemAttributeName::All)
        .send()
        .await
        .unwrap();
    let message = &received.messages()[0];
    assert_eq!(message.body(), Some("hello <&> 🎉"));
    assert_eq!(message.message_id(), sent.message_id());
    assert_eq!(message.md5_of_message_attributes(), sent.md5_of_message_attributes());
    let attributes = message.message_attributes().unwrap();
    assert_eq!((&attributes["text"], &attributes["bytes"]), (&text, &bytes));
    let count = &message.attributes().unwrap()[&MessageSystemAttributeName::ApproximateReceiveCount];
    assert_eq!(count, "1");
    let handle = message.receipt_handle().unwrap();
    client.delete_message().queue_url(&url).receipt_handle(handle).send().await.unwrap();
    let left = client.receive_message().queue_url(&url).send().await.unwrap();
    assert!(left.messages().is_empty());
}

#[tokio::test]
async fn batches_go_through() {
    let client = client();
    let url = queue(&client, "rust-batches").await;
    let mut send = client.send_message_batch().queue_url(&url);
    for n in 0..10 {
        let entry = SendMessageBatchRequestEntry::builder().id(n.to_string()).message_body(format!("body {n}"));
        send = send.entries(entry.build().unwrap());
    }
    let sent = send.send().await.unwrap();
    assert_eq!((sent.successful().len(), sent.failed().len()), (10, 0));
    let received =
        client.receive_message().queue_url(&url).max_number_of_messages(10).send().await.unwrap();
    assert_eq!(received.messages().len(), 10);
    let mut delete = client.delete_message_batch().queue_url(&url);
    for (n, message) in received.messages().iter().enumerate() {
        let entry = DeleteMessageBatchRequestEntry::builder()
            .id(n.to_string())
            .receipt_handle(message.receipt_handle().unwrap());
        delete = delete.entries(entry.build().unwrap());
    }
    assert_eq!(delete.send().await.unwrap().successful().len(), 10);
}

#[tokio::test]
async fn a_fifo_queue_keeps_order_and_drops_duplicates() {
    let client = client();
    let created = client
        .create_queue()
        .queue_name("rust.fifo")
        .attributes(QueueAttributeName::FifoQueue, "true")
        .attributes(QueueAttributeName::ContentBasedDeduplication, "true")
        .send()
        .await
        .unwrap();
    let url = created.queue_url.unwrap();
    for body in ["a", "b", "a", "c"] {
        client.send_message().queue_url(&url).message_body(body).message_group_id("g").send().await.unwrap();
    }
    let received =
        client.receive_message().queue_url(&url).max_number_of_messages(10).send().await.unwrap();
    let bodies: Vec<_> = received.messages().iter().filter_map(|message| message.body()).collect();
    assert_eq!(bodies, ["a", "b", "c"]);
}

#[tokio::test]
async fn errors_are_the_ones_of_the_model() {
    let client = client();
    let error = client.get_queue_url().queue_name("rust-none").send().await.unwrap_err().into_service_error();
    assert!(error.is_queue_does_not_exist(), "{error:?}");
    let url = queue(&client, "rust-errors").await;
    let error = client.delete_message().queue_url(&url).receipt_handle("x").send().await.unwrap_err();
    assert!(error.into_service_error().is_receipt_handle_is_invalid());
    let error = client.send_message_batch().queue_url(&url).set_entries(Some(vec![])).send().await.unwrap_err();
    assert!(error.into_service_error().is_empty_batch_request());
}

#[tokio::test]
async fn a_long_poll_wakes_on_a_send() {
    let client = client();
    let url = queue(&client, "rust-poll").await;
    let start = Instant::now();
    let poll = client.receive_message().queue_url(&url).wait_time_seconds(20).send();
    let send = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        client.send_message().queue_url(&url).message_body("wake").send().await.unwrap()
    };
    let (received, _) = tokio::join!(poll, send);
    assert_eq!(received.unwrap().messages().len(), 1);
    assert!(start.elapsed() < Duration::from_secs(5));
}
