//! Strict parsing of requests: bounded in size and time; an unknown field is rejected with a suggestion.

use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use bytes::Bytes;
use hapax_client::wire::Problem;
use hapax_core::store::SharedStore;
use hapax_core::{QueueName, RedriveFilter, Scope};
use http::StatusCode;
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::BODY_BYTES_MAX;
use super::problem::ApiError;
use crate::auth::{Identity, sources_of};

/// Maximum time for a body to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// A JSON body. An empty one counts as `{}`.
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let read = tokio::time::timeout(READ_TIMEOUT, Bytes::from_request(request, state)).await;
        let read = read.map_err(|_| {
            let problem = Problem::new("request-timeout", "the body did not arrive in time", true);
            ApiError::new(StatusCode::REQUEST_TIMEOUT, problem)
        })?;
        let body = read.map_err(|rejection| {
            if rejection.status() != StatusCode::PAYLOAD_TOO_LARGE {
                return ApiError::invalid("the body could not be read");
            }
            let detail = format!("the body is larger than {BODY_BYTES_MAX} bytes; send smaller batches");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Problem::new("request-too-large", detail, false))
        })?;
        parse(&body).map(Self)
    }
}

/// Parses JSON; the error names the position.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| ApiError::invalid(did_you_mean(&error.to_string())))
}

/// The query of the URL.
pub(super) struct Params<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(ApiError::invalid(did_you_mean(&rejection.body_text()))),
        }
    }
}

/// The caller. A request without an identity bypassed the server's checks and is refused.
pub(super) struct Caller(Identity);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Identity>().cloned().map(Self).ok_or_else(ApiError::unauthenticated)
    }
}

impl Caller {
    /// The queue in the path, if the caller may do `action` on it.
    pub(super) fn allowed_queue(&self, action: &str, queue: &str) -> Result<QueueName, ApiError> {
        let name = QueueName::new(queue).map_err(|error| ApiError::invalid(error.to_string()))?;
        self.check_queue(action, &name)?;
        Ok(name)
    }

    pub(super) fn check_queue(&self, action: &str, queue: &QueueName) -> Result<(), ApiError> {
        if self.0.may(action, Some(queue.as_str())) {
            return Ok(());
        }
        Err(ApiError::forbidden(action, Some(format!("queue {queue}"))))
    }

    /// Whether the caller may do `action` in a scope.
    pub(super) fn check_scope(&self, action: &str, scope: &Scope) -> Result<(), ApiError> {
        if self.0.may(action, Some(rights_name(scope))) {
            return Ok(());
        }
        Err(ApiError::forbidden(action, Some(format!("scope {scope}"))))
    }

    pub(super) fn may_see_scope(&self, scope: &Scope) -> bool {
        self.0.may_see(rights_name(scope))
    }

    /// Whether the caller may do `action`, which concerns no single queue.
    pub(super) fn check_action(&self, action: &str) -> Result<(), ApiError> {
        if self.0.may(action, None) { Ok(()) } else { Err(ApiError::forbidden(action, None)) }
    }

    /// Whether the caller may send to the dead-letter queue of this configuration.
    pub(super) fn check_dead_letter_right(&self, config: &hapax_core::QueueConfig) -> Result<(), ApiError> {
        match &config.dead_letter {
            Some(dead) => self.allowed_queue("SendMessage", dead.queue.as_str()).map(drop),
            None => Ok(()),
        }
    }

    /// Whether the caller may do `action`, which affects every queue.
    pub(super) fn check_operator(&self, action: &str) -> Result<(), ApiError> {
        if self.0.may_operate(action) { Ok(()) } else { Err(ApiError::forbidden(action, None)) }
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.0
    }

    /// Whether the caller may send dead letters of `from` to the redrive's targets. For a key limited to some queues,
    /// the filter is narrowed to the sources that it may send to.
    pub(super) async fn check_redrive(
        &self,
        store: &SharedStore,
        from: &QueueName,
        to: Option<&QueueName>,
        filter: &mut RedriveFilter,
    ) -> Result<(), ApiError> {
        if let Some(target) = to.or(filter.source.as_ref()) {
            return self.check_queue("SendMessage", target);
        }
        if self.0.may_operate("SendMessage") {
            return Ok(());
        }
        if filter.sources.is_empty() {
            filter.sources = sources_of(&store.queues().await?, from);
        }
        filter.sources.iter().try_for_each(|source| self.check_queue("SendMessage", source))?;
        // An empty filter would mean every source.
        if filter.sources.is_empty() { self.check_operator("SendMessage") } else { Ok(()) }
    }

    pub(super) fn may_see_queue(&self, queue: &QueueName) -> bool {
        self.0.may_see(queue.as_str())
    }

    /// The caller's name for audits: the key's id, and the person for whom the caller says it acts.
    pub(super) fn audit_name(&self, by: Option<String>) -> String {
        let by: Option<String> = by.map(|by| by.chars().take(200).collect());
        match (self.0.name(), by) {
            (key, None) => key.to_owned(),
            ("anonymous", Some(by)) => by,
            (key, Some(by)) => format!("{key}: {by}"),
        }
    }

    /// Identifies the caller, so that no caller can cancel another's receive.
    pub(super) fn key_id(&self) -> &str {
        self.0.name()
    }
}

/// The name that a key's list of queues is matched against: the queue of the scope, or else the scope itself.
fn rights_name(scope: &Scope) -> &str {
    scope.as_str().strip_prefix("queue/").unwrap_or(scope.as_str())
}

/// Adds the known name that is closest to an unknown one.
fn did_you_mean(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let Some(wrong) = quoted.next() else { return message.to_owned() };
    if !message.contains("unknown field") && !message.contains("unknown variant") {
        return message.to_owned();
    }
    let abbreviated = |known: &str| wrong.len() > 2 && known.starts_with(wrong);
    let close =
        |known: &&str| abbreviated(known) || strsim::damerau_levenshtein(wrong, known) <= 1 + wrong.len() / 4;
    let nearest = quoted.filter(close).min_by_key(|known| strsim::damerau_levenshtein(wrong, known));
    match nearest {
        Some(known) => format!("{message}; did you mean `{known}`?"),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn the_closest_name_is_suggested() {
        let message =
            "unknown field `boddy`, expected one of `body`, `body_base64`, `group` at line 1 column 9";
        assert!(did_you_mean(message).ends_with("did you mean `body`?"));
        let far = "unknown field `zzzzz`, expected one of `body`, `group`";
        assert_eq!(did_you_mean(far), far);
        assert_eq!(did_you_mean("missing field `body`"), "missing field `body`");
    }
}
