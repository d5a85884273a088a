//! [`View`]: numbers that are lent to be read, and how the elements of a tensor lie in them.
//!
//! [`View::strided`] checks that all elements lie within the numbers. `unsafe` code of the CPU engine relies
//! on that, so there must be no other way to make a strided view.

use super::MemoryRef;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, UNCOUNTED, elem_count, place_of};

/// Numbers that are lent to be read, and how the elements of a tensor lie in them.
///
/// ```
/// use optimisers::View;
///
/// let columns = [1f32, 4.0, 2.0, 5.0, 3.0, 6.0];
/// assert_eq!(View::strided(&columns, &[2, 3], &[1, 2])?.numbers(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// let error = View::strided(&columns, &[2, 3], &[1, 3]).unwrap_err();
/// assert!(error.to_string().contains("8 elements"), "{error}");
/// # Ok::<(), optimisers::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    memory: MemoryRef<'a>,
    /// Dimensions and strides; `None` if the elements are all numbers in row-major order.
    strides: Option<(&'a [usize], &'a [usize])>,
}

impl<'a> View<'a> {
    /// A view of all numbers, in row-major order.
    pub fn new(numbers: impl Into<MemoryRef<'a>>) -> Self {
        View { memory: numbers.into(), strides: None }
    }

    /// Elements that lie `strides` apart in each dimension; the first number is the first element.
    ///
    /// # Errors
    /// If the last element is not within the numbers, if the numbers of strides and dimensions differ, or if
    /// there are more elements than can be counted.
    pub fn strided(
        numbers: impl Into<MemoryRef<'a>>,
        dims: &'a [usize],
        strides: &'a [usize],
    ) -> Result<Self> {
        let memory = numbers.into();
        let (expected, got) = (reach(dims, strides), memory.len());
        if dims.len() != strides.len() {
            return Err(Error::new(ErrorKind::Memory, format!("a view of shape {dims:?} has the strides"))
                .with_got(format_args!("{strides:?}"))
                .with_expected("one for each dimension"));
        }
        if got < expected {
            return Err(Error::new(
                ErrorKind::Memory,
                format!("a view of shape {dims:?} with strides {strides:?} gets"),
            )
            .with_got(format_args!("{got} elements"))
            .with_expected(format_args!("{expected} elements"))
            .with_remedy("pass all numbers from the first element to the last"));
        }
        // With strides of 0, a few numbers can be any number of elements.
        if elem_count(dims) == UNCOUNTED {
            return Err(Error::new(
                ErrorKind::Memory,
                format!("a view of shape {dims:?} has more elements than can be counted"),
            )
            .with_remedy("pass the sizes of the dimensions"));
        }
        if is_in_order(dims, strides) {
            // Cut, because there may be more numbers than elements. The reach of a view in order, or of an
            // empty one, is its number of elements.
            return Ok(View { memory: memory.part(0..expected).unwrap_or(memory), strides: None });
        }
        Ok(View { memory, strides: Some((dims, strides)) })
    }

    /// A copy of the elements in row-major order, as f64, which holds the numbers of every dtype exactly.
    ///
    /// With this function programs without candle read the tensors of this crate, such as
    /// [`Leaf::tensor`](crate::Leaf::tensor): these implement [`Lend`](crate::Lend), which gives a `View`.
    pub fn numbers(self) -> Vec<f64> {
        let all = self.memory.numbers();
        let Some((dims, strides)) = self.strides else { return all };
        (0..self.elements()).map(|element| all[place_of(element, dims, strides)]).collect()
    }

    /// The number of elements.
    pub(crate) fn elements(self) -> usize {
        self.strides.map_or(self.memory.len(), |(dims, _)| elem_count(dims))
    }

    /// The numbers, from the first element on.
    pub(crate) fn memory(self) -> MemoryRef<'a> {
        self.memory
    }

    /// The numbers, if they are the elements in order.
    pub(crate) fn in_order(self) -> Option<MemoryRef<'a>> {
        if self.strides.is_none() { Some(self.memory) } else { None }
    }

    /// Dimensions and strides, unless the elements are in order.
    pub(crate) fn strides(self) -> Option<(&'a [usize], &'a [usize])> {
        self.strides
    }

    /// Address, dtype, number and order of the elements. Equal exactly if two views have the same elements.
    pub(super) fn place(self) -> impl PartialEq {
        (self.memory.address(), self.memory.dtype(), self.elements(), self.strides)
    }

    /// Whether the view has this dtype and as many elements as `dims`. A strided view must have the
    /// dimensions `dims` as well. The error has the dtype of the view and its number of elements.
    pub(super) fn fits(self, dims: &[usize], dtype: DType) -> std::result::Result<(), (DType, usize)> {
        let got = self.elements();
        let is_shaped = self.strides.is_none_or(|(own, _)| own == dims);
        if is_shaped && self.memory.dtype() == dtype && got == elem_count(dims) {
            return Ok(());
        }
        Err((self.memory.dtype(), got))
    }
}

/// Whether the elements follow each other in row-major order. True if there are no elements.
fn is_in_order(dims: &[usize], strides: &[usize]) -> bool {
    let mut next = Some(1usize);
    let follows = |(dim, stride): (&usize, &usize)| {
        // The stride of a dimension of size 1 is never used, so it may be any number.
        let is_next = *dim == 1 || next == Some(*stride);
        next = next.and_then(|next| next.checked_mul(*dim));
        is_next
    };
    dims.contains(&0) || dims.iter().zip(strides).rev().all(follows)
}

/// How many numbers a tensor reaches over, from its first element to its last; `usize::MAX` on overflow.
pub(super) fn reach(dims: &[usize], strides: &[usize]) -> usize {
    // Saturates, because a reach that wraps around would accept a storage that is too short.
    let mut last = 0usize;
    for (dim, stride) in dims.iter().zip(strides) {
        let Some(others) = dim.checked_sub(1) else { return 0 };
        last = last.saturating_add(others.saturating_mul(*stride));
    }
    last.saturating_add(1)
}
