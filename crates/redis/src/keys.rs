//! Names of the keys in Redis.
//!
//! All keys of a scope of the ledger have one hash tag, and so have those of a queue, whose ledger scope bears its name: one
//! script changes a message and its entry, also on a Cluster. There are [`SHARDS`] tags, spread evenly over the
//! slots of a Cluster, and a scope belongs to one of them. A fixed number, since listing and sweeping visit each of them.

use hapax_core::{EntryId, QueueName, Scope};

/// Number of hash tags. It is a part of the layout in Redis and never changes.
pub(crate) const SHARDS: usize = 64;
/// Slots of a Redis Cluster.
pub(crate) const SLOTS: u16 = 16_384;

/// The keys of every script of the queues. The first ones belong to the shard, the others to one queue.
pub(crate) const QUEUE_KEYS: [&str; 32] = [
    "meta",
    "moves",
    "moving",
    "bodies",
    "decided",
    "arrived",
    "queues",
    "deleted",
    "redrives",
    "audit",
    "entries",
    "open",
    "entries_due",
    "scopes",
    "needs",
    "resumed",
    "info",
    "m",
    "b",
    "all",
    "ready",
    "due",
    "groups",
    "retain",
    "sent",
    "ids",
    "dedup",
    "dedup_at",
    "side",
    "tries_at",
    "halted",
    "waits",
];
const SHARD_KEYS: usize = 16;

/// A group of keys with the same hash tag.
pub(crate) type Shard = usize;

/// Makes the names of keys.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: String,
    tags: Vec<String>,
}

impl Keys {
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned(), tags: tags() }
    }

    fn key(&self, shard: Shard, name: &str) -> String {
        format!("{}:{{{}}}:{name}", self.prefix, self.tags[shard])
    }

    /// Last fence, start of the server, revisions: the few numbers of a shard.
    pub fn meta(&self, shard: Shard) -> String {
        self.key(shard, "meta")
    }

    /// All entries, by fence.
    pub fn all(&self, shard: Shard) -> String {
        self.key(shard, "all")
    }

    /// The entries that are held or in doubt, by fence.
    pub fn open(&self, shard: Shard) -> String {
        self.key(shard, "open")
    }

    /// The entries that time changes, by when it does.
    pub fn due(&self, shard: Shard) -> String {
        self.key(shard, "due")
    }

    /// Counts of open entries per scope.
    pub fn scopes(&self, shard: Shard) -> String {
        self.key(shard, "scopes")
    }

    /// Decisions of operators.
    pub fn audit(&self, shard: Shard) -> String {
        self.key(shard, "audit")
    }

    /// One entry.
    pub fn entry(&self, shard: Shard, member: &str) -> String {
        self.key(shard, &format!("e:{member}"))
    }

    /// The documents and the order of their names.
    pub fn documents(&self) -> [String; 3] {
        [self.meta(0), self.key(0, "documents"), self.key(0, "document-names")]
    }

    /// Which messages need which entries.
    pub fn needs(&self, shard: Shard) -> String {
        self.key(shard, "needs")
    }

    /// Entries whose doubt has ended, and whose messages may still be parked.
    pub fn resumed(&self, shard: Shard) -> String {
        self.key(shard, "resumed")
    }

    /// The channel on which processes tell each other what may be worth a look.
    pub fn wake(&self, shard: Shard) -> String {
        self.key(shard, "wake")
    }

    /// The keys of every script of the ledger, up to the entry.
    pub fn ledger(&self, shard: Shard) -> Vec<String> {
        let counts = [self.scopes(shard), self.needs(shard), self.resumed(shard)];
        let indexes = [self.meta(shard), self.all(shard), self.open(shard), self.due(shard)];
        indexes.into_iter().chain(counts).collect()
    }

    /// The messages of a queue, and those of them that others wait for or that need entries.
    pub fn messages(&self, queue: &QueueName) -> [String; 2] {
        let shard = shard_of_queue(queue);
        [self.key(shard, &format!("q:{queue}:m")), self.key(shard, &format!("q:{queue}:waits"))]
    }

    /// The same keys in a shard, where there is no queue.
    pub fn no_messages(&self, shard: Shard) -> [String; 2] {
        [self.key(shard, "q::m"), self.key(shard, "q::waits")]
    }

    /// The names of the queues of a shard.
    pub fn queues(&self, shard: Shard) -> String {
        self.key(shard, "queues")
    }

    /// Messages on their way out of a shard's queues, in their order.
    pub fn moves(&self, shard: Shard) -> String {
        self.key(shard, "moves")
    }

    /// Messages that groups of other queues may stop waiting for.
    pub fn decided(&self, shard: Shard) -> String {
        self.key(shard, "decided")
    }

    /// Messages that have arrived from other queues and may still be on their way there.
    pub fn arrived(&self, shard: Shard) -> String {
        self.key(shard, "arrived")
    }

    /// Redrives out of a shard's queues.
    pub fn redrives(&self, shard: Shard) -> String {
        self.key(shard, "redrives")
    }

    /// The configuration and the counters of a queue.
    pub fn info(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:info"))
    }

    /// The sequences of a queue's messages by their ids.
    pub fn ids(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:ids"))
    }

    /// Messages that groups of a queue wait for, and other small things of it.
    pub fn side(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:side"))
    }

    /// The groups of a queue that are halted, and for which messages.
    pub fn halted(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:halted"))
    }

    /// What a queue remembers of deduplication ids, and when they were sent.
    pub fn dedup(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:dedup"))
    }

    pub fn dedup_at(&self, queue: &QueueName) -> String {
        self.key(shard_of_queue(queue), &format!("q:{queue}:dedup_at"))
    }

    /// The keys of every script of the queues.
    pub fn queue(&self, queue: &QueueName) -> Vec<String> {
        let shard = shard_of_queue(queue);
        let names = QUEUE_KEYS.iter().enumerate();
        names
            .map(|(at, name)| match at {
                0..SHARD_KEYS => self.key(shard, shard_key(name)),
                _ => self.key(shard, &format!("q:{queue}:{name}")),
            })
            .collect()
    }

    /// The slot of a shard's keys.
    pub fn slot(&self, shard: Shard) -> u16 {
        slot(&self.tags[shard])
    }
}

/// The name in Redis of a key of a shard. Those of the ledger have their own names in the scripts of the queues.
fn shard_key(name: &str) -> &str {
    match name {
        "entries" => "all",
        "entries_due" => "due",
        name => name,
    }
}

/// The shard of a queue: that of its scope in the ledger.
pub(crate) fn shard_of_queue(queue: &QueueName) -> Shard {
    shard_of(&Scope::of_queue(queue))
}

/// The shard of a scope.
pub(crate) fn shard_of(scope: &Scope) -> Shard {
    usize::from(crc16(scope.as_str().as_bytes())) % SHARDS
}

/// The name of an entry in the indexes of its shard, and the last part of its key.
pub(crate) fn member(id: &EntryId) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(id.hash().to_le_bytes())
}

/// One tag in each of [`SHARDS`] equal ranges of slots: the smallest number whose slot is there.
fn tags() -> Vec<String> {
    let width = usize::from(SLOTS) / SHARDS;
    let mut tags = vec![String::new(); SHARDS];
    let mut missing = SHARDS;
    for number in 0_u32.. {
        let tag = number.to_string();
        let found = &mut tags[usize::from(slot(&tag)) / width];
        if found.is_empty() {
            *found = tag;
            missing -= 1;
            if missing == 0 {
                break;
            }
        }
    }
    tags
}

fn slot(tag: &str) -> u16 {
    crc16(tag.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, by which Redis Cluster assigns keys to slots.
fn crc16(bytes: &[u8]) -> u16 {
    let step = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
    bytes.iter().fold(0, |crc, byte| (0..8).fold(crc ^ (u16::from(*byte) << 8), step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // From the specification of Redis Cluster, and `CLUSTER KEYSLOT`.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
    }

    #[test]
    fn shards_are_spread_over_all_slots() {
        let keys = Keys::new("hapax");
        for shard in 0..SHARDS {
            let width = usize::from(SLOTS) / SHARDS;
            assert_eq!(usize::from(keys.slot(shard)) / width, shard);
        }
    }

    #[test]
    fn a_queue_and_its_ledger_scope_share_a_tag() {
        let keys = Keys::new("shop");
        let scope = Scope::of_queue(&"payments".parse().unwrap());
        let shard = shard_of(&scope);
        let id = EntryId::new(scope, "order-7".parse().unwrap());
        let tag = |key: &str| key[key.find('{').unwrap()..=key.find('}').unwrap()].to_owned();
        let entry = keys.entry(shard, &member(&id));
        assert!(entry.starts_with("shop:{"), "{entry}");
        assert!(keys.ledger(shard).iter().chain([&keys.audit(shard)]).all(|key| tag(key) == tag(&entry)));
    }
}
