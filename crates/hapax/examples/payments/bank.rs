//! Three banks that count payments. They differ only in the duplicates that they recognise.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax::OnDoubt;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Maximum length of a request or response.
const LINE_BYTES_MAX: u64 = 4 * 1024;
/// Timeout of a call.
const CALL: Duration = Duration::from_secs(5);

/// One payment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Payment {
    pub id: String,
    pub cents: u64,
}

/// A bank, and the queue of payments to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bank {
    /// Idempotent by the derived key: a known key moves no money.
    Keyed,
    /// Checks fences: a run with an older fence moves no money. It does not know the payments of earlier runs.
    Fenced,
    /// Checks nothing. Its queue parks messages in doubt.
    Trusting,
}

impl Bank {
    pub const ALL: [Self; 3] = [Self::Keyed, Self::Fenced, Self::Trusting];
    /// Their names, which are also the names of their queues.
    pub const NAMES: [&'static str; 3] = ["keyed", "fenced", "trusting"];

    /// Its name, which is also the name of its queue.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// How its queue handles a payment that may or may not have been made.
    pub fn on_doubt(self) -> OnDoubt {
        match self {
            Self::Keyed | Self::Fenced => OnDoubt::Retry,
            Self::Trusting => OnDoubt::Park,
        }
    }
}

/// A worker's request to a bank.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    pub bank: Bank,
    pub payment: Payment,
    pub derived_key: String,
    pub fence: u64,
    pub takeover: bool,
}

/// A bank's response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BankResponse {
    /// The money was moved.
    Moved,
    /// The money was moved earlier, under the same key.
    Known,
    /// A run with a newer fence came first: no money is moved.
    Overtaken,
}

/// A bank's records.
#[derive(Debug, Clone, Default)]
pub struct Books {
    pub calls: u64,
    /// Calls after a takeover: an earlier run may have paid.
    pub takeovers: u64,
    pub cents: u64,
    /// How often each payment was made.
    pub moved: HashMap<String, u32>,
    /// The derived keys of each payment; there should be one.
    pub keys: HashMap<String, Vec<String>>,
    fences: HashMap<String, u64>,
}

impl Books {
    pub fn doubles(&self) -> usize {
        self.moved.values().filter(|times| **times > 1).count()
    }

    fn pay(&mut self, request: &Request) -> BankResponse {
        let Request { bank, payment, derived_key, fence, takeover } = request;
        self.calls += 1;
        self.takeovers += u64::from(*takeover);
        let keys = self.keys.entry(payment.id.clone()).or_default();
        let known = keys.contains(derived_key);
        if !known {
            keys.push(derived_key.clone());
        }
        let latest = self.fences.entry(payment.id.clone()).or_default();
        let overtaken = fence < latest;
        *latest = (*latest).max(*fence);
        match bank {
            Bank::Keyed if known => return BankResponse::Known,
            Bank::Fenced if overtaken => return BankResponse::Overtaken,
            Bank::Keyed | Bank::Fenced | Bank::Trusting => {}
        }
        self.cents += payment.cents;
        *self.moved.entry(payment.id.clone()).or_default() += 1;
        BankResponse::Moved
    }
}

/// The banks behind one listener. Their records survive every worker.
#[derive(Clone, Default)]
pub struct Banks(Arc<Mutex<HashMap<Bank, Books>>>);

impl Banks {
    /// Starts the listener; returns its address.
    pub async fn open(&self) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let banks = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let banks = banks.clone();
                // Errors are expected: workers die in the middle of a call.
                tokio::spawn(async move { banks.serve(stream).await.ok() });
            }
        });
        Ok(address)
    }

    pub fn books(&self, bank: Bank) -> Books {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&bank).cloned().unwrap_or_default()
    }

    async fn serve(&self, stream: TcpStream) -> anyhow::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        (&mut stream).take(LINE_BYTES_MAX).read_line(&mut line).await?;
        let request: Request = serde_json::from_str(&line)?;
        // Banks are slow, both before they move the money and before they respond.
        let pause = Duration::from_millis(fastrand::u64(2..12));
        tokio::time::sleep(pause).await;
        let answer = {
            let mut banks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            banks.entry(request.bank).or_default().pay(&request)
        };
        tokio::time::sleep(pause).await;
        let answer = serde_json::to_string(&answer)? + "\n";
        Ok(stream.get_mut().write_all(answer.as_bytes()).await?)
    }
}

/// Asks a bank to pay. After an error it is unknown whether it has.
pub async fn pay(mut bank: TcpStream, request: &Request) -> io::Result<BankResponse> {
    let call = async {
        let line = serde_json::to_string(request)? + "\n";
        bank.write_all(line.as_bytes()).await?;
        let mut answer = String::new();
        BufReader::new(bank).take(LINE_BYTES_MAX).read_line(&mut answer).await?;
        Ok(serde_json::from_str(&answer)?)
    };
    tokio::time::timeout(CALL, call).await?
}
