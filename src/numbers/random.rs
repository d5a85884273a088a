//! Random bits for an element. The bits depend only on seed, step, path and element, so they are the same
//! with any number of threads or ranks, and after a restart.

/// The key of random bits, made of a seed, a step and a path. Key and index give an element's bits.
///
/// The path is hashed by FNV-1a (Fowler, Noll, Vo), and all parts are mixed by SplitMix64 (Steele, Lea, Flood
/// 2014).
pub(crate) fn random_key(seed: u64, step: u64, path: &str) -> u64 {
    let path_hash = path.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    [step, path_hash]
        .into_iter()
        .fold(mix(seed), |hash, part| mix(hash ^ part))
}

/// SplitMix64.
pub(super) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 32 random bits for an element: the integer hash `lowbias32` (Wellons 2018). The lower half of the key
/// enters before the hash, the upper half after it.
#[inline(always)]
pub(crate) fn random_bits(key: u64, element: u32) -> u32 {
    let mut x = element ^ key as u32;
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    x.wrapping_add((key >> 32) as u32)
}

/// The key for the elements of a range that begins at `start`. The upper half of `start` goes into the upper
/// half of the key, because [`random_bits`] takes an element's index modulo 2³². So no range may cross a
/// multiple of 2³².
#[inline(always)]
pub(crate) fn key_at(key: u64, start: usize) -> u64 {
    key ^ (start as u64 >> 32 << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_elements_decide_the_bits() {
        let key = random_key(0, 1, "a");
        assert_ne!(key, random_key(1, 1, "a"));
        assert_ne!(key, random_key(0, 2, "a"));
        assert_ne!(key, random_key(0, 1, "b"));
        let ones: u32 = (0..1000)
            .map(|element| random_bits(key, element).count_ones())
            .sum();
        assert!((15_500..16_500).contains(&ones), "{ones} of 32000");
    }
}
