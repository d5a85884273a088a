//! Random projections of the matrices of a parameter to a few rows or columns, and Adam's moments of them.
//!
//! The projection P is in no state, because each step makes P again from a hash of seed, path and interval.
//! The number of dimensions is read from the shape of the moments. This shape also shows whether the state is
//! that of another rule.

use candle_core::{Device, Result as Candle, Tensor};
use rayon::prelude::*;

use super::MatrixForm;
use super::stack::Side;
use super::tensors::{lerp, whole_direction};
use crate::error::Result;
use crate::numbers::normal::gaussian;
use crate::numbers::random_key;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, State, state_of_another_rule};
use crate::rules::adam::adamw::AdamW;
use crate::rules::gradient::weight_decay::with_decay;
use crate::rules::moments::correction;

/// The projection of a state: which side of the matrices is projected, and to how many dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowRank {
    side: Side,
    /// The number of matrices.
    count: usize,
    /// The length of the side that is projected.
    shorter: usize,
    longer: usize,
    rank: usize,
}

impl LowRank {
    /// Projects the shorter side of the matrices of x; `None` if this side is not longer than `rank`.
    fn new(x: Parameter<'_>, form: MatrixForm, rank: usize) -> Option<Self> {
        let [count, rows, columns] = form.dims(x.shape())?;
        let (side, shorter) = if rows < columns {
            (Side::Left, rows)
        } else {
            (Side::Right, columns)
        };
        (rank < shorter).then_some(LowRank {
            side,
            count,
            shorter,
            longer: rows.max(columns),
            rank,
        })
    }

    /// The projection of a state that [`with_moments`] has made for x; `None` if nothing is projected.
    ///
    /// # Errors
    /// If the shape of the first moment is not one that [`with_moments`] makes.
    pub(crate) fn from_state(
        rule: &impl Rule,
        state: &State,
        x: Parameter<'_>,
        form: MatrixForm,
    ) -> Result<Option<Self>> {
        match state.tensors.first().map(|(_, m)| m.shape()) {
            // A projection makes one dimension shorter. A moment in the shape of x therefore means no
            // projection.
            Some(shape) if shape == x.shape() => Ok(None),
            Some(shape @ &[_, rows, columns]) => {
                let projection = LowRank::new(x, form, rows.min(columns));
                match projection.filter(|projection| *shape == projection.shape()) {
                    None => state_of_another_rule(rule),
                    projection => Ok(projection),
                }
            }
            _ => state_of_another_rule(rule),
        }
    }

    /// The shape of a projected gradient and of its moments.
    fn shape(self) -> [usize; 3] {
        let LowRank {
            count, longer, rank, ..
        } = self;
        if self.side == Side::Left {
            [count, rank, longer]
        } else {
            [count, longer, rank]
        }
    }

    /// The projected dimension of a stack.
    pub(crate) fn dimension(self) -> usize {
        self.side.dimension()
    }

    /// Makes `rank` random vectors for each matrix, as the columns of a stack.
    ///
    /// The numbers are independent, from N(0, 1 / length of a vector). Each number is a hash of seed, path,
    /// period (the index of the interval) and the number's index in a tensor \[matrices, rank, length\].
    pub(crate) fn random_vectors(self, seed: u64, path: &str, period: u64, like: &Tensor) -> Candle<Tensor> {
        let key = random_key(seed, period, path);
        let deviation = (self.shorter as f64).sqrt().recip();
        // Each number follows from its index alone, so that the number of threads changes no bit.
        let numbers = (0..self.count * self.rank * self.shorter)
            .into_par_iter()
            .map(|index| deviation * gaussian(key, index));
        let vectors = Tensor::from_vec(
            numbers.collect::<Vec<f64>>(),
            (self.count, self.rank, self.shorter),
            &Device::Cpu,
        )?;
        vectors.to_dtype(like.dtype())?.to_device(like.device())?.t()
    }

    /// The factor from the numbers of [`LowRank::random_vectors`] to numbers from N(0, 1 / rank).
    pub(crate) fn spread(self) -> f64 {
        (self.shorter as f64 / self.rank as f64).sqrt()
    }

    /// P·X or X·Pᵀ, for vectors of [`LowRank::random_vectors`].
    pub(crate) fn project(self, x: &Tensor, vectors: &Tensor) -> Candle<Tensor> {
        self.side.rotate(x, vectors)
    }

    /// Pᵀ·X or X·P
    pub(crate) fn project_back(self, x: &Tensor, vectors: &Tensor) -> Candle<Tensor> {
        self.side.rotate_back(x, vectors)
    }
}

/// The names of the moments of a projected gradient. Rules that keep moments of the gradient itself do not
/// take over moments of these names.
const MOMENTS: [&str; 2] = ["low_rank_m", "low_rank_v"];

/// A state with Adam's moments of the gradient, or of its projection if the gradient is projected.
///
/// The names depend on the number of dimensions alone, because a process without elements of the parameter
/// must give its state the same names.
pub(crate) fn with_moments(x: Parameter<'_>, form: MatrixForm, rank: u64) -> Result<State> {
    let names = if form.dims(x.shape()).is_some() {
        MOMENTS
    } else {
        ["m", "v"]
    };
    let projection = LowRank::new(x, form, rank as usize);
    let shape = projection.map_or(x.shape().to_vec(), |projection| projection.shape().to_vec());
    let [m, v] = names.map(Slot::zeros);
    State::for_slots(x, &[])?
        .with_slot(m, x, shape.clone())?
        .with_slot(v.second_moment(), x, shape)
}

/// Moves both moments by a gradient.
pub(crate) fn move_moments(gradient: &Tensor, [m, v]: [&mut Tensor; 2], beta: (f64, f64)) -> Candle<()> {
    *m = lerp(m, gradient, 1.0 - beta.0)?;
    *v = lerp(v, &gradient.sqr()?, 1.0 - beta.1)?;
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

/// The arguments of a step besides its tensors.
pub(crate) struct ProjectedStep<'a> {
    pub(crate) t: u64,
    pub(crate) path: &'a str,
    /// `None` if nothing is projected.
    pub(crate) projection: Option<LowRank>,
}

/// Plans a step of a rule whose state begins with the moments of [`with_moments`].
///
/// `step` gets the gradient and all state tensors. The weight decay of `adam` follows `step`. A parameter
/// without matrices has the step of `adam` instead.
pub(crate) fn projected_step<'a, const N: usize>(
    rule: &'a impl Rule,
    form: MatrixForm,
    adam: AdamW,
    state: &'a mut State,
    x: Parameter<'_>,
    dx: Gradient<'a>,
    step: impl FnOnce(ProjectedStep<'_>, &Tensor, &mut [Tensor; N]) -> Candle<Tensor> + Send + Sync + 'a,
) -> Result<Flow<'a>> {
    let projection = LowRank::from_state(rule, state, x, form)?;
    let Parts { slots, counters, .. } = state.parts();
    let (dx, t) = dx.next_step(counters)?;
    if form.dims(x.shape()).is_none() {
        return Ok(Flow::Step(dx.step_of(&adam, t, slots)));
    }
    let path = dx.path();
    let with_step = dx.append_function(slots.0, false, move |_, dx, tensors| {
        let Ok(tensors) = tensors.try_into() else {
            return state_of_another_rule(rule);
        };
        Ok(step(ProjectedStep { t, path, projection }, &dx, tensors)?)
    });
    Ok(Flow::Step(with_decay(with_step, adam.eta * adam.lambda)))
}
