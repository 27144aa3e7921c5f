//! The context of a span, in the form of W3C's `traceparent`.

use std::fmt;

use hapax_core::{Attribute, Attributes};

/// The attribute of a message that carries the context; an outbox has it as a header.
pub const TRACEPARENT: &str = hapax_core::outbox::TRACEPARENT_HEADER;

/// Identifies a span: its trace, itself, and whether it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The trace.
    pub trace: [u8; 16],
    /// The span.
    pub span: [u8; 8],
    /// It is recorded.
    pub sampled: bool,
}

impl SpanContext {
    /// The first span of a new trace.
    pub fn root() -> Self {
        Self { trace: nonzero(), span: nonzero(), sampled: true }
    }

    /// A span of the same trace.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span: nonzero(), ..self }
    }

    /// Reads a `traceparent`; `None` if it has another form.
    ///
    /// ```
    /// use hapax_observe::trace::SpanContext;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let context = SpanContext::parse(text).unwrap();
    /// assert_eq!((context.sampled, context.to_string().as_str()), (true, text));
    /// assert_eq!(SpanContext::parse("00-0-0-01"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version: [u8; 1] = hex(parts.next()?)?;
        let (trace, span, flags): ([u8; 16], [u8; 8], [u8; 1]) =
            (hex(parts.next()?)?, hex(parts.next()?)?, hex(parts.next()?)?);
        // A later version may have more parts; version 255 is invalid, and so are ids of zeros.
        let valid = version[0] != 255 && (version[0] > 0 || parts.next().is_none());
        (valid && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace,
            span,
            sampled: flags[0] & 1 == 1,
        })
    }

    /// The context in a message's attributes.
    pub fn of(attributes: &Attributes) -> Option<Self> {
        attributes.get(TRACEPARENT).and_then(Attribute::as_text).and_then(Self::parse)
    }

    /// The trace as text, for logs.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.trace))
    }
}

impl fmt::Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("-")?;
        self.span.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.sampled))
    }
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.bytes().all(is_hex) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

fn nonzero<const N: usize>() -> [u8; N] {
    loop {
        let mut bytes = [0; N];
        fastrand::fill(&mut bytes);
        if bytes != [0; N] {
            return bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_well_formed_contexts_are_read() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (text, sampled) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), Some(true)),
            (format!("00-{trace}-00f067aa0ba902b7-00"), Some(false)),
            (format!("cc-{trace}-00f067aa0ba902b7-01-what-comes"), Some(true)),
            (format!("00-{trace}-00f067aa0ba902b7-01-extra"), None),
            (format!("ff-{trace}-00f067aa0ba902b7-01"), None),
            (format!("00-{trace}-0000000000000000-01"), None),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None),
            (format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()), None),
            ("00-é".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(SpanContext::parse(&text).map(|context| context.sampled), sampled, "{text}");
        }
        let root = SpanContext::root();
        assert_eq!(SpanContext::parse(&root.to_string()), Some(root));
        assert_eq!((root.child().trace, root.trace_id().len()), (root.trace, 32));
    }
}
