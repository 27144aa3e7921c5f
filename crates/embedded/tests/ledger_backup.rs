//! A restored ledger grants nothing until an operator accepts possible repetitions; then entries in the backup do not
//! run again.

#[path = "common/ledger.rs"]
mod ledger;

use hapax_core::{Claim, Ledger, Maintenance, StoreError};
use hapax_embedded::{Embedded, Options};
use ledger::*;

#[tokio::test]
async fn a_restored_ledger_waits_for_resume_and_repeats_only_what_came_after_the_backup() {
    let rig = Rig::new();
    let before = rig.granted(by("a", "before")).await;
    rig.end(ending(&id("before"), &before, complete("done"))).await.unwrap();
    let held = rig.granted(by("a", "held")).await;
    let backup = rig.root.path().join("backup.db");
    rig.store.backup(&backup).unwrap();
    let after = rig.granted(by("a", "after")).await;
    rig.end(ending(&id("after"), &after, complete("done"))).await.unwrap();
    rig.store.close();

    let folder = rig.root.path().join("restored");
    Embedded::restore(&backup, &folder).unwrap();
    rig.clock.advance_ms(LEASE_MS);
    let options = Options { clock: rig.clock.clone(), ..Options::default() };
    let store = Embedded::open(&folder, options).unwrap();
    for name in ["before", "held", "after", "new"] {
        let refused = store.claim(vec![by("b", name)]).await;
        assert!(matches!(refused, Err(StoreError::Paused(_))), "{name}: {refused:?}");
    }
    assert!(store.entry(&id("before")).await.unwrap().is_some(), "looking is allowed");
    store.resume("eva").await.unwrap();
    let claim =
        async |owner: &str, name: &str| store.claim(vec![by(owner, name)]).await.unwrap().remove(0).unwrap();
    assert!(matches!(claim("b", "before").await, Claim::Completed { .. }));
    assert_eq!(claim("b", "held").await, Claim::InProgress { retry_after_ms: LEASE_MS });
    let Claim::Granted(again) = claim("b", "after").await else { panic!("the backup does not know of it") };
    assert!(again.fence > after.fence, "no fence is given out twice");
    // Tokens from before the backup are still valid; later ones are not.
    store.end(vec![ending(&id("held"), &held, complete("done"))]).await.unwrap()[0].unwrap();
    let stale = store.end(vec![ending(&id("after"), &after, complete("other"))]).await.unwrap();
    assert_eq!(stale, [Err(hapax_core::TokenError::Stale)]);
}
