//! A tensor over memory that somebody else owns. `unsafe`: candle's storage on the CPU is a vector, which is made of borrowed memory here.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytemuck::{PodCastError, try_cast_slice, try_cast_slice_mut};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Shape, Storage, Tensor};
use half::{bf16, f16};

use crate::error::{Result, SliceError};

/// Makes the two kinds of borrowed memory.
macro_rules! memory {
    ($($Variant:ident: $T:ty => $Storage:ident),* $(,)?) => {
        /// Numbers that are borrowed to be read: slices, arrays and vectors of `f16`, `bf16`, `f32` and `f64` become these.
        #[derive(Clone, Copy, Debug)]
        pub struct MemoryRef<'a>(Read<'a>);

        #[derive(Clone, Copy, Debug)]
        enum Read<'a> {
            $($Variant(&'a [$T]),)*
        }

        /// Numbers that are borrowed to be read and written, as [`MemoryRef`].
        #[derive(Debug)]
        pub struct MemoryMut<'a>(Written<'a>);

        #[derive(Debug)]
        enum Written<'a> {
            $($Variant(&'a mut [$T]),)*
        }

        impl<'a> MemoryRef<'a> {
            /// Bytes that are numbers of this dtype, for those who know it at run time only: `F16`, `BF16`, `F32` or `F64`.
            ///
            /// # Errors
            /// With another dtype, a part of a number, or bytes that do not begin where such a number may.
            pub fn from_bytes(bytes: &'a [u8], dtype: DType) -> Result<Self> {
                let length = bytes.len();
                let memory = match dtype {
                    // None at all may begin anywhere.
                    $(DType::$Variant if length == 0 => Ok(Read::$Variant(&[])),)*
                    $(DType::$Variant => try_cast_slice(bytes).map(Read::$Variant),)*
                    _ => return Err(SliceError::Dtype { dtype }.into()),
                };
                memory.map(MemoryRef).map_err(|reason| not_numbers(length, dtype, reason).into())
            }

            pub(crate) fn len(&self) -> usize {
                match self.0 { $(Read::$Variant(values) => values.len(),)* }
            }

            /// Where it lies, how long it is and of what: two have the same exactly if they are one slice.
            pub(crate) fn place(&self) -> (usize, usize, DType) {
                match self.0 { $(Read::$Variant(values) => (values.as_ptr().addr(), values.len(), DType::$Variant),)* }
            }

            /// A storage that says to own the memory.
            ///
            /// # Safety
            /// As [`owned`]; and nothing may write to it.
            unsafe fn storage(self) -> CpuStorage {
                // SAFETY: promised by the caller, as for `owned`.
                match self.0 { $(Read::$Variant(values) => CpuStorage::$Storage(unsafe { owned(values.as_ptr().cast_mut(), values.len()) }),)* }
            }
        }

        impl<'a> MemoryMut<'a> {
            /// Bytes that are numbers of this dtype, as [`MemoryRef::from_bytes`].
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
            /// As there.
            pub fn from_bytes(bytes: &'a mut [u8], dtype: DType) -> Result<Self> {
                let length = bytes.len();
                let memory = match dtype {
                    $(DType::$Variant if length == 0 => Ok(Written::$Variant(&mut [])),)*
                    $(DType::$Variant => try_cast_slice_mut(bytes).map(Written::$Variant),)*
                    _ => return Err(SliceError::Dtype { dtype }.into()),
                };
                memory.map(MemoryMut).map_err(|reason| not_numbers(length, dtype, reason).into())
            }

            pub(crate) fn len(&self) -> usize {
                match &self.0 { $(Written::$Variant(values) => values.len(),)* }
            }

            /// A storage that says to own the memory.
            ///
            /// # Safety
            /// As [`owned`].
            unsafe fn storage(self) -> CpuStorage {
                // SAFETY: promised by the caller, as for `owned`.
                match self.0 { $(Written::$Variant(values) => CpuStorage::$Storage(unsafe { owned(values.as_mut_ptr(), values.len()) }),)* }
            }
        }

        $(
            impl<'a> From<&'a [$T]> for MemoryRef<'a> {
                fn from(values: &'a [$T]) -> Self {
                    MemoryRef(Read::$Variant(values))
                }
            }

            impl<'a> From<&'a Vec<$T>> for MemoryRef<'a> {
                fn from(values: &'a Vec<$T>) -> Self {
                    MemoryRef(Read::$Variant(values))
                }
            }

            impl<'a, const N: usize> From<&'a [$T; N]> for MemoryRef<'a> {
                fn from(values: &'a [$T; N]) -> Self {
                    MemoryRef(Read::$Variant(values))
                }
            }

            impl<'a> From<&'a mut [$T]> for MemoryMut<'a> {
                fn from(values: &'a mut [$T]) -> Self {
                    MemoryMut(Written::$Variant(values))
                }
            }

            impl<'a> From<&'a mut Vec<$T>> for MemoryMut<'a> {
                fn from(values: &'a mut Vec<$T>) -> Self {
                    MemoryMut(Written::$Variant(values))
                }
            }

            impl<'a, const N: usize> From<&'a mut [$T; N]> for MemoryMut<'a> {
                fn from(values: &'a mut [$T; N]) -> Self {
                    MemoryMut(Written::$Variant(values))
                }
            }
        )*
    };
}

memory! { F16: f16 => F16, BF16: bf16 => BF16, F32: f32 => F32, F64: f64 => F64 }

fn not_numbers(length: usize, dtype: DType, reason: PodCastError) -> SliceError {
    match reason {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => SliceError::Alignment { dtype },
        _ => SliceError::Bytes { dtype, got: length },
    }
}

/// A vector of memory that it does not own.
///
/// # Safety
/// The memory has to be borrowed for as long as the vector lives, which must never be dropped, grown or given to code that might do so.
unsafe fn owned<T>(start: *mut T, length: usize) -> Vec<T> {
    // SAFETY: pointer and length are those of a slice. What the vector could do with an allocation of its own, namely free or move it, is never asked of it.
    unsafe { Vec::from_raw_parts(start, length, length) }
}

/// A tensor over memory that is borrowed for `'a`.
///
/// It must not leave this crate: safe code could keep it beyond `'a`, write to what was lent to be read, or take
/// the vector out of its storage. Rules see its shape and dtype ([`Parameter`](crate::Parameter)), and their
/// functions get copies.
#[derive(Debug)]
pub(crate) struct LentTensor<'a> {
    tensor: Tensor,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> LentTensor<'a> {
    /// A tensor to be read and written, of a shape with as many elements.
    pub(crate) fn to_write(values: MemoryMut<'a>, shape: Shape) -> Self {
        // SAFETY: `drop` takes the vector out, or leaks it; until then the memory is borrowed, and nobody but
        // engines gets the tensor (`Inside`).
        Self::over(unsafe { values.storage() }, shape)
    }

    /// A tensor to be read.
    pub(crate) fn to_read(values: MemoryRef<'a>) -> Self {
        let length = values.len();
        // SAFETY: `drop` takes the vector out, or leaks it; until then the memory is borrowed. Engines only
        // read gradients (`Job::written` has none), and nobody else gets the tensor (`Inside`).
        Self::over(unsafe { values.storage() }, Shape::from(length))
    }

    fn over(storage: CpuStorage, shape: Shape) -> Self {
        LentTensor { tensor: Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false), memory: PhantomData }
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for LentTensor<'_> {
    fn drop(&mut self) {
        // A storage whose lock was poisoned, by arithmetic that panicked, is left as it is: with a handle that is never dropped.
        let emptied = catch_unwind(AssertUnwindSafe(|| self.tensor.inplace_op1(&Empty)));
        if !matches!(emptied, Ok(Ok(()))) {
            mem::forget(self.tensor.clone());
        }
    }
}

/// Takes the vector out of a storage, and forgets it.
struct Empty;

impl InplaceOp1 for Empty {
    fn name(&self) -> &'static str {
        "return-lent-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        mem::forget(mem::replace(storage, CpuStorage::U8(Vec::new())));
        Ok(())
    }
}
