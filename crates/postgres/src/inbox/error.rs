//! What an error means for a user's transaction: not begun, rolled back, or unknown.

use hapax_core::InboxError;

/// SQLSTATE of `hapax.enter` and `hapax.record`: the transaction is not the one that entered the key.
const NOT_ENTERED: &str = "HX003";
/// SQLSTATE of a ledger that is closed because it was copied; the message names the target.
const CLOSED: &str = "HX001";
/// SQLSTATE of `hapax.q_settle`: the delivery is over.
const DELIVERY_OVER: &str = "HX002";

/// The server ended the session: whether it committed before is not known.
fn ended_session(code: &str) -> bool {
    code.starts_with("57P") || code.starts_with("08") || matches!(code, "25P03" | "25P04")
}

/// A statement before the commit failed: the transaction is rolled back.
pub(crate) fn before_commit(error: sqlx::Error) -> InboxError {
    let sqlx::Error::Database(refused) = &error else {
        return match error {
            error @ (sqlx::Error::Decode(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::ColumnNotFound(_)) => InboxError::Database(error.into()),
            error => InboxError::Unavailable(error.to_string()),
        };
    };
    let (code, message) = (refused.code().unwrap_or_default(), refused.message().to_owned());
    match &*code {
        "40001" | "40P01" => InboxError::Conflict(message),
        NOT_ENTERED => InboxError::EndedByHandler(message),
        DELIVERY_OVER => InboxError::Superseded(message),
        CLOSED => InboxError::Unavailable(message),
        "3F000" | "42P01" | "42883" => InboxError::Unavailable(format!(
            "{message}; the schema `hapax` is missing or older than this program: run `hapax migrate`"
        )),
        // Out of memory, disk or connections, a standby, or stopped by an operator: not the message's fault.
        code if code == "25006" || code.starts_with("53") || ended_session(code) => {
            InboxError::Unavailable(message)
        }
        _ => InboxError::Database(error.into()),
    }
}

/// A statement after the handler's failed. Behind a pooler, the two parts of a statement that is not in a transaction go to
/// different sessions: the handler has ended the transaction.
pub(super) fn after_handler(error: sqlx::Error) -> InboxError {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    match code.as_deref() {
        Some("26000" | "42P05") => InboxError::EndedByHandler(error.to_string()),
        _ => before_commit(error),
    }
}

/// The commit failed. The server answers with an error only if it has rolled back, unless it ends the session.
pub(super) fn at_commit(error: sqlx::Error) -> InboxError {
    match &error {
        sqlx::Error::Database(refused) if !ended_session(&refused.code().unwrap_or_default()) => {
            after_handler(error)
        }
        _ => InboxError::Unknown(error.to_string()),
    }
}

/// Another transaction has held a lock for longer than `lock_timeout`.
pub(super) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some("55P03")
}

/// Whether a handler's error says that its transaction lost against another one. The text is PostgreSQL's, in English; with
/// messages in another language the run is retried by the queue's policy instead.
pub(super) fn lost(error: &str) -> bool {
    error.contains("could not serialize access") || error.contains("deadlock detected")
}
