//! The limit of open files. Connections and the store share it, so connections must not use all of it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// File descriptors reserved for the store and the listeners.
const RESERVED: u64 = 64;

/// Raises the process's limit of open files to its hard limit. Many systems start with 1,024 and allow far more,
/// because programs that use `select` cannot handle more; this program does not use it.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, limit = ?limit.current, "the limit of open files could not be raised");
    }
}

/// The possible number of connections if `wanted` are configured.
pub fn connections_max(wanted: usize) -> usize {
    let possible = connections_within(wanted, getrlimit(Resource::Nofile).current);
    if possible < wanted {
        tracing::warn!(wanted, possible, "the limit of open files allows fewer connections than configured");
    }
    possible
}

fn connections_within(wanted: usize, files: Option<u64>) -> usize {
    files.map_or(wanted, |files| wanted.min(files.saturating_sub(RESERVED).max(1) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_files_are_kept_for_the_store() {
        assert_eq!(connections_within(4096, None), 4096);
        assert_eq!(connections_within(4096, Some(1_000_000)), 4096);
        assert_eq!(connections_within(4096, Some(1024)), 960);
        assert_eq!(connections_within(4096, Some(10)), 1);
    }
}
