//! A scope with too many keys in doubt refuses new ones over HTTP as it does in process: the same error at the other end, a
//! retryable answer for other languages, and a warning before.

mod support;

use hapax_client::Client;
use hapax_core::{Claim, ClaimError, ClaimRequest, EntryId, Ledger as _, OnDoubt, QueueAdmin as _};
use hapax_embedded::Options;
use hapax_server::ServerConfig;
use serde_json::json;
use support::Api;

fn request(scope: &str, key: &str) -> ClaimRequest {
    let id = EntryId::new(scope.parse().unwrap(), key.parse().unwrap());
    ClaimRequest { on_doubt: OnDoubt::Park, ..ClaimRequest::new(id, "ann".parse().unwrap(), 1_000) }
}

#[tokio::test]
async fn the_bound_is_told_and_other_scopes_go_on() {
    let options = Options { in_doubt_per_scope_max: 2, ..Options::default() };
    let api = Api::start_over(options, ServerConfig::default()).await;
    let client = Client::connect(&format!("http://{}", api.address), None).await.unwrap();
    for key in ["a", "b"] {
        let claimed = client.claim(vec![request("charges", key)]).await.unwrap().remove(0);
        assert!(matches!(claimed, Ok(Claim::Granted(_))), "{claimed:?}");
    }
    api.clock.advance_ms(1_000);
    let batch = vec![request("charges", "c"), request("refunds", "c")];
    let answers = client.claim(batch).await.unwrap();
    let scope = "charges".parse().unwrap();
    assert_eq!(answers[0], Err(ClaimError::TooManyInDoubt { scope, open: 2, in_doubt: 2, max: 2 }));
    assert!(matches!(answers[1], Ok(Claim::Granted(_))), "{answers:?}");

    let body = json!({"lease_ms": 1000, "on_doubt": "park"});
    let refused = api.call("PUT", "/v1/claims/charges/c", body).await;
    assert_eq!((refused.status, &refused.json["code"]), (503, &json!("too-many-in-doubt")));
    let told = (&refused.json["scope"], &refused.json["in_doubt"], &refused.json["max"]);
    assert_eq!(told, (&json!("charges"), &json!(2), &json!(2)));
    assert_eq!(refused.json["retryable"], json!(true));
    assert!(refused.header("retry-after").is_some());

    let findings = client.examine().await.unwrap().findings;
    let warned = findings.iter().find(|finding| finding.code == "many-in-doubt").expect("a warning");
    assert!(warned.message.contains("charges (2)"), "{warned:?}");
}
