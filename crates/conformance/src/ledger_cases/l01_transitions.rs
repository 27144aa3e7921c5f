//! Point 1: the effect of each operation in each state; a refused operation changes nothing.

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EntryId, EntryState, Fence, OnDoubt, RecordedOutcome, Resolution,
    ResolveError, Token, TokenError,
};

use crate::ledger_trial::{
    LONG_LEASE_MS, ask, at_rest, brief, complete, done, failed, happened, id, parking,
};
use crate::trial::{LEASE_MS, Trial};

/// The possible states of an entry, as seen by its first holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    /// An operator removed the entry.
    Forgotten,
    /// Its holder released it.
    Released,
    Held,
    /// Its lease expired.
    Lapsed,
    /// Its holder reported a doubt.
    Doubted,
    /// It expired, and another owner holds it.
    TakenOver,
    Completed,
    Failed,
    /// It expired, and an operator recorded that it happened.
    Resolved,
}

use Is::{Completed, Doubted, Failed, Forgotten, Held, Lapsed, Released, Resolved, TakenOver};

const ALL: [Is; 9] = [Forgotten, Released, Held, Lapsed, Doubted, TakenOver, Completed, Failed, Resolved];

impl Is {
    fn state(self) -> Option<EntryState> {
        match self {
            Forgotten | Released => None,
            Held | TakenOver => Some(EntryState::Processing),
            Lapsed | Doubted => Some(EntryState::InDoubt),
            Completed | Resolved => Some(EntryState::Completed),
            Failed => Some(EntryState::Failed),
        }
    }

    fn outcome(self) -> RecordedOutcome {
        match self {
            Failed => failed("card refused"),
            Resolved => done("the operator looked"),
            _ => done("paid"),
        }
    }
}

/// An entry, and the token of its first holder.
struct Subject {
    is: Is,
    id: EntryId,
    token: Token,
    fence: Fence,
}

/// One entry in each state.
async fn each(t: &Trial, on_doubt: OnDoubt) -> Vec<Subject> {
    let mut all = Vec::new();
    for is in ALL {
        let id = id(&format!("{is:?}"));
        let lapses = matches!(is, Lapsed | TakenOver | Resolved);
        let lease_ms = if lapses { LEASE_MS } else { LONG_LEASE_MS };
        let grant = t.grant(ClaimRequest { lease_ms, on_doubt, ..ask(&id, "first") }).await;
        assert!(!grant.takeover, "{is:?}");
        t.lasts(grant.lease_ms, lease_ms);
        all.push(Subject { is, id, token: grant.token, fence: grant.fence });
    }
    t.pass(LEASE_MS).await;
    for Subject { is, id, token, .. } in &all {
        let ending = match is {
            Held | Lapsed => continue,
            Released => ClaimEnding::Release,
            Doubted | Forgotten => ClaimEnding::Doubt,
            Completed | Failed => complete(&is.outcome()),
            TakenOver => {
                assert!(t.grant(ask(id, "second")).await.takeover, "told so");
                continue;
            }
            Resolved => {
                t.resolve(id, happened(&is.outcome())).await.expect("it is in doubt");
                continue;
            }
        };
        assert_eq!(t.end(id, token, ending).await, Ok(()), "{is:?}");
        if *is == Forgotten {
            t.forget(id).await.expect("nobody holds it");
        }
    }
    for Subject { is, id, .. } in &all {
        assert_eq!(t.state(id).await, is.state(), "{is:?}");
    }
    all
}

/// The kind of a claim's result, in a word.
fn word(claim: &Claim) -> &'static str {
    match claim {
        Claim::Granted(grant) if grant.takeover => "taken over",
        Claim::Granted(_) => "granted",
        Claim::Completed { outcome, .. } if outcome.failed => "failed",
        Claim::Completed { .. } => "completed",
        Claim::InProgress { .. } => "in progress",
        Claim::InDoubt { .. } => "in doubt",
    }
}

pub(crate) async fn a_claim_that_takes_over_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Retry).await {
        let before = at_rest(t.entry(&id).await);
        let claim = t.claim(ask(&id, "third")).await;
        let expected = match is {
            Forgotten | Released => "granted",
            Held | TakenOver => "in progress",
            Lapsed | Doubted => "taken over",
            Completed | Resolved => "completed",
            Failed => "failed",
        };
        assert_eq!(word(&claim), expected, "{is:?}");
        match claim {
            Claim::Granted(grant) => {
                t.lasts(grant.lease_ms, LONG_LEASE_MS);
                assert!(grant.fence > fence && grant.token != token, "{is:?}: a new right");
                let view = t.entry(&id).await.expect("an entry");
                assert_eq!((view.state, view.fence), (EntryState::Processing, grant.fence), "{is:?}");
                assert_eq!(view.owner.as_str(), "third", "{is:?}");
                assert_eq!(view.takeovers, u32::from(grant.takeover), "{is:?}");
            }
            Claim::Completed { outcome, at_ms } => {
                assert_eq!(outcome, is.outcome(), "{is:?}");
                assert_eq!(before.as_ref().and_then(|view| view.ended_ms), Some(at_ms), "{is:?}");
                assert_eq!(at_rest(t.entry(&id).await), before, "{is:?}");
            }
            _ => assert_eq!(at_rest(t.entry(&id).await), before, "{is:?}"),
        }
    }
}

pub(crate) async fn a_claim_that_parks_meets_every_state(t: Trial) {
    for Subject { is, id, .. } in each(&t, OnDoubt::Park).await {
        let before = at_rest(t.entry(&id).await);
        let claim = t.claim(parking(&id, "third")).await;
        let expected = match is {
            Forgotten | Released => "granted",
            Held | TakenOver => "in progress",
            Lapsed | Doubted => "in doubt",
            Completed | Resolved => "completed",
            Failed => "failed",
        };
        assert_eq!(word(&claim), expected, "{is:?}");
        if expected != "granted" {
            assert_eq!(at_rest(t.entry(&id).await), before, "{is:?}");
        }
        if let Claim::InDoubt { since_ms } = claim {
            assert_eq!(before.expect("an entry").ended_ms, Some(since_ms), "{is:?}");
        }
    }
}

pub(crate) async fn a_claim_repeated_by_its_owner_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Retry).await {
        let claim = t.claim(ask(&id, "first")).await;
        let expected = match is {
            Forgotten | Released | Held | Lapsed => "granted",
            TakenOver => "in progress",
            Doubted => "taken over",
            Completed | Resolved => "completed",
            Failed => "failed",
        };
        assert_eq!(word(&claim), expected, "{is:?}");
        if let Claim::Granted(grant) = claim {
            let same = matches!(is, Held | Lapsed);
            assert_eq!(grant.token == token && grant.fence == fence, same, "{is:?}: the same claim");
            t.lasts(grant.lease_ms, LONG_LEASE_MS);
            assert_eq!(t.state(&id).await, Some(EntryState::Processing), "{is:?}");
        }
    }
}

/// The error for an operation that only the claim's holder may do, if it is refused.
fn refusal(is: Is) -> Option<TokenError> {
    match is {
        Forgotten | Released => Some(TokenError::Gone),
        TakenOver | Resolved => Some(TokenError::Stale),
        Completed | Failed => Some(TokenError::Ended),
        Held | Lapsed | Doubted => None,
    }
}

pub(crate) async fn a_renewal_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Retry).await {
        let before = at_rest(t.entry(&id).await);
        let renewed = t.renew(&id, &token, LONG_LEASE_MS / 2).await;
        // A holder that reported a doubt cannot continue as if nothing had happened.
        let refused = if is == Doubted { Some(TokenError::Stale) } else { refusal(is) };
        match (renewed, refused) {
            (Ok(lease_ms), None) => {
                t.lasts(lease_ms, LONG_LEASE_MS / 2);
                let view = t.entry(&id).await.expect("an entry");
                assert_eq!((view.state, view.fence), (EntryState::Processing, fence), "{is:?}");
                t.lasts(view.lease_ms, LONG_LEASE_MS / 2);
            }
            (renewed, refused) => {
                assert_eq!(renewed.err(), refused, "{is:?}");
                assert_eq!(at_rest(t.entry(&id).await), before, "{is:?}");
            }
        }
    }
}

pub(crate) async fn a_completion_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Park).await {
        let before = at_rest(t.entry(&id).await);
        let outcome = done("by the first");
        let ended = t.end(&id, &token, complete(&outcome)).await;
        assert_eq!(ended.err(), refusal(is), "{is:?}");
        let view = t.entry(&id).await;
        if refusal(is).is_some() {
            assert_eq!(at_rest(view), before, "{is:?}");
        } else {
            let view = view.expect("an entry");
            assert_eq!((view.state, view.fence), (EntryState::Completed, fence), "{is:?}");
            assert_eq!(view.outcome, Some(outcome), "{is:?}");
        }
    }
}

pub(crate) async fn a_release_meets_every_state(t: Trial) {
    for Subject { is, id, token, .. } in each(&t, OnDoubt::Retry).await {
        let before = at_rest(t.entry(&id).await);
        let ended = t.end(&id, &token, ClaimEnding::Release).await;
        // A holder that reported a doubt cannot report that nothing happened.
        let refused = if is == Doubted { Some(TokenError::Stale) } else { refusal(is) };
        assert_eq!(ended.err(), refused, "{is:?}");
        let left = if refused.is_some() { before } else { None };
        assert_eq!(at_rest(t.entry(&id).await), left, "{is:?}");
    }
}

pub(crate) async fn a_doubt_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Park).await {
        let before = at_rest(t.entry(&id).await);
        let ended = t.end(&id, &token, ClaimEnding::Doubt).await;
        assert_eq!(ended.err(), refusal(is), "{is:?}");
        let view = t.entry(&id).await;
        if refusal(is).is_some() || is == Doubted {
            assert_eq!(at_rest(view), before, "{is:?}");
        } else {
            let view = view.expect("an entry");
            assert_eq!((view.state, view.fence), (EntryState::InDoubt, fence), "{is:?}");
            assert!(view.ended_ms.is_some() && view.lease_ms == 0, "{is:?}");
            assert_eq!(t.renew(&id, &token, LONG_LEASE_MS).await, Err(TokenError::Stale), "{is:?}: given up");
        }
    }
}

/// Why an operator's decision was refused, in a word.
fn why(error: ResolveError) -> &'static str {
    match error {
        ResolveError::NotFound(_) => "not found",
        ResolveError::InProgress { .. } => "in progress",
        ResolveError::NotInDoubt => "not in doubt",
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn a_resolution_meets_every_state(t: Trial) {
    let outcome = done("the operator looked");
    for as_ in [happened(&outcome), Resolution::Absent] {
        for Subject { is, id, token, .. } in each(&t, OnDoubt::Park).await {
            let before = at_rest(t.entry(&id).await);
            let refused = match is {
                Forgotten | Released => Some("not found"),
                Held | TakenOver => Some("in progress"),
                Completed | Failed | Resolved => Some("not in doubt"),
                Lapsed | Doubted => None,
            };
            let resolved = t.resolve(&id, as_.clone()).await;
            assert_eq!(resolved.err().map(why), refused, "{is:?} {as_:?}");
            let after = t.entry(&id).await;
            if refused.is_some() {
                assert_eq!(at_rest(after), before, "{is:?} {as_:?}");
            } else if as_ == Resolution::Absent {
                assert_eq!(after, None, "{is:?}");
            } else {
                let after = after.expect("an entry");
                assert_eq!(after.state, EntryState::Completed, "{is:?}");
                assert_eq!(after.outcome, Some(outcome.clone()), "{is:?}");
                assert_eq!(t.end(&id, &token, complete(&outcome)).await, Err(TokenError::Stale), "{is:?}");
            }
        }
        // Clears the entries for the next round.
        for is in ALL.map(|is| id(&format!("{is:?}"))) {
            clear(&t, &is).await;
        }
    }
}

/// Removes an entry, regardless of its holder.
async fn clear(t: &Trial, id: &EntryId) {
    for by in ["first", "second"] {
        if let Claim::Granted(grant) = t.claim(brief(id, by)).await {
            t.end(id, &grant.token, ClaimEnding::Doubt).await.expect("its own claim");
            break;
        }
    }
    t.forget(id).await.expect("nobody holds it");
}

pub(crate) async fn forgetting_meets_every_state(t: Trial) {
    for Subject { is, id, token, fence } in each(&t, OnDoubt::Park).await {
        let before = at_rest(t.entry(&id).await);
        let refused = match is {
            Forgotten | Released => Some("not found"),
            Held | TakenOver => Some("in progress"),
            Lapsed | Doubted | Completed | Failed | Resolved => None,
        };
        assert_eq!(t.forget(&id).await.err().map(why), refused, "{is:?}");
        if refused.is_some() {
            assert_eq!(at_rest(t.entry(&id).await), before, "{is:?}");
            continue;
        }
        assert_eq!(t.entry(&id).await, None, "{is:?}");
        assert_eq!(t.end(&id, &token, complete(&done("late"))).await, Err(TokenError::Gone), "{is:?}");
        let grant = t.grant(parking(&id, "third")).await;
        assert!(!grant.takeover && grant.fence > fence, "{is:?}: it starts from the beginning");
        assert_eq!(t.end(&id, &token, complete(&done("late"))).await, Err(TokenError::Stale), "{is:?}");
    }
}

pub(crate) async fn an_entry_shows_what_is_known_about_it(t: Trial) {
    let order = id("order-7");
    assert_eq!(t.entry(&order).await, None);
    let request = ClaimRequest { fingerprint: crate::ledger_trial::fingerprint("f1"), ..ask(&order, "ann") };
    let grant = t.grant(request).await;
    let held = t.entry(&order).await.expect("an entry");
    assert_eq!((&held.id, held.state, held.fence), (&order, EntryState::Processing, grant.fence));
    assert_eq!((held.owner.as_str(), held.takeovers), ("ann", 0));
    assert_eq!(held.fingerprint, crate::ledger_trial::fingerprint("f1"));
    assert_eq!((held.ended_ms, held.outcome), (None, None));
    t.lasts(held.lease_ms, LONG_LEASE_MS);
    t.pass(1_000).await;
    t.end(&order, &grant.token, complete(&failed("refused"))).await.unwrap();
    let ended = t.entry(&order).await.expect("an entry");
    assert_eq!((ended.state, ended.lease_ms), (EntryState::Failed, 0));
    assert_eq!((ended.claimed_ms, ended.fence), (held.claimed_ms, held.fence));
    assert_eq!(ended.outcome, Some(failed("refused")));
    let ended_ms = ended.ended_ms.expect("it has ended");
    assert!(ended_ms >= held.claimed_ms + 1_000, "{ended_ms}, claimed {}", held.claimed_ms);
    assert_eq!(ended.prune_ms, Some(ended_ms + crate::ledger_trial::TTL_MS));
}
