//! Receipts: text that names one delivery.

use hapax_core::{MessageId, Receipt, SettleError};

use super::row::halves;

/// What a receipt names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub queue_id: i32,
    pub id: MessageId,
    pub seq: u64,
    pub fence: u64,
}

impl Named {
    pub(crate) fn receipt(self) -> Receipt {
        let (high, low) = halves(self.id);
        let text = format!("pg1.{:x}.{high:x}.{low:x}.{:x}.{:x}", self.queue_id, self.seq, self.fence);
        Receipt::new(text).expect("it is short and not empty")
    }

    /// Reads a receipt of any queue.
    pub(crate) fn parse(receipt: &Receipt) -> Option<Self> {
        let mut parts = receipt.as_str().strip_prefix("pg1.")?.split('.');
        let mut number = || {
            let part = parts.next().filter(|part| part.bytes().all(|b| b.is_ascii_hexdigit()))?;
            u64::from_str_radix(part, 16).ok()
        };
        let (queue_id, high, low, seq, fence) = (number()?, number()?, number()?, number()?, number()?);
        let queue_id = i32::try_from(queue_id).ok()?;
        if parts.next().is_some() || seq > i64::MAX as u64 || fence > i64::MAX as u64 {
            return None;
        }
        Some(Self { queue_id, id: super::row::id_of(high, low), seq, fence })
    }

    /// Reads a receipt of this queue.
    pub(crate) fn of(queue_id: i32, receipt: &Receipt) -> Result<Self, SettleError> {
        Self::parse(receipt).filter(|named| named.queue_id == queue_id).ok_or(SettleError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_read_as_it_was_written() {
        let named = Named { queue_id: 7, id: MessageId(u128::MAX - 3), seq: 1 << 40, fence: 1 << 52 };
        assert_eq!(Named::of(7, &named.receipt()), Ok(named));
        assert_eq!(Named::of(8, &named.receipt()), Err(SettleError::Malformed));
    }

    #[test]
    fn garbage_is_malformed() {
        let all = [
            "garbage",
            "pg1.",
            "pg1.1.2.3.4",
            "pg1.1.2.3.4.5.6",
            "pg1.+1.2.3.4.5",
            "pg1.1.2.3.ffffffffffffffff.5",
        ];
        for text in all {
            assert_eq!(Named::parse(&Receipt::new(text).unwrap()), None, "{text}");
        }
    }
}
