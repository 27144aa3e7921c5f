//! A claim whose answer is lost on the way is an unknown outcome; asked again by the same owner, it is the same claim.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_client::{Client, Options};
use hapax_core::{
    Claim, ClaimEnd, ClaimRequest, Ending, EntryId, Json, Ledger as _, RecordedOutcome, Renew, StoreError,
    TokenError,
};
use support::Api;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Passes requests on, and drops the connection instead of the answer while `losing`.
async fn between(server: SocketAddr, losing: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = TcpStream::connect(server).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let losing = losing.clone();
            tokio::spawn(async move {
                let mut answer = [0; 4096];
                while let Ok(count @ 1..) = from_server.read(&mut answer).await {
                    if losing.load(Ordering::SeqCst) || to_client.write_all(&answer[..count]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    address
}

fn request(owner: &str) -> ClaimRequest {
    let id = EntryId::new("charges".parse().unwrap(), "order/7".parse().unwrap());
    ClaimRequest::new(id, owner.parse().unwrap(), 60_000)
}

#[tokio::test]
async fn every_call_may_be_repeated_after_its_answer_was_lost() {
    let api = Api::start().await;
    let losing = Arc::new(AtomicBool::new(false));
    let address = between(api.address, losing.clone()).await;
    let client = Client::connect(&format!("http://{address}"), None).await.unwrap();
    let direct = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    let id = request("o").id;

    losing.store(true, Ordering::SeqCst);
    let lost = client.claim(vec![request("o")]).await;
    assert!(matches!(lost, Err(StoreError::OutcomeUnknown(_))), "{lost:?}");
    assert!(direct.entry(&id).await.unwrap().is_some(), "it was given nevertheless");
    losing.store(false, Ordering::SeqCst);
    let Claim::Granted(grant) = client.claim(vec![request("o")]).await.unwrap().remove(0).unwrap() else {
        panic!("the same owner holds it")
    };
    assert!(!grant.takeover);
    let other = client.claim(vec![request("p")]).await.unwrap().remove(0).unwrap();
    assert!(matches!(other, Claim::InProgress { .. }), "{other:?}");

    let ending = Ending::Complete { outcome: RecordedOutcome::done(Json::of(&7).unwrap()), ttl_ms: 60_000 };
    let end = ClaimEnd { id: id.clone(), token: grant.token.clone(), ending };
    losing.store(true, Ordering::SeqCst);
    let lost = client.end(vec![end.clone()]).await;
    assert!(matches!(lost, Err(StoreError::OutcomeUnknown(_))), "{lost:?}");
    let lost = client.entry(&id).await;
    assert!(matches!(lost, Err(StoreError::Unavailable(_))), "looking changes nothing: {lost:?}");
    losing.store(false, Ordering::SeqCst);
    assert_eq!(client.end(vec![end]).await.unwrap(), [Ok(())]);
    let late = Renew { id, token: grant.token, lease_ms: 1 };
    assert_eq!(client.renew(vec![late]).await.unwrap(), [Err(TokenError::Ended)]);
}

#[tokio::test]
async fn a_claim_may_wait_longer_than_an_answer_may_take() {
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
    assert_eq!(client.waiting(), 1);
    // Longer than the timeout, and nothing has happened.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!waiting.is_finished());
    let ending = Ending::Complete { outcome: RecordedOutcome::done(Json::of("x").unwrap()), ttl_ms: 60_000 };
    client.end(vec![ClaimEnd { id: request("o").id, token: grant.token, ending }]).await.unwrap();
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
    assert_eq!(client.waiting(), 0);
}
