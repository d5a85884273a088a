//! The instruction sets the fused CPU engine is compiled for.

use std::sync::OnceLock;

/// An instruction set of the fused CPU engine. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every processor of the target has.
    Portable,
    /// 256-bit vectors and half-precision conversion (AVX2, F16C).
    Avx2,
    /// 512-bit vectors (AVX-512 F, BW, DQ, VL).
    Avx512,
}

impl Isa {
    /// The widest instruction set of this processor.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(detect)
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}
