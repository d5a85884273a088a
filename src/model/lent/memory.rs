//! Borrowed numbers of the dtypes that parameters and gradients have (F16, BF16, F32 and F64), and the places
//! of a tensor's elements among these numbers ([`View`]).
//!
//! [`View::strided`] checks that all elements lie within the numbers. `unsafe` code of the CPU engine relies
//! on this check, so there must be no other way to make a strided view.

use std::ops::Range;

use bytemuck::{PodCastError, cast_slice, try_cast_slice, try_cast_slice_mut};
use half::{bf16, f16};

use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::numbers::{DType, UNCOUNTED, elem_count, element_offset};
use crate::tensors::CpuStorage;

/// Defines [`MemoryRef`] and [`MemoryMut`], with a variant and conversions for each dtype.
macro_rules! memory {
    ($($Variant:ident: $T:ty => $Storage:ident),* $(,)?) => {
        /// Numbers that are borrowed for reading, by their dtype.
        ///
        /// Slices, arrays and vectors of `f16`, `bf16`, `f32` and `f64` are converted by `into`.
        #[derive(Clone, Copy, Debug)]
        #[non_exhaustive]
        pub enum MemoryRef<'a> {
            $(
                #[doc = concat!("Numbers of the dtype ", stringify!($Variant), ".")]
                $Variant(&'a [$T]),
            )*
        }

        /// Numbers that are borrowed for reading and writing; made as a [`MemoryRef`] is made.
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum MemoryMut<'a> {
            $(
                #[doc = concat!("Numbers of the dtype ", stringify!($Variant), ".")]
                $Variant(&'a mut [$T]),
            )*
        }

        impl<'a> MemoryRef<'a> {
            /// Bytes as numbers of a dtype that is known at run time only: `F16`, `BF16`, `F32` or `F64`.
            ///
            /// # Errors
            /// If the dtype is none of these four, the last number is not whole, or the bytes are not aligned
            /// for the dtype.
            pub fn from_bytes(bytes: &'a [u8], dtype: impl Into<DType>) -> Result<Self> {
                let (length, dtype) = (bytes.len(), dtype.into());
                let memory = match dtype {
                    // An empty slice is accepted at any address, because it need not be aligned for its
                    // dtype.
                    $(DType::$Variant if length == 0 => Ok(MemoryRef::$Variant(&[])),)*
                    $(DType::$Variant => try_cast_slice(bytes).map(MemoryRef::$Variant),)*
                    _ => return Err(unsupported_dtype(dtype)),
                };
                memory.map_err(|reason| cast_error(length, dtype, reason))
            }

            pub(crate) fn len(&self) -> usize {
                match self { $(MemoryRef::$Variant(values) => values.len(),)* }
            }

            pub(crate) fn dtype(&self) -> DType {
                match self { $(MemoryRef::$Variant(_) => DType::$Variant,)* }
            }

            /// The elements of a range; `None` if the range reaches beyond the elements.
            pub(crate) fn part(self, range: Range<usize>) -> Option<Self> {
                Some(match self { $(MemoryRef::$Variant(values) => MemoryRef::$Variant(values.get(range)?),)* })
            }

            /// The elements of a storage; `None` if no parameter can have its dtype.
            pub(crate) fn from_storage(storage: &'a CpuStorage) -> Option<Self> {
                match storage { $(CpuStorage::$Storage(values) => Some(MemoryRef::$Variant(values)),)* _ => None }
            }

            /// A storage with copies of the elements.
            pub(crate) fn to_storage(self) -> CpuStorage {
                match self { $(MemoryRef::$Variant(values) => CpuStorage::$Storage(values.to_vec()),)* }
            }

            /// The numbers as bytes, in the processor's order.
            pub fn bytes(self) -> &'a [u8] {
                match self { $(MemoryRef::$Variant(values) => cast_slice(values),)* }
            }

            /// The elements, widened to f64.
            pub(super) fn numbers(&self) -> Vec<f64> {
                match self { $(MemoryRef::$Variant(values) => values.iter().map(|value| f64::from(*value)).collect(),)* }
            }

            /// The address of the first element.
            pub(crate) fn address(&self) -> usize {
                match self { $(MemoryRef::$Variant(values) => values.as_ptr().addr(),)* }
            }
        }

        impl<'a> MemoryMut<'a> {
            /// Bytes as numbers of a dtype that is known at run time only, as by [`MemoryRef::from_bytes`].
            ///
            /// ```
            /// use optimisers::{DType, MemoryMut, ParameterSlices};
            ///
            /// # let mut numbers = [0f32; 6];
            /// # let tensor: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers);
            /// // a framework's tensor: its bytes and their dtype
            /// let memory = MemoryMut::from_bytes(tensor, DType::F32)?;
            /// let _parameters = ParameterSlices::new().with("weight", (2, 3), memory)?;
            /// # Ok::<(), optimisers::Error>(())
            /// ```
            ///
            /// # Errors
            /// Those of [`MemoryRef::from_bytes`].
            pub fn from_bytes(bytes: &'a mut [u8], dtype: impl Into<DType>) -> Result<Self> {
                let (length, dtype) = (bytes.len(), dtype.into());
                let memory = match dtype {
                    $(DType::$Variant if length == 0 => Ok(MemoryMut::$Variant(&mut [])),)*
                    $(DType::$Variant => try_cast_slice_mut(bytes).map(MemoryMut::$Variant),)*
                    _ => return Err(unsupported_dtype(dtype)),
                };
                memory.map_err(|reason| cast_error(length, dtype, reason))
            }

            pub(crate) fn len(&self) -> usize {
                match self { $(MemoryMut::$Variant(values) => values.len(),)* }
            }

            pub(crate) fn dtype(&self) -> DType {
                match self { $(MemoryMut::$Variant(_) => DType::$Variant,)* }
            }

            /// The same memory with a shorter lifetime.
            pub(crate) fn reborrow(&mut self) -> MemoryMut<'_> {
                match self { $(MemoryMut::$Variant(values) => MemoryMut::$Variant(values),)* }
            }

            /// The same memory for reading.
            pub(crate) fn as_memory_ref(&self) -> MemoryRef<'_> {
                match self { $(MemoryMut::$Variant(values) => MemoryRef::$Variant(values),)* }
            }

            /// The elements of a range; `None` if the range reaches beyond the elements.
            pub(crate) fn part(self, range: Range<usize>) -> Option<Self> {
                Some(match self { $(MemoryMut::$Variant(values) => MemoryMut::$Variant(values.get_mut(range)?),)* })
            }

            /// The elements of a storage; `None` if no parameter can have its dtype.
            pub(crate) fn from_storage(storage: &'a mut CpuStorage) -> Option<Self> {
                match storage { $(CpuStorage::$Storage(values) => Some(MemoryMut::$Variant(values)),)* _ => None }
            }

            /// Overwrites the elements from `start` on with `next`. Returns false, and writes nothing, if the
            /// dtypes differ or `next` is too long.
            pub(crate) fn set(&mut self, start: usize, next: MemoryRef<'_>) -> bool {
                match (self, next) {
                    $((MemoryMut::$Variant(values), MemoryRef::$Variant(next)) => {
                        let Some(part) = values.get_mut(start..start + next.len()) else { return false };
                        part.copy_from_slice(next);
                        true
                    })*
                    _ => false,
                }
            }
        }

        $(
            impl<'a> From<&'a [$T]> for MemoryRef<'a> {
                fn from(values: &'a [$T]) -> Self {
                    MemoryRef::$Variant(values)
                }
            }

            impl<'a> From<&'a Vec<$T>> for MemoryRef<'a> {
                fn from(values: &'a Vec<$T>) -> Self {
                    MemoryRef::$Variant(values)
                }
            }

            impl<'a, const N: usize> From<&'a [$T; N]> for MemoryRef<'a> {
                fn from(values: &'a [$T; N]) -> Self {
                    MemoryRef::$Variant(values)
                }
            }

            impl<'a> From<&'a mut [$T]> for MemoryMut<'a> {
                fn from(values: &'a mut [$T]) -> Self {
                    MemoryMut::$Variant(values)
                }
            }

            impl<'a> From<&'a mut Vec<$T>> for MemoryMut<'a> {
                fn from(values: &'a mut Vec<$T>) -> Self {
                    MemoryMut::$Variant(values)
                }
            }

            impl<'a, const N: usize> From<&'a mut [$T; N]> for MemoryMut<'a> {
                fn from(values: &'a mut [$T; N]) -> Self {
                    MemoryMut::$Variant(values)
                }
            }
        )*
    };
}

memory! { F16: f16 => F16, BF16: bf16 => BF16, F32: f32 => F32, F64: f64 => F64 }

fn unsupported_dtype(dtype: DType) -> Error {
    Error::new(ErrorKind::Argument, "memory cannot be lent in")
        .with_got(format_args!("{dtype:?}"))
        .with_expected(FLOATS)
}

fn cast_error(length: usize, dtype: DType, reason: PodCastError) -> Error {
    let size = dtype.size_in_bytes();
    match reason {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => Error::new(
            ErrorKind::Memory,
            format!("bytes of {dtype:?} do not begin at a multiple of {size} in memory"),
        )
        .with_remedy("copy them to a vector of the dtype"),
        _ => Error::new(ErrorKind::Memory, "the number of bytes is")
            .with_got(length)
            .with_expected(format_args!("a multiple of {size}, the size of {dtype:?}"))
            .with_remedy("pass whole numbers"),
    }
}

/// Numbers that are lent for reading, and the places of a tensor's elements among them.
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
        View {
            memory: numbers.into(),
            strides: None,
        }
    }

    /// Elements that lie `strides` apart in each dimension. The first number is the first element.
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
            return Err(Error::new(
                ErrorKind::Memory,
                format!("a view of shape {dims:?} has the strides"),
            )
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
        // With strides of 0, a few numbers can make any number of elements.
        if elem_count(dims) == UNCOUNTED {
            return Err(Error::new(
                ErrorKind::Memory,
                format!("a view of shape {dims:?} has more elements than can be counted"),
            )
            .with_remedy("pass the sizes of the dimensions"));
        }
        if is_in_order(dims, strides) {
            // The memory is cut, because there may be more numbers than elements. The reach of a view that is
            // in order or empty is its number of elements.
            return Ok(View {
                memory: memory.part(0..expected).unwrap_or(memory),
                strides: None,
            });
        }
        Ok(View {
            memory,
            strides: Some((dims, strides)),
        })
    }

    /// A copy of the elements in row-major order, as f64, which holds the numbers of every dtype exactly.
    ///
    /// If the elements lie in row-major order, [`in_order`](View::in_order) lends them without a copy.
    pub fn numbers(self) -> Vec<f64> {
        let numbers = self.memory.numbers();
        let Some((dims, strides)) = self.strides else {
            return numbers;
        };
        (0..self.elements())
            .map(|element| numbers[element_offset(element, dims, strides)])
            .collect()
    }

    /// The number of elements.
    pub(crate) fn elements(self) -> usize {
        self.strides
            .map_or(self.memory.len(), |(dims, _)| elem_count(dims))
    }

    /// The numbers, from the first element on.
    pub(crate) fn memory(self) -> MemoryRef<'a> {
        self.memory
    }

    /// The numbers as they lie in memory, if they are the elements in row-major order.
    ///
    /// All tensors of a state have their elements in that order.
    ///
    /// ```
    /// use optimisers::{MemoryRef, View};
    ///
    /// let numbers = [1f32, 2.0];
    /// let view = View::new(&numbers);
    /// assert!(matches!(view.in_order(), Some(MemoryRef::F32([1.0, 2.0]))));
    /// assert_eq!(view.in_order().map(|numbers| numbers.bytes().len()), Some(8));
    /// ```
    pub fn in_order(self) -> Option<MemoryRef<'a>> {
        if self.strides.is_none() {
            Some(self.memory)
        } else {
            None
        }
    }

    /// Dimensions and strides, unless the elements are in order.
    pub(crate) fn strides(self) -> Option<(&'a [usize], &'a [usize])> {
        self.strides
    }

    /// Address, dtype, number and order of the elements. Equal if and only if two views have the same elements.
    pub(super) fn address_and_order(self) -> impl PartialEq {
        (
            self.memory.address(),
            self.memory.dtype(),
            self.elements(),
            self.strides,
        )
    }

    /// Refuses another dtype or number of elements than that of a tensor with the dimensions `dims`. A
    /// strided view must also have these dimensions. The error has the dtype and the number of elements of
    /// the view.
    pub(super) fn check_fit(self, dims: &[usize], dtype: DType) -> std::result::Result<(), (DType, usize)> {
        let got = self.elements();
        let has_shape = self.strides.is_none_or(|(view_dims, _)| view_dims == dims);
        if has_shape && self.memory.dtype() == dtype && got == elem_count(dims) {
            return Ok(());
        }
        Err((self.memory.dtype(), got))
    }
}

/// Whether the elements follow each other in row-major order. True if there are no elements.
fn is_in_order(dims: &[usize], strides: &[usize]) -> bool {
    let mut expected = Some(1usize);
    let is_as_expected = |(dim, stride): (&usize, &usize)| {
        // The stride of a dimension of size 1 is never used, so it may be any number.
        let is_right = *dim == 1 || expected == Some(*stride);
        expected = expected.and_then(|stride| stride.checked_mul(*dim));
        is_right
    };
    dims.contains(&0) || dims.iter().zip(strides).rev().all(is_as_expected)
}

/// The count of numbers from a tensor's first element to its last; `usize::MAX` on overflow.
pub(super) fn reach(dims: &[usize], strides: &[usize]) -> usize {
    // The sum saturates, because a reach that wraps around would accept a storage that is too short.
    let mut last = 0usize;
    for (dim, stride) in dims.iter().zip(strides) {
        let Some(last_index) = dim.checked_sub(1) else {
            return 0;
        };
        last = last.saturating_add(last_index.saturating_mul(*stride));
    }
    last.saturating_add(1)
}
