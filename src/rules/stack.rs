//! A parameter as a stack of matrices, and the sides of these that a rule works on.

use candle_core::{Result as Candle, Tensor};

use super::matrix::row_norms;
use crate::error::Result;
use crate::rule::{Slot, State};

/// How many matrices there are in a parameter of two dimensions or more, of how many rows and columns: the last two dimensions, for each index into the others.
pub(super) fn dims(x: &Tensor) -> Option<[usize; 3]> {
    let [outer @ .., rows, columns] = x.dims() else { return None };
    Some([outer.iter().product(), *rows, *columns])
}

/// The matrices of a parameter that has [`dims`], as a tensor of three dimensions.
pub(super) fn stacked(x: &Tensor) -> Candle<Tensor> {
    let Some([count, rows, columns]) = dims(x) else { candle_core::bail!("no matrices in {:?}", x.shape()) };
    x.reshape((count, rows, columns))
}

/// The 2-norm of each matrix of a stack, one number each in three dimensions.
pub(super) fn norms(stack: &Tensor) -> Candle<Tensor> {
    row_norms(&stack.flatten_from(1)?)?.unsqueeze(2)
}

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

    /// Which of them `state` has tensors for.
    pub(super) fn of_state(state: &State, names: &SideNames) -> Vec<Side> {
        let has = |name: &str| state.tensors.iter().any(|(known, _)| *known == name);
        names.iter().filter(|(_, names)| has(names[0])).map(|(side, _)| *side).collect()
    }
}

/// Adds two tensors of zeros to a state for each side of the matrices of x that has no more than `max_size` elements.
pub(super) fn with_sides(state: State, x: &Tensor, max_size: u64, names: &SideNames) -> Result<State> {
    let Some([count, rows, columns]) = dims(x) else { return Ok(state) };
    let sides = names.iter().zip([rows, columns]).filter(|(_, size)| (1..=max_size).contains(&(*size as u64)));
    let state = sides
        .flat_map(|((_, names), size)| names.map(|name| (name, size)))
        .try_fold(state, |state, (name, size)| state.with_slot(Slot::zeros(name), x, (count, size, size)))?;
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
