//! Any endpoint with the API of SQS as a sink: SendMessageBatch in JSON, signed with Signature Version 4.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::outbox::{OutboxMessage, PublishAnswer, Publisher, SinkDedup, SinkDescription};
use http::{Request, Uri};
use http_body_util::Full;
use ring::hmac;
use serde::Deserialize;
use serde_json::{Value, json};

use super::http_client::{Http, NoResponse, excerpt};
use super::{SinkError, hex, sha256_hex, waves};

const BATCH_MAX: usize = 10;
/// Requests at the same time.
const CALLS_MAX: usize = 4;
/// Attributes that SQS takes.
const ATTRIBUTES_MAX: usize = 10;
/// Bytes of a request's messages.
const BYTES_MAX: usize = 1024 * 1024;
const TIMEOUT: Duration = Duration::from_secs(20);
/// SQS forgets deduplication ids after 5 minutes.
const DEDUP_MS: u64 = 5 * 60 * 1000;

/// Credentials and region of an SQS endpoint.
#[derive(Clone)]
pub struct SqsKey {
    /// The access key id.
    pub id: String,
    /// The secret access key.
    pub secret: String,
    /// The token of temporary credentials.
    pub session_token: Option<String>,
    /// The region, for example `eu-central-1`.
    pub region: String,
}

impl fmt::Debug for SqsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqsKey {{ id: {:?}, region: {:?}, .. }}", self.id, self.region)
    }
}

/// A queue of an SQS endpoint.
pub struct SqsSink {
    http: Http,
    endpoint: Uri,
    queue_url: String,
    is_fifo: bool,
    key: SqsKey,
}

impl SqsSink {
    /// A queue by its URL, `https://HOST/ACCOUNT/QUEUE`.
    pub fn new(queue_url: &str, key: SqsKey) -> Result<Self, SinkError> {
        let uri: Uri = queue_url.parse().map_err(|error| SinkError(format!("the queue's URL: {error}")))?;
        let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(SinkError("the queue's URL is not http(s)://HOST/ACCOUNT/QUEUE".to_owned()));
        };
        if uri.path().trim_matches('/').is_empty() {
            return Err(SinkError("the queue's URL has no queue: http(s)://HOST/ACCOUNT/QUEUE".to_owned()));
        }
        let endpoint: Uri = format!("{scheme}://{authority}/")
            .parse()
            .map_err(|_| SinkError("the queue's URL".to_owned()))?;
        let http = Http::new(&endpoint, TIMEOUT)?;
        Ok(Self {
            http,
            endpoint,
            is_fifo: uri.path().rsplit_once('.').is_some_and(|(_, kind)| kind == "fifo"),
            queue_url: queue_url.to_owned(),
            key,
        })
    }

    fn entry(&self, id: usize, message: &OutboxMessage) -> Result<Value, String> {
        let body = std::str::from_utf8(&message.body)
            .map_err(|_| "SQS takes only text, and the body is not UTF-8")?;
        if body.is_empty() {
            return Err("SQS takes no empty body".to_owned());
        }
        let mut attributes: BTreeMap<&str, &str> =
            message.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        attributes.insert("hapax-topic", &message.topic);
        attributes.entry("hapax-idempotency-key").or_insert(&message.id);
        if attributes.len() > ATTRIBUTES_MAX {
            return Err(format!(
                "SQS takes {ATTRIBUTES_MAX} attributes, and the message has {}",
                attributes.len()
            ));
        }
        let attributes: serde_json::Map<String, Value> = attributes
            .into_iter()
            .map(|(name, value)| (name.to_owned(), json!({ "DataType": "String", "StringValue": value })))
            .collect();
        let mut entry = json!({ "Id": id.to_string(), "MessageBody": body, "MessageAttributes": attributes });
        if self.is_fifo {
            entry["MessageDeduplicationId"] = json!(message.id);
            entry["MessageGroupId"] = json!(group(message));
        }
        Ok(entry)
    }

    async fn send(&self, entries: &[Value]) -> Result<BatchAnswer, PublishAnswer> {
        let body = json!({ "QueueUrl": self.queue_url, "Entries": entries }).to_string();
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let request = self.request(body, now_s).map_err(PublishAnswer::Unavailable)?;
        let (status, body) = self.http.send(request).await.map_err(|error| match error {
            NoResponse::Unreachable(why) | NoResponse::Lost(why) => PublishAnswer::Unavailable(why),
        })?;
        if !status.is_success() {
            let answer = format!("SQS answered {status}: {}", excerpt(&body));
            let is_refusal = status == http::StatusCode::PAYLOAD_TOO_LARGE || is_refusal(&body);
            return Err(if is_refusal {
                PublishAnswer::Refused(answer)
            } else {
                PublishAnswer::Unavailable(answer)
            });
        }
        serde_json::from_slice(&body)
            .map_err(|error| PublishAnswer::Unavailable(format!("the answer of SQS cannot be read: {error}")))
    }

    /// Sends entries of different keys, and judges each.
    async fn send_entries(&self, entries: &[(usize, Value)]) -> Vec<PublishAnswer> {
        let values: Vec<Value> = entries.iter().map(|(_, entry)| entry.clone()).collect();
        let answer = match self.send(&values).await {
            Ok(answer) => answer,
            Err(answer) => return vec![answer; entries.len()],
        };
        let judge = |(index, _): &(usize, Value)| {
            let of = |entry: &&EntryAnswer| entry.id == index.to_string();
            if answer.successful.iter().any(|entry| of(&entry)) {
                return PublishAnswer::Published;
            }
            match answer.failed.iter().find(of) {
                Some(entry) if entry.sender_fault => {
                    PublishAnswer::Refused(format!("{}: {}", entry.code, entry.message))
                }
                Some(entry) => PublishAnswer::Failed(format!("{}: {}", entry.code, entry.message)),
                None => PublishAnswer::Failed("SQS did not answer for it".to_owned()),
            }
        };
        entries.iter().map(judge).collect()
    }

    fn request(&self, body: String, now_s: u64) -> Result<Request<Full<Bytes>>, String> {
        let host = self.endpoint.authority().map(ToString::to_string).unwrap_or_default();
        let (date, time) = date_and_time(now_s);
        let mut headers = BTreeMap::from([
            ("content-type", "application/x-amz-json-1.0".to_owned()),
            ("host", host),
            ("x-amz-date", time.clone()),
            ("x-amz-target", "AmazonSQS.SendMessageBatch".to_owned()),
        ]);
        if let Some(token) = &self.key.session_token {
            headers.insert("x-amz-security-token", token.clone());
        }
        let authorization = self.authorization(&headers, &body, &date, &time);
        let mut request = Request::post(self.endpoint.clone()).header("authorization", authorization);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())
    }

    fn authorization(&self, headers: &BTreeMap<&str, String>, body: &str, date: &str, time: &str) -> String {
        let signed = headers.keys().copied().collect::<Vec<_>>().join(";");
        let lines: Vec<String> = headers
            .iter()
            .map(|(name, value)| {
                format!(
                    "{name}:{value}
"
                )
            })
            .collect();
        let lines = lines.concat();
        let canonical = format!("POST\n/\n\n{lines}\n{signed}\n{}", sha256_hex(body.as_bytes()));
        let scope = format!("{date}/{}/sqs/aws4_request", self.key.region);
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256_hex(canonical.as_bytes()));
        let start = format!("AWS4{}", self.key.secret).into_bytes();
        let key =
            [date, &self.key.region, "sqs", "aws4_request"].iter().fold(start, |key, part| mac(&key, part));
        let signature = hex(&mac(&key, &text));
        format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={signed}, Signature={signature}",
            self.key.id
        )
    }
}

/// Whether an error is about the content of a request. Every other one is about the queue, the key or the moment, and holds
/// for all messages.
fn is_refusal(body: &[u8]) -> bool {
    const CONTENT: [&str; 9] = [
        "BatchRequestTooLong",
        "InvalidAttributeValue",
        "InvalidBatchEntryId",
        "InvalidMessageContents",
        "InvalidParameterCombination",
        "InvalidParameterValue",
        "MessageTooLong",
        "RequestTooLarge",
        "ValidationException",
    ];
    let error: Value = serde_json::from_slice(body).unwrap_or_default();
    let kind = error["__type"].as_str().unwrap_or_default();
    let kind = kind.rsplit(['#', '.']).next().unwrap_or_default();
    CONTENT.contains(&kind)
}

/// What counts towards the limit of a request.
fn entry_bytes(entry: &Value) -> usize {
    let text = |value: &Value| value.as_str().map_or(0, str::len);
    let attributes = entry["MessageAttributes"].as_object().into_iter().flatten();
    let attributes =
        attributes.map(|(name, value)| name.len() + text(&value["DataType"]) + text(&value["StringValue"]));
    text(&entry["MessageBody"]) + attributes.sum::<usize>()
}

/// The group of a message; SQS takes 128 visible ASCII characters.
fn group(message: &OutboxMessage) -> String {
    match &message.key {
        None => message.id.clone(),
        Some(key) if key.len() <= 128 && key.bytes().all(|byte| byte.is_ascii_graphic()) => key.clone(),
        Some(key) => sha256_hex(key.as_bytes()),
    }
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
}

/// `20150830` and `20150830T123600Z`.
fn date_and_time(now_s: u64) -> (String, String) {
    let (days, second) = ((now_s / 86_400) as i64, now_s % 86_400);
    // Days since 0000-03-01, so that a leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let date = format!("{year:04}{month:02}{day:02}");
    let time = format!("{date}T{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60);
    (date, time)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BatchAnswer {
    #[serde(default)]
    successful: Vec<EntryAnswer>,
    #[serde(default)]
    failed: Vec<EntryAnswer>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct EntryAnswer {
    id: String,
    #[serde(default)]
    sender_fault: bool,
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

#[async_trait]
impl Publisher for SqsSink {
    fn describe(&self) -> SinkDescription {
        let (dedup, warning) = if self.is_fifo {
            let warning = "SQS remembers messages for 5 minutes: a relay that is down for longer may repeat what it published last";
            (SinkDedup::Window { window_ms: DEDUP_MS }, warning)
        } else {
            (
                SinkDedup::None,
                "a standard queue of SQS does not recognise repeated messages, and keeps no order: use a FIFO queue, or let consumers recognise the attribute hapax-idempotency-key",
            )
        };
        SinkDescription {
            name: format!("SQS queue {}", self.queue_url),
            dedup,
            delays: false,
            batch_max: BATCH_MAX * 10,
            calls_max: CALLS_MAX,
            warnings: vec![warning.to_owned()],
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let mut answers = vec![PublishAnswer::NotTried; batch.len()];
        let mut blocked = std::collections::HashSet::new();
        for wave in waves(batch, BATCH_MAX) {
            let mut entries = Vec::new();
            let mut bytes = 0;
            for index in wave {
                let message = &batch[index];
                if message.ordered_key().is_some_and(|key| blocked.contains(key)) {
                    continue;
                }
                match self.entry(index, message) {
                    Ok(entry) if entries.is_empty() || bytes + entry_bytes(&entry) <= BYTES_MAX => {
                        bytes += entry_bytes(&entry);
                        entries.push((index, entry));
                    }
                    // It has no room in this request.
                    Ok(_) => blocked.extend(message.ordered_key()),
                    Err(problem) => {
                        answers[index] = PublishAnswer::Refused(problem);
                        blocked.extend(message.ordered_key());
                    }
                }
            }
            if entries.is_empty() {
                continue;
            }
            let mut judged = self.send_entries(&entries).await;
            if entries.len() > 1 && judged.iter().any(|answer| matches!(answer, PublishAnswer::Refused(_))) {
                // One of them may be the reason that all were refused.
                for (entry, answer) in entries.iter().zip(&mut judged) {
                    if matches!(answer, PublishAnswer::Refused(_)) {
                        *answer = self.send_entries(std::slice::from_ref(entry)).await.remove(0);
                    }
                }
            }
            let is_down = judged.iter().any(|answer| matches!(answer, PublishAnswer::Unavailable(_)));
            for ((index, _), answer) in entries.into_iter().zip(judged) {
                if answer != PublishAnswer::Published {
                    blocked.extend(batch[index].ordered_key());
                }
                answers[index] = answer;
            }
            if is_down {
                break;
            }
        }
        answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_about_the_content_park_a_message() {
        for (body, refused) in [
            (r#"{"__type":"com.amazonaws.sqs#BatchRequestTooLong","message":"m"}"#, true),
            (r#"{"__type":"com.amazonaws.sqs#InvalidMessageContents"}"#, true),
            (r#"{"__type":"com.amazonaws.sqs#QueueDoesNotExist"}"#, false),
            (r#"{"__type":"com.amazon.coral.service#AccessDeniedException"}"#, false),
            (r#"{"__type":"RequestThrottled"}"#, false),
            ("<html>", false),
        ] {
            assert_eq!(is_refusal(body.as_bytes()), refused, "{body}");
        }
    }

    #[test]
    fn times_are_written_as_aws_wants_them() {
        for (now_s, time) in [
            (0, "19700101T000000Z"),
            (1_440_938_160, "20150830T123600Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(date_and_time(now_s).1, time);
        }
    }
}
