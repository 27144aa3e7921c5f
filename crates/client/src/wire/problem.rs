//! Errors on the wire: RFC 9457 problem details with a stable code, and enough fields to restore the same error in the
//! client.

use hapax_core::{
    AdminError, DocumentError, DocumentName, QueueName, Revision, SendError, SettleError, StoreError,
};
use serde::{Deserialize, Serialize};

/// An error as `application/problem+json`. Programs decide by `code`; `detail` is for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// The HTTP status; absent inside a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The stable code, for example `no-such-queue`.
    pub code: String,
    /// What happened and what to do.
    pub detail: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// The reason that is part of `detail`, on its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The queue concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// The field that is wrong or differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Messages in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// Bytes of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Maximum number of bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_max: Option<u64>,
    /// The quota that is used up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// How much of it is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// The size of the quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// The requested lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// The longest lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms_max: Option<u64>,
    /// The state of the key that could not be claimed or resolved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Time left of the holder's lease on the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The revision that the caller had read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<Revision>,
    /// The revision that the object has now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<Revision>,
    /// The document concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<String>,
    /// The scope of the ledger that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Keys of the scope that are in doubt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_doubt: Option<u64>,
    /// Since when the key is in doubt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
}

impl Problem {
    /// A problem with a code only.
    pub fn new(code: &str, detail: impl Into<String>, retryable: bool) -> Self {
        Self { code: code.to_owned(), detail: detail.into(), retryable, ..Self::default() }
    }

    pub(super) fn with_reason(self, reason: &str) -> Self {
        Self { reason: Some(reason.to_owned()), ..self }
    }

    fn with_queue(self, queue: &QueueName) -> Self {
        Self { queue: Some(queue.to_string()), ..self }
    }

    /// The original store error; `None` if its code is not known here.
    pub fn to_store_error(&self) -> Option<StoreError> {
        let reason = || self.reason.clone().unwrap_or_else(|| self.detail.clone());
        let queue = || self.queue.as_ref().and_then(|queue| QueueName::new(queue).ok());
        Some(match self.code.as_str() {
            "no-such-queue" => StoreError::NoSuchQueue(queue()?),
            "unavailable" => StoreError::Unavailable(reason()),
            "outcome-unknown" => StoreError::OutcomeUnknown(reason()),
            "full" => StoreError::Full(reason()),
            "overloaded" => StoreError::Overloaded(reason()),
            "too-many-in-flight" => {
                StoreError::TooManyInFlight { queue: queue()?, in_flight: self.in_flight? }
            }
            "paused" => StoreError::Paused(reason()),
            "moved" => StoreError::Moved(reason()),
            "damaged" => StoreError::Damaged(reason()),
            "invalid" => StoreError::Invalid(reason()),
            _ => return None,
        })
    }

    /// The original send error.
    pub fn to_send_error(&self) -> SendError {
        let known = || match self.code.as_str() {
            "too-large" => Some(SendError::TooLarge { bytes: self.bytes?, bytes_max: self.bytes_max? }),
            "quota-exceeded" => Some(SendError::QuotaExceeded {
                quota: self.quota.clone()?,
                used: self.used?,
                max: self.max?,
            }),
            _ => None,
        };
        known().unwrap_or_else(|| SendError::Invalid(self.detail.clone()))
    }

    /// The original settle error; `None` if its code is not known here.
    pub fn to_settle_error(&self) -> Option<SettleError> {
        Some(match self.code.as_str() {
            "malformed-receipt" => SettleError::Malformed,
            "stale-receipt" => SettleError::Stale,
            "expired-receipt" => SettleError::Expired,
            "not-in-flight" => SettleError::NotInFlight,
            "gone" => SettleError::Gone,
            "dead" => SettleError::Dead,
            "lease-too-long" => {
                SettleError::LeaseTooLong { lease_ms: self.lease_ms?, lease_ms_max: self.lease_ms_max? }
            }
            _ => SettleError::Claim(self.to_token_error()?),
        })
    }

    /// The original document error; `None` if its code is not known here.
    pub fn to_document_error(&self) -> Option<DocumentError> {
        Some(match self.code.as_str() {
            "revision-conflict" => DocumentError::Conflict {
                name: DocumentName::new(self.document.as_ref()?).ok()?,
                expected: self.expected,
                actual: self.revision,
            },
            "too-large" => DocumentError::TooLarge { bytes: self.bytes?, bytes_max: self.bytes_max? },
            _ => DocumentError::Store(self.to_store_error()?),
        })
    }

    /// The original administrative error; `None` if its code is not known here.
    pub fn to_admin_error(&self) -> Option<AdminError> {
        let reason = || self.reason.clone().unwrap_or_else(|| self.detail.clone());
        let queue = || self.queue.as_ref().and_then(|queue| QueueName::new(queue).ok());
        Some(match self.code.as_str() {
            "queue-exists" => AdminError::Exists(queue()?, self.field.clone().unwrap_or_default()),
            "config" => config(self.field.as_deref().unwrap_or_default(), reason()),
            "redrive-running" => AdminError::RedriveRunning(queue()?),
            "revision-conflict" => {
                let (expected, actual) = (self.expected?, self.revision?);
                AdminError::RevisionConflict { what: reason(), expected, actual }
            }
            "too-soon" => AdminError::TooSoon {
                what: reason(),
                retry_after_ms: self.retry_after_ms.unwrap_or_default(),
            },
            "not-found" => AdminError::NotFound(reason()),
            "refused" => AdminError::Refused(reason()),
            _ => AdminError::Store(self.to_store_error()?),
        })
    }
}

/// Known configuration fields. The error holds a `&'static str`, so a field that only a newer server knows becomes part
/// of the text.
const FIELDS: [&str; 22] = [
    "kind",
    "tier",
    "lease_ms",
    "retention_ms",
    "delay_ms",
    "wait_ms",
    "message_bytes_max",
    "retry.base_ms",
    "retry.cap_ms",
    "retry.max_attempts",
    "dead_letter",
    "dead_letter.queue",
    "redrive_allow",
    "redrive_allow.queues",
    "on_dead",
    "dedup.window_ms",
    "quota",
    "key_pointer",
    "tags",
    "extra",
    "per_second",
    "interval_ms",
];

fn config(field: &str, problem: String) -> AdminError {
    match FIELDS.iter().find(|known| **known == field) {
        Some(field) => AdminError::Config { field, problem },
        None => AdminError::Config { field: "config", problem: format!("{field}: {problem}") },
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let problem = Self::new(error.code(), error.to_string(), error.is_retryable());
        match &error {
            StoreError::NoSuchQueue(queue) => problem.with_queue(queue),
            StoreError::TooManyInFlight { queue, in_flight } => {
                Self { in_flight: Some(*in_flight), ..problem.with_queue(queue) }
            }
            StoreError::Unavailable(reason)
            | StoreError::OutcomeUnknown(reason)
            | StoreError::Full(reason)
            | StoreError::Overloaded(reason)
            | StoreError::Paused(reason)
            | StoreError::Moved(reason)
            | StoreError::Damaged(reason)
            | StoreError::Invalid(reason) => problem.with_reason(reason),
            _ => problem,
        }
    }
}

impl From<SendError> for Problem {
    fn from(error: SendError) -> Self {
        let retryable = matches!(error, SendError::QuotaExceeded { .. });
        let problem = Self::new(error.code(), error.to_string(), retryable);
        match error {
            SendError::TooLarge { bytes, bytes_max } => {
                Self { bytes: Some(bytes), bytes_max: Some(bytes_max), ..problem }
            }
            SendError::QuotaExceeded { quota, used, max } => {
                Self { quota: Some(quota), used: Some(used), max: Some(max), ..problem }
            }
            _ => problem,
        }
    }
}

impl From<SettleError> for Problem {
    fn from(error: SettleError) -> Self {
        let problem = Self::new(error.code(), error.to_string(), false);
        match error {
            SettleError::LeaseTooLong { lease_ms, lease_ms_max } => {
                Self { lease_ms: Some(lease_ms), lease_ms_max: Some(lease_ms_max), ..problem }
            }
            _ => problem,
        }
    }
}

impl From<DocumentError> for Problem {
    fn from(error: DocumentError) -> Self {
        let error = match error {
            DocumentError::Store(error) => return error.into(),
            other => other,
        };
        let problem = Self::new(error.code(), error.to_string(), false);
        match error {
            DocumentError::Conflict { name, expected, actual } => {
                Self { document: Some(name.into()), expected, revision: actual, ..problem }
            }
            DocumentError::TooLarge { bytes, bytes_max } => {
                Self { bytes: Some(bytes), bytes_max: Some(bytes_max), ..problem }
            }
            _ => problem,
        }
    }
}

impl From<AdminError> for Problem {
    fn from(error: AdminError) -> Self {
        let error = match error {
            AdminError::Store(error) => return error.into(),
            other => other,
        };
        let retryable = matches!(error, AdminError::RedriveRunning(_) | AdminError::TooSoon { .. });
        let problem = Self::new(error.code(), error.to_string(), retryable);
        match &error {
            AdminError::Exists(queue, field) => {
                Self { field: Some(field.clone()), ..problem.with_queue(queue) }
            }
            AdminError::Config { field, problem: reason } => {
                Self { field: Some((*field).to_owned()), ..problem.with_reason(reason) }
            }
            AdminError::RedriveRunning(queue) => problem.with_queue(queue),
            AdminError::RevisionConflict { what, expected, actual } => {
                Self { expected: Some(*expected), revision: Some(*actual), ..problem.with_reason(what) }
            }
            AdminError::TooSoon { what, retry_after_ms } => {
                Self { retry_after_ms: Some(*retry_after_ms), ..problem.with_reason(what) }
            }
            AdminError::NotFound(reason) | AdminError::Refused(reason) => problem.with_reason(reason),
            _ => problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over_the_wire(problem: impl Into<Problem>) -> Problem {
        serde_json::from_str(&serde_json::to_string(&problem.into()).unwrap()).unwrap()
    }

    #[test]
    fn every_error_survives_the_wire() {
        let queue = QueueName::new("jobs").unwrap();
        let why = || "why".to_owned();
        let store = [
            StoreError::NoSuchQueue(queue.clone()),
            StoreError::Unavailable(why()),
            StoreError::OutcomeUnknown(why()),
            StoreError::Full(why()),
            StoreError::Overloaded(why()),
            StoreError::TooManyInFlight { queue: queue.clone(), in_flight: 3 },
            StoreError::Paused(why()),
            StoreError::Moved(why()),
            StoreError::Damaged(why()),
            StoreError::Invalid(why()),
        ];
        for error in store {
            assert_eq!(over_the_wire(error.clone()).to_store_error(), Some(error.clone()));
            let admin = AdminError::Store(error);
            assert_eq!(over_the_wire(admin.clone()).to_admin_error(), Some(admin));
        }
        let admin = [
            AdminError::Exists(queue.clone(), "delay_ms".into()),
            AdminError::Config { field: "lease_ms", problem: why() },
            AdminError::RedriveRunning(queue),
            AdminError::RevisionConflict { what: why(), expected: Revision(3), actual: Revision(7) },
            AdminError::TooSoon { what: why(), retry_after_ms: 9 },
            AdminError::NotFound(why()),
            AdminError::Refused(why()),
        ];
        for error in admin {
            assert_eq!(over_the_wire(error.clone()).to_admin_error(), Some(error));
        }
        let name = DocumentName::new("schedules/nightly").unwrap();
        let documents = [
            DocumentError::Store(StoreError::Full(why())),
            DocumentError::Conflict { name: name.clone(), expected: None, actual: Some(Revision(7)) },
            DocumentError::Conflict { name, expected: Some(Revision(7)), actual: None },
            DocumentError::TooLarge { bytes: 2, bytes_max: 1 },
        ];
        for error in documents {
            assert_eq!(over_the_wire(error.clone()).to_document_error(), Some(error));
        }
        let send = [
            SendError::TooLarge { bytes: 2, bytes_max: 1 },
            SendError::QuotaExceeded { quota: why(), used: 1, max: 1 },
            SendError::Invalid(why()),
        ];
        for error in send {
            assert_eq!(over_the_wire(error.clone()).to_send_error(), error);
        }
        let settle = [
            SettleError::Malformed,
            SettleError::Stale,
            SettleError::Expired,
            SettleError::NotInFlight,
            SettleError::Gone,
            SettleError::Dead,
            SettleError::LeaseTooLong { lease_ms: 2, lease_ms_max: 1 },
        ];
        for error in settle {
            assert_eq!(over_the_wire(error.clone()).to_settle_error(), Some(error));
        }
    }

    #[test]
    fn an_unknown_code_is_no_error_of_ours() {
        let problem = Problem::new("from-the-future", "?", false);
        assert_eq!(
            (problem.to_store_error(), problem.to_settle_error(), problem.to_admin_error()),
            (None, None, None)
        );
    }
}
