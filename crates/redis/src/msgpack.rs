//! MessagePack, as far as the scripts use it: they keep messages and counters as arrays of texts, numbers and arrays.

use redis::Value;

/// A value of an array that a script unpacks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Item<'a> {
    Text(&'a str),
    Number(i64),
    Flag(bool),
}

/// An array of at most 15 values.
pub(crate) fn pack(items: &[Item<'_>]) -> Vec<u8> {
    let mut packed =
        vec![0x90 | u8::try_from(items.len()).ok().filter(|count| *count < 16).expect("it is short")];
    for item in items {
        match item {
            Item::Text(text) => {
                packed.push(0xdb);
                packed.extend(u32::try_from(text.len()).expect("a setting is short").to_be_bytes());
                packed.extend(text.as_bytes());
            }
            Item::Number(number) => {
                packed.push(0xd3);
                packed.extend(number.to_be_bytes());
            }
            Item::Flag(flag) => packed.push(if *flag { 0xc3 } else { 0xc2 }),
        }
    }
    packed
}

/// An array that a script has packed, as Redis would answer it: what is false is missing there. `None`: it cannot be read.
pub(crate) fn unpack(packed: &[u8]) -> Option<Value> {
    let mut rest = packed;
    let value = next(&mut rest, DEPTH_MAX)?;
    (rest.is_empty() && matches!(value, Value::Array(_))).then_some(value)
}

/// The history of a message is an array of arrays in an array.
const DEPTH_MAX: usize = 8;

fn take<'p>(rest: &mut &'p [u8], bytes: usize) -> Option<&'p [u8]> {
    let (taken, left) = rest.split_at_checked(bytes)?;
    *rest = left;
    Some(taken)
}

fn unsigned(rest: &mut &[u8], bytes: usize) -> Option<u64> {
    Some(take(rest, bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn length(rest: &mut &[u8], bytes: usize) -> Option<usize> {
    unsigned(rest, bytes)?.try_into().ok()
}

fn text(rest: &mut &[u8], bytes: usize) -> Option<Value> {
    Some(Value::BulkString(take(rest, bytes)?.to_vec()))
}

fn array(rest: &mut &[u8], count: usize, depth: usize) -> Option<Value> {
    (0..count).map(|_| next(rest, depth.checked_sub(1)?)).collect::<Option<Vec<_>>>().map(Value::Array)
}

/// A number with a fraction is cut as Redis does with those of scripts.
#[allow(clippy::cast_possible_truncation, reason = "as Redis does")]
fn cut(number: f64) -> Value {
    Value::Int(number as i64)
}

fn next(rest: &mut &[u8], depth: usize) -> Option<Value> {
    let kind = take(rest, 1)?[0];
    Some(match kind {
        0x00..=0x7f => Value::Int(kind.into()),
        0x90..=0x9f => array(rest, usize::from(kind & 0x0f), depth)?,
        0xa0..=0xbf => text(rest, usize::from(kind & 0x1f))?,
        0xc0 | 0xc2 => Value::Nil,
        0xc3 => Value::Int(1),
        0xca => cut(f32::from_be_bytes(take(rest, 4)?.try_into().ok()?).into()),
        0xcb => cut(f64::from_be_bytes(take(rest, 8)?.try_into().ok()?)),
        0xcc => Value::Int(unsigned(rest, 1)?.try_into().ok()?),
        0xcd => Value::Int(unsigned(rest, 2)?.try_into().ok()?),
        0xce => Value::Int(unsigned(rest, 4)?.try_into().ok()?),
        0xcf => Value::Int(unsigned(rest, 8)?.try_into().ok()?),
        0xd0 => Value::Int(i8::from_be_bytes(take(rest, 1)?.try_into().ok()?).into()),
        0xd1 => Value::Int(i16::from_be_bytes(take(rest, 2)?.try_into().ok()?).into()),
        0xd2 => Value::Int(i32::from_be_bytes(take(rest, 4)?.try_into().ok()?).into()),
        0xd3 => Value::Int(i64::from_be_bytes(take(rest, 8)?.try_into().ok()?)),
        0xd9 => length(rest, 1).and_then(|bytes| text(rest, bytes))?,
        0xda => length(rest, 2).and_then(|bytes| text(rest, bytes))?,
        0xdb => length(rest, 4).and_then(|bytes| text(rest, bytes))?,
        0xdc => length(rest, 2).and_then(|count| array(rest, count, depth))?,
        0xdd => length(rest, 4).and_then(|count| array(rest, count, depth))?,
        0xe0..=0xff => Value::Int(i64::from(kind) - 0x100),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        let packed = pack(&[Item::Text("jobs"), Item::Number(-1), Item::Number(1 << 40), Item::Flag(false)]);
        let jobs = Value::BulkString(b"jobs".to_vec());
        assert_eq!(
            unpack(&packed),
            Some(Value::Array(vec![jobs, Value::Int(-1), Value::Int(1 << 40), Value::Nil]))
        );
    }

    #[test]
    fn an_array_in_an_array_is_read_and_what_is_cut_off_is_not() {
        // [7, ["a"], 300, true]
        let packed = [0x94, 0x07, 0x91, 0xa1, b'a', 0xcd, 0x01, 0x2c, 0xc3];
        let inner = Value::Array(vec![Value::BulkString(b"a".to_vec())]);
        let whole = Value::Array(vec![Value::Int(7), inner, Value::Int(300), Value::Int(1)]);
        assert_eq!(unpack(&packed), Some(whole));
        for end in 0..packed.len() {
            assert_eq!(unpack(&packed[..end]), None, "{end}");
        }
        assert_eq!(unpack(&[0x91; 20]), None, "too deep");
        // A length beyond the end costs no memory.
        assert_eq!(unpack(&[0xdd, 0xff, 0xff, 0xff, 0xff]), None);
        assert_eq!(unpack(b"\x07"), None, "no array");
    }
}
