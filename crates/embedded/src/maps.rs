//! Maps by numbers that the store made itself.

use foldhash::fast::RandomState;

/// A map by message numbers or by 128-bit hashes. Callers cannot choose such keys at will, so a quick hash with a
/// random seed is enough; the default one takes longer than the rest of a lookup. Names and other texts keep the
/// default.
pub(crate) type NumberMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// A set of such numbers.
pub(crate) type NumberSet<K> = std::collections::HashSet<K, RandomState>;
