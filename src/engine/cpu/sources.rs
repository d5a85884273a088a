//! The gradients of a leaf, of any layout, and their sum. `unsafe`: raw storage pointers.
//!
//! A gradient that lies by columns, as a transposed one does, is difficult. If it were read row by row, each
//! element would cost a cache line, and often a page. So a thread first copies a range of the gradient into
//! memory of its own:
//!
//! ```text
//! for each tile of 16 columns, 64 rows:                      (read_tiles)
//!     for each column:  fetch the column that is 16 further on
//!                       load the 64 numbers of this column, which are neighbours
//!     for each row:     write the 16 numbers of this row, a cache line of f32
//! ```
//!
//! The order of elements does not change, so no bit of a sum changes.
#![allow(unsafe_code)]

use std::ops::Range;

use half::bf16;

use super::convert::{Storable, gather, load, sum_bf16};
use super::prefetch::lines;
use super::storage::{DataPtr, Elements, lent};
use crate::engine::Isa;
use crate::engine::kernel::{BLOCK, add, halves};
use crate::model::lent::View;
use crate::numbers::{codes, place_of};

/// The most elements of a block: the number that is encoded together if state is in 8 bits.
pub(super) const LONGEST: usize = codes::TOGETHER * codes::BLOCK;

const _: () = assert!(BLOCK <= LONGEST);

/// Room for a block, aligned so that no vector crosses two cache lines.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct CacheLines<T>(pub(super) [T; LONGEST]);

/// The rows and columns of a tile. A row is one cache line of f32. A column is four, because it is usually on
/// a page of its own, and to find a page takes longer than to fetch the next line.
const TILE: (usize, usize) = (64, 16);

/// The most elements that a thread copies in order at once. More would use more of each page, but take more
/// memory in each thread.
const BAND: usize = 1 << 19;

/// A gradient of any layout.
pub(super) struct StridedSource<'p> {
    data: DataPtr,
    /// Dimensions and strides, unless the elements are contiguous.
    strides: Option<(&'p [usize], &'p [usize])>,
    /// Which element of the leaf `data` begins with.
    first: usize,
}

/// A gradient that lies by columns, as matrices: neighbours in a column are nearer than those in a row.
#[derive(Clone, Copy)]
struct Columns {
    /// Numbers of rows and of columns.
    shape: (usize, usize),
    /// From a row to the next, and from a column to the next.
    strides: (usize, usize),
    /// How many dimensions are before these.
    outer: usize,
}

impl Columns {
    /// `None` for other layouts. Dimensions of 1 are skipped, and those that one stride goes through are
    /// joined.
    fn of(dims: &[usize], strides: &[usize]) -> Option<Columns> {
        let mut outer = dims.len();
        let mut last = || {
            while outer > 0 {
                outer -= 1;
                if dims[outer] != 1 {
                    return Some((dims[outer], strides[outer], outer));
                }
            }
            None
        };
        let (mut columns, stride, _) = last()?;
        let (rows, row_stride, outer) = loop {
            let (dim, next, outer) = last()?;
            if next != stride.saturating_mul(columns) {
                break (dim, next, outer);
            }
            columns *= dim;
        };
        let lies_by_columns = 0 < row_stride && row_stride < stride;
        lies_by_columns.then_some(Columns { shape: (rows, columns), strides: (row_stride, stride), outer })
    }
}

impl<'p> StridedSource<'p> {
    pub(super) fn new(view: View<'p>, first: usize) -> Self {
        StridedSource { data: lent(view.memory()), strides: view.strides(), first }
    }

    /// Contiguous data that begins with the leaf's element `first`.
    pub(super) fn in_order(data: DataPtr, first: usize) -> Self {
        StridedSource { data, strides: None, first }
    }

    fn columns(&self) -> Option<Columns> {
        self.strides.and_then(|(dims, strides)| Columns::of(dims, strides))
    }

    /// How many elements a thread should read at once if the gradient lies by columns. Fewer would use only a
    /// part of each cache line.
    pub(super) fn band(&self) -> Option<usize> {
        self.columns().map(|columns| (TILE.0 * columns.shape.1).min(BAND))
    }

    /// A source of the elements of `range`. If they lie by columns, it is a row-major copy in `band`.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for the range. The result must not outlive the elements of `band`.
    pub(super) unsafe fn by_rows<T: Storable>(
        &self,
        isa: Isa,
        range: &Range<usize>,
        band: &mut Vec<T>,
    ) -> StridedSource<'p> {
        let Some(columns) = self.columns() else { return StridedSource { ..*self } };
        let length = range.len();
        if band.len() < length {
            band.resize(length, T::zero());
        }
        let (start, matrix) = (range.start - self.first, columns.shape.0 * columns.shape.1);
        let mut done = 0;
        while done < length {
            let (index, within) = ((start + done) / matrix, (start + done) % matrix);
            let run = (matrix - within).min(length - done);
            // SAFETY: the caller promises that the range lies within the layout's shape, so that the elements
            // of this matrix do.
            unsafe { self.read_tiles(isa, columns, index, within, &mut band[done..done + run]) };
            done += run;
        }
        StridedSource::in_order(T::elements(&mut band[..length]), range.start)
    }

    /// Reads elements of a matrix from its element `first` on, in row-major order, tile by tile. `index` is
    /// that of the matrix among the outer dimensions.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for these elements.
    unsafe fn read_tiles<T: Storable>(
        &self,
        isa: Isa,
        columns: Columns,
        index: usize,
        first: usize,
        dst: &mut [T],
    ) {
        let Columns { shape: (_, width), strides: (row_stride, stride), outer } = columns;
        let origin =
            self.strides.map_or(0, |(dims, strides)| place_of(index, &dims[..outer], &strides[..outer]));
        let end = first + dst.len();
        let mut tile = [[T::zero(); TILE.0]; TILE.1];
        for left in (0..width).step_by(TILE.1) {
            let right = width.min(left + TILE.1);
            // The rows that have an element of the range in these columns, all of them rows of the matrix.
            let rows =
                (first + 1).saturating_sub(right).div_ceil(width)..end.saturating_sub(left).div_ceil(width);
            for top in rows.clone().step_by(TILE.0) {
                let height = TILE.0.min(rows.end - top);
                for (column, tile) in (left..right).zip(&mut tile) {
                    let place = origin + top * row_stride + column * stride;
                    // Fetched here, because the hardware does not read ahead from column to column.
                    if right + TILE.1 <= width {
                        for (array, size) in self.data.skip(place + TILE.1 * stride).arrays() {
                            lines(array, height * row_stride * size / BLOCK);
                        }
                    }
                    // SAFETY: the caller promises the layout's elements, and these are some of them.
                    unsafe {
                        match row_stride {
                            1 => load(isa, self.data, place, &mut tile[..height]),
                            _ => gather(
                                self.data,
                                (0..height).map(|row| place + row * row_stride),
                                &mut tile[..height],
                            ),
                        }
                    }
                }
                for row in 0..height {
                    let start = (top + row) * width;
                    let piece = first.max(start + left)..end.min(start + right);
                    if piece.is_empty() {
                        continue;
                    }
                    let (columns, dst) = (
                        &tile[piece.start - start - left..],
                        &mut dst[piece.start - first..piece.end - first],
                    );
                    match <&mut [T; TILE.1]>::try_from(&mut *dst) {
                        // With a constant length this copy takes half the time.
                        Ok(dst) => dst.iter_mut().zip(&tile).for_each(|(dst, column)| *dst = column[row]),
                        Err(_) => dst.iter_mut().zip(columns).for_each(|(dst, column)| *dst = column[row]),
                    }
                }
            }
        }
    }

    /// Where the leaf's element 0 lies or would lie, if the elements are contiguous.
    pub(super) fn in_order_from_zero(&self) -> Option<DataPtr> {
        if self.strides.is_none() { Some(self.data.skip(0usize.wrapping_sub(self.first))) } else { None }
    }

    /// [`StridedSource::in_order_from_zero`], if the elements are of this type.
    pub(super) fn in_place<T: Storable>(&self) -> Option<Elements<T>> {
        T::same(self.in_order_from_zero()?)
    }

    /// The leaf's elements `start..start + length` where they lie, if they are contiguous and bf16.
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
            // the elements of the leaf are lent.
            return unsafe { load(isa, self.data, start, dst) };
        };
        let (Some((&columns, rows)), Some((&stride, row_strides))) =
            (dims.split_last(), strides.split_last())
        else {
            return;
        };
        let mut done = 0;
        while done < dst.len() {
            let (row, column) = ((start + done) / columns, (start + done) % columns);
            let run = (columns - column).min(dst.len() - done);
            let offset = place_of(row, rows, row_strides) + column * stride;
            let dst = &mut dst[done..done + run];
            // SAFETY: the offsets are those of elements of the view. `View::strided` has checked that these
            // lie within its numbers.
            unsafe {
                match stride {
                    1 => load(isa, self.data, offset, dst),
                    0 => {
                        load(isa, self.data, offset, &mut dst[..1]);
                        dst.fill(dst[0]);
                    }
                    _ => gather(self.data, (0..run).map(|i| offset + i * stride), dst),
                }
            }
            done += run;
        }
    }
}

/// Reads the sum of gradients: widened, then added in pairs. `more` has room for each level of pairs.
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
    // Two gradients of bf16 are added in one loop. From memory a step then takes 1.12 times as long as with
    // one gradient. If each were widened by itself, it would take 1.19 times as long.
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
