//! How a state tensor starts out, and what new weights of its parameter make of it.

use super::format::SlotFormat;

/// How a state tensor starts out.
///
/// Its name says what it is: rules with a tensor of the same name mean the same quantity by it. A rule that
/// [replaces](crate::Selection::replace) another takes it over. `m` and `v` are the decayed means of the
/// gradient and of its square.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    pub(crate) name: &'static str,
    pub(crate) initial: Initial,
    pub(crate) format: Option<SlotFormat>,
    pub(crate) sign: Option<Sign>,
    pub(crate) is_average: bool,
}

/// What is known of an entry of a state, a tensor, counter or number, besides its value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EntryTraits {
    pub(crate) sign: Option<Sign>,
    /// What new weights of the parameter do to it.
    pub(crate) renewal: Option<Renewal>,
    /// Whether its rows are not the parameter's, so that the rule starts anew when these change.
    pub(crate) has_other_rows: bool,
    /// Whether it is a number of the whole model.
    pub(crate) is_shared: bool,
    /// Whether it counts the steps of the model in which the parameter did not move.
    pub(crate) counts_missed: bool,
}

impl EntryTraits {
    /// Whether it is a copy of the parameter, or an average of its values.
    pub(crate) fn is_copy(self) -> bool {
        matches!(self.renewal, Some(Renewal::Copy | Renewal::Average))
    }

    pub(crate) fn is_average(self) -> bool {
        self.renewal == Some(Renewal::Average)
    }
}

/// What is known of a tensor's numbers that are never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    NonNegative,
    /// Squares of gradients: small numbers, whose root divides steps.
    SecondMoment,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Initial {
    Value(f64),
    Parameter,
}

impl Slot {
    /// A tensor of the parameter's shape that starts at zero.
    ///
    /// It is in the compute dtype: F64 for an F64 parameter, else F32.
    pub fn zeros(name: &'static str) -> Self {
        Slot::full(name, 0.0)
    }

    /// A tensor of the parameter's shape that starts at `initial`.
    pub fn full(name: &'static str, initial: f64) -> Self {
        Slot { name, initial: Initial::Value(initial), format: None, sign: None, is_average: false }
    }

    /// A tensor that starts as a copy of the parameter (or of its master).
    ///
    /// New weights, by [`StateTree::set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters), make it the parameter again. A rule that has
    /// only such tensors then counts its steps from 0 again.
    ///
    /// An [`update`](crate::update) refuses new weights without such a call: before the first step a
    /// parameter that is not equal to the tensor, later one on the CPU of which a sample is not what the last
    /// step has left. After a copy of the state, a restore or a [`rebind`](crate::StateTree::rebind), the
    /// next step is the first that leaves something to compare with.
    pub fn parameter(name: &'static str) -> Self {
        Slot { initial: Initial::Parameter, ..Slot::zeros(name) }
    }

    /// A [`Slot::parameter`] that holds weights to evaluate the model with.
    ///
    /// New weights are no error for it, as it follows them. A rule of a program is not asked in steps in
    /// which the parameter does not move; [`Ema`](crate::Ema) and [`UniformAverage`](crate::UniformAverage)
    /// make up for these.
    ///
    /// [`StateTree::with_averages`](crate::StateTree::with_averages) puts them in the parameter's place. Of
    /// several in one rule it takes the first.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, Elementwise, OptimiserChain, Slot, hyper_parameters, range, setup, update, value::Value};
    ///
    /// hyper_parameters! {
    ///     /// Keeps half of the way from the average to each new weight.
    ///     pub struct Halfway {
    ///         /// Which part of the way.
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
        Slot { is_average: true, ..Slot::parameter(name) }
    }

    /// The same slot stored in a dtype or in [`Q8`](crate::Q8).
    ///
    /// Arithmetic is in the compute dtype all the same. No slot can have a dtype other than F16, BF16, F32
    /// and F64, no [second moment](Slot::second_moment) F16, and no [copy of the parameter](Slot::parameter)
    /// Q8.
    pub fn stored_as(self, format: impl Into<SlotFormat>) -> Self {
        Slot { format: Some(format.into()), ..self }
    }

    /// The same slot, which never has a negative number.
    ///
    /// [`Q8`](crate::Q8) has no sign to store then, and twice the range.
    pub fn non_negative(self) -> Self {
        Slot { sign: self.sign.or(Some(Sign::NonNegative)), ..self }
    }

    /// The same slot as a second moment: a mean, sum or maximum of squared gradients.
    ///
    /// The step is divided by its root. It is not [negative](Slot::non_negative). It cannot be stored in F16,
    /// neither by [`stored_as`](Slot::stored_as) nor by [`StoreAs`](crate::StoreAs): numbers below 3e-8 are 0
    /// there. With β₂ = 0.999 so is the second moment of gradients below 5e-3. The step would then be divided
    /// by ε alone, and a hundred times too long or more.
    ///
    /// [`Update::finite_only`](crate::Update::finite_only) keeps out of it what would make it infinite: a
    /// gradient whose square is too large.
    ///
    /// ```
    /// use optimisers::Slot;
    ///
    /// let slots = [Slot::zeros("m"), Slot::zeros("v").second_moment()];
    /// # assert_ne!(slots[1], Slot::zeros("v"));
    /// ```
    pub fn second_moment(self) -> Self {
        Slot { sign: Some(Sign::SecondMoment), ..self }
    }
}

/// What becomes of a part of a state when its parameter is given new weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// A tensor: the new weights.
    Copy,
    /// A tensor with weights to evaluate with: the new weights, too.
    Average,
    /// A tensor, counter or number: 0.
    Zero,
}
