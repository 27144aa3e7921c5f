//! What a claim needs: a token, which is more than the fence that it contains, and room in its scope.

mod common;

use std::sync::Arc;

use common::{ask, completed, granted, id, options, url};
use hapax_core::{
    ClaimError, Clock as _, EntryState, Fence, Ledger as _, ManualClock, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receive, Renew, Token, TokenError,
};
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_fence_is_not_enough_to_end_or_renew_a_claim,
        a_scope_has_room_for_a_number_of_open_claims,
        fences_of_deliveries_grow_though_the_clock_was_set_back,
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
