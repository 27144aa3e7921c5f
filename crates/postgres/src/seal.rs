//! Receipts and tokens are sealed with the store's secret, so that a forged one is told apart from a stale one.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Length of the tag in bytes.
const TAG: usize = 16;

/// Seals and opens short texts with the store's secret.
#[derive(Clone)]
pub(crate) struct Seal {
    key: [u8; 32],
}

impl Seal {
    pub fn new(key: [u8; 32]) -> Self {
        Self { key }
    }

    fn tag(&self, context: &[u8], payload: &[u8]) -> [u8; TAG] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&(context.len() as u64).to_le_bytes());
        hasher.update(context);
        hasher.update(payload);
        hasher.finalize().as_bytes()[..TAG].try_into().expect("a hash has 32 bytes")
    }

    /// The payload with a tag, as text. It opens only with the same context.
    pub fn seal(&self, context: &[u8], payload: &[u8]) -> String {
        let mut bytes = payload.to_vec();
        bytes.extend(self.tag(context, payload));
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The payload; `None` if this store did not seal it, or sealed it in another context.
    pub fn open<const LEN: usize>(&self, context: &[u8], text: &str) -> Option<[u8; LEN]> {
        // Bounds the work on a foreign text.
        if text.len() > 2 * (LEN + TAG) {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (payload, tag) = bytes.split_at_checked(LEN)?;
        let expected = self.tag(context, payload);
        // Constant time: the tag alone keeps a guess from reaching another holder's claim.
        let differs = expected.iter().zip(tag).fold(0, |acc, (a, b)| acc | (a ^ b));
        if tag.len() != TAG || differs != 0 {
            return None;
        }
        payload.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_text_opens_only_in_its_context_and_only_unchanged() {
        let seal = Seal::new([7; 32]);
        let text = seal.seal(b"entry", b"12345678");
        assert_eq!(seal.open::<8>(b"entry", &text), Some(*b"12345678"));
        assert_eq!(seal.open::<8>(b"entrz", &text), None);
        assert_eq!(seal.open::<7>(b"entry", &text), None);
        assert_eq!(seal.open::<9>(b"entry", &text), None);
        assert_eq!(Seal::new([8; 32]).open::<8>(b"entry", &text), None);
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(changed == text || seal.open::<8>(b"entry", &changed).is_none(), "byte {at}");
        }
        for garbage in ["", "x", "AAAA", "ünsinn", &text.repeat(2)] {
            assert_eq!(seal.open::<8>(b"entry", garbage), None, "{garbage}");
        }
    }
}
