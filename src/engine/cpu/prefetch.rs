//! Fetches into the cache what is needed next, while something else is computed. `unsafe`: the processor's
//! prefetch.
//!
//! A leaf (a parameter with its state) is a dozen small allocations, each found through the one before. With
//! thousands of leaves none is in the cache when its turn comes. To wait for them one after another takes as
//! long as to compute a leaf of a few thousand elements.
//!
//! A prefetch itself waits for nothing, but its address has to be read from memory. So each stage only
//! follows pointers that the stage before has fetched: the job; then headers of tensors and slots; then
//! dimensions and elements.
#![allow(unsafe_code)]

use crate::engine::memory::{Addresses, Buffer, Memory};
use crate::engine::plan::{Job, Operand, Step};
use crate::tensors::bytes;

/// The bytes of each array that are fetched. From there the processor reads ahead.
const FIRST: usize = 512;

/// Fetches the part of a job's memory that belongs to `stage`. The caller must hold no lock, because the last
/// stage may lock x.
pub(super) fn prefetch_job(job: &Job<'_>, stage: usize) {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let tensors = || {
        let x = if let Operand::Lent(x) = job.x { x.tensor() } else { None };
        job.sources.iter().filter_map(|source| source.tensor()).chain(x)
    };
    match stage {
        0 => prefetch(job),
        1 => {
            tensors().for_each(|tensor| prefetch(&**tensor));
            job.addresses.iter().for_each(|of| prefetch_at(of.memory.unwrap_or_default(), 1));
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
            job.addresses.iter().for_each(|of| prefetch_at(of.first, FIRST));
            match job.x {
                Operand::Own(ref master) => prefetch_state(master),
                // Only for tensors: for other memory the code of its owner would have to run, which a
                // prefetch is not worth.
                Operand::Lent(x) if x.tensor().is_some() && job.addresses.is_empty() => {
                    Addresses::of("parameter", x).into_iter().for_each(|of| prefetch_at(of.first, FIRST));
                }
                Operand::Lent(_) => {}
            }
            job.steps.iter().flat_map(Step::slots).for_each(|(_, buffer)| prefetch_state(buffer));
        }
    }
}

/// Fetches the beginning of a state tensor into the cache.
fn prefetch_state(buffer: &Buffer) {
    if let Memory::Host(values) = buffer.memory() {
        bytes(values).into_iter().for_each(|values| lines(values.as_ptr(), FIRST));
    }
}

/// Fetches what is at an address into the cache, if anything is.
fn prefetch_at(address: usize, bytes: usize) {
    lines(std::ptr::without_provenance(address), bytes);
}

/// Fetches a value into the cache.
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    lines(std::ptr::from_ref(value).cast(), size_of_val(value));
}

/// Fetches `bytes` bytes into the cache. Not all of them need exist.
#[inline(always)]
pub(super) fn lines(start: *const u8, bytes: usize) {
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
