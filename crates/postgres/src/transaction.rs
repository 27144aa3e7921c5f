//! Transactions, and the repetition of those that lose against another one.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::{Connection as _, PgConnection, Postgres};

use crate::BoxFuture;
use crate::error::Failure;

/// How often an operation that lost against another transaction is repeated.
const CONFLICTS_MAX: u64 = 50;
/// The longest pause before a repetition, in milliseconds.
const PAUSE_MS_MAX: u64 = 20;

/// A transaction on a connection. It has to be ended by [`end`](Self::end): one that is only dropped stays open, with its
/// locks, until the connection is used again.
#[must_use = "a transaction is ended by `end`"]
pub(crate) struct Transaction<'c>(sqlx::Transaction<'c, Postgres>);

impl<'c> Transaction<'c> {
    pub async fn begin(connection: &'c mut PgConnection) -> Result<Self, Failure> {
        Ok(Self(connection.begin().await?))
    }

    /// The same with statements that begin it. The connection must not be in a transaction.
    pub async fn begin_with(connection: &'c mut PgConnection, statements: String) -> Result<Self, Failure> {
        Ok(Self(connection.begin_with(statements).await?))
    }

    /// Commits what succeeded, and rolls back what failed. Its locks are released when this returns.
    pub async fn end<T>(self, done: Result<T, Failure>) -> Result<T, Failure> {
        match done {
            Ok(done) => {
                self.0.commit().await?;
                Ok(done)
            }
            Err(failure) => {
                // A connection that broke is closed, and the server rolls back.
                if failure.leaves_connection() {
                    self.0.rollback().await?;
                }
                Err(failure)
            }
        }
    }
}

impl Deref for Transaction<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Transaction<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

/// Repeats an operation that lost against another transaction and was rolled back. The operation must not have committed
/// anything before it lost, and must count nothing until it has succeeded.
pub(crate) async fn repeat_conflicts<T>(
    connection: &mut PgConnection,
    operation: &(dyn for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync),
) -> Result<T, Failure> {
    for conflicts in 0.. {
        match attempt(connection, operation).await {
            Err(failure) if failure.is_conflict() && conflicts < CONFLICTS_MAX => {
                pause_after_conflict(conflicts).await;
            }
            ended => return ended,
        }
    }
    unreachable!("the last conflict is returned")
}

/// One attempt. Behind a pooler it is part of a transaction, and can be repeated only after a savepoint.
pub(crate) async fn attempt<T>(
    connection: &mut PgConnection,
    operation: &(dyn for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync),
) -> Result<T, Failure> {
    if !connection.is_in_transaction() {
        return operation(connection).await;
    }
    let mut savepoint = Transaction::begin(connection).await?;
    let done = operation(&mut savepoint).await;
    savepoint.end(done).await
}

/// Waits for a random time that grows with the number of conflicts before this one.
pub(crate) async fn pause_after_conflict(conflicts: u64) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=conflicts.min(PAUSE_MS_MAX)))).await;
}
