//! The span of a request, in its caller's trace.

use std::sync::Arc;

use hapax_observe::trace::{Span, SpanContext, SpanKind, TRACEPARENT, Tracer, now_ns};
use http::{HeaderMap, HeaderValue, Method, Request, Response};

use crate::stored::IDEMPOTENT_REPLAYED;

/// A request that is under way.
pub(crate) struct RequestSpan {
    tracer: Arc<Tracer>,
    context: SpanContext,
    parent: Option<SpanContext>,
    method: Method,
    /// Without the query, which may contain data that does not belong in traces.
    path: String,
    start_ns: u64,
    is_ended: bool,
}

/// The run whose response is replayed; in the response's extensions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FirstRun(pub SpanContext);

/// The trace context of a request.
pub(crate) fn context(headers: &HeaderMap) -> Option<SpanContext> {
    SpanContext::parse(headers.get(TRACEPARENT)?.to_str().ok()?)
}

impl RequestSpan {
    /// Begins the span, if it is to be recorded, and gives its context to the request.
    pub fn begin<B>(tracer: &Arc<Tracer>, request: &mut Request<B>) -> Option<Self> {
        let parent = context(request.headers());
        let context = tracer.begin(parent)?;
        let value = HeaderValue::try_from(context.to_string()).expect("hex digits and hyphens");
        request.headers_mut().insert(TRACEPARENT, value);
        Some(Self {
            tracer: tracer.clone(),
            context,
            parent,
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            start_ns: now_ns(),
            is_ended: false,
        })
    }

    /// The trace as text, for logs.
    #[cfg(feature = "proxy")]
    pub fn trace_id(&self) -> String {
        self.context.trace_id()
    }

    /// Ends the span with the head of the response.
    pub fn end<B>(mut self, response: &Response<B>) {
        let (status, headers) = (response.status(), response.headers());
        let replayed = headers.contains_key(IDEMPOTENT_REPLAYED);
        let first = response.extensions().get::<FirstRun>().filter(|_| replayed);
        let links = first.map(|first| first.0).into_iter().collect();
        let attributes = vec![
            ("http.response.status_code", status.as_u16().to_string()),
            ("hapax.replayed", replayed.to_string()),
        ];
        self.finish(links, attributes, status.is_server_error().then(|| status.to_string()));
        self.is_ended = true;
    }

    fn finish(
        &self,
        links: Vec<SpanContext>,
        mut attributes: Vec<(&'static str, String)>,
        error: Option<String>,
    ) {
        let method = self.method.to_string();
        attributes.extend([("http.request.method", method.clone()), ("url.path", self.path.clone())]);
        self.tracer.finish(Span {
            context: self.context,
            parent: self.parent.map(|parent| parent.span),
            links,
            name: method,
            kind: SpanKind::Server,
            start_ns: self.start_ns,
            end_ns: now_ns(),
            attributes,
            error,
        });
    }
}

/// A caller that goes away ends its request, not the run: the run's span is there for those who get its response.
impl Drop for RequestSpan {
    fn drop(&mut self) {
        if !self.is_ended {
            self.finish(Vec::new(), Vec::new(), Some("the caller went away before the response".to_owned()));
        }
    }
}
