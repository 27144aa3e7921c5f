//! A minimal client: prepared requests, and responses that are searched instead of parsed.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::servers::Server;
use crate::text;

/// The longest wait for a response; only a server that hangs reaches it.
const RESPONSE_MAX: Duration = Duration::from_secs(30);

/// Connections that make queues at the same time, so that they share syncs.
const FILLING: usize = 16;

/// One kind of load.
#[derive(Clone, Copy)]
pub struct Load {
    /// Send, receive and delete if true; otherwise send only.
    pub cycle: bool,
    pub body_bytes: usize,
    /// Messages per request.
    pub batch: usize,
    pub connections: usize,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.cycle { "cycle" } else { "send" };
        write!(f, "{what} {} B x{} {} conns", self.body_bytes, self.batch, self.connections)
    }
}

/// The result of one round.
pub struct Measured {
    pub messages: u64,
    pub time: Duration,
    /// Latency of each request, in microseconds.
    pub latencies_us: Vec<u32>,
    /// CPU time of the server, in microseconds.
    pub cpu_us: u64,
    /// Number of disk syncs, if the server counts them.
    pub synced: Option<u64>,
}

/// Runs a load on its own queue.
pub async fn measure(server: &Server, load: Load, time: Duration) -> Result<Measured, String> {
    let mut control = Connection::open(server).await?;
    let created = control.call("CreateQueue", r#"{"QueueName":"bench"}"#).await?;
    let url = field(&created, "QueueUrl").next().ok_or("CreateQueue answered no URL")?.to_owned();
    let mut workers = Vec::new();
    for _ in 0..load.connections {
        workers.push(Worker::new(Connection::open(server).await?, &url, load));
    }
    let synced_before = control.synced().await;
    let (start, cpu_before) = (Instant::now(), server.cpu_us());
    let end = start + time;
    let tasks: Vec<_> = workers.into_iter().map(|worker| tokio::spawn(worker.run(end))).collect();
    let (mut messages, mut latencies_us) = (0, Vec::new());
    for task in tasks {
        let (done, latencies) = task.await.map_err(text)??;
        messages += done;
        latencies_us.extend(latencies);
    }
    let (time, cpu_us) = (start.elapsed(), server.cpu_us() - cpu_before);
    let synced = control.synced().await.zip(synced_before).map(|(after, before)| after - before);
    control.call("DeleteQueue", &format!(r#"{{"QueueUrl":"{url}"}}"#)).await?;
    Ok(Measured { messages, time, latencies_us, cpu_us, synced })
}

/// Starts long polls on an empty queue, each on its own connection.
pub async fn park(server: &Server, count: usize) -> Result<Vec<TcpStream>, String> {
    let mut control = Connection::open(server).await?;
    let created = control.call("CreateQueue", r#"{"QueueName":"parked"}"#).await?;
    let url = field(&created, "QueueUrl").next().ok_or("CreateQueue answered no URL")?.to_owned();
    let mut polls = Vec::with_capacity(count);
    for _ in 0..count {
        let mut connection = Connection::open(server).await?;
        let body = format!(r#"{{"QueueUrl":"{url}","WaitTimeSeconds":20}}"#);
        let poll = connection.request("ReceiveMessage", &body);
        connection.stream.write_all(&poll).await.map_err(text)?;
        polls.push(connection.stream);
    }
    Ok(polls)
}

/// Creates queues, each with one message that was sent, received and deleted.
pub async fn fill_queues(server: &Server, count: usize) -> Result<(), String> {
    let start = Instant::now();
    let numbers: Vec<usize> = (0..count).collect();
    for together in numbers.chunks(FILLING) {
        let mut fills = Vec::new();
        for number in together {
            fills.push(tokio::spawn(fill_queue(Connection::open(server).await?, *number)));
        }
        for fill in fills {
            fill.await.map_err(text)??;
        }
        let filled = together.last().map_or(0, |last| last + 1);
        if filled / 200 != (filled - together.len()) / 200 || filled == count {
            eprintln!("{filled} of {count} queues after {:.1} s", start.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

async fn fill_queue(mut connection: Connection, number: usize) -> Result<(), String> {
    let name = format!(r#"{{"QueueName":"filled-{number}"}}"#);
    let created = connection.call("CreateQueue", &name).await?;
    let url = field(&created, "QueueUrl").next().ok_or("CreateQueue answered no URL")?.to_owned();
    let load = Load { cycle: true, body_bytes: 16, batch: 1, connections: 1 };
    // The end is reached at once, after one message.
    Worker::new(connection, &url, load).run(Instant::now()).await?;
    Ok(())
}

/// One connection's share of a load.
struct Worker {
    connection: Connection,
    url: String,
    load: Load,
    send: Vec<u8>,
    receive: Vec<u8>,
}

impl Worker {
    fn new(connection: Connection, url: &str, load: Load) -> Self {
        let body = "x".repeat(load.body_bytes);
        let (action, send) = if load.batch == 1 {
            ("SendMessage", format!(r#"{{"QueueUrl":"{url}","MessageBody":"{body}"}}"#))
        } else {
            let entry = |n| format!(r#"{{"Id":"{n}","MessageBody":"{body}"}}"#);
            let entries: Vec<String> = (0..load.batch).map(entry).collect();
            ("SendMessageBatch", format!(r#"{{"QueueUrl":"{url}","Entries":[{}]}}"#, entries.join(",")))
        };
        let receive = format!(r#"{{"QueueUrl":"{url}","MaxNumberOfMessages":{}}}"#, load.batch);
        Self {
            send: connection.request(action, &send),
            receive: connection.request("ReceiveMessage", &receive),
            url: url.to_owned(),
            connection,
            load,
        }
    }

    async fn run(mut self, end: Instant) -> Result<(u64, Vec<u32>), String> {
        let (mut messages, mut latencies_us) = (0, Vec::with_capacity(1 << 14));
        let mut before = Instant::now();
        let mut lap = || {
            let now = Instant::now();
            latencies_us.push((now - before).as_micros() as u32);
            before = now;
            now < end
        };
        let mut going = true;
        while going {
            let sent = self.connection.exchange(&self.send).await?;
            if sent.contains("\"Failed\"") {
                return Err(format!("a send failed: {sent}"));
            }
            going = lap();
            if !self.load.cycle {
                messages += self.load.batch as u64;
                continue;
            }
            let received = self.connection.exchange(&self.receive).await?;
            let receipts: Vec<&str> = field(received, "ReceiptHandle").collect();
            messages += receipts.len() as u64;
            let (url, url_bytes) = (&self.url, self.url.len());
            let delete = match receipts.as_slice() {
                // Another connection took the message; the one that it sent remains for the next receive.
                [] => None,
                [one] if self.load.batch == 1 => {
                    Some(("DeleteMessage", format!(r#"{{"QueueUrl":"{url}","ReceiptHandle":"{one}"}}"#)))
                }
                many => {
                    let mut body = String::with_capacity(url_bytes + many.len() * 200);
                    let _ = write!(body, r#"{{"QueueUrl":"{url}","Entries":["#);
                    for (n, receipt) in many.iter().enumerate() {
                        let comma = if n == 0 { "" } else { "," };
                        let _ = write!(body, r#"{comma}{{"Id":"{n}","ReceiptHandle":"{receipt}"}}"#);
                    }
                    body.push_str("]}");
                    Some(("DeleteMessageBatch", body))
                }
            };
            going = lap();
            if let Some((action, body)) = delete {
                let deleted = self.connection.call(action, &body).await?;
                if deleted.contains("\"Failed\"") {
                    return Err(format!("a delete failed: {deleted}"));
                }
                going = lap();
            }
        }
        Ok((messages, latencies_us))
    }
}

/// A kept-alive HTTP/1.1 connection.
pub struct Connection {
    stream: TcpStream,
    host: String,
    buffer: Vec<u8>,
}

impl Connection {
    pub async fn open(server: &Server) -> Result<Self, String> {
        let stream = TcpStream::connect(server.address).await.map_err(text)?;
        stream.set_nodelay(true).map_err(text)?;
        Ok(Self { stream, host: server.address.to_string(), buffer: Vec::with_capacity(64 * 1024) })
    }

    /// A request with the headers that an SDK sends; neither server checks the signature.
    fn request(&self, action: &str, body: &str) -> Vec<u8> {
        let host = &self.host;
        let length = body.len();
        format!(
            "POST / HTTP/1.1\r\nHost: {host}\r\nX-Amz-Target: AmazonSQS.{action}\r\n\
             Content-Type: application/x-amz-json-1.0\r\nX-Amz-Date: 20250101T000000Z\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=x/20250101/us-east-1/sqs/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature={:064}\r\n\
             Content-Length: {length}\r\n\r\n{body}",
            0
        )
        .into_bytes()
    }

    async fn call(&mut self, action: &str, body: &str) -> Result<String, String> {
        let request = self.request(action, body);
        self.exchange(&request).await.map(str::to_owned)
    }

    /// The body of a resource.
    pub async fn get(&mut self, path: &str) -> Result<&str, String> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.exchange(request.as_bytes()).await
    }

    /// How often the server has synced to disk, if it reports that.
    async fn synced(&mut self) -> Option<u64> {
        let status = self.get("/v1/status").await.ok()?;
        let (_, value) = status.split_once("\"synced\":")?;
        value.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    }

    /// Sends a request and returns the response's body; any status other than 200 is an error, and so is a server that hangs.
    async fn exchange(&mut self, request: &[u8]) -> Result<&str, String> {
        match tokio::time::timeout(RESPONSE_MAX, self.exchange_unbounded(request)).await {
            Ok(response) => response,
            Err(_) => Err(format!("no response within {} s", RESPONSE_MAX.as_secs())),
        }
    }

    async fn exchange_unbounded(&mut self, request: &[u8]) -> Result<&str, String> {
        self.stream.write_all(request).await.map_err(text)?;
        self.buffer.clear();
        let whole = |buffer: &[u8]| -> Result<Option<(usize, usize)>, String> {
            let Some(head) = buffer.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
            let length = content_length(&buffer[..head + 2])?;
            Ok((buffer.len() >= head + 4 + length).then_some((head + 4, length)))
        };
        let (start, length) = loop {
            let read = self.stream.read_buf(&mut self.buffer).await.map_err(text)?;
            if read == 0 {
                return Err("the server closed the connection".to_owned());
            }
            if let Some(found) = whole(&self.buffer)? {
                break found;
            }
        };
        let body = std::str::from_utf8(&self.buffer[start..start + length]).map_err(text)?;
        if self.buffer.starts_with(b"HTTP/1.1 200") {
            Ok(body)
        } else {
            Err(format!("the server answered {}", String::from_utf8_lossy(&self.buffer)))
        }
    }
}

fn content_length(head: &[u8]) -> Result<usize, String> {
    const NAME: &[u8] = b"content-length:";
    let mut lines = head.split(|byte| *byte == b'\n');
    let line = lines.find(|line| line.len() > NAME.len() && line[..NAME.len()].eq_ignore_ascii_case(NAME));
    let value = line.and_then(|line| std::str::from_utf8(&line[NAME.len()..]).ok());
    value.and_then(|value| value.trim().parse().ok()).ok_or("an answer without Content-Length".to_owned())
}

/// The values of a text field, anywhere in the JSON. None of the requested fields needs unescaping.
fn field<'a>(json: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let mark = format!("\"{name}\":");
    let mut rest = json;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(mark.as_str())?;
        let (value, next) = after.trim_start().strip_prefix('"')?.split_once('"')?;
        rest = next;
        Some(value)
    })
}
