//! Receipts: text that names one delivery.

use hapax_core::{MessageId, Receipt, SettleError};

use crate::seal::Seal;

/// What the seal of a receipt is for.
const CONTEXT: &[u8] = b"receipt";

/// What a receipt names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub queue_id: i32,
    pub id: MessageId,
    pub seq: u64,
    pub fence: u64,
}

impl Named {
    pub(crate) fn receipt(self, seal: &Seal) -> Receipt {
        let mut bytes = [0; 36];
        bytes[..4].copy_from_slice(&self.queue_id.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.seq.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.fence.to_le_bytes());
        bytes[20..].copy_from_slice(&self.id.0.to_le_bytes());
        Receipt::new(seal.seal(CONTEXT, &bytes)).expect("it is short and not empty")
    }

    /// Reads a receipt of any queue; `None` if this store did not make it.
    pub(crate) fn parse(seal: &Seal, receipt: &Receipt) -> Option<Self> {
        let bytes: [u8; 36] = seal.open(CONTEXT, receipt.as_str())?;
        let (queue_id, rest) = bytes.split_first_chunk()?;
        let (seq, rest) = rest.split_first_chunk()?;
        let (fence, rest) = rest.split_first_chunk()?;
        let (id, _) = rest.split_first_chunk()?;
        let (seq, fence) = (u64::from_le_bytes(*seq), u64::from_le_bytes(*fence));
        let id = MessageId(u128::from_le_bytes(*id));
        Some(Self { queue_id: i32::from_le_bytes(*queue_id), id, seq, fence })
    }

    /// Reads a receipt of this queue.
    pub(crate) fn of(seal: &Seal, queue_id: i32, receipt: &Receipt) -> Result<Self, SettleError> {
        let named = Self::parse(seal, receipt).filter(|named| named.queue_id == queue_id);
        named.ok_or(SettleError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_read_as_it_was_written_and_only_by_its_store() {
        let (seal, other) = (Seal::new([1; 32]), Seal::new([2; 32]));
        let named = Named { queue_id: 7, id: MessageId(u128::MAX - 3), seq: 1 << 40, fence: 1 << 52 };
        let receipt = named.receipt(&seal);
        assert_eq!(Named::of(&seal, 7, &receipt), Ok(named));
        assert_eq!(Named::of(&seal, 8, &receipt), Err(SettleError::Malformed));
        assert_eq!(Named::of(&other, 7, &receipt), Err(SettleError::Malformed));
    }

    #[test]
    fn a_changed_or_foreign_text_is_malformed() {
        let seal = Seal::new([1; 32]);
        let named = Named { queue_id: 7, id: MessageId(5), seq: 9, fence: 10 };
        let text = named.receipt(&seal).to_string();
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let read = Named::parse(&seal, &Receipt::new(changed.clone()).unwrap());
            assert!(changed == text || read.is_none(), "letter {at}");
        }
        for text in ["garbage", "pg1.1.2.3.4.5", "AAAA"] {
            assert_eq!(Named::parse(&seal, &Receipt::new(text).unwrap()), None, "{text}");
        }
    }
}
