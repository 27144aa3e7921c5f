//! A program that reads metrics through a key for some queues gets the figures that it may see, and no zeros for others.

mod common;

use std::collections::BTreeSet;

use common::{Done, Server, hapax};
use hapax::core::metrics::{self, Sample};
use hapax_client::{Client, Token};

async fn samples(server: &Server, id: &str) -> Vec<Sample> {
    let client = Client::connect(&server.endpoint, Some(Token::new(format!("{id}:s")))).await.unwrap();
    metrics::of_store(&client, None).await.unwrap()
}

fn names(samples: &[Sample], prefix: &str) -> BTreeSet<&'static str> {
    samples.iter().map(|sample| sample.metric.name).filter(|name| name.starts_with(prefix)).collect()
}

#[tokio::test]
async fn figures_of_the_whole_store_are_absent_for_a_key_of_some_queues() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[[auth.keys]]\nid = \"ALL\"\nsecret = \"s\"\n\
                  [[auth.keys]]\nid = \"SOME\"\nsecret = \"s\"\nqueues = [\"mine\"]\n";
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    for queue in ["mine", "theirs"] {
        let mut command = hapax(&server.folder, &["send", queue, "--create", "x"]);
        command.env("HAPAX_ENDPOINT", &server.endpoint).env("HAPAX_TOKEN", "ALL:s");
        Done::new(command.output().unwrap()).ok();
    }
    let (all, some) = (samples(&server, "ALL").await, samples(&server, "SOME").await);
    let messages = all.iter().find(|sample| sample.metric.name == "hapax_store_messages").unwrap();
    assert_eq!(messages.value, 2);
    assert!(names(&all, "hapax_store_").len() > 2);
    assert_eq!(names(&some, "hapax_store_"), BTreeSet::new());
    assert_eq!(names(&some, "hapax_queue_"), names(&all, "hapax_queue_"));
    assert!(some.iter().all(|sample| sample.labels == [("queue", "mine".to_owned())]), "{some:?}");
}
