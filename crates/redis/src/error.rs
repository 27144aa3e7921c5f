//! What an error of Redis means for the caller: done, not done, or unknown.

use hapax_core::StoreError;
use redis::RedisError;

/// Whether a call may change something. A connection that breaks during a change leaves its outcome unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What to do about an error. All but the last three mean that nothing was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// The slot belongs to this node now.
    Moved(String),
    /// The slot is being moved to this node, and the keys are there.
    Ask(String),
    /// The slot is being moved, and its keys are on two nodes.
    Moving,
    /// The scripts are to be loaded first.
    Load,
    /// The node is not known as a master: find out first which replicas it has.
    Unknown,
    /// Ask again a little later, perhaps another node.
    Later,
    /// The node could not be reached; nothing was sent.
    Unreachable,
    /// It was sent, and the answer was lost.
    Lost,
    /// Asking again gives the same answer.
    Final(StoreError),
}

/// Errors that a node reports before it does anything, and that pass.
const PASSING: &[&str] =
    &["LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "BUSY", "MISCONF"];

/// Classifies an error of a call that was sent.
pub(crate) fn remedy(what: &str, error: &RedisError) -> Remedy {
    let code = error.code().unwrap_or_default();
    let told = || format!("{what}: Redis answered {error}");
    match code {
        "MOVED" | "ASK" => match error.redirect_node() {
            Some((address, _)) if code == "MOVED" => Remedy::Moved(address.to_owned()),
            Some((address, _)) => Remedy::Ask(address.to_owned()),
            None => Remedy::Later,
        },
        "TRYAGAIN" => Remedy::Moving,
        "NOSCRIPT" => Remedy::Load,
        _ if PASSING.contains(&code) => Remedy::Later,
        "OOM" => Remedy::Final(StoreError::Full(told())),
        "HAPAXDAMAGED" => Remedy::Final(StoreError::Damaged(told())),
        "NOPERM" => {
            Remedy::Final(StoreError::Unavailable(format!("{}; the user lacks a permission", told())))
        }
        "NOAUTH" | "WRONGPASS" => {
            Remedy::Final(StoreError::Unavailable(format!("{}; give user and password", told())))
        }
        "" => Remedy::Lost,
        // A script stops at such an error, and what it wrote before stays.
        _ => Remedy::Final(StoreError::OutcomeUnknown(told())),
    }
}

/// The reply to a call did not arrive.
pub(crate) fn lost(what: &str, access: Access, problem: &str) -> StoreError {
    let told = format!("{what}: the connection to Redis broke, or its reply came too late: {problem}");
    match access {
        Access::Read => StoreError::Unavailable(told),
        Access::Write => StoreError::OutcomeUnknown(told),
    }
}

/// What a caller is told who asked a question. It has no outcome that could be unknown: what it settles on its way, such as leases
/// that are over, is done by any other call as well.
pub(crate) fn question<T>(answer: Result<T, StoreError>) -> Result<T, StoreError> {
    answer.map_err(|error| match error {
        StoreError::OutcomeUnknown(told) => StoreError::Unavailable(told),
        error => error,
    })
}

/// A reply that none of our scripts gives.
pub(crate) fn unexpected(what: &str) -> StoreError {
    StoreError::Damaged(format!("{what}: Redis sent a reply of an unexpected form"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Remedy {
        let value = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        remedy("claim", &value.extract_error().unwrap_err())
    }

    #[test]
    fn only_a_change_has_an_unknown_outcome() {
        assert!(matches!(lost("claim", Access::Write, "x"), StoreError::OutcomeUnknown(_)));
        assert!(matches!(lost("stats", Access::Read, "x"), StoreError::Unavailable(_)));
        let told = question(Err::<(), _>(StoreError::OutcomeUnknown("x".to_owned())));
        assert_eq!(told, Err(StoreError::Unavailable("x".to_owned())));
        let full = || Err::<(), _>(StoreError::Full("x".to_owned()));
        assert_eq!(question(full()), full());
    }

    #[test]
    fn what_was_refused_before_anything_was_done_is_asked_again() {
        assert_eq!(of("MOVED 7 10.0.0.1:6379"), Remedy::Moved("10.0.0.1:6379".to_owned()));
        assert_eq!(of("ASK 7 10.0.0.1:6379"), Remedy::Ask("10.0.0.1:6379".to_owned()));
        assert_eq!(of("TRYAGAIN Multiple keys request during rehashing of slot"), Remedy::Moving);
        assert_eq!(of("NOSCRIPT No matching script."), Remedy::Load);
        for passing in PASSING {
            assert_eq!(of(&format!("{passing} wait")), Remedy::Later, "{passing}");
        }
        assert!(matches!(of("OOM command not allowed"), Remedy::Final(StoreError::Full(_))));
        assert!(matches!(of("HAPAXDAMAGED x"), Remedy::Final(StoreError::Damaged(_))));
        assert!(matches!(of("ERR user_script:7: oops"), Remedy::Final(StoreError::OutcomeUnknown(_))));
    }
}
