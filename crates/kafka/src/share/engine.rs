//! The thread of a source: membership, sessions, and the tasks that hold, copy and settle records.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{
    Batch, Extend, MessageId, Receipt, RemainingLease, Settle, SettleError, Settled, StoreError,
};
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::MetadataRequest;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::ShareOptions;
use super::copies::Copies;
use super::member::Member;
use super::session::{Ack, AckError, Kind, Session, SessionHandle, Wanted, stopped};
use super::settings::Settings;
use super::state::{Held, Partition, Place, SessionId, Shared};
use crate::wire::{Backoff, Cluster, Connect, WireError, text};

const METADATA_MAX: i16 = 12;
/// How often records are looked for that no receive has taken.
const SWEEP: Duration = Duration::from_millis(250);
/// How long a record waits for a receive. Then it is released, for another member.
pub(super) const READY_MAX: Duration = Duration::from_secs(1);
/// How long leaders are not looked up again.
const LOOK_UP_PAUSE: Duration = Duration::from_millis(100);

/// Work that the source asks for.
pub(super) enum Job {
    Settle(Vec<Settle>, oneshot::Sender<Batch<Settled, SettleError>>),
    Extend(Vec<Extend>, oneshot::Sender<Batch<RemainingLease, SettleError>>),
}

/// A topic that is worked on.
#[derive(Debug, Clone)]
struct Topic {
    name: Arc<str>,
    is_retry: bool,
}

/// Everything that the tasks of the thread share.
pub(super) struct Engine {
    pub options: ShareOptions,
    pub settings: Settings,
    pub shared: Arc<Shared>,
    pub connect: Arc<Connect>,
    pub copies: Copies,
    /// This member's id.
    pub member: String,
    /// Sessions that have partitions.
    pub sessions: AtomicUsize,
    /// Records that are held until their time.
    pub held_back: AtomicUsize,
    /// Records on their way to the dead letters without having been run.
    pub buried: AtomicUsize,
    handles: Mutex<HashMap<i32, SessionHandle>>,
    topics: Mutex<HashMap<Uuid, Topic>>,
    generations: AtomicU64,
    receipts: AtomicU64,
    look_up: Notify,
}

impl Engine {
    pub fn new(options: ShareOptions, settings: Settings, shared: Arc<Shared>) -> Arc<Self> {
        let cluster = Arc::new(Cluster::new(options.connect.clone()));
        let copies = Copies {
            cluster,
            dead_letter_topic: options.dead_letter_topic.clone(),
            retry_topic: options.retry_topic.clone(),
        };
        Arc::new(Self {
            connect: Arc::new(options.connect.clone()),
            options,
            settings,
            shared,
            copies,
            member: MessageId(fastrand::u128(..)).to_string(),
            sessions: AtomicUsize::new(0),
            held_back: AtomicUsize::new(0),
            buried: AtomicUsize::new(0),
            handles: Mutex::default(),
            topics: Mutex::default(),
            generations: AtomicU64::new(1),
            receipts: AtomicU64::new(1),
            look_up: Notify::new(),
        })
    }

    /// Works until the source is dropped.
    pub async fn run(self: Arc<Self>, mut jobs: mpsc::UnboundedReceiver<Job>, stop: watch::Receiver<bool>) {
        let (assigned, assignment) = watch::channel(None);
        let topics = [Some(&self.options.topic), self.options.retry_topic.as_ref()];
        let member = Member {
            cluster: self.copies.cluster.clone(),
            shared: self.shared.clone(),
            group: self.options.group.clone(),
            id: self.member.clone(),
            topics: topics.into_iter().flatten().cloned().collect(),
            assigned,
        };
        let membership = tokio::spawn(member.run(stop.clone()));
        // They are aborted at the end of this function.
        let mut tasks = JoinSet::new();
        tasks.spawn(self.clone().sweep());
        let mut sessions = JoinSet::new();
        let mut stopping = stop.clone();
        {
            let assign = self.clone().assign(assignment, stop, &mut sessions);
            tokio::pin!(assign);
            loop {
                tokio::select! {
                    job = jobs.recv() => match job {
                        Some(job) => drop(tasks.spawn(self.clone().work(job))),
                        None => break,
                    },
                    Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
                    () = &mut assign => break,
                    () = stopped(&mut stopping) => break,
                }
            }
        }
        while sessions.join_next().await.is_some() {}
        let _ = membership.await;
        self.shared.fails(StoreError::Unavailable("the source was closed".into()));
    }

    async fn work(self: Arc<Self>, job: Job) {
        match job {
            // The caller may have stopped waiting.
            Job::Settle(batch, reply) => drop(reply.send(self.settle(batch).await)),
            Job::Extend(batch, reply) => drop(reply.send(self.extend(batch).await)),
        }
    }

    /// Gives each leader's session its partitions, whenever the assignment or the leaders change.
    async fn assign(
        self: Arc<Self>,
        mut assignment: watch::Receiver<Option<BTreeSet<Partition>>>,
        stop: watch::Receiver<bool>,
        sessions: &mut JoinSet<()>,
    ) {
        let mut backoff = Backoff::new();
        loop {
            let assigned = assignment.borrow_and_update().clone();
            if let Some(assigned) = assigned {
                match self.leaders(&assigned).await {
                    Ok(leaders) => {
                        backoff = Backoff::new();
                        self.distribute(leaders, &stop, sessions);
                    }
                    Err(problem) => {
                        self.shared.has_problem(problem);
                        backoff.wait().await;
                        continue;
                    }
                }
            }
            tokio::select! {
                changed = assignment.changed() => if changed.is_err() { return },
                () = self.look_up.notified() => sleep(LOOK_UP_PAUSE).await,
            }
        }
    }

    fn distribute(
        self: &Arc<Self>,
        leaders: BTreeMap<i32, (String, Wanted)>,
        stop: &watch::Receiver<bool>,
        sessions: &mut JoinSet<()>,
    ) {
        let mut handles = self.handles();
        for (node, handle) in handles.iter() {
            if !leaders.contains_key(node) {
                handle.wanted.send_replace(Wanted::new());
            }
        }
        let nodes: Vec<i32> = leaders.keys().copied().collect();
        self.sessions.store(nodes.len(), Ordering::SeqCst);
        for (node, (address, wanted)) in leaders {
            let handle = handles.entry(node).or_insert_with(|| {
                let (session, handle) = Session::new(self.clone(), node, address.clone());
                sessions.spawn(session.run(stop.clone()));
                handle
            });
            handle.address.send_replace(address);
            handle.wanted.send_if_modified(|known| {
                let is_other = *known != wanted;
                *known = wanted;
                is_other
            });
        }
        drop(handles);
        self.shared.assigned(&nodes);
        self.shared.wake_sessions();
    }

    /// The assigned partitions by the broker that leads them, with its address.
    async fn leaders(
        &self,
        assigned: &BTreeSet<Partition>,
    ) -> Result<BTreeMap<i32, (String, Wanted)>, String> {
        let names = [(&self.options.topic, false)].into_iter();
        let names: Vec<_> = names.chain(self.options.retry_topic.iter().map(|topic| (topic, true))).collect();
        let asked =
            names.iter().map(|(name, _)| MetadataRequestTopic::default().with_name(Some(text(name).into())));
        let request = MetadataRequest::default()
            .with_topics(Some(asked.collect()))
            .with_allow_auto_topic_creation(false);
        let answer = self.copies.cluster.call_any(&request, METADATA_MAX).await;
        let (answer, _) = answer.map_err(|error: WireError| error.to_string())?;
        let brokers: HashMap<i32, String> = answer
            .brokers
            .iter()
            .map(|broker| (broker.node_id.0, format!("{}:{}", broker.host, broker.port)))
            .collect();
        let mut leaders: BTreeMap<i32, (String, Wanted)> = BTreeMap::new();
        for topic in &answer.topics {
            let name = topic.name.as_ref().map(|name| name.to_string()).unwrap_or_default();
            if let Some(error) = topic.error_code.err() {
                return Err(format!("topic {name}: {error}"));
            }
            let is_retry = names.iter().any(|(known, is_retry)| **known == name && *is_retry);
            self.topics().insert(topic.topic_id, Topic { name: name.as_str().into(), is_retry });
            for partition in &topic.partitions {
                let at = (topic.topic_id, partition.partition_index);
                if !assigned.contains(&at) {
                    continue;
                }
                let node = partition.leader_id.0;
                let Some(address) = brokers.get(&node) else {
                    return Err(format!("partition {name}/{} has no leader", partition.partition_index));
                };
                leaders.entry(node).or_insert_with(|| (address.clone(), Wanted::new())).1.insert(at);
            }
        }
        Ok(leaders)
    }

    /// Releases records that no receive takes.
    async fn sweep(self: Arc<Self>) {
        loop {
            sleep(SWEEP).await;
            for held in self.shared.unwanted(READY_MAX) {
                tokio::spawn(self.clone().release(held));
            }
        }
    }

    async fn release(self: Arc<Self>, held: Arc<Held>) {
        if self.shared.is_held(&held) {
            let _ = self.acknowledge(&held, Kind::Release).await;
            self.shared.released(&held);
        }
    }

    /// Has the session of a record acknowledge it. Returns when the request was sent.
    pub async fn acknowledge(&self, held: &Held, kind: Kind) -> Result<Instant, AckError> {
        let (reply, answer) = oneshot::channel();
        let SessionId { node, generation } = held.session;
        let ack = Ack { place: held.place, generation, kind, reply: Some(reply) };
        let Some(acks) = self.handles().get(&node).map(|handle| handle.acks.clone()) else {
            return Err(AckError::Stale);
        };
        acks.send(ack).map_err(|_| AckError::Stale)?;
        answer.await.unwrap_or(Err(AckError::Stale))
    }

    /// Renews a lock.
    pub async fn renew(&self, held: &Held) -> Result<(), AckError> {
        let sent = self.acknowledge(held, Kind::Renew).await?;
        held.renewed(sent, self.shared.lock());
        Ok(())
    }

    pub fn partition_failed(
        &self,
        session: SessionId,
        partition: Partition,
        error: ResponseError,
        message: &str,
    ) {
        let (topic, number) = partition;
        let topic = self.topic(topic).map_or_else(|| topic.to_string(), |(name, _)| name.to_string());
        let problem = format!("partition {topic}/{number}: {error} {message}");
        if error == ResponseError::TopicAuthorizationFailed {
            self.shared.fails(StoreError::Invalid(problem));
            return;
        }
        tracing::info!(problem, "a partition is not served; trying again");
        if super::session::is_moved(error) {
            self.shared.lost(session, Some(partition));
        }
        self.look_up_leaders();
    }

    pub fn look_up_leaders(&self) {
        self.look_up.notify_one();
    }

    pub fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::SeqCst)
    }

    /// A new receipt.
    pub fn receipt(&self, place: Place) -> Receipt {
        let number = self.receipts.fetch_add(1, Ordering::SeqCst);
        let (topic, partition) = place.partition;
        let text = format!("{topic}/{partition}/{}/{}/{number}", place.offset, self.member);
        Receipt::new(text).expect("a short text")
    }

    /// The name of a topic, and whether it is the retry topic.
    pub fn topic(&self, id: Uuid) -> Option<(Arc<str>, bool)> {
        self.topics().get(&id).map(|topic| (topic.name.clone(), topic.is_retry))
    }

    pub fn is_retry(&self, id: Uuid) -> bool {
        self.topics().get(&id).is_some_and(|topic| topic.is_retry)
    }

    fn topics(&self) -> MutexGuard<'_, HashMap<Uuid, Topic>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<i32, SessionHandle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
