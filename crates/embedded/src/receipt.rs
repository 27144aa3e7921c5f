//! Receipts: references to deliveries, sealed so that a forged one is distinguished from a stale one.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hapax_core::{Receipt, Token};

/// The content of a receipt: a queue, a message, and the delivery by its fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DeliveryRef {
    pub queue: u32,
    pub seq: u64,
    pub fence: u64,
}

const LEN: usize = 28;
const SEALED: usize = 20;

/// Length of a token in bytes: the fence, and a tag over the fence and its entry.
const TOKEN_LEN: usize = 24;

/// Creates and verifies receipts with the store's secret.
#[derive(Clone)]
pub(crate) struct ReceiptCodec {
    key: [u8; 32],
}

impl ReceiptCodec {
    pub fn new(key: [u8; 32]) -> Self {
        Self { key }
    }

    fn tag(&self, bytes: &[u8]) -> [u8; 8] {
        let hash = blake3::keyed_hash(&self.key, bytes);
        hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes")
    }

    pub fn seal(&self, delivery: DeliveryRef) -> Receipt {
        let mut bytes = [0u8; LEN];
        bytes[..4].copy_from_slice(&delivery.queue.to_le_bytes());
        bytes[4..12].copy_from_slice(&delivery.seq.to_le_bytes());
        bytes[12..SEALED].copy_from_slice(&delivery.fence.to_le_bytes());
        let tag = self.tag(&bytes[..SEALED]);
        bytes[SEALED..].copy_from_slice(&tag);
        Receipt::new(URL_SAFE_NO_PAD.encode(bytes)).expect("a sealed receipt is short")
    }

    /// `None` if this store did not issue it.
    pub fn open(&self, receipt: &Receipt) -> Option<DeliveryRef> {
        let mut bytes = [0u8; LEN];
        let len = URL_SAFE_NO_PAD.decode_slice(receipt.as_str(), &mut bytes).ok()?;
        if len != LEN {
            return None;
        }
        let tag = self.tag(&bytes[..SEALED]);
        // Constant time: the tag alone keeps a guess from reaching another consumer's delivery.
        let differs = tag.iter().zip(&bytes[SEALED..]).fold(0, |acc, (a, b)| acc | (a ^ b));
        (differs == 0).then(|| DeliveryRef {
            queue: u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes")),
            seq: u64::from_le_bytes(bytes[4..12].try_into().expect("8 bytes")),
            fence: u64::from_le_bytes(bytes[12..SEALED].try_into().expect("8 bytes")),
        })
    }

    fn token_tag(&self, entry: u128, fence: u64) -> [u8; 16] {
        let mut bytes = [0u8; TOKEN_LEN];
        // Longer than the sealed part of a receipt, so that neither is accepted as the other.
        bytes[..16].copy_from_slice(&entry.to_le_bytes());
        bytes[16..].copy_from_slice(&fence.to_le_bytes());
        let hash = blake3::keyed_hash(&self.key, &bytes);
        hash.as_bytes()[..16].try_into().expect("a hash has 32 bytes")
    }

    /// The token for the claim of an entry that was granted under `fence`.
    pub fn token(&self, entry: u128, fence: u64) -> Token {
        let mut bytes = [0u8; TOKEN_LEN];
        bytes[..8].copy_from_slice(&fence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.token_tag(entry, fence));
        Token::new(URL_SAFE_NO_PAD.encode(bytes)).expect("a sealed token is short")
    }

    /// The fence in a token of this entry; `None` if this store did not issue it.
    pub fn open_token(&self, entry: u128, token: &Token) -> Option<u64> {
        let mut bytes = [0u8; TOKEN_LEN];
        let len = URL_SAFE_NO_PAD.decode_slice(token.as_str(), &mut bytes).ok()?;
        if len != TOKEN_LEN {
            return None;
        }
        let fence = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        let tag = self.token_tag(entry, fence);
        let differs = tag.iter().zip(&bytes[8..]).fold(0, |acc, (a, b)| acc | (a ^ b));
        (differs == 0).then_some(fence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_opens_only_where_it_was_made_and_only_unchanged() {
        let codec = ReceiptCodec::new([7; 32]);
        let delivery = DeliveryRef { queue: 3, seq: 99, fence: 1 << 50 };
        let receipt = codec.seal(delivery);
        assert_eq!(codec.open(&receipt), Some(delivery));
        assert_eq!(ReceiptCodec::new([8; 32]).open(&receipt), None);

        for at in 0..receipt.as_str().len() {
            let mut text = receipt.as_str().as_bytes().to_vec();
            text[at] = if text[at] == b'A' { b'B' } else { b'A' };
            let forged = Receipt::new(String::from_utf8(text).unwrap()).unwrap();
            assert!(forged == receipt || codec.open(&forged) != Some(delivery), "byte {at}");
        }
        for garbage in ["x", "AAAA", &"A".repeat(39), "ünsinn", &receipt.as_str().repeat(2)] {
            assert_eq!(codec.open(&Receipt::new(garbage).unwrap()), None, "{garbage}");
        }
    }

    #[test]
    fn a_token_opens_only_for_its_entry_and_only_unchanged() {
        let codec = ReceiptCodec::new([7; 32]);
        let token = codec.token(99, 1 << 50);
        assert_eq!(codec.open_token(99, &token), Some(1 << 50));
        assert_eq!(codec.open_token(98, &token), None);
        assert_eq!(ReceiptCodec::new([8; 32]).open_token(99, &token), None);
        for at in 0..token.as_str().len() {
            let mut text = token.as_str().as_bytes().to_vec();
            text[at] = if text[at] == b'A' { b'B' } else { b'A' };
            let forged = Token::new(String::from_utf8(text).unwrap()).unwrap();
            assert!(forged == token || codec.open_token(99, &forged).is_none(), "byte {at}");
        }
        for garbage in ["x", "AAAA", &"A".repeat(32), &token.as_str().repeat(2)] {
            assert_eq!(codec.open_token(99, &Token::new(garbage).unwrap()), None, "{garbage}");
        }
    }
}
