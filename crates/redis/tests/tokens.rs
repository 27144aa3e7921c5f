//! What a claim needs: a token, which is more than the fence that it contains, and room in its scope.

mod common;

use std::sync::Arc;

use common::{ask, completed, granted, id, options, url};
use hapax_core::{
    ClaimError, ClaimRequest, Clock as _, EntryId, EntryState, Fence, Ledger as _, ManualClock, NewMessage,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Renew, Token, TokenError,
};
use hapax_faults::RedisServer;
use hapax_redis::{Durability, Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_fence_is_not_enough_to_end_or_renew_a_claim,
        a_scope_has_room_for_a_number_of_open_claims,
        fences_of_deliveries_grow_though_the_clock_was_set_back,
        fences_grow_though_the_server_lost_its_data,
        a_claim_that_is_repeated_for_its_delivery_adds_nothing_to_its_message,
    ])
}

async fn a_fence_is_not_enough_to_end_or_renew_a_claim() {
    let store = RedisStore::open(&url(common::shared()), options()).await.unwrap();
    let grant = granted(&store, ask("key", "ann")).await;
    for forged in [format!("{}-", grant.fence), format!("{}-AAAAAAAAAAAAAAAA", grant.fence)] {
        let token = Token::new(forged).unwrap();
        let mut end = completed("key", &grant, "forged");
        end.token = token.clone();
        assert_eq!(store.end(vec![end]).await.unwrap(), [Err(TokenError::Stale)]);
        let renew = Renew { id: id("key"), token, lease_ms: 1_000 };
        assert_eq!(store.renew(vec![renew]).await.unwrap(), [Err(TokenError::Stale)]);
    }
    assert_eq!(store.entry(&id("key")).await.unwrap().unwrap().state, EntryState::Processing);
    assert_eq!(store.end(vec![completed("key", &grant, "own")]).await.unwrap(), [Ok(())]);
}

async fn a_scope_has_room_for_a_number_of_open_claims() {
    let options = Options { in_doubt_per_scope_max: 2, ..options() };
    let store = RedisStore::open(&url(common::shared()), options).await.unwrap();
    let first = granted(&store, ask("a", "ann")).await;
    granted(&store, ask("b", "ann")).await;
    let full = common::claim(&store, ask("c", "ann")).await;
    assert!(matches!(full, Err(ClaimError::TooManyInDoubt { open: 2, max: 2, .. })), "{full:?}");
    // A claim that is repeated needs no more room, and one that ends makes room.
    granted(&store, ask("b", "ann")).await;
    assert_eq!(store.end(vec![completed("a", &first, "done")]).await.unwrap(), [Ok(())]);
    granted(&store, ask("c", "ann")).await;
}

/// Another server, or another process, may have another clock.
async fn fences_of_deliveries_grow_though_the_clock_was_set_back() {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let options = Options { clock: Some(clock.clone()), ..options() };
    let queue: QueueName = "jobs".parse().unwrap();
    let mut last = Fence(0);
    for round in 0..3 {
        let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
        store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
        for _ in 0..2 {
            store.send(&queue, vec![NewMessage::new("job")]).await.unwrap();
            let got = store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
            assert!(got.fence > last, "round {round}: {} after {last}", got.fence);
            last = got.fence;
            clock.set_wall_ms(clock.wall_ms() - 3_600_000);
        }
    }
}

/// As at `process` after a crash: what was paid with a token of before is still told apart.
async fn fences_grow_though_the_server_lost_its_data() {
    let server = RedisServer::start(&[]).unwrap();
    let options = Options { durability: Durability::Process, ..options() };
    let queue: QueueName = "jobs".parse().unwrap();
    let mut last = Fence(0);
    for round in 0..2 {
        let store = RedisStore::open(&url(&server), options.clone()).await.unwrap();
        let grant = granted(&store, ask("key", "ann")).await;
        assert!(grant.fence > last, "round {round}: {} after {last}", grant.fence);
        store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
        store.send(&queue, vec![NewMessage::new("job")]).await.unwrap();
        let got = store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
        assert!(got.fence > last, "round {round}: {} after {last}", got.fence);
        last = grant.fence.max(got.fence);
        server.cli(&["FLUSHALL"]).unwrap();
    }
}

async fn a_claim_that_is_repeated_for_its_delivery_adds_nothing_to_its_message() {
    let options = options();
    let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
    let queue: QueueName = "jobs".parse().unwrap();
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    let sent = store.send(&queue, vec![NewMessage::new("job")]).await.unwrap().remove(0).unwrap();
    let got = store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
    let pattern = format!("{}:*:q:{queue}:m", options.prefix);
    let key = common::shared().cli(&["--scan", "--pattern", &pattern]).unwrap();
    let bytes = || common::shared().cli(&["HSTRLEN", &key, &format!("{:016}", sent.sequence)]).unwrap();
    let claim = async || {
        let entry = EntryId::of_queue(&queue, got.key.clone());
        let request = ClaimRequest::new(entry, "ann".parse().unwrap(), 60_000);
        let delivery = Some((queue.clone(), got.receipt.clone()));
        granted(&store, ClaimRequest { delivery, ..request }).await;
        bytes()
    };
    let (before, first) = (bytes(), claim().await);
    assert_ne!(before, first, "it says which entry it needs");
    assert_eq!(claim().await, first);
}
