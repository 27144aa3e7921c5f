//! Every connection takes a file descriptor, and so does the store: connections must not take the last one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Kept for the store and the listeners.
const RESERVED: u64 = 64;

/// Lets the process open as many files as it may. Many systems begin with 1,024 and allow far more, for the sake of
/// programs that use `select`; none is used here.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, limit = ?limit.current, "the limit of open files could not be raised");
    }
}

/// How many connections there can be if `wanted` are configured.
pub fn connections_max(wanted: usize) -> usize {
    let possible = within(wanted, getrlimit(Resource::Nofile).current);
    if possible < wanted {
        tracing::warn!(wanted, possible, "the limit of open files allows fewer connections than configured");
    }
    possible
}

fn within(wanted: usize, files: Option<u64>) -> usize {
    files.map_or(wanted, |files| wanted.min(files.saturating_sub(RESERVED).max(1) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_files_are_kept_for_the_store() {
        assert_eq!(within(4096, None), 4096);
        assert_eq!(within(4096, Some(1_000_000)), 4096);
        assert_eq!(within(4096, Some(1024)), 960);
        assert_eq!(within(4096, Some(10)), 1);
    }
}
