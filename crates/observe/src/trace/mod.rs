//! Traces: one span for each send, delivery, claim, run of a handler and settle of a sampled message, for each message that a
//! relay publishes, and for each HTTP request.
//!
//! The context travels with the message, as the W3C header `traceparent` in the attribute of that name. A sender that is
//! instrumented has put it there; otherwise a sampled send adds it. A message's first delivery is a child of its send. A delivery
//! after that begins a trace of its own with a link to the send, so that a message that fails for a week is not one trace of a
//! week. The delivery that a consumer gets carries the context of its delivery span: claim, handler and settle are its children.

mod context;
mod otlp;
mod publisher;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hapax_core::{Attribute, Attributes, Delivery, NewMessage, QueueName};
use tokio::sync::mpsc;

pub use self::context::{SpanContext, TRACEPARENT};
pub use self::otlp::encode;
pub use self::publisher::TracedPublisher;

/// The version of OpenTelemetry's semantic conventions that names and attributes follow.
pub const CONVENTIONS: &str = "1.28.0";
/// Spans that wait to be exported; further ones are dropped and counted.
const WAITING_MAX: usize = 8_192;
/// Maximum number of spans in one export.
pub const BATCH_MAX: usize = 512;

/// What a span is about, as OTLP numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// Neither end of a message: a claim or a settle.
    Client,
    /// A send.
    Producer,
    /// A delivery or a run of a handler.
    Consumer,
    /// An HTTP request.
    Server,
}

/// A finished span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its own context.
    pub context: SpanContext,
    /// The span that caused it.
    pub parent: Option<[u8; 8]>,
    /// The send of a message that is delivered again; the run of a request whose response is replayed.
    pub links: Vec<SpanContext>,
    /// Operation and queue.
    pub name: String,
    /// What it is about.
    pub kind: SpanKind,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
    /// Names and values by the conventions.
    pub attributes: Vec<(&'static str, String)>,
    /// Why it failed.
    pub error: Option<String>,
}

/// Decides what is traced and takes finished spans. They are exported elsewhere; a full queue drops them.
#[derive(Debug)]
pub struct Tracer {
    sampled: f64,
    spans: mpsc::Sender<Span>,
    dropped: AtomicU64,
}

/// Now, in nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl Tracer {
    /// A tracer of this share of messages (0 to 1) that come without a context, and the finished spans.
    pub fn new(sampled: f64) -> (Self, mpsc::Receiver<Span>) {
        let (spans, finished) = mpsc::channel(WAITING_MAX);
        (Self { sampled, spans, dropped: AtomicU64::new(0) }, finished)
    }

    /// Spans that were dropped because too many waited.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Takes a finished span.
    pub fn finish(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The context of a new span below `parent`, if it is to be recorded: the parent decides, or, where there is none, chance.
    pub fn begin(&self, parent: Option<SpanContext>) -> Option<SpanContext> {
        match parent {
            Some(parent) => parent.sampled.then(|| parent.child()),
            None => (self.sampled > 0.0 && fastrand::f64() < self.sampled).then(SpanContext::root),
        }
    }

    /// The span of a send, if it is sampled; its context goes into the attributes, unless the sender's is there.
    pub(crate) fn begin_send(&self, attributes: &mut Attributes) -> Option<BegunSpan> {
        let parent = SpanContext::of(attributes);
        let context = self.begin(parent)?;
        if parent.is_none() {
            attributes.insert(TRACEPARENT.to_owned(), Attribute::text(context.to_string()));
        }
        let injected = parent.is_none();
        Some(BegunSpan { context, parent: parent.map(|parent| parent.span), injected })
    }

    /// The spans of those sends that are sampled, with their places in the batch.
    pub(crate) fn begin_sends(&self, batch: &mut [NewMessage]) -> Vec<(usize, BegunSpan)> {
        let messages = batch.iter_mut().enumerate();
        messages.filter_map(|(at, message)| Some((at, self.begin_send(&mut message.attributes)?))).collect()
    }

    /// The span of a delivery, if its message is sampled. The delivery gets its context.
    pub(crate) fn delivered(&self, queue: &QueueName, delivery: &mut Delivery) -> Option<SpanContext> {
        let sent = SpanContext::of(&delivery.attributes).filter(|sent| sent.sampled)?;
        let again = delivery.deliveries > 1;
        let context = if again { SpanContext::root() } else { sent.child() };
        let now_ns = now_ns();
        self.finish(Span {
            context,
            parent: (!again).then_some(sent.span),
            links: if again { vec![sent] } else { Vec::new() },
            name: format!("receive {queue}"),
            kind: SpanKind::Consumer,
            start_ns: now_ns,
            end_ns: now_ns,
            attributes: vec![
                ("messaging.operation.type", "receive".to_owned()),
                ("messaging.destination.name", queue.to_string()),
                ("messaging.message.id", delivery.id.to_string()),
                ("hapax.delivery", delivery.deliveries.to_string()),
                ("hapax.attempt", delivery.attempt.to_string()),
            ],
            error: None,
        });
        delivery.attributes.insert(TRACEPARENT.to_owned(), Attribute::text(context.to_string()));
        Some(context)
    }

    /// A call on behalf of a delivery: a claim or a settle.
    pub(crate) fn called(
        &self,
        of: SpanContext,
        operation: &str,
        queue: &QueueName,
        start_ns: u64,
        result: &str,
    ) {
        self.finish(Span {
            context: of.child(),
            parent: Some(of.span),
            links: Vec::new(),
            name: format!("{operation} {queue}"),
            kind: SpanKind::Client,
            start_ns,
            end_ns: now_ns(),
            attributes: vec![
                ("messaging.operation.name", operation.to_owned()),
                ("messaging.destination.name", queue.to_string()),
                ("hapax.result", result.to_owned()),
            ],
            error: None,
        });
    }

    /// The run of a handler that has ended now, after `held`.
    pub fn handled(&self, queue: &str, delivery: &Delivery, held: Duration, error: Option<&str>) {
        let Some(of) = SpanContext::of(&delivery.attributes).filter(|of| of.sampled) else { return };
        let end_ns = now_ns();
        self.finish(Span {
            context: of.child(),
            parent: Some(of.span),
            links: Vec::new(),
            name: format!("process {queue}"),
            kind: SpanKind::Consumer,
            start_ns: end_ns.saturating_sub(u64::try_from(held.as_nanos()).unwrap_or(u64::MAX)),
            end_ns,
            attributes: vec![
                ("messaging.operation.type", "process".to_owned()),
                ("messaging.destination.name", queue.to_owned()),
                ("messaging.message.id", delivery.id.to_string()),
            ],
            error: error.map(str::to_owned),
        });
    }
}

/// A send that is under way.
pub(crate) struct BegunSpan {
    context: SpanContext,
    parent: Option<[u8; 8]>,
    /// The context was added to the message.
    pub injected: bool,
}

impl BegunSpan {
    /// The span of the send.
    pub fn end(self, queue: &QueueName, start_ns: u64, id: Option<String>, error: Option<String>) -> Span {
        let mut attributes = vec![
            ("messaging.operation.type", "send".to_owned()),
            ("messaging.destination.name", queue.to_string()),
        ];
        attributes.extend(id.map(|id| ("messaging.message.id", id)));
        Span {
            context: self.context,
            parent: self.parent,
            links: Vec::new(),
            name: format!("send {queue}"),
            kind: SpanKind::Producer,
            start_ns,
            end_ns: now_ns(),
            attributes,
            error,
        }
    }
}
