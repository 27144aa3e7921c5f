//! A store with a manual clock, and short forms of the ledger's values.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, Delivery, EndClaim, EntryId, Grant, IdempotencyKey, Json, Ledger,
    ManualClock, NewMessage, OnDoubt, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive,
    RecordedOutcome, Tier,
};
use hapax_embedded::{Embedded, Options};

pub const LEASE_MS: u64 = 30_000;
pub const TTL_MS: u64 = 60_000;

pub struct Rig {
    pub root: tempfile::TempDir,
    pub clock: Arc<ManualClock>,
    pub store: Arc<Embedded>,
    in_doubt_per_scope_max: u64,
}

impl Rig {
    pub fn new() -> Self {
        Self::with_in_doubt_per_scope_max(Options::default().in_doubt_per_scope_max)
    }

    pub fn with_in_doubt_per_scope_max(max: u64) -> Self {
        let root = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let store = open(&root, &clock, max);
        Self { root, clock, store, in_doubt_per_scope_max: max }
    }

    pub fn reopen(&mut self) {
        self.store.close();
        self.store = open(&self.root, &self.clock, self.in_doubt_per_scope_max);
    }

    pub async fn claim(&self, request: ClaimRequest) -> Claim {
        self.store.claim(vec![request]).await.unwrap().remove(0).unwrap()
    }

    pub async fn granted(&self, request: ClaimRequest) -> Grant {
        match self.claim(request).await {
            Claim::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub async fn end(&self, end: EndClaim) -> Result<(), hapax_core::TokenError> {
        self.store.end(vec![end]).await.unwrap().remove(0)
    }

    /// Creates a queue of the effectively-once tier and sends one message.
    pub async fn once_queue(&self, name: &str, config: QueueConfig) -> QueueName {
        let queue = QueueName::new(name).unwrap();
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..config };
        self.store.create_queue(&queue, config).await.unwrap();
        queue
    }

    pub async fn send(&self, queue: &QueueName, message: NewMessage) {
        self.store.send(queue, vec![message]).await.unwrap().remove(0).unwrap();
    }

    pub async fn receive(&self, queue: &QueueName) -> Option<Delivery> {
        self.store.receive(queue, Receive::up_to(1)).await.unwrap().pop()
    }

    pub fn db(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.root.path().join("hapax.db")).unwrap()
    }

    pub fn rows(&self, sql: &str) -> i64 {
        self.db().query_row(sql, [], |row| row.get(0)).unwrap()
    }
}

fn open(root: &tempfile::TempDir, clock: &Arc<ManualClock>, in_doubt_per_scope_max: u64) -> Arc<Embedded> {
    let options = Options { clock: clock.clone(), in_doubt_per_scope_max, ..Options::default() };
    Arc::new(Embedded::open(root.path(), options).unwrap())
}

pub fn key(key: &str) -> IdempotencyKey {
    IdempotencyKey::new(key).unwrap()
}

pub fn id(name: &str) -> EntryId {
    EntryId::new("api/orders".parse().unwrap(), key(name))
}

pub fn by(owner: &str, name: &str) -> ClaimRequest {
    ClaimRequest::new(id(name), owner.parse().unwrap(), LEASE_MS)
}

pub fn parking(request: ClaimRequest) -> ClaimRequest {
    ClaimRequest { on_doubt: OnDoubt::Park, ..request }
}

pub fn outcome(text: &str) -> RecordedOutcome {
    RecordedOutcome::done(Json::of(text).unwrap())
}

pub fn complete(text: &str) -> ClaimEnding {
    ClaimEnding::Complete { outcome: outcome(text), ttl_ms: TTL_MS }
}

pub fn ending(id: &EntryId, grant: &Grant, ending: ClaimEnding) -> EndClaim {
    EndClaim { id: id.clone(), token: grant.token.clone(), ending }
}
