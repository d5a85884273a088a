//! The sides of matrices that a rule works on.

use candle_core::{Result as Candle, Tensor};

use crate::error::Result;
use crate::matrices::MatrixForm;
use crate::rule::{Slot, State};

/// above / below, and 0 where both are 0.
pub(super) fn ratio(above: &Tensor, below: &Tensor) -> Candle<Tensor> {
    above / below.eq(0.0)?.where_cond(&below.ones_like()?, below)?
}

/// The two sides of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// What mixes rows.
    Left,
    /// What mixes columns.
    Right,
}

/// The names of a side's two state tensors: the mean of products of the gradient, and the matrix that follows from it.
pub(super) type SideNames = [(Side, [&'static str; 2]); 2];

impl Side {
    /// The dimension of a stack that it mixes.
    pub(super) fn dimension(self) -> usize {
        match self {
            Side::Left => 1,
            Side::Right => 2,
        }
    }

    /// G·Gᵀ or Gᵀ·G
    pub(super) fn product(self, gradient: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => gradient.matmul(&gradient.t()?),
            Side::Right => gradient.t()?.matmul(gradient),
        }
    }

    /// Aᵀ·X or X·A
    pub(super) fn turned(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.t()?.matmul(x),
            Side::Right => x.matmul(matrix),
        }
    }

    /// A·X or X·Aᵀ
    pub(super) fn turned_back(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.matmul(x),
            Side::Right => x.matmul(&matrix.t()?),
        }
    }

    /// Which of them `state` has tensors for, if these are as [`with_sides`] makes them for x.
    pub(super) fn of_state(state: &State, x: &Tensor, form: MatrixForm, names: &SideNames) -> Option<Vec<Side>> {
        let dims = form.dims(x).unwrap_or_default();
        let of = |(side, [name, _]): &(Side, [&'static str; 2])| {
            let (_, mean) = state.tensors.iter().find(|(known, _)| known == name)?;
            let size = dims[side.dimension()];
            Some((*mean.shape().dims() == [dims[0], size, size]).then_some(*side))
        };
        names.iter().filter_map(of).collect()
    }
}

/// Adds two tensors of zeros to a state for each side of the matrices of x that has no more than `max_size` elements.
pub(super) fn with_sides(state: State, x: &Tensor, form: MatrixForm, max_size: u64, names: &SideNames) -> Result<State> {
    let Some([count, rows, columns]) = form.dims(x) else { return Ok(state) };
    let sides = names.iter().zip([rows, columns]).filter(|(_, size)| (1..=max_size).contains(&(*size as u64)));
    let state = sides
        .flat_map(|((_, names), size)| names.map(|name| (name, size)))
        .try_fold(state, |state, (name, size)| state.with_slot(Slot::zeros(name), x, (count, size, size)))?;
    // The rows of one matrix are mixed here; those of a stack are matrices.
    let mixed = names.iter().flat_map(|(_, names)| *names).filter(|_| count == 1);
    let state = mixed.fold(state, State::restarted_by_new_rows);
    // Bases belong to means of both sides or of one: a state with other sides starts anew.
    Ok(State { is_one: true, ..state })
}

/// A side in a step, with its two state tensors.
pub(super) struct SideStep<'s> {
    pub(super) side: Side,
    pub(super) mean: &'s mut Tensor,
    pub(super) matrix: &'s mut Tensor,
}

impl<'s> SideStep<'s> {
    /// These sides with their tensors, which come in pairs.
    pub(super) fn all(sides: &[Side], tensors: &'s mut [Tensor]) -> Vec<Self> {
        let step = |(pair, side): (&'s mut [Tensor], &Side)| match pair {
            [mean, matrix] => Some(SideStep { side: *side, mean, matrix }),
            _ => None,
        };
        tensors.chunks_exact_mut(2).zip(sides).filter_map(step).collect()
    }

    /// Moves the mean of products of the gradient.
    pub(super) fn collect(&mut self, gradient: &Tensor, moved: impl Fn(&Tensor, &Tensor) -> Candle<Tensor>) -> Candle<()> {
        *self.mean = moved(self.mean, &self.side.product(gradient)?)?;
        Ok(())
    }
}
