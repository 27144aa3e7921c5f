//! Rights of a secured broker's users.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::KafkaServer;

/// What a user may do, by the number of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KafkaOperation {
    /// Reads records, or takes part in a group.
    Read = 3,
    /// Writes records, or uses a `transactional.id`.
    Write = 4,
    /// Creates topics.
    Create = 5,
    /// Sees that it exists.
    Describe = 8,
    /// Reads its configuration.
    DescribeConfigs = 10,
}

/// What a right is for, by the number of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KafkaResource {
    /// Topics.
    Topic = 2,
    /// Groups of consumers.
    Group = 3,
    /// The cluster itself, whatever the name.
    Cluster = 4,
    /// `transactional.id`s.
    TransactionalId = 5,
}

impl KafkaServer {
    /// Allows a user an operation on all resources whose name begins so. Brokers know it a moment later.
    ///
    /// # Panics
    /// If the broker does not accept it.
    pub fn allow(&self, user: &str, operation: KafkaOperation, on: KafkaResource, prefix: &str) {
        const CREATE_ACLS: [u8; 4] = [0, 30, 0, 1];
        const ALLOW: u8 = 3;
        // A cluster has one name.
        let (name, pattern) = if on == KafkaResource::Cluster { ("kafka-cluster", 3) } else { (prefix, 4) };
        let text = |text: &str| [&(text.len() as u16).to_be_bytes()[..], text.as_bytes()].concat();
        let content = [
            &CREATE_ACLS[..],
            b"hpx?\xff\xff",
            &1_u32.to_be_bytes(),
            &[on as u8],
            &text(name),
            &[pattern],
            &text(&format!("User:{user}")),
            &text("*"),
            &[operation as u8, ALLOW],
        ]
        .concat();
        let request = [&(content.len() as u32).to_be_bytes()[..], &content].concat();
        // Length, number of the request, time to wait, count of results, and the error of the first one.
        let mut answer = [0; 18];
        let mut ask = || {
            let mut stream = TcpStream::connect(self.address())?;
            stream.set_read_timeout(Some(Duration::from_mins(1)))?;
            stream.write_all(&request)?;
            stream.read_exact(&mut answer)
        };
        ask().expect("the broker answers");
        assert_eq!(answer[16..], [0, 0], "the rule was not accepted");
    }
}
