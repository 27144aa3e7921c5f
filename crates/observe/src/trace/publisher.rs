//! Spans of the messages that a relay publishes.

use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::outbox::{
    OutboxMessage, PublishAnswer, PublishSource, Publisher, SinkDescription, TRACEPARENT_HEADER,
};

use super::{Span, SpanContext, SpanKind, Tracer, now_ns};

/// A sink whose publishes are traced: the message of a sampled trace gets a span below that of its transaction, and the sink gets
/// the context of this span. A message without a context gets none; the server that takes it may begin a trace.
pub struct TracedPublisher {
    sink: Arc<dyn Publisher>,
    tracer: Arc<Tracer>,
}

impl TracedPublisher {
    /// Traces what is published to a sink.
    pub fn new(sink: Arc<dyn Publisher>, tracer: Arc<Tracer>) -> Self {
        Self { sink, tracer }
    }

    /// The context in which a message was enqueued, and that of its span, if it is to be recorded.
    fn begin(&self, message: &OutboxMessage) -> Option<(SpanContext, SpanContext)> {
        let parent = SpanContext::parse(message.headers.get(TRACEPARENT_HEADER)?)?;
        Some((parent, self.tracer.begin(Some(parent))?))
    }

    async fn call(&self, source: Option<&PublishSource<'_>>, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        match source {
            Some(source) => self.sink.publish_from(source, batch).await,
            None => self.sink.publish(batch).await,
        }
    }

    async fn traced(
        &self,
        source: Option<&PublishSource<'_>>,
        batch: &[OutboxMessage],
    ) -> Vec<PublishAnswer> {
        let begun: Vec<_> = batch.iter().map(|message| self.begin(message)).collect();
        if begun.iter().all(Option::is_none) {
            return self.call(source, batch).await;
        }
        let start_ns = now_ns();
        let mut traced = batch.to_vec();
        for (message, begun) in traced.iter_mut().zip(&begun) {
            if let Some((_, context)) = begun {
                message.headers.insert(TRACEPARENT_HEADER.to_owned(), context.to_string());
            }
        }
        let answers = self.call(source, &traced).await;
        for ((message, begun), answer) in batch.iter().zip(begun).zip(&answers) {
            if let Some((parent, context)) = begun {
                self.tracer.finish(span(message, parent, context, start_ns, answer));
            }
        }
        answers
    }
}

#[async_trait]
impl Publisher for TracedPublisher {
    fn describe(&self) -> SinkDescription {
        self.sink.describe()
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        self.traced(None, batch).await
    }

    async fn publish_from(&self, source: &PublishSource<'_>, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        self.traced(Some(source), batch).await
    }

    fn released(&self, message: &OutboxMessage) {
        self.sink.released(message);
    }
}

fn span(
    message: &OutboxMessage,
    parent: SpanContext,
    context: SpanContext,
    start_ns: u64,
    answer: &PublishAnswer,
) -> Span {
    let (result, error) = match answer {
        PublishAnswer::Published => ("published", None),
        PublishAnswer::Duplicate => ("duplicate", None),
        PublishAnswer::Refused(why) => ("refused", Some(why.clone())),
        PublishAnswer::Failed(why) => ("failed", Some(why.clone())),
        PublishAnswer::Unavailable(why) => ("unavailable", Some(why.clone())),
        PublishAnswer::NotTried => ("not tried", None),
    };
    let waited_ms = (start_ns / 1_000_000).saturating_sub(message.enqueued_ms);
    Span {
        context,
        parent: Some(parent.span),
        links: Vec::new(),
        name: format!("publish {}", message.topic),
        kind: SpanKind::Producer,
        start_ns,
        end_ns: now_ns(),
        attributes: vec![
            ("messaging.operation.type", "send".to_owned()),
            ("messaging.destination.name", message.topic.clone()),
            ("messaging.message.id", message.id.clone()),
            ("hapax.outbox.waited_ms", waited_ms.to_string()),
            ("hapax.result", result.to_owned()),
        ],
        error,
    }
}
