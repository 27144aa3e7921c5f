//! A stream of NATS JetStream as a sink.
//!
//! The protocol is lines of text, and only publishing with an acknowledgement is needed, so there is no client library. A message's
//! id is its `Nats-Msg-Id`, by which the server recognises it within the stream's duplicate window.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::outbox::{OutboxMessage, PublishAnswer, Publisher, SinkDedup, SinkDescription};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::{SinkError, waves};

const PORT_DEFAULT: u16 = 4222;
const TIMEOUT: Duration = Duration::from_secs(10);
const BATCH_MAX: usize = 100;
/// Subjects of which is remembered that a stream takes them.
const SUBJECTS_MAX: usize = 10_000;
/// Maximum bytes of a line or a message that is read.
const READ_MAX: usize = 1024 * 1024;

/// Streams of a NATS server. The subject of a message is its topic, behind a prefix if there is one.
pub struct NatsSink {
    address: String,
    prefix: String,
    credentials: Option<(String, String)>,
    window_ms: u64,
    connection: Mutex<Option<Connection>>,
    /// Subjects that a stream takes.
    taken: std::sync::Mutex<HashSet<String>>,
}

impl NatsSink {
    /// A server by its URL, `nats://[USER:PASSWORD@]HOST[:PORT][/PREFIX]`. It must have a stream.
    pub async fn open(url: &str) -> Result<Self, SinkError> {
        let wrong = || SinkError("the URL is not nats://HOST:PORT/PREFIX".to_owned());
        let rest = url.strip_prefix("nats://").ok_or_else(wrong)?;
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, host) =
            authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        let credentials = user.map(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            (name.to_owned(), password.to_owned())
        });
        if host.is_empty() || !(prefix.is_empty() || is_subject(prefix)) {
            return Err(wrong());
        }
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if has_port { host.to_owned() } else { format!("{host}:{PORT_DEFAULT}") };
        let prefix = prefix.to_owned();
        let (connection, taken) = Default::default();
        let mut sink = Self { address, prefix, credentials, window_ms: 0, connection, taken };
        sink.window_ms = sink.duplicate_window_ms().await?;
        Ok(sink)
    }

    /// The shortest duplicate window of its streams.
    async fn duplicate_window_ms(&self) -> Result<u64, SinkError> {
        let failed = |why: String| SinkError(format!("NATS at {}: {why}", self.address));
        let answer = self.request("$JS.API.STREAM.LIST", b"{}").await.map_err(failed)?;
        let list: Value = serde_json::from_slice(&answer).map_err(|error| failed(error.to_string()))?;
        let windows = list["streams"].as_array().into_iter().flatten();
        let windows = windows.filter_map(|stream| stream["config"]["duplicate_window"].as_u64());
        windows
            .min()
            .map(|ns| ns / 1_000_000)
            .ok_or_else(|| failed("JetStream has no stream; add one first".to_owned()))
    }

    /// Sends a request to the server and waits for its answer, for example to its own API.
    pub async fn request(&self, subject: &str, body: &[u8]) -> Result<Bytes, String> {
        let mut guard = self.connection.lock().await;
        let exchange = async {
            let connection = self.connected(&mut guard).await?;
            let reply = connection.publish(subject, "NATS/1.0\r\n\r\n", body).await?;
            let mut answers = connection.answers(&[reply]).await?;
            answers.remove(&reply).ok_or_else(|| "no answer".to_owned())?
        };
        let done = tokio::time::timeout(TIMEOUT, exchange)
            .await
            .unwrap_or_else(|_| Err("no answer in time".to_owned()));
        if done.is_err() {
            *guard = None;
        }
        done
    }

    async fn connected<'c>(
        &self,
        connection: &'c mut Option<Connection>,
    ) -> Result<&'c mut Connection, String> {
        match connection {
            Some(connection) => Ok(connection),
            None => Ok(connection.insert(Connection::open(&self.address, self.credentials.as_ref()).await?)),
        }
    }

    /// Subject and headers of a message, if NATS takes such ones.
    fn envelope(&self, message: &OutboxMessage) -> Result<(String, String), String> {
        if !is_subject(&message.topic) {
            return Err(format!("the topic {:?} is not a subject of NATS", message.topic));
        }
        let dot = if self.prefix.is_empty() { "" } else { "." };
        Ok((format!("{}{dot}{}", self.prefix, message.topic), head(message)?))
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether a stream takes a subject. The server does not say so when it is published to: without a stream there is no
    /// answer at all if someone else listens, and the same answer as from a JetStream that is not ready if not.
    async fn is_taken(&self, subject: &str) -> Result<bool, String> {
        if self.taken().contains(subject) {
            return Ok(true);
        }
        let answer = self
            .request("$JS.API.STREAM.NAMES", json!({ "subject": subject }).to_string().as_bytes())
            .await?;
        let list: Value = serde_json::from_slice(&answer).map_err(|error| error.to_string())?;
        if let Some(error) = list.get("error") {
            return Err(format!("JetStream: {}", error["description"].as_str().unwrap_or_default()));
        }
        let is_taken = list["streams"].as_array().is_some_and(|streams| !streams.is_empty());
        if is_taken {
            let mut taken = self.taken();
            if taken.len() >= SUBJECTS_MAX {
                taken.clear();
            }
            taken.insert(subject.to_owned());
        }
        Ok(is_taken)
    }

    /// Why the sink will never accept a message, if it will not.
    async fn refusal(
        &self,
        message: &OutboxMessage,
        subject: &str,
        head: &str,
    ) -> Result<Option<String>, String> {
        if !self.is_taken(subject).await? {
            return Ok(Some(format!("no stream takes the subject {subject}")));
        }
        let mut guard = self.connection.lock().await;
        let bytes_max = self.connected(&mut guard).await?.bytes_max;
        let bytes = head.len() + message.body.len();
        let told = || format!("NATS takes {bytes_max} bytes, and body and headers have {bytes}");
        Ok((bytes > bytes_max).then(told))
    }

    /// Publishes messages of different keys, and waits for the acknowledgements.
    async fn publish_wave(&self, wave: &[Outgoing<'_>]) -> Result<Vec<(usize, PublishAnswer)>, String> {
        let mut guard = self.connection.lock().await;
        let exchange = async {
            let connection = self.connected(&mut guard).await?;
            let mut replies = Vec::new();
            for one in wave {
                replies.push(connection.publish(&one.subject, &one.head, &one.message.body).await?);
            }
            let mut answers = connection.answers(&replies).await?;
            let judged = wave.iter().zip(&replies).map(|(one, reply)| {
                let answer = answers.remove(reply).unwrap_or_else(|| Err("no answer".to_owned()));
                (one.index, judge(answer))
            });
            Ok(judged.collect::<Vec<_>>())
        };
        let done = tokio::time::timeout(TIMEOUT, exchange)
            .await
            .unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let is_down = |answer: &PublishAnswer| matches!(answer, PublishAnswer::Unavailable(_));
        if done.as_ref().map_or(true, |judged| judged.iter().any(|(_, answer)| is_down(answer))) {
            // A stream may have been deleted.
            self.taken().clear();
        }
        if done.is_err() {
            *guard = None;
        }
        done
    }
}

/// A message on its way.
struct Outgoing<'m> {
    index: usize,
    subject: String,
    head: String,
    message: &'m OutboxMessage,
}

/// The headers of a message as NATS reads them. Those that mean something to JetStream are the sink's own.
fn head(message: &OutboxMessage) -> Result<String, String> {
    let mut headers: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, value) in &message.headers {
        let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
        if !is_name || value.chars().any(char::is_control) {
            return Err(format!("{name:?} with the value {value:?} is not a header of NATS"));
        }
        if !name.to_ascii_lowercase().starts_with("nats-") {
            headers.insert(name, value);
        }
    }
    headers.insert("Nats-Msg-Id", &message.id);
    if let Some(key) = &message.key {
        headers.insert("Hapax-Key", key);
    }
    let mut head = "NATS/1.0\r\n".to_owned();
    for (name, value) in headers {
        // Writing to a string cannot fail.
        let _ = write!(head, "{name}: {value}\r\n");
    }
    head.push_str("\r\n");
    Ok(head)
}

fn is_subject(text: &str) -> bool {
    let is_token = |token: &str| {
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic() && !b"*>".contains(&byte))
    };
    text.split('.').all(is_token)
}

#[derive(Deserialize)]
struct Ack {
    #[serde(default)]
    duplicate: bool,
    error: Option<AckError>,
}

#[derive(Deserialize)]
struct AckError {
    code: u16,
    #[serde(default)]
    description: String,
}

fn judge(answer: Result<Bytes, String>) -> PublishAnswer {
    let ack = match answer.map(|body| serde_json::from_slice::<Ack>(&body)) {
        Ok(Ok(ack)) => ack,
        Ok(Err(error)) => {
            return PublishAnswer::Failed(format!("the acknowledgement cannot be read: {error}"));
        }
        Err(why) => return PublishAnswer::Unavailable(why),
    };
    match ack.error {
        None if ack.duplicate => PublishAnswer::Duplicate,
        None => PublishAnswer::Published,
        Some(error) if error.code == 400 => PublishAnswer::Refused(error.description),
        Some(error) => PublishAnswer::Unavailable(format!("{}: {}", error.code, error.description)),
    }
}

#[async_trait]
impl Publisher for NatsSink {
    fn describe(&self) -> SinkDescription {
        let warnings = vec![
            "JetStream confirms before a message is on disk, unless its configuration has `sync_interval: always`: a power \
             cut can lose the last messages"
                .to_owned(),
            format!(
                "JetStream remembers messages for {} s: a relay that is down for longer may repeat what it published last",
                self.window_ms / 1000
            ),
        ];
        SinkDescription {
            name: format!("NATS JetStream {}", self.address),
            dedup: SinkDedup::Window { window_ms: self.window_ms },
            delays: false,
            batch_max: BATCH_MAX,
            calls_max: 1,
            warnings,
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let mut answers = vec![PublishAnswer::NotTried; batch.len()];
        let mut blocked = std::collections::HashSet::new();
        for wave in waves(batch, BATCH_MAX) {
            let mut open = Vec::new();
            for index in wave {
                let message = &batch[index];
                if message.ordered_key().is_some_and(|key| blocked.contains(key)) {
                    continue;
                }
                let refused = match self.envelope(message) {
                    Err(problem) => Ok(Some(problem)),
                    Ok((subject, head)) => {
                        let refusal = self.refusal(message, &subject, &head).await;
                        open.push(Outgoing { index, subject, head, message });
                        refusal
                    }
                };
                match refused {
                    Ok(None) => {}
                    Ok(Some(problem)) => {
                        open.retain(|one| one.index != index);
                        answers[index] = PublishAnswer::Refused(problem);
                        blocked.extend(message.ordered_key());
                    }
                    Err(why) => {
                        // What is before it was not sent either.
                        answers[index] = PublishAnswer::Unavailable(why);
                        return answers;
                    }
                }
            }
            match self.publish_wave(&open).await {
                Ok(judged) => {
                    for (index, answer) in judged {
                        if !matches!(answer, PublishAnswer::Published | PublishAnswer::Duplicate) {
                            blocked.extend(batch[index].ordered_key());
                        }
                        answers[index] = answer;
                    }
                }
                Err(why) => {
                    for one in open {
                        answers[one.index] = PublishAnswer::Unavailable(why.clone());
                    }
                    break;
                }
            }
        }
        answers
    }
}

/// A connection on which answers come to an inbox of its own.
struct Connection {
    stream: BufReader<TcpStream>,
    inbox: String,
    next: u64,
    /// Maximum bytes of body and headers of a message.
    bytes_max: usize,
}

impl Connection {
    async fn open(address: &str, credentials: Option<&(String, String)>) -> Result<Self, String> {
        let stream = TcpStream::connect(address).await.map_err(|error| format!("{address}: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let inbox = format!("_INBOX.{:016x}", fastrand::u64(..));
        let mut connection = Self { stream: BufReader::new(stream), inbox, next: 0, bytes_max: usize::MAX };
        let info = connection.line().await?;
        let info: Value =
            serde_json::from_str(info.strip_prefix("INFO ").ok_or("this is not a NATS server")?)
                .map_err(|error| format!("this is not a NATS server: {error}"))?;
        if let Some(bytes_max) = info["max_payload"].as_u64() {
            connection.bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        }
        if info["tls_required"] == true {
            return Err("the server wants TLS, which this sink does not speak".to_owned());
        }
        let mut options = json!({
            "verbose": false, "pedantic": false, "headers": true, "no_responders": true, "lang": "hapax", "version": "1", "name": "hapax-relay",
        });
        if let Some((user, password)) = credentials {
            options["user"] = json!(user);
            options["pass"] = json!(password);
        }
        let hello = format!("CONNECT {options}\r\nSUB {}.* 1\r\nPING\r\n", connection.inbox);
        connection.write(hello.as_bytes()).await?;
        loop {
            let line = connection.line().await?;
            match line.as_str() {
                "PONG" => return Ok(connection),
                "PING" => connection.write(b"PONG\r\n").await?,
                line if line.starts_with("-ERR") => return Err(format!("the server refused: {line}")),
                _ => {}
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.stream.get_mut().write_all(bytes).await.map_err(|error| error.to_string())
    }

    async fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let mut limited = (&mut self.stream).take(READ_MAX as u64);
        let read = limited.read_line(&mut line).await.map_err(|error| error.to_string())?;
        if read == 0 || !line.ends_with('\n') {
            return Err("the server has closed the connection".to_owned());
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }

    /// Publishes; returns the number under which the answer comes.
    async fn publish(&mut self, subject: &str, head: &str, body: &[u8]) -> Result<u64, String> {
        self.next += 1;
        let (length, total) = (head.len(), head.len() + body.len());
        let line = format!("HPUB {subject} {}.{} {length} {total}\r\n", self.inbox, self.next);
        self.write(&[line.as_bytes(), head.as_bytes(), body, b"\r\n"].concat()).await?;
        Ok(self.next)
    }

    /// Waits for the answers under these numbers.
    async fn answers(&mut self, numbers: &[u64]) -> Result<HashMap<u64, Result<Bytes, String>>, String> {
        let mut found = HashMap::new();
        while !numbers.iter().all(|number| found.contains_key(number)) {
            let line = self.line().await?;
            let words: Vec<&str> = line.split_whitespace().collect();
            let (subject, head, total) = match words[..] {
                ["PING"] => {
                    self.write(b"PONG\r\n").await?;
                    continue;
                }
                ["MSG", subject, _, total] => (subject, 0, total.parse().ok()),
                ["HMSG", subject, _, head, total] => (subject, head.parse().unwrap_or(0), total.parse().ok()),
                ["-ERR", ..] => return Err(format!("the server refused: {line}")),
                _ => continue,
            };
            let total: usize = total.filter(|total| *total <= READ_MAX).ok_or("an answer cannot be read")?;
            let mut bytes = vec![0; total + 2];
            self.stream.read_exact(&mut bytes).await.map_err(|error| error.to_string())?;
            let number = subject
                .strip_prefix(&self.inbox)
                .and_then(|rest| rest.strip_prefix('.')?.parse::<u64>().ok());
            let Some(number) = number else { continue };
            let is_unanswered = head > 0 && bytes.starts_with(b"NATS/1.0 503");
            let answer = if is_unanswered {
                Err("no stream takes this subject".to_owned())
            } else {
                Ok(Bytes::copy_from_slice(&bytes[head.min(total)..total]))
            };
            found.insert(number, answer);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements_are_judged() {
        let of = |json: &'static str| judge(Ok(Bytes::from_static(json.as_bytes())));
        assert_eq!(of(r#"{"stream":"S","seq":1}"#), PublishAnswer::Published);
        assert_eq!(of(r#"{"stream":"S","seq":1,"duplicate":true}"#), PublishAnswer::Duplicate);
        assert!(matches!(
            of(r#"{"error":{"code":400,"description":"too large"}}"#),
            PublishAnswer::Refused(_)
        ));
        assert!(matches!(
            of(r#"{"error":{"code":503,"description":"full"}}"#),
            PublishAnswer::Unavailable(_)
        ));
        assert!(matches!(of("?"), PublishAnswer::Failed(_)));
        assert!(matches!(judge(Err("gone".into())), PublishAnswer::Unavailable(_)));
    }

    #[test]
    fn a_message_cannot_change_what_jetstream_reads() {
        let mut message = super::super::sample(7, Some("käse"));
        for (name, value) in [("tenant", "north"), ("nats-msg-id", "x"), ("Nats-Rollup", "all")] {
            message.headers.insert(name.into(), value.into());
        }
        let written = head(&message).unwrap();
        let id = &message.id;
        assert_eq!(
            written,
            format!("NATS/1.0\r\nHapax-Key: käse\r\nNats-Msg-Id: {id}\r\ntenant: north\r\n\r\n")
        );
        for (name, value) in [("a\r\nb", "x"), ("a:b", "x"), ("", "x"), ("a", "x\r\nNats-Rollup: all")] {
            let mut message = super::super::sample(7, None);
            message.headers.insert(name.into(), value.into());
            assert!(head(&message).is_err(), "{name:?} {value:?}");
        }
    }

    #[test]
    fn only_subjects_are_published() {
        for (text, valid) in [
            ("orders.placed", true),
            ("a..b", false),
            ("a b", false),
            ("a.*", false),
            (">", false),
            ("", false),
        ] {
            assert_eq!(is_subject(text), valid, "{text}");
        }
    }
}
