//! The loops over elements, compiled once per instruction set. `unsafe`: slots are raw pointers and the vectorised twins may only
//! run where the processor has their instructions.
#![allow(unsafe_code)]

use candle_core::DType;

use super::Isa;
use crate::engine::kernel::{Arithmetic, Array};
use crate::value::{Compute, Lane};

/// How many elements pass through a chain of several steps before the next ones are touched: 512 bytes of f32 per array, so all of them stay in
/// the first-level cache. Twice as many already cost a third of the speed from memory, as the hardware no longer reads ahead on all arrays.
pub(super) const BLOCK: usize = 128;

/// How many partial sums a norm has. Fixed, so that results do not depend on the vector width.
pub(super) const ACCUMULATORS: usize = 16;

/// Some elements of one leaf, in the type of the arithmetic: at most [`BLOCK`], where there is more than one step.
pub(crate) struct Block<'b> {
    pub(super) isa: Isa,
    pub(super) lanes: Lanes<'b>,
}

/// The arrays of a block, all of one length. The slots point to as many elements, and to nothing else that is accessible meanwhile.
pub(super) enum Lanes<'b> {
    F32(Arrays<'b, f32>),
    F64(Arrays<'b, f64>),
}

pub(super) struct Arrays<'b, T> {
    pub(super) x: &'b mut [T],
    pub(super) dx: &'b [T],
    /// Where the new gradient goes; if nowhere, it is subtracted from x.
    pub(super) out: Option<&'b mut [T]>,
    pub(super) slots: &'b [*mut T],
}

/// A compute type with its variant of [`Lanes`].
pub(super) trait Float: Compute {
    /// The elements of this type in the bytes of [`BLOCK`] f32.
    const BLOCK: usize = BLOCK * size_of::<f32>() / size_of::<Self>();
    fn lanes(arrays: Arrays<'_, Self>) -> Lanes<'_>;
}

impl Float for f32 {
    fn lanes(arrays: Arrays<'_, f32>) -> Lanes<'_> {
        Lanes::F32(arrays)
    }
}

impl Float for f64 {
    fn lanes(arrays: Arrays<'_, f64>) -> Lanes<'_> {
        Lanes::F64(arrays)
    }
}

/// Calls a generic loop through its twin for an instruction set.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$($T:ident: $bound:path),*>($isa:ident, $($arg:ident: $ty:ty),+) $body:block) => {
        $(#[$doc])*
        $vis fn $name<$($T: $bound),*>($isa: Isa, $($arg: $ty),+) {
            #[inline(always)]
            fn body<$($T: $bound),*>($($arg: $ty),+) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2<$($T: $bound),*>($($arg: $ty),+) {
                body($($arg),+)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512<$($T: $bound),*>($($arg: $ty),+) {
                body($($arg),+)
            }

            match $isa {
                // SAFETY: an `Isa` above `Portable` is at most `Isa::best()`, which detected the instructions.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512($($arg),+) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2($($arg),+) },
                _ => body($($arg),+),
            }
        }
    };
}
pub(super) use per_isa;

/// Runs one step of a chain over a block.
pub(crate) fn run_lanes<A: Arithmetic>(step: A, block: &mut Block<'_>) {
    match &mut block.lanes {
        Lanes::F32(arrays) => run_arrays(block.isa, step, arrays),
        Lanes::F64(arrays) => run_arrays(block.isa, step, arrays),
    }
}

fn run_arrays<A: Arithmetic, T: Compute>(isa: Isa, step: A, arrays: &mut Arrays<'_, T>) {
    let Arrays { x, dx, out, slots } = arrays;
    match out {
        Some(out) => transform(isa, step, x, dx, out, slots),
        None => descend(isa, step, x, dx, slots),
    }
}

/// One element: reads the slots at `i`, runs the step, writes the slots.
///
/// # Safety
/// Every slot must point to more than `i` elements that nothing else accesses meanwhile.
#[inline(always)]
unsafe fn element<A: Arithmetic, T: Compute>(step: A, x: T, dx: T, slots: &[*mut T], i: usize) -> T {
    // SAFETY: promised by the caller.
    let mut values = A::Slots::<Lane<T>>::from_fn(|slot| Lane(unsafe { *slots[slot].add(i) }));
    let result = step.step(Lane(x), Lane(dx), &mut values).0;
    for (slot, value) in slots.iter().zip(values.as_ref()) {
        // SAFETY: promised by the caller.
        unsafe { *slot.add(i) = value.0 };
    }
    result
}

// `zip` leaves no bounds check in these loops; with one, the compiler computes the last elements of every block one by one.

per_isa! {
    /// `out = step(x, dx)`.
    fn transform<A: Arithmetic, T: Compute>(isa, step: A, x: &[T], dx: &[T], out: &mut [T], slots: &[*mut T]) {
        let slots = A::Slots::<*mut T>::from_fn(|slot| slots[slot]);
        for (i, ((out, x), dx)) in out.iter_mut().zip(x).zip(dx).enumerate() {
            // SAFETY: every slot points to as many elements as the arrays have, see `Lanes`.
            *out = unsafe { element(step, *x, *dx, slots.as_ref(), i) };
        }
    }
}

per_isa! {
    /// `x -= step(x, dx)`: the last step of a chain.
    fn descend<A: Arithmetic, T: Compute>(isa, step: A, x: &mut [T], dx: &[T], slots: &[*mut T]) {
        let slots = A::Slots::<*mut T>::from_fn(|slot| slots[slot]);
        for (i, (x, dx)) in x.iter_mut().zip(dx).enumerate() {
            // SAFETY: every slot points to as many elements as the arrays have, see `Lanes`.
            *x = *x - unsafe { element(step, *x, *dx, slots.as_ref(), i) };
        }
    }
}

per_isa! {
    /// `x -= dx`.
    pub(super) fn subtract<T: Compute>(isa, x: &mut [T], dx: &[T]) {
        for (x, dx) in x.iter_mut().zip(dx) {
            *x = *x - *dx;
        }
    }
}

per_isa! {
    /// `dx += more`.
    pub(super) fn add<T: Compute>(isa, dx: &mut [T], more: &[T]) {
        for (dx, more) in dx.iter_mut().zip(more) {
            *dx = *dx + *more;
        }
    }
}

/// What a norm folds over elements, in f64.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum Fold {
    /// `Σ g`
    Total,
    /// `Σ |g|`
    Sum,
    /// `Σ g²`
    Squares,
    /// `max |g|`, NaN if any is NaN
    Largest,
    /// How many are not 0
    NonZeros,
    /// `Σ |g|^p`
    Powers(f64),
}

impl Fold {
    pub(in crate::engine) fn for_norm(p: f64) -> Fold {
        match p {
            0.0 => Fold::NonZeros,
            1.0 => Fold::Sum,
            2.0 => Fold::Squares,
            f64::INFINITY => Fold::Largest,
            p => Fold::Powers(p),
        }
    }

    /// Whether the fold of finite numbers of a compute dtype can be infinite.
    pub(in crate::engine) fn can_overflow(self, compute: DType) -> bool {
        match self {
            Fold::Largest | Fold::NonZeros => false,
            Fold::Total | Fold::Sum | Fold::Squares => compute == DType::F64,
            // The largest f32 to the seventh power, 2⁶³ times, is still an f64.
            Fold::Powers(p) => compute == DType::F64 || p > 7.0,
        }
    }

    /// One number for two.
    #[inline(always)]
    pub(in crate::engine) fn join(self, a: f64, b: f64) -> f64 {
        match self {
            Fold::Largest => larger(a, b),
            _ => a + b,
        }
    }

    /// The total of numbers that are `scale` times as large.
    pub(in crate::engine) fn scaled(self, total: f64, scale: f64) -> f64 {
        match self {
            Fold::Total => total * scale,
            Fold::NonZeros => total,
            Fold::Sum | Fold::Largest => total * scale.abs(),
            Fold::Squares => total * scale * scale,
            Fold::Powers(p) => total * scale.abs().powf(p),
        }
    }

    /// The norm from the folded total.
    pub(in crate::engine) fn finish(self, total: f64) -> f64 {
        match self {
            Fold::Total | Fold::Sum | Fold::Largest | Fold::NonZeros => total,
            Fold::Squares => total.sqrt(),
            Fold::Powers(p) => total.powf(p.recip()),
        }
    }
}

#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    let larger = if a >= b { a } else { b };
    if a.is_nan() { a } else { larger }
}

#[inline(always)]
fn accumulate<T: Compute>(sums: &mut [f64; ACCUMULATORS], dx: &[T], fold: impl Fn(f64, f64) -> f64) {
    let (rows, rest) = dx.as_chunks::<ACCUMULATORS>();
    let mut local = *sums;
    for row in rows {
        for (sum, g) in local.iter_mut().zip(row) {
            *sum = fold(*sum, g.as_());
        }
    }
    for (sum, g) in local.iter_mut().zip(rest) {
        *sum = fold(*sum, g.as_());
    }
    *sums = local;
}

per_isa! {
    /// Folds a block into the accumulators: element i of a chunk goes to accumulator i mod 16.
    pub(super) fn fold_block<T: Compute>(isa, fold: Fold, dx: &[T], sums: &mut [f64; ACCUMULATORS]) {
        match fold {
            Fold::Total => accumulate(sums, dx, |sum, g| sum + g),
            Fold::Sum => accumulate(sums, dx, |sum, g| sum + g.abs()),
            Fold::Squares => accumulate(sums, dx, |sum, g| sum + g * g),
            Fold::Largest => accumulate(sums, dx, |sum, g| larger(sum, g.abs())),
            Fold::NonZeros => accumulate(sums, dx, |sum, g| sum + f64::from(u8::from(g != 0.0))),
            Fold::Powers(p) => accumulate(sums, dx, |sum, g| sum + g.abs().powf(p)),
        }
    }
}

/// The fold of host numbers, in the order and with the roundings of the fused engine.
pub(in crate::engine) fn fold_chunk(fold: Fold, values: &[f64]) -> f64 {
    let mut sums = [0.0; ACCUMULATORS];
    fold_block(Isa::best(), fold, values, &mut sums);
    join_accumulators(fold, &sums)
}

/// The accumulators of a chunk, joined in order.
pub(super) fn join_accumulators(fold: Fold, sums: &[f64; ACCUMULATORS]) -> f64 {
    sums.iter().fold(0.0, |total, &sum| fold.join(total, sum))
}
