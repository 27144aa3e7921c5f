//! The JSON of the native API, shared by client and server.
//!
//! Requests refuse unknown fields, so that a misspelt name is not ignored. Responses ignore them, so that an older
//! client works with a newer server. `docs/native-api.md` and the server's `/v1/openapi.json` describe the same API.

mod attribute;
mod claim;
mod message;
mod problem;
pub mod time;
mod transfer;

use std::collections::BTreeMap;

use hapax_core::policy::tier::ObservedQueue;
use hapax_core::{
    Capabilities, Document, DocumentName, GroupId, LedgerCapabilities, MessageId, QueueConfig, QueueInfo,
    QueueName, QueuePause, QueueStats, Receive, RedriveFilter, RedriveRequest, RedriveTask, Revision,
    StoreStatus,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

pub use attribute::AttributeItem;
pub use claim::{
    ClaimBody, ClaimEndItem, ClaimItem, ClaimResponse, ClaimsRequest, CompleteBody, Completion, EndsRequest,
    EntriesPage, LedgerReport, ReleaseBody, RenewBody, RenewItem, RenewsRequest, ResolveAs, ResolveBody,
    StateResponse,
};
pub use message::{DeliveryItem, MessageItem, ParkedItem, SendItem};
pub use problem::Problem;
pub use transfer::{CopyBody, FenceBound, ImportBody, ImportResponse, transfer_scope};

/// Attributes by name.
pub type AttributeItems = BTreeMap<String, AttributeItem>;

/// One element's answer: what was asked for, or why not.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum ItemResult<T> {
    /// The element failed.
    Failed {
        /// Why.
        error: Box<Problem>,
    },
    /// The element succeeded.
    Done(T),
}

/// By hand: serde's own way reads either form from a copy in which a JSON text is no longer as it was written.
impl<'de, T: DeserializeOwned> Deserialize<'de> for ItemResult<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Failed {
            error: Box<Problem>,
        }
        let json = hapax_core::Json::deserialize(from)?;
        match json.get() {
            Ok(Failed { error }) => Ok(Self::Failed { error }),
            Err(_) => json.get().map(Self::Done).map_err(serde::de::Error::custom),
        }
    }
}

/// One answer per element, in the order of the request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(bound(deserialize = "T: DeserializeOwned"))]
pub struct Results<T> {
    /// Number of elements that failed.
    pub failed: usize,
    /// One per element.
    pub results: Vec<ItemResult<T>>,
}

impl<T> Results<T> {
    /// Converts a store's results.
    pub fn new<A, E>(answers: Vec<Result<A, E>>, done: impl Fn(A) -> T) -> Self
    where
        Problem: From<E>,
    {
        let failed = answers.iter().filter(|answer| answer.is_err()).count();
        let element = |answer| match answer {
            Ok(answer) => ItemResult::Done(done(answer)),
            Err(error) => ItemResult::Failed { error: Box::new(Problem::from(error)) },
        };
        Self { failed, results: answers.into_iter().map(element).collect() }
    }
}

/// `POST /v1/queues/{queue}/messages`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendRequest {
    /// The messages, at most 1,000.
    pub messages: Vec<SendItem>,
}

/// `POST /v1/queues/{queue}/receive`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReceiveRequest {
    /// Maximum number of deliveries, 1 to 1,000; default 1.
    pub max: usize,
    /// How long each delivery is leased; the queue's default when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// How long to wait for the first message; the queue's default when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// The consumer's name, for the history of failed attempts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumer: Option<String>,
    /// Acks each message as it is delivered.
    pub ack_on_receive: bool,
    /// Names this receive, so that it can be repeated; at most 128 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt_id: Option<String>,
    /// Identifies this request while it waits, so that it can be cancelled. Any text that is unique among all clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cancel_id: Option<String>,
}

impl Default for ReceiveRequest {
    fn default() -> Self {
        Receive::default().into()
    }
}

impl From<Receive> for ReceiveRequest {
    fn from(receive: Receive) -> Self {
        let Receive { max, lease_ms, wait_ms, consumer, ack_on_receive, attempt_id } = receive;
        Self { max, lease_ms, wait_ms, consumer, ack_on_receive, attempt_id, cancel_id: None }
    }
}

impl From<ReceiveRequest> for Receive {
    fn from(request: ReceiveRequest) -> Self {
        let ReceiveRequest { max, lease_ms, wait_ms, consumer, ack_on_receive, attempt_id, .. } = request;
        Self { max, lease_ms, wait_ms, consumer, ack_on_receive, attempt_id }
    }
}

/// The response to a receive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReceiveResponse {
    /// The deliveries; empty if no message came in time.
    pub deliveries: Vec<DeliveryItem>,
}

/// The ways to settle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SettleKind {
    /// Done.
    Ack,
    /// Failed, to be tried again.
    Retry,
    /// Put back without counting an attempt.
    Defer,
    /// To the dead letters.
    Reject,
    /// Kept in its own queue until an operator decides, because the effect may have happened.
    Park,
}

/// One element of `POST /v1/queues/{queue}/settle`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettleItem {
    /// The delivery's receipt.
    pub receipt: String,
    /// How it ends.
    pub how: SettleKind,
    /// With `retry` and `defer`: the delay until the message returns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<u64>,
    /// With `retry`: the error, kept in the history.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// With `reject` and `park`: the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Also ends the claim that was made for the delivery. If its token is stale, the delivery is not settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimEndItem>,
    /// With `park`: the entry whose doubt it is parked for. Where that is over, the message is returned instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked_for: Option<hapax_core::EntryId>,
}

/// `POST /v1/queues/{queue}/settle`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettleRequest {
    /// The deliveries to end, at most 1,000.
    pub settle: Vec<SettleItem>,
}

/// The new state of a settled message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SettledKind {
    /// Deleted.
    Acked,
    /// It returns.
    Returned,
    /// In the dead letters.
    Dead,
    /// Kept in its own queue until an operator decides.
    Parked,
}

/// The effect of a settle.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct SettledItem {
    /// The new state of the message.
    pub settled: SettledKind,
    /// The delay until it returns, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<u64>,
}

/// One element of `POST /v1/queues/{queue}/extend`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtendItem {
    /// The delivery's receipt.
    pub receipt: String,
    /// The new lease, counted from now.
    pub lease_ms: u64,
    /// Whether the delivery has a lease of its own from now on; see [`hapax_core::Extend::own`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// `POST /v1/queues/{queue}/extend`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtendRequest {
    /// The leases to change, at most 1,000.
    pub extend: Vec<ExtendItem>,
}

/// A queue and its configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueItem {
    /// Its name.
    pub name: QueueName,
    /// Its configuration.
    pub config: QueueConfig,
    /// The configuration's revision.
    pub revision: Revision,
    /// When it was created.
    pub created_ms: u64,
    /// When its configuration last changed.
    pub modified_ms: u64,
    /// Set while the queue is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<QueuePause>,
}

impl From<QueueInfo> for QueueItem {
    fn from(info: QueueInfo) -> Self {
        let QueueInfo { name, config, revision, created_ms, modified_ms, paused } = info;
        Self { name, config, revision, created_ms, modified_ms, paused }
    }
}

impl From<QueueItem> for QueueInfo {
    fn from(item: QueueItem) -> Self {
        let QueueItem { name, config, revision, created_ms, modified_ms, paused } = item;
        Self { name, config, revision, created_ms, modified_ms, paused }
    }
}

/// `POST /v1/queues/{queue}/purge`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PurgeBody {
    /// The purge is refused if the last one was less than this time ago. 0 (default) to 300,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval_ms: Option<u64>,
}

/// `POST /v1/queues/{queue}/pause`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PauseBody {
    /// Who pauses the queue, for the audit; the server prefixes the key's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// `GET /v1/queues`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueuesResponse {
    /// All queues, ordered by name.
    pub queues: Vec<QueueItem>,
}

/// `GET /v1/stats`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatsResponse {
    /// The queues whose counters the key may see, ordered by name.
    pub queues: Vec<QueueFigures>,
}

/// The figures of a queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueFigures {
    /// Its name.
    pub name: QueueName,
    /// What the store counts.
    pub stats: QueueStats,
    /// The latest minutes, as the server saw them.
    #[serde(default)]
    pub observed: ObservedQueue,
}

/// `GET /v1/queues/{queue}/messages`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MessagesPage {
    /// The messages, ordered by sequence.
    pub messages: Vec<MessageItem>,
    /// Pass it as `after` for the next page; absent at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// `POST /v1/queues/{queue}/discard`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiscardBody {
    /// The ids, at most 1,000.
    pub ids: Vec<MessageId>,
    /// Who deletes the messages, for the audit; the server prefixes the key's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

/// Messages by id, to release.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseMessagesBody {
    /// The ids, at most 1,000.
    pub ids: Vec<MessageId>,
}

/// Number of messages that an operation changed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CountResponse {
    /// Number of messages.
    pub count: u64,
}

/// `GET /v1/queues/{queue}/halted`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HaltedGroups {
    /// The halted groups.
    pub groups: Vec<GroupId>,
}

/// `POST /v1/redrives`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedriveBody {
    /// The dead-letter queue.
    pub from: QueueName,
    /// The target; each message's own source queue when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<QueueName>,
    /// Which messages; all when absent.
    #[serde(default)]
    pub filter: RedriveFilter,
    /// Maximum messages per second, 1 to 10,000; default 500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
    /// Who starts the redrive, for the audit; the server prefixes the key's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl From<RedriveRequest> for RedriveBody {
    fn from(request: RedriveRequest) -> Self {
        let RedriveRequest { from, to, filter, per_second, by } = request;
        Self { from, to, filter, per_second, by: Some(by) }
    }
}

/// `GET /v1/redrives?from=`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RedrivesResponse {
    /// Newest first.
    pub redrives: Vec<RedriveTask>,
}

/// `GET /v1/documents`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DocumentsPage {
    /// The documents, ordered by name.
    pub documents: Vec<Document>,
    /// Pass it as `after` for the next page; absent at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<DocumentName>,
}

/// The response to a put of a document.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DocumentResponse {
    /// The document.
    pub name: DocumentName,
    /// Its new revision.
    pub revision: Revision,
}

/// The response to the deletion of a document.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct DeleteResponse {
    /// Whether the document existed.
    pub deleted: bool,
}

/// `POST /v1/resume` and `POST /v1/queues/{queue}/resume`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResumeBody {
    /// Who resumes, for the audit; the server prefixes the key's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

/// Maximum length of the reason for a pause, in characters.
pub const PAUSE_REASON_CHARS_MAX: usize = 1000;

/// What is wrong with the reason for a pause.
pub fn pause_reason_problem(reason: &str) -> Option<String> {
    let chars = reason.chars().count();
    (chars > PAUSE_REASON_CHARS_MAX)
        .then(|| format!("reason: {chars} characters are too many; use at most {PAUSE_REASON_CHARS_MAX}"))
}

/// `POST /v1/backup`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupBody {
    /// The name of a new file in the server's folder for backups, or its absolute path.
    pub to: String,
}

/// Answer to `POST /v1/backup`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BackupResponse {
    /// The file that was written, on the server's machine.
    pub path: String,
}

/// `GET /v1/status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerStatus<S = StoreStatus> {
    /// The server's version.
    pub version: String,
    /// The features of the server's store.
    pub capabilities: Capabilities,
    /// The features of its ledger; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ledger: Option<LedgerCapabilities>,
    /// The state of the store.
    pub status: S,
    /// Figures, warnings and why sends are refused are left out of `status`: the caller's key is for some queues only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withheld: bool,
}

/// What happened to the messages with one key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoriesResponse {
    /// One for each message.
    pub stories: Vec<hapax_observe::Story>,
}
