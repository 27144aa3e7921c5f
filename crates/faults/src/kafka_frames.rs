//! Frames of the Kafka protocol.
//!
//! A frame is a whole request or answer. The label of a request is its name, followed by its `transactional.id`, or by the
//! client's id if it has none: `Produce orders-1`, `Fetch reader`. The end of a transaction also says which end it is:
//! `EndTxn orders-1 commit`. An answer has the label of its request, which it names by number.

/// The request that ends a transaction.
const END_TXN: i16 = 26;
/// The request that asks for transactions by a list of ids, of which the first one counts here.
const DESCRIBE_TRANSACTIONS: i16 = 65;

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub label: String,
    pub number: i32,
    pub version: i16,
    pub bytes: usize,
}

/// The first whole request of a buffer.
pub(crate) fn request(buffer: &[u8]) -> Option<Request> {
    let (content, length) = frame(buffer)?;
    let mut rest = Rest(content);
    let (key, version) = (rest.short().unwrap_or(-1), rest.short().unwrap_or(-1));
    let number = rest.number().unwrap_or(-1);
    let client = rest.text().unwrap_or_default();
    let of = transaction(key, version, &mut rest).unwrap_or(client);
    let end = if key == END_TXN { rest.ending().unwrap_or_default() } else { "" };
    let label = format!("{} {of}{end}", name(key));
    Some(Request { label, number, version, bytes: length })
}

/// The number of the request that the first whole answer of a buffer is for, and the answer's length.
pub(crate) fn answer(buffer: &[u8]) -> Option<(i32, usize)> {
    let (content, length) = frame(buffer)?;
    Some((Rest(content).number().unwrap_or(-1), length))
}

/// The content of the first whole frame, and its length.
fn frame(buffer: &[u8]) -> Option<(&[u8], usize)> {
    let size = u32::from_be_bytes(buffer.get(..4)?.try_into().ok()?);
    let length = 4 + usize::try_from(size).ok()?;
    Some((buffer.get(4..length)?, length))
}

/// The `transactional.id`, which is the first field of the requests that have one.
fn transaction(key: i16, version: i16, body: &mut Rest<'_>) -> Option<String> {
    // From which version on lengths are written in few bytes, and fields with a tag are possible.
    let compact_from = match key {
        0 => 9,
        22 => 2,
        24..=END_TXN | 28 => 3,
        DESCRIBE_TRANSACTIONS => 0,
        _ => return None,
    };
    if version < compact_from {
        return body.text();
    }
    // Clients put no fields with a tag into the header.
    if body.variable()? != 0 || (key == DESCRIBE_TRANSACTIONS && body.variable()? < 2) {
        return None;
    }
    body.compact_text()
}

/// What is still to be read of a request.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn short(&mut self) -> Option<i16> {
        self.take().map(i16::from_be_bytes)
    }

    fn number(&mut self) -> Option<i32> {
        self.take().map(i32::from_be_bytes)
    }

    fn variable(&mut self) -> Option<u32> {
        let mut value = 0;
        for shift in [0, 7, 14, 21, 28] {
            let [byte] = self.take()?;
            value |= u32::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.short()?).ok()?;
        self.string(length)
    }

    fn compact_text(&mut self) -> Option<String> {
        let length = usize::try_from(self.variable()?.checked_sub(1)?).ok()?;
        self.string(length)
    }

    /// Whether a transaction is committed, which follows its `transactional.id` and the producer's id and epoch.
    fn ending(&mut self) -> Option<&'static str> {
        let [.., committed] = self.take::<11>()?;
        Some(if committed == 0 { " abort" } else { " commit" })
    }

    fn string(&mut self, length: usize) -> Option<String> {
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

/// The name of a request.
fn name(key: i16) -> String {
    let known = match key {
        0 => "Produce",
        1 => "Fetch",
        2 => "ListOffsets",
        3 => "Metadata",
        8 => "OffsetCommit",
        9 => "OffsetFetch",
        10 => "FindCoordinator",
        11 => "JoinGroup",
        12 => "Heartbeat",
        13 => "LeaveGroup",
        14 => "SyncGroup",
        17 => "SaslHandshake",
        18 => "ApiVersions",
        19 => "CreateTopics",
        22 => "InitProducerId",
        24 => "AddPartitionsToTxn",
        25 => "AddOffsetsToTxn",
        END_TXN => "EndTxn",
        28 => "TxnOffsetCommit",
        36 => "SaslAuthenticate",
        DESCRIBE_TRANSACTIONS => "DescribeTransactions",
        68 => "ConsumerGroupHeartbeat",
        _ => return format!("Api{key}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(key: i16, version: i16, body: &[u8]) -> Vec<u8> {
        let mut content = [key.to_be_bytes(), version.to_be_bytes()].concat();
        content.extend(7i32.to_be_bytes());
        content.extend(b"\0\x02me");
        content.extend(body);
        [&u32::try_from(content.len()).unwrap().to_be_bytes()[..], &content].concat()
    }

    #[test]
    fn a_request_is_named_with_its_transaction_or_its_client_once_it_is_complete() {
        let requests = [
            (wire(26, 5, b"\0\x05tx-1more"), "EndTxn tx-1"),
            (wire(26, 1, b"\0\x04tx-1more"), "EndTxn tx-1"),
            (wire(26, 5, b"\0\x05tx-1producer\0\x07\x01\0"), "EndTxn tx-1 commit"),
            (wire(26, 3, b"\0\x05tx-1producer\0\x07\0\0"), "EndTxn tx-1 abort"),
            (wire(28, 3, b"\0\x05tx-1more"), "TxnOffsetCommit tx-1"),
            (wire(0, 12, b"\0\x05tx-1more"), "Produce tx-1"),
            (wire(0, 8, b"\xff\xff\0\x01"), "Produce me"),
            (wire(0, 12, b"\0\0\0\x01"), "Produce me"),
            (wire(1, 17, b""), "Fetch me"),
            (wire(65, 0, b"\0\x02\x05tx-1more"), "DescribeTransactions tx-1"),
            (wire(65, 0, b"\0\x01more"), "DescribeTransactions me"),
            (wire(99, 0, b""), "Api99 me"),
        ];
        for (wire, label) in requests {
            for cut in 0..wire.len() {
                assert_eq!(request(&wire[..cut]), None, "{label}: {cut} bytes");
            }
            let more = [&wire[..], b"\0\0"].concat();
            let found = request(&more).unwrap();
            assert_eq!((found.label.as_str(), found.number, found.bytes), (label, 7, wire.len()));
        }
    }

    #[test]
    fn an_answer_names_its_request_by_number() {
        let wire = b"\0\0\0\x06\0\0\0\x07ab";
        for cut in 0..wire.len() {
            assert_eq!(answer(&wire[..cut]), None, "{cut} bytes");
        }
        assert_eq!(answer(&[&wire[..], b"\0"].concat()), Some((7, wire.len())));
    }
}
