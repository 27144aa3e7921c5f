//! The workload through `hapax proxy`: callers with an `Idempotency-Key` that repeat every request without a response.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;

use crate::history::{Act, Answer};
use crate::recorder::{Paid, Payment};
use crate::wire::{Connection, Message};

/// How long a caller waits for a response.
const REQUEST: Duration = Duration::from_secs(3);
/// The code of a response which says that it is not known whether the request took effect.
const IN_DOUBT: &str = "in-doubt";

/// What a caller learned.
pub struct Charged {
    pub answer: Answer,
    /// The key is in doubt, and stays so until an operator decides: the caller gives up.
    pub gives_up: bool,
    /// What the response says of the effect.
    pub receipt: Option<u64>,
    /// A hash of a response of success.
    pub digest: Option<u64>,
}

impl Charged {
    /// The events for the checker: what duplicates are answered.
    pub fn outcome(&self, id: &str) -> impl Iterator<Item = Act> {
        let entry = |receipt| Act::Entry { id: id.to_owned(), completed: true, outcome: Some(receipt) };
        let response = |digest| Act::Response { id: id.to_owned(), digest };
        self.receipt.map(entry).into_iter().chain(self.digest.map(response))
    }
}

/// A caller with a connection of its own.
pub struct Client {
    proxy: SocketAddr,
    connection: Option<Connection>,
}

impl Client {
    pub fn new(proxy: SocketAddr) -> Self {
        Self { proxy, connection: None }
    }

    /// Sends a payment under its key.
    pub async fn charge(&mut self, workload: &str, payment: &Payment) -> Charged {
        let asked = tokio::time::timeout(REQUEST, self.ask(workload, payment)).await;
        let Ok(Ok(response)) = asked else {
            self.connection = None;
            return Charged { answer: Answer::Unknown, gives_up: false, receipt: None, digest: None };
        };
        let is_done = (200..300).contains(&response.status);
        let answer = if is_done { Answer::Ok } else { Answer::Failed };
        let paid = serde_json::from_slice::<Paid>(&response.body).ok().filter(|_| is_done);
        let gives_up = response.status == 409 && code(&response) == IN_DOUBT;
        let digest = is_done.then(|| digest(&response.body));
        Charged { answer, gives_up, receipt: paid.map(|paid| paid.receipt), digest }
    }

    async fn ask(&mut self, workload: &str, payment: &Payment) -> anyhow::Result<Message> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::new(TcpStream::connect(self.proxy).await?),
        };
        // Each account is a caller of its own, and callers use the same keys.
        let Payment { account, number, .. } = payment;
        let headers = format!(
            "authorization: Bearer {account}\r\nidempotency-key: payment-{number}\r\ncontent-type: application/json\r\n"
        );
        let body = serde_json::to_vec(payment)?;
        connection.ask_with(&format!("/effects/{workload}"), &headers, &body).await?;
        let response = connection.read().await?;
        let response = response.ok_or_else(|| anyhow::anyhow!("the connection was closed"))?;
        self.connection = Some(connection);
        Ok(response)
    }
}

/// Two responses are compared by it: the history does not hold bodies.
fn digest(body: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

fn code(response: &Message) -> String {
    let problem: serde_json::Value = serde_json::from_slice(&response.body).unwrap_or_default();
    problem["code"].as_str().unwrap_or_default().to_owned()
}
