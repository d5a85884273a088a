//! One pass over one leaf (a parameter with its state): reads gradient, parameter and state, runs the chain
//! of steps, and writes the result. `unsafe`: raw storage pointers.
//!
//! Every array should come from memory only once, although each step is a loop of its own over the compute
//! type. So a pass works on blocks that stay in the first-level cache:
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
//!     sink: store x and what the epilogue keeps, or reduce dx, or copy dx  (block)
//! ```
//!
//! 1. A sum starts with a full block, because the place of an element in its chunk selects the accumulator.
//! 2. If something is in records of 128 elements, a block has whole records, because a record is written
//!    whole, and by one thread.
//! 3. With Kahan's sum the last step does not subtract from x, because the sum needs the old x and dx.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use smallvec::SmallVec;

use super::convert::{Storable, compensate_bf16, load, store, store_at_random};
use super::pointers::{DataPtr, List, LowPtr, list};
use super::prefetch::lines;
use super::sources::{CacheLines, LONGEST, StridedSource, read_sum};
use crate::engine::Isa;
use crate::engine::kernel::{
    ACCUMULATORS, BLOCK, Kernel, LaneArrays, Reducer, add, chunk_length, join_accumulators, reduce_block,
    subtract,
};
use crate::engine::plan::{Epilogue, Link, Sink};
use crate::numbers::codes;
use crate::numbers::value::Prologue;

// So that blocks of f32 begin where records do.
const _: () = assert!(BLOCK == codes::BLOCK);

/// The work on one leaf, with pointers into locked memory.
pub(super) struct Pass<'p> {
    pub(super) isa: Isa,
    pub(super) x: DataPtr,
    pub(super) sources: List<StridedSource<'p>>,
    /// Most chains become a single step, with all others in its prologue.
    pub(super) steps: SmallVec<[PassStep<'p>; 1]>,
    pub(super) sink: PassSink,
}

/// One step of the chain with its slots. Its loop also does the steps before it that became `prologue`.
#[derive(Clone, Copy)]
pub(super) struct PassStep<'p> {
    kernel: &'p dyn Kernel,
    slots: &'p [DataPtr],
    prologue: Option<Prologue>,
}

impl<'p> PassStep<'p> {
    /// The steps of a chain. A scale, limit or decay becomes part of the next step's loop, if that takes it.
    /// `slots` are those of all steps, one step after another.
    pub(super) fn chain(
        links: impl Iterator<Item = Link<'p>>,
        mut slots: &'p [DataPtr],
    ) -> SmallVec<[Self; 1]> {
        let mut steps = SmallVec::<[Self; 1]>::new();
        for Link { kernel, slots: own } in links {
            let (own, rest) = slots.split_at(own.len());
            slots = rest;
            let mut prologue = None;
            // From the nearest step backwards. A loop scales, then limits, then decays. So the first step
            // that breaks this order, or does something else, keeps a loop of its own.
            while kernel.takes_prologue()
                && let Some(before) = steps.last().and_then(PassStep::as_prologue)
                && let Some(longer) = before.then(prologue.unwrap_or_default())
            {
                prologue = Some(longer);
                steps.pop();
            }
            steps.push(PassStep { kernel, slots: own, prologue });
        }
        steps
    }

    /// This step as part of the next step's loop, if it only scales, limits or decays.
    fn as_prologue(&self) -> Option<Prologue> {
        self.prologue.unwrap_or_default().then(self.kernel.as_prologue()?)
    }

    /// Runs over a block.
    fn run<T: Storable>(&self, isa: Isa, arrays: LaneArrays<'_, T>) {
        self.kernel.run(isa, self.prologue.as_ref(), &mut T::lanes(arrays));
    }
}

/// Where the result of the chain goes.
pub(super) type PassSink = Sink<Epilogue<DataPtr, DataPtr>, Reducer, DataPtr>;

/// From this length on a range in blocks fetches ahead, and starts with a short block (`Pass::blocks`).
const LONG: usize = 1 << 10;

/// How many blocks of [`BLOCK`] elements ahead a long range fetches. The hardware reads ahead only to the end
/// of a page, and not while a loop works in the first-level cache. Without these fetches, memory would be
/// idle in the meantime.
const AHEAD: usize = 4;

/// The most elements that are fetched at once. If a long block is fetched at once, a step takes up to a
/// quarter longer.
const PIECE: usize = 2 * BLOCK;

/// Arrays, each with the bytes of [`BLOCK`] elements, see [`Pass::streams`].
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
    fn new(streams: &'s Streams, range: &Range<usize>, start: usize, at_once: usize) -> Self {
        // The next chunk follows a whole one. A shorter range is the end of a leaf.
        let end = if range.len() < chunk_length(range.len()) { range.end } else { usize::MAX };
        Ahead { streams, start: start + AHEAD * at_once.min(BLOCK), end, piece: at_once.min(PIECE) }
    }

    /// Fetches the piece that is `done` elements further on. It may lie after the end of the range, because a
    /// fetch is a hint and accesses nothing.
    #[inline(always)]
    fn fetch(self, done: usize) {
        if self.start + done >= self.end {
            return;
        }
        for &(first, size) in self.streams {
            lines(first.wrapping_add((self.start + done) * size / BLOCK), self.piece * size / BLOCK);
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
            step.run(isa, LaneArrays { x, dx, out, slots: &slots });
            slots.iter_mut().for_each(|slot| *slot = slot.wrapping_add(self.piece));
        }
    }
}

/// Per-thread memory of a pass, kept between calls.
pub(super) struct PassScratch<T> {
    x: CacheLines<T>,
    dx: [CacheLines<T>; 2],
    /// For the sum of several gradients: one for each level of pairs. Kahan's sum uses the first.
    more: Vec<CacheLines<T>>,
    stage: Stage<T>,
    /// Row-major copies of gradients that lie by columns.
    bands: Vec<Vec<T>>,
}

/// The slots of one step, and copies of the slots that cannot be used in place.
struct Stage<T> {
    copies: Vec<CacheLines<T>>,
    slots: Vec<*mut T>,
}

/// A compute type with a scratch per thread.
pub(super) trait HasScratch: Storable {
    fn with_scratch<R>(run: impl FnOnce(&mut PassScratch<Self>) -> R) -> R;
}

macro_rules! scratched {
    ($($T:ty),*) => {$(
        impl HasScratch for $T {
            fn with_scratch<R>(run: impl FnOnce(&mut PassScratch<$T>) -> R) -> R {
                const EMPTY: CacheLines<$T> = CacheLines([0.0; LONGEST]);
                thread_local! {
                    static SCRATCH: RefCell<PassScratch<$T>> = const {
                        let stage = Stage { copies: Vec::new(), slots: Vec::new() };
                        RefCell::new(PassScratch { x: EMPTY, dx: [EMPTY; 2], more: Vec::new(), stage, bands: Vec::new() })
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
    pub(super) unsafe fn by_rows<T: HasScratch>(&self, range: &Range<usize>, run: impl FnOnce(&Pass<'_>)) {
        // Taken out, because `run` borrows the thread's scratch again and a second borrow panics.
        let mut bands = T::with_scratch(|scratch| std::mem::take(&mut scratch.bands));
        bands.resize_with(bands.len().max(self.sources.len()), Vec::new);
        let sources = self.sources.iter().zip(&mut bands);
        // SAFETY: the caller promises that the gradients are locked and hold the range. The bands live until
        // `run` has returned.
        let sources = list(sources.map(|(source, band)| unsafe { source.by_rows(self.isa, range, band) }));
        run(&Pass { isa: self.isa, x: self.x, sources, steps: self.steps.clone(), sink: self.sink });
        T::with_scratch(|scratch| scratch.bands = bands);
    }

    /// Runs over the elements of `range`. Returns their total if the pass reduces, otherwise 0.
    ///
    /// # Safety
    /// All data must be locked and hold `range`; no other thread may run this leaf on an overlapping range.
    /// The only caller is `over_in` in `engine/cpu/mod.rs`. There, `write` and `read` name the checks.
    pub(super) unsafe fn run<T: HasScratch>(&self, range: Range<usize>) -> f64 {
        #[cfg(test)]
        super::traffic::note_pass(range.len());
        // SAFETY: the caller promises that all data is locked and holds the range, and that no other thread
        // runs it.
        if unsafe { self.run_in_place::<T>(&range) }.is_some() {
            return 0.0;
        }
        T::with_scratch(|scratch| {
            // At least one level, because Kahan's sum keeps its carry there.
            let levels = self.sources.len().next_power_of_two().ilog2().max(1) as usize;
            if scratch.more.len() < levels {
                scratch.more.resize(levels, CacheLines([T::zero(); LONGEST]));
            }
            let mut sums = [0.0; ACCUMULATORS];
            let at_once = self.block_of_records().unwrap_or(T::BLOCK);
            let streams = self.streams(&range);
            for Range { start, end } in self.blocks::<T>(&range, at_once) {
                let ahead = Ahead::new(&streams, &range, start, at_once);
                // A long block fetches while its last step runs.
                let later = at_once > PIECE && !streams.is_empty();
                if !later {
                    ahead.fetch(0);
                }
                // SAFETY: the block lies within the range (`blocks`), for which the caller promises the rest.
                unsafe { self.block::<T>(scratch, start, end - start, &mut sums, later.then_some(&ahead)) };
            }
            match self.sink {
                Sink::Reduce(reducer) => join_accumulators(reducer.op, &sums),
                _ => 0.0,
            }
        })
    }

    /// Runs over the range if x, the slots and the only gradient are contiguous and of the compute type.
    /// Otherwise returns `None` and has done nothing.
    ///
    /// # Safety
    /// As [`Pass::run`].
    unsafe fn run_in_place<T: HasScratch>(&self, range: &Range<usize>) -> Option<()> {
        let (Sink::Write(Epilogue::Subtract), [source], [_, others @ ..]) =
            (self.sink, &self.sources[..], &self.steps[..])
        else {
            return None;
        };
        let (x, dx) = (T::same(self.x)?, source.in_place::<T>()?);
        let slots = self.steps.iter().flat_map(|step| step.slots).map(|&slot| T::same(slot));
        let mut slots =
            slots.map(|slot| Some(slot?.range(range.start, range.len()))).collect::<Option<List<_>>>()?;
        // A single step is one long loop, for which the hardware reads ahead.
        let (at_once, streams) =
            if others.is_empty() { (range.len(), Streams::new()) } else { (T::BLOCK, self.streams(range)) };
        T::with_scratch(|PassScratch { dx: buffers, .. }| {
            for Range { start, end } in self.blocks::<T>(range, at_once) {
                Ahead::new(&streams, range, start, T::BLOCK).fetch(0);
                // SAFETY: the caller promises that all data is locked and holds the range, and that no other
                // thread runs it. The gradient does not lie in x: `Job::copy_shared` would have copied it.
                let (x, dx) = unsafe { (x.update(start, end - start), dx.read(start, end - start)) };
                self.steps_in_place(x, dx, &slots, buffers);
                slots.iter_mut().for_each(|slot| *slot = slot.wrapping_add(end - start));
            }
        });
        Some(())
    }

    /// Runs all steps over the same elements. The last one subtracts its result from x. `slots` are those of
    /// all steps, one step after another.
    fn steps_in_place<T: Storable>(
        &self,
        x: &mut [T],
        dx: &[T],
        mut slots: &[*mut T],
        buffers: &mut [CacheLines<T>; 2],
    ) {
        let Some((last, others)) = self.steps.split_last() else { return };
        // Two buffers take turns, because a step must not write the array that it reads.
        let [mut input, mut output] = buffers.each_mut().map(|buffer| &mut buffer.0);
        let mut gradient = Some(dx);
        for step in others {
            let (own, rest) = slots.split_at(step.slots.len());
            slots = rest;
            let (dx, out) = (gradient.take().unwrap_or(&input[..x.len()]), Some(&mut output[..x.len()]));
            step.run(self.isa, LaneArrays { x, dx, out, slots: own });
            std::mem::swap(&mut input, &mut output);
        }
        let dx = gradient.unwrap_or_else(|| &input[..x.len()]);
        last.run(self.isa, LaneArrays { x, dx, out: None, slots });
    }

    /// Cuts the range into blocks of `at_once` elements. The first block of a long range may be shorter, so
    /// that the others start on a cache line.
    fn blocks<T: Storable>(
        &self,
        range: &Range<usize>,
        at_once: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<T> {
        let unaligned =
            if at_once > T::BLOCK || range.len() >= LONG { self.to_cache_line::<T>(range.start) } else { 0 };
        let Range { mut start, end } = *range;
        let mut length = if unaligned > 0 { unaligned } else { at_once };
        std::iter::from_fn(move || {
            let block = start..end.min(start + length);
            (start, length) = (block.end, at_once);
            (!block.is_empty()).then_some(block)
        })
    }

    /// The elements of a block, if something is in records: whole records, because a record is written whole,
    /// and all that are encoded together, if state is in 8 bits. A block for codes has whole records of low bits,
    /// too.
    fn block_of_records(&self) -> Option<usize> {
        let has_codes =
            |step: &PassStep<'_>| step.slots.iter().any(|slot| matches!(slot, DataPtr::Coded(..)));
        let has_low_bits = matches!(self.x, DataPtr::Split(_, LowPtr::Records(_)));
        if self.steps.iter().any(has_codes) { Some(LONGEST) } else { has_low_bits.then_some(BLOCK) }
    }

    /// The arrays that a long range fetches ahead: where the leaf's element 0 lies, and the bytes of
    /// [`BLOCK`] elements. A short range fetches none. Strided gradients are left out.
    fn streams(&self, range: &Range<usize>) -> Streams {
        if range.len() < LONG {
            return Streams::new();
        }
        let slots = self.steps.iter().flat_map(|step| step.slots).copied();
        let x = (self.sink.writes_x() || !self.steps.is_empty()).then_some(self.x);
        let other = match self.sink {
            Sink::Write(Epilogue::Master(other) | Epilogue::Kahan(other)) | Sink::Copy(other) => Some(other),
            _ => None,
        };
        let all = self
            .sources
            .iter()
            .filter_map(StridedSource::in_order_from_zero)
            .chain(slots)
            .chain(x)
            .chain(other);
        all.flat_map(DataPtr::arrays).filter(|(_, size)| *size > 0).collect()
    }

    /// How many elements from `start` on come before the first one of x that begins a cache line.
    ///
    /// A vector across two lines is two accesses, which costs up to a quarter of the speed. Only x is looked
    /// at, because allocators usually place other large arrays alike.
    fn to_cache_line<T: Storable>(&self, start: usize) -> usize {
        match (T::same(self.x), self.sink) {
            // A sum starts with a full block, because the place in a chunk selects the accumulator.
            (_, Sink::Reduce(_)) | (None, _) => 0,
            // Otherwise a block would end inside a record.
            _ if self.block_of_records().is_some() => 0,
            (Some(x), _) => x.skip(start).first().align_offset(64),
        }
    }

    /// Runs one block: gradient, x, each step, then the sink.
    ///
    /// # Safety
    /// As [`Pass::run`], for `start..start + length`, with at most a block.
    unsafe fn block<T: HasScratch>(
        &self,
        scratch: &mut PassScratch<T>,
        start: usize,
        length: usize,
        sums: &mut [f64; ACCUMULATORS],
        ahead: Option<&Ahead<'_>>,
    ) {
        let PassScratch { x: x_copy, dx: [input, output], more, stage, .. } = scratch;
        debug_assert!(length <= LONGEST);
        let (mut input, mut output) = (&mut input.0[..length], &mut output.0[..length]);
        // SAFETY: the caller promises the same of this block.
        let mut in_place = unsafe { self.gradient_in_place(start, length) };
        if in_place.is_none() {
            // SAFETY: the caller promises that the gradients are locked and hold the block.
            unsafe { read_sum(self.isa, &self.sources, start, input, more) };
        }

        let writes_x = self.sink.writes_x();
        // The last step subtracts its result from x, except for Kahan's sum, which needs that result.
        let subtracts = writes_x && !matches!(self.sink, Sink::Write(Epilogue::Kahan(_)));
        let direct = if subtracts { T::same(self.x) } else { None };
        let x: &mut [T] = match direct {
            // SAFETY: the caller promises that x holds the block, is locked (for writing, as the sink writes
            // it), and that this thread alone runs the block.
            Some(elements) => unsafe { elements.update(start, length) },
            None => &mut x_copy.0[..length],
        };
        if direct.is_none() && (writes_x || !self.steps.is_empty()) {
            // SAFETY: the caller promises that x is locked and holds the block.
            unsafe { load(self.isa, self.x, start, x) };
        }

        for (i, step) in self.steps.iter().enumerate() {
            let last = subtracts && i + 1 == self.steps.len();
            let dx = in_place.take().unwrap_or(&*input);
            let out = if last { None } else { Some(&mut *output) };
            let (arrays, ahead) =
                (LaneArrays { x, dx, out, slots: &[] }, ahead.filter(|_| i + 1 == self.steps.len()));
            // SAFETY: the caller promises the same of this block. A slot is a `Buffer` of its own.
            unsafe { self.step(step, start, arrays, stage, ahead) };
            std::mem::swap(&mut input, &mut output);
        }
        let dx = in_place.unwrap_or(&*input);
        if subtracts && self.steps.is_empty() {
            subtract(self.isa, x, dx);
        }
        // By reference. A copy in every block would wait for parts of the sink that were just written and are
        // still on their way to the cache.
        let epilogue = match &self.sink {
            Sink::Reduce(reducer) => return reduce_block(self.isa, *reducer, dx, sums),
            // SAFETY: `copy_to` in `engine/cpu/mod.rs` has checked that the target has room for all elements,
            // and nothing else uses it.
            Sink::Copy(target) => return unsafe { store(self.isa, dx, *target, start) },
            Sink::Write(epilogue) => epilogue,
        };
        // SAFETY: the caller promises that x and parameter hold the block and are locked. What the epilogue
        // writes is locked for writing: `write` in `engine/cpu/mod.rs` makes the list of locks from it.
        unsafe {
            match *epilogue {
                Epilogue::StateOnly => {}
                Epilogue::Subtract if direct.is_some() => {}
                Epilogue::Subtract => store(self.isa, x, self.x, start),
                // x has 16 bits here, so it is never in place.
                Epilogue::Stochastic(key) => store_at_random(self.isa, x, self.x, start, key),
                Epilogue::Master(parameter) => {
                    if direct.is_none() {
                        // Read back, because the parameter must be the stored master rounded, not the wider
                        // number that the master was rounded from.
                        store(self.isa, x, self.x, start);
                        load(self.isa, self.x, start, x);
                    }
                    store(self.isa, x, parameter, start);
                }
                Epilogue::Kahan(compensation) => {
                    self.compensated(start, x, dx, output, &mut more[0].0[..length], compensation)
                }
            }
        }
    }

    /// Kahan's summation of x - dx, with what the last stored sum lacks.
    ///
    /// ```text
    /// carry = compensation - dx;  x' = round(x + carry);  compensation' = round(carry - (x' - x))
    /// ```
    ///
    /// # Safety
    /// As [`Pass::block`].
    unsafe fn compensated<T: Storable>(
        &self,
        start: usize,
        x: &[T],
        dx: &[T],
        sum: &mut [T],
        carry: &mut [T],
        compensation: DataPtr,
    ) {
        if let (DataPtr::Bf16(low), DataPtr::Bf16(compensation)) = (self.x, compensation) {
            // SAFETY: the caller promises the same of this block. Parameter and state are distinct, as the
            // state is a `Buffer` of its own.
            let (low, compensation) =
                unsafe { (low.write(start, x.len()), compensation.update(start, x.len())) };
            return compensate_bf16(self.isa, x, dx, low, compensation);
        }
        // SAFETY: the caller promises that parameter and compensation hold the block, are locked for writing,
        // and that this thread alone runs it.
        unsafe {
            load(self.isa, compensation, start, carry);
            subtract(self.isa, carry, dx);
            sum.copy_from_slice(x);
            add(self.isa, sum, carry);
            store(self.isa, sum, self.x, start);
            load(self.isa, self.x, start, sum);
        }
        for ((carry, stored), x) in carry.iter_mut().zip(&*sum).zip(x) {
            // 0 after an infinite sum, because the difference would be infinite as well, and the next sum
            // NaN.
            *carry = if stored.is_finite() { *carry - (*stored - *x) } else { T::zero() };
        }
        // SAFETY: the caller promises that the compensation holds the block and that this thread alone runs
        // it.
        unsafe {
            store(self.isa, carry, compensation, start);
        }
    }

    /// The block's gradient where it lies, if it is the only one, contiguous and of the compute type.
    ///
    /// # Safety
    /// As [`Pass::block`].
    unsafe fn gradient_in_place<T: Storable>(&self, start: usize, length: usize) -> Option<&[T]> {
        let [source] = &self.sources[..] else { return None };
        let elements = source.in_place::<T>()?;
        // SAFETY: the caller promises that the gradient is locked for reading and holds the block. It lies in
        // nothing that is written: `Job::copy_shared` would have copied it.
        Some(unsafe { elements.read(start, length) })
    }

    /// Runs one step. Slots that cannot be used in place are copied, and stored if the pass writes state.
    /// `ahead` is given for the last step of a long block.
    ///
    /// # Safety
    /// As [`Pass::block`].
    unsafe fn step<T: Storable>(
        &self,
        step: &PassStep<'_>,
        start: usize,
        arrays: LaneArrays<'_, T>,
        Stage { copies, slots }: &mut Stage<T>,
        ahead: Option<&Ahead<'_>>,
    ) {
        let length = arrays.dx.len();
        let read_only = !self.sink.writes_state();
        // All slots of a pass that only reads go through copies, because the loop of a step writes its slots.
        let in_place = |data: DataPtr| if read_only { None } else { T::same(data) };
        if copies.len() < step.slots.len() {
            copies.resize(step.slots.len(), CacheLines([T::zero(); LONGEST]));
        }
        let mut is_staged = false;
        slots.clear();
        for (&data, copy) in step.slots.iter().zip(&mut *copies) {
            slots.push(in_place(data).map(|slot| slot.range(start, length)).unwrap_or_else(|| {
                is_staged = true;
                // SAFETY: the slot holds the block, as it has as many elements as x (`Job::check`), and
                // nobody else has the state.
                unsafe { load(self.isa, data, start, &mut copy.0[..length]) };
                copy.0.as_mut_ptr()
            }));
        }
        let arrays = LaneArrays { slots, ..arrays };
        match ahead {
            Some(ahead) => ahead.run(step, self.isa, arrays),
            None => step.run(self.isa, arrays),
        }
        if read_only || !is_staged {
            return;
        }
        for (&data, copy) in step.slots.iter().zip(&*copies).filter(|(data, _)| in_place(**data).is_none()) {
            // SAFETY: the slot holds the block, as it has as many elements as x (`Job::check`), and `write`
            // in `engine/cpu/mod.rs` has borrowed the state to write it.
            unsafe { store(self.isa, &copy.0[..length], data, start) };
        }
    }
}
