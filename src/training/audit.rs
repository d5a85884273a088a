//! The audit: which variables of a model a loss reaches.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use candle_core::{Device, Tensor, TensorId};

use crate::error::Result;
use crate::error::{joined, listed};
use crate::model::candle::{CandleVariable, of_candle};
use crate::model::cuts::{CUTS, STATISTICS, is_running_statistic};
use crate::model::lent::Lend;
use crate::model::{Model, empty_model};
use crate::numbers::DType;
use crate::tree::is_trainable;

/// Finds out, by one backward pass, which variables of `model` the loss reaches.
///
/// It needs no state, so call it before training. The result prints as a table, and has the data behind it.
/// The parameters stay as they are, and the loss can be used again. Gradients are copied to the CPU, one
/// after another.
///
/// The model is the one that the loss was computed with.
///
/// Variables with a gradient of exactly zero are named at the end. That is no mistake by itself: one of
/// LoRA's two factors has it in the first step, as the other is zero. But `VarBuilder::get` makes zeros of a
/// new variable in a `VarMap` that has no initialiser, and a model with such a norm or table may never train.
/// [`StateTree::require_all`](crate::StateTree::require_all) cannot tell: the gradients are there.
///
/// For several matrices in one it shows which [rows](Audited::cut_rows) have no gradient. Variables that the
/// model does not show have no path; they are listed [by shape and dtype](Audit::outside).
///
/// # Errors
/// If the model has no trainable variable, two variables have one path, or the backward pass fails.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, linear, rms_norm};
/// use optimisers::{Reach, audit};
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let (hidden, norm) = (linear(4, 8, builder.pp("hidden"))?, rms_norm(8, 1e-5, builder.pp("norm"))?);
/// let output = linear(8, 1, builder.pp("output"))?;
///
/// let x = hidden.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
/// let cut = audit(&variables, &output.forward(&norm.forward(&x)?)?.mean_all()?)?;
/// println!("{cut}");
/// assert_eq!(cut.unreached().collect::<Vec<_>>(), ["hidden.bias", "hidden.weight", "norm.weight"]);
///
/// let whole = audit(&variables, &output.forward(&norm.forward_diff(&x)?)?.mean_all()?)?;
/// assert_eq!(whole.unreached().count(), 0, "{whole}");
/// assert!(matches!(whole.variables()[0].reach, Reach::Gradient { norm } if norm > 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The first table:
///
/// ```text
/// variable       shape   dtype  gradient
/// hidden.bias    [8]     F32    none
/// hidden.weight  [8, 4]  F32    none
/// norm.weight    [8]     F32    none
/// output.bias    [1]     F32    norm 1.000e0
/// output.weight  [1, 8]  F32    norm 2.828e0
/// ```
pub fn audit<M: Model + ?Sized>(model: &M, loss: &Tensor) -> Result<Audit> {
    let variables = of_candle(model, is_trainable)?;
    if variables.is_empty() {
        return Err(empty_model());
    }
    let known: HashSet<TensorId> = variables.iter().map(|variable| variable.tensor.id()).collect();
    let nodes = loss.sorted_nodes();
    let outside = nodes.iter().filter(|node| node.is_variable() && !known.contains(&node.id()));
    let outside = outside.map(|variable| (variable.dims().to_vec(), variable.dtype().into())).collect();
    let (projections, gradients) = (Projections::of(&nodes), loss.backward()?);
    let audited = |CandleVariable { paths, tensor }| {
        let (mut reach, mut cut_rows) = (Reach::Unreached, Vec::new());
        if let Some(gradient) = gradients.get(&tensor) {
            let numbers: Vec<f64> =
                gradient.to_device(&Device::Cpu)?.to_dtype(DType::F64.into())?.flatten_all()?.to_vec1()?;
            reach = Reach::of(&numbers);
            if matches!(reach, Reach::Gradient { .. }) && projections.has(&tensor) {
                cut_rows = cut(&numbers, tensor.dims());
            }
        }
        Ok(Audited { paths, shape: tensor.dims().to_vec(), dtype: tensor.dtype().into(), reach, cut_rows })
    };
    Ok(Audit { variables: variables.into_iter().map(audited).collect::<Result<_>>()?, outside })
}

/// The result of [`audit`]. It prints as a table with remarks.
#[must_use = "an audit says what it has found: print it"]
#[derive(Clone, Debug, PartialEq)]
pub struct Audit {
    variables: Vec<Audited>,
    outside: Vec<(Vec<usize>, DType)>,
}

/// A variable of the model, and how the loss depends on it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Audited {
    /// Its paths: several if it is tied to several places of the model.
    pub paths: Vec<String>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// Its gradient.
    pub reach: Reach,
    /// The rows without any gradient, if they are whole parts of the matrix and all others have one.
    ///
    /// For queries, keys and values in one linear layer these are the rows of queries and keys before
    /// `ops::softmax_last_dim`, which [cuts](crate::guide::cuts) the graph. If each head has its own part
    /// there are several ranges. In all other cases it is empty: also for an embedding, as most of its rows
    /// rightly have no gradient.
    pub cut_rows: Vec<Range<usize>>,
}

/// What kind of gradient a variable has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reach {
    /// No gradient: the loss does not depend on it, or the graph is cut.
    Unreached,
    /// A gradient that is zero in every element.
    Zero,
    /// A gradient with numbers that are infinite or NaN.
    NonFinite {
        /// How many of its elements.
        count: usize,
    },
    /// A finite gradient.
    Gradient {
        /// Its 2-norm.
        norm: f64,
    },
}

impl Reach {
    fn of(numbers: &[f64]) -> Self {
        let count = numbers.iter().filter(|number| !number.is_finite()).count();
        let largest = numbers.iter().fold(0.0, |largest: f64, number| largest.max(number.abs()));
        if count > 0 {
            Reach::NonFinite { count }
        } else if largest > 0.0 {
            // Divided by the largest: squares of very large or small numbers leave the range of f64.
            let sum: f64 = numbers.iter().map(|number| (number / largest).powi(2)).sum();
            Reach::Gradient { norm: largest * sum.sqrt() }
        } else if numbers.is_empty() {
            Reach::Gradient { norm: 0.0 }
        } else {
            Reach::Zero
        }
    }
}

/// The matrices that a loss multiplies with transposed, as linear layers do: each row makes one output. An
/// embedding is looked up, not multiplied, so it is not among them.
struct Projections<'n> {
    nodes: &'n [&'n Tensor],
    /// Each by the place of its elements and its number of columns.
    transposed: HashSet<(Option<usize>, usize)>,
}

impl<'n> Projections<'n> {
    fn of(nodes: &'n [&'n Tensor]) -> Self {
        let transposed = |node: &&Tensor| match *node.stride() {
            [.., 1, columns] if columns > 1 => Some((Lend::memory(*node), columns)),
            _ => None,
        };
        Projections { nodes, transposed: nodes.iter().filter_map(transposed).collect() }
    }

    fn has(&self, x: &Tensor) -> bool {
        let [_, columns] = *x.dims() else { return false };
        let is_transposed = |matrix: &Tensor| self.transposed.contains(&(Lend::memory(matrix), columns));
        // In the order of the graph, results come before the variables they are made of. If there is a copy
        // in another dtype, that copy is multiplied with.
        let is_copy =
            |node: &Tensor| node.dims() == x.dims() && node.dtype() != x.dtype() && !node.is_variable();
        let of_copy = |pair: &[&Tensor]| pair[1].id() == x.id() && is_copy(pair[0]) && is_transposed(pair[0]);
        is_transposed(x) || self.nodes.windows(2).any(of_copy)
    }
}

/// The fewest rows of a part: fewer are outputs that happen to have no influence.
const SMALLEST_PART: usize = 4;

/// The rows of a matrix without any gradient. All others have to have one, and these have to be whole parts
/// in a row, a quarter or more of all rows or of each head's rows.
fn cut(numbers: &[f64], shape: &[usize]) -> Vec<Range<usize>> {
    let [rows, columns] = *shape else { return Vec::new() };
    let mut runs: Vec<Range<usize>> = Vec::new();
    for row in (0..rows).filter(|row| numbers[row * columns..][..columns].iter().all(|&number| number == 0.0))
    {
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    let Some(first) = runs.first() else { return runs };
    let of_head = rows / runs.len();
    let is_regular = |(head, run): (usize, &Range<usize>)| {
        *run == (first.start + head * of_head..first.end + head * of_head)
    };
    let is_made_of =
        |part: usize| [of_head, first.start, first.end].iter().all(|end| end.is_multiple_of(part));
    let is_cut = rows.is_multiple_of(runs.len())
        && runs.iter().enumerate().all(is_regular)
        && 4 * first.len() >= of_head
        && (SMALLEST_PART..=first.len()).any(is_made_of);
    if is_cut { runs } else { Vec::new() }
}

impl Audit {
    /// Every trainable variable of the model, in the order of their paths.
    pub fn variables(&self) -> &[Audited] {
        &self.variables
    }

    /// The paths of the variables that the loss does not reach.
    pub fn unreached(&self) -> impl Iterator<Item = &str> {
        self.with(|reach| reach == Reach::Unreached)
    }

    /// The variables that the loss reaches and the model does not show, by shape and dtype.
    ///
    /// No optimiser of this model trains them, and no update can tell. They have no path, as only a model has
    /// paths. Here are the variables that [`model!`](crate::model) leaves out by `..`, and those that your
    /// own [`Model::visit`] forgets.
    pub fn outside(&self) -> &[(Vec<usize>, DType)] {
        &self.outside
    }

    fn with(&self, wanted: impl Fn(Reach) -> bool) -> impl Iterator<Item = &str> {
        self.variables.iter().filter(move |variable| wanted(variable.reach)).map(Audited::path)
    }
}

impl Audited {
    fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::Unreached => write!(f, "none"),
            Reach::Zero => write!(f, "zero"),
            Reach::NonFinite { count } => write!(f, "not finite in {count} elements"),
            Reach::Gradient { norm } => write!(f, "norm {norm:.3e}"),
        }
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |variable: &Audited| {
            let Audited { paths, shape, dtype, reach, .. } = variable;
            [paths.join(" = "), format!("{shape:?}"), format!("{dtype:?}"), reach.to_string()]
        };
        let header = ["variable", "shape", "dtype", "gradient"].map(str::to_string);
        let rows: Vec<[String; 4]> = std::iter::once(header).chain(self.variables.iter().map(row)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        for [path, shape, dtype, reach] in &rows {
            writeln!(f, "{path:<0$}  {shape:<1$}  {dtype:<2$}  {reach}", widths[0], widths[1], widths[2])?;
        }
        let (unreached, all) = (self.unreached().count(), self.variables.len());
        let mut is_cut = unreached > 0;
        if self.unreached().all(is_running_statistic) && is_cut {
            is_cut = false;
            writeln!(f, "The loss does not reach {unreached} of {all} variables. {STATISTICS}.")?;
        } else if unreached == all {
            writeln!(
                f,
                "The loss reaches none of the {all} variables. Pass the model that the loss was computed \
                 with; if this is it, something cuts the graph."
            )?;
        } else if is_cut {
            writeln!(
                f,
                "The loss does not reach {unreached} of {all} variables. If it should depend on them, \
                 something cuts the graph."
            )?;
        }
        for Audited { paths, shape, cut_rows, .. } in &self.variables {
            let Some(first) = cut_rows.first() else { continue };
            is_cut = true;
            let heads = if cut_rows.len() > 1 {
                format!(" (and so on, {} times)", cut_rows.len())
            } else {
                String::new()
            };
            write!(
                f,
                "Rows {first:?}{heads} of the {} of {:?} have no gradient at all. ",
                shape[0],
                paths.join(" = ")
            )?;
            writeln!(
                f,
                "If the matrix is several in one, such as queries, keys and values, something cuts the \
                 graph behind these rows. (A single position is an exception: its queries and keys have no \
                 effect.)"
            )?;
        }
        if is_cut {
            writeln!(f, "{CUTS}.")?;
        }
        let zeros: Vec<&str> = self.with(|reach| reach == Reach::Zero).collect();
        if !zeros.is_empty() {
            writeln!(
                f,
                "{} of {all} variables have a gradient of exactly zero: {}. In the first step that is right \
                 for one of LoRA's two factors. Otherwise something that they are multiplied with is zero, \
                 as every variable is that `VarBuilder::get` makes in a `VarMap` without an initialiser.",
                zeros.len(),
                joined(&listed(zeros.iter().copied()))
            )?;
        }
        for (shape, dtype) in &self.outside {
            writeln!(f, "The loss reaches a variable that the model does not show: {shape:?} of {dtype}.")?;
        }
        if !self.outside.is_empty() {
            writeln!(
                f,
                "No optimiser of this model trains what it does not show: name the field in the struct's \
                 `model!`, or show the variable in `Model::visit`, unless it is to stay as it is."
            )?;
        }
        Ok(())
    }
}
