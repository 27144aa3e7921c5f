//! The addresses of brokers in answers of Kafka: clients learn them there, and would go around a proxy.

/// The address of a broker for clients, by the one that the broker tells; `None` leaves it as it is.
pub(crate) type Replacement<'a> = &'a mut dyn FnMut(&str, u16) -> Option<(String, u16)>;

/// Whether answers to a request may name brokers.
pub(crate) fn names_brokers(label: &str) -> bool {
    label.starts_with("Metadata ") || label.starts_with("FindCoordinator ")
}

/// The answer to such a request in this version, with other addresses; `None` if it is not as expected.
pub(crate) fn replace(label: &str, version: i16, answer: &[u8], other: Replacement<'_>) -> Option<Vec<u8>> {
    let mut fields = Copier { rest: answer.get(4..)?, copied: vec![0; 4], compact: false, other };
    // The number of the request.
    fields.copy(4)?;
    if label.starts_with("Metadata ") {
        fields.metadata(version)?;
    } else {
        fields.coordinators(version)?;
    }
    let mut copied = fields.copied;
    copied.extend(fields.rest);
    let length = u32::try_from(copied.len() - 4).ok()?;
    copied[..4].copy_from_slice(&length.to_be_bytes());
    Some(copied)
}

/// Copies an answer from field to field.
struct Copier<'a> {
    rest: &'a [u8],
    copied: Vec<u8>,
    /// Lengths are written in few bytes, and there may be fields with a tag.
    compact: bool,
    other: Replacement<'a>,
}

impl<'a> Copier<'a> {
    fn metadata(&mut self, version: i16) -> Option<()> {
        self.compact = version >= 9;
        self.tags()?;
        if version >= 3 {
            self.copy(4)?;
        }
        for _ in 0..self.array()? {
            self.copy(4)?;
            self.address()?;
            if version >= 1 {
                self.copy_text()?;
            }
            self.tags()?;
        }
        Some(())
    }

    fn coordinators(&mut self, version: i16) -> Option<()> {
        self.compact = version >= 3;
        self.tags()?;
        if version >= 1 {
            self.copy(4)?;
        }
        if version < 4 {
            self.copy(2)?;
            if version >= 1 {
                self.copy_text()?;
            }
            self.copy(4)?;
            return self.address();
        }
        for _ in 0..self.array()? {
            self.copy_text()?;
            self.copy(4)?;
            self.address()?;
            self.copy(2)?;
            self.copy_text()?;
            self.tags()?;
        }
        Some(())
    }

    /// A host and a port. One that is not known is left as it is.
    fn address(&mut self) -> Option<()> {
        let host = String::from_utf8_lossy(self.take_text()?).into_owned();
        let port = i32::from_be_bytes(self.take(4)?.try_into().ok()?);
        let known = u16::try_from(port).ok().filter(|port| *port > 0);
        let other = known.and_then(|port| (self.other)(&host, port));
        let (host, port) = other.map_or((host, port), |(host, port)| (host, i32::from(port)));
        let length = host.len();
        if self.compact {
            self.write_variable(u32::try_from(length).ok()? + 1);
        } else {
            self.copied.extend(u16::try_from(length).ok()?.to_be_bytes());
        }
        self.copied.extend(host.as_bytes());
        self.copied.extend(port.to_be_bytes());
        Some(())
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(first)
    }

    fn copy(&mut self, count: usize) -> Option<()> {
        let bytes = self.take(count)?;
        self.copied.extend(bytes);
        Some(())
    }

    fn take_variable(&mut self) -> Option<u32> {
        let mut value = 0;
        for shift in [0, 7, 14, 21, 28] {
            let byte = *self.take(1)?.first()?;
            value |= u32::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn write_variable(&mut self, mut value: u32) {
        while value >= 0x80 {
            self.copied.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.copied.push(value as u8);
    }

    /// Text; empty if it is missing.
    fn take_text(&mut self) -> Option<&'a [u8]> {
        let length = if self.compact {
            self.take_variable()?.checked_sub(1).map(|length| length as usize)
        } else {
            usize::try_from(i16::from_be_bytes(self.take(2)?.try_into().ok()?)).ok()
        };
        self.take(length.unwrap_or_default())
    }

    fn copy_text(&mut self) -> Option<()> {
        let before = self.rest;
        self.take_text()?;
        self.copied.extend(&before[..before.len() - self.rest.len()]);
        Some(())
    }

    /// The count of an array that may be missing.
    fn array(&mut self) -> Option<u32> {
        if self.compact {
            let count = self.take_variable()?;
            self.write_variable(count);
            return Some(count.saturating_sub(1));
        }
        let count = i32::from_be_bytes(self.rest.get(..4)?.try_into().ok()?);
        self.copy(4)?;
        Some(u32::try_from(count).unwrap_or(0))
    }

    /// Fields with a tag.
    fn tags(&mut self) -> Option<()> {
        if !self.compact {
            return Some(());
        }
        let count = self.take_variable()?;
        self.write_variable(count);
        for _ in 0..count {
            let (tag, length) = (self.take_variable()?, self.take_variable()?);
            self.write_variable(tag);
            self.write_variable(length);
            self.copy(length as usize)?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(content: &[&[u8]]) -> Vec<u8> {
        let content = content.concat();
        [&u32::try_from(content.len()).unwrap().to_be_bytes()[..], &content].concat()
    }

    fn replaced(label: &str, version: i16, answer: &[u8]) -> Vec<u8> {
        let mut other = |host: &str, port: u16| (host == "kafka").then(|| ("127.0.0.1".to_owned(), port + 1));
        replace(label, version, answer, &mut other).unwrap()
    }

    #[test]
    fn brokers_of_metadata_are_replaced_and_the_rest_stays() {
        let (number, throttle, node, rest) = (b"\0\0\0\x07", b"\0\0\0\0", b"\0\0\0\x01", b"topics");
        let compact = |host: &[u8], port: &[u8]| {
            let tagged = b"\x01\x05\x02ab";
            frame(&[number, tagged, throttle, b"\x02", node, host, port, b"\0", b"\0", rest])
        };
        let found = replaced("Metadata me", 12, &compact(b"\x06kafka", b"\0\0\x23\x84"));
        assert_eq!(found, compact(b"\x0a127.0.0.1", b"\0\0\x23\x85"));
        let unknown = compact(b"\x06other", b"\0\0\x23\x84");
        assert_eq!(replaced("Metadata me", 12, &unknown), unknown);
        let old = |host: &[u8], port: &[u8]| {
            frame(&[number, throttle, b"\0\0\0\x01", node, host, port, b"\xff\xff", rest])
        };
        let found = replaced("Metadata me", 4, &old(b"\0\x05kafka", b"\0\0\x23\x84"));
        assert_eq!(found, old(b"\0\x09127.0.0.1", b"\0\0\x23\x85"));
    }

    #[test]
    fn coordinators_are_replaced_unless_there_is_none() {
        let (number, throttle, node) = (b"\0\0\0\x07", b"\0\0\0\0", b"\0\0\0\x01");
        let new = |host: &[u8], port: &[u8]| {
            frame(&[
                number, b"\0", throttle, b"\x02", b"\x02g", node, host, port, b"\0\0", b"\0", b"\0", b"\0",
            ])
        };
        let found = replaced("FindCoordinator me", 6, &new(b"\x06kafka", b"\0\0\x23\x84"));
        assert_eq!(found, new(b"\x0a127.0.0.1", b"\0\0\x23\x85"));
        let unknown = new(b"\x01", b"\xff\xff\xff\xff");
        assert_eq!(replaced("FindCoordinator me", 6, &unknown), unknown);
        let old =
            |host: &[u8], port: &[u8]| frame(&[number, throttle, b"\0\0", b"\xff\xff", node, host, port]);
        let found = replaced("FindCoordinator me", 2, &old(b"\0\x05kafka", b"\0\0\x23\x84"));
        assert_eq!(found, old(b"\0\x09127.0.0.1", b"\0\0\x23\x85"));
    }

    #[test]
    fn an_answer_that_ends_early_is_not_replaced() {
        let whole = frame(&[b"\0\0\0\x07", b"\0", b"\0\0\0\0", b"\x02", b"\0\0\0\x01", b"\x06kafka"]);
        assert_eq!(replace("Metadata me", 12, &whole, &mut |_, _| None), None);
    }
}
