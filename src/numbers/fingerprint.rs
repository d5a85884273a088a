//! Hashes of values, which ranks compare instead of the values.

use std::fmt;

/// A hash of values: FNV-1a of 64 bits, because ranks on different machines must have the same hashes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn new() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    /// Adds the number of bytes and the bytes. Without the number, `["ab", "c"]` and `["a", "bc"]` would have
    /// one hash.
    #[must_use]
    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        self.number(bytes.len() as u64).hash_bytes(bytes)
    }

    #[must_use]
    pub(crate) fn number(self, number: u64) -> Self {
        self.hash_bytes(&number.to_le_bytes())
    }

    /// Adds the bits of a number, which may be NaN.
    #[must_use]
    pub(crate) fn real(self, number: f64) -> Self {
        self.number(number.to_bits())
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }

    fn hash_bytes(self, bytes: &[u8]) -> Self {
        Fingerprint(bytes.iter().fold(self.0, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        }))
    }
}

/// Adds formatted text without allocating it.
impl fmt::Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        *self = self.hash_bytes(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Fingerprint;

    /// The published values for no byte, "a" and "foobar".
    #[test]
    fn is_fnv_1a() {
        let of = |text: &str| Fingerprint::new().hash_bytes(text.as_bytes()).finish();
        assert_eq!(
            [of(""), of("a"), of("foobar")],
            [
                0xcbf2_9ce4_8422_2325,
                0xaf63_dc4c_8601_ec8c,
                0x8594_4171_f739_67e8
            ]
        );
    }

    #[test]
    fn lists_of_texts_are_told_apart() {
        let of = |texts: &[&str]| {
            texts
                .iter()
                .fold(Fingerprint::new(), |print, text| print.bytes(text.as_bytes()))
                .finish()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["", ""]), of(&[""]));
    }
}
