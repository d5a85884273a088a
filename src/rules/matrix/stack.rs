//! The sides of matrices that a rule works on.

use candle_core::{Result as Candle, Tensor};

use super::MatrixForm;
use crate::error::Result;
use crate::numbers::largest;
use crate::rule::{Parameter, Slot, State};

/// above / below, and 0 where both are 0; no more than the largest number, as `below` may be denormal.
pub(crate) fn ratio(above: &Tensor, below: &Tensor) -> Candle<Tensor> {
    (above / below.eq(0.0)?.where_cond(&below.ones_like()?, below)?)?.minimum(largest(above.dtype()))
}

/// The two sides of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// What mixes rows.
    Left,
    /// What mixes columns.
    Right,
}

/// The names of a side's two state tensors: the mean of products of the gradient, and the matrix that follows
/// from it.
pub(crate) type SideNames = [(Side, [&'static str; 2]); 2];

impl Side {
    /// The dimension of a stack that it mixes.
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
    pub(crate) fn turned(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.t()?.matmul(x),
            Side::Right => x.matmul(matrix),
        }
    }

    /// A·X or X·Aᵀ
    pub(crate) fn turned_back(self, x: &Tensor, matrix: &Tensor) -> Candle<Tensor> {
        match self {
            Side::Left => matrix.matmul(x),
            Side::Right => x.matmul(&matrix.t()?),
        }
    }

    /// The sides that `state` has matrices for; `None` if these are not as [`with_sides`] makes them for x.
    pub(crate) fn of_state(
        state: &State,
        x: Parameter<'_>,
        form: MatrixForm,
        names: &SideNames,
    ) -> Option<Vec<Side>> {
        let dims = form.dims(x.shape()).unwrap_or_default();
        let mut sides = Vec::new();
        for (side, [name, _]) in names {
            let Some((_, mean)) = state.tensors.iter().find(|(known, _)| known == name) else { continue };
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

/// Adds two tensors of zeros to a state for each side of the matrices of x. They are empty if the side has
/// more than `max_size` elements: names follow from the number of dimensions alone, as ranks without a part
/// of a parameter need them, too.
pub(crate) fn with_sides(
    state: State,
    x: Parameter<'_>,
    form: MatrixForm,
    max_size: u64,
    names: &SideNames,
) -> Result<State> {
    let Some([count, rows, columns]) = form.dims(x.shape()) else { return Ok(state) };
    let mut tensors =
        names.iter().zip([rows, columns]).flat_map(|((_, names), size)| names.map(|name| (name, size)));
    tensors.try_fold(state, |state, (name, size)| {
        let is_small = size as u64 <= max_size;
        let state = state.with_slot(
            Slot::zeros(name),
            x,
            if is_small { (count, size, size) } else { (count, 0, 0) },
        )?;
        // A side mixes rows, and a new matrix of a stack has no root.
        Ok(if is_small { state.restarted_by_new_rows(name) } else { state })
    })
}

/// A side in a step, with its two state tensors.
pub(crate) struct SideStep<'s> {
    pub(crate) side: Side,
    pub(crate) mean: &'s mut Tensor,
    pub(crate) matrix: &'s mut Tensor,
}

impl<'s> SideStep<'s> {
    /// These sides with their tensors, which come in pairs; those of other sides are empty.
    pub(crate) fn all(sides: &[Side], tensors: &'s mut [Tensor]) -> Vec<Self> {
        let step = |(pair, side): (&'s mut [Tensor], Side)| match pair {
            [mean, matrix] if sides.contains(&side) => Some(SideStep { side, mean, matrix }),
            _ => None,
        };
        tensors.chunks_exact_mut(2).zip([Side::Left, Side::Right]).filter_map(step).collect()
    }

    /// Moves the mean of products of the gradient.
    pub(crate) fn collect(
        &mut self,
        gradient: &Tensor,
        moved: impl Fn(&Tensor, &Tensor) -> Candle<Tensor>,
    ) -> Candle<()> {
        *self.mean = moved(self.mean, &self.side.product(gradient)?)?;
        Ok(())
    }
}
