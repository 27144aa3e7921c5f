//! What a claim needs: a token, which is more than the fence that it contains, and room in its scope.

mod common;

use common::{ask, completed, granted, id, options, url};
use hapax_core::{ClaimError, EntryState, Ledger as _, Renew, Token, TokenError};
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_fence_is_not_enough_to_end_or_renew_a_claim,
        a_scope_has_room_for_a_number_of_open_claims,
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
