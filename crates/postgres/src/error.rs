//! What a failure of the database means for the caller: done, not done, or unknown.

use std::time::Duration;

use hapax_core::StoreError;
use sqlx::error::DatabaseError;
use thiserror::Error;

/// Whether an operation may change the database. A connection that breaks during a change leaves its outcome unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Why an operation on a connection failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// The database or the connection failed.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    /// The operation itself refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Failure {
    /// Whether the connection can be used for another operation: the server answered, and did not end the session.
    pub fn leaves_connection(&self) -> bool {
        match self {
            Self::Store(_) => true,
            Self::Database(sqlx::Error::Database(error)) => {
                !is_fatal(&**error) && ![READ_ONLY, STALE_PLAN].contains(&code(&**error).as_str())
            }
            Self::Database(_) => false,
        }
    }

    /// Whether the transaction lost against another one, and was rolled back: it can be repeated at once.
    pub fn is_conflict(&self) -> bool {
        let Self::Database(sqlx::Error::Database(error)) = self else { return false };
        matches!(code(&**error).as_str(), "40001" | "40P01")
    }

    /// Whether a lock was not had in time, or not without a deadlock.
    pub fn lost_a_lock(&self) -> bool {
        let Self::Database(sqlx::Error::Database(error)) = self else { return false };
        matches!(code(&**error).as_str(), "55P03" | "40P01")
    }

    /// As the seams report it.
    pub fn into_store_error(self, what: &str, access: Access) -> StoreError {
        match self {
            Self::Store(error) => error,
            Self::Database(sqlx::Error::Database(error)) => refused(what, &*error, access),
            Self::Database(error) => broken(what, &error.to_string(), access),
        }
    }
}

/// SQLSTATE `feature_not_supported`: a prepared statement of an older schema.
const STALE_PLAN: &str = "0A000";

/// Raised by the trigger of a ledger that is closed, because it was copied to another store.
const CLOSED: &str = "HX001";

/// SQLSTATE `read_only_sql_transaction`: the server has become a standby.
const READ_ONLY: &str = "25006";

fn code(error: &dyn DatabaseError) -> String {
    error.code().unwrap_or_default().into_owned()
}

/// Whether the server has ended the session: operator intervention.
fn is_fatal(error: &dyn DatabaseError) -> bool {
    let code = code(error);
    code.starts_with("57P") || code.starts_with("08")
}

/// The server answered with an error: it has rolled back, unless it was crashing.
fn refused(what: &str, error: &dyn DatabaseError, access: Access) -> StoreError {
    let code = code(error);
    let told = format!("{what}: PostgreSQL answered {code}: {}", error.message());
    match code.as_str() {
        // The server crashed: it does not know itself whether the transaction was committed.
        "57P02" => broken(what, error.message(), access),
        CLOSED => StoreError::Moved(error.message().to_owned()),
        "53100" => StoreError::Full(told),
        "53200" | "53300" | "53400" | "55P03" | "57014" | "40001" | "40P01" => StoreError::Overloaded(told),
        READ_ONLY => StoreError::Unavailable(format!("{told}; the server is a standby or read-only")),
        "3F000" | "42P01" | "42883" | "42703" => StoreError::Unavailable(format!(
            "{told}; the schema `hapax` is missing or older than this program: run `hapax migrate`"
        )),
        "42501" => StoreError::Unavailable(format!(
            "{told}; the database role lacks a privilege: docs/postgres.md lists those that it needs"
        )),
        _ if code.starts_with("22") => StoreError::Invalid(told),
        _ => StoreError::Unavailable(told),
    }
}

/// The connection broke.
pub(crate) fn broken(what: &str, problem: &str, access: Access) -> StoreError {
    let told = format!("{what}: the connection to PostgreSQL broke: {problem}");
    match access {
        Access::Read => StoreError::Unavailable(told),
        Access::Write => StoreError::OutcomeUnknown(told),
    }
}

/// The database did not answer in time.
pub(crate) fn late(what: &str, limit: Duration, access: Access) -> StoreError {
    let told = format!("{what}: PostgreSQL did not respond within {} ms", limit.as_millis());
    match access {
        Access::Read => StoreError::Unavailable(told),
        Access::Write => StoreError::OutcomeUnknown(told),
    }
}
