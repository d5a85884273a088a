//! The gradients of a leaf, of any layout, and their sum. `unsafe` is for raw storage pointers.
//!
//! A gradient that lies by columns, such as a transposed gradient, needs care. If such a gradient were read
//! row by row, each element would cost a cache line, and often a page. So a thread first copies a range of
//! the gradient into a band, which is memory of its own:
//!
//! ```text
//! for each tile of 16 columns, 64 rows:                      (read_tiles)
//!     for each column:  prefetch the column that is 16 further on
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
use super::pointers::{DataPtr, Elements, data_ptr};
use super::prefetch::prefetch_lines;
use crate::engine::Isa;
use crate::engine::kernel::{BLOCK, add, halves};
use crate::model::lent::View;
use crate::numbers::{codes, element_offset};

/// The most elements of a block: as many as are encoded together if state is in 8 bits.
pub(super) const LONGEST_BLOCK: usize = codes::BLOCKS_TOGETHER * BLOCK;

/// Room for a block, aligned so that no vector crosses two cache lines.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct CacheLines<T>(pub(super) [T; LONGEST_BLOCK]);

/// The rows and columns of a tile. A row of f32 takes one cache line. A column takes four, because a column
/// is usually on a page of its own, and to find a page takes longer than to fetch the next line.
const TILE: (usize, usize) = (64, 16);

/// The largest number of elements that a thread usually copies at once. A longer band would use more of each
/// page, but take more memory in each thread.
const BAND: usize = 1 << 19;

/// If a shorter band would fetch each cache line several times, a band has at most this many elements.
const WIDEST: usize = 1 << 22;

/// A gradient of any layout.
pub(super) struct StridedSource<'p> {
    data: DataPtr,
    /// Dimensions and strides, unless the elements are contiguous.
    strides: Option<(&'p [usize], &'p [usize])>,
    /// Which element of the leaf is the first of `data`.
    first: usize,
}

/// Dimensions and their strides.
type Dims = (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>);

/// A gradient that lies by columns: neighbours in a column are nearer than neighbours in a row.
///
/// The gradient's dimensions are `outer`, rows, `middle` and columns. The dimensions in the middle, as in a
/// reversed tensor of images, make several matrices that share their rows.
struct Columns {
    outer: Dims,
    /// The number of rows, and the stride from one row to the next.
    rows: (usize, usize),
    middle: Dims,
    /// The number of columns, and the stride from one column to the next.
    columns: (usize, usize),
}

impl Columns {
    /// `None` for a layout that is not by columns.
    fn from_layout(dims: &[usize], strides: &[usize]) -> Option<Columns> {
        // The dimensions and their strides, the last first, without dimensions of 1. Dimensions that one
        // stride goes through are joined.
        let mut axes = SmallVec::<[(usize, usize); 4]>::new();
        for (&dim, &stride) in dims.iter().zip(strides).rev().filter(|(dim, _)| **dim != 1) {
            match axes.last_mut() {
                Some((last_dim, last_stride)) if stride == last_stride.saturating_mul(*last_dim) => {
                    *last_dim *= dim
                }
                _ => axes.push((dim, stride)),
            }
        }
        let columns = *axes.first()?;
        let is_nearer = |axis: usize| 0 < axes[axis].1 && axes[axis].1 < columns.1;
        // Among the dimensions of which a band has enough rows, the rows are the dimension that uses most
        // numbers of a cache line. With fewer rows, a line would be fetched once for each of its numbers.
        let line_use = |axis: usize| axes[axis].0.min(TILE.1 / axes[axis].1.max(1));
        let fits_band = |axis: &usize| {
            let pitch: usize = axes[..*axis].iter().map(|(dim, _)| dim).product();
            let longest = if 2 * line_use(*axis) < TILE.1 {
                BAND
            } else {
                WIDEST
            };
            is_nearer(*axis) && line_use(*axis) > 0 && pitch <= longest / TILE.1
        };
        // Reversed, because `max_by_key` takes the last of several maxima.
        let best = (1..axes.len())
            .rev()
            .filter(fits_band)
            .max_by_key(|axis| line_use(*axis));
        let axis = best.or_else(|| (axes.len() > 1 && is_nearer(1)).then_some(1))?;
        let in_layout_order = |dims: &[(usize, usize)]| -> Dims { dims.iter().rev().copied().unzip() };
        let (middle, outer) = (
            in_layout_order(&axes[1..axis]),
            in_layout_order(&axes[axis + 1..]),
        );
        Some(Columns {
            outer,
            rows: axes[axis],
            middle,
            columns,
        })
    }

    /// The number of matrices that share their rows.
    fn matrix_count(&self) -> usize {
        self.middle.0.iter().product()
    }

    /// The number of elements from row to row in row-major order.
    fn pitch(&self) -> usize {
        self.matrix_count() * self.columns.0
    }
}

impl<'p> StridedSource<'p> {
    pub(super) fn new(view: View<'p>, first: usize) -> Self {
        StridedSource {
            data: data_ptr(view.memory()),
            strides: view.strides(),
            first,
        }
    }

    /// Contiguous data that begins with the leaf's element `first`.
    pub(super) fn new_contiguous(data: DataPtr, first: usize) -> Self {
        StridedSource {
            data,
            strides: None,
            first,
        }
    }

    fn columns(&self) -> Option<Columns> {
        self.strides
            .and_then(|(dims, strides)| Columns::from_layout(dims, strides))
    }

    /// How many elements a thread should read at once if the gradient lies by columns. A shorter band would
    /// use only a part of each cache line.
    pub(super) fn band_length(&self) -> Option<usize> {
        self.columns()
            .map(|columns| (TILE.0 * columns.pitch()).min(BAND.max(TILE.1 * columns.pitch())))
    }

    /// A source of the elements of `range`. If the gradient lies by columns, the source is a copy in `band`.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for the range. The result must not outlive the elements of `band`.
    pub(super) unsafe fn row_major<T: Storable>(
        &self,
        isa: Isa,
        range: &Range<usize>,
        band: &mut Vec<T>,
    ) -> StridedSource<'p> {
        let Some(columns) = self.columns() else {
            return StridedSource { ..*self };
        };
        let length = range.len();
        if band.len() < length {
            band.resize(length, T::zero());
        }
        let (start, outer_length) = (range.start - self.first, columns.rows.0 * columns.pitch());
        let mut position = 0;
        while position < length {
            let (index, first) = (
                (start + position) / outer_length,
                (start + position) % outer_length,
            );
            let run_length = (outer_length - first).min(length - position);
            let outer = element_offset(index, &columns.outer.0, &columns.outer.1);
            let dst = &mut band[position..position + run_length];
            for matrix in 0..columns.matrix_count() {
                let origin = outer + element_offset(matrix, &columns.middle.0, &columns.middle.1);
                // SAFETY: the caller promises that the range lies within the layout's shape. These elements
                // are some of the range.
                unsafe { self.read_tiles(isa, &columns, origin, matrix, first, dst) };
            }
            position += run_length;
        }
        StridedSource::new_contiguous(T::data_ptr(&mut band[..length]), range.start)
    }

    /// Reads the elements of one matrix among `dst`, tile by tile.
    ///
    /// `dst` is for the elements from `first` on, in row-major order of all matrices that share their rows.
    /// `origin` is where the matrix begins in the data.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for these elements.
    unsafe fn read_tiles<T: Storable>(
        &self,
        isa: Isa,
        layout: &Columns,
        origin: usize,
        matrix: usize,
        first: usize,
        dst: &mut [T],
    ) {
        let (width, pitch) = (layout.columns.0, layout.pitch());
        let (columns_before, end) = (matrix * width, first + dst.len());
        let mut tile = [[T::zero(); TILE.0]; TILE.1];
        for left in (0..width).step_by(TILE.1) {
            let right = width.min(left + TILE.1);
            // The rows that have an element of `dst` in these columns.
            let rows = (first + 1).saturating_sub(columns_before + right).div_ceil(pitch)
                ..end.saturating_sub(columns_before + left).div_ceil(pitch);
            for top in rows.clone().step_by(TILE.0) {
                let height = TILE.0.min(rows.end - top);
                let corner = origin + top * layout.rows.1;
                // SAFETY: the caller promises the layout's elements, and the tile has some of them.
                unsafe { self.load_tile(isa, layout, corner, left..right, height, &mut tile) };
                for row in 0..height {
                    let start = (top + row) * pitch + columns_before;
                    let piece = first.max(start + left)..end.min(start + right);
                    if !piece.is_empty() {
                        let column = piece.start - start - left;
                        copy_row(
                            &tile,
                            row,
                            column,
                            &mut dst[piece.start - first..piece.end - first],
                        );
                    }
                }
            }
        }
    }

    /// Loads the upper `height` numbers of these columns into a tile. `corner` is where the tile's first row
    /// has column 0 in the data.
    ///
    /// # Safety
    /// As [`StridedSource::read`], for these elements.
    #[inline(always)]
    unsafe fn load_tile<T: Storable>(
        &self,
        isa: Isa,
        layout: &Columns,
        corner: usize,
        columns: Range<usize>,
        height: usize,
        tile: &mut [[T; TILE.0]; TILE.1],
    ) {
        let &Columns {
            rows: (_, row_stride),
            columns: (width, stride),
            ..
        } = layout;
        for (column, dst) in columns.zip(tile) {
            let offset = corner + column * stride;
            // A later column is fetched, because the hardware does not read ahead from column to column.
            if row_stride < TILE.1 && column + TILE.1 < width {
                for (array, size) in self.data.skip(offset + TILE.1 * stride).arrays() {
                    prefetch_lines(array, height * row_stride * size / BLOCK);
                }
            }
            let dst = &mut dst[..height];
            // SAFETY: the caller promises the layout's elements, and the column has some of them.
            unsafe {
                match row_stride {
                    1 => load(isa, self.data, offset, dst),
                    _ => gather(self.data, (0..height).map(|row| offset + row * row_stride), dst),
                }
            }
        }
    }

    /// If the elements are contiguous: where the leaf's element 0 lies or would lie.
    pub(super) fn data_from_zero(&self) -> Option<DataPtr> {
        if self.strides.is_none() {
            Some(self.data.skip(0usize.wrapping_sub(self.first)))
        } else {
            None
        }
    }

    /// [`StridedSource::data_from_zero`], if the elements are of this type.
    pub(super) fn elements<T: Storable>(&self) -> Option<Elements<T>> {
        T::elements_of(self.data_from_zero()?)
    }

    /// The leaf's elements `start..start + length` where they lie, if they are contiguous and bf16.
    ///
    /// # Safety
    /// As [`StridedSource::read`].
    unsafe fn bf16_elements(&self, start: usize, length: usize) -> Option<&[bf16]> {
        let DataPtr::Bf16(data) = self.data_from_zero()? else {
            return None;
        };
        // SAFETY: the caller promises that the data is locked and holds the range (`lend_gradients`).
        Some(unsafe { data.read(start, length) })
    }

    /// Reads the leaf's elements `start..start + dst.len()` in row-major order.
    ///
    /// # Safety
    /// The range must lie within the layout's shape, counted from `first` on, and the data must be locked (by
    /// `lend_gradients`).
    unsafe fn read<T: Storable>(&self, isa: Isa, start: usize, dst: &mut [T]) {
        let start = start - self.first;
        let Some((dims, strides)) = self.strides else {
            // SAFETY: the caller promises that the range lies within the leaf. `lend_gradients` has checked
            // that the elements of the leaf are lent.
            return unsafe { load(isa, self.data, start, dst) };
        };
        let (Some((&columns, rows)), Some((&stride, row_strides))) =
            (dims.split_last(), strides.split_last())
        else {
            return;
        };
        let mut position = 0;
        while position < dst.len() {
            let (row, column) = ((start + position) / columns, (start + position) % columns);
            let run_length = (columns - column).min(dst.len() - position);
            let offset = element_offset(row, rows, row_strides) + column * stride;
            let dst = &mut dst[position..position + run_length];
            // SAFETY: the offsets are those of elements of the view. `View::strided` has checked that the
            // elements of a view lie within its memory.
            unsafe {
                match stride {
                    1 => load(isa, self.data, offset, dst),
                    0 => {
                        load(isa, self.data, offset, &mut dst[..1]);
                        dst.fill(dst[0]);
                    }
                    _ => gather(self.data, (0..run_length).map(|i| offset + i * stride), dst),
                }
            }
            position += run_length;
        }
    }
}

/// Copies a part of a row of a tile, from column `first` on.
#[inline(always)]
fn copy_row<T: Copy>(tile: &[[T; TILE.0]; TILE.1], row: usize, first: usize, dst: &mut [T]) {
    match <&mut [T; TILE.1]>::try_from(&mut *dst) {
        // With a constant length this copy takes half the time.
        Ok(dst) => dst
            .iter_mut()
            .zip(tile)
            .for_each(|(dst, column)| *dst = column[row]),
        Err(_) => dst
            .iter_mut()
            .zip(&tile[first..])
            .for_each(|(dst, column)| *dst = column[row]),
    }
}

/// Reads the sum of gradients: widened, then added in pairs. `levels` has a block for each level of pairs.
///
/// # Safety
/// As [`StridedSource::read`], for each source.
pub(super) unsafe fn read_sum<T: Storable>(
    isa: Isa,
    sources: &[StridedSource<'_>],
    start: usize,
    dst: &mut [T],
    levels: &mut [CacheLines<T>],
) {
    // Two gradients of bf16 are added in one loop. From memory a step then takes 1.12 times as long as with
    // one gradient. The step would take 1.19 times as long if each gradient were widened by itself.
    if let [a, b] = sources
        // SAFETY: the caller promises for each source what `StridedSource::read` needs.
        && let (Some(a), Some(b)) = unsafe {
            (a.bf16_elements(start, dst.len()), b.bf16_elements(start, dst.len()))
        }
    {
        return sum_bf16(isa, a, b, dst);
    }
    match sources {
        [] => dst.fill(T::zero()),
        // SAFETY: the caller promises for each source what `StridedSource::read` needs.
        [source] => unsafe { source.read(isa, start, dst) },
        _ => {
            let (first, second) = halves(sources);
            let Some((CacheLines(sum), lower_levels)) = levels.split_first_mut() else {
                return;
            };
            // SAFETY: the caller promises for each source what `StridedSource::read` needs.
            unsafe {
                read_sum(isa, first, start, dst, lower_levels);
                read_sum(isa, second, start, &mut sum[..dst.len()], lower_levels);
            }
            add(isa, dst, &sum[..dst.len()]);
        }
    }
}
