//! The shape of a tensor, and the arithmetic of shapes and strides.

use std::fmt;

/// The sizes of all dimensions of a tensor.
///
/// A function that takes a shape accepts any type that converts to a shape: a number for a vector, a tuple,
/// an array, a slice, a `Vec`, or candle's shape.
///
/// ```
/// use optimisers::Shape;
///
/// let shapes = [Shape::from((2, 3)), [2, 3].into(), vec![2, 3].into(), candle_core::Shape::from((2, 3)).into()];
/// assert!(shapes.iter().all(|shape| shape.dims() == [2, 3]));
/// assert!(Shape::from(()).dims().is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// The size of each dimension.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// The size of each dimension, as a vector.
    pub(crate) fn into_dims(self) -> Vec<usize> {
        self.0
    }

    /// How many elements a tensor of this shape has.
    pub(crate) fn elem_count(&self) -> usize {
        elem_count(&self.0)
    }
}

/// How many elements a tensor with these dimensions has. [`UNCOUNTED`] if this number overflows, or if the
/// tensor has no elements but a stride would overflow, because other code computes strides without a check.
pub(crate) fn elem_count(dims: &[usize]) -> usize {
    let nonzero_product = dims
        .iter()
        .fold(1usize, |count, dim| count.saturating_mul((*dim).max(1)));
    if nonzero_product < UNCOUNTED && dims.contains(&0) {
        0
    } else {
        nonzero_product
    }
}

/// The count of a shape with too many elements. No memory has that many elements, so length checks refuse the
/// shape.
pub(crate) const UNCOUNTED: usize = usize::MAX;

/// The offset in memory, from the first element, of the element with this index in row-major order.
pub(crate) fn element_offset(element: usize, dims: &[usize], strides: &[usize]) -> usize {
    // The last dimension first, because its index changes fastest.
    let mut rest = element;
    let dim_offset = |(dim, stride): (&usize, &usize)| {
        let offset = rest % dim * stride;
        rest /= dim;
        offset
    };
    dims.iter().zip(strides).rev().map(dim_offset).sum()
}

impl AsRef<[usize]> for Shape {
    fn as_ref(&self) -> &[usize] {
        self.dims()
    }
}

/// Prints only the dimensions: `[2, 3]`.
impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Implements `From`. A row has a pattern, its type, and the dimensions as an array, a slice or a vector.
macro_rules! from {
    ($($pattern:pat, $T:ty => $dims:expr;)*) => {
        $(
            impl From<$T> for Shape {
                fn from($pattern: $T) -> Self {
                    Shape($dims.into())
                }
            }
        )*
    };
}

from! {
    (), () => [];
    length, usize => [length];
    (a,), (usize,) => [a];
    (a, b), (usize, usize) => [a, b];
    (a, b, c), (usize, usize, usize) => [a, b, c];
    (a, b, c, d), (usize, usize, usize, usize) => [a, b, c, d];
    (a, b, c, d, e), (usize, usize, usize, usize, usize) => [a, b, c, d, e];
    (a, b, c, d, e, f), (usize, usize, usize, usize, usize, usize) => [a, b, c, d, e, f];
    dims, Vec<usize> => dims;
    dims, &Vec<usize> => &dims[..];
    dims, &[usize] => dims;
    shape, &Shape => &shape.0[..];
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.into())
    }
}

impl<const N: usize> From<&[usize; N]> for Shape {
    fn from(dims: &[usize; N]) -> Self {
        Shape(dims.into())
    }
}
