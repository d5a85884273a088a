//! One pass over one leaf (a parameter with its state): reads gradient, parameter and state, runs the chain
//! of steps, and writes the result. `unsafe` is for raw storage pointers.
//!
//! Every array should come from memory only once, although each step has a loop of its own over numbers of
//! the compute type. So a pass works on blocks that stay in the first-level cache:
//!
//! ```text
//! x, slots and one gradient are contiguous, of the compute type, and the sink is Subtract:
//!     run the steps on the memory itself, a single step as one loop        (run_in_place)
//! otherwise, for each block:
//!     fetch what the fourth block after this one reads                     (Ahead)
//!     dx ← the gradient where it lies, or the widened sum of all gradients
//!     x  ← x where it lies, or widened
//!     for each step:  slots ← where they lie, or widened copies
//!                     dx ← step(x, dx, slots), or in the last step x ← x - step(x, dx, slots)
//!                     copies are rounded and stored
//!     sink: store x and what the epilogue keeps, or reduce or copy dx      (run_block)
//! ```
//!
//! 1. A reduction starts with a full block, because the place of an element in its chunk selects the
//!    accumulator.
//! 2. If an array is in records of 128 elements, a block has whole records, because one thread must write all
//!    of a record.
//! 3. With Kahan's sum the last step does not subtract from x, because the sum needs the old x and dx.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use smallvec::SmallVec;

use super::convert::{Storable, compensate_bf16, load, store, store_at_random};
use super::pointers::{DataPtr, List, LowPtr, list};
use super::prefetch::prefetch_lines;
use super::sources::{CacheLines, LONGEST_BLOCK, StridedSource, read_sum};
use crate::engine::Isa;
use crate::engine::kernel::{
    ACCUMULATORS, BLOCK, Kernel, LaneArrays, Reducer, add, chunk_length, reduce_block, subtract,
};
use crate::engine::plan::{Epilogue, Link, Sink};
use crate::numbers::value::Prologue;

/// The work on one leaf, with pointers into locked memory.
pub(super) struct Pass<'p> {
    pub(super) isa: Isa,
    pub(super) x: DataPtr,
    pub(super) sources: List<StridedSource<'p>>,
    /// Most chains become a single step, whose prologue does the work of all others.
    pub(super) steps: SmallVec<[PassStep<'p>; 1]>,
    pub(super) sink: PassSink,
}

/// One step of the chain with its slots. Its loop also applies `prologue`, which stands for earlier steps.
#[derive(Clone, Copy)]
pub(super) struct PassStep<'p> {
    kernel: &'p dyn Kernel,
    slots: &'p [DataPtr],
    prologue: Option<Prologue>,
}

impl<'p> PassStep<'p> {
    /// The steps of a chain. A scale, limit or decay joins the next step's loop, if that loop takes a
    /// prologue. `slots` has the slots of all steps, one step after another.
    pub(super) fn chain(
        links: impl Iterator<Item = Link<'p>>,
        mut slots: &'p [DataPtr],
    ) -> SmallVec<[Self; 1]> {
        let mut steps = SmallVec::<[Self; 1]>::new();
        for Link {
            kernel,
            slots: buffers,
        } in links
        {
            let (link_slots, rest) = slots.split_at(buffers.len());
            slots = rest;
            let mut prologue = None;
            // Earlier steps are tried from the nearest on. A prologue scales, then limits, then decays. So
            // the first step that breaks this order, or does something else, keeps a loop of its own.
            while kernel.takes_prologue()
                && let Some(earlier) = steps.last().and_then(PassStep::as_prologue)
                && let Some(longer) = earlier.then(prologue.unwrap_or_default())
            {
                prologue = Some(longer);
                steps.pop();
            }
            steps.push(PassStep {
                kernel,
                slots: link_slots,
                prologue,
            });
        }
        steps
    }

    /// This step as a prologue of the next step, if this step only scales, limits or decays.
    fn as_prologue(&self) -> Option<Prologue> {
        self.prologue.unwrap_or_default().then(self.kernel.as_prologue()?)
    }

    /// Runs the step over a block.
    fn run<T: Storable>(&self, isa: Isa, arrays: LaneArrays<'_, T>) {
        self.kernel
            .run(isa, self.prologue.as_ref(), &mut T::lanes(arrays));
    }
}

/// Where the result of the chain goes.
pub(super) type PassSink = Sink<Epilogue<DataPtr, DataPtr>, Reducer, DataPtr>;

/// A range of at least this length fetches ahead, and may start with a short block (`Pass::blocks`).
const LONG_RANGE: usize = 1 << 10;

/// How many blocks of [`BLOCK`] elements ahead a long range fetches. The hardware reads ahead only to the end
/// of a page, and not while a loop works in the first-level cache. Without these fetches, memory would be
/// idle while such a loop runs.
const AHEAD: usize = 4;

/// The most elements that are fetched at once. A step takes up to a quarter longer if a long block is fetched
/// at once.
const PIECE: usize = 2 * BLOCK;

/// Where arrays begin, each with the bytes of [`BLOCK`] elements, see [`Pass::streams`].
type Streams = SmallVec<[(*const u8, usize); 8]>;

/// Fetches memory for a later block. A long block fetches in pieces, one before each piece of its last step.
#[derive(Clone, Copy)]
struct Ahead<'s> {
    streams: &'s Streams,
    /// The first element that is fetched, and the first that is not.
    start: usize,
    end: usize,
    piece: usize,
}

impl<'s> Ahead<'s> {
    fn new(streams: &'s Streams, range: &Range<usize>, start: usize, block_length: usize) -> Self {
        // After a whole chunk the leaf may go on. A shorter range ends its leaf.
        let end = if range.len() < chunk_length(range.len()) {
            range.end
        } else {
            usize::MAX
        };
        Ahead {
            streams,
            start: start + AHEAD * block_length.min(BLOCK),
            end,
            piece: block_length.min(PIECE),
        }
    }

    /// Fetches the piece that begins `offset` elements after `start`. The piece may lie after the end of the
    /// range, because a fetch is a hint and accesses nothing.
    #[inline(always)]
    fn fetch(self, offset: usize) {
        if self.start + offset >= self.end {
            return;
        }
        for &(first, size) in self.streams {
            // In 64 bits, because the product may not fit into an address of 32 bits.
            let distance = (self.start + offset) as u64 * size as u64 / BLOCK as u64;
            prefetch_lines(first.wrapping_add(distance as usize), self.piece * size / BLOCK);
        }
    }

    /// Runs the last step of a block piece by piece, and fetches before each piece.
    fn run<T: Storable>(&self, step: &PassStep<'_>, isa: Isa, arrays: LaneArrays<'_, T>) {
        let LaneArrays { x, dx, out, slots } = arrays;
        let mut slots: List<*mut T> = list(slots.iter().copied());
        let mut out = out.map(|out| out.chunks_mut(self.piece));
        for (i, (x, dx)) in x.chunks_mut(self.piece).zip(dx.chunks(self.piece)).enumerate() {
            self.fetch(i * self.piece);
            let out = out.as_mut().and_then(Iterator::next);
            step.run(
                isa,
                LaneArrays {
                    x,
                    dx,
                    out,
                    slots: &slots,
                },
            );
            slots
                .iter_mut()
                .for_each(|slot| *slot = slot.wrapping_add(self.piece));
        }
    }
}

/// Memory of one thread for passes, kept between calls.
pub(super) struct PassScratch<T> {
    x: CacheLines<T>,
    dx: [CacheLines<T>; 2],
    /// For the sum of several gradients: a block for each level of pairs. Kahan's sum uses the first block.
    levels: Vec<CacheLines<T>>,
    slots: SlotScratch<T>,
    /// Row-major copies of gradients that lie by columns.
    bands: Vec<Vec<T>>,
}

/// Room for pointers to the slots of one step, and for copies of slots that cannot be used in place.
struct SlotScratch<T> {
    copies: Vec<CacheLines<T>>,
    pointers: Vec<*mut T>,
}

/// A compute type for which each thread has a [`PassScratch`].
pub(super) trait HasScratch: Storable {
    fn with_scratch<R>(run: impl FnOnce(&mut PassScratch<Self>) -> R) -> R;
}

macro_rules! scratched {
    ($($T:ty),*) => {$(
        impl HasScratch for $T {
            fn with_scratch<R>(run: impl FnOnce(&mut PassScratch<$T>) -> R) -> R {
                const EMPTY: CacheLines<$T> = CacheLines([0.0; LONGEST_BLOCK]);
                thread_local! {
                    static SCRATCH: RefCell<PassScratch<$T>> = const {
                        let slots = SlotScratch { copies: Vec::new(), pointers: Vec::new() };
                        RefCell::new(PassScratch { x: EMPTY, dx: [EMPTY; 2], levels: Vec::new(), slots, bands: Vec::new() })
                    };
                }
                SCRATCH.with_borrow_mut(run)
            }
        }
    )*};
}

scratched!(f32, f64);

impl Pass<'_> {
    /// Calls `run` with a pass over `range` in which gradients that lie by columns are row-major copies.
    ///
    /// # Safety
    /// All data must be locked and hold `range`, and `run` must not keep the pass.
    pub(super) unsafe fn with_row_major<T: HasScratch>(
        &self,
        range: &Range<usize>,
        run: impl FnOnce(&Pass<'_>),
    ) {
        // The bands are taken out, because `run` borrows the thread's scratch again and a second borrow
        // panics.
        let mut bands = T::with_scratch(|scratch| std::mem::take(&mut scratch.bands));
        bands.resize_with(bands.len().max(self.sources.len()), Vec::new);
        let sources = self.sources.iter().zip(&mut bands);
        // SAFETY: the caller promises that the gradients are locked and hold the range. The bands live until
        // `run` has returned.
        let sources = list(sources.map(|(source, band)| unsafe { source.row_major(self.isa, range, band) }));
        run(&Pass {
            isa: self.isa,
            x: self.x,
            sources,
            steps: self.steps.clone(),
            sink: self.sink,
        });
        T::with_scratch(|scratch| scratch.bands = bands);
    }

    /// Runs over the elements of `range`. Returns their total if the pass reduces, otherwise 0.
    ///
    /// # Safety
    /// All data must be locked and hold `range`; no other thread may run this leaf on an overlapping range.
    /// The only caller is `run_chunks_as` in `engine/cpu/mod.rs`. In that file, `write_leaf` and `read_view`
    /// name the checks.
    pub(super) unsafe fn run<T: HasScratch>(&self, range: Range<usize>) -> f64 {
        #[cfg(test)]
        super::traffic::count_pass(range.len());
        // SAFETY: the caller promises that all data is locked and holds the range, and that no other thread
        // runs the range.
        if unsafe { self.run_in_place::<T>(&range) }.is_some() {
            return 0.0;
        }
        T::with_scratch(|scratch| {
            // At least one level, because Kahan's sum keeps its carry there.
            let level_count = self.sources.len().next_power_of_two().ilog2().max(1) as usize;
            if scratch.levels.len() < level_count {
                scratch
                    .levels
                    .resize(level_count, CacheLines([T::zero(); LONGEST_BLOCK]));
            }
            let mut sums = [0.0; ACCUMULATORS];
            let block_length = self.record_block_length().unwrap_or(T::BLOCK);
            let streams = self.streams(&range);
            for Range { start, end } in self.blocks::<T>(&range, block_length) {
                let ahead = Ahead::new(&streams, &range, start, block_length);
                // A long block fetches in pieces while its last step runs.
                let in_pieces = block_length > PIECE && !streams.is_empty();
                if !in_pieces {
                    ahead.fetch(0);
                }
                let step_ahead = in_pieces.then_some(&ahead);
                // SAFETY: the block lies within the range (`blocks`), for which the caller promises the rest.
                unsafe { self.run_block::<T>(scratch, start, end - start, &mut sums, step_ahead) };
            }
            match self.sink {
                Sink::Reduce(reducer) => reducer.op.total(&sums),
                _ => 0.0,
            }
        })
    }

    /// Runs over the range in place if possible. Otherwise returns `None` and does nothing.
    ///
    /// A pass can run in place if the sink is `Subtract`, and x, the slots and the only gradient are
    /// contiguous and of the compute type.
    ///
    /// # Safety
    /// As [`Pass::run`].
    unsafe fn run_in_place<T: HasScratch>(&self, range: &Range<usize>) -> Option<()> {
        let (Sink::Write(Epilogue::Subtract), [source], [_, others @ ..]) =
            (self.sink, &self.sources[..], &self.steps[..])
        else {
            return None;
        };
        let (x, dx) = (T::elements_of(self.x)?, source.elements::<T>()?);
        let slots = self
            .steps
            .iter()
            .flat_map(|step| step.slots)
            .map(|&slot| T::elements_of(slot));
        let mut pointers = slots
            .map(|slot| Some(slot?.range(range.start, range.len())))
            .collect::<Option<List<_>>>()?;
        // A single step is one long loop, for which the hardware reads ahead.
        let (block_length, streams) = if others.is_empty() {
            (range.len(), Streams::new())
        } else {
            (T::BLOCK, self.streams(range))
        };
        T::with_scratch(|PassScratch { dx: buffers, .. }| {
            for Range { start, end } in self.blocks::<T>(range, block_length) {
                Ahead::new(&streams, range, start, T::BLOCK).fetch(0);
                // SAFETY: the caller promises that all data is locked and holds the range, and that no other
                // thread runs the range. The gradient does not lie in x: `Job::copy_shared` would have copied
                // it.
                let (x, dx) = unsafe { (x.update(start, end - start), dx.read(start, end - start)) };
                self.run_steps_in_place(x, dx, &pointers, buffers);
                pointers
                    .iter_mut()
                    .for_each(|slot| *slot = slot.wrapping_add(end - start));
            }
        });
        Some(())
    }

    /// Runs all steps over these elements. The last step subtracts its result from x. `slots` has the slots
    /// of all steps, one step after another.
    fn run_steps_in_place<T: Storable>(
        &self,
        x: &mut [T],
        dx: &[T],
        mut slots: &[*mut T],
        buffers: &mut [CacheLines<T>; 2],
    ) {
        let Some((last, others)) = self.steps.split_last() else {
            return;
        };
        // Two buffers take turns, because a step must not write the array that it reads.
        let [mut input, mut output] = buffers.each_mut().map(|buffer| &mut buffer.0);
        let mut gradient = Some(dx);
        for step in others {
            let (step_slots, rest) = slots.split_at(step.slots.len());
            slots = rest;
            let (dx, out) = (
                gradient.take().unwrap_or(&input[..x.len()]),
                Some(&mut output[..x.len()]),
            );
            step.run(
                self.isa,
                LaneArrays {
                    x,
                    dx,
                    out,
                    slots: step_slots,
                },
            );
            std::mem::swap(&mut input, &mut output);
        }
        let dx = gradient.unwrap_or_else(|| &input[..x.len()]);
        last.run(
            self.isa,
            LaneArrays {
                x,
                dx,
                out: None,
                slots,
            },
        );
    }

    /// Cuts the range into blocks of `block_length` elements. The first block of a long range may be shorter,
    /// so that the others start on a cache line.
    fn blocks<T: Storable>(
        &self,
        range: &Range<usize>,
        block_length: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<T> {
        let is_long = block_length > T::BLOCK || range.len() >= LONG_RANGE;
        let unaligned = if is_long {
            self.unaligned_elements::<T>(range.start)
        } else {
            0
        };
        let Range { mut start, end } = *range;
        let mut length = if unaligned > 0 { unaligned } else { block_length };
        std::iter::from_fn(move || {
            let block = start..end.min(start + length);
            (start, length) = (block.end, block_length);
            (!block.is_empty()).then_some(block)
        })
    }

    /// How many elements a block has, if an array is in records. The block has whole records, because a
    /// record is written whole. If state is in 8 bits, the block has all records that are encoded together,
    /// and so whole records of low bits, too.
    fn record_block_length(&self) -> Option<usize> {
        let has_codes =
            |step: &PassStep<'_>| step.slots.iter().any(|slot| matches!(slot, DataPtr::Coded(..)));
        let has_low_bits = matches!(self.x, DataPtr::Split(_, LowPtr::Records(_)));
        if self.steps.iter().any(has_codes) {
            Some(LONGEST_BLOCK)
        } else {
            has_low_bits.then_some(BLOCK)
        }
    }

    /// The arrays that a long range fetches ahead: for each, where the leaf's element 0 lies, and the bytes
    /// of [`BLOCK`] elements. Strided gradients are left out. A short range fetches nothing.
    fn streams(&self, range: &Range<usize>) -> Streams {
        if range.len() < LONG_RANGE {
            return Streams::new();
        }
        let slots = self.steps.iter().flat_map(|step| step.slots).copied();
        let x = (self.sink.writes_x() || !self.steps.is_empty()).then_some(self.x);
        let target = match self.sink {
            Sink::Write(Epilogue::Master(target) | Epilogue::Kahan(target)) | Sink::Copy(target) => {
                Some(target)
            }
            _ => None,
        };
        let data = self
            .sources
            .iter()
            .filter_map(StridedSource::data_from_zero)
            .chain(slots)
            .chain(x)
            .chain(target);
        data.flat_map(DataPtr::arrays)
            .filter(|(_, size)| *size > 0)
            .collect()
    }

    /// How many elements from `start` on come before the first element of x that begins a cache line.
    ///
    /// A vector across two lines takes two accesses, which costs up to a quarter of the speed. Only x is
    /// aligned, because allocators usually align all large arrays alike.
    fn unaligned_elements<T: Storable>(&self, start: usize) -> usize {
        match (T::elements_of(self.x), self.sink) {
            // A reduction starts with a full block, because the place in a chunk selects the accumulator.
            (_, Sink::Reduce(_)) | (None, _) => 0,
            // A shorter first block would end inside a record.
            _ if self.record_block_length().is_some() => 0,
            (Some(x), _) => x.skip(start).first().align_offset(64),
        }
    }

    /// Runs one block: gradient, x, each step, then the sink.
    ///
    /// # Safety
    /// As [`Pass::run`], for `start..start + length`, which is at most a block.
    unsafe fn run_block<T: HasScratch>(
        &self,
        scratch: &mut PassScratch<T>,
        start: usize,
        length: usize,
        sums: &mut [f64; ACCUMULATORS],
        ahead: Option<&Ahead<'_>>,
    ) {
        let PassScratch {
            x: x_copy,
            dx: [input, output],
            levels,
            slots,
            ..
        } = scratch;
        debug_assert!(length <= LONGEST_BLOCK);
        let (mut input, mut output) = (&mut input.0[..length], &mut output.0[..length]);
        // SAFETY: the caller promises the same of this block.
        let mut gradient = unsafe { self.gradient_in_place(start, length) };
        if gradient.is_none() {
            // SAFETY: the caller promises that the gradients are locked and hold the block.
            unsafe { read_sum(self.isa, &self.sources, start, input, levels) };
        }
        // SAFETY: the caller promises the same of this block.
        let (x, x_is_copy) = unsafe { self.x_or_copy(start, &mut x_copy.0[..length]) };

        let subtracts = self.subtracts();
        for (i, step) in self.steps.iter().enumerate() {
            let is_last = i + 1 == self.steps.len();
            let dx = gradient.take().unwrap_or(&*input);
            let out = if subtracts && is_last {
                None
            } else {
                Some(&mut *output)
            };
            let arrays = LaneArrays {
                x,
                dx,
                out,
                slots: &[],
            };
            // SAFETY: the caller promises the same of this block. A slot is a `Buffer` of its own.
            unsafe { self.run_step(step, start, arrays, slots, ahead.filter(|_| is_last)) };
            std::mem::swap(&mut input, &mut output);
        }
        let dx = gradient.unwrap_or(&*input);
        if subtracts && self.steps.is_empty() {
            subtract(self.isa, x, dx);
        }
        // The sink is matched by reference, because a copy in every block would wait for parts of the sink
        // that were just written and are still on their way to the cache.
        match &self.sink {
            Sink::Reduce(reducer) => reduce_block(self.isa, *reducer, dx, sums),
            // SAFETY: `copy_to` in `engine/cpu/mod.rs` has checked that the target has room for all elements,
            // and nothing else uses the target.
            Sink::Copy(target) => unsafe { store(self.isa, dx, *target, start) },
            Sink::Write(epilogue) => {
                let kahan_room = [output, &mut levels[0].0[..length]];
                // SAFETY: the caller promises the same of this block.
                unsafe { self.store_block(epilogue, start, x, x_is_copy, dx, kahan_room) }
            }
        }
    }

    /// Whether the last step subtracts its result from x. With Kahan's sum it does not, because the sum needs
    /// the result itself.
    #[inline(always)]
    fn subtracts(&self) -> bool {
        self.sink.writes_x() && !matches!(self.sink, Sink::Write(Epilogue::Kahan(_)))
    }

    /// The block's x and whether it is a copy. If the steps can write x where it lies, there is no copy.
    /// Otherwise, if the pass needs x, `copy` has x afterwards.
    ///
    /// # Safety
    /// As [`Pass::run_block`].
    #[inline(always)]
    unsafe fn x_or_copy<'x, T: Storable>(&self, start: usize, copy: &'x mut [T]) -> (&'x mut [T], bool) {
        if self.subtracts()
            && let Some(elements) = T::elements_of(self.x)
        {
            // SAFETY: the caller promises that x holds the block, is locked (for writing, as the sink writes
            // it), and that this thread alone runs the block.
            return (unsafe { elements.update(start, copy.len()) }, false);
        }
        if self.sink.writes_x() || !self.steps.is_empty() {
            // SAFETY: the caller promises that x is locked and holds the block.
            unsafe { load(self.isa, self.x, start, copy) };
        }
        (copy, true)
    }

    /// Stores a block's x and what the epilogue keeps. Kahan's sum computes in the two blocks of
    /// `kahan_room`.
    ///
    /// # Safety
    /// As [`Pass::run_block`].
    #[inline(always)]
    unsafe fn store_block<T: Storable>(
        &self,
        epilogue: &Epilogue<DataPtr, DataPtr>,
        start: usize,
        x: &mut [T],
        x_is_copy: bool,
        dx: &[T],
        [sum, carry]: [&mut [T]; 2],
    ) {
        // SAFETY: the caller promises that x and parameter hold the block and are locked. What the epilogue
        // writes is locked for writing: `write_leaf` in `engine/cpu/mod.rs` lends that memory for writing.
        unsafe {
            match *epilogue {
                Epilogue::StateOnly => {}
                Epilogue::Subtract if !x_is_copy => {}
                Epilogue::Subtract => store(self.isa, x, self.x, start),
                // Such an x has 16 bits, so x is always a copy.
                Epilogue::Stochastic(key) => store_at_random(self.isa, x, self.x, start, key),
                Epilogue::Master(parameter) => {
                    if x_is_copy {
                        // The master is read back, because the parameter must be rounded from the stored
                        // master, not from the wider number before.
                        store(self.isa, x, self.x, start);
                        load(self.isa, self.x, start, x);
                    }
                    store(self.isa, x, parameter, start);
                }
                Epilogue::Kahan(compensation) => self.store_kahan_sum(start, x, dx, sum, carry, compensation),
            }
        }
    }

    /// Stores Kahan's sum of x - dx, which includes what the last stored sum lacks.
    ///
    /// ```text
    /// carry = compensation - dx;  x' = round(x + carry);  compensation' = round(carry - (x' - x))
    /// ```
    ///
    /// # Safety
    /// As [`Pass::run_block`].
    unsafe fn store_kahan_sum<T: Storable>(
        &self,
        start: usize,
        x: &[T],
        dx: &[T],
        sum: &mut [T],
        carry: &mut [T],
        compensation: DataPtr,
    ) {
        if let (DataPtr::Bf16(parameter), DataPtr::Bf16(compensation)) = (self.x, compensation) {
            // SAFETY: the caller promises the same of this block. Parameter and state are distinct, as the
            // state is a `Buffer` of its own.
            let (parameter, compensation) = unsafe {
                (
                    parameter.write(start, x.len()),
                    compensation.update(start, x.len()),
                )
            };
            return compensate_bf16(self.isa, x, dx, parameter, compensation);
        }
        // SAFETY: the caller promises that parameter and compensation hold the block and are locked for
        // writing, and that this thread alone runs the block.
        unsafe {
            load(self.isa, compensation, start, carry);
            subtract(self.isa, carry, dx);
            sum.copy_from_slice(x);
            add(self.isa, sum, carry);
            store(self.isa, sum, self.x, start);
            load(self.isa, self.x, start, sum);
        }
        for ((carry, stored), x) in carry.iter_mut().zip(&*sum).zip(x) {
            // If the sum is infinite, the compensation is 0. Otherwise the difference would be infinite as
            // well, and the next sum NaN.
            *carry = if stored.is_finite() {
                *carry - (*stored - *x)
            } else {
                T::zero()
            };
        }
        // SAFETY: the caller promises that the compensation holds the block, and that this thread alone runs
        // the block.
        unsafe {
            store(self.isa, carry, compensation, start);
        }
    }

    /// The block's gradient where it lies, if it is the only one, contiguous and of the compute type.
    ///
    /// # Safety
    /// As [`Pass::run_block`].
    unsafe fn gradient_in_place<T: Storable>(&self, start: usize, length: usize) -> Option<&[T]> {
        let [source] = &self.sources[..] else { return None };
        let elements = source.elements::<T>()?;
        // SAFETY: the caller promises that the gradient is locked for reading and holds the block. The
        // gradient lies in nothing that is written: `Job::copy_shared` would have copied it.
        Some(unsafe { elements.read(start, length) })
    }

    /// Runs one step. Slots that cannot be used in place are copied. If the pass writes state, the copies are
    /// stored. `ahead` is given for the last step of a long block.
    ///
    /// # Safety
    /// As [`Pass::run_block`].
    unsafe fn run_step<T: Storable>(
        &self,
        step: &PassStep<'_>,
        start: usize,
        arrays: LaneArrays<'_, T>,
        SlotScratch { copies, pointers }: &mut SlotScratch<T>,
        ahead: Option<&Ahead<'_>>,
    ) {
        let length = arrays.dx.len();
        let read_only = !self.sink.writes_state();
        // If a pass only reads, all slots are copied, because the loop of a step writes its slots.
        let in_place = |data: DataPtr| if read_only { None } else { T::elements_of(data) };
        if copies.len() < step.slots.len() {
            copies.resize(step.slots.len(), CacheLines([T::zero(); LONGEST_BLOCK]));
        }
        let mut has_copies = false;
        pointers.clear();
        for (&data, copy) in step.slots.iter().zip(&mut *copies) {
            pointers.push(
                in_place(data)
                    .map(|slot| slot.range(start, length))
                    .unwrap_or_else(|| {
                        has_copies = true;
                        // SAFETY: the slot holds the block, as it has as many elements as x (`Job::check`), and
                        // nobody else has the state.
                        unsafe { load(self.isa, data, start, &mut copy.0[..length]) };
                        copy.0.as_mut_ptr()
                    }),
            );
        }
        let arrays = LaneArrays {
            slots: pointers,
            ..arrays
        };
        match ahead {
            Some(ahead) => ahead.run(step, self.isa, arrays),
            None => step.run(self.isa, arrays),
        }
        if read_only || !has_copies {
            return;
        }
        for (&data, copy) in step
            .slots
            .iter()
            .zip(&*copies)
            .filter(|(data, _)| in_place(**data).is_none())
        {
            // SAFETY: the slot holds the block, as it has as many elements as x (`Job::check`), and
            // `write_leaf` in `engine/cpu/mod.rs` has borrowed the state to write it.
            unsafe { store(self.isa, &copy.0[..length], data, start) };
        }
    }
}
