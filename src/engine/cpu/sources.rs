//! The gradients of a leaf, of any layout, and their sum. `unsafe`: raw storage pointers.
#![allow(unsafe_code)]

use half::bf16;

use super::convert::{Storable, gather, load, sum_bf16};
use super::storage::{DataPtr, Elements, lent};
use crate::engine::Isa;
use crate::engine::kernel::{BLOCK, add, halves};
use crate::model::lent::View;
use crate::numbers::codes;

/// The most elements of a block: where state is in 8 bits, as many as are encoded together.
pub(super) const LONGEST: usize = codes::TOGETHER * codes::BLOCK;

// All blocks fit.
const _: () = assert!(BLOCK <= LONGEST);

/// A block of elements on a cache line of its own, so that no vector crosses two.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct CacheLines<T>(pub(super) [T; LONGEST]);

/// A gradient of any layout.
pub(super) struct StridedSource<'p> {
    /// The first element.
    data: DataPtr,
    /// Dimensions and strides, unless the others follow in order.
    strides: Option<(&'p [usize], &'p [usize])>,
    /// Which of the leaf's elements is the first.
    first: usize,
}

impl<'p> StridedSource<'p> {
    pub(super) fn new(view: View<'p>, first: usize) -> Self {
        StridedSource { data: lent(view.memory()), strides: view.strides(), first }
    }

    /// Data whose first element is the leaf's, with the others in order.
    pub(super) fn in_order(data: DataPtr) -> Self {
        StridedSource { data, strides: None, first: 0 }
    }

    /// Where the leaf's element 0 lies or would lie, if they are in order.
    pub(super) fn in_order_from_zero(&self) -> Option<DataPtr> {
        if self.strides.is_none() { Some(self.data.skip(0usize.wrapping_sub(self.first))) } else { None }
    }

    /// The leaf's elements from 0 on where they lie or would lie, if they are in order and of this type.
    pub(super) fn in_place<T: Storable>(&self) -> Option<Elements<T>> {
        T::same(self.in_order_from_zero()?)
    }

    /// The leaf's elements `start..start + length` where they lie, if they are in order and of this dtype.
    ///
    /// # Safety
    /// As [`StridedSource::read`].
    unsafe fn bf16(&self, start: usize, length: usize) -> Option<&[bf16]> {
        let DataPtr::Bf16(data) = self.in_order_from_zero()? else { return None };
        // SAFETY: the caller promises that the data is locked and holds the range (`with_read`).
        Some(unsafe { data.read(start, length) })
    }

    /// Reads the leaf's elements `start..start + dst.len()` in row-major order.
    ///
    /// # Safety
    /// The range must lie within the layout's shape, counted from `first` on, and the data must be locked (by
    /// `with_read`).
    unsafe fn read<T: Storable>(&self, isa: Isa, start: usize, dst: &mut [T]) {
        let start = start - self.first;
        let Some((dims, strides)) = self.strides else {
            // SAFETY: the caller promises that the range lies within the leaf. `with_read` has checked that
            // as many elements are lent.
            return unsafe { load(isa, self.data, start, dst) };
        };
        let (Some((&columns, rows)), Some((&stride, row_strides))) = (dims.split_last(), strides.split_last()) else { return };
        let mut done = 0;
        while done < dst.len() {
            let (mut row, column) = ((start + done) / columns, (start + done) % columns);
            let run = (columns - column).min(dst.len() - done);
            let mut offset = column * stride;
            for (&dim, &stride) in rows.iter().zip(row_strides).rev() {
                offset += row % dim * stride;
                row /= dim;
            }
            let dst = &mut dst[done..done + run];
            // SAFETY: the offsets are those of elements of the view. `View::strided` has checked that these
            // lie within its numbers.
            unsafe {
                match stride {
                    1 => load(isa, self.data, offset, dst),
                    _ => gather(self.data, (0..run).map(|i| offset + i * stride), dst),
                }
            }
            done += run;
        }
    }
}

/// Reads the sum of gradients, widened; `more` has room for each level of pairs.
///
/// # Safety
/// As [`StridedSource::read`], for each of them.
pub(super) unsafe fn read_sum<T: Storable>(
    isa: Isa,
    sources: &[StridedSource<'_>],
    start: usize,
    dst: &mut [T],
    more: &mut [CacheLines<T>],
) {
    if let [a, b] = sources
        // SAFETY: the caller promises for each source what `StridedSource::read` needs.
        && let (Some(a), Some(b)) = unsafe { (a.bf16(start, dst.len()), b.bf16(start, dst.len())) }
    {
        return sum_bf16(isa, a, b, dst);
    }
    match sources {
        [] => dst.fill(T::zero()),
        // SAFETY: the caller promises for each source what `StridedSource::read` needs.
        [one] => unsafe { one.read(isa, start, dst) },
        _ => {
            let (before, behind) = halves(sources);
            let Some((CacheLines(sum), more)) = more.split_first_mut() else { return };
            // SAFETY: the caller promises for each source what `StridedSource::read` needs.
            unsafe {
                read_sum(isa, before, start, dst, more);
                read_sum(isa, behind, start, &mut sum[..dst.len()], more);
            }
            add(isa, dst, &sum[..dst.len()]);
        }
    }
}
