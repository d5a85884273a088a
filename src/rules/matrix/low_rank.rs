//! Random projections of the matrices of a parameter to a few rows or columns.

use candle_core::{Device, Result as Candle, Tensor};
use rayon::prelude::*;

use super::MatrixForm;
use super::stack::Side;
use super::tensors::{toward, whole_direction};
use crate::error::Result;
use crate::numbers::normal::gaussian;
use crate::numbers::random_key;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, Slots, State, state_of_another_rule};
use crate::rules::adam::adamw::AdamW;
use crate::rules::gradient::weight_decay::WeightDecay;
use crate::rules::moments::correction;

/// Which side of its matrices a state has projected, and to how many dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowRank {
    side: Side,
    count: usize,
    /// The length of the side that stays.
    other: usize,
    size: usize,
    rank: usize,
}

impl LowRank {
    /// The shorter side of the matrices of x, if it is longer than `rank`.
    fn new(x: Parameter<'_>, form: MatrixForm, rank: usize) -> Option<Self> {
        let [count, rows, columns] = form.dims(x.shape())?;
        let (side, size) = if rows < columns { (Side::Left, rows) } else { (Side::Right, columns) };
        (rank < size).then_some(LowRank { side, count, other: rows.max(columns), size, rank })
    }

    /// The projection of the state that [`with_moments`] has made for x; `None` if nothing is projected.
    pub(crate) fn of_state(
        rule: &impl Rule,
        state: &State,
        x: Parameter<'_>,
        form: MatrixForm,
    ) -> Result<Option<Self>> {
        match state.tensors.first().map(|(_, m)| m.shape()) {
            Some(shape) if shape == x.shape() => Ok(None),
            Some(shape) if let [_, rows, columns] = *shape => {
                let found = LowRank::new(x, form, rows.min(columns)).filter(|found| *shape == found.shape());
                found.map_or_else(|| state_of_another_rule(rule), |found| Ok(Some(found)))
            }
            _ => state_of_another_rule(rule),
        }
    }

    /// The shape of what is projected.
    fn shape(self) -> [usize; 3] {
        let LowRank { count, other, rank, .. } = self;
        if self.side == Side::Left { [count, rank, other] } else { [count, other, rank] }
    }

    /// The dimension of a stack that is projected.
    pub(crate) fn dimension(self) -> usize {
        self.side.dimension()
    }

    /// For each matrix of a stack `rank` vectors of the projected side's length, as columns of independent
    /// numbers from N(0, 1 / length).
    ///
    /// They are a hash of seed, path and period (the index of the interval), and of their places in a tensor
    /// \[matrices, rank, length\].
    pub(crate) fn random(self, seed: u64, path: &str, period: u64, like: &Tensor) -> Candle<Tensor> {
        let key = random_key(seed, period, path);
        let deviation = (self.size as f64).sqrt().recip();
        let numbers = (0..self.count * self.rank * self.size)
            .into_par_iter()
            .map(|place| deviation * gaussian(key, place));
        let vectors = Tensor::from_vec(
            numbers.collect::<Vec<f64>>(),
            (self.count, self.rank, self.size),
            &Device::Cpu,
        )?;
        vectors.to_dtype(like.dtype())?.to_device(like.device())?.t()
    }

    /// By how much numbers from N(0, 1 / rank) are larger than those of [`LowRank::random`].
    pub(crate) fn spread(self) -> f64 {
        (self.size as f64 / self.rank as f64).sqrt()
    }

    /// P·X or X·Pᵀ, for vectors of [`LowRank::random`].
    pub(crate) fn projected(self, x: &Tensor, vectors: &Tensor) -> Candle<Tensor> {
        self.side.turned(x, vectors)
    }

    /// Pᵀ·X or X·P
    pub(crate) fn projected_back(self, x: &Tensor, vectors: &Tensor) -> Candle<Tensor> {
        self.side.turned_back(x, vectors)
    }
}

/// The names of the moments of what is projected: other quantities than those of the gradient.
const MOMENTS: [&str; 2] = ["low_rank_m", "low_rank_v"];

/// Adam's moments of x, or of the projection of its matrices to `rank` dimensions where these have more.
///
/// The names follow from the number of dimensions alone: ranks without a part of a parameter need them, too.
pub(crate) fn with_moments(x: Parameter<'_>, form: MatrixForm, rank: u64) -> Result<State> {
    let names = if form.dims(x.shape()).is_some() { MOMENTS } else { ["m", "v"] };
    let low = LowRank::new(x, form, rank as usize);
    let shape = low.map_or(x.shape().to_vec(), |low| low.shape().to_vec());
    let [m, v] = names.map(Slot::zeros);
    State::for_slots(x, &[])?.with_slot(m, x, shape.clone())?.with_slot(v.second_moment(), x, shape)
}

/// Moves both moments.
pub(crate) fn move_moments(gradient: &Tensor, [m, v]: [&mut Tensor; 2], beta: (f64, f64)) -> Candle<()> {
    *m = toward(m, gradient, 1.0 - beta.0)?;
    *v = toward(v, &gradient.sqr()?, 1.0 - beta.1)?;
    Ok(())
}

/// Moves both moments, and returns the direction of Adam's step `t`.
pub(crate) fn direction(
    gradient: &Tensor,
    [m, v]: [&mut Tensor; 2],
    beta: (f64, f64),
    epsilon: f64,
    t: u64,
) -> Candle<Tensor> {
    move_moments(gradient, [&mut *m, &mut *v], beta)?;
    whole_direction((m, correction(beta.0, t)), (v, correction(beta.1, t)), epsilon)
}

/// What goes into a step beside the tensors.
pub(crate) struct ProjectedStep<'a> {
    pub(crate) t: u64,
    pub(crate) path: &'a str,
    pub(crate) low: Option<LowRank>,
}

/// A step of a rule whose state [`with_moments`] has begun: a function of the gradient and all its tensors,
/// with the decay of `adam`. A parameter without matrices has the whole step of `adam`.
pub(crate) fn projected_step<'a, const N: usize>(
    rule: &'a impl Rule,
    form: MatrixForm,
    adam: AdamW,
    state: &'a mut State,
    x: Parameter<'_>,
    dx: Gradient<'a>,
    step: impl FnOnce(ProjectedStep<'_>, &Tensor, &mut [Tensor; N]) -> Candle<Tensor> + Send + Sync + 'a,
) -> Result<Flow<'a>> {
    let low = LowRank::of_state(rule, state, x, form)?;
    let Parts { slots, counters, .. } = state.parts();
    let (dx, t) = dx.next_step(counters)?;
    if form.dims(x.shape()).is_none() {
        return Ok(Flow::Step(dx.step_of(&adam, t, slots)));
    }
    let path = dx.path();
    let stepped = dx.through(slots.0, false, move |_, dx, tensors| {
        let Ok(tensors) = tensors.try_into() else { return state_of_another_rule(rule) };
        Ok(step(ProjectedStep { t, path, low }, &dx, tensors)?)
    });
    Ok(Flow::Step(stepped.step_of(&WeightDecay::new(adam.eta * adam.lambda), t, Slots::none())))
}
