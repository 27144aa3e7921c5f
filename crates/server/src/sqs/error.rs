//! SQS's errors, with their names in both protocols.

use std::borrow::Cow;

use hapax_core::{AdminError, SendError, SettleError, StoreError};
use http::StatusCode;

use crate::auth::AuthError;

/// The kind of an error. Each has a shape (JSON), a code (Query) and a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    AccessDenied,
    BatchEntryIdsNotDistinct,
    BatchRequestTooLong,
    EmptyBatchRequest,
    IncompleteSignature,
    InternalFailure,
    InvalidAction,
    InvalidAttributeName,
    InvalidAttributeValue,
    InvalidBatchEntryId,
    InvalidClientTokenId,
    InvalidMessageContents,
    InvalidParameterValue,
    MessageNotInflight,
    MissingAction,
    MissingAuthenticationToken,
    MissingParameter,
    OverLimit,
    PurgeQueueInProgress,
    QueueDeletedRecently,
    QueueDoesNotExist,
    QueueNameExists,
    ReceiptHandleIsInvalid,
    RequestExpired,
    RequestThrottled,
    RequestTimeout,
    RequestTooLarge,
    ResourceNotFound,
    Serialization,
    ServiceUnavailable,
    SignatureDoesNotMatch,
    TooManyEntriesInBatchRequest,
    UnknownOperation,
    UnsupportedOperation,
}

/// An error's names and status.
pub(crate) struct WireError {
    /// `__type` in JSON.
    pub(crate) shape: &'static str,
    /// `Code` in XML, and in the header `x-amzn-query-error`.
    pub(crate) code: &'static str,
    pub(crate) status: StatusCode,
}

impl WireError {
    /// Who caused the error, in AWS's terms.
    pub(crate) fn fault(&self) -> &'static str {
        if self.status.is_server_error() { "Receiver" } else { "Sender" }
    }
}

impl ErrorKind {
    pub(crate) fn wire(self) -> WireError {
        const BAD: StatusCode = StatusCode::BAD_REQUEST;
        const DENIED: StatusCode = StatusCode::FORBIDDEN;
        let (shape, code, status) = match self {
            Self::AccessDenied => ("com.amazon.coral.service#AccessDeniedException", "AccessDenied", DENIED),
            Self::BatchEntryIdsNotDistinct => (
                "com.amazonaws.sqs#BatchEntryIdsNotDistinct",
                "AWS.SimpleQueueService.BatchEntryIdsNotDistinct",
                BAD,
            ),
            Self::BatchRequestTooLong => {
                ("com.amazonaws.sqs#BatchRequestTooLong", "AWS.SimpleQueueService.BatchRequestTooLong", BAD)
            }
            Self::EmptyBatchRequest => {
                ("com.amazonaws.sqs#EmptyBatchRequest", "AWS.SimpleQueueService.EmptyBatchRequest", BAD)
            }
            Self::IncompleteSignature => {
                ("com.amazon.coral.service#IncompleteSignatureException", "IncompleteSignature", BAD)
            }
            Self::InternalFailure => (
                "com.amazon.coral.service#InternalFailure",
                "InternalFailure",
                StatusCode::INTERNAL_SERVER_ERROR,
            ),
            Self::InvalidAction => {
                ("com.amazon.coral.service#UnknownOperationException", "InvalidAction", BAD)
            }
            Self::InvalidAttributeName => {
                ("com.amazonaws.sqs#InvalidAttributeName", "InvalidAttributeName", BAD)
            }
            Self::InvalidAttributeValue => {
                ("com.amazonaws.sqs#InvalidAttributeValue", "InvalidAttributeValue", BAD)
            }
            Self::InvalidBatchEntryId => {
                ("com.amazonaws.sqs#InvalidBatchEntryId", "AWS.SimpleQueueService.InvalidBatchEntryId", BAD)
            }
            Self::InvalidClientTokenId => {
                ("com.amazon.coral.service#UnrecognizedClientException", "InvalidClientTokenId", DENIED)
            }
            Self::InvalidMessageContents => {
                ("com.amazonaws.sqs#InvalidMessageContents", "InvalidMessageContents", BAD)
            }
            Self::InvalidParameterValue => {
                ("com.amazon.coral.service#InvalidParameterValueException", "InvalidParameterValue", BAD)
            }
            Self::MessageNotInflight => {
                ("com.amazonaws.sqs#MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight", BAD)
            }
            Self::MissingAction => {
                ("com.amazon.coral.service#UnknownOperationException", "MissingAction", BAD)
            }
            Self::MissingAuthenticationToken => (
                "com.amazon.coral.service#MissingAuthenticationTokenException",
                "MissingAuthenticationToken",
                DENIED,
            ),
            Self::MissingParameter => {
                ("com.amazon.coral.service#MissingRequiredParameterException", "MissingParameter", BAD)
            }
            Self::OverLimit => ("com.amazonaws.sqs#OverLimit", "OverLimit", DENIED),
            Self::PurgeQueueInProgress => (
                "com.amazonaws.sqs#PurgeQueueInProgress",
                "AWS.SimpleQueueService.PurgeQueueInProgress",
                DENIED,
            ),
            Self::QueueDeletedRecently => {
                ("com.amazonaws.sqs#QueueDeletedRecently", "AWS.SimpleQueueService.QueueDeletedRecently", BAD)
            }
            Self::QueueDoesNotExist => {
                ("com.amazonaws.sqs#QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", BAD)
            }
            Self::QueueNameExists => ("com.amazonaws.sqs#QueueNameExists", "QueueAlreadyExists", BAD),
            Self::ReceiptHandleIsInvalid => {
                ("com.amazonaws.sqs#ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", StatusCode::NOT_FOUND)
            }
            Self::RequestExpired => ("com.amazon.coral.service#RequestExpired", "RequestExpired", BAD),
            // SQS itself returns 403. Here it is 503, because every client retries that, regardless
            // of the codes it knows.
            Self::RequestThrottled => {
                ("com.amazonaws.sqs#RequestThrottled", "RequestThrottled", StatusCode::SERVICE_UNAVAILABLE)
            }
            Self::RequestTimeout => {
                ("com.amazon.coral.service#RequestTimeout", "RequestTimeout", StatusCode::REQUEST_TIMEOUT)
            }
            Self::RequestTooLarge => (
                "com.amazon.coral.service#RequestEntityTooLargeException",
                "RequestEntityTooLarge",
                StatusCode::PAYLOAD_TOO_LARGE,
            ),
            Self::ResourceNotFound => (
                "com.amazonaws.sqs#ResourceNotFoundException",
                "ResourceNotFoundException",
                StatusCode::NOT_FOUND,
            ),
            Self::Serialization => ("com.amazon.coral.service#SerializationException", "MalformedInput", BAD),
            Self::ServiceUnavailable => (
                "com.amazon.coral.service#ServiceUnavailableException",
                "ServiceUnavailable",
                StatusCode::SERVICE_UNAVAILABLE,
            ),
            Self::SignatureDoesNotMatch => {
                ("com.amazon.coral.service#InvalidSignatureException", "SignatureDoesNotMatch", DENIED)
            }
            Self::TooManyEntriesInBatchRequest => (
                "com.amazonaws.sqs#TooManyEntriesInBatchRequest",
                "AWS.SimpleQueueService.TooManyEntriesInBatchRequest",
                BAD,
            ),
            Self::UnknownOperation => (
                "com.amazon.coral.service#UnknownOperationException",
                "UnknownOperationException",
                StatusCode::NOT_FOUND,
            ),
            Self::UnsupportedOperation => {
                ("com.amazonaws.sqs#UnsupportedOperation", "AWS.SimpleQueueService.UnsupportedOperation", BAD)
            }
        };
        WireError { shape, code, status }
    }
}

/// An error in SQS's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SqsError {
    pub(crate) kind: ErrorKind,
    pub(crate) message: Cow<'static, str>,
}

pub(crate) type Result<T, E = SqsError> = std::result::Result<T, E>;

impl SqsError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into() }
    }

    /// A parameter's value is not acceptable.
    pub(crate) fn value(parameter: &str, value: impl std::fmt::Display, reason: &str) -> Self {
        // The values come from the client, but an error need not return a megabyte.
        let value = value.to_string();
        let value = hapax_core::policy::truncate(&value, 1024);
        Self::invalid(format!("Value {value} for parameter {parameter} is invalid. Reason: {reason}"))
    }

    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidParameterValue, message)
    }

    pub(crate) fn missing(parameter: &str) -> Self {
        Self::new(ErrorKind::MissingParameter, format!("The request must contain the parameter {parameter}."))
    }

    pub(crate) fn no_queue() -> Self {
        Self::new(ErrorKind::QueueDoesNotExist, "The specified queue does not exist.")
    }
}

impl From<StoreError> for SqsError {
    fn from(error: StoreError) -> Self {
        let kind = match &error {
            StoreError::NoSuchQueue(_) => return Self::no_queue(),
            StoreError::TooManyInFlight { .. } => ErrorKind::OverLimit,
            StoreError::Overloaded(_) => ErrorKind::RequestThrottled,
            StoreError::Unavailable(_)
            | StoreError::Full(_)
            | StoreError::Paused(_)
            | StoreError::Moved(_) => ErrorKind::ServiceUnavailable,
            StoreError::Invalid(_) => ErrorKind::InvalidParameterValue,
            _ => ErrorKind::InternalFailure,
        };
        if matches!(kind, ErrorKind::InternalFailure | ErrorKind::ServiceUnavailable) {
            tracing::warn!(code = error.code(), %error, "the store could not do it");
        }
        Self::new(kind, error.to_string())
    }
}

impl From<AdminError> for SqsError {
    fn from(error: AdminError) -> Self {
        match error {
            AdminError::Store(error) => error.into(),
            AdminError::Exists(_, field) => Self::new(
                ErrorKind::QueueNameExists,
                format!(
                    "A queue already exists with the same name and a different value for attribute {field}"
                ),
            ),
            AdminError::Config { .. } => Self::new(ErrorKind::InvalidAttributeValue, error.to_string()),
            AdminError::RedriveRunning(_) => Self::invalid(
                "There is already a task running. Only one active task is allowed for a source queue arn at a \
                 given time.",
            ),
            // The bound on internal retries was reached: the client's own retry is the next attempt.
            AdminError::RevisionConflict { .. } => {
                Self::new(ErrorKind::ServiceUnavailable, error.to_string())
            }
            AdminError::NotFound(_) => Self::new(ErrorKind::ResourceNotFound, error.to_string()),
            AdminError::Refused(_) => Self::new(ErrorKind::UnsupportedOperation, error.to_string()),
            _ => Self::new(ErrorKind::InternalFailure, error.to_string()),
        }
    }
}

impl From<SendError> for SqsError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::TooLarge { bytes_max, .. } => too_large(bytes_max),
            SendError::QuotaExceeded { .. } => Self::new(ErrorKind::RequestThrottled, error.to_string()),
            _ => Self::invalid(error.to_string()),
        }
    }
}

/// A message is larger than its queue allows.
pub(crate) fn too_large(bytes_max: u64) -> SqsError {
    SqsError::invalid(format!(
        "One or more parameters are invalid. Reason: Message must be shorter than {bytes_max} bytes."
    ))
}

/// Why a delivery was not deleted, or its visibility not changed.
pub(crate) fn settle_error(error: &SettleError, receipt: &str) -> SqsError {
    match error {
        SettleError::Malformed => SqsError::new(
            ErrorKind::ReceiptHandleIsInvalid,
            format!(
                "The input receipt handle \"{}\" is not a valid receipt handle.",
                hapax_core::policy::truncate(receipt, 1024)
            ),
        ),
        SettleError::Expired | SettleError::Stale => {
            SqsError::value("ReceiptHandle", receipt, "The receipt handle has expired.")
        }
        SettleError::NotInFlight => SqsError::new(
            ErrorKind::MessageNotInflight,
            format!(
                "Value {} for parameter ReceiptHandle is invalid. Reason: Message does not exist or is not \
                 available for visibility timeout change.",
                hapax_core::policy::truncate(receipt, 1024)
            ),
        ),
        SettleError::Dead => SqsError::value(
            "ReceiptHandle",
            receipt,
            "The receipt handle has expired. The message ran out of receives and is among the dead letters.",
        ),
        SettleError::Gone => SqsError::value(
            "ReceiptHandle",
            receipt,
            "Message does not exist or is not available for visibility timeout change.",
        ),
        SettleError::LeaseTooLong { .. } => SqsError::value(
            "VisibilityTimeout",
            "given",
            "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]",
        ),
        _ => SqsError::new(ErrorKind::InternalFailure, error.to_string()),
    }
}

impl From<AuthError> for SqsError {
    fn from(error: AuthError) -> Self {
        let kind = match error {
            AuthError::Missing => ErrorKind::MissingAuthenticationToken,
            AuthError::Incomplete(_) => ErrorKind::IncompleteSignature,
            AuthError::UnknownKey => ErrorKind::InvalidClientTokenId,
            AuthError::Mismatch => ErrorKind::SignatureDoesNotMatch,
            AuthError::Expired(_) => ErrorKind::RequestExpired,
        };
        Self::new(kind, error.to_string())
    }
}
