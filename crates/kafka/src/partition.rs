//! Names of partitions and of members of groups.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use uuid::Uuid;

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

/// What a broker knows a topic by: a topic that is deleted and created again has the same name and another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicId(pub Uuid);

/// Before the id in the metadata of a committed offset.
const NOTE: &str = "hapax-topic-id=";

impl TopicId {
    /// The metadata of a committed offset, which says to which topic the offset belongs.
    pub fn note(self) -> String {
        format!("{NOTE}{self}")
    }

    /// The topic that a committed offset belongs to; `None` if its metadata does not say: it was committed by another program.
    pub fn noted(metadata: &str) -> Option<Self> {
        let id = BASE64_URL_SAFE_NO_PAD.decode(metadata.strip_prefix(NOTE)?).ok()?;
        Uuid::from_slice(&id).ok().map(Self)
    }
}

/// In the form that Kafka's own tools show.
impl fmt::Display for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64_URL_SAFE_NO_PAD.encode(self.0))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_committed_offset_says_which_topic_it_belongs_to() {
        let id = TopicId(Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10));
        assert_eq!(id.note(), "hapax-topic-id=AQIDBAUGBwgJCgsMDQ4PEA");
        assert_eq!(TopicId::noted(&id.note()), Some(id));
        for other in ["", "AQIDBAUGBwgJCgsMDQ4PEA", "hapax-topic-id=", "hapax-topic-id=AQID", "a note"] {
            assert_eq!(TopicId::noted(other), None, "{other:?}");
        }
    }
}
