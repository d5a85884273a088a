//! Arithmetic with an erased type ([`Kernel`]), and the loops that run the arithmetic over elements.
//!
//! `per_isa!` compiles a loop three times: with the target's instructions, with AVX2 and with AVX-512. The
//! results have the same bits, because Rust neither reorders nor contracts floating-point operations.
//! `unsafe` is for raw pointers to slots, and for loops that may only run if the processor has their
//! instructions. An [`Isa`] proves that the processor has them.
#![allow(unsafe_code)]

use smallbox::{SmallBox, smallbox};

use super::Isa;
use crate::numbers::value::{self, Arithmetic, Array, Compute, Lane, Prologue, Value};

/// [`Arithmetic`] as a trait object. One call runs a whole block of elements, so the indirection costs
/// nothing measurable.
pub(crate) trait Kernel: Send + Sync {
    /// Runs over elements on the CPU. A prologue changes the gradient of each element before the arithmetic.
    fn run(&self, isa: Isa, prologue: Option<&Prologue>, lanes: &mut Lanes<'_>);
    /// See [`Arithmetic::TAKES_PROLOGUE`].
    fn takes_prologue(&self) -> bool;
    /// See [`Arithmetic::as_prologue`].
    fn as_prologue(&self) -> Option<Prologue>;
    /// How many slots (state tensors) the arithmetic has.
    fn slots(&self) -> usize;
    /// See [`Arithmetic::KEEPS_NON_FINITE`].
    fn keeps_non_finite(&self) -> bool;
    /// Records the arithmetic as a graph. The graph is printed as source code for devices, or evaluated by
    /// the reference engine. Replaces `slots` by their next values.
    fn trace<'g>(
        &self,
        x: value::Expr<'g>,
        dx: value::Expr<'g>,
        slots: &mut [value::Expr<'g>],
    ) -> value::Expr<'g>;
}

/// A kernel of any type. Up to six words of scalars are stored inline, so most kernels need no allocation.
pub(crate) type ErasedKernel = SmallBox<dyn Kernel, [usize; 6]>;

pub(crate) fn erased(kernel: impl Kernel + 'static) -> ErasedKernel {
    smallbox!(kernel)
}

impl<A: Arithmetic> Kernel for A {
    fn run(&self, isa: Isa, prologue: Option<&Prologue>, lanes: &mut Lanes<'_>) {
        debug_assert!(A::TAKES_PROLOGUE || prologue.is_none());
        match prologue {
            // `TAKES_PROLOGUE` is a constant. If it is false, the compiler drops this arm, and with it the
            // second loop, which applies the prologue.
            Some(prologue) if A::TAKES_PROLOGUE => run_lanes(isa, WithPrologue(*prologue, *self), lanes),
            _ => run_lanes(isa, *self, lanes),
        }
    }

    fn takes_prologue(&self) -> bool {
        A::TAKES_PROLOGUE
    }

    fn as_prologue(&self) -> Option<Prologue> {
        Arithmetic::as_prologue(*self)
    }

    fn slots(&self) -> usize {
        A::Slots::<f64>::LEN
    }

    fn keeps_non_finite(&self) -> bool {
        A::KEEPS_NON_FINITE
    }

    fn trace<'g>(
        &self,
        x: value::Expr<'g>,
        dx: value::Expr<'g>,
        slots: &mut [value::Expr<'g>],
    ) -> value::Expr<'g> {
        let mut values = A::Slots::<value::Expr<'g>>::from_fn(|slot| slots[slot]);
        let out = self.step(x, dx, &mut values);
        slots.copy_from_slice(values.as_ref());
        out
    }
}

/// A prologue and the arithmetic that follows it.
#[derive(Clone, Copy)]
struct WithPrologue<A>(Prologue, A);

impl<A: Arithmetic> Arithmetic for WithPrologue<A> {
    type Slots<T> = A::Slots<T>;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut A::Slots<V>) -> V {
        let WithPrologue(prologue, arithmetic) = self;
        arithmetic.step(x, prologue.apply(x, dx), slots)
    }
}

/// How many elements go through a chain of several steps at a time.
///
/// 128 f32 are 512 bytes per array, so that all arrays stay in the first-level cache. Blocks of twice this
/// length lose a third of the speed from memory, because the hardware does not read ahead on all their
/// arrays. A record of state in 8 bits or of low bits has as many elements, because a block has whole
/// records.
pub(in crate::engine) const BLOCK: usize = crate::numbers::codes::BLOCK;

/// The elements of one leaf that a loop runs over, in the type of the arithmetic.
///
/// All arrays have the same length. Each slot points to as many elements, which nothing else accesses
/// meanwhile. Only `engine/cpu/pass.rs` makes such arrays, and must ensure both properties.
pub(crate) enum Lanes<'b> {
    F32(LaneArrays<'b, f32>),
    F64(LaneArrays<'b, f64>),
}

pub(crate) struct LaneArrays<'b, T> {
    pub(in crate::engine) x: &'b mut [T],
    pub(in crate::engine) dx: &'b [T],
    /// Where the new gradient is written. If `None`, the new gradient is subtracted from `x`.
    pub(in crate::engine) out: Option<&'b mut [T]>,
    pub(in crate::engine) slots: &'b [*mut T],
}

/// Defines a generic loop that is compiled for each instruction set. A call runs the version for `isa`.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$($T:ident: $bound:path),*>($isa:ident, $($arg:ident: $ty:ty),+) $body:block) => {
        $(#[$doc])*
        $vis fn $name<$($T: $bound),*>($isa: Isa, $($arg: $ty),+) {
            // Inlined, because otherwise the body would not be compiled with the instructions of its caller.
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
                // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
                #[cfg(target_arch = "x86_64")]
                $crate::engine::Isa::AVX512 => unsafe { avx512($($arg),+) },
                // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
                #[cfg(target_arch = "x86_64")]
                $crate::engine::Isa::AVX2 => unsafe { avx2($($arg),+) },
                _ => body($($arg),+),
            }
        }
    };
}
pub(in crate::engine) use per_isa;

/// Runs one step of a chain over its elements.
fn run_lanes<A: Arithmetic>(isa: Isa, step: A, lanes: &mut Lanes<'_>) {
    match lanes {
        Lanes::F32(arrays) => run_arrays(isa, step, arrays),
        Lanes::F64(arrays) => run_arrays(isa, step, arrays),
    }
}

fn run_arrays<A: Arithmetic, T: Compute>(isa: Isa, step: A, arrays: &mut LaneArrays<'_, T>) {
    let LaneArrays { x, dx, out, slots } = arrays;
    match out {
        Some(out) => transform(isa, step, x, dx, out, slots),
        None => descend(isa, step, x, dx, slots),
    }
    if vectorised_length(x.len()) < x.len() {
        run_rest(step, arrays);
    }
}

/// How many of `length` elements the vectorised loops take: a multiple of the length of every vector.
///
/// The other elements have a function of their own, [`run_rest`]. With two loops in one function, the
/// compiler keeps the scalars of the second loop in registers, and those of the vectorised loop in memory.
#[inline(always)]
fn vectorised_length(length: usize) -> usize {
    length & !15
}

/// Runs the step on one element: reads the slots at `i`, computes, and writes the slots.
///
/// # Safety
/// Every slot must point to more than `i` elements that nothing else accesses meanwhile.
#[inline(always)]
unsafe fn run_element<A: Arithmetic, T: Compute>(step: A, x: T, dx: T, slots: &[*mut T], i: usize) -> T {
    // SAFETY: the caller promises that each slot has an element `i` which nothing else accesses.
    let mut values = A::Slots::<Lane<T>>::from_fn(|slot| Lane(unsafe { *slots[slot].add(i) }));
    let result = step.step(Lane(x), Lane(dx), &mut values).0;
    for (slot, value) in slots.iter().zip(values.as_ref()) {
        // SAFETY: the caller promises that each slot has an element `i` which nothing else accesses.
        unsafe { *slot.add(i) = value.0 };
    }
    result
}

/// Runs the step on the elements after the whole vectors. Not inlined, see [`vectorised_length`].
#[inline(never)]
fn run_rest<A: Arithmetic, T: Compute>(step: A, LaneArrays { x, dx, out, slots }: &mut LaneArrays<'_, T>) {
    for i in vectorised_length(x.len())..x.len() {
        // SAFETY: every slot points to as many elements as the arrays have: `Pass::run_step`
        // and `Pass::run_in_place` make them so.
        let result = unsafe { run_element(step, x[i], dx[i], slots, i) };
        match out {
            Some(out) => out[i] = result,
            None => x[i] = x[i] - result,
        }
    }
}

// These loops use `zip`, because `zip` leaves no bounds check. With a bounds check, the compiler computes the
// last elements of every block one by one.

per_isa! {
    /// `out = step(x, dx)`, for whole vectors.
    fn transform<A: Arithmetic, T: Compute>(isa, step: A, x: &[T], dx: &[T], out: &mut [T], slots: &[*mut T]) {
        let slots = A::Slots::<*mut T>::from_fn(|slot| slots[slot]);
        let length = vectorised_length(x.len());
        for (i, ((out, x), dx)) in out[..length].iter_mut().zip(&x[..length]).zip(&dx[..length]).enumerate() {
            // SAFETY: every slot points to as many elements as the arrays have: `Pass::run_step`
            // and `Pass::run_in_place` make them so.
            *out = unsafe { run_element(step, *x, *dx, slots.as_ref(), i) };
        }
    }
}

per_isa! {
    /// `x -= step(x, dx)`, for whole vectors: the last step of a chain.
    fn descend<A: Arithmetic, T: Compute>(isa, step: A, x: &mut [T], dx: &[T], slots: &[*mut T]) {
        let slots = A::Slots::<*mut T>::from_fn(|slot| slots[slot]);
        let length = vectorised_length(x.len());
        for (i, (x, dx)) in x[..length].iter_mut().zip(&dx[..length]).enumerate() {
            // SAFETY: every slot points to as many elements as the arrays have: `Pass::run_step`
            // and `Pass::run_in_place` make them so.
            *x = *x - unsafe { run_element(step, *x, *dx, slots.as_ref(), i) };
        }
    }
}

per_isa! {
    /// `x -= dx`.
    pub(in crate::engine) fn subtract<T: Compute>(isa, x: &mut [T], dx: &[T]) {
        for (x, dx) in x.iter_mut().zip(dx) {
            *x = *x - *dx;
        }
    }
}

per_isa! {
    /// `dx += more`.
    pub(in crate::engine) fn add<T: Compute>(isa, dx: &mut [T], more: &[T]) {
        for (dx, more) in dx.iter_mut().zip(more) {
            *dx = *dx + *more;
        }
    }
}
