//! The two sides of a rule's matrices: rows (left) and columns (right). For each side the state has two
//! square tensors.
//!
//! The tensors of the left side mix rows, those of the right side mix columns. The first tensor of a side is
//! the mean of G·Gᵀ (left) or Gᵀ·G (right) over gradients G. The second tensor is computed from this mean,
//! such as its eigenvectors or a root. A parameter is a stack of `count` matrices, so a tensor of a side of
//! length `size` has the shape `[count, size, size]`.
//!
//! A side that is too long for its rule has no matrices. The tensors of such a side stay in the state with
//! the shape `[count, 0, 0]`, so that the names of tensors depend only on the number of dimensions. Ranks
//! without a part of the parameter also need these names.

use candle_core::{Result as Candle, Tensor};

use super::MatrixForm;
use crate::error::Result;
use crate::numbers::largest_number;
use crate::rule::{Parameter, Slot, State, entry};

/// numerator / denominator, at most the largest number of the dtype, because a denormal denominator would
/// give infinity. Where the denominator is 0, the result is the numerator, because the quotient would be
/// infinite or NaN.
pub(crate) fn ratio(numerator: &Tensor, denominator: &Tensor) -> Candle<Tensor> {
    (numerator
        / denominator
            .eq(0.0)?
            .where_cond(&denominator.ones_like()?, denominator)?)?
    .minimum(largest_number(numerator.dtype()))
}

/// The two sides of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Matrices of this side mix rows.
    Left,
    /// Matrices of this side mix columns.
    Right,
}

/// The names of the two state tensors of each side: the mean of products, and the matrix computed from it.
pub(crate) type SideNames = [(Side, [&'static str; 2]); 2];

impl Side {
    /// The dimension of a stack that the side's matrices mix.
    pub(crate) fn dimension(self) -> usize {
        match self {
            Side::Left => 1,
            Side::Right => 2,
        }
    }

    /// G·Gᵀ or Gᵀ·G
    pub(crate) fn product(self, gradient: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => gradient.matmul(&gradient.t()?),
            Side::Right => gradient.t()?.matmul(gradient),
        }
    }

    /// Aᵀ·X or X·A
    pub(crate) fn rotate(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.t()?.matmul(x),
            Side::Right => x.matmul(matrix),
        }
    }

    /// A·X or X·Aᵀ
    pub(crate) fn rotate_back(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.matmul(x),
            Side::Right => x.matmul(&matrix.t()?),
        }
    }

    /// The sides for which `state` has matrices. `None` if the matrices do not have the shapes that
    /// [`with_sides`] makes for x.
    pub(crate) fn from_state(
        state: &State,
        x: Parameter<'_>,
        form: MatrixForm,
        names: &SideNames,
    ) -> Option<Vec<Side>> {
        // The shapes decide, because fields such as `max_size` may have changed since the state was made.
        let dims = form.dims(x.shape()).unwrap_or_default();
        let mut sides = Vec::new();
        for (side, [name, _]) in names {
            let Some(mean) = entry(&state.tensors, name) else {
                continue;
            };
            let size = dims[side.dimension()];
            match mean.shape() {
                [_, 0, 0] => {}
                shape if *shape == [dims[0], size, size] => sides.push(*side),
                _ => return None,
            }
        }
        Some(sides)
    }
}

/// Adds two tensors of zeros to a state for each side of the matrices of x. If a side is longer than
/// `max_size`, its tensors are empty.
pub(crate) fn with_sides(
    state: State,
    x: Parameter<'_>,
    form: MatrixForm,
    max_size: u64,
    names: &SideNames,
) -> Result<State> {
    let Some([count, rows, columns]) = form.dims(x.shape()) else {
        return Ok(state);
    };
    let mut tensors = names
        .iter()
        .zip([rows, columns])
        .flat_map(|((_, names), size)| names.map(|name| (name, size)));
    tensors.try_fold(state, |state, (name, size)| {
        let is_small = size as u64 <= max_size;
        // Eigenvectors and roots follow from small differences between numbers of the means.
        let state = state.with_slot(
            Slot::zeros(name).at_least_f32(),
            x,
            if is_small {
                (count, size, size)
            } else {
                (count, 0, 0)
            },
        )?;
        // If the parameter gets new rows, these tensors restart, because the tensors of a matrix mix all its
        // rows. In a stack a row is a whole matrix, and a new matrix has no root yet.
        Ok(if is_small {
            state.restarted_by_new_rows(name)
        } else {
            state
        })
    })
}

/// One side with its two state tensors, in a step.
pub(crate) struct SideStep<'s> {
    pub(crate) side: Side,
    pub(crate) mean: &'s mut Tensor,
    /// The tensor computed from the mean: eigenvectors or a root.
    pub(crate) transform: &'s mut Tensor,
}

impl<'s> SideStep<'s> {
    /// The sides of a step with their tensors. `tensors` has a pair for the left side, then one for the
    /// right.
    pub(crate) fn all(sides: &[Side], tensors: &'s mut [Tensor]) -> Vec<Self> {
        let side_step = |(pair, side): (&'s mut [Tensor], Side)| match pair {
            [mean, transform] if sides.contains(&side) => Some(SideStep {
                side,
                mean,
                transform,
            }),
            _ => None,
        };
        tensors
            .chunks_exact_mut(2)
            .zip([Side::Left, Side::Right])
            .filter_map(side_step)
            .collect()
    }

    /// Updates the mean of products with the product of this gradient. `next_mean` computes the new mean from
    /// the old mean and the product.
    pub(crate) fn update_mean(
        &mut self,
        gradient: &Tensor,
        next_mean: impl Fn(&Tensor, &Tensor) -> Candle<Tensor>,
    ) -> Candle<()> {
        *self.mean = next_mean(self.mean, &self.side.product(gradient)?)?;
        Ok(())
    }
}
