//! Borrowed numbers of any dtype that parameters and gradients have: F16, BF16, F32 and F64.

use std::ops::Range;

use bytemuck::{PodCastError, cast_slice, try_cast_slice, try_cast_slice_mut};
use half::{bf16, f16};

use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::numbers::DType;
use crate::tensors::CpuStorage;

/// Defines [`MemoryRef`] and [`MemoryMut`], with a variant and conversions for each dtype.
macro_rules! memory {
    ($($Variant:ident: $T:ty => $Storage:ident),* $(,)?) => {
        /// Numbers that are borrowed to be read, by their dtype.
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

        /// Numbers that are borrowed to be read and written; made as [`MemoryRef`] is.
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
            /// If the dtype is another, the last number is not whole, or the bytes are not aligned for the
            /// dtype.
            pub fn from_bytes(bytes: &'a [u8], dtype: impl Into<DType>) -> Result<Self> {
                let (length, dtype) = (bytes.len(), dtype.into());
                let memory = match dtype {
                    // Accepted at any address, because an empty slice need not be aligned for its dtype.
                    $(DType::$Variant if length == 0 => Ok(MemoryRef::$Variant(&[])),)*
                    $(DType::$Variant => try_cast_slice(bytes).map(MemoryRef::$Variant),)*
                    _ => return Err(not_lent(dtype)),
                };
                memory.map_err(|reason| not_numbers(length, dtype, reason))
            }

            pub(crate) fn len(&self) -> usize {
                match self { $(MemoryRef::$Variant(values) => values.len(),)* }
            }

            pub(crate) fn dtype(&self) -> DType {
                match self { $(MemoryRef::$Variant(_) => DType::$Variant,)* }
            }

            /// The elements of a range; `None` if it is not within them.
            pub(crate) fn part(self, range: Range<usize>) -> Option<Self> {
                Some(match self { $(MemoryRef::$Variant(values) => MemoryRef::$Variant(values.get(range)?),)* })
            }

            /// The elements of a storage; `None` with a dtype that no parameter has.
            pub(crate) fn of_storage(storage: &'a CpuStorage) -> Option<Self> {
                match storage { $(CpuStorage::$Storage(values) => Some(MemoryRef::$Variant(values)),)* _ => None }
            }

            /// A storage with copies of the elements.
            pub(crate) fn to_storage(self) -> CpuStorage {
                match self { $(MemoryRef::$Variant(values) => CpuStorage::$Storage(values.to_vec()),)* }
            }

            /// The elements as bytes, in the processor's order.
            pub(crate) fn bytes(self) -> &'a [u8] {
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
            /// // a framework's tensor: its bytes and what they are
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
                    _ => return Err(not_lent(dtype)),
                };
                memory.map_err(|reason| not_numbers(length, dtype, reason))
            }

            pub(crate) fn len(&self) -> usize {
                match self { $(MemoryMut::$Variant(values) => values.len(),)* }
            }

            pub(crate) fn dtype(&self) -> DType {
                match self { $(MemoryMut::$Variant(_) => DType::$Variant,)* }
            }

            /// The same memory with a shorter lifetime.
            pub(crate) fn lent(&mut self) -> MemoryMut<'_> {
                match self { $(MemoryMut::$Variant(values) => MemoryMut::$Variant(values),)* }
            }

            /// The same memory to be read.
            pub(crate) fn to_read(&self) -> MemoryRef<'_> {
                match self { $(MemoryMut::$Variant(values) => MemoryRef::$Variant(values),)* }
            }

            /// The elements of a range; `None` if it is not within them.
            pub(crate) fn part(self, range: Range<usize>) -> Option<Self> {
                Some(match self { $(MemoryMut::$Variant(values) => MemoryMut::$Variant(values.get_mut(range)?),)* })
            }

            /// The elements of a storage; `None` with a dtype that no parameter has.
            pub(crate) fn of_storage(storage: &'a mut CpuStorage) -> Option<Self> {
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

fn not_lent(dtype: DType) -> Error {
    Error::new(ErrorKind::Argument, "memory cannot be lent in")
        .with_got(format_args!("{dtype:?}"))
        .with_expected(FLOATS)
}

fn not_numbers(length: usize, dtype: DType, reason: PodCastError) -> Error {
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
