use crate::numbers::low_bits::LowBits;
use crate::rule::{Describe, Describer, IntoOptimiser, Optimiser, Rule, Store};

/// Keeps an f32 master of each bf16 parameter in the parameter itself and 17 more bits.
///
/// Masters and parameters are those of [`MixedPrecision(F32, rule)`](crate::MixedPrecision), bit for bit,
/// with 2.125 bytes of state in place of 4.
///
/// ```text
/// x̂ = x and rest                     the exact f32 that was split
/// x̂ = x̂ - rule(x̂, dx)
/// x = x̂ rounded to nearest, rest = x̂ - x in units of the last place
/// ```
///
/// Rounding goes to nearest, ties to even. The parameter is then at most half of its unit away from the
/// master, in either direction. 16 bits have all distances but one: half a unit above. One more bit says so.
///
/// Parameters in F32 or F64 need no master, and the rule runs as if bare. An F16 parameter is refused: it is
/// no part of an f32.
///
/// State per parameter: `rest` and the rule's. A tensor `rest` has the distances, in units of the master's
/// last place: whole numbers from -32768 to 32768. It is stored in records of 272 bytes, each of 128
/// elements: their lower 16 bits, little-endian, then a bit for each, the first the lowest of the first byte,
/// which is set for 32768. The last record of a parameter is whole, so that a parameter of 3 elements takes
/// one.
///
/// # 24 bits
/// [`SplitMaster::of_24_bits`] keeps 8 bits of rest (1 byte, U8, with a sign) beside a bf16 that is rounded
/// to nearest, ties away from zero: 8 bits can undo no other rounding to nearest. The master then has 16
/// significant bits, where an f32 has 24. Each step rounds it to nearest, ties to even, by at most half a
/// unit, 2⁻¹⁶ of its size. A smaller step is lost, so it suits learning rates for which steps are well above
/// 1e-5 of the weights. What is lost of larger steps has the mean 0. AdamW with [`Q8`](crate::Q8) moments
/// then takes 2 + 1 + 1.03 + 1.03 bytes, where `MixedPrecision` takes 14.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AdamW, SplitMaster, setup, update};
///
/// let x = Var::ones(3, BF16, &Device::Cpu)?;
/// let mut state = setup(SplitMaster::new(AdamW::new(1e-4)), &x)?;
/// for _ in 0..40 {
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// }
/// assert_eq!(x.to_dtype(F32)?.to_vec1::<f32>()?, [0.99609375; 3]);
/// // A record, and the moments.
/// assert_eq!(state.bytes(), 272 + 3 * 8);
/// assert_eq!(setup(SplitMaster::of_24_bits(AdamW::new(1e-4)), &x)?.bytes(), 3 * (1 + 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct SplitMaster<R> {
    store: Store,
    inner: R,
}

impl<R: Rule + Clone> SplitMaster<R> {
    /// Runs `inner` on masters that are split.
    pub fn new(inner: R) -> Self {
        SplitMaster { store: Store::Split(LowBits::All), inner }
    }

    /// Runs `inner` on masters of 24 bits.
    pub fn of_24_bits(inner: R) -> Self {
        SplitMaster { store: Store::Split(LowBits::Byte), inner }
    }
}

impl<R: Rule + Clone> Describe for SplitMaster<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        self.store.describe(&mut self.inner, rule);
    }
}

impl<R: Rule + Clone> IntoOptimiser for SplitMaster<R> {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::stored(self.store, self.inner)
    }
}
