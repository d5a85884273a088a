use crate::numbers::low_bits::LowBits;
use crate::rule::{Describe, Describer, IntoOptimiser, Optimiser, Rule, Store};

/// Keeps an f32 master of each bf16 parameter in the parameter itself and 17 more bits.
///
/// Masters and parameters are those of [`MixedPrecision(F32, rule)`](crate::MixedPrecision), bit for bit,
/// with 2.125 bytes of state instead of 4.
///
/// ```text
/// x̂ = x and rest                     the exact f32 that was split
/// x̂ = x̂ - rule(x̂, dx)
/// x = x̂ rounded to nearest, rest = x̂ - x in units of the last place
/// ```
///
/// Rounding is to nearest, ties to even. The parameter is then at most half of its unit away from the master,
/// in either direction. 16 bits have room for all distances but one, half a unit above. One more bit marks
/// that distance.
///
/// Parameters in F32 or F64 need no master, and the rule runs without this wrapper. An F16 parameter is
/// refused, because it is no part of an f32.
///
/// State per parameter: `rest` and the rule's state. `rest` has the distances in units of the master's last
/// place, whole numbers from -32768 to 32768. 128 elements share a record of 272 bytes: the lower 16 bits of
/// each, little-endian, then one bit of each, which is set for 32768. The first element has the lowest bit of
/// the first byte. The last record of a parameter is whole, so that a parameter of 3 elements takes 272
/// bytes.
///
/// # 24 bits
/// [`SplitMaster::of_24_bits`] keeps 8 bits of rest (1 byte, U8, with a sign) for each bf16. The bf16 is
/// rounded to nearest, ties away from zero, because 8 bits can undo no other rounding to nearest. The master
/// has 16 significant bits, where an f32 has 24. Each step rounds the master to nearest, ties to even, by at
/// most half a unit, 2⁻¹⁶ of its size. A smaller step is lost, so this form suits learning rates whose steps
/// are well above 1e-5 of the weights. The rounding errors of larger steps have the mean 0. AdamW with
/// [`Q8`](crate::Q8) moments then takes 2 + 1 + 1.03 + 1.03 bytes, where `MixedPrecision` takes 14.
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
/// // One record, and the moments.
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
    /// Runs `inner` on f32 masters that are split.
    pub fn new(inner: R) -> Self {
        SplitMaster {
            store: Store::Split(LowBits::All),
            inner,
        }
    }

    /// Runs `inner` on masters of 24 bits.
    pub fn of_24_bits(inner: R) -> Self {
        SplitMaster {
            store: Store::Split(LowBits::Byte),
            inner,
        }
    }
}

impl<R: Rule + Clone> Describe for SplitMaster<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        self.store.describe(&mut self.inner, rule);
    }
}

impl<R: Rule + Clone> IntoOptimiser for SplitMaster<R> {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::with_store(self.store, self.inner)
    }
}
