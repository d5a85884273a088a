//! The audit: which variables of a model a loss reaches.
//!
//! One case is difficult: a matrix can be several matrices in one, and only some of them get a gradient. The
//! gradient of the whole matrix then has rows of zeros, which the audit looks for. But rows of zeros are also
//! usual in a table that is looked up, and for outputs without influence. So only matrices of linear layers
//! are searched ([`Projections`]), and only regular ranges of rows are reported ([`find_cut_rows`]).

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;

use candle_core::{Device, Tensor, TensorId};

use crate::error::{Result, comma_separated, first_names};
use crate::model::candle::{CandleVariable, candle_variables};
use crate::model::cuts::{NORMS, QUERIES, STATISTICS, USUAL, cut_hint, is_running_statistic};
use crate::model::lent::Lend;
use crate::model::{Model, empty_model_error};
use crate::numbers::DType;
use crate::tree::is_trainable;

/// Finds out, by one backward pass, which variables of `model` the loss reaches.
///
/// An audit needs no state, so call `audit` before training, with the model that the loss was computed with.
/// The result prints as a table with remarks. The parameters stay as they are, and the loss can be used
/// again. Gradients are copied to the CPU one at a time.
///
/// A remark names the variables whose gradient is exactly zero. For one of LoRA's two factors a zero gradient
/// is right in the first step, because the other factor is zero. But `VarBuilder::get` without an initialiser
/// makes zeros in a `VarMap`, and a model with a norm or table of zeros may never train.
/// [`StateTree::require_all`](crate::StateTree::require_all) accepts such a model, because all its variables
/// have gradients.
///
/// If a matrix is several matrices in one, the audit shows which [rows](Audited::cut_rows) have no gradient.
/// Variables that the model does not show have no path, and are listed [by shape and dtype](Audit::outside).
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
    let variables = candle_variables(model, is_trainable)?;
    if variables.is_empty() {
        return Err(empty_model_error());
    }
    let ids: HashSet<TensorId> = variables.iter().map(|variable| variable.tensor.id()).collect();
    let nodes = loss.sorted_nodes();
    let outside = unknown_variables(&nodes, |x| ids.contains(&x.id()))
        .into_iter()
        .map(|variable| (variable.dims().to_vec(), variable.dtype().into()))
        .collect();
    let (projections, gradients) = (Projections::new(&nodes), loss.backward()?);
    let audit_variable = |CandleVariable { paths, tensor }| {
        let (mut reach, mut cut_rows) = (Reach::Unreached, Vec::new());
        if let Some(gradient) = gradients.get(&tensor) {
            let numbers: Vec<f64> = gradient
                .to_device(&Device::Cpu)?
                .to_dtype(DType::F64.into())?
                .flatten_all()?
                .to_vec1()?;
            reach = Reach::from_gradient(&numbers);
            if matches!(reach, Reach::Gradient { .. }) && projections.contains(&tensor) {
                cut_rows = find_cut_rows(&numbers, tensor.dims());
            }
        }
        Ok(Audited {
            paths,
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype().into(),
            reach,
            cut_rows,
        })
    };
    Ok(Audit {
        variables: variables.into_iter().map(audit_variable).collect::<Result<_>>()?,
        outside,
    })
}

/// The variables in a graph for which `is_known` is false.
pub(super) fn unknown_variables<'n>(
    nodes: &[&'n Tensor],
    is_known: impl Fn(&Tensor) -> bool,
) -> Vec<&'n Tensor> {
    let unknown = nodes.iter().filter(|node| node.is_variable() && !is_known(node));
    unknown.copied().collect()
}

/// The result of [`audit`], which prints as a table with remarks.
#[must_use = "an audit does nothing by itself: print it"]
#[derive(Clone, Debug, PartialEq)]
pub struct Audit {
    variables: Vec<Audited>,
    outside: Vec<(Vec<usize>, DType)>,
}

/// A variable of the model, and how the loss depends on it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Audited {
    /// The paths of the variable; several if the variable is tied.
    pub paths: Vec<String>,
    /// The shape of the variable.
    pub shape: Vec<usize>,
    /// The dtype of the variable.
    pub dtype: DType,
    /// The kind of gradient that the variable has.
    pub reach: Reach,
    /// The rows without any gradient, if they are whole parts of the matrix and all other rows have a
    /// gradient.
    ///
    /// An example is a linear layer for queries, keys and values before `rotary_emb::rope` or
    /// `ops::softmax_last_dim`, which [cut](crate::guide::cuts) the graph: the rows of queries and keys have
    /// no gradient. If each head has its own part, there are several ranges. In all other cases the list is
    /// empty, also for an embedding, because most rows of an embedding rightly have no gradient.
    pub cut_rows: Vec<Range<usize>>,
}

/// The kind of gradient that a variable has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reach {
    /// No gradient: the loss does not depend on the variable, or the graph is cut.
    Unreached,
    /// A gradient that is zero in every element.
    Zero,
    /// A gradient with numbers that are infinite or NaN.
    NonFinite {
        /// The number of infinite or NaN elements.
        count: usize,
    },
    /// A finite gradient.
    Gradient {
        /// The 2-norm of the gradient.
        norm: f64,
    },
}

impl Reach {
    fn from_gradient(numbers: &[f64]) -> Self {
        let count = numbers.iter().filter(|number| !number.is_finite()).count();
        let largest = numbers
            .iter()
            .fold(0.0, |largest: f64, number| largest.max(number.abs()));
        if count > 0 {
            Reach::NonFinite { count }
        } else if largest > 0.0 {
            // Numbers are divided by the largest, because squares of very large or small numbers leave the
            // range of f64.
            let sum: f64 = numbers.iter().map(|number| (number / largest).powi(2)).sum();
            Reach::Gradient {
                norm: largest * sum.sqrt(),
            }
        } else if numbers.is_empty() {
            Reach::Gradient { norm: 0.0 }
        } else {
            Reach::Zero
        }
    }
}

/// The matrices by whose transpose a graph multiplies, as linear layers do. Each row of such a matrix makes
/// one output. An embedding is no such matrix, because its rows are looked up.
struct Projections {
    /// By memory and number of columns: a transpose is a view, with the memory of the matrix.
    transposed: HashSet<(Option<usize>, usize)>,
    /// The matrices that are transposed as a copy in another dtype.
    cast: HashSet<TensorId>,
}

impl Projections {
    fn new(nodes: &[&Tensor]) -> Self {
        let as_transpose = |node: &&Tensor| match *node.stride() {
            [.., 1, columns] if columns > 1 => Some((Lend::memory(*node), columns)),
            _ => None,
        };
        let transposed = nodes.iter().filter_map(as_transpose).collect();
        let mut projections = Projections {
            transposed,
            cast: HashSet::new(),
        };
        // A layer may multiply by a copy of x in another dtype. The nodes have results before operands, so
        // the copy is right before x.
        for pair in nodes.windows(2) {
            let [node, x] = [pair[0], pair[1]];
            let is_cast = node.dims() == x.dims() && node.dtype() != x.dtype() && !node.is_variable();
            if is_cast && projections.is_transposed(node) {
                projections.cast.insert(x.id());
            }
        }
        projections
    }

    fn is_transposed(&self, matrix: &Tensor) -> bool {
        let [_, columns] = *matrix.dims() else {
            return false;
        };
        self.transposed.contains(&(Lend::memory(matrix), columns))
    }

    fn contains(&self, x: &Tensor) -> bool {
        self.is_transposed(x) || self.cast.contains(&x.id())
    }
}

/// The fewest rows of a part. Fewer rows may be outputs that happen to have no influence.
const SMALLEST_PART: usize = 4;

/// The ranges of rows without any gradient, if the graph seems to be cut after them; else empty.
///
/// With n ranges the matrix must consist of n heads of equal length. Each head must have one range, at the
/// same place in each head. A range must be a quarter of its head or more. Heads and ranges must consist of
/// whole parts of one length, which is at least `SMALLEST_PART`.
fn find_cut_rows(numbers: &[f64], shape: &[usize]) -> Vec<Range<usize>> {
    let [rows, columns] = *shape else {
        return Vec::new();
    };
    let mut runs: Vec<Range<usize>> = Vec::new();
    for row in (0..rows).filter(|row| {
        numbers[row * columns..][..columns]
            .iter()
            .all(|&number| number == 0.0)
    }) {
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    let Some(first) = runs.first() else { return runs };
    let head_rows = rows / runs.len();
    let is_regular = |(head, run): (usize, &Range<usize>)| {
        *run == (first.start + head * head_rows..first.end + head * head_rows)
    };
    let consists_of_parts = |part: usize| {
        [head_rows, first.start, first.end]
            .iter()
            .all(|bound| bound.is_multiple_of(part))
    };
    let is_cut = rows.is_multiple_of(runs.len())
        && runs.iter().enumerate().all(is_regular)
        && 4 * first.len() >= head_rows
        && (SMALLEST_PART..=first.len()).any(consists_of_parts);
    if is_cut { runs } else { Vec::new() }
}

impl Audit {
    /// Every trainable variable of the model, in the order of their paths.
    pub fn variables(&self) -> &[Audited] {
        &self.variables
    }

    /// The paths of the variables that the loss does not reach.
    pub fn unreached(&self) -> impl Iterator<Item = &str> {
        self.paths_where(|reach| reach == Reach::Unreached)
    }

    /// The variables that the loss reaches and the model does not show, by shape and dtype.
    ///
    /// No optimiser of this model trains these variables, and no update can detect them. They have no path,
    /// because only a model has paths. Examples are the fields that [`model!`](crate::model) leaves out by
    /// `..`, and fields that a hand-written [`Model::visit`] forgets.
    pub fn outside(&self) -> &[(Vec<usize>, DType)] {
        &self.outside
    }

    fn paths_where(&self, condition: impl Fn(Reach) -> bool) -> impl Iterator<Item = &str> {
        self.variables
            .iter()
            .filter(move |variable| condition(variable.reach))
            .map(Audited::path)
    }

    /// The operations that are likely to have cut the graph. Such an operation leaves no trace in the graph,
    /// because its result is a constant. So the variables that are cut off decide which operations are
    /// likely.
    fn likely_cuts(&self) -> Vec<&'static str> {
        let begins_with_queries = |x: &Audited| x.cut_rows.first().is_some_and(|rows| rows.start == 0);
        let are_queries_cut = self.variables.iter().any(begins_with_queries) || self.has_cut_pair();
        let modules_with_matrix: HashSet<&str> = self
            .variables
            .iter()
            .filter(|x| x.shape.len() > 1)
            .map(Audited::module)
            .collect();
        let is_of_norm = |x: &&Audited| {
            let is_scale = x.shape.len() == 1 && !x.path().ends_with("bias");
            is_scale && !is_running_statistic(x.path()) && !modules_with_matrix.contains(x.module())
        };
        let norms: Vec<&Audited> = self.variables.iter().filter(is_of_norm).collect();
        if norms.is_empty() && !are_queries_cut {
            return USUAL.to_vec();
        }
        let is_norm_cut = norms.iter().any(|x| x.reach == Reach::Unreached);
        let causes = [(are_queries_cut, QUERIES), (is_norm_cut, NORMS)];
        causes
            .into_iter()
            .filter_map(|(is_likely, cause)| is_likely.then_some(cause))
            .collect()
    }

    /// Whether the loss reaches one of three sibling matrices (values) and not the two others (queries and
    /// keys).
    fn has_cut_pair(&self) -> bool {
        let mut siblings: BTreeMap<String, [Vec<&[usize]>; 2]> = BTreeMap::new();
        for x in self.variables.iter().filter(|x| x.shape.len() > 1) {
            let names: Vec<&str> = x.path().split('.').collect();
            // Siblings differ in one of the last two names: in `q` of `q.weight`, or in the last name `q` if
            // matrices are in no layer. Layers in a row are named by numbers, and are no siblings.
            for i in (0..names.len())
                .rev()
                .take(2)
                .filter(|&i| names[i].parse::<usize>().is_err())
            {
                let key = [&names[..i], &["*"], &names[i + 1..]].concat().join(".");
                siblings.entry(key).or_default()[usize::from(x.reach != Reach::Unreached)].push(&x.shape);
            }
        }
        siblings
            .values()
            .any(|[cut, reached]| cut.len() == 2 && reached.iter().any(|x| cut.contains(x)))
    }
}

impl Audited {
    fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }

    /// The path of the layer that has the variable.
    fn module(&self) -> &str {
        self.path().rsplit_once('.').map_or("", |(module, _)| module)
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
        self.write_table(f)?;
        let has_cut_variables = self.write_unreached(f)?;
        let has_cut_rows = self.write_cut_rows(f)?;
        if has_cut_variables || has_cut_rows {
            writeln!(f, "{}.", cut_hint(&self.likely_cuts()))?;
        }
        self.write_zeros(f)?;
        self.write_outside(f)
    }
}

/// The table and the remarks, in the order in which an audit prints them.
impl Audit {
    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |variable: &Audited| {
            let Audited {
                paths,
                shape,
                dtype,
                reach,
                ..
            } = variable;
            [
                paths.join(" = "),
                format!("{shape:?}"),
                format!("{dtype:?}"),
                reach.to_string(),
            ]
        };
        let header = ["variable", "shape", "dtype", "gradient"].map(str::to_string);
        let rows: Vec<[String; 4]> = std::iter::once(header)
            .chain(self.variables.iter().map(row))
            .collect();
        let width = |column: usize| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths = [width(0), width(1), width(2)];
        for [path, shape, dtype, reach] in &rows {
            writeln!(
                f,
                "{path:<0$}  {shape:<1$}  {dtype:<2$}  {reach}",
                widths[0], widths[1], widths[2]
            )?;
        }
        Ok(())
    }

    /// Writes how many variables the loss does not reach, and returns whether the graph is cut before one of
    /// them. Running statistics are no sign of a cut.
    fn write_unreached(&self, f: &mut fmt::Formatter<'_>) -> Result<bool, fmt::Error> {
        let (unreached, all) = (self.unreached().count(), self.variables.len());
        if unreached == 0 {
            return Ok(false);
        }
        if self.unreached().all(is_running_statistic) {
            writeln!(
                f,
                "The loss does not reach {unreached} of {all} variables. {STATISTICS}."
            )?;
            return Ok(false);
        }
        if unreached == all {
            writeln!(
                f,
                "The loss reaches none of the {all} variables. Pass the model that the loss was computed \
                 with; if this is that model, something cuts the graph."
            )?;
        } else {
            writeln!(
                f,
                "The loss does not reach {unreached} of {all} variables. If it should depend on them, \
                 something cuts the graph."
            )?;
        }
        Ok(true)
    }

    /// Writes which rows have no gradient, and returns whether a matrix has such rows.
    fn write_cut_rows(&self, f: &mut fmt::Formatter<'_>) -> Result<bool, fmt::Error> {
        let mut has_cut_rows = false;
        for Audited {
            paths,
            shape,
            cut_rows,
            ..
        } in &self.variables
        {
            let Some(first) = cut_rows.first() else { continue };
            has_cut_rows = true;
            let heads = if cut_rows.len() > 1 {
                format!(" (and so on, {} times)", cut_rows.len())
            } else {
                String::new()
            };
            write!(
                f,
                "Rows {first:?}{heads} of the {} rows of {:?} have no gradient at all. ",
                shape[0],
                paths.join(" = ")
            )?;
            writeln!(
                f,
                "If the matrix is several in one, such as queries, keys and values, something cuts the graph \
                 after these rows. (A single position is an exception: its queries and keys have no effect.)"
            )?;
        }
        Ok(has_cut_rows)
    }

    fn write_zeros(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zeros: Vec<&str> = self.paths_where(|reach| reach == Reach::Zero).collect();
        if zeros.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "{} of {} variables have a gradient of exactly zero: {}. In the first step that is right for one \
             of LoRA's two factors. Otherwise these variables are multiplied by zeros, for example by a \
             variable that `VarBuilder::get` made in a `VarMap` without an initialiser.",
            zeros.len(),
            self.variables.len(),
            comma_separated(&first_names(zeros.iter().copied()))
        )
    }

    fn write_outside(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shape, dtype) in &self.outside {
            writeln!(
                f,
                "The loss reaches a variable that the model does not show: {shape:?} of {dtype}."
            )?;
        }
        if self.outside.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "An optimiser of this model does not train such a variable. To train the variable, name its \
             field in the `model!` of the struct, or show the variable in `Model::visit`."
        )
    }
}
