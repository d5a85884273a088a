use crate::engine::{Buffer, Operand, joined, keep_low_bits, set_lent_and, split};
use crate::error::{Error, Result};
use crate::model::lent::Lend;
use crate::numbers::DType;
use crate::numbers::low_bits::LowBits;
use crate::rule::{
    Describe, Describer, Epilogue, Gradient, Optimiser, OwnState, Parameter, ParameterStore, Planned, Rule,
    State, StorageKind, StorageScheme, Target, state_of_another_rule,
};
use crate::tensors::Tensor;

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
    /// What `rest` is.
    low_bits: LowBits,
    inner: R,
}

impl<R: Rule + Clone> SplitMaster<R> {
    /// Runs `inner` on masters that are split.
    pub fn new(inner: R) -> Self {
        SplitMaster { low_bits: LowBits::All, inner }
    }

    /// Runs `inner` on masters of 24 bits.
    pub fn of_24_bits(inner: R) -> Self {
        SplitMaster { low_bits: LowBits::Byte, inner }
    }
}

impl<R: Rule + Clone> Describe for SplitMaster<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("SplitMaster");
        rule.stores(StorageScheme::on_device(StorageKind::Split));
        if self.low_bits == LowBits::Byte {
            rule.setting("bits", 24);
        }
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> ParameterStore for SplitMaster<R> {
    fn storage_kind(&self) -> StorageKind {
        StorageKind::Split
    }

    fn wraps(&self, dtype: DType) -> Result<bool> {
        if dtype == DType::F16 {
            return Err(Error::dtype("it", dtype, "BF16 (F32 and F64 are left alone)")
                .with_remedy("use MixedPrecision or Kahan in place of SplitMaster"));
        }
        Ok(dtype == DType::BF16)
    }

    fn state(&self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        let rest = match self.low_bits {
            LowBits::All => Buffer::low_bits(x.shape(), x.device())?,
            LowBits::Byte => Buffer::new(&Tensor::zeros(x.shape(), DType::U8.into(), x.device())?)?,
        };
        Ok(State::empty().with_buffer("rest", rest).stored_with(rule.init(Parameter::new(x))?))
    }

    fn whole(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        let [(_, rest)] = &state.tensors[..] else { return state_of_another_rule(self) };
        Ok(joined(&x.to_tensor()?, rest)?)
    }

    fn set_whole(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let [(_, rest)] = &mut state.tensors[..] else { return state_of_another_rule(self) };
        let (high, low) = split(rest, values)?;
        set_lent_and(x, &high, &mut || Ok(rest.set(&low)?))
    }

    fn keep(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        let [(_, rest)] = &mut state.tensors[..] else { return state_of_another_rule(self) };
        keep_low_bits(rest, &x.to_tensor()?, values)?;
        Ok(true)
    }

    fn plan_stored<'a>(
        &'a self,
        rule: &'a dyn Rule,
        own: OwnState<'a>,
        target: Target<'a>,
        dx: Gradient<'a>,
    ) -> Result<Planned<'a>> {
        let [(_, rest)] = own.tensors else { return state_of_another_rule(self) };
        let flow = rule.apply(own.of_rule, Parameter::new(target.x), dx)?;
        Ok(Planned::new(flow, target.path, Operand::Lent(target.x), Epilogue::Subtract).with_low_bits(rest))
    }
}

impl<R: Rule + Clone> Optimiser for SplitMaster<R> {
    fn rule(&self) -> &dyn Rule {
        &self.inner
    }

    fn store(&self) -> Option<&dyn ParameterStore> {
        Some(self)
    }
}
