//! Fetches the memory of the next leaves into the cache, while other leaves are computed. `unsafe` is for the
//! processor's prefetch instruction.
//!
//! A leaf (a parameter with its state) is a dozen small allocations, each found through a pointer in another.
//! With thousands of leaves, none of these allocations is in the cache when the leaf's turn comes. To wait
//! for all of them in turn takes as long as to compute a leaf of a few thousand elements.
//!
//! A prefetch itself waits for nothing, but its address has to be read from memory. So each stage only
//! follows pointers that the stage before has fetched: the job; then headers of tensors and slots; then
//! dimensions and elements.
#![allow(unsafe_code)]

use crate::engine::memory::{Addresses, Buffer, Memory};
use crate::engine::plan::{Job, Operand, Step};
use crate::tensors::bytes;

/// How many bytes of each array are fetched. The processor itself reads ahead on the rest.
const FETCHED_BYTES: usize = 512;

/// Fetches the part of a job's memory that belongs to `stage`. The caller must hold no lock, because the last
/// stage may lock x.
pub(super) fn prefetch_job(job: &Job<'_>, stage: usize) {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let tensors = || {
        let x = if let Operand::Lent(x) = job.x {
            x.tensor()
        } else {
            None
        };
        job.sources.iter().filter_map(|source| source.tensor()).chain(x)
    };
    match stage {
        0 => prefetch(job),
        1 => {
            tensors().for_each(|tensor| prefetch(&**tensor));
            for addresses in &job.addresses {
                prefetch_at(addresses.memory.unwrap_or_default(), 1);
            }
            job.counters.iter().for_each(|(counter, _)| prefetch(&**counter));
            for step in &job.steps {
                prefetch(step.slots());
            }
        }
        _ => {
            for tensor in tensors() {
                prefetch(tensor.dims());
                prefetch(tensor.stride());
            }
            job.addresses
                .iter()
                .for_each(|addresses| prefetch_at(addresses.first, FETCHED_BYTES));
            match job.x {
                Operand::Own(ref master) => prefetch_state(master),
                // Only a tensor is fetched. Other memory would have to be lent by code of its owner, and such
                // a loan takes more time than a prefetch saves.
                Operand::Lent(x) if x.tensor().is_some() && job.addresses.is_empty() => {
                    let addresses = Addresses::from_lender("parameter", x);
                    addresses
                        .into_iter()
                        .for_each(|addresses| prefetch_at(addresses.first, FETCHED_BYTES));
                }
                Operand::Lent(_) => {}
            }
            job.steps
                .iter()
                .flat_map(Step::slots)
                .for_each(|(_, buffer)| prefetch_state(buffer));
        }
    }
}

/// Fetches the beginning of a state tensor into the cache.
fn prefetch_state(buffer: &Buffer) {
    if let Memory::Host(values) = buffer.memory() {
        bytes(values)
            .into_iter()
            .for_each(|values| prefetch_lines(values.as_ptr(), FETCHED_BYTES));
    }
}

/// Fetches `bytes` bytes at an address into the cache. Some of these bytes may not exist.
fn prefetch_at(address: usize, bytes: usize) {
    prefetch_lines(std::ptr::without_provenance(address), bytes);
}

/// Fetches a value into the cache.
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    prefetch_lines(std::ptr::from_ref(value).cast(), size_of_val(value));
}

/// Fetches `bytes` bytes into the cache. Some of these bytes may not exist.
#[inline(always)]
pub(super) fn prefetch_lines(start: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch is a hint, which may name any address and accesses nothing.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset).cast());
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        let _ = (start, offset);
    }
}
