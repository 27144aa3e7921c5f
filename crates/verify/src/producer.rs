//! A producer process: sends each payment until its send is answered with success, as real producers do.

use std::sync::Arc;
use std::time::Duration;

use hapax::{DedupId, GroupId, Hapax, IdempotencyKey, QueueName, StoreError};

use crate::charges::Client;
use crate::history::{Act, Answer};
use crate::orders::Writer;
use crate::recorder::{Payment, Reporter};
use crate::roles::{self, Site};
use crate::workload::{Bank, Shape, Workload};
use tokio::sync::Mutex;

/// Accepted payments of a workload that may wait before its producers slow down; more would only lengthen the drain.
const BACKLOG_MAX: u64 = 40;
/// Accepted payments of a workload that may wait before its producers stop.
const BACKLOG_STOPS: u64 = 80;
/// One payment in this many is sent twice although its first send was accepted: a caller that repeats itself.
const TWICE_ONE_IN: u64 = 4;
/// Pause between the payments of one account.
const PACE: Duration = Duration::from_millis(10);
/// Pause between the payments of an account of a control.
const CONTROL_PACE: Duration = Duration::from_millis(80);

/// The same where consumers ack themselves: one worker process keeps up alone, so that a message whose lease has ended waits behind no
/// others.
const RECEIVER_PACE: Duration = Duration::from_millis(150);

/// Sends payments until its process is killed.
pub async fn run(site: &Site, workloads: &[Workload]) -> anyhow::Result<()> {
    let hapax = roles::connect(site).await?;
    let reporter = Arc::new(Reporter::new(site.recorder, "producer"));
    let mut accounts = tokio::task::JoinSet::new();
    for workload in workloads.iter().copied() {
        for account in 0..workload.accounts() {
            let account = Account {
                hapax: hapax.clone(),
                reporter: reporter.clone(),
                workload,
                queue: workload.queue(&site.run),
                name: format!("account{account}"),
                writer: Mutex::new(Writer::new(site)),
                client: client_of(site, &workload).map(Mutex::new),
                not_waiting: 0,
            };
            accounts.spawn(account.pay());
        }
    }
    roles::ready();
    // An account ends only with an error.
    while let Some(ended) = accounts.join_next().await {
        ended??;
    }
    Ok(())
}

struct Account {
    hapax: Hapax,
    reporter: Arc<Reporter>,
    workload: Workload,
    queue: QueueName,
    name: String,
    /// Of orders, if they are written to a database.
    writer: Mutex<Writer>,
    /// Of requests, if they go through a proxy.
    client: Option<Mutex<Client>>,
    /// Payments that the recorder takes for waiting, and the store does not.
    not_waiting: u64,
}

fn client_of(site: &Site, workload: &Workload) -> Option<Client> {
    let (_, proxy) = site.proxies.iter().find(|(name, _)| name == workload.name)?;
    Some(Client::new(*proxy))
}

impl Account {
    async fn pay(mut self) -> anyhow::Result<()> {
        let mut number = self.reporter.next_payment(self.workload.name, &self.name).await?;
        let mut acts = Vec::new();
        loop {
            let payment = Payment::new(&self.name, number);
            let Payment { id, account, number: _ } = payment.clone();
            acts.push(Act::Intent { id: id.clone(), account, number });
            let recorded = self.reporter.report(self.workload.name, std::mem::take(&mut acts)).await?;
            self.wait_for_consumers(recorded.backlog).await?;
            if let Some(client) = &self.client {
                acts = self.charge(client, &payment, number % TWICE_ONE_IN == 1).await?;
                number += 1;
                tokio::time::sleep(PACE).await;
                continue;
            }
            self.send_until_accepted(&payment).await?;
            acts.push(Act::Send { id: id.clone(), answer: Answer::Ok });
            // In order means that nothing is sent again later; the queue's deduplication would suppress it anyway.
            if number % TWICE_ONE_IN == 1 && !self.workload.is_control() {
                let answer = self.send(&payment).await;
                acts.push(Act::Send { id, answer });
            }
            number += 1;
            tokio::time::sleep(self.pace()).await;
        }
    }

    /// Pause until the next payment.
    fn pace(&self) -> Duration {
        match self.workload.shape {
            Shape::Receiver => RECEIVER_PACE,
            _ if self.workload.is_control() => CONTROL_PACE,
            _ => PACE,
        }
    }

    /// Lets consumers catch up, however slow the machine is: else the rest at the end would grow with the run.
    async fn wait_for_consumers(&mut self, recorded: u64) -> anyhow::Result<()> {
        let mut backlog = recorded.saturating_sub(self.not_waiting);
        if backlog > BACKLOG_MAX {
            let pause_ms = (50 * backlog / BACKLOG_MAX).min(1_000);
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
        while backlog > BACKLOG_STOPS {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let counts = self.reporter.counts().await?;
            let progress = counts.per_workload.get(self.workload.name).copied().unwrap_or_default();
            // What a killed worker had acked, and not reported, stays in the recorder's figures. The calls to a bank
            // are recorded by the bank; elsewhere the store is asked.
            if self.workload.bank == Bank::Table || self.workload.is_control() && self.workload.has_queue() {
                // A store that is cut off is asked again.
                let Ok(stats) = self.hapax.store().stats(&self.queue).await else { continue };
                let waiting = stats.ready + stats.delayed + stats.in_flight;
                self.not_waiting = progress.backlog().saturating_sub(waiting);
            }
            backlog = progress.backlog().saturating_sub(self.not_waiting);
        }
        Ok(())
    }

    /// Sends a request until it is answered with success, or is in doubt; some twice. Returns what is to be reported.
    async fn charge(
        &self,
        client: &Mutex<Client>,
        payment: &Payment,
        twice: bool,
    ) -> anyhow::Result<Vec<Act>> {
        let mut client = client.lock().await;
        let (mut acts, mut responses) = (Vec::new(), 0);
        loop {
            let charged = client.charge(self.workload.name, payment).await;
            let answer = charged.answer;
            acts.push(Act::Send { id: payment.id.clone(), answer });
            acts.extend(charged.outcome(&payment.id));
            responses += u32::from(answer == Answer::Ok);
            if answer == Answer::Ok && twice && responses < 2 {
                continue;
            }
            if answer == Answer::Ok || charged.gives_up {
                return Ok(acts);
            }
            self.reporter.report(self.workload.name, std::mem::take(&mut acts)).await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn send_until_accepted(&self, payment: &Payment) -> anyhow::Result<()> {
        loop {
            let answer = self.send(payment).await;
            if answer == Answer::Ok {
                return Ok(());
            }
            let act = Act::Send { id: payment.id.clone(), answer };
            self.reporter.report(self.workload.name, vec![act]).await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn send(&self, payment: &Payment) -> Answer {
        if self.workload.is_relayed() {
            let placed = self.writer.lock().await.place(&self.workload, payment).await;
            return if placed.is_ok() { Answer::Ok } else { Answer::Unknown };
        }
        let Ok(queue) = self.hapax.queue::<Payment>(self.queue.as_str()) else { return Answer::Failed };
        let key = IdempotencyKey::new(&payment.id).expect("a valid key");
        let sent = queue
            .send_with(payment, |message| {
                let message = message.idempotency_key(&key);
                // Naive consumers get no duplicate sends: what is shown of them is their own. A FIFO queue needs an id
                // because a late duplicate would be out of order.
                let message = if self.workload.fifo || self.workload.is_control() {
                    message.dedup(DedupId::new(&payment.id).expect("a valid id"))
                } else {
                    message
                };
                if self.workload.fifo {
                    message.group(GroupId::new(&payment.account).expect("a valid group"))
                } else {
                    message
                }
            })
            .await;
        match sent {
            Ok(_) => Answer::Ok,
            Err(hapax::Error::Store(StoreError::OutcomeUnknown(_))) => Answer::Unknown,
            Err(_) => Answer::Failed,
        }
    }
}
