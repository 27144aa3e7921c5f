//! A claim whose response is lost has an unknown outcome; repeated by the same owner, it is the same claim.

mod support;

use std::time::Duration;

use hapax_client::{Client, Options};
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Json, Ledger as _, RecordedOutcome, Renew,
    StoreError, TokenError,
};
use hapax_faults::{Action, FaultProxy, Match, Protocol};
use support::Api;

fn request(owner: &str) -> ClaimRequest {
    let id = EntryId::new("charges".parse().unwrap(), "order/7".parse().unwrap());
    ClaimRequest::new(id, owner.parse().unwrap(), 60_000)
}

#[tokio::test]
async fn every_call_may_be_repeated_after_its_response_was_lost() {
    let api = Api::start().await;
    let between = FaultProxy::start(api.address, Protocol::Http).unwrap();
    let client = Client::connect(&format!("http://{}", between.address()), None).await.unwrap();
    let direct = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    let id = request("o").id;

    let losing = between.inject(Match::answer_to(""), Action::Cut);
    let lost = client.claim(vec![request("o")]).await;
    assert!(matches!(lost, Err(StoreError::OutcomeUnknown(_))), "{lost:?}");
    assert!(direct.entry(&id).await.unwrap().is_some(), "it was given nevertheless");
    losing.remove();
    let Claim::Granted(grant) = client.claim(vec![request("o")]).await.unwrap().remove(0).unwrap() else {
        panic!("the same owner holds it")
    };
    assert!(!grant.takeover);
    let other = client.claim(vec![request("p")]).await.unwrap().remove(0).unwrap();
    assert!(matches!(other, Claim::InProgress { .. }), "{other:?}");

    let ending =
        ClaimEnding::Complete { outcome: RecordedOutcome::done(Json::of(&7).unwrap()), ttl_ms: 60_000 };
    let end = EndClaim { id: id.clone(), token: grant.token.clone(), ending };
    let losing = between.inject(Match::answer_to(""), Action::Cut);
    let lost = client.end(vec![end.clone()]).await;
    assert!(matches!(lost, Err(StoreError::OutcomeUnknown(_))), "{lost:?}");
    let lost = client.entry(&id).await;
    assert!(matches!(lost, Err(StoreError::Unavailable(_))), "looking changes nothing: {lost:?}");
    losing.remove();
    assert_eq!(client.end(vec![end]).await.unwrap(), [Ok(())]);
    let late = Renew { id, token: grant.token, lease_ms: 1 };
    assert_eq!(client.renew(vec![late]).await.unwrap(), [Err(TokenError::Ended)]);
}

#[tokio::test]
async fn a_claim_may_wait_longer_than_the_response_timeout() {
    let api = Api::start().await;
    let endpoint = format!("http://{}", api.address);
    let options = Options { timeout: Duration::from_millis(500), ..Options::default() };
    let client = Client::connect_with(&endpoint, options).await.unwrap();
    let held = client.claim(vec![request("o")]).await.unwrap().remove(0).unwrap();
    let Claim::Granted(grant) = held else { panic!("{held:?}") };
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.claim(vec![ClaimRequest { wait_ms: 20_000, ..request("p") }]).await }
    });
    api.waiting(1).await;
    assert_eq!(client.waiting_calls(), 1);
    // This is longer than the timeout, and the claim still waits.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!waiting.is_finished());
    let ending =
        ClaimEnding::Complete { outcome: RecordedOutcome::done(Json::of("x").unwrap()), ttl_ms: 60_000 };
    client.end(vec![EndClaim { id: request("o").id, token: grant.token, ending }]).await.unwrap();
    let answer = waiting.await.unwrap().unwrap().remove(0).unwrap();
    assert!(matches!(answer, Claim::Completed { .. }), "{answer:?}");
}

#[tokio::test]
async fn a_claim_whose_caller_is_gone_waits_no_longer() {
    let api = Api::start().await;
    let client = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    client.claim(vec![request("o")]).await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.claim(vec![ClaimRequest { wait_ms: 20_000, ..request("p") }]).await }
    });
    api.waiting(1).await;
    waiting.abort();
    api.waiting(0).await;
    assert_eq!(client.waiting_calls(), 0);
}
