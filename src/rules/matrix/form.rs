//! Which matrices a tensor is made of.

use candle_core::{Result as Candle, Tensor};
use rayon::prelude::*;

use crate::error::{Error, ErrorKind, Result};
use crate::rule::Parameter;
use crate::rule::field::Sizes;

crate::choice! {
    /// Which dimensions of a parameter are the rows and columns of its matrices.
    #[derive(Default)]
    pub enum MatrixForm {
        /// The last two. A tensor with more is a stack of matrices, each by itself, such as experts in one
        /// tensor.
        #[default]
        Stack,
        /// The first by all others, as one matrix: kernels of convolutions. Each row makes one output
        /// channel.
        Flat,
    }
}

impl MatrixForm {
    /// The number of matrices, of rows and of columns; `None` for fewer than two dimensions.
    pub(crate) fn dims(self, dims: &[usize]) -> Option<[usize; 3]> {
        let [outer @ .., rows, columns] = dims else { return None };
        let [first, others @ ..] = dims else { return None };
        Some(match (self, outer) {
            (_, []) => [1, *rows, *columns],
            (MatrixForm::Stack, _) => [outer.iter().product(), *rows, *columns],
            (MatrixForm::Flat, _) => [1, *first, others.iter().product()],
        })
    }

    /// The matrices of a parameter that has [`MatrixForm::dims`], as a tensor of three dimensions.
    pub(crate) fn stacked(self, x: &Tensor) -> Candle<Tensor> {
        let Some([count, rows, columns]) = self.dims(x.dims()) else {
            candle_core::bail!("no matrices in {:?}", x.shape())
        };
        x.reshape((count, rows, columns))
    }
}

const OTHER_RULE: &str = "give this parameter a rule of its own with `setup_with`";

/// How a rule takes the matrices out of a tensor: those of a [`MatrixForm`], whose rows may be cut once more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) form: MatrixForm,
    /// Into how many equal parts rows are cut.
    pub(crate) heads: u64,
    /// Into which parts they are cut otherwise.
    pub(crate) parts: Sizes,
}

impl Matrices {
    /// Refuses a parameter that is not made of such matrices.
    pub(crate) fn check_shape(self, rule: &str, x: Parameter<'_>) -> Result<()> {
        let Some([_, rows, _]) = self.form.dims(x.shape()) else {
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
        // 0, if there are no parts.
        let total = self.parts.iter().sum::<usize>();
        // Of a parameter that another rank has this one has no elements.
        if x.elem_count() == 0 {
            return Ok(());
        }
        let Matrices { heads, parts, .. } = self;
        let refused = |problem: String| Error::new(ErrorKind::Argument, format!("{rule}: {problem}"));
        let heads_are = || refused("heads is".to_string()).with_got(heads);
        if total > 0 && total != rows {
            return Err(refused(format!("parts is {parts}, which are"))
                .with_got(format_args!("{total} rows"))
                .with_expected(format_args!("the {rows} rows of a matrix"))
                .with_remedy(OTHER_RULE));
        }
        if total > 0 && heads > 1 {
            let expected = format!("1 beside the parts {parts}");
            return Err(heads_are()
                .with_expected(expected)
                .with_remedy("count heads of equal size over all parts, without `parts`"));
        }
        if !(rows as u64).is_multiple_of(heads) {
            return Err(heads_are()
                .with_expected(format_args!("a divisor of the {rows} rows of a matrix"))
                .with_remedy(OTHER_RULE));
        }
        Ok(())
    }

    /// The shape of a tensor with a number for each row of a parameter's matrices.
    pub(crate) fn column(self, x: Parameter<'_>) -> Vec<usize> {
        let rank = x.rank();
        let rows = if self.form == MatrixForm::Flat { 1 } else { rank - 1 };
        x.shape().iter().enumerate().map(|(i, &size)| if i < rows { size } else { 1 }).collect()
    }

    /// A tensor of a parameter's shape, or with one column for all of its columns, as a stack of matrices
    /// before rows are cut.
    fn stacked(self, x: &Tensor, like: &Tensor) -> Candle<Tensor> {
        let Some([count, rows, _]) = self.form.dims(like.dims()) else {
            candle_core::bail!("no matrices in {:?}", like.shape())
        };
        x.reshape((count, rows, x.elem_count() / count / rows))
    }

    /// Applies a function to the matrices of these tensors. The first has the parameter's shape, others may
    /// have one column. The function gets stacks of matrices of one shape, and returns as many of these
    /// shapes.
    pub(crate) fn map<const N: usize>(
        self,
        tensors: [&Tensor; N],
        function: impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync,
    ) -> Candle<[Tensor; N]> {
        let shapes = tensors.map(|tensor| tensor.shape().clone());
        let stacks = all(tensors.map(|tensor| self.stacked(tensor, tensors[0])))?;
        let results = if self.parts.iter().next().is_none() {
            let heads = self.heads as usize;
            let cut = |stack: &Tensor| {
                let (count, rows, columns) = stack.dims3()?;
                stack.reshape((count * heads, rows / heads, columns))
            };
            in_pieces(all(stacks.each_ref().map(cut))?, &function)?
        } else {
            self.map_parts(&stacks, function)?
        };
        let mut shapes = shapes.into_iter();
        all(results.map(|result| result.reshape(shapes.next().expect("a shape for each tensor"))))
    }

    fn map_parts<const N: usize>(
        self,
        stacks: &[Tensor; N],
        function: impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync,
    ) -> Candle<[Tensor; N]> {
        let mut start = 0;
        let mut results: [Vec<Tensor>; N] = [const { Vec::new() }; N];
        for rows in self.parts.iter() {
            let part = all(stacks.each_ref().map(|stack| stack.narrow(1, start, rows)?.contiguous()))?;
            for (result, parts) in in_pieces(part, &function)?.into_iter().zip(&mut results) {
                parts.push(result);
            }
            start += rows;
        }
        all(results.map(|parts| Tensor::cat(&parts, 1)))
    }
}

/// How many elements of small matrices go through a function together on the CPU: more leave the caches. The
/// products of a larger matrix are on all threads by themselves.
const TOGETHER: usize = 1 << 15;

/// Applies a function to these stacks on the CPU, as if they were parameters of their own: a few small
/// matrices at a time on each thread, large ones one after another.
fn in_pieces<const N: usize>(
    stacks: [Tensor; N],
    function: &(impl Fn([Tensor; N]) -> Candle<[Tensor; N]> + Sync),
) -> Candle<[Tensor; N]> {
    let (count, rows, columns) = stacks[0].dims3()?;
    let together = if stacks[0].device().is_cpu() { TOGETHER / (rows * columns) } else { count };
    let (together, large) = (together.max(1), together == 0);
    if count <= together {
        return function(stacks);
    }
    let piece = |first: usize| {
        function(all(stacks.each_ref().map(|stack| stack.narrow(0, first, together.min(count - first))))?)
    };
    let firsts: Vec<usize> = (0..count).step_by(together).collect();
    let pieces: Vec<_> = if large {
        firsts.into_iter().map(piece).collect::<Candle<_>>()
    } else {
        firsts.into_par_iter().map(piece).collect()
    }?;
    all(std::array::from_fn(|i| Tensor::cat(&pieces.iter().map(|piece| &piece[i]).collect::<Vec<_>>(), 0)))
}

fn all<const N: usize>(results: [Candle<Tensor>; N]) -> Candle<[Tensor; N]> {
    let tensors: Vec<Tensor> = results.into_iter().collect::<Candle<_>>()?;
    Ok(tensors.try_into().expect("as many as there were"))
}
