//! The instruction sets that the fused CPU engine is compiled for.

use std::sync::OnceLock;

/// An instruction set of the fused CPU engine that this processor has. All give the same bits.
///
/// ```
/// use optimisers::{Engine, Isa};
///
/// let narrow = Engine::FusedWith(Isa::PORTABLE);
/// let wider = Isa::avx2().map(Engine::FusedWith); // `None`, if the processor lacks it
/// # let _ = (narrow, wider);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Vectors);

/// The vectors of an instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::engine) enum Vectors {
    /// The vectors that every processor of the target has.
    Portable,
    Bits256,
    Bits512,
}

impl Isa {
    /// The instructions that every processor of the target has.
    pub const PORTABLE: Isa = Isa(Vectors::Portable);

    /// 256-bit vectors and half-precision conversion (AVX2, F16C), if this processor has them.
    pub fn avx2() -> Option<Isa> {
        (Isa::best().0 >= Vectors::Bits256).then_some(Isa(Vectors::Bits256))
    }

    /// 512-bit vectors (AVX-512 F, BW, DQ, VL), if this processor has them.
    pub fn avx512() -> Option<Isa> {
        (Isa::best().0 >= Vectors::Bits512).then_some(Isa(Vectors::Bits512))
    }

    /// The widest instruction set of this processor.
    pub(crate) fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa(detect()))
    }

    /// The vectors. Other vectors than `Portable` appear only after `detect` has found their instructions, so
    /// code that is compiled for them may be called.
    #[inline(always)]
    pub(in crate::engine) fn vectors(self) -> Vectors {
        self.0
    }
}

/// Miri interprets Rust and has no vector instructions, so it gets the portable code.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn detect() -> Vectors {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    // The 512-bit code is compiled with AVX2 and F16C as well, so the match below needs both.
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Vectors::Bits512,
        (true, false) => Vectors::Bits256,
        _ => Vectors::Portable,
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
fn detect() -> Vectors {
    Vectors::Portable
}
