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
use smallvec::SmallVec;

use super::convert::{Storable, gather, load, sum_bf16};
use super::pointers::{DataPtr, Elements, lent};
use super::prefetch::lines;
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

/// The most elements of a band that would fetch each cache line several times if it were shorter.
const WIDEST: usize = 1 << 22;

/// A gradient of any layout.
pub(super) struct StridedSource<'p> {
    data: DataPtr,
    /// Dimensions and strides, unless the elements are contiguous.
    strides: Option<(&'p [usize], &'p [usize])>,
    /// Which element of the leaf `data` begins with.
    first: usize,
}

/// Dimensions and their strides.
type Dims = (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>);

/// A gradient that lies by columns: neighbours in a column are nearer than those in a row.
///
/// Its dimensions are `outer`, rows, `middle` and columns. Those in the middle, as a reversed tensor of
/// images has them, make several matrices of the same rows.
struct Columns {
    outer: Dims,
    /// The number of rows, and from one to the next.
    rows: (usize, usize),
    middle: Dims,
    /// The number of columns, and from one to the next.
    columns: (usize, usize),
}

impl Columns {
    /// `None` for other layouts.
    fn of(dims: &[usize], strides: &[usize]) -> Option<Columns> {
        // From the last on, without those of 1. Those that one stride goes through are joined.
        let mut all = SmallVec::<[(usize, usize); 4]>::new();
        for (&dim, &stride) in dims.iter().zip(strides).rev().filter(|(dim, _)| **dim != 1) {
            match all.last_mut() {
                Some((joined, nearer)) if stride == nearer.saturating_mul(*joined) => *joined *= dim,
                _ => all.push((dim, stride)),
            }
        }
        let columns = *all.first()?;
        let is_nearer = |place: usize| 0 < all[place].1 && all[place].1 < columns.1;
        // Rows are the dimension that uses most numbers of a cache line, if a band has as many rows. Otherwise
        // each line would be fetched once for each of its numbers.
        let used = |place: usize| all[place].0.min(TILE.1 / all[place].1.max(1));
        let is_in_band = |place: &usize| {
            let pitch: usize = all[..*place].iter().map(|(dim, _)| dim).product();
            let longest = if 2 * used(*place) < TILE.1 { BAND } else { WIDEST };
            is_nearer(*place) && used(*place) > 0 && pitch <= longest / TILE.1
        };
        // Reversed, because `max_by_key` takes the last of several.
        let best = (1..all.len()).rev().filter(is_in_band).max_by_key(|place| used(*place));
        let place = best.or_else(|| (all.len() > 1 && is_nearer(1)).then_some(1))?;
        let in_order = |dims: &[(usize, usize)]| -> Dims { dims.iter().rev().copied().unzip() };
        let (middle, outer) = (in_order(&all[1..place]), in_order(&all[place + 1..]));
        Some(Columns { outer, rows: all[place], middle, columns })
    }

    /// The number of matrices with the same rows.
    fn matrices(&self) -> usize {
        self.middle.0.iter().product()
    }

    /// From an element to that in the next row, in row-major order.
    fn pitch(&self) -> usize {
        self.matrices() * self.columns.0
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
        self.columns().map(|columns| (TILE.0 * columns.pitch()).min(BAND.max(TILE.1 * columns.pitch())))
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
        let (start, rows) = (range.start - self.first, columns.rows.0 * columns.pitch());
        let mut done = 0;
        while done < length {
            let (index, within) = ((start + done) / rows, (start + done) % rows);
            let run = (rows - within).min(length - done);
            let outer = place_of(index, &columns.outer.0, &columns.outer.1);
            for matrix in 0..columns.matrices() {
                let origin = outer + place_of(matrix, &columns.middle.0, &columns.middle.1);
                // SAFETY: the caller promises that the range lies within the layout's shape, so that the
                // elements of these rows do.
                unsafe {
                    self.read_tiles(isa, &columns, origin, matrix, within, &mut band[done..done + run])
                };
            }
            done += run;
        }
        StridedSource::in_order(T::elements(&mut band[..length]), range.start)
    }

    /// Reads the elements of one matrix among the elements from `first` on, which are row-major, tile by
    /// tile. `origin` is the place of the matrix.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for these elements.
    unsafe fn read_tiles<T: Storable>(
        &self,
        isa: Isa,
        columns: &Columns,
        origin: usize,
        matrix: usize,
        first: usize,
        dst: &mut [T],
    ) {
        let (&Columns { rows: (_, row_stride), columns: (width, stride), .. }, pitch) =
            (columns, columns.pitch());
        let (before, end) = (matrix * width, first + dst.len());
        let mut tile = [[T::zero(); TILE.0]; TILE.1];
        for left in (0..width).step_by(TILE.1) {
            let right = width.min(left + TILE.1);
            // The rows that have an element of the range in these columns.
            let rows = (first + 1).saturating_sub(before + right).div_ceil(pitch)
                ..end.saturating_sub(before + left).div_ceil(pitch);
            for top in rows.clone().step_by(TILE.0) {
                let height = TILE.0.min(rows.end - top);
                for (column, tile) in (left..right).zip(&mut tile) {
                    let place = origin + top * row_stride + column * stride;
                    // Fetched here, because the hardware does not read ahead from column to column.
                    if row_stride < TILE.1 && column + TILE.1 < width {
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
                    let start = (top + row) * pitch + before;
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
        // SAFETY: the caller promises that the data is locked and holds the range (`with_gradients`).
        Some(unsafe { data.read(start, length) })
    }

    /// Reads the leaf's elements `start..start + dst.len()` in row-major order.
    ///
    /// # Safety
    /// The range must lie within the layout's shape, counted from `first` on, and the data must be locked (by
    /// `with_gradients`).
    unsafe fn read<T: Storable>(&self, isa: Isa, start: usize, dst: &mut [T]) {
        let start = start - self.first;
        let Some((dims, strides)) = self.strides else {
            // SAFETY: the caller promises that the range lies within the leaf. `with_gradients` has checked that
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
