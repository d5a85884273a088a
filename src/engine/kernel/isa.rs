//! The instruction sets that the fused CPU engine is compiled for.

use std::sync::OnceLock;

/// An instruction set of the fused CPU engine that this processor has. All sets give the same bits.
///
/// ```
/// use optimisers::{Engine, Isa};
///
/// let narrow = Engine::FusedWith(Isa::PORTABLE);
/// let wider = Isa::avx2().map(Engine::FusedWith); // `None` if the processor lacks it
/// # let _ = (narrow, wider);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa {
    vector_bits: u16,
}

impl Isa {
    /// The instructions that every processor of the target has.
    pub const PORTABLE: Isa = Isa { vector_bits: 128 };

    /// Only for patterns, [`detect`], [`Isa::avx2`] and [`Isa::avx512`].
    ///
    /// These functions return an instruction set only if the processor has its instructions. So whoever has
    /// such a value may call code that is compiled for the set.
    pub(in crate::engine) const AVX2: Isa = Isa { vector_bits: 256 };

    /// Only for the uses that [`Isa::AVX2`] names.
    pub(in crate::engine) const AVX512: Isa = Isa { vector_bits: 512 };

    /// 256-bit vectors and half-precision conversion (AVX2, F16C), if this processor has them.
    pub fn avx2() -> Option<Isa> {
        (Isa::best() >= Isa::AVX2).then_some(Isa::AVX2)
    }

    /// 512-bit vectors (AVX-512 F, BW, DQ, VL), if this processor has them.
    pub fn avx512() -> Option<Isa> {
        (Isa::best() >= Isa::AVX512).then_some(Isa::AVX512)
    }

    /// The widest instruction set of this processor.
    pub(crate) fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(detect)
    }
}

/// Miri interprets Rust and has no vector instructions, so it gets the portable code.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    // The 512-bit code is compiled with AVX2 and F16C as well, so the match below needs both.
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Isa::AVX512,
        (true, false) => Isa::AVX2,
        _ => Isa::PORTABLE,
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
fn detect() -> Isa {
    Isa::PORTABLE
}
