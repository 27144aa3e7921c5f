//! Frames of the PostgreSQL protocol (version 3).
//!
//! A request is everything up to a Sync, a simple query, or a message of the start-up. An answer is everything up to the
//! ReadyForQuery that ends it. What the server sends without being asked (notifications, or a FATAL error) is a frame of
//! its own without a label.

use std::collections::HashMap;

/// The label of a request for encryption. Its answer is one byte.
const ENCRYPTION: &str = "ssl-request";
const START: &str = "startup";
const SSL_CODE: u32 = 80_877_103;
const GSS_CODE: u32 = 80_877_104;

/// Splits what a client sends.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    started: bool,
    /// SQL of the prepared statements, by name.
    statements: HashMap<String, String>,
}

/// What was found at the beginning of a buffer.
pub(crate) struct Found {
    pub label: String,
    pub bytes: usize,
    /// The server will answer it.
    pub answered: bool,
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(..4)?.try_into().ok()?))
}

/// The type, the content and the length of the first message.
fn message(buffer: &[u8]) -> Option<(u8, &[u8], usize)> {
    let length = number(buffer.get(1..)?)? as usize + 1;
    Some((buffer[0], buffer.get(5..length)?, length))
}

/// The text up to the first zero byte, and what follows it.
fn text(bytes: &[u8]) -> (String, &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    (String::from_utf8_lossy(&bytes[..end]).into_owned(), bytes.get(end + 1..).unwrap_or_default())
}

impl Requests {
    /// The first whole request of a buffer.
    pub fn next(&mut self, buffer: &[u8]) -> Option<Found> {
        if !self.started {
            let length = number(buffer)? as usize;
            let code = number(buffer.get(4..length)?)?;
            let encryption = code == SSL_CODE || code == GSS_CODE;
            self.started = !encryption;
            let label = if encryption { ENCRYPTION } else { START };
            return Some(Found { label: label.to_owned(), bytes: length, answered: true });
        }
        let (mut label, mut at) = (String::new(), 0);
        loop {
            let (kind, content, length) = message(&buffer[at..])?;
            at += length;
            match kind {
                b'P' => {
                    let (name, rest) = text(content);
                    label = text(rest).0;
                    self.statements.insert(name, label.clone());
                }
                b'B' => {
                    let (name, _) = text(text(content).1);
                    label = self.statements.get(&name).cloned().unwrap_or_default();
                }
                b'Q' => return Some(Found { label: text(content).0, bytes: at, answered: true }),
                b'S' => return Some(Found { label, bytes: at, answered: true }),
                // The end of the session, and the parts of an authentication: the start's answer is still to come.
                b'X' | b'p' => return Some(Found { label: String::new(), bytes: at, answered: false }),
                _ => {}
            }
        }
    }
}

/// The first whole answer of a buffer, to a request with this label; `None`: to none. The flag says whether it ends the
/// request.
pub(crate) fn answer(buffer: &[u8], request: Option<&str>) -> Option<(usize, bool)> {
    match request {
        Some(ENCRYPTION) => return (!buffer.is_empty()).then_some((1, true)),
        Some(_) => {}
        None => return message(buffer).map(|(_, _, length)| (length, false)),
    }
    let mut at = 0;
    loop {
        let (kind, content, length) = message(&buffer[at..])?;
        at += length;
        match kind {
            b'Z' => return Some((at, true)),
            // The client answers before the server continues.
            b'R' if number(content).is_some_and(|code| code != 0 && code != 12) => return Some((at, false)),
            b'E' if content.windows(6).any(|part| part == b"SFATAL") => return Some((at, true)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: u8, content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![kind];
        bytes.extend((content.len() as u32 + 4).to_be_bytes());
        bytes.extend(content);
        bytes
    }

    #[test]
    fn requests_carry_their_sql_also_when_it_was_prepared_before() {
        let mut requests = Requests::default();
        let ssl = [8u32.to_be_bytes(), SSL_CODE.to_be_bytes()].concat();
        assert_eq!(
            requests.next(&ssl).map(|found| (found.label, found.bytes)),
            Some((ENCRYPTION.to_owned(), 8))
        );
        let start = [9u32.to_be_bytes(), 196_608u32.to_be_bytes()].concat();
        assert!(requests.next(&start).is_none(), "a byte is missing");
        let start = [start, vec![0]].concat();
        assert_eq!(
            requests.next(&start).map(|found| (found.label, found.bytes)),
            Some((START.to_owned(), 9))
        );
        let prepare = [one(b'P', b"s1\0SELECT 1\0\0\0"), one(b'D', b"Ss1\0"), one(b'S', b"")].concat();
        let run = [one(b'B', b"\0s1\0\0\0"), one(b'E', b"\0\0\0\0\0"), one(b'S', b"")].concat();
        let commit = one(b'Q', b"COMMIT\0");
        for (wire, label) in [(prepare, "SELECT 1"), (run, "SELECT 1"), (commit, "COMMIT")] {
            for cut in 0..wire.len() {
                assert!(requests.next(&wire[..cut]).is_none(), "{label}: {cut} bytes");
            }
            let found = requests.next(&[wire.clone(), vec![b'X']].concat()).unwrap();
            assert_eq!((found.label.as_str(), found.bytes, found.answered), (label, wire.len(), true));
        }
    }

    #[test]
    fn an_answer_ends_when_the_server_is_ready() {
        let wire = [one(b'C', b"COMMIT\0"), one(b'Z', b"I")].concat();
        for cut in 0..wire.len() {
            assert_eq!(answer(&wire[..cut], Some("COMMIT")), None);
        }
        assert_eq!(answer(&wire, Some("COMMIT")), Some((wire.len(), true)));
        assert_eq!(answer(b"NR", Some(ENCRYPTION)), Some((1, true)));
        let notification = one(b'A', b"\0\0\0\x01hapax\0\0");
        assert_eq!(answer(&notification, None), Some((notification.len(), false)));
        let scram = one(b'R', b"\0\0\0\x0ASCRAM-SHA-256\0\0");
        assert_eq!(answer(&scram, Some(START)), Some((scram.len(), false)), "the client is asked");
    }
}
