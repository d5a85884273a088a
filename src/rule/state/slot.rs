//! A state tensor: its initial value, its format, and how new weights of the parameter change the tensor.

use crate::engine::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, Records, is_supported};

/// The format in which a state tensor is stored.
///
/// Arithmetic is in f32 or f64 in any case: a tensor is widened before a step and rounded after the step, in
/// one pass over memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotFormat {
    /// In this dtype: F16, BF16, F32 or F64.
    Dtype(DType),
    /// In 8 bits: 1.03 bytes for each element.
    ///
    /// Each block of 128 elements of the whole parameter has one f32 as its scale. A code is a small float:
    /// sign, 4 bits of exponent, 3 bits of fraction. The largest number of a block is exact. The smallest
    /// code is 1.125·2⁻¹⁵ of the largest number; smaller numbers become 0 or this code. Larger numbers are
    /// rounded up or down at random, by at most an eighth, so that a mean that moves by a thousandth in a
    /// step does move. A hash of the number decides, so every run rounds alike.
    ///
    /// The codes of a [non-negative](crate::Slot::non_negative) slot have no sign and 5 bits of exponent,
    /// down to 2⁻³¹. Only 0 becomes 0.
    ///
    /// Tensors with fewer than 4096 elements, such as biases, stay in F32, because 8 bits would save little.
    /// The size of the whole tensor decides, even if the tensor is divided among ranks. Infinity and NaN have
    /// codes of their own and change no other number of their block. In a checkpoint a block is a row of 132
    /// bytes: its scale as a little-endian f32, then the codes.
    Q8,
}

impl SlotFormat {
    /// The format of this tensor.
    pub(crate) fn from_buffer(tensor: &Buffer) -> Self {
        match tensor.records() {
            Some(Records::Codes(_)) => SlotFormat::Q8,
            Some(Records::LowBits) => DType::I16.into(),
            None => tensor.stored_dtype().into(),
        }
    }

    /// Whether a number takes fewer bits than in F32.
    fn is_below_f32(self) -> bool {
        !matches!(self, SlotFormat::Dtype(DType::F32 | DType::F64))
    }
}

impl From<DType> for SlotFormat {
    fn from(dtype: DType) -> Self {
        SlotFormat::Dtype(dtype)
    }
}

impl std::fmt::Display for SlotFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SlotFormat::Dtype(dtype) => write!(f, "{dtype:?}"),
            SlotFormat::Q8 => f.write_str("Q8"),
        }
    }
}

/// A state tensor that a rule needs: its name, initial value and format.
///
/// Tensors with one name have to be one quantity in all rules, because a rule that
/// [replaces](crate::Selection::replace) another rule takes tensors over by name. `m` and `v` are the decayed
/// means of the gradient and of its square.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    pub(crate) name: &'static str,
    pub(crate) initial: Initial,
    pub(crate) format: Option<SlotFormat>,
    pub(crate) sign: Option<Sign>,
    pub(crate) is_average: bool,
    /// Whether the rule needs small differences or changes, which formats of 16 and 8 bits round away.
    pub(crate) needs_f32: bool,
}

/// Properties of a tensor, counter or number of a state besides its value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EntryTraits {
    pub(crate) sign: Option<Sign>,
    /// Whether the entry is a tensor that cannot be stored in 16 or 8 bits.
    pub(crate) needs_f32: bool,
    /// How new weights of the parameter change the entry.
    pub(crate) renewal: Option<Renewal>,
    /// Whether the rule starts anew when the rows of the parameter change: see `rows.rs`.
    pub(crate) restarts_with_rows: bool,
    /// Whether the entry is a number of the whole model: see `shared.rs`.
    pub(crate) is_shared: bool,
    /// Whether the entry counts steps of the model in which the parameter did not move.
    pub(crate) counts_missed_steps: bool,
    /// Whether the entry has the digits that roundings of the parameter lost. The digits would wrongly move
    /// new weights.
    pub(crate) is_rounding_loss: bool,
    /// The range of a number, as of a hyper-parameter: see [`range`](crate::range).
    pub(crate) range: Option<fn(f64) -> Option<&'static str>>,
}

impl EntryTraits {
    /// Whether the entry is a copy of the parameter, or an average of its values.
    pub(crate) fn is_copy(self) -> bool {
        matches!(self.renewal, Some(Renewal::Copy | Renewal::Average))
    }

    pub(crate) fn is_average(self) -> bool {
        self.renewal == Some(Renewal::Average)
    }

    /// Whether the tensor can be stored in this format without a decision for this very tensor. In 16 bits
    /// copies of the parameter, second moments and the like lose small steps, as a parameter in 16 bits does.
    pub(crate) fn is_precise_in(self, format: SlotFormat) -> bool {
        let loses_steps = self.is_copy() || self.sign.is_some();
        self.check_format("", format).is_ok()
            && !(loses_steps && format != SlotFormat::Q8 && format.is_below_f32())
    }

    /// Refuses a format in which the tensor with this name cannot be stored.
    pub(crate) fn check_format(self, slot: &str, format: SlotFormat) -> Result<()> {
        let is_second_moment = self.sign == Some(Sign::SecondMoment);
        let expected = match format {
            SlotFormat::Dtype(dtype) if !is_supported(dtype) => "F16, BF16, F32, F64 or Q8",
            _ if self.needs_f32 && format.is_below_f32() => {
                "F32 or F64, because smaller formats round away small differences or changes that the rule \
                 needs"
            }
            SlotFormat::Dtype(DType::F16) if is_second_moment => {
                "F32 or F64, because the tensor is a second moment, and squares of small gradients are 0 in \
                 F16"
            }
            SlotFormat::Q8 if self.is_copy() && !is_second_moment => {
                "F16, BF16, F32 or F64, because the tensor is a copy of the parameter, which 8 bits cannot \
                 hold"
            }
            _ => return Ok(()),
        };
        Err(Error::new(
            ErrorKind::Argument,
            format!("state tensor {slot:?} is to be stored as"),
        )
        .with_got(format)
        .with_expected(expected))
    }
}

/// The kind of a tensor whose numbers are never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    NonNegative,
    /// Squares of gradients, which are small, and by whose root steps are divided.
    SecondMoment,
}

/// The initial elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Initial {
    /// This number for all elements.
    Value(f64),
    /// A copy of the parameter.
    Parameter,
}

impl Slot {
    /// A tensor of the parameter's shape that starts at zero.
    ///
    /// Its dtype is the compute dtype: F64 for an F64 parameter, else F32.
    pub fn zeros(name: &'static str) -> Self {
        Slot::full(name, 0.0)
    }

    /// A tensor of the parameter's shape that starts at `initial`.
    pub fn full(name: &'static str, initial: f64) -> Self {
        Slot {
            name,
            initial: Initial::Value(initial),
            format: None,
            sign: None,
            is_average: false,
            needs_f32: false,
        }
    }

    /// A tensor that starts as a copy of the parameter (or of its master).
    ///
    /// If [`StateTree::set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the parameter new weights, the tensor
    /// becomes a copy of the new weights. A rule that has only such tensors then counts its steps from 0
    /// again.
    ///
    /// An [`update`](crate::update) refuses weights that were changed without such a call. Before the first
    /// step, `update` compares the parameter with the tensor. Later, on the CPU, it compares a sample of the
    /// parameter with the sample after the last step. After a copy of the state, a restore, other rows, a
    /// [`replace`](crate::Selection::replace) that takes over no such tensor or takes a master away, or a
    /// [`rebind`](crate::StateTree::rebind), the comparison begins again with the next step.
    pub fn parameter(name: &'static str) -> Self {
        Slot {
            initial: Initial::Parameter,
            ..Slot::zeros(name)
        }
    }

    /// A [`Slot::parameter`] that holds weights to evaluate the model with.
    ///
    /// After the first step, changed weights are no error, because the average follows the parameter. A step
    /// in which the parameter does not move is missing in the average; [`Ema`](crate::Ema) and
    /// [`UniformAverage`](crate::UniformAverage) make up for such steps.
    ///
    /// [`StateTree::with_averages`](crate::StateTree::with_averages) evaluates with the average instead of
    /// the parameter. If a rule has several averages, `with_averages` takes the first.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, Elementwise, OptimiserChain, Slot, hyper_parameters, range, setup, update, value::Value};
    ///
    /// hyper_parameters! {
    ///     /// Moves an average half of the way to each new weight.
    ///     pub struct Halfway {
    ///         /// The part of the way.
    ///         part: f64 = 0.5 => range::non_negative,
    ///     }
    /// }
    ///
    /// impl Elementwise for Halfway {
    ///     type Scalars = f64;
    ///     type Slots<T> = [T; 1];
    ///
    ///     fn slots(&self) -> [Slot; 1] {
    ///         [Slot::average("mean")]
    ///     }
    ///
    ///     fn scalars(&self, _t: u64) -> f64 {
    ///         self.part
    ///     }
    ///
    ///     fn step<V: Value>(part: f64, x: V, dx: V, [mean]: &mut [V; 1]) -> V {
    ///         *mean = *mean + (x - dx - *mean) * part;
    ///         dx
    ///     }
    /// }
    ///
    /// let x = Var::new(&[4f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(1.0), Halfway::default())), &x)?;
    /// update(&mut state, &x, &x.sum_all()?.backward()?)?;
    /// assert_eq!(state.averages(&x)?[""].to_vec1::<f32>()?, [3.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn average(name: &'static str) -> Self {
        Slot {
            is_average: true,
            ..Slot::parameter(name)
        }
    }

    /// Stores this slot in a dtype or in [`Q8`](crate::Q8).
    ///
    /// Arithmetic stays in the compute dtype. The dtype has to be F16, BF16, F32 or F64. A
    /// [second moment](Slot::second_moment) cannot be stored in F16, nor a
    /// [copy of the parameter](Slot::parameter) in Q8.
    pub fn stored_as(self, format: impl Into<SlotFormat>) -> Self {
        Slot {
            format: Some(format.into()),
            ..self
        }
    }

    /// Refuses to store this slot in 16 or 8 bits.
    pub(crate) fn at_least_f32(self) -> Self {
        Slot {
            needs_f32: true,
            ..self
        }
    }

    /// Promises that this slot never has a negative number.
    ///
    /// [`Q8`](crate::Q8) then uses the sign bit for the exponent, which doubles the number of powers of two.
    pub fn non_negative(self) -> Self {
        Slot {
            sign: self.sign.or(Some(Sign::NonNegative)),
            ..self
        }
    }

    /// Declares this slot a second moment: a mean, sum or maximum of squared gradients.
    ///
    /// Steps are divided by the root of such a slot. The slot counts as [non-negative](Slot::non_negative).
    ///
    /// Neither [`stored_as`](Slot::stored_as) nor [`StoreAs`](crate::StoreAs) can store the slot in F16, in
    /// which numbers below 3e-8 are 0. With β₂ = 0.999 the second moment of a gradient below 5e-3 would be 0
    /// in F16. The step would be divided by ε alone, hence be a hundred times too long or more.
    ///
    /// [`Update::finite_only`](crate::Update::finite_only) skips a call with a gradient whose square would
    /// make the slot infinite.
    ///
    /// ```
    /// use optimisers::Slot;
    ///
    /// let slots = [Slot::zeros("m"), Slot::zeros("v").second_moment()];
    /// # assert_ne!(slots[1], Slot::zeros("v"));
    /// ```
    pub fn second_moment(self) -> Self {
        Slot {
            sign: Some(Sign::SecondMoment),
            ..self
        }
    }
}

/// How an entry changes when its parameter gets new weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// A copy becomes the new weights.
    Copy,
    /// An average to evaluate with becomes the new weights, too.
    Average,
    /// A tensor, counter or number becomes 0.
    Zero,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::{Parameter, State};
    use crate::tensors::{Device, repeated_zero};

    /// The sign decides on the 8-bit code of a tensor.
    #[test]
    fn a_state_knows_the_signs_of_its_slots() {
        let x = repeated_zero(4096, DType::F32, &Device::Cpu).expect("a parameter");
        let slots = [
            Slot::zeros("m"),
            Slot::full("size", 0.5).non_negative().stored_as(SlotFormat::Q8),
        ];
        let state = State::for_slots(Parameter::new(&x), &slots).expect("a state");
        assert_eq!(
            ["m", "size"].map(|name| state.traits_of(name).sign),
            [None, Some(Sign::NonNegative)]
        );
    }
}
