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
}

impl Charged {
    /// The event for the checker: what duplicates are answered.
    pub fn outcome(&self, id: &str) -> Option<Act> {
        let outcome = Some(self.receipt?);
        Some(Act::Entry { id: id.to_owned(), completed: true, outcome })
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
            return Charged { answer: Answer::Unknown, gives_up: false, receipt: None };
        };
        let is_done = (200..300).contains(&response.status);
        let answer = if is_done { Answer::Ok } else { Answer::Failed };
        let paid = serde_json::from_slice::<Paid>(&response.body).ok().filter(|_| is_done);
        let gives_up = response.status == 409 && code(&response) == IN_DOUBT;
        Charged { answer, gives_up, receipt: paid.map(|paid| paid.receipt) }
    }

    async fn ask(&mut self, workload: &str, payment: &Payment) -> anyhow::Result<Message> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::new(TcpStream::connect(self.proxy).await?),
        };
        let headers = format!("idempotency-key: {}\r\ncontent-type: application/json\r\n", payment.id);
        let body = serde_json::to_vec(payment)?;
        connection.ask_with(&format!("/effects/{workload}"), &headers, &body).await?;
        let response = connection.read().await?;
        let response = response.ok_or_else(|| anyhow::anyhow!("the connection was closed"))?;
        self.connection = Some(connection);
        Ok(response)
    }
}

fn code(response: &Message) -> String {
    let problem: serde_json::Value = serde_json::from_slice(&response.body).unwrap_or_default();
    problem["code"].as_str().unwrap_or_default().to_owned()
}
