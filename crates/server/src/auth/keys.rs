//! Keys, their secrets and their rights.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use ring::hmac;

use crate::config::KeyConfig;
use crate::error::ServerError;

/// A loaded key.
pub(crate) struct Key {
    pub(crate) id: String,
    secret: String,
    pub(crate) queues: Globs,
    pub(crate) actions: Globs,
    /// The last derived signing key and its scope: clients sign thousands of requests with the same one.
    signing: Mutex<Option<(String, hmac::Key)>>,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Key {
    pub(crate) fn load(config: &KeyConfig) -> Result<Self, ServerError> {
        let bad =
            |problem: String| ServerError::Config { field: format!("auth.keys.{}", config.id), problem };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if config.id.is_empty() || !config.id.chars().all(plain) {
            return Err(bad("an id consists of letters, digits, - _ and .".into()));
        }
        let secret = match (&config.secret, &config.secret_file, &config.secret_env) {
            (Some(secret), None, None) => secret.expose().to_owned(),
            (None, Some(file), None) => std::fs::read_to_string(file)
                .map_err(|error| bad(format!("secret_file {}: {error}", file.display())))?
                .trim()
                .to_owned(),
            (None, None, Some(name)) => {
                std::env::var(name).map_err(|_| bad(format!("secret_env: {name} is not set")))?
            }
            _ => return Err(bad("give exactly one of secret, secret_file, secret_env".into())),
        };
        if secret.is_empty() {
            return Err(bad("the secret is empty".into()));
        }
        let (queues, actions) = (Globs(config.queues.clone()), Globs(config.actions.clone()));
        Ok(Self { id: config.id.clone(), secret, queues, actions, signing: Mutex::default() })
    }

    /// Compares in constant time.
    pub(crate) fn secret_is(&self, secret: &str) -> bool {
        // Comparing MACs under a fixed key hides the length as well.
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"compare");
        hmac::verify(&key, secret.as_bytes(), hmac::sign(&key, self.secret.as_bytes()).as_ref()).is_ok()
    }

    /// The SigV4 signing key for a scope `date/region/service/aws4_request`.
    pub(crate) fn signing_key(&self, scope: &str) -> hmac::Key {
        let mut last = self.signing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, key)) = &*last
            && known == scope
        {
            return key.clone();
        }
        let secret = format!("AWS4{}", self.secret);
        let key = scope.split('/').fold(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()), |key, part| {
            hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&key, part.as_bytes()).as_ref())
        });
        *last = Some((scope.to_owned(), key.clone()));
        key
    }
}

/// Patterns with `*` and `?`; one of them must match.
#[derive(Debug, Clone)]
pub(crate) struct Globs(Vec<String>);

impl Globs {
    pub(crate) fn matches(&self, text: &str) -> bool {
        self.0.iter().any(|pattern| glob_matches(pattern.as_bytes(), text.as_bytes()))
    }

    /// Whether every name matches.
    pub(crate) fn match_all(&self) -> bool {
        self.0.iter().any(|pattern| pattern == "*")
    }
}

/// Linear in practice: only the last `*` is ever revisited.
fn glob_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "anything", true),
            ("a*", "abc", true),
            ("a*c", "abbc", true),
            ("a*c", "abbd", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*.fifo", "x.fifo", true),
            ("", "", true),
            ("", "a", false),
            ("*a*b*", "xxaxxbxx", true),
        ] {
            assert_eq!(glob_matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
