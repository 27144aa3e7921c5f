//! Receipts: a delivery's name, sealed so that a made-up one is told from a stale one.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hapax_core::Receipt;

/// What a receipt names: a queue, a message, and the delivery by its fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Named {
    pub queue: u32,
    pub seq: u64,
    pub fence: u64,
}

const LEN: usize = 28;
const SEALED: usize = 20;

/// Makes and opens receipts with the store's secret.
#[derive(Clone)]
pub(crate) struct Sealer {
    key: [u8; 32],
}

impl Sealer {
    pub fn new(key: [u8; 32]) -> Self {
        Self { key }
    }

    fn tag(&self, named: &[u8]) -> [u8; 8] {
        let hash = blake3::keyed_hash(&self.key, named);
        hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes")
    }

    pub fn seal(&self, named: Named) -> Receipt {
        let mut bytes = [0u8; LEN];
        bytes[..4].copy_from_slice(&named.queue.to_le_bytes());
        bytes[4..12].copy_from_slice(&named.seq.to_le_bytes());
        bytes[12..SEALED].copy_from_slice(&named.fence.to_le_bytes());
        let tag = self.tag(&bytes[..SEALED]);
        bytes[SEALED..].copy_from_slice(&tag);
        Receipt::new(URL_SAFE_NO_PAD.encode(bytes)).expect("a sealed receipt is short")
    }

    /// `None` if this store did not make it.
    pub fn open(&self, receipt: &Receipt) -> Option<Named> {
        let mut bytes = [0u8; LEN];
        let len = URL_SAFE_NO_PAD.decode_slice(receipt.as_str(), &mut bytes).ok()?;
        if len != LEN {
            return None;
        }
        let tag = self.tag(&bytes[..SEALED]);
        // Constant time: the tag is all that stands between a guess and someone else's delivery.
        let differs = tag.iter().zip(&bytes[SEALED..]).fold(0, |acc, (a, b)| acc | (a ^ b));
        (differs == 0).then(|| Named {
            queue: u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes")),
            seq: u64::from_le_bytes(bytes[4..12].try_into().expect("8 bytes")),
            fence: u64::from_le_bytes(bytes[12..SEALED].try_into().expect("8 bytes")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_opens_only_where_it_was_made_and_only_unchanged() {
        let sealer = Sealer::new([7; 32]);
        let named = Named { queue: 3, seq: 99, fence: 1 << 50 };
        let receipt = sealer.seal(named);
        assert_eq!(sealer.open(&receipt), Some(named));
        assert_eq!(Sealer::new([8; 32]).open(&receipt), None);

        for at in 0..receipt.as_str().len() {
            let mut text = receipt.as_str().as_bytes().to_vec();
            text[at] = if text[at] == b'A' { b'B' } else { b'A' };
            let forged = Receipt::new(String::from_utf8(text).unwrap()).unwrap();
            assert!(forged == receipt || sealer.open(&forged) != Some(named), "byte {at}");
        }
        for garbage in ["x", "AAAA", &"A".repeat(39), "ünsinn", &receipt.as_str().repeat(2)] {
            assert_eq!(sealer.open(&Receipt::new(garbage).unwrap()), None, "{garbage}");
        }
    }
}
