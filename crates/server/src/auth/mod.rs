//! Authentication and authorization: keys and their rights, SigV4 for SQS, bearer tokens for the rest.

mod keys;
mod sigv4;

use std::collections::HashMap;
use std::sync::Arc;

use hapax_core::{QueueInfo, QueueName, RedriveTask};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use thiserror::Error;

use self::keys::Key;
pub(crate) use self::sigv4::SignedRequest;
use crate::config::AuthConfig;
use crate::error::ServerError;

/// Why credentials were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AuthError {
    /// The request has no credentials.
    #[error("Request is missing Authentication Token")]
    Missing,
    /// The credentials cannot be parsed.
    #[error("{0}")]
    Incomplete(String),
    /// The key is unknown.
    #[error("The security token included in the request is invalid.")]
    UnknownKey,
    /// The signature or secret is wrong.
    #[error(
        "The request signature we calculated does not match the signature you provided. Check your AWS Secret \
         Access Key and signing method. Consult the service documentation for details."
    )]
    Mismatch,
    /// The signature is too old, or from the future.
    #[error("{0}")]
    Expired(String),
}

/// An authenticated caller and its rights.
#[derive(Debug, Clone)]
pub struct Identity {
    /// `None` if the server has no keys: then any caller may do anything.
    key: Option<Arc<Key>>,
}

impl Identity {
    /// A name for logs and audits: the key's id, or `anonymous`.
    pub fn name(&self) -> &str {
        self.key.as_ref().map_or("anonymous", |key| &key.id)
    }

    /// Whether the caller may call `action` (an SQS action name) on `queue`; `None` for actions without a queue.
    pub fn may(&self, action: &str, queue: Option<&str>) -> bool {
        self.key.as_ref().is_none_or(|key| {
            key.actions.matches(action) && queue.is_none_or(|queue| key.queues.matches(queue))
        })
    }

    /// Whether the caller may do an action on the whole store, for example copy it: only a key for all queues may.
    pub fn may_operate(&self, action: &str) -> bool {
        self.key.as_ref().is_none_or(|key| key.actions.matches(action) && key.queues.match_all())
    }

    /// Whether the caller may see figures of the whole store: only a key for all queues may.
    pub fn may_see_all(&self) -> bool {
        self.key.as_ref().is_none_or(|key| key.queues.match_all())
    }

    /// Whether the caller may see a redrive in a listing: it may if it may see every queue that the redrive names.
    pub(crate) fn may_see_task(&self, task: &RedriveTask) -> bool {
        let filter = &task.filter;
        let named = task.to.iter().chain(&filter.source).chain(&filter.sources);
        named.into_iter().all(|queue| self.may_see(queue.as_str()))
    }

    /// Whether the caller may see `queue` in a listing.
    pub fn may_see(&self, queue: &str) -> bool {
        self.key.as_ref().is_none_or(|key| key.queues.matches(queue))
    }
}

/// The queues that name `dead` as their dead-letter queue.
pub(crate) fn sources_of(queues: &[QueueInfo], dead: &QueueName) -> Vec<QueueName> {
    let names_it = |info: &&QueueInfo| info.config.dead_letter.as_ref().is_some_and(|d| d.queue == *dead);
    queues.iter().filter(names_it).map(|info| info.name.clone()).collect()
}

/// Checks credentials.
#[derive(Debug)]
pub struct Authenticator {
    keys: HashMap<String, Arc<Key>>,
}

impl Authenticator {
    /// Loads the keys; secrets come from the configuration, files or the environment.
    pub fn new(config: &AuthConfig) -> Result<Self, ServerError> {
        let mut keys = HashMap::new();
        for key in &config.keys {
            let key = Key::load(key)?;
            if let Some(twice) = keys.insert(key.id.clone(), Arc::new(key)) {
                let problem = format!("the key {} is there twice", twice.id);
                return Err(ServerError::Config { field: "auth.keys".into(), problem });
            }
        }
        Ok(Self { keys })
    }

    /// The problems of all unusable keys, not just of the first.
    pub(crate) fn problems(config: &AuthConfig) -> Vec<ServerError> {
        let mut found: Vec<ServerError> = config.keys.iter().filter_map(|key| Key::load(key).err()).collect();
        for (at, key) in config.keys.iter().enumerate() {
            if config.keys[..at].iter().any(|other| other.id == key.id) {
                let problem = format!("the key {} is there twice", key.id);
                found.push(ServerError::Config { field: "auth.keys".into(), problem });
            }
        }
        found
    }

    /// Whether credentials are required.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Checks `Authorization: Bearer ID:SECRET`.
    pub fn bearer(&self, headers: &HeaderMap) -> Result<Identity, AuthError> {
        if !self.has_keys() {
            return Ok(Identity { key: None });
        }
        let value = headers.get(AUTHORIZATION).ok_or(AuthError::Missing)?;
        let form = || AuthError::Incomplete("use the header Authorization: Bearer ID:SECRET".to_owned());
        let token = value.to_str().ok().and_then(bearer_token).ok_or_else(form)?;
        let (id, secret) = token.split_once(':').ok_or_else(form)?;
        let key = self.keys.get(id).ok_or(AuthError::UnknownKey)?;
        if key.secret_is(secret) { Ok(Identity { key: Some(key.clone()) }) } else { Err(AuthError::Mismatch) }
    }

    /// Whether a request states a signature by a known key: nothing more can be checked before the body has arrived.
    pub(crate) fn names_known_key(&self, parts: &http::request::Parts) -> Result<(), AuthError> {
        if !self.has_keys() {
            return Ok(());
        }
        let (method, uri, headers) = (&parts.method, &parts.uri, &parts.headers);
        let claim = sigv4::StatedSignature::read(&SignedRequest { method, uri, headers, body: &[] })?;
        self.keys.get(claim.key_id.as_ref()).map(drop).ok_or(AuthError::UnknownKey)
    }

    /// Checks a SigV4 signature, in the headers or in the query of a presigned URL. It must have been made at most 15
    /// minutes from `now_s` (seconds since 1970).
    pub(crate) fn sigv4(&self, request: &SignedRequest<'_>, now_s: u64) -> Result<Identity, AuthError> {
        if !self.has_keys() {
            return Ok(Identity { key: None });
        }
        let claim = sigv4::StatedSignature::read(request)?;
        let key = self.keys.get(claim.key_id.as_ref()).ok_or(AuthError::UnknownKey)?;
        claim.verify(request, key, "sqs", now_s)?;
        Ok(Identity { key: Some(key.clone()) })
    }
}

fn bearer_token(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{KeyConfig, Secret};

    fn authenticator() -> Authenticator {
        let key = KeyConfig {
            id: "AK".into(),
            secret: Some(Secret::new("se:cret")),
            secret_file: None,
            secret_env: None,
            queues: vec!["orders-*".into()],
            actions: vec!["Send*".into(), "ReceiveMessage".into()],
        };
        Authenticator::new(&AuthConfig { keys: vec![key], ..AuthConfig::default() }).unwrap()
    }

    fn bearer(value: &str) -> Result<Identity, AuthError> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, value.parse().unwrap());
        authenticator().bearer(&headers)
    }

    #[test]
    fn a_bearer_token_needs_the_right_secret() {
        assert_eq!(bearer("Bearer AK:se:cret").unwrap().name(), "AK");
        assert_eq!(bearer("bearer AK:wrong").unwrap_err(), AuthError::Mismatch);
        assert_eq!(bearer("Bearer XX:se:cret").unwrap_err(), AuthError::UnknownKey);
        assert!(matches!(bearer("Basic QUs6").unwrap_err(), AuthError::Incomplete(_)));
        assert_eq!(authenticator().bearer(&HeaderMap::new()).unwrap_err(), AuthError::Missing);
    }

    #[test]
    fn a_key_may_do_what_it_was_given() {
        let identity = bearer("Bearer AK:se:cret").unwrap();
        assert!(identity.may("SendMessageBatch", Some("orders-eu")));
        assert!(!identity.may("SendMessage", Some("payments")));
        assert!(!identity.may("PurgeQueue", Some("orders-eu")));
        assert!(!identity.may_see("payments"));
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        assert!(!format!("{:?}", authenticator()).contains("se:cret"));
    }
}
