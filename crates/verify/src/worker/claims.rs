//! Processes that claim the same keys of the ledger, and complete them: some in time, some too late.

use std::sync::Arc;
use std::time::Duration;

use hapax::core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Grant, Json, Owner, RecordedOutcome, Renew, Scope,
    ledger::TTL_MS_DEFAULT,
};

use super::Workplace;
use crate::history::{Act, Answer, ClaimStep};

/// The lease of a claim here: short, so that some lapse.
const LEASE_MS: u64 = 150;
/// Keys that are contended for at the same time.
const KEYS_AT_ONCE: u64 = 3;
/// A new set of keys is contended for after this time, so that each key is claimed by several.
const EPOCH_MS: u64 = 400;

/// Claims keys until its process is killed. The keys follow the recorder's clock, so all processes contend for the same ones,
/// whatever their own clocks say.
pub async fn claim(place: Arc<Workplace>, number: usize) -> anyhow::Result<()> {
    let who = format!("{}/{number}", place.reporter.who());
    let scope = Scope::new(format!("hapax-verify-{}", place.run))?;
    loop {
        // Half of the time for keys of the set before: one that was extended late is still contended for.
        let epoch = (place.reporter.now_ms().await? / EPOCH_MS).saturating_sub(fastrand::u64(..2));
        let key = format!("{epoch}-{}", fastrand::u64(..KEYS_AT_ONCE));
        let id = EntryId::new(scope.clone(), key.parse()?);
        contend(&place, &who, &id).await?;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(20..80))).await;
    }
}

async fn contend(place: &Workplace, who: &str, id: &EntryId) -> anyhow::Result<()> {
    let report = |step| place.reporter.report_as(who, "claims", vec![act(id, step)]);
    let owner = Owner::new(format!("verify-{:016x}", fastrand::u64(..)))?;
    report(ClaimStep::Ask).await?;
    let request = ClaimRequest::new(id.clone(), owner, LEASE_MS);
    // An answer that was lost is asked for again by the same owner, as a client does.
    let mut answer = None;
    for _ in 0..5 {
        if let Ok(claimed) = place.ledger().claim(vec![request.clone()]).await {
            answer = claimed.into_iter().next();
            break;
        }
        report(ClaimStep::Unanswered).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    match answer {
        Some(Ok(Claim::Granted(grant))) => {
            report(ClaimStep::Granted { fence: grant.fence.0, lease_ms: grant.lease_ms }).await?;
            // Mostly in time, sometimes after another may have taken over.
            if fastrand::u8(..4) == 0 {
                tokio::time::sleep(Duration::from_millis(LEASE_MS * 2)).await;
                if extend(place, who, id, &grant).await? {
                    // It is held again, and others wait for it.
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(LEASE_MS / 2..LEASE_MS))).await;
                }
            } else {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
            }
            complete(place, who, id, grant).await
        }
        Some(Ok(Claim::Completed { outcome, .. })) => {
            let outcome = outcome.value.map(|value| value.get()).transpose()?.unwrap_or_default();
            report(ClaimStep::Replayed { outcome }).await.map(drop)
        }
        Some(Ok(Claim::InProgress { .. } | Claim::InDoubt { .. })) => report(ClaimStep::Busy).await.map(drop),
        _ => Ok(()),
    }
}

/// Asks for more time, too late: that is right only if no other has taken over.
/// Returns whether it was extended.
async fn extend(place: &Workplace, who: &str, id: &EntryId, grant: &Grant) -> anyhow::Result<bool> {
    let report = |step| place.reporter.report_as(who, "claims", vec![act(id, step)]);
    let fence = grant.fence.0;
    report(ClaimStep::Extend { fence }).await?;
    let renew = Renew { id: id.clone(), token: grant.token.clone(), lease_ms: LEASE_MS };
    let (answer, lease_ms) = match place.ledger().renew(vec![renew]).await {
        Ok(renewed) => match renewed.first() {
            Some(Ok(left)) => (Answer::Ok, left.lease_ms),
            _ => (Answer::Failed, 0),
        },
        Err(_) => (Answer::Unknown, 0),
    };
    report(ClaimStep::Extended { fence, answer, lease_ms }).await?;
    Ok(answer == Answer::Ok)
}

async fn complete(place: &Workplace, who: &str, id: &EntryId, grant: Grant) -> anyhow::Result<()> {
    let report = |step| place.reporter.report_as(who, "claims", vec![act(id, step)]);
    let (fence, outcome) = (grant.fence.0, format!("{who} with {}", grant.fence.0));
    report(ClaimStep::Complete { fence, outcome: outcome.clone() }).await?;
    let outcome = RecordedOutcome::done(Json::of(&outcome)?);
    let ending = ClaimEnding::Complete { outcome, ttl_ms: TTL_MS_DEFAULT };
    let end = EndClaim { id: id.clone(), token: grant.token, ending };
    let answer = match place.ledger().end(vec![end]).await {
        Ok(ended) => match ended.into_iter().next() {
            Some(Ok(())) => Answer::Ok,
            _ => Answer::Failed,
        },
        Err(_) => Answer::Unknown,
    };
    report(ClaimStep::Completed { fence, answer }).await.map(drop)
}

fn act(id: &EntryId, step: ClaimStep) -> Act {
    Act::Claim { id: id.key.to_string(), step }
}
