//! Verification of AWS Signature Version 4, in the header or in a presigned query.

use std::borrow::Cow;
use std::fmt::Write as _;

use http::header::{AUTHORIZATION, HOST};
use http::{HeaderMap, Method, Uri};
use ring::{digest, hmac};

use super::AuthError;
use super::keys::Key;
use crate::sqs::{form_pairs, percent_decode};

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
/// Maximum difference of the client's clock, in seconds.
const SKEW_S: u64 = 15 * 60;
/// Maximum lifetime of a presigned URL: 7 days.
const EXPIRES_S_MAX: u64 = 7 * 24 * 3600;

/// The parts of a request that its signature covers.
#[derive(Clone, Copy)]
pub(crate) struct SignedRequest<'a> {
    pub(crate) method: &'a Method,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a [u8],
}

/// The signature of a request, as stated by the request.
#[derive(Debug)]
pub(crate) struct StatedSignature<'a> {
    pub(crate) key_id: Cow<'a, str>,
    /// `date/region/service/aws4_request`
    scope: Cow<'a, str>,
    signed_headers: Cow<'a, str>,
    signature: Cow<'a, str>,
    /// `20150830T123600Z`
    date: Cow<'a, str>,
    /// Set for presigned URLs.
    expires_s: Option<u64>,
}

fn incomplete(problem: impl Into<String>) -> AuthError {
    AuthError::Incomplete(problem.into())
}

impl<'a> StatedSignature<'a> {
    /// Finds the signature in the headers or in the query.
    pub(crate) fn read(request: &SignedRequest<'a>) -> Result<Self, AuthError> {
        match request.headers.get(AUTHORIZATION) {
            Some(value) => {
                let value = value.to_str().map_err(|_| incomplete("Authorization header is not ASCII."))?;
                Self::from_header(value, request.headers)
            }
            None => Self::from_query(request.uri.query().unwrap_or_default()),
        }
    }

    fn from_header(value: &'a str, headers: &'a HeaderMap) -> Result<Self, AuthError> {
        let Some(fields) = value.strip_prefix(ALGORITHM) else {
            return Err(incomplete(format!(
                "Unsupported authorization scheme; sign the request with {ALGORITHM}."
            )));
        };
        let field = |name: &str| {
            let mut parts = fields.split(',').filter_map(|part| part.trim().split_once('='));
            parts
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value)
                .ok_or_else(|| incomplete(format!("Authorization header requires '{name}' parameter.")))
        };
        let (credential, signature, signed) =
            (field("Credential")?, field("Signature")?, field("SignedHeaders")?);
        let date = headers.get("x-amz-date").and_then(|date| date.to_str().ok()).ok_or_else(|| {
            incomplete("Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header.")
        })?;
        let (key_id, scope) = split_credential(credential.into())?;
        Ok(Self {
            key_id,
            scope,
            signed_headers: signed.into(),
            signature: signature.into(),
            date: date.into(),
            expires_s: None,
        })
    }

    fn from_query(query: &'a str) -> Result<Self, AuthError> {
        let find = |name: &str| form_pairs(query).find(|(key, _)| key == name).map(|(_, value)| value);
        let Some(algorithm) = find("X-Amz-Algorithm") else { return Err(AuthError::Missing) };
        if algorithm != ALGORITHM {
            return Err(incomplete(format!("X-Amz-Algorithm must be {ALGORITHM}.")));
        }
        let field =
            |name: &str| find(name).ok_or_else(|| incomplete(format!("The query requires '{name}'.")));
        let expires = field("X-Amz-Expires")?.parse::<u64>().ok().filter(|s| (1..=EXPIRES_S_MAX).contains(s));
        let expires = expires.ok_or_else(|| incomplete("X-Amz-Expires must be 1 to 604800 seconds."))?;
        let (key_id, scope) = split_credential(field("X-Amz-Credential")?)?;
        Ok(Self {
            key_id,
            scope,
            signed_headers: field("X-Amz-SignedHeaders")?,
            signature: field("X-Amz-Signature")?,
            date: field("X-Amz-Date")?,
            expires_s: Some(expires),
        })
    }

    /// Checks time, scope and signature.
    pub(crate) fn verify(
        &self,
        request: &SignedRequest<'_>,
        key: &Key,
        service: &str,
        now_s: u64,
    ) -> Result<(), AuthError> {
        let signed_s = parse_date(&self.date)
            .ok_or_else(|| incomplete("Date must be in ISO-8601 'basic format', like 20150830T123600Z."))?;
        self.check_scope(service)?;
        if !self.signed_headers.split(';').any(|name| name == "host") {
            return Err(incomplete("'Host' must be a 'SignedHeader' in the AWS Authorization."));
        }
        // The header names the action: if it were not signed, a request for one action could be replayed as another.
        let signs_target = self.signed_headers.split(';').any(|name| name == "x-amz-target");
        if request.headers.contains_key("x-amz-target") && !signs_target {
            return Err(incomplete("'X-Amz-Target' must be a 'SignedHeader' in the AWS Authorization."));
        }
        let mut to_sign = String::with_capacity(160);
        let hash = digest::digest(&digest::SHA256, self.canonical(request)?.as_bytes());
        let _ = write!(to_sign, "{ALGORITHM}\n{}\n{}\n", self.date, self.scope);
        push_hex(&mut to_sign, hash.as_ref());
        let signature = unhex(&self.signature).ok_or(AuthError::Mismatch)?;
        // Constant time. The date is checked afterwards, so that only a client with the secret learns that the date was
        // wrong.
        hmac::verify(&key.signing_key(&self.scope), to_sign.as_bytes(), &signature)
            .map_err(|_| AuthError::Mismatch)?;
        self.check_time(signed_s, now_s)
    }

    fn check_scope(&self, service: &str) -> Result<(), AuthError> {
        let parts: Vec<&str> = self.scope.split('/').collect();
        match parts.as_slice() {
            [date, region, named, "aws4_request"] if !region.is_empty() => {
                if *named != service {
                    let problem = format!("Credential should be scoped to correct service: '{service}'. ");
                    return Err(incomplete(problem));
                }
                if self.date.get(..8) != Some(*date) {
                    return Err(incomplete(
                        "Date in Credential scope does not match YYYYMMDD from ISO-8601.",
                    ));
                }
                Ok(())
            }
            _ => Err(incomplete("Credential must have exactly 5 slash-delimited elements.")),
        }
    }

    fn check_time(&self, signed_s: u64, now_s: u64) -> Result<(), AuthError> {
        let valid_s = self.expires_s.unwrap_or(SKEW_S);
        let now = format_date(now_s);
        if signed_s + valid_s < now_s {
            let limit = format_date(now_s - valid_s);
            let text = format!(
                "Signature expired: {} is now earlier than {limit} ({now} - {valid_s} s.)",
                self.date
            );
            return Err(AuthError::Expired(text));
        }
        if signed_s > now_s + SKEW_S {
            let limit = format_date(now_s + SKEW_S);
            let text = format!(
                "Signature not yet current: {} is still later than {limit} ({now} + 15 min.)",
                self.date
            );
            return Err(AuthError::Expired(text));
        }
        Ok(())
    }

    fn canonical(&self, request: &SignedRequest<'_>) -> Result<String, AuthError> {
        let mut text = String::with_capacity(512);
        text.push_str(request.method.as_str());
        text.push('\n');
        push_path(&mut text, request.uri.path());
        text.push('\n');
        push_query(&mut text, request.uri.query().unwrap_or_default(), self.expires_s.is_some());
        text.push('\n');
        for name in self.signed_headers.split(';') {
            push_header(&mut text, name, request)?;
        }
        text.push('\n');
        text.push_str(&self.signed_headers);
        text.push('\n');
        push_hex(&mut text, digest::digest(&digest::SHA256, request.body).as_ref());
        Ok(text)
    }
}

fn split_credential(credential: Cow<'_, str>) -> Result<(Cow<'_, str>, Cow<'_, str>), AuthError> {
    let bad = || incomplete("Credential must have exactly 5 slash-delimited elements.");
    match credential {
        Cow::Borrowed(text) => text.split_once('/').map(|(id, scope)| (id.into(), scope.into())),
        Cow::Owned(text) => {
            text.split_once('/').map(|(id, scope)| (id.to_owned().into(), scope.to_owned().into()))
        }
    }
    .ok_or_else(bad)
}

fn push_header(text: &mut String, name: &str, request: &SignedRequest<'_>) -> Result<(), AuthError> {
    let missing = || AuthError::Mismatch;
    text.push_str(name);
    text.push(':');
    let mut first = true;
    for value in request.headers.get_all(name) {
        if !first {
            text.push(',');
        }
        first = false;
        let value = std::str::from_utf8(value.as_bytes()).map_err(|_| missing())?;
        for (index, word) in value.split_ascii_whitespace().enumerate() {
            if index > 0 {
                text.push(' ');
            }
            text.push_str(word);
        }
    }
    if first {
        // Over HTTP/2 the host is not a header.
        let host = hapax_net::guard::host_of(request.headers, request.uri).filter(|_| name == HOST.as_str());
        text.push_str(host.ok_or_else(missing)?);
    }
    text.push('\n');
    Ok(())
}

/// Appends the path with dot segments and double slashes resolved, and encoded once more (as all services but S3
/// require).
fn push_path(text: &mut String, path: &str) {
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    for segment in &segments {
        text.push('/');
        push_encoded(text, segment.as_bytes());
    }
    if segments.is_empty() || path.ends_with('/') {
        text.push('/');
    }
}

fn push_query(text: &mut String, query: &str, presigned: bool) {
    let mut pairs: Vec<(String, String)> = query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (encoded(&percent_decode(name)), encoded(&percent_decode(value)))
        })
        .filter(|(name, _)| !(presigned && name == "X-Amz-Signature"))
        .collect();
    pairs.sort_unstable();
    for (index, (name, value)) in pairs.iter().enumerate() {
        if index > 0 {
            text.push('&');
        }
        let _ = write!(text, "{name}={value}");
    }
}

fn encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 8);
    push_encoded(&mut text, bytes);
    text
}

fn push_encoded(text: &mut String, bytes: &[u8]) {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(byte as char);
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)] as char);
        text.push(DIGITS[usize::from(byte & 15)] as char);
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let pairs = text.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// `20150830T123600Z` as seconds since 1970.
fn parse_date(date: &str) -> Option<u64> {
    let bytes = date.as_bytes();
    if bytes.len() != 16 || bytes[8] != b'T' || bytes[15] != b'Z' {
        return None;
    }
    let number = |from: usize, to: usize| {
        bytes[from..to].iter().try_fold(0u64, |n, b| b.is_ascii_digit().then(|| n * 10 + u64::from(b - b'0')))
    };
    let (year, month, day) = (number(0, 4)?, number(4, 6)?, number(6, 8)?);
    let (hour, minute, second) = (number(9, 11)?, number(11, 13)?, number(13, 15)?);
    let valid = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    valid.then(|| days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Howard Hinnant's `days_from_civil`, for years from 1970 on.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let y = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (y / 400, y % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

fn format_date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
#[path = "sigv4_tests.rs"]
mod tests;
