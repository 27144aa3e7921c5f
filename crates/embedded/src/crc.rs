//! Checksums of rows. SQLite does not detect a flipped byte, so every row has its own checksum.

/// A running CRC-32.
pub(crate) struct Crc(crc32fast::Hasher);

impl Crc {
    pub fn new() -> Self {
        Self(crc32fast::Hasher::new())
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(bytes);
        self
    }

    /// Adds an optional part with its length, so that a byte moved between two parts is detected.
    pub fn part(&mut self, bytes: Option<&[u8]>) -> &mut Self {
        let len = bytes.map_or(u64::MAX, |bytes| bytes.len() as u64);
        self.bytes(&len.to_le_bytes()).bytes(bytes.unwrap_or_default())
    }

    pub fn word(&mut self, word: u64) -> &mut Self {
        self.bytes(&word.to_le_bytes())
    }

    pub fn text(&mut self, text: Option<&str>) -> &mut Self {
        self.part(text.map(str::as_bytes))
    }

    pub fn end(self) -> u32 {
        self.0.finalize()
    }
}
