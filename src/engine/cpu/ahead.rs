//! Fetches into the cache what the next leaves of a row need, while the present one is computed. `unsafe`: the processor's prefetch.
//!
//! A leaf is a dozen small allocations, each known only from the one before. Where there are thousands of leaves none of them is in the
//! cache when its turn comes, and a leaf of a few thousand elements takes no longer than waiting for them one after another.
#![allow(unsafe_code)]

use candle_core::Tensor;

use super::storage::{Data, read, slot};
use crate::engine::{Job, Step};

/// How many leaves ahead to begin.
pub(super) const REACH: usize = 3;

/// The bytes of each array that are fetched; the processor reads ahead from there.
const FIRST: usize = 256;

/// Fetches a part of what the job needs, whose turn is that many leaves from now. Every part is found through the one that was fetched a
/// leaf earlier: job, headers, elements.
///
/// The caller must hold no lock.
pub(super) fn fetch(job: &Job<'_>, distance: usize) {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let tensors = job.source.iter().chain([job.x]);
    match distance {
        REACH => value(job),
        2 => {
            tensors.for_each(|tensor| value(&**tensor));
            job.counters.iter().for_each(|(counter, _)| value(&**counter));
            for step in &job.steps {
                step.kernel().into_iter().for_each(value);
                value(step.slots());
            }
        }
        _ => {
            tensors.for_each(elements);
            let slots = job.steps.iter().flat_map(Step::slots);
            slots.filter_map(|(_, buffer)| slot(buffer).ok()).for_each(|data| first(data, 0));
        }
    }
}

fn elements(tensor: &Tensor) {
    let (storage, layout) = tensor.storage_and_layout();
    value(layout.dims());
    value(layout.stride());
    if let Ok(data) = read(&storage) {
        first(data, layout.start_offset());
    }
}

fn first(data: Data, offset: usize) {
    let start: *const u8 = match data {
        Data::F16(pointer) => pointer.wrapping_add(offset).cast(),
        Data::Bf16(pointer) | Data::Split { high: pointer, .. } => pointer.wrapping_add(offset).cast(),
        Data::F32(pointer) => pointer.wrapping_add(offset).cast(),
        Data::F64(pointer) => pointer.wrapping_add(offset).cast(),
    };
    lines(start, FIRST);
}

fn value<T: ?Sized>(value: &T) {
    lines(std::ptr::from_ref(value).cast(), size_of_val(value));
}

fn lines(start: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint, which may name any address and accesses nothing.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (start, offset);
    }
}
