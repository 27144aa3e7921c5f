//! Parsing of command-line values, and formatting for people.

use std::fmt::Write as _;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The units of time, longest first.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Parses `30s`, `5m`, `2h`, `1h30m`, `250ms` or `0` into milliseconds.
pub fn parse_ms(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a length of time; write 250ms, 30s, 5m, 2h or 1d");
    if text == "0" {
        return Ok(0);
    }
    let (mut total_ms, mut rest) = (0u64, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let (_, unit_ms) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let part_ms = number.checked_mul(*unit_ms).ok_or_else(wrong)?;
        total_ms = total_ms.checked_add(part_ms).ok_or_else(wrong)?;
        rest = tail;
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total_ms) }
}

/// Writes milliseconds the way [`parse_ms`] reads them, to its largest two units.
pub fn show_ms(ms: u64) -> String {
    if ms == 0 {
        return "0".to_owned();
    }
    let (mut text, mut rest_ms, mut parts) = (String::new(), ms, 0);
    for (unit, unit_ms) in UNITS {
        if rest_ms >= unit_ms && parts < 2 {
            write!(text, "{}{unit}", rest_ms / unit_ms).expect("a string takes everything");
            rest_ms %= unit_ms;
            parts += 1;
        }
    }
    text
}

/// Formats a number of bytes with a binary unit.
pub fn show_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// A count of messages, in words.
pub fn messages(count: u64) -> String {
    if count == 1 { "1 message".to_owned() } else { format!("{count} messages") }
}

/// Formats a time (milliseconds since 1970) in UTC, as RFC 3339.
pub fn show_time(ms: u64) -> String {
    let (days, second) = ((ms / 86_400_000) as i64, ms / 1000 % 86_400);
    // Converts days to a date by eras of 400 years, counted from 1 March so that the leap day is the last day.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The same with milliseconds, for events that may follow each other quickly.
pub fn show_time_ms(ms: u64) -> String {
    let time = show_time(ms);
    format!("{}.{:03}Z", time.trim_end_matches('Z'), ms % 1000)
}

/// Makes text safe to show on one line: control characters, and those that reorder or hide text, are escaped.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        let reorders =
            matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}');
        if c.is_control() || reorders || c == '\u{feff}' {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Makes a payload with any bytes safe to show on one line; truncated to `chars_max`.
pub fn show_body(body: &[u8], chars_max: usize) -> String {
    let text = match std::str::from_utf8(body) {
        Ok(text) => escape(text),
        Err(_) => body.escape_ascii().to_string(),
    };
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Parses a value by its name in configuration files.
pub fn parse_word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let named = serde_json::from_value(serde_json::Value::String(text.to_owned()));
    named.map_err(|error| {
        let message = error.to_string();
        let known: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
        if known.is_empty() { message } else { format!("use {}", known.join(", ")) }
    })
}

/// Rewrites times in a message in the units of the command line: `lease_ms: 46800000 is out of range; use 0 to
/// 43200000` becomes `lease: 13h is out of range; use 0 to 12h`.
pub fn with_units(message: &str) -> String {
    let in_units = || {
        let (field, rest) = message.split_once("_ms: ")?;
        let (given, range) = rest.split_once(" is out of range; use ")?;
        let (min, max) = range.split_once(" to ")?;
        let [given, min, max] = [given, min, max].map(|number| number.parse().ok().map(show_ms));
        Some(format!("{field}: {} is out of range; use {} to {}", given?, min?, max?))
    };
    in_units().unwrap_or_else(|| message.to_owned())
}

/// A value's name in configuration files.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

/// Parses `name=value`.
pub fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} has no name; write name=value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_round_trip() {
        for (text, ms) in
            [("0", 0), ("250ms", 250), ("30s", 30_000), ("1h30m", 5_400_000), ("14d", 1_209_600_000)]
        {
            assert_eq!(parse_ms(text), Ok(ms));
            assert_eq!(show_ms(ms), text);
        }
        for bad in ["", "30", "s", "5 m", "-1s", "1w", "99999999999999999999s", "1h5"] {
            assert!(parse_ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_range_is_given_in_the_units_of_the_flag() {
        let of = |message| with_units(message);
        assert_eq!(
            of("lease_ms: 46800000 is out of range; use 0 to 43200000"),
            "lease: 13h is out of range; use 0 to 12h"
        );
        for other in ["retry.max_attempts: 2000 is out of range; use 0 to 1000", "wait_ms: x", ""] {
            assert_eq!(of(other), other);
        }
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_known_ones() {
        let error = parse_word::<hapax::Tier>("exactly-once").unwrap_err();
        assert_eq!(error, "use at-most-once, at-least-once, effectively-once, transactional");
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(show_time(0), "1970-01-01T00:00:00Z");
        assert_eq!(show_time(951_827_696_000), "2000-02-29T12:34:56Z");
        assert_eq!(show_time(1_735_689_599_999), "2024-12-31T23:59:59Z");
        assert_eq!(show_time_ms(1_735_689_599_042), "2024-12-31T23:59:59.042Z");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape("a\x1b[31mb\nc\u{202e}d"), "a\\u{1b}[31mb\\nc\\u{202e}d");
        assert_eq!(escape("Grüße \"x\" \\ y"), "Grüße \"x\" \\ y");
        assert_eq!(show_body(&[0xff, b'a', 0], 80), "\\xffa\\x00");
        assert_eq!(show_body("äöü".as_bytes(), 2), "äö…");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(show_bytes(1023), "1023 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes(3 << 40), "3.0 TiB");
    }
}
