use candle_core::{DType, Tensor};

use super::wrapper;
use crate::engine::{Buffer, joined, set_split, set_tensor};
use crate::error::{Error, MasterError, Result};
use crate::rule::{
    Adjust, Child, Epilogue, FieldValue, Flow, Gradient, Kind, Optimiser, OwnCounters, OwnTensors, Planned, Rule, State, Target,
};

/// Keeps an f32 master of each bf16 parameter in the parameter itself and 16 more bits: 2 bytes of state where
/// [`MixedPrecision`](crate::MixedPrecision) takes 4.
///
/// ```text
/// x̂ = x and rest                     the exact f32 that was split
/// x̂ = x̂ - rule(x̂, dx)
/// x = x̂ rounded to nearest, rest = x̂ - x in units of the last place
/// ```
///
/// The masters are those of `MixedPrecision(F32, rule)`, bit for bit. The parameter is rounded to nearest too, but ties go away from zero instead of
/// to even: the only rounding to nearest that 16 bits can undo. One tie in 65536 numbers differs, by one bf16.
///
/// Parameters in F32 or F64 need no master, and the rule runs as if bare. An F16 parameter is refused: it is no part of an f32.
///
/// State per parameter: `rest` (2 bytes, I16) and the rule's.
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
/// assert_eq!(state.bytes(), 3 * (2 + 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SplitMaster<R> {
    inner: R,
}

impl<R: Rule + Clone> SplitMaster<R> {
    /// Runs `inner` on masters that are split.
    pub fn new(inner: R) -> Self {
        SplitMaster { inner }
    }

    fn wraps(dtype: DType) -> Result<bool> {
        if dtype == DType::F16 { Err(MasterError::SplitDtype.into()) } else { Ok(dtype == DType::BF16) }
    }

    fn own_state(x: &Tensor) -> Result<State> {
        State::empty().with_tensor("rest", &Tensor::zeros(x.shape(), DType::I16, x.device())?)
    }

    fn whole(x: &Tensor, rest: &Buffer) -> Result<Tensor> {
        Ok(joined(x, rest)?)
    }

    fn seen_by_rule(x: &Tensor, rest: &Buffer) -> Result<Tensor> {
        Self::whole(x, rest)
    }

    fn set_whole(x: &Tensor, rest: &mut Buffer, values: &Tensor) -> Result<()> {
        Ok(set_split(x, rest, values)?)
    }

    fn store<'a>(&'a self, flow: Flow<'a>, target: Target<'a>, own: OwnTensors<'a>, _: OwnCounters<'a>) -> Result<Planned<'a>> {
        Ok(Planned::new(flow, target.path, target.x, Epilogue::Subtract).with_low_bits(own.first_mut().map(|(_, rest)| rest)))
    }
}

wrapper!(SplitMaster, own fields: []);
