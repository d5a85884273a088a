//! Element pointers into candle's CPU storages, and the locks that make them sound. `unsafe`: the pointers are shared between threads.
//!
//! candle lends one mutable storage per in-place operation, but an in-place operation may start another from inside. Only the tensors of one leaf are locked
//! together: a concurrent forward pass reads several parameters in one operation, so holding two of them could deadlock.
#![allow(unsafe_code)]

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use half::{bf16, f16};
use smallvec::SmallVec;

use crate::engine::memory::{Buffer, Memory};
use crate::numbers::Code;
use crate::numbers::codes::{BLOCK, RECORD, stored_bytes};

/// A list that is short for most leaves and then needs no allocation.
pub(super) type List<T> = SmallVec<[T; 4]>;

/// The items as a list. For the few that there are, collecting takes several times as long as this.
pub(super) fn list<T>(items: impl IntoIterator<Item = T>) -> List<T> {
    let mut list = List::new();
    for item in items {
        list.push(item);
    }
    list
}

/// The items as a list, or the first error.
pub(super) fn try_list<T>(items: impl IntoIterator<Item = candle_core::Result<T>>) -> candle_core::Result<List<T>> {
    let mut list = List::new();
    for item in items {
        list.push(item?);
    }
    Ok(list)
}

/// The first element of a tensor's data, by dtype.
#[derive(Clone, Copy, Debug)]
pub(super) enum DataPtr {
    F16(*mut f16),
    Bf16(*mut bf16),
    F32(*mut f32),
    F64(*mut f64),
    /// An f32 in two parts, of which this is the upper one.
    Split(*mut bf16, LowPtr),
    /// Numbers in 8 bits, as records.
    Coded(*mut u8, Code),
}

/// The lower part of numbers in two parts.
#[derive(Clone, Copy, Debug)]
pub(super) enum LowPtr {
    I16(*mut i16),
    U8(*mut u8),
}

// SAFETY: a `DataPtr` is only dereferenced inside the functions below, while the locks are held, and each element by one thread.
unsafe impl Send for DataPtr {}
// SAFETY: as above.
unsafe impl Sync for DataPtr {}

impl DataPtr {
    /// The data one `offset` further on.
    pub(super) fn skip(self, offset: usize) -> DataPtr {
        match self {
            DataPtr::F16(pointer) => DataPtr::F16(pointer.wrapping_add(offset)),
            DataPtr::Bf16(pointer) => DataPtr::Bf16(pointer.wrapping_add(offset)),
            DataPtr::F32(pointer) => DataPtr::F32(pointer.wrapping_add(offset)),
            DataPtr::F64(pointer) => DataPtr::F64(pointer.wrapping_add(offset)),
            DataPtr::Split(high, LowPtr::I16(low)) => DataPtr::Split(high.wrapping_add(offset), LowPtr::I16(low.wrapping_add(offset))),
            DataPtr::Split(high, LowPtr::U8(low)) => DataPtr::Split(high.wrapping_add(offset), LowPtr::U8(low.wrapping_add(offset))),
            DataPtr::Coded(records, code) => DataPtr::Coded(records.wrapping_add(stored_bytes(offset)), code),
        }
    }

    /// Its arrays, each with the bytes of a block of elements.
    pub(super) fn arrays(self) -> [(*const u8, usize); 2] {
        let none = (std::ptr::null(), 0);
        match self {
            DataPtr::F16(pointer) => [(pointer.cast_const().cast(), 2 * BLOCK), none],
            DataPtr::Bf16(pointer) => [(pointer.cast_const().cast(), 2 * BLOCK), none],
            DataPtr::F32(pointer) => [(pointer.cast_const().cast(), 4 * BLOCK), none],
            DataPtr::F64(pointer) => [(pointer.cast_const().cast(), 8 * BLOCK), none],
            DataPtr::Split(high, LowPtr::I16(low)) => [(high.cast_const().cast(), 2 * BLOCK), (low.cast_const().cast(), 2 * BLOCK)],
            DataPtr::Split(high, LowPtr::U8(low)) => [(high.cast_const().cast(), 2 * BLOCK), (low.cast_const(), BLOCK)],
            DataPtr::Coded(records, _) => [(records.cast_const(), RECORD), none],
        }
    }

    /// The number of which this is the upper part.
    pub(super) fn with_low_bits(self, low: Option<LowPtr>) -> candle_core::Result<DataPtr> {
        match (self, low) {
            (data, None) => Ok(data),
            (DataPtr::Bf16(high), Some(low)) => Ok(DataPtr::Split(high, low)),
            _ => Err(unsupported()),
        }
    }
}

pub(super) fn unsupported() -> candle_core::Error {
    candle_core::Error::Msg("the fused CPU engine needs contiguous f16, bf16, f32 or f64 storage".to_string())
}

/// Makes the functions that find the start of data, to be read or to be written: of a storage, of a state tensor, and of the low bits of numbers that are
/// kept in two parts.
macro_rules! start_of {
    ($start:ident, $slot:ident, $low_bits:ident, ($($lent:tt)*) $memory:ident, $values:ident => $first:expr) => {
        fn $start(storage: $($lent)* CpuStorage) -> candle_core::Result<DataPtr> {
            Ok(match storage {
                CpuStorage::F16($values) => DataPtr::F16($first),
                CpuStorage::BF16($values) => DataPtr::Bf16($first),
                CpuStorage::F32($values) => DataPtr::F32($first),
                CpuStorage::F64($values) => DataPtr::F64($first),
                _ => return Err(unsupported()),
            })
        }

        pub(super) fn $slot(buffer: $($lent)* Buffer) -> candle_core::Result<DataPtr> {
            let code = buffer.code();
            match (buffer.$memory(), code) {
                (Memory::Host(CpuStorage::U8($values)), Some(code)) => Ok(DataPtr::Coded($first, code)),
                (Memory::Host(values), None) => $start(values),
                _ => Err(unsupported()),
            }
        }

        pub(super) fn $low_bits(buffer: $($lent)* Buffer) -> candle_core::Result<LowPtr> {
            match buffer.$memory() {
                Memory::Host(CpuStorage::I16($values)) => Ok(LowPtr::I16($first)),
                Memory::Host(CpuStorage::U8($values)) => Ok(LowPtr::U8($first)),
                _ => Err(unsupported()),
            }
        }
    };
}

start_of!(readable, slot, low_bits, (&) memory, values => values.as_ptr().cast_mut());
start_of!(writable, slot_mut, low_bits_mut, (&mut) memory_mut, values => values.as_mut_ptr());

/// The first element of contiguous data whose storage starts at `start`.
pub(super) fn first_element(start: DataPtr, layout: &Layout) -> candle_core::Result<DataPtr> {
    let (offset, _) = layout.contiguous_offsets().ok_or_else(unsupported)?;
    Ok(start.skip(offset))
}

/// Calls `run` with the data of all `tensors` (distinct storages, contiguous) locked for writing.
pub(super) fn with_written(tensors: &[&Tensor], run: &mut dyn FnMut(&[DataPtr])) -> candle_core::Result<()> {
    fn lock(tensors: &[&Tensor], held: &mut List<DataPtr>, run: &mut dyn FnMut(&[DataPtr])) -> candle_core::Result<()> {
        let Some((first, rest)) = tensors.split_first() else {
            run(held);
            return Ok(());
        };
        first.inplace_op1(&LendData(RefCell::new(&mut |data| {
            held.push(data);
            lock(rest, held, run)
        })))
    }
    lock(tensors, &mut List::new(), run)
}

/// Calls `run` with the data of all `tensors` (any layout: pointers to the start of the storage) locked for reading.
pub(super) fn with_read<R>(tensors: &[&Tensor], run: impl FnOnce(&[DataPtr]) -> R) -> candle_core::Result<R> {
    let guards = list(tensors.iter().map(|tensor| tensor.storage_and_layout().0));
    let start = |storage: &Storage| if let Storage::Cpu(storage) = storage { readable(storage) } else { Err(unsupported()) };
    let data = try_list(guards.iter().map(|storage| start(storage)))?;
    Ok(run(&data))
}

/// An in-place operation that lends the storage to a function.
struct LendData<'f>(RefCell<&'f mut dyn FnMut(DataPtr) -> candle_core::Result<()>>);

impl InplaceOp1 for LendData<'_> {
    fn name(&self) -> &'static str {
        "optimiser-update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        (self.0.borrow_mut())(first_element(writable(storage)?, layout)?)
    }
}
