//! Claims, renewals and endings come in batches with one answer per element: a heartbeat of many claims is one request.

mod support;

use hapax_client::Client;
use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, Fingerprint, Json, Ledger as _,
    RecordedOutcome, Renew, TokenError,
};
use hapax_faults::{Action, FaultProxy, Match, Protocol};
use hapax_server::ServerConfig;
use hapax_server::config::{AuthConfig, KeyConfig, Secret};
use serde_json::json;
use support::Api;

fn id(key: &str) -> EntryId {
    EntryId::new("charges".parse().unwrap(), key.parse().unwrap())
}

fn request(key: &str) -> ClaimRequest {
    ClaimRequest::new(id(key), "ann".parse().unwrap(), 60_000)
}

fn paid(bytes: usize) -> ClaimEnding {
    ClaimEnding::Complete {
        outcome: RecordedOutcome::done(Json::of(&"x".repeat(bytes)).unwrap()),
        ttl_ms: 60_000,
    }
}

#[tokio::test]
async fn a_batch_of_the_client_is_one_request() {
    let api = Api::start().await;
    let between = FaultProxy::start(api.address, Protocol::Http).unwrap();
    let client = Client::connect(&format!("http://{}", between.address()), None).await.unwrap();
    let requests = between.inject(Match::request("/v1/claims"), Action::Delay(std::time::Duration::ZERO));
    let keys: Vec<_> = (0..200).map(|n| format!("k{n}")).collect();

    let claims = client.claim(keys.iter().map(|key| request(key)).collect()).await.unwrap();
    let token = |claim: Result<Claim, ClaimError>| match claim {
        Ok(Claim::Granted(grant)) => grant.token,
        other => panic!("{other:?}"),
    };
    let tokens: Vec<_> = claims.into_iter().map(token).collect();
    assert_eq!(requests.count(), 1, "200 claims");

    let renew = |(key, token): (&String, &hapax_core::Token)| Renew {
        id: id(key),
        token: token.clone(),
        lease_ms: 30_000,
    };
    let renewed = client.renew(keys.iter().zip(&tokens).map(renew).collect()).await.unwrap();
    assert!(renewed.len() == 200 && renewed.iter().all(Result::is_ok));
    assert_eq!(requests.count(), 2, "200 renewals");

    let end = |(key, token): (&String, &hapax_core::Token)| EndClaim {
        id: id(key),
        token: token.clone(),
        ending: paid(10),
    };
    let ended = client.end(keys.iter().zip(&tokens).map(end).collect()).await.unwrap();
    assert_eq!(ended, vec![Ok(()); 200]);
    assert_eq!(requests.count(), 3, "200 completions");
    assert_eq!(client.renew(Vec::new()).await.unwrap(), []);
    assert_eq!(requests.count(), 3, "nothing to ask");
}

#[tokio::test]
async fn each_element_has_its_own_result() {
    let api = Api::start().await;
    let client = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    let held = client.claim(vec![request("held"), request("done"), request("doubt")]).await.unwrap();
    let token = |at: usize| match &held[at] {
        Ok(Claim::Granted(grant)) => grant.token.clone(),
        other => panic!("{other:?}"),
    };
    let end = |key: &str, at: usize, ending| EndClaim { id: id(key), token: token(at), ending };
    let ends = vec![
        end("done", 1, paid(3)),
        end("doubt", 2, ClaimEnding::Doubt),
        end("held", 1, ClaimEnding::Release),
        end("gone", 1, ClaimEnding::Release),
    ];
    let ended = client.end(ends).await.unwrap();
    assert_eq!(ended, [Ok(()), Ok(()), Err(TokenError::Stale), Err(TokenError::Stale)]);
    // An outcome comes back as it was written.
    let spaced = RecordedOutcome::done(Json::parse(r#"{"paid" : 1.10}"#).unwrap());
    let Ok(Claim::Granted(grant)) = client.claim(vec![request("spaced")]).await.unwrap().remove(0) else {
        panic!("it is free")
    };
    let ending = ClaimEnding::Complete { outcome: spaced.clone(), ttl_ms: 60_000 };
    client.end(vec![EndClaim { id: id("spaced"), token: grant.token, ending }]).await.unwrap()[0].unwrap();
    let again = client.claim(vec![request("spaced")]).await.unwrap().remove(0);
    assert!(matches!(&again, Ok(Claim::Completed { outcome, .. }) if *outcome == spaced), "{again:?}");

    let by = |key: &str| ClaimRequest { owner: "bob".parse().unwrap(), ..request(key) };
    let batch = vec![
        by("fresh"),
        by("fresh"),
        ClaimRequest { owner: "eve".parse().unwrap(), ..request("fresh") },
        by("held"),
        by("done"),
        ClaimRequest { on_doubt: hapax_core::OnDoubt::Park, ..by("doubt") },
        ClaimRequest { fingerprint: Some(Fingerprint::new("other").unwrap()), ..by("done") },
        ClaimRequest { lease_ms: 0, ..by("x") },
    ];
    let claims = client.claim(batch).await.unwrap();
    assert!(
        matches!(
            &claims[..],
            [
                Ok(Claim::Granted(first)),
                Ok(Claim::Granted(again)),
                Ok(Claim::InProgress { .. }),
                Ok(Claim::InProgress { .. }),
                Ok(Claim::Completed { .. }),
                Ok(Claim::InDoubt { .. }),
                Err(ClaimError::Mismatch),
                Err(ClaimError::Invalid(_)),
            ] if first.token == again.token
        ),
        "{claims:?}"
    );
}

#[tokio::test]
async fn outcomes_beyond_one_request_are_sent_in_several() {
    let api = Api::start().await;
    let client = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    let keys: Vec<_> = (0..10).map(|n| format!("k{n}")).collect();
    let claims = client.claim(keys.iter().map(|key| request(key)).collect()).await.unwrap();
    let end = |(key, claim): (&String, Result<Claim, ClaimError>)| {
        let Ok(Claim::Granted(grant)) = claim else { panic!("{claim:?}") };
        EndClaim { id: id(key), token: grant.token, ending: paid(1_000_000) }
    };
    let ended = client.end(keys.iter().zip(claims).map(end).collect()).await.unwrap();
    assert_eq!(ended, vec![Ok(()); 10]);
}

/// An element that the key has no right to fails alone.
#[tokio::test]
async fn rights_are_checked_for_each_element() {
    let key = KeyConfig {
        id: "WORKER".into(),
        secret: Some(Secret::new("s")),
        secret_file: None,
        secret_env: None,
        queues: vec!["charges".to_owned()],
        actions: vec!["ClaimKey".to_owned()],
    };
    let auth = AuthConfig { keys: vec![key], ..AuthConfig::default() };
    let api = Api::start_with(ServerConfig { auth, ..ServerConfig::default() }).await;
    let post = async |path: &str, body| api.call_as("POST", path, body, Some("WORKER:s")).await.expect(200);
    let claim = |scope: &str| json!({"scope": scope, "key": "k", "lease_ms": 1000});
    let answer = post("/v1/claims", json!({"claims": [claim("secrets"), claim("charges")]})).await;
    assert_eq!((&answer["failed"], &answer["results"][0]["error"]["code"]), (&json!(1), &json!("forbidden")));
    let token = answer["results"][1]["token"].clone();
    assert!(token.is_string(), "{answer}");
    let renew = |scope: &str| json!({"scope": scope, "key": "k", "token": token, "lease_ms": 1000});
    let answer = post("/v1/claims/renew", json!({"renew": [renew("secrets"), renew("charges")]})).await;
    assert_eq!(answer["results"][0]["error"]["code"], "forbidden");
    assert_eq!(answer["results"][1]["lease_ms"], 1000);
    let end = |scope: &str| json!({"scope": scope, "key": "k", "token": token, "release": true});
    let answer = post("/v1/claims/end", json!({"end": [end("secrets"), end("charges")]})).await;
    assert_eq!(answer["results"][0]["error"]["code"], "forbidden");
    assert_eq!(answer["results"][1]["state"], "absent");
    // Names of paths are keys and scopes like any other.
    let named =
        api.call_as("PUT", "/v1/claims/charges/renew", json!({"lease_ms": 1000}), Some("WORKER:s")).await;
    named.expect(201);
    let many: Vec<_> = (0..1001).map(|_| claim("charges")).collect();
    let refused = api.call_as("POST", "/v1/claims", json!({"claims": many}), Some("WORKER:s")).await;
    assert!(refused.problem(400, "invalid").contains("1001 elements"));
}
