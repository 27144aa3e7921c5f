//! Spans in OTLP's protobuf encoding: the few messages of `ExportTraceServiceRequest` that spans need, written by hand. The generated
//! code and its crates would be larger than everything else that traces take.

use super::{CONVENTIONS, Span, SpanContext, SpanKind};

/// The body of an export of these spans by the service of this name.
pub fn encode(service: &str, spans: &[Span]) -> Vec<u8> {
    let mut scope = Message::default();
    scope.text(1, "hapax").text(2, env!("CARGO_PKG_VERSION"));
    let mut scope_spans = Message::default();
    scope_spans.message(1, &scope);
    for span in spans {
        scope_spans.message(2, &span_message(span));
    }
    let schema = format!("https://opentelemetry.io/schemas/{CONVENTIONS}");
    scope_spans.text(3, &schema);
    let mut resource = Message::default();
    resource.message(1, &attribute("service.name", service));
    let mut resource_spans = Message::default();
    resource_spans.message(1, &resource).message(2, &scope_spans).text(3, &schema);
    let mut request = Message::default();
    request.message(1, &resource_spans);
    request.0
}

fn span_message(span: &Span) -> Message {
    let kind = match span.kind {
        SpanKind::Server => 2,
        SpanKind::Client => 3,
        SpanKind::Producer => 4,
        SpanKind::Consumer => 5,
    };
    let mut message = Message::default();
    message.bytes(1, &span.context.trace).bytes(2, &span.context.span);
    if let Some(parent) = &span.parent {
        message.bytes(4, parent);
    }
    message.text(5, &span.name).number(6, kind).fixed(7, span.start_ns).fixed(8, span.end_ns);
    if span.kind != SpanKind::Server {
        message.message(9, &attribute("messaging.system", "hapax"));
    }
    for (name, value) in &span.attributes {
        message.message(9, &attribute(name, value));
    }
    for link in &span.links {
        message.message(13, &link_message(link));
    }
    if let Some(error) = &span.error {
        let mut status = Message::default();
        status.text(2, error).number(3, 2);
        message.message(15, &status);
    }
    message
}

fn link_message(link: &SpanContext) -> Message {
    let mut message = Message::default();
    message.bytes(1, &link.trace).bytes(2, &link.span);
    message
}

fn attribute(name: &str, value: &str) -> Message {
    let mut text = Message::default();
    text.text(1, value);
    let mut message = Message::default();
    message.text(1, name).message(2, &text);
    message
}

/// A protobuf message as it is written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) -> &mut Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(&mut self, field: u64, text: &str) -> &mut Self {
        self.bytes(field, text.as_bytes())
    }

    fn message(&mut self, field: u64, message: &Self) -> &mut Self {
        self.bytes(field, &message.0)
    }

    fn number(&mut self, field: u64, value: u64) -> &mut Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn fixed(&mut self, field: u64, value: u64) -> &mut Self {
        self.varint(field << 3 | 1);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
}
