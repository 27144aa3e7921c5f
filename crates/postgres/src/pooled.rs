//! Operations behind a pooler that assigns a session per transaction, such as PgBouncer in transaction mode.
//!
//! sqlx sends a statement in two parts, which must reach the same session, and gives it a name that another client of the
//! session may have used. So every operation is one transaction there. Its beginning removes the named statements that
//! earlier clients have left, and makes the settings that a session of our own has from its start.
//!
//! A pooler of version 1.21 or later that handles prepared statements gives them names of its own, which are left alone.

use std::time::Duration;

/// The settings of a session for operations with this time limit. The server ends a statement before we stop to wait for it:
/// its outcome is then known.
pub(crate) fn settings(operation: Duration) -> [(&'static str, String); 4] {
    let ms = operation.as_millis();
    [
        ("statement_timeout", (ms * 4 / 5).to_string()),
        ("lock_timeout", (ms / 4).to_string()),
        ("idle_in_transaction_session_timeout", ms.to_string()),
        ("jit", "off".to_owned()),
    ]
}

/// The beginning of a transaction. With the schema it also brings the fences up to the clock: after a failover the pooler may
/// have connected to another server, and we keep our connection.
pub(crate) fn begin(operation: Duration, has_schema: bool) -> String {
    let local = settings(operation).map(|(name, value)| format!("SET LOCAL {name} = '{value}'; ")).concat();
    let fence = if has_schema { "PERFORM hapax.raise_fence();" } else { "" };
    format!("BEGIN; {local}{}", clean_up(fence))
}

/// A statement that makes a session ready for a transaction of ours, and more statements of PL/pgSQL.
pub(crate) fn clean_up(more: &str) -> String {
    format!(
        "DO $$ DECLARE n text; BEGIN
           FOR n IN SELECT s.name FROM pg_prepared_statements s WHERE s.name LIKE 'sqlx\\_s\\_%' LOOP
             EXECUTE format('DEALLOCATE %I', n);
           END LOOP;
           IF current_setting('synchronous_commit') = 'off' THEN SET LOCAL synchronous_commit = 'on'; END IF;
           {more}
         END $$"
    )
}
