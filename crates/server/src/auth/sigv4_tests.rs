use http::Request;

use super::*;
use crate::config::{KeyConfig, Secret};

const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
/// 20150830T123600Z
const NOW_S: u64 = 1_440_938_160;

fn key(secret: &str) -> Key {
    let all = vec!["*".to_owned()];
    Key::load(&KeyConfig {
        id: "AKIDEXAMPLE".into(),
        secret: Some(Secret::new(secret)),
        secret_file: None,
        secret_env: None,
        queues: all.clone(),
        actions: all,
    })
    .unwrap()
}

struct Case {
    request: Request<&'static [u8]>,
    service: &'static str,
}

impl Case {
    fn verify(&self, secret: &str, now_s: u64) -> Result<(), AuthError> {
        let signed = SignedRequest {
            method: self.request.method(),
            uri: self.request.uri(),
            headers: self.request.headers(),
            body: self.request.body(),
        };
        StatedSignature::read(&signed)?.verify(&signed, &key(secret), self.service, now_s)
    }
}

/// `get-vanilla` of AWS's Signature Version 4 test suite.
fn get_vanilla() -> Case {
    let request = Request::get("/")
        .header("host", "example.amazonaws.com")
        .header("x-amz-date", "20150830T123600Z")
        .header(
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
             SignedHeaders=host;x-amz-date, \
             Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        );
    Case { request: request.body(&b""[..]).unwrap(), service: "service" }
}

/// The worked example of the AWS General Reference: IAM `ListUsers`.
fn list_users() -> Case {
    let request = Request::get("/?Action=ListUsers&Version=2010-05-08")
        .header("content-type", "application/x-www-form-urlencoded; charset=utf-8")
        .header("host", "iam.amazonaws.com")
        .header("x-amz-date", "20150830T123600Z")
        .header(
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date, \
             Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
        );
    Case { request: request.body(&b""[..]).unwrap(), service: "iam" }
}

/// Signed by botocore 1.43: a path and a query that need encoding, and a body.
fn botocore_post(body: &'static [u8]) -> Case {
    let request = Request::post("/000000000000/q%20x?b=2&a=%C3%A4%20z")
        .header("host", "localhost:9324")
        .header("content-type", "application/x-amz-json-1.0")
        .header("x-amz-target", "AmazonSQS.SendMessage")
        .header("x-amz-date", "20150830T123600Z")
        .header(
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/eu-west-1/sqs/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date;x-amz-target, \
             Signature=4aeae896f861ed7b0aaefdc44e5842eac6402fb96a706a10f706b2b251324b4f",
        );
    Case { request: request.body(body).unwrap(), service: "sqs" }
}

/// Presigned by botocore 1.43 for 600 seconds.
fn botocore_presigned() -> Case {
    let request = Request::get(
        "/000000000000/q?Action=ReceiveMessage&Version=2012-11-05&X-Amz-Algorithm=AWS4-HMAC-SHA256\
         &X-Amz-Credential=AKIDEXAMPLE%2F20150830%2Fus-east-1%2Fsqs%2Faws4_request&X-Amz-Date=20150830T123600Z\
         &X-Amz-Expires=600&X-Amz-SignedHeaders=host\
         &X-Amz-Signature=7514ad84dda9eb050c4a8628b471bc435bf9e67cc83e70a5287a33a7628e6677",
    )
    .header("host", "localhost:9324");
    Case { request: request.body(&b""[..]).unwrap(), service: "sqs" }
}

#[test]
fn published_and_recorded_signatures_verify() {
    get_vanilla().verify(SECRET, NOW_S).unwrap();
    list_users().verify(SECRET, NOW_S).unwrap();
    botocore_post(b"{\"MessageBody\":\"hi\"}").verify(SECRET, NOW_S).unwrap();
    botocore_presigned().verify(SECRET, NOW_S + 599).unwrap();
}

#[test]
fn a_changed_request_does_not_verify() {
    assert_eq!(get_vanilla().verify("wrong", NOW_S), Err(AuthError::Mismatch));
    assert_eq!(botocore_post(b"{\"MessageBody\":\"ho\"}").verify(SECRET, NOW_S), Err(AuthError::Mismatch));
    let mut other = list_users();
    *other.request.uri_mut() = "/?Action=DeleteUser&Version=2010-05-08".parse().unwrap();
    assert_eq!(other.verify(SECRET, NOW_S), Err(AuthError::Mismatch));
    let mut other = get_vanilla();
    other.request.headers_mut().insert("host", "evil.example".parse().unwrap());
    assert_eq!(other.verify(SECRET, NOW_S), Err(AuthError::Mismatch));
}

#[test]
fn an_unsigned_target_cannot_make_another_action_of_a_signed_request() {
    let mut other = botocore_presigned();
    other.request.headers_mut().insert("x-amz-target", "AmazonSQS.PurgeQueue".parse().unwrap());
    assert!(matches!(other.verify(SECRET, NOW_S), Err(AuthError::Incomplete(_))));
}

#[test]
fn the_clock_may_be_off_by_a_quarter_of_an_hour() {
    get_vanilla().verify(SECRET, NOW_S + 900).unwrap();
    get_vanilla().verify(SECRET, NOW_S - 900).unwrap();
    for now_s in [NOW_S + 901, NOW_S - 901] {
        assert!(matches!(get_vanilla().verify(SECRET, now_s), Err(AuthError::Expired(_))));
    }
    assert!(matches!(botocore_presigned().verify(SECRET, NOW_S + 601), Err(AuthError::Expired(_))));
}

#[test]
fn an_unreadable_claim_is_incomplete() {
    for value in [
        "AWS4-HMAC-SHA256",
        "AWS4-HMAC-SHA256 Credential=a/b",
        "Basic abc",
        "AWS4-HMAC-SHA256 Credential=a, Signature=b, SignedHeaders=host",
    ] {
        let mut case = get_vanilla();
        case.request.headers_mut().insert("authorization", value.parse().unwrap());
        assert!(matches!(case.verify(SECRET, NOW_S), Err(AuthError::Incomplete(_))), "{value}");
    }
    let mut case = get_vanilla();
    case.request.headers_mut().remove("authorization");
    assert_eq!(case.verify(SECRET, NOW_S), Err(AuthError::Missing));
    let wrong_service = Case { service: "sqs", ..get_vanilla() };
    assert!(matches!(wrong_service.verify(SECRET, NOW_S), Err(AuthError::Incomplete(_))));
}

#[test]
fn dates_round_trip() {
    for date in ["20150830T123600Z", "19700101T000000Z", "20240229T235959Z", "21000301T000000Z"] {
        assert_eq!(format_date(parse_date(date).unwrap()), date);
    }
    for bad in ["", "20150830", "20151330T123600Z", "2015083XT123600Z", "20150830T123600+"] {
        assert_eq!(parse_date(bad), None, "{bad}");
    }
}
