use crate::name::GroupId;
use crate::queue::DedupScope;

/// Whether a send at `now_ms` repeats one made at `first_ms`: the window is half open, `[first, first + window)`.
pub fn is_duplicate(first_ms: u64, window_ms: u64, now_ms: u64) -> bool {
    now_ms < first_ms.saturating_add(window_ms)
}

/// The comparison key of a deduplication id: unique within its scope for any text of group and id.
///
/// ```
/// # use hapax_core::{DedupScope, GroupId, policy::dedup_key};
/// let (a, b) = (GroupId::new("a").unwrap(), GroupId::new("b").unwrap());
/// assert_eq!(dedup_key(DedupScope::Queue, Some(&a), "x"), dedup_key(DedupScope::Queue, Some(&b), "x"));
/// assert_ne!(dedup_key(DedupScope::Group, Some(&a), "x"), dedup_key(DedupScope::Group, Some(&b), "x"));
/// ```
pub fn dedup_key(scope: DedupScope, group: Option<&GroupId>, id: &str) -> String {
    match (scope, group) {
        // A group contains no spaces, so the first space ends it.
        (DedupScope::Group, Some(group)) => format!("{group} {id}"),
        _ => format!(" {id}"),
    }
}

/// What a deduplication id is remembered as: 128 bits of a cryptographic hash of [`dedup_key`], so that ids of any length
/// take the same room. The same in every store, so that an id stays remembered when its queue moves.
pub fn dedup_hash(scope: DedupScope, group: Option<&GroupId>, id: &str) -> u128 {
    let hash = blake3::hash(dedup_key(scope, group, id).as_bytes());
    u128::from_le_bytes(hash.as_bytes()[..16].try_into().expect("a hash has 32 bytes"))
}

/// A content-based deduplication id: the digest in lower-case hexadecimal.
pub fn content_id(sha256: &[u8; 32]) -> String {
    use std::fmt::Write as _;
    sha256.iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_window_is_half_open(first in 0u64..1 << 50, window in 0u64..1 << 40) {
            prop_assert_eq!(is_duplicate(first, window, first), window > 0);
            prop_assert!(!is_duplicate(first, window, first + window));
            prop_assert!(window == 0 || is_duplicate(first, window, first + window - 1));
        }

        #[test]
        fn keys_of_different_pairs_differ(a in "[!-~]{1,8}", b in "[!-~]{1,8}", x in "[!-~]{1,8}", y in "[!-~]{1,8}") {
            let key = |group: &str, id: &str| dedup_key(DedupScope::Group, Some(&GroupId::new(group).unwrap()), id);
            prop_assert_eq!(key(&a, &x) == key(&b, &y), a == b && x == y);
        }
    }

    #[test]
    fn content_ids_are_hexadecimal() {
        assert_eq!(content_id(&[0xab; 32]), "ab".repeat(32));
    }
}
