//! Names of partitions and of members of groups.

use std::fmt;
use std::sync::Arc;

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicPartition {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition's number.
    pub partition: i32,
}

impl TopicPartition {
    /// A partition.
    pub fn new(topic: &str, partition: i32) -> Self {
        Self { topic: topic.into(), partition }
    }
}

impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

/// A member of a group at one moment. A transaction that commits offsets names it, so that the broker refuses one that was
/// replaced meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMetadata {
    /// The group.
    pub group: String,
    /// The member's id; empty: offsets are committed outside of a group's membership.
    pub member: String,
    /// The number of the rebalance that the member has taken part in; -1: in none.
    pub generation: i32,
    /// The name of a member that keeps its partitions while it restarts.
    pub instance: Option<String>,
}

impl GroupMetadata {
    /// A group without members, whose offsets are a producer's own.
    pub fn without_member(group: &str) -> Self {
        Self { group: group.to_owned(), member: String::new(), generation: -1, instance: None }
    }
}
