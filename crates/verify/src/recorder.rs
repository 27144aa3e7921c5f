//! The recorder: a process of its own that appends the history, and that is the banks. A bank's effect and its record in the
//! history are one step, so no crash of a worker can separate them.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};

use crate::check;
use crate::history::{Act, Answer, Caused, Effect, NewEvent, TransactionEnd, Writer};
use crate::wire::{Caller, Connection, Message};
use crate::workload::{Bank, Workload};

/// A bank is slow, before and after it moves the money, so that crashes fall between.
const BANK_MS: std::ops::Range<u64> = 1..8;
/// One call in this many is slower before it moves the money, and one after it: long enough to aim a kill at.
const SLOW_ONE_IN: u64 = 8;
const SLOW_BANK_MS: std::ops::Range<u64> = 30..60;
/// Of the payments of a workload with rejections, one in this many is from a closed account.
const CLOSED_ONE_IN: u64 = 5;

/// A wall clock that differs by less is not taken for one that was set: reports are on their way for some time.
const CLOCK_MS: u64 = 10_000;

/// Problems with the user's service that are logged.
const PROBLEMS_MAX: u32 = 20;

/// Where programs that are not of this run call: this, and the workload's name.
pub const EFFECTS: &str = "/effects/";
/// The workload whose upstream can be the user's.
pub const PROXIED: &str = "charges";

/// A call to a bank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pay {
    pub who: String,
    pub workload: String,
    pub payment: Payment,
    pub key: String,
    pub fence: u64,
    pub deliveries: u32,
    pub takeover: bool,
}

/// One payment: the body of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payment {
    /// Unique in its workload; the message's idempotency key.
    pub id: String,
    /// The account that pays.
    pub account: String,
    /// The payment's number within the account.
    pub number: u64,
}

impl Payment {
    pub(crate) fn new(account: &str, number: u64) -> Self {
        Self { id: format!("{account}-{number}"), account: account.to_owned(), number }
    }
}

/// A bank's answer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Paid {
    pub effect: Effect,
    pub receipt: u64,
}

/// Where a producer continues with an account.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccountOf {
    pub workload: String,
    pub account: String,
}

/// Events that a process reports.
#[derive(Debug, Serialize, Deserialize)]
struct Reported {
    /// The wall clock of the process, in milliseconds since 1970.
    clock_ms: u64,
    events: Vec<NewEvent>,
}

/// Answer to reported events.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Recorded {
    /// Accepted payments of the workload that are not made yet.
    pub backlog: u64,
}

/// A control enters or leaves the part of its work in which a crash makes it lose or repeat a payment; or a consumer the part
/// between its payment and its ack.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Gap {
    pub who: String,
    pub workload: String,
    pub enters: bool,
}

/// A bank's call that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OpenCall {
    pub who: String,
    pub workload: String,
    /// The money was moved, and the caller has not heard of it.
    pub moved: bool,
}

/// The figures of a run so far.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Counts {
    pub caused: Caused,
    /// Effects of all workloads.
    pub moved: u64,
    pub per_workload: HashMap<String, Progress>,
}

/// The figures of a workload so far.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Progress {
    pub accepted: u64,
    pub moved: u64,
    pub doubles: u64,
    /// Payments that were made or acked; of a control: those that it has begun.
    pub done: u64,
    /// Operations that were lost, late, refused or repeated because of faults, as far as they are seen while it runs.
    pub hit: u64,
}

impl Progress {
    /// Accepted payments that are waiting.
    pub fn backlog(&self) -> u64 {
        self.accepted.saturating_sub(self.done)
    }
}

#[derive(Default)]
struct State {
    /// The next payment of each account, by workload and account.
    accounts: HashMap<(String, String), u64>,
    /// Payments that were wanted and whose send is not known to be accepted.
    open: HashSet<(String, String)>,
    /// Receipts by workload and payment, the first of each.
    receipts: HashMap<(String, String), u64>,
    /// Payments that were made or acked.
    done: HashSet<(String, String)>,
    /// Receipts by workload and derived key.
    keys: HashMap<(String, String), u64>,
    last_receipt: u64,
    accounts_open: bool,
    /// How far the wall clock of a process is ahead, by its name.
    clocks: HashMap<String, i64>,
    /// Controls that are in their gap, by process and workload.
    gaps: HashMap<(String, String), u64>,
    /// Controls that stay in their gap for a while, because a kill is aimed at them.
    aimed_at: HashSet<String>,
    /// Calls that are slow at this moment.
    calls: HashMap<OpenCall, u64>,
    counts: Counts,
}

struct Recorder {
    writer: Mutex<Writer>,
    state: Mutex<State>,
    /// The user's own service; without one the recorder is it.
    upstream: Option<Upstream>,
}

/// Checks the URL of a user's service.
pub fn check_upstream(url: &str) -> anyhow::Result<()> {
    Upstream::new(url).map(drop)
}

/// A service of the user: `http://HOST:PORT/PATH`.
struct Upstream {
    address: String,
    path: String,
    /// Problems that were logged; the first ones are enough.
    told: AtomicU32,
}

impl Upstream {
    fn new(url: &str) -> anyhow::Result<Self> {
        let rest = url.strip_prefix("http://").context("the service's URL has to begin with http://")?;
        let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
        if address.is_empty() {
            bail!("the service's URL has no host; write http://HOST:PORT/PATH");
        }
        let port = if address.contains(':') { "" } else { ":80" };
        let told = AtomicU32::new(0);
        Ok(Self { address: format!("{address}{port}"), path: format!("/{path}"), told })
    }

    fn log(&self, problem: &str) {
        if self.told.fetch_add(1, Ordering::Relaxed) < PROBLEMS_MAX {
            eprintln!("http://{}{}: {problem}", self.address, self.path);
        }
    }

    /// Passes a request on. A response of success is an effect.
    async fn call(&self, recorder: &Recorder, pay: Pay, request: &Message) -> anyhow::Result<(u16, Vec<u8>)> {
        let passed = ["idempotency-key", "hapax-fence", "hapax-takeover", "content-type"];
        let lines = passed.iter().filter_map(|&name| Some(format!("{name}: {}\r\n", request.header(name)?)));
        let headers: String = lines.chain(["connection: close\r\n".to_owned()]).collect();
        let exchange = async {
            let mut connection = Connection::new(TcpStream::connect(&self.address).await?);
            connection.ask_with(&self.path, &headers, &request.body).await?;
            connection.read().await?.context("it closed the connection")
        };
        let response = match exchange.await {
            Ok(response) => response,
            Err(error) => {
                self.log(&format!("{error:#}"));
                return Ok((502, Vec::new()));
            }
        };
        if (200..300).contains(&response.status) {
            recorder.pay(pay).await?;
        } else {
            self.log(&format!("status {}", response.status));
        }
        Ok((response.status, response.body))
    }
}

/// Runs the recorder until its process is killed. `ready` gets its address.
pub async fn run(
    history: &Path,
    upstream: Option<&str>,
    ready: impl FnOnce(SocketAddr),
) -> anyhow::Result<()> {
    let writer = Mutex::new(Writer::create(history)?);
    let upstream = upstream.map(Upstream::new).transpose()?;
    let recorder = Arc::new(Recorder { writer, state: Mutex::default(), upstream });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    ready(listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        let recorder = recorder.clone();
        tokio::spawn(async move {
            let mut connection = Connection::new(stream);
            // Errors are expected: callers are killed in the middle of a call.
            while let Ok(Some(request)) = connection.read().await {
                let answered = match request.path.strip_prefix(EFFECTS) {
                    Some(workload) => recorder.effect(workload, &request).await,
                    None => recorder.answer(&request.path, &request.body).await.map(|body| (200, body)),
                };
                let (status, body) =
                    answered.unwrap_or_else(|error| (400, format!("{error:#}").into_bytes()));
                if connection.answer(status, &body).await.is_err() {
                    return;
                }
            }
        });
    }
}

impl Recorder {
    async fn answer(&self, path: &str, body: &[u8]) -> anyhow::Result<Vec<u8>> {
        Ok(match path {
            "/events" => serde_json::to_vec(&self.record(serde_json::from_slice(body)?)?)?,
            "/pay" => serde_json::to_vec(&self.pay(serde_json::from_slice(body)?).await?)?,
            "/account" => serde_json::to_vec(&self.account(serde_json::from_slice(body)?))?,
            "/open" => {
                self.state().accounts_open = serde_json::from_slice(body)?;
                b"null".to_vec()
            }
            "/gap" => serde_json::to_vec(&self.state().gap(serde_json::from_slice(body)?))?,
            "/aim" => {
                self.state().aimed_at = serde_json::from_slice(body)?;
                b"null".to_vec()
            }
            "/gaps" => {
                let state = self.state();
                let open = state.gaps.iter().filter(|(_, count)| **count > 0);
                serde_json::to_vec(&open.map(|(of, _)| of.clone()).collect::<Vec<_>>())?
            }
            "/calls" => {
                let state = self.state();
                let open = state.calls.iter().filter(|(_, count)| **count > 0);
                serde_json::to_vec(&open.map(|(call, _)| call).collect::<Vec<_>>())?
            }
            "/receipts" => serde_json::to_vec(&self.receipts(&serde_json::from_slice::<String>(body)?))?,
            "/now" => serde_json::to_vec(&self.writer().now_ms()?)?,
            "/counts" => serde_json::to_vec(&self.state().counts)?,
            _ => bail!("no such path"),
        })
    }

    /// A call from a program that is not of this run: a handler, or what a proxy passes on.
    async fn effect(&self, workload: &str, request: &Message) -> anyhow::Result<(u16, Vec<u8>)> {
        let number = |name: &str| request.header(name).and_then(|value| value.parse::<u64>().ok());
        let key = request.header("idempotency-key");
        let pay = Pay {
            who: "effects".to_owned(),
            workload: workload.to_owned(),
            payment: serde_json::from_slice(&request.body).context("the body is not the payment's JSON")?,
            // A caller without a key is not recognised.
            key: key.map_or_else(|| format!("{:032x}", fastrand::u128(..)), str::to_owned),
            fence: number("hapax-fence").unwrap_or_default(),
            deliveries: 1,
            takeover: request.header("hapax-takeover").is_some(),
        };
        if let Some(upstream) = self.upstream.as_ref().filter(|_| workload == PROXIED) {
            return upstream.call(self, pay, request).await;
        }
        Ok((200, serde_json::to_vec(&self.pay(pay).await?)?))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> std::sync::MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, reported: Reported) -> anyhow::Result<Recorded> {
        let Reported { clock_ms, mut events } = reported;
        let mut state = self.state();
        let mut backlog = 0;
        if let Some(process) = events.first().map(|event| process(&event.who).to_owned()) {
            let ahead_ms = clock_ms.cast_signed() - wall_ms().cast_signed();
            events.extend(state.clock(process, ahead_ms));
        }
        for event in &events {
            state.note(event);
            let progress = state.counts.per_workload.get(&event.workload).copied().unwrap_or_default();
            backlog = progress.backlog();
        }
        drop(state);
        self.writer().append(events)?;
        Ok(Recorded { backlog })
    }

    async fn pay(&self, pay: Pay) -> anyhow::Result<Paid> {
        let workload = Workload::named(&pay.workload).context("no such workload")?;
        let call = OpenCall { who: pay.who.clone(), workload: pay.workload.clone(), moved: false };
        self.take_time(&call).await;
        let paid = self.pay_and_record(&workload, pay)?;
        self.take_time(&OpenCall { moved: true, ..call }).await;
        Ok(paid)
    }

    async fn take_time(&self, call: &OpenCall) {
        if fastrand::u64(..SLOW_ONE_IN) > 0 {
            return tokio::time::sleep(Duration::from_millis(fastrand::u64(BANK_MS))).await;
        }
        *self.state().calls.entry(call.clone()).or_default() += 1;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(SLOW_BANK_MS))).await;
        self.state().calls.entry(call.clone()).and_modify(|count| *count -= 1);
    }

    /// The history has the calls in the order in which the bank got them: the writer is held from before the effect. Otherwise
    /// a call that follows from this one could be recorded first, and the checker would see a wrong order.
    fn pay_and_record(&self, workload: &Workload, pay: Pay) -> anyhow::Result<Paid> {
        let mut writer = self.writer();
        let paid = self.state().pay(workload, &pay);
        let Pay {
            who, workload, payment: Payment { id, account, number }, fence, deliveries, takeover, ..
        } = pay;
        let Paid { effect, receipt } = paid;
        let act = Act::Call { id, account, number, fence, deliveries, takeover, effect, receipt };
        let event = NewEvent { who, workload, act };
        self.state().note_hit(&event);
        writer.append([event])?;
        Ok(paid)
    }

    fn account(&self, of: AccountOf) -> u64 {
        let mut state = self.state();
        let next = *state.accounts.entry((of.workload.clone(), of.account.clone())).or_default();
        let id = Payment::new(&of.account, next).id;
        if state.open.contains(&(of.workload, id)) {
            state.counts.caused.sends_resumed += 1;
        }
        next
    }

    fn receipts(&self, workload: &str) -> HashMap<String, u64> {
        let state = self.state();
        let own = state.receipts.iter().filter(|((of, _), _)| of == workload);
        own.map(|((_, id), receipt)| (id.clone(), *receipt)).collect()
    }
}

/// The process of a name: a task has a number behind it.
fn process(who: &str) -> &str {
    who.split('/').next().unwrap_or(who)
}

fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

impl State {
    /// Notes the clock of a process. Returns an event if it is another than before, compared with this process's own clock.
    fn clock(&mut self, who: String, ahead_ms: i64) -> Option<NewEvent> {
        let before = self.clocks.insert(who.clone(), ahead_ms);
        let moved = before.unwrap_or_default().abs_diff(ahead_ms);
        if moved < CLOCK_MS {
            return None;
        }
        // A process that is new has seen no step.
        self.counts.caused.clocks_stepped += u64::from(before.is_some());
        Some(NewEvent { who, workload: String::new(), act: Act::Clock { ahead_ms } })
    }

    fn pay(&mut self, workload: &Workload, pay: &Pay) -> Paid {
        let of = |what: &str| (pay.workload.clone(), what.to_owned());
        let caused = &mut self.counts.caused;
        // What an operator has released is delivered again without any fault.
        caused.redelivered += u64::from(pay.deliveries > 1 && !workload.rejects);
        caused.takeovers += u64::from(pay.takeover);
        let closed =
            workload.rejects && pay.payment.number.is_multiple_of(CLOSED_ONE_IN) && !self.accounts_open;
        if closed && !self.receipts.contains_key(&of(&pay.payment.id)) {
            return Paid { effect: Effect::Closed, receipt: 0 };
        }
        if workload.bank == Bank::Keyed
            && let Some(receipt) = self.keys.get(&of(&pay.key))
        {
            caused.known += 1;
            return Paid { effect: Effect::Known, receipt: *receipt };
        }
        self.last_receipt += 1;
        let receipt = self.last_receipt;
        self.keys.insert(of(&pay.key), receipt);
        self.moved(&pay.workload, &pay.payment.id, receipt);
        Paid { effect: Effect::Moved, receipt }
    }

    /// Returns whether a kill is aimed at the control.
    fn gap(&mut self, gap: Gap) -> bool {
        // A control without a queue has several payments in one gap; each counts when it is made.
        let counts = |workload: Workload| workload.is_control() && workload.has_queue();
        if gap.enters && Workload::named(&gap.workload).is_some_and(counts) {
            self.counts.per_workload.entry(gap.workload.clone()).or_default().done += 1;
        }
        let is_aimed_at = self.aimed_at.contains(&gap.workload);
        let count = self.gaps.entry((gap.who, gap.workload)).or_default();
        *count = if gap.enters { *count + 1 } else { count.saturating_sub(1) };
        is_aimed_at
    }

    fn moved(&mut self, workload: &str, id: &str, receipt: u64) {
        self.counts.moved += 1;
        let progress = self.counts.per_workload.entry(workload.to_owned()).or_default();
        match self.receipts.entry((workload.to_owned(), id.to_owned())) {
            std::collections::hash_map::Entry::Occupied(_) => progress.doubles += 1,
            std::collections::hash_map::Entry::Vacant(entry) => {
                progress.moved += 1;
                entry.insert(receipt);
            }
        }
        self.done(workload, id);
    }

    /// Counts a payment that does not wait any more. Controls with a queue tell when they begin one: some are never made.
    fn done(&mut self, workload: &str, id: &str) {
        let begins = |workload: Workload| workload.is_control() && workload.has_queue();
        if !Workload::named(workload).is_some_and(begins)
            && self.done.insert((workload.to_owned(), id.to_owned()))
        {
            self.counts.per_workload.entry(workload.to_owned()).or_default().done += 1;
        }
    }

    /// Counts an operation that a fault has hit, in its workload.
    fn note_hit(&mut self, event: &NewEvent) {
        let is_unknown_claim = matches!(&event.act, Act::Claim { step, .. } if step.is_unknown());
        let is_hit = |workload: Workload| check::is_hit(&event.act, &workload) || is_unknown_claim;
        if Workload::named(&event.workload).is_some_and(is_hit) {
            self.counts.per_workload.entry(event.workload.clone()).or_default().hit += 1;
        }
    }

    /// Counts a reported event, and keeps what producers need to continue.
    fn note(&mut self, event: &NewEvent) {
        self.note_hit(event);
        let caused = &mut self.counts.caused;
        match &event.act {
            Act::Intent { id, .. } => {
                self.open.insert((event.workload.clone(), id.clone()));
            }
            Act::Send { id, answer, .. } => match answer {
                Answer::Unknown => caused.sends_unknown += 1,
                Answer::Failed => caused.sends_failed += 1,
                Answer::Ok => {
                    // A second send of the same payment is accepted as well, and counts once.
                    if self.open.remove(&(event.workload.clone(), id.clone())) {
                        self.counts.per_workload.entry(event.workload.clone()).or_default().accepted += 1;
                        if let Some((account, number)) = id.rsplit_once('-') {
                            let number: u64 = number.parse().unwrap_or_default();
                            let next =
                                self.accounts.entry((event.workload.clone(), account.into())).or_default();
                            *next = (*next).max(number + 1);
                        }
                    }
                }
            },
            Act::Settle { id, ack, answer, ran, .. } => match answer {
                Answer::Ok => {
                    // However often it was delivered: a duplicate waits for the first, and is delivered again, without any
                    // fault.
                    caused.replayed += u64::from(*ack && !ran);
                    if *ack {
                        self.done(&event.workload, id);
                    }
                }
                Answer::Failed | Answer::Unknown => caused.settles_refused += 1,
            },
            // What a database's own table says is reported by the process that reads it.
            Act::Call { id, effect: Effect::Moved, receipt, .. } => {
                self.moved(&event.workload.clone(), id, *receipt);
            }
            Act::Shown { id, offset, .. } => {
                self.moved(&event.workload.clone(), id, offset.unsigned_abs());
            }
            Act::Transaction { end, intended, .. } => match end {
                TransactionEnd::Aborted => caused.transactions_aborted += u64::from(!intended),
                TransactionEnd::Unknown => caused.transactions_unknown += 1,
                TransactionEnd::Committed => {}
            },
            Act::Restarted { .. } => caused.restarts += 1,
            Act::Claim { step, .. } => caused.claims_unknown += u64::from(step.is_unknown()),
            _ => {}
        }
    }
}

/// A client of the recorder, for one process of a run.
pub struct Reporter {
    caller: Caller,
    who: String,
}

impl Reporter {
    pub fn new(address: SocketAddr, role: &str) -> Self {
        Self { caller: Caller::new(address), who: Self::name(role, std::process::id()) }
    }

    /// The name of a process in the history.
    pub fn name(role: &str, process: u32) -> String {
        format!("{role}-{process}")
    }

    /// The name of this process in the history.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Reports what happened in a workload.
    pub async fn report(&self, workload: &str, acts: Vec<Act>) -> anyhow::Result<Recorded> {
        self.report_as(&self.who, workload, acts).await
    }

    /// Reports as one of several tasks of this process.
    pub async fn report_as(&self, who: &str, workload: &str, acts: Vec<Act>) -> anyhow::Result<Recorded> {
        let event = |act| NewEvent { who: who.to_owned(), workload: workload.to_owned(), act };
        let events = acts.into_iter().map(event).collect();
        self.caller.call("/events", &Reported { clock_ms: wall_ms(), events }).await
    }

    /// Calls a bank.
    pub async fn pay(&self, pay: &Pay) -> anyhow::Result<Paid> {
        self.caller.call("/pay", pay).await
    }

    /// Tells that a control enters or leaves its gap. Returns whether a kill is aimed at it.
    pub async fn gap(&self, workload: &str, enters: bool) -> anyhow::Result<bool> {
        let gap = Gap { who: self.who.clone(), workload: workload.to_owned(), enters };
        self.caller.call("/gap", &gap).await
    }

    /// Aims at these controls, and at no others: each stays in its gap for a while when it enters it.
    #[cfg(feature = "kafka")]
    pub async fn aim<'w>(&self, workloads: impl IntoIterator<Item = &'w str>) -> anyhow::Result<()> {
        self.caller.call("/aim", &workloads.into_iter().collect::<Vec<_>>()).await
    }

    /// The controls that are in their gap: process and workload. One whose process was killed there stays.
    pub async fn gaps(&self) -> anyhow::Result<Vec<(String, String)>> {
        self.caller.call("/gaps", &()).await
    }

    /// The calls to banks that take long at this moment.
    pub async fn open_calls(&self) -> anyhow::Result<Vec<OpenCall>> {
        self.caller.call("/calls", &()).await
    }

    /// The number of the next payment of an account.
    pub async fn next_payment(&self, workload: &str, account: &str) -> anyhow::Result<u64> {
        let of = AccountOf { workload: workload.to_owned(), account: account.to_owned() };
        self.caller.call("/account", &of).await
    }

    /// Opens or closes the accounts that reject payments.
    pub async fn open_accounts(&self, open: bool) -> anyhow::Result<()> {
        self.caller.call("/open", &open).await
    }

    /// The receipts of a workload's payments.
    pub async fn receipts(&self, workload: &str) -> anyhow::Result<HashMap<String, u64>> {
        self.caller.call("/receipts", &workload).await
    }

    /// Milliseconds since the start of the recorder.
    pub async fn now_ms(&self) -> anyhow::Result<u64> {
        self.caller.call("/now", &()).await
    }

    /// The figures of the run so far.
    pub async fn counts(&self) -> anyhow::Result<Counts> {
        self.caller.call("/counts", &()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_is_recorded_with_its_process() {
        let mut state = State::default();
        let mut clock =
            |who: &str, ahead_ms| state.clock(process(who).to_owned(), ahead_ms).map(|event| event.act);
        assert_eq!(clock("worker-1/0", 3), None);
        assert_eq!(clock("worker-1/2", 900), None, "its report was on its way for some time");
        assert_eq!(clock("worker-1/0", 1_800_000), Some(Act::Clock { ahead_ms: 1_800_000 }));
        assert_eq!(clock("worker-1/1", 1_800_001), None, "the same process");
        assert_eq!(clock("worker-1", -60_000), Some(Act::Clock { ahead_ms: -60_000 }));
        // A new process starts with a clock that was set before.
        assert_eq!(clock("worker-2", -60_000), Some(Act::Clock { ahead_ms: -60_000 }));
        assert_eq!(state.counts.caused.clocks_stepped, 2, "it has seen no step");
    }

    #[test]
    fn what_waits_is_what_was_accepted_and_neither_made_nor_acked() {
        let mut state = State::default();
        let mut note = |workload: &str, act| {
            state.note(&NewEvent { who: "w".into(), workload: workload.into(), act });
            state.counts.per_workload.get(workload).map_or(0, Progress::backlog)
        };
        let settle = |id: &str, ack, answer| {
            let (id, message, error) = (id.to_owned(), "m".to_owned(), None);
            Act::Settle { id, message, fence: 1, ack, answer, ran: true, deliveries: 1, error }
        };
        for number in 1..=3 {
            let id = format!("a-{number}");
            note("transfers", Act::Intent { id: id.clone(), account: "a".into(), number });
            assert_eq!(note("transfers", Act::Send { id, answer: Answer::Ok }), number);
        }
        assert_eq!(note("transfers", settle("a-1", true, Answer::Ok)), 2);
        assert_eq!(note("transfers", settle("a-1", true, Answer::Ok)), 2, "once");
        assert_eq!(note("transfers", settle("a-2", true, Answer::Unknown)), 2);
        assert_eq!(note("transfers", settle("a-2", false, Answer::Ok)), 2, "it is delivered again");
    }

    #[test]
    fn calls_are_recorded_in_the_order_of_their_effects() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history");
        let writer = Mutex::new(Writer::create(&path).unwrap());
        let recorder = Recorder { writer, state: Mutex::default(), upstream: None };
        let payments = Workload::named("payments").unwrap();
        assert_eq!(payments.bank, Bank::Keyed);
        let pay = |number: u64| Pay {
            who: "worker-1".into(),
            workload: payments.name.into(),
            payment: Payment::new("account1", number),
            key: number.to_string(),
            fence: 1,
            deliveries: 1,
            takeover: false,
        };
        // Every thread calls for each payment: the first call moves the money, and the others find it moved.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 0..2_000 {
                        drop(recorder.pay_and_record(&payments, pay(number)));
                    }
                });
            }
        });
        let mut moved = HashSet::new();
        for event in crate::history::read(&path).unwrap() {
            let Act::Call { id, effect, .. } = event.event.act else { panic!("{event:?}") };
            match effect {
                Effect::Moved => assert!(moved.insert(id)),
                _ => assert!(moved.contains(&id), "{id} was known before it was moved"),
            }
        }
        assert_eq!(moved.len(), 2_000);
    }
}
