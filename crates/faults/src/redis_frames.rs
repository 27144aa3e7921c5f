//! Frames of the Redis protocol (RESP 2 and 3).
//!
//! A request is one command; its label is the command's name in upper case, for example `EVALSHA`. An answer is one reply, with
//! the label of its command. What the server sends without being asked (RESP 3 pushes) is a frame of its own without a label.

/// The label and the length of the first whole command of a buffer.
pub(crate) fn request(buffer: &[u8]) -> Option<(String, usize)> {
    if buffer.first() != Some(&b'*') {
        let (line, length) = line(buffer)?;
        let name = line.split(|byte| *byte == b' ').next().unwrap_or_default();
        return Some((label(name), length));
    }
    let length = value(buffer, 0)?;
    let (_, mut at) = line(buffer)?;
    let (size, name) = line(&buffer[at..])?;
    at += name;
    let bytes = usize::try_from(number(size)).unwrap_or_default();
    Some((label(buffer.get(at..at + bytes).unwrap_or_default()), length))
}

/// The length of the first whole reply of a buffer, and whether it answers a command.
pub(crate) fn answer(buffer: &[u8]) -> Option<(usize, bool)> {
    Some((value(buffer, 0)?, buffer[0] != b'>'))
}

fn label(name: &[u8]) -> String {
    String::from_utf8_lossy(name).to_ascii_uppercase()
}

/// The first line without its end, and its length with it.
fn line(buffer: &[u8]) -> Option<(&[u8], usize)> {
    let end = buffer.windows(2).position(|window| window == b"\r\n")?;
    Some((&buffer[..end], end + 2))
}

/// The number after a type's byte; -1 for one that is missing or is not a number.
fn number(line: &[u8]) -> i64 {
    let digits = line.get(1..).and_then(|digits| std::str::from_utf8(digits).ok());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(-1)
}

/// The end of the value that begins at `at`, once it is complete.
fn value(buffer: &[u8], at: usize) -> Option<usize> {
    let (head, length) = line(buffer.get(at..)?)?;
    let mut end = at + length;
    let count = usize::try_from(number(head)).unwrap_or_default();
    let values = match head.first() {
        // Text with its length: a missing one ends with its line.
        Some(b'$' | b'=' | b'!') if number(head) >= 0 => {
            end += count + 2;
            return (buffer.len() >= end).then_some(end);
        }
        Some(b'*' | b'~' | b'>') => count,
        // Attributes come before the value that they describe.
        Some(b'|') => 2 * count + 1,
        Some(b'%') => 2 * count,
        _ => 0,
    };
    for _ in 0..values {
        end = value(buffer, end)?;
    }
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_named_once_it_is_complete() {
        let wire = b"*3\r\n$7\r\nevalsha\r\n$2\r\nab\r\n$4\r\n\r\n\r\n\r\n";
        for cut in 0..wire.len() {
            assert_eq!(request(&wire[..cut]), None, "{cut} bytes");
        }
        let more = [&wire[..], b"*1\r\n"].concat();
        assert_eq!(request(&more), Some(("EVALSHA".to_owned(), wire.len())));
        assert_eq!(request(b"ping\r\n"), Some(("PING".to_owned(), 6)));
    }

    #[test]
    fn a_reply_ends_with_its_last_value() {
        let replies: [&[u8]; 8] = [
            b"+OK\r\n",
            b":12\r\n",
            b"$-1\r\n",
            b"*2\r\n$2\r\nab\r\n*1\r\n:1\r\n",
            b"%1\r\n+a\r\n_\r\n",
            b"=5\r\ntxt:a\r\n",
            b"|1\r\n+ttl\r\n:1\r\n+OK\r\n",
            b"*0\r\n",
        ];
        for wire in replies {
            for cut in 0..wire.len() {
                assert_eq!(answer(&wire[..cut]), None, "{cut} bytes of {wire:?}");
            }
            assert_eq!(answer(&[wire, b"+x\r\n"].concat()), Some((wire.len(), true)));
        }
        let push = b">2\r\n+message\r\n+a\r\n";
        assert_eq!(answer(push), Some((push.len(), false)), "no command is answered by it");
    }
}
