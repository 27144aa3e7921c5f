//! A proxy between a client and a server that injects faults.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

use crate::TIMEOUT;
use crate::frame::{Direction, Frame, Framer, Pending, Protocol};
use crate::kafka_addresses;

/// A held frame that is not released is dropped with its connection after this time.
const HOLD_MAX: Duration = Duration::from_mins(10);
/// How long the response to a duplicated request is drained.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// Which frames a fault applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    direction: Direction,
    label_contains: String,
}

impl Match {
    /// Requests whose label contains this text; the empty text matches all. An HTTP label is `METHOD TARGET`.
    pub fn request(label_contains: impl Into<String>) -> Self {
        Self { direction: Direction::Request, label_contains: label_contains.into() }
    }

    /// Responses to such requests. The label ends with the status, for example `POST /v1/claims 200`.
    pub fn answer_to(label_contains: impl Into<String>) -> Self {
        Self { direction: Direction::Answer, label_contains: label_contains.into() }
    }

    fn fits(&self, direction: Direction, frame: &Frame) -> bool {
        self.direction == direction && frame.label.contains(&self.label_contains)
    }
}

/// What the proxy does with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The frame is not forwarded, and the connection is closed on both sides.
    Cut,
    /// The frame is not forwarded; the connection stays open.
    Drop,
    /// The frame is forwarded later; the frames after it wait.
    Delay(Duration),
    /// The frame arrives twice. The copy of an HTTP or Kafka request is sent first, on a separate connection, and its
    /// response is discarded.
    Duplicate,
    /// A request is forwarded, and a copy of it at [`FaultHandle::release`], on a separate connection; the response to the
    /// copy is discarded. Only one request is copied.
    Repeat,
    /// The frame waits until [`FaultHandle::release`], and is then forwarded even if its sender has closed the
    /// connection.
    Hold,
}

/// An injected fault. Dropping this handle does not remove the fault.
#[derive(Debug, Clone)]
pub struct FaultHandle(Arc<Fault>);

#[derive(Debug)]
struct Fault {
    on: Match,
    effect: Effect,
    limits: Mutex<Limits>,
    count: watch::Sender<u64>,
    released: watch::Sender<bool>,
    /// How many copies of [`Action::Repeat`] were answered.
    repeated: watch::Sender<u64>,
}

enum Effect {
    Action(Action),
    Change(Box<Change>),
}

/// The version of a Kafka request, and the frame.
type Change = dyn Fn(i16, &mut Vec<u8>) + Send + Sync;

impl std::fmt::Debug for Effect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Action(action) => std::fmt::Debug::fmt(action, f),
            Self::Change(_) => f.write_str("Change"),
        }
    }
}

#[derive(Debug)]
struct Limits {
    skip: u64,
    times: u64,
}

impl FaultHandle {
    /// Limits the number of frames that are hit. By default all are.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        self.limits().times = times;
        self
    }

    /// This many matching frames pass before the first one is hit.
    #[must_use]
    pub fn after(self, frames: u64) -> Self {
        self.limits().skip = frames;
        self
    }

    /// How many frames were hit so far.
    pub fn count(&self) -> u64 {
        *self.0.count.borrow()
    }

    /// Waits until this many frames were hit. Panics if that takes longer than [`TIMEOUT`].
    pub async fn wait_for(&self, frames: u64) {
        let mut count = self.0.count.subscribe();
        let reached = tokio::time::timeout(TIMEOUT, count.wait_for(|count| *count >= frames)).await;
        assert!(reached.is_ok(), "{:?} hit {} frames, not {frames}", self.0.on, self.count());
    }

    /// Forwards the held frames, and holds no more.
    pub fn release(&self) {
        self.limits().times = 0;
        self.0.released.send_replace(true);
    }

    /// Waits until the copy of [`Action::Repeat`] was answered. Panics if that takes longer than [`TIMEOUT`].
    pub async fn wait_for_repeated(&self) {
        let mut repeated = self.0.repeated.subscribe();
        let reached = tokio::time::timeout(TIMEOUT, repeated.wait_for(|repeated| *repeated > 0)).await;
        assert!(reached.is_ok(), "{:?} was not repeated", self.0.on);
    }

    /// Disables the fault. Held frames stay held.
    pub fn remove(&self) {
        self.limits().times = 0;
    }

    /// Waits for [`FaultHandle::release`].
    async fn released(&self) -> Result<(), ConnectionCut> {
        let mut released = self.0.released.subscribe();
        let wait = released.wait_for(|released| *released);
        let ended = tokio::time::timeout(HOLD_MAX, wait).await;
        ended.map_err(|_| ConnectionCut)?.map_err(|_| ConnectionCut)?;
        Ok(())
    }

    fn limits(&self) -> std::sync::MutexGuard<'_, Limits> {
        self.0.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a frame that matches; returns whether the fault applies to it.
    fn hits(&self, direction: Direction, frame: &Frame) -> bool {
        if !self.0.on.fits(direction, frame) {
            return false;
        }
        let mut limits = self.limits();
        if limits.times == 0 {
            return false;
        }
        if limits.skip > 0 {
            limits.skip -= 1;
            return false;
        }
        limits.times -= 1;
        drop(limits);
        self.0.count.send_modify(|count| *count += 1);
        true
    }
}

/// A TCP proxy on a free loopback port that forwards everything until a fault is injected.
///
/// It runs on its own thread, so that a blocking test does not block it. It ends when it is dropped.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    state: Arc<State>,
    _stop: oneshot::Sender<()>,
    /// Proxies before the other brokers of a cluster.
    _brokers: Option<Arc<Brokers>>,
}

#[derive(Debug)]
struct State {
    protocol: Protocol,
    target: Mutex<SocketAddr>,
    /// Shared by the proxies of a cluster.
    rules: Arc<Rules>,
    /// The brokers of a cluster whose clients are to stay behind the proxies.
    brokers: Weak<Brokers>,
}

#[derive(Debug)]
struct Rules {
    faults: Mutex<Vec<FaultHandle>>,
    /// Incremented to close all connections.
    cuts: watch::Sender<u64>,
    partitioned: watch::Sender<bool>,
}

/// A proxy for each broker of a cluster, by the host and port that the brokers tell their clients.
#[derive(Debug)]
struct Brokers {
    rules: Arc<Rules>,
    proxies: Mutex<HashMap<(String, u16), FaultProxy>>,
}

impl Brokers {
    /// The address of the proxy before a broker; `None` if there cannot be one.
    fn through(self: &Arc<Self>, host: &str, port: u16) -> Option<SocketAddr> {
        let mut proxies = self.proxies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(proxy) = proxies.get(&(host.to_owned(), port)) {
            return Some(proxy.address());
        }
        let target = (host, port).to_socket_addrs().ok()?.next()?;
        let state = State {
            protocol: Protocol::Kafka,
            target: Mutex::new(target),
            rules: self.rules.clone(),
            brokers: Arc::downgrade(self),
        };
        let proxy = FaultProxy::serve(state, None).ok()?;
        let address = proxy.address();
        proxies.insert((host.to_owned(), port), proxy);
        Some(address)
    }
}

impl FaultProxy {
    /// Starts a proxy in front of `target`.
    pub fn start(target: SocketAddr, protocol: Protocol) -> io::Result<Self> {
        let (rules, target) = (Arc::new(Rules::new()), Mutex::new(target));
        Self::serve(State { protocol, target, rules, brokers: Weak::new() }, None)
    }

    /// Starts a proxy in front of a broker of a Kafka cluster whose listener is not encrypted. Clients that begin here stay behind
    /// proxies, whatever addresses the brokers tell them: each broker gets one, with the same faults.
    pub fn start_before_kafka(target: SocketAddr) -> io::Result<Self> {
        let (rules, target) = (Arc::new(Rules::new()), Mutex::new(target));
        let brokers = Arc::new(Brokers { rules: rules.clone(), proxies: Mutex::default() });
        let weak = Arc::downgrade(&brokers);
        Self::serve(State { protocol: Protocol::Kafka, target, rules, brokers: weak }, Some(brokers))
    }

    fn serve(state: State, brokers: Option<Arc<Brokers>>) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let state = Arc::new(state);
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let served = state.clone();
        std::thread::Builder::new().name("hapax-fault-proxy".into()).spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                tokio::select! {
                    () = accept(&listener, &served) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { address, state, _stop: stop, _brokers: brokers })
    }

    /// The address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// New connections go to another server, for example to the same one restarted on another port.
    pub fn retarget(&self, target: SocketAddr) {
        *self.state.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Injects a fault. The first fault that matches a frame applies.
    pub fn inject(&self, on: Match, action: Action) -> FaultHandle {
        self.inject_effect(on, Effect::Action(action))
    }

    /// Changes the bytes of frames: `change` gets the version of a Kafka request, also for its answer, and the whole frame.
    pub fn change(
        &self,
        on: Match,
        change: impl Fn(i16, &mut Vec<u8>) + Send + Sync + 'static,
    ) -> FaultHandle {
        self.inject_effect(on, Effect::Change(Box::new(change)))
    }

    fn inject_effect(&self, on: Match, effect: Effect) -> FaultHandle {
        let injected = FaultHandle(Arc::new(Fault {
            on,
            effect,
            limits: Mutex::new(Limits { skip: 0, times: u64::MAX }),
            count: watch::Sender::new(0),
            released: watch::Sender::new(false),
            repeated: watch::Sender::new(0),
        }));
        let mut faults = self.state.rules.faults.lock().unwrap_or_else(PoisonError::into_inner);
        // A long run injects thousands, and each frame is compared with all.
        faults.retain(|fault| fault.limits().times > 0);
        faults.push(injected.clone());
        injected
    }

    /// Closes all connections.
    pub fn cut_all(&self) {
        self.state.rules.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// A partition: from now on nothing passes in either direction, and connections stay open. `false` ends it, and the
    /// waiting frames pass.
    pub fn partition(&self, on: bool) {
        self.state.rules.partitioned.send_replace(on);
    }
}

async fn accept(listener: &TcpListener, state: &Arc<State>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(connection(client, state.clone()));
            }
            // Out of file descriptors or similar: the test's clients will notice.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn connection(client: TcpStream, state: Arc<State>) {
    let mut cuts = state.rules.cuts.subscribe();
    state.wait_until_healed().await;
    let target = *state.target.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let pending = Pending::default();
    let pump = |direction, pending: &Pending| Pump {
        framer: Framer::new(state.protocol, direction, pending.clone()),
        direction,
        state: state.clone(),
    };
    let requests = pump(Direction::Request, &pending).run(from_client, to_server);
    let answers = pump(Direction::Answer, &pending).run(from_server, to_client);
    tokio::select! {
        _ = async { tokio::try_join!(requests, answers) } => {}
        _ = cuts.changed() => {}
    }
}

/// Signals that the connection has to be closed.
struct ConnectionCut;

struct Pump {
    framer: Framer,
    direction: Direction,
    state: Arc<State>,
}

impl Pump {
    async fn run(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<(), ConnectionCut> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let count = from.read(&mut buffer).await.unwrap_or(0);
            if count == 0 {
                let rest = self.framer.rest();
                let _ = to.write_all(&rest.bytes).await;
                let _ = to.shutdown().await;
                return Ok(());
            }
            self.framer.read(&buffer[..count]);
            while let Some(mut frame) = self.framer.next() {
                if self.direction == Direction::Answer {
                    self.state.keep_behind_proxies(&mut frame);
                }
                let copies = self.state.fate(self.direction, &mut frame).await?;
                for _ in 0..copies {
                    // A receiver that is gone does not end the sender's direction: its frames are written or lost.
                    let _ = to.write_all(&frame.bytes).await;
                }
            }
        }
    }
}

impl Rules {
    fn new() -> Self {
        let (cuts, partitioned) = (watch::Sender::new(0), watch::Sender::new(false));
        Self { faults: Mutex::default(), cuts, partitioned }
    }
}

impl State {
    /// Replaces the addresses of brokers in an answer by those of proxies.
    fn keep_behind_proxies(&self, frame: &mut Frame) {
        let Some(brokers) = self.brokers.upgrade() else { return };
        if kafka_addresses::names_brokers(&frame.label) {
            let mut other = |host: &str, port: u16| {
                brokers.through(host, port).map(|proxy| (proxy.ip().to_string(), proxy.port()))
            };
            let replaced = kafka_addresses::replace(&frame.label, frame.version, &frame.bytes, &mut other);
            frame.bytes = replaced.unwrap_or_else(|| std::mem::take(&mut frame.bytes));
        }
    }

    /// The number of times a frame is forwarded, after the delay of its fault.
    async fn fate(&self, direction: Direction, frame: &mut Frame) -> Result<usize, ConnectionCut> {
        let fault = {
            let faults = self.rules.faults.lock().unwrap_or_else(PoisonError::into_inner);
            faults.iter().find(|fault| fault.hits(direction, frame)).cloned()
        };
        let copies = match &fault {
            None => 1,
            Some(fault) => self.apply_fault(fault, direction, frame).await?,
        };
        self.wait_until_healed().await;
        Ok(copies)
    }

    async fn apply_fault(
        &self,
        fault: &FaultHandle,
        direction: Direction,
        frame: &mut Frame,
    ) -> Result<usize, ConnectionCut> {
        let action = match &fault.0.effect {
            Effect::Action(action) => *action,
            Effect::Change(change) => {
                change(frame.version, &mut frame.bytes);
                return Ok(1);
            }
        };
        match action {
            Action::Cut => Err(ConnectionCut),
            Action::Drop => Ok(0),
            Action::Delay(time) => {
                tokio::time::sleep(time).await;
                Ok(1)
            }
            Action::Duplicate
                if matches!(self.protocol, Protocol::Http | Protocol::Kafka)
                    && direction == Direction::Request =>
            {
                self.send_copy(frame.bytes.clone()).await;
                Ok(1)
            }
            Action::Repeat => {
                let (fault, copy) = (fault.clone(), self.send_copy(frame.bytes.clone()));
                fault.remove();
                tokio::spawn(async move {
                    if fault.released().await.is_ok() {
                        copy.await;
                        fault.0.repeated.send_modify(|repeated| *repeated += 1);
                    }
                });
                Ok(1)
            }
            Action::Duplicate => Ok(2),
            Action::Hold => {
                fault.released().await?;
                Ok(1)
            }
        }
    }

    /// Sends a copy of a request on a connection of its own, and waits for the response.
    fn send_copy(&self, request: Vec<u8>) -> impl Future<Output = ()> + Send + 'static {
        let target = *self.target.lock().unwrap_or_else(PoisonError::into_inner);
        async move {
            let Ok(mut server) = TcpStream::connect(target).await else { return };
            let _ = server.write_all(&request).await;
            let mut answer = [0; 4096];
            // Any byte means that the server has responded; it may keep the connection open after that.
            let _ = tokio::time::timeout(DRAIN_MAX, server.read(&mut answer)).await;
        }
    }

    async fn wait_until_healed(&self) {
        let mut partitioned = self.rules.partitioned.subscribe();
        // The sender lives as long as this state.
        let _ = partitioned.wait_for(|partitioned| !partitioned).await;
    }
}
