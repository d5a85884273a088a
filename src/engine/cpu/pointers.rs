//! Element pointers into lent memory, and the locks that make them sound. `unsafe` is for pointers that are
//! shared between threads.
//!
//! Only the memory of one leaf is locked at a time. A concurrent forward pass reads several parameters in one
//! operation, so an update that held two parameters and the forward pass could wait for each other for ever.
//!
//! Assumptions of the pointers, each with the code that checks it:
//!
//! - Memory has the planned dtype and length: `lent::read` and `lent::write` compare both while the memory is
//!   lent. The planned values are read from the owner once per call (`model/lent/handle.rs`). Memory has the
//!   elements of the leaf: [`lend_to_read`], [`lend_gradients`] and [`lend_to_write`].
//! - Nothing else uses memory that is written: such memory is lent by `&mut`, and no gradient shares it, see
//!   `Job::copy_shared`, `unshared` and their callers.
//! - State has as many elements as x: `Job::check`. Nothing but `Buffer` can exchange the storage of state.
//! - A range of elements lies within the array: `run_chunks` (`engine/cpu/mod.rs`) cuts the leaf, and
//!   `Pass::blocks` the range. [`Elements`] asserts this bound in debug builds.
#![allow(unsafe_code)]

use half::{bf16, f16};
use smallvec::SmallVec;

use crate::engine::memory::{Buffer, Memory};
use crate::error::Result;
use crate::model::lent::{Lend, MemoryMut, MemoryRef, View, read, unsupported_error, write, wrong_memory};
use crate::numbers::codes::{BLOCK, RECORD, stored_bytes};
use crate::numbers::low_bits::{self, LOW_RECORD};
use crate::numbers::{Code, DType, Records};
use crate::tensors::CpuStorage;

/// A list that needs no allocation for most leaves.
pub(super) type List<T> = SmallVec<[T; 4]>;

/// The items as a list. Pushes each item, because `collect` takes several times as long for a few items.
pub(super) fn list<T>(items: impl IntoIterator<Item = T>) -> List<T> {
    let mut list = List::new();
    for item in items {
        list.push(item);
    }
    list
}

/// The items as a list, or the first error.
pub(super) fn try_list<T>(items: impl IntoIterator<Item = Result<T>>) -> Result<List<T>> {
    let mut list = List::new();
    for item in items {
        list.push(item?);
    }
    Ok(list)
}

/// A pointer to elements of an array. With debug assertions the bounds of the array are stored, too.
#[derive(Debug)]
pub(super) struct Elements<T> {
    first: *mut T,
    /// The addresses where the array begins and ends.
    #[cfg(debug_assertions)]
    array: (usize, usize),
}

// SAFETY: only functions of this engine use the elements, while they are lent ([`lend_to_read`],
// [`lend_gradients`] and [`lend_to_write`]) or, for state, while the job that borrows them runs. Each element
// is written by one thread: `run_chunks` in `engine/cpu/mod.rs` gives each thread chunks of its own.
unsafe impl<T> Send for Elements<T> {}
// SAFETY: as for `Send`.
unsafe impl<T> Sync for Elements<T> {}

impl<T> Copy for Elements<T> {}

impl<T> Clone for Elements<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Elements<T> {
    fn new(first: *mut T, _length: usize) -> Self {
        Elements {
            first,
            #[cfg(debug_assertions)]
            array: (first.addr(), first.addr() + _length * size_of::<T>()),
        }
    }

    pub(super) fn from_slice(slice: &mut [T]) -> Self {
        Elements::new(slice.as_mut_ptr(), slice.len())
    }

    /// The elements from `offset` on. `offset` may wrap around: the source of a part of a leaf points to
    /// where element 0 of the leaf would be, before the source's array.
    pub(super) fn skip(self, offset: usize) -> Self {
        Elements {
            first: self.first.wrapping_add(offset),
            ..self
        }
    }

    pub(super) fn first(self) -> *const T {
        self.first
    }

    /// A pointer to `length` elements from `offset` on, to be read and written.
    pub(super) fn range(self, offset: usize, length: usize) -> *mut T {
        #[cfg(test)]
        super::traffic::count_numbers::<T>(length, length);
        self.pointer(offset, length)
    }

    /// A pointer to `length` elements from `offset` on.
    #[cfg_attr(
        not(debug_assertions),
        allow(unused_variables, reason = "the length is for the assertion")
    )]
    fn pointer(self, offset: usize, length: usize) -> *mut T {
        let start = self.first.wrapping_add(offset);
        #[cfg(debug_assertions)]
        {
            let (begin, end) = self.array;
            let bytes = start.addr()..start.addr() + length * size_of::<T>();
            debug_assert!(
                begin <= bytes.start && bytes.end <= end,
                "{bytes:?} of {begin}..{end}"
            );
        }
        start
    }

    /// `length` elements from `offset` on, to be read.
    ///
    /// # Safety
    /// These elements must lie in the array, which must be locked and not be written meanwhile.
    pub(super) unsafe fn read<'e>(self, offset: usize, length: usize) -> &'e [T] {
        #[cfg(test)]
        super::traffic::count_numbers::<T>(length, 0);
        // SAFETY: the caller promises that the elements lie in the array (`pointer` asserts it), and that
        // nothing writes them meanwhile.
        unsafe { std::slice::from_raw_parts(self.pointer(offset, length), length) }
    }

    /// `length` elements from `offset` on, to be written.
    ///
    /// # Safety
    /// These elements must lie in the array, which must be locked for writing. Nothing else may use them
    /// meanwhile.
    pub(super) unsafe fn write<'e>(self, offset: usize, length: usize) -> &'e mut [T] {
        #[cfg(test)]
        super::traffic::count_numbers::<T>(0, length);
        // SAFETY: the caller promises that the elements lie in the array (`pointer` asserts it), and that
        // nothing else uses them meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(offset, length), length) }
    }

    /// `length` elements from `offset` on, to be read and written.
    ///
    /// # Safety
    /// As [`Elements::write`].
    pub(super) unsafe fn update<'e>(self, offset: usize, length: usize) -> &'e mut [T] {
        // SAFETY: the caller promises that the elements lie in the array (`pointer` asserts it), and that
        // nothing else uses them meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.range(offset, length), length) }
    }
}

/// The elements of a parameter, gradient or state tensor, by dtype.
#[derive(Clone, Copy, Debug)]
pub(super) enum DataPtr {
    F16(Elements<f16>),
    Bf16(Elements<bf16>),
    F32(Elements<f32>),
    F64(Elements<f64>),
    /// f32 in two parts: the upper part, a bf16, and the low bits.
    Split(Elements<bf16>, LowPtr),
    /// Numbers in 8 bits, as records.
    Coded(Elements<u8>, Code),
}

/// The low bits of numbers whose upper part is a bf16.
#[derive(Clone, Copy, Debug)]
pub(super) enum LowPtr {
    /// All low bits, as records.
    Records(Elements<u8>),
    /// The lowest byte of numbers of 24 bits.
    U8(Elements<u8>),
}

impl DataPtr {
    /// The data that begins `offset` elements further on.
    pub(super) fn skip(self, offset: usize) -> DataPtr {
        match self {
            DataPtr::F16(pointer) => DataPtr::F16(pointer.skip(offset)),
            DataPtr::Bf16(pointer) => DataPtr::Bf16(pointer.skip(offset)),
            DataPtr::F32(pointer) => DataPtr::F32(pointer.skip(offset)),
            DataPtr::F64(pointer) => DataPtr::F64(pointer.skip(offset)),
            DataPtr::Split(high, LowPtr::Records(records)) => DataPtr::Split(
                high.skip(offset),
                LowPtr::Records(records.skip(low_bits::stored_bytes(offset))),
            ),
            DataPtr::Split(high, LowPtr::U8(low)) => {
                DataPtr::Split(high.skip(offset), LowPtr::U8(low.skip(offset)))
            }
            DataPtr::Coded(records, code) => DataPtr::Coded(records.skip(stored_bytes(offset)), code),
        }
    }

    /// Where the one or two arrays begin, each with the bytes of [`BLOCK`] elements.
    pub(super) fn arrays(self) -> [(*const u8, usize); 2] {
        fn bytes<T>(elements: Elements<T>) -> (*const u8, usize) {
            (elements.first().cast(), size_of::<T>() * BLOCK)
        }
        let no_array = (std::ptr::null(), 0);
        match self {
            DataPtr::F16(elements) => [bytes(elements), no_array],
            DataPtr::Bf16(elements) => [bytes(elements), no_array],
            DataPtr::F32(elements) => [bytes(elements), no_array],
            DataPtr::F64(elements) => [bytes(elements), no_array],
            DataPtr::Split(high, LowPtr::Records(records)) => [bytes(high), (records.first(), LOW_RECORD)],
            DataPtr::Split(high, LowPtr::U8(low)) => [bytes(high), bytes(low)],
            DataPtr::Coded(records, _) => [(records.first(), RECORD), no_array],
        }
    }

    /// The data as upper parts of numbers with these low bits. Without low bits, the data as it is.
    pub(super) fn with_low_bits(self, low: Option<LowPtr>) -> Result<DataPtr> {
        match (self, low) {
            (data, None) => Ok(data),
            (DataPtr::Bf16(high), Some(low)) => Ok(DataPtr::Split(high, low)),
            _ => Err(unsupported_error()),
        }
    }
}

/// Defines functions that point into a `&Buffer` or a `&mut Buffer`: to its numbers, or to its low bits.
macro_rules! buffer_pointers {
    ($data_ptr:ident of $Memory:ident, $numbers:ident, $low_bits:ident, ($($by:tt)*) $memory:ident, $values:ident => $first:expr) => {
        pub(super) fn $numbers(buffer: $($by)* Buffer) -> Result<DataPtr> {
            let records = buffer.records();
            match (buffer.$memory(), records) {
                (Memory::Host(CpuStorage::U8($values)), Some(Records::Codes(code))) => Ok(DataPtr::Coded($first, code)),
                (Memory::Host(values), None) => $Memory::from_storage(values).map($data_ptr).ok_or_else(unsupported_error),
                _ => Err(unsupported_error()),
            }
        }

        pub(super) fn $low_bits(buffer: $($by)* Buffer) -> Result<LowPtr> {
            let records = buffer.records();
            match (buffer.$memory(), records) {
                (Memory::Host(CpuStorage::U8($values)), Some(Records::LowBits)) => Ok(LowPtr::Records($first)),
                (Memory::Host(CpuStorage::U8($values)), None) => Ok(LowPtr::U8($first)),
                _ => Err(unsupported_error()),
            }
        }
    };
}

buffer_pointers!(data_ptr of MemoryRef, buffer_ptr, low_bits_ptr, (&) memory, values => Elements::new(values.as_ptr().cast_mut(), values.len()));
buffer_pointers!(data_ptr_mut of MemoryMut, buffer_ptr_mut, low_bits_ptr_mut, (&mut) memory_mut, values => Elements::from_slice(values));

/// A pointer to memory that is lent to be read. Nothing may be written through this pointer.
pub(super) fn data_ptr(memory: MemoryRef<'_>) -> DataPtr {
    match memory {
        MemoryRef::F16(values) => DataPtr::F16(Elements::new(values.as_ptr().cast_mut(), values.len())),
        MemoryRef::BF16(values) => DataPtr::Bf16(Elements::new(values.as_ptr().cast_mut(), values.len())),
        MemoryRef::F32(values) => DataPtr::F32(Elements::new(values.as_ptr().cast_mut(), values.len())),
        MemoryRef::F64(values) => DataPtr::F64(Elements::new(values.as_ptr().cast_mut(), values.len())),
    }
}

fn data_ptr_mut(memory: MemoryMut<'_>) -> DataPtr {
    match memory {
        MemoryMut::F16(values) => DataPtr::F16(Elements::from_slice(values)),
        MemoryMut::BF16(values) => DataPtr::Bf16(Elements::from_slice(values)),
        MemoryMut::F32(values) => DataPtr::F32(Elements::from_slice(values)),
        MemoryMut::F64(values) => DataPtr::F64(Elements::from_slice(values)),
    }
}

/// Lends all `length` elements of `lender` to `run`, which may write them. Errors call the memory `name`.
///
/// # Errors
/// If the memory has another dtype or length than its owner promised. Also the errors of `run`.
pub(super) fn lend_to_write(
    name: &'static str,
    lender: &dyn Lend,
    length: usize,
    run: &mut dyn FnMut(DataPtr) -> Result<()>,
) -> Result<()> {
    write(name, lender, &mut |memory| {
        check_length(name, (memory.dtype(), memory.len()), length)?;
        run(data_ptr_mut(memory))
    })
}

/// Lends all `length` elements of `lender` to `run`, which may read them. The owner must lend them in order.
///
/// # Errors
/// As [`lend_to_write`].
pub(super) fn lend_to_read(
    name: &'static str,
    lender: &dyn Lend,
    length: usize,
    run: &mut dyn FnMut(DataPtr) -> Result<()>,
) -> Result<()> {
    read(name, lender, &mut |view| {
        check_length(name, (view.memory().dtype(), view.elements()), length)?;
        run(view.in_order().map(data_ptr).ok_or_else(unsupported_error)?)
    })
}

/// Lends views of all gradients to `run`, each of `length` elements.
///
/// # Errors
/// As [`lend_to_write`].
pub(super) fn lend_gradients(
    gradients: &[&dyn Lend],
    length: usize,
    run: &mut dyn FnMut(&[View<'_>]) -> Result<()>,
) -> Result<()> {
    // Recursive, because memory is lent only while a function runs.
    fn lend_rest(
        gradients: &[&dyn Lend],
        length: usize,
        views: &[View<'_>],
        run: &mut dyn FnMut(&[View<'_>]) -> Result<()>,
    ) -> Result<()> {
        let Some((&gradient, rest)) = gradients.split_first() else {
            return run(views);
        };
        read("gradient", gradient, &mut |view| {
            check_length("gradient", (view.memory().dtype(), view.elements()), length)?;
            let lent_views: List<View<'_>> = list(views.iter().copied().chain([view]));
            lend_rest(rest, length, &lent_views, run)
        })
    }
    lend_rest(gradients, length, &[], run)
}

/// Refuses memory of another length than the leaf's.
fn check_length(role: &'static str, (dtype, length): (DType, usize), expected: usize) -> Result<()> {
    if length == expected {
        return Ok(());
    }
    Err(wrong_memory((dtype, length), (dtype, expected)).in_role(role))
}
