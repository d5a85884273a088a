//! The matrices inside a tensor: which dimensions are rows and columns, and how rows are cut.
//!
//! [`Matrices::map`] gives a rule its matrices as stacks: tensors of the shape (matrices, rows, columns). All
//! matrices of a stack have one shape, so equal parts (`heads`) make one stack, and parts of given sizes
//! (`parts`) make one stack each. On the CPU, `in_pieces` cuts a stack once more, so that each piece stays in
//! a cache.

use candle_core::{Result as Candle, Tensor};
use rayon::prelude::*;

use crate::error::{Error, ErrorKind, Result};
use crate::rule::Parameter;
use crate::rule::field::Sizes;

crate::choice! {
    /// Which dimensions of a parameter are the rows and columns of its matrices.
    #[derive(Default)]
    pub enum MatrixForm {
        /// The last two dimensions. A tensor with more dimensions is a stack of independent matrices, such as
        /// experts in one tensor.
        ///
        /// In this form Muon, NorMuon and AdaMuon refuse four or more dimensions with sides below 16 and more
        /// matrices than a matrix has numbers, because most such tensors are kernels of convolutions.
        #[default]
        Stack,
        /// The first dimension by all others, for kernels of convolutions.
        ///
        /// The tensor is one matrix. Each row makes one output channel.
        Flat,
    }
}

impl MatrixForm {
    /// The numbers of matrices, rows and columns; `None` for fewer than two dimensions.
    pub(crate) fn dims(self, dims: &[usize]) -> Option<[usize; 3]> {
        let [outer @ .., rows, columns] = dims else {
            return None;
        };
        let [first, others @ ..] = dims else { return None };
        Some(match (self, outer) {
            (_, []) => [1, *rows, *columns],
            (MatrixForm::Stack, _) => [outer.iter().product(), *rows, *columns],
            (MatrixForm::Flat, _) => [1, *first, others.iter().product()],
        })
    }

    /// Reshapes a tensor to a stack of its matrices. Fails for fewer than two dimensions.
    pub(crate) fn stacked(self, x: &Tensor) -> Candle<Tensor> {
        let Some([count, rows, columns]) = self.dims(x.dims()) else {
            candle_core::bail!("no matrices in {:?}", x.shape())
        };
        x.reshape((count, rows, columns))
    }
}

const OTHER_RULE: &str = "give this parameter a rule of its own with `setup_with`";

/// The matrices that a rule works on: those of a [`MatrixForm`], whose rows can be cut into parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) form: MatrixForm,
    /// The number of equal parts into which rows are cut.
    pub(crate) heads: u64,
    /// The rows of each part, if parts have different sizes; else empty.
    pub(crate) parts: Sizes,
}

impl Matrices {
    /// Refuses a parameter that cannot be cut into these matrices.
    pub(crate) fn check_shape(self, rule: &str, x: Parameter<'_>) -> Result<()> {
        let Some([count, rows, columns]) = self.form.dims(x.shape()) else {
            let remedy = format!(
                "give vectors and numbers to another rule, as `{rule}::with_fallback(AdamW::new(3e-4))` \
                 does, or choose one with `setup_with`"
            );
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{rule} works on matrices, got the shape"),
            )
            .with_got(format_args!("{:?}", x.shape()))
            .with_expected("two dimensions or more")
            .with_remedy(remedy));
        };
        // The sum is 0 if `parts` is empty.
        let total = self.parts.iter().sum::<usize>();
        // A rank without elements of the parameter sees a shape of zeros, which shows nothing about the rows.
        if x.elem_count() == 0 {
            return Ok(());
        }
        // A kernel of a convolution would be many tiny matrices, whose orthogonal steps are ten times too
        // long.
        let is_kernel = x.rank() >= 4 && rows.max(columns) < 16 && count > rows * columns;
        if is_kernel && self.form == MatrixForm::Stack {
            let problem = format!("{rule} with `MatrixForm::Stack` takes the shape");
            return Err(Error::new(ErrorKind::Unsupported, problem)
                .with_got(format_args!(
                    "{:?} as {count} matrices of {rows} × {columns}",
                    x.shape()
                ))
                .with_expected("longer sides, or at most as many matrices as a matrix has numbers")
                .with_remedy(
                    "for kernels of convolutions set `matrix: MatrixForm::Flat`, which makes each kernel one \
                     matrix, or give the kernels another rule by `Fallback::except` or `setup_with`; store a \
                     stack of small matrices with three dimensions",
                ));
        }
        let Matrices { heads, parts, .. } = self;
        let error = |problem: String| Error::new(ErrorKind::Argument, format!("{rule}: {problem}"));
        let heads_error = || error("heads is".to_string()).with_got(heads);
        if total > 0 && total != rows {
            return Err(error(format!("parts is {parts}, which are"))
                .with_got(format_args!("{total} rows"))
                .with_expected(format_args!("the {rows} rows of a matrix"))
                .with_remedy(OTHER_RULE));
        }
        if total > 0 && heads > 1 {
            let expected = format!("1, because `parts` is {parts}");
            return Err(heads_error().with_expected(expected).with_remedy(
                "if all heads have the same size, leave `parts` out, and count the heads of all parts",
            ));
        }
        if !(rows as u64).is_multiple_of(heads) {
            return Err(heads_error()
                .with_expected(format_args!("a divisor of the {rows} rows of a matrix"))
                .with_remedy(OTHER_RULE));
        }
        Ok(())
    }

    /// The shape of a state tensor with one number for each row of a parameter's matrices.
    pub(crate) fn column_shape(self, x: Parameter<'_>) -> Vec<usize> {
        let rank = x.rank();
        let row_dims = if self.form == MatrixForm::Flat {
            1
        } else {
            rank - 1
        };
        x.shape()
            .iter()
            .enumerate()
            .map(|(i, &size)| if i < row_dims { size } else { 1 })
            .collect()
    }

    /// Reshapes `x` to a stack, before rows are cut.
    ///
    /// `x` has the shape of the parameter `like`, or one column instead of all columns.
    fn stacked(self, x: &Tensor, like: &Tensor) -> Candle<Tensor> {
        let Some([count, rows, _]) = self.form.dims(like.dims()) else {
            candle_core::bail!("no matrices in {:?}", like.shape())
        };
        x.reshape((count, rows, x.elem_count() / count / rows))
    }

    /// Applies `function` to the matrices of `tensors`, and returns tensors of the same shapes.
    ///
    /// The first tensor has the parameter's shape, others may have one column instead. `function` is called
    /// for each piece of the matrices, with one stack for each tensor, and returns stacks of the same shapes.
    pub(crate) fn map<const N: usize>(
        self,
        tensors: [&Tensor; N],
        function: impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync,
    ) -> Candle<[Tensor; N]> {
        let shapes = tensors.map(|tensor| tensor.shape().clone());
        let stacks = collect_array(tensors.map(|tensor| self.stacked(tensor, tensors[0])))?;
        let results = if self.parts.iter().next().is_none() {
            let heads = self.heads as usize;
            let cut = |stack: &Tensor| {
                let (count, rows, columns) = stack.dims3()?;
                // Rows lie one after another in memory, so equal parts need no copy.
                stack.reshape((count * heads, rows / heads, columns))
            };
            in_pieces(collect_array(stacks.each_ref().map(cut))?, &function)?
        } else {
            self.map_parts(&stacks, function)?
        };
        let mut shapes = shapes.into_iter();
        collect_array(results.map(|result| result.reshape(shapes.next().expect("a shape for each tensor"))))
    }

    fn map_parts<const N: usize>(
        self,
        stacks: &[Tensor; N],
        function: impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync,
    ) -> Candle<[Tensor; N]> {
        // Parts differ in shape, so each part is a stack of its own.
        let mut start = 0;
        let mut results: [Vec<Tensor>; N] = [const { Vec::new() }; N];
        for rows in self.parts.iter() {
            let part = collect_array(
                stacks
                    .each_ref()
                    .map(|stack| stack.narrow(1, start, rows)?.contiguous()),
            )?;
            for (result, parts) in in_pieces(part, &function)?.into_iter().zip(&mut results) {
                parts.push(result);
            }
            start += rows;
        }
        collect_array(results.map(|parts| Tensor::cat(&parts, 1)))
    }
}

/// The largest number of elements in a piece of small matrices on the CPU. A larger piece would not stay in
/// the caches.
const PIECE_ELEMENTS: usize = 1 << 15;

/// Applies `function` to pieces of the stacks, and joins the results.
///
/// - On a device, and if there are few elements, all matrices are one piece.
/// - Matrices of up to `PIECE_ELEMENTS` elements make pieces of several matrices, which run on all threads.
/// - Larger matrices run one after another, because candle uses all threads for the product of a large
///   matrix.
fn in_pieces<const N: usize>(
    stacks: [Tensor; N],
    function: &(impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync),
) -> Candle<[Tensor; N]> {
    let (count, rows, columns) = stacks[0].dims3()?;
    let capacity = if stacks[0].device().is_cpu() {
        PIECE_ELEMENTS / (rows * columns)
    } else {
        count
    };
    let (per_piece, is_large) = (capacity.max(1), capacity == 0);
    if count <= per_piece {
        return function(stacks);
    }
    let piece_results = |first: usize| {
        function(collect_array(
            stacks
                .each_ref()
                .map(|stack| stack.narrow(0, first, per_piece.min(count - first))),
        )?)
    };
    let firsts: Vec<usize> = (0..count).step_by(per_piece).collect();
    let results: Vec<_> = if is_large {
        firsts.into_iter().map(piece_results).collect::<Candle<_>>()
    } else {
        firsts.into_par_iter().map(piece_results).collect()
    }?;
    collect_array(std::array::from_fn(|i| {
        Tensor::cat(&results.iter().map(|tensors| &tensors[i]).collect::<Vec<_>>(), 0)
    }))
}

fn collect_array<const N: usize>(results: [Candle<Tensor>; N]) -> Candle<[Tensor; N]> {
    let tensors: Vec<Tensor> = results.into_iter().collect::<Candle<_>>()?;
    Ok(tensors.try_into().expect("as many as there were"))
}
