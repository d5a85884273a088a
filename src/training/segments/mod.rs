//! A training step in segments, whose activations are computed again for the backward pass.
//!
//! A graph of candle keeps its activations. So the forward pass drops the graph of each segment at once, and
//! the backward pass computes the segment again, from variables that have the values of its input. candle's
//! `backward` cannot start from a given gradient, but always starts at 1. So `backward` is called on the sum
//! of y · ȳ over the outputs y of the segment, where ȳ is the gradient of the loss with respect to y, which
//! the backward pass of the next segment has found.
//!
//! Two things are difficult:
//!
//! - **When a gradient is complete**, because several segments may read one parameter. The forward pass
//!   records the first segment that reads each parameter. After the backward pass of that segment, the
//!   gradient of the parameter is complete, and the parameter may move, because no segment that runs later
//!   reads it.
//! - **The bits.** candle begins each gradient with zeros and adds to them, so 1 · ȳ is ȳ to the bit. The
//!   gradient w̄ that later segments have found for a parameter w enters the sum as one more term, w · w̄. So
//!   the graph of this segment adds to w̄ one use of w after another, as one graph of all segments would. A
//!   sum outside of the graph would have another order: the gradients of a row that an embedding looks up
//!   several times would first be added to each other.
//!
//! The price of these sums is memory: candle also computes the gradients of ȳ and w̄, which are not used.

mod activations;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::slice;

use candle_core::DType::F32;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};

use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::cuts::{USUAL, cut_hint};
use crate::step::loss_scaler::scaled::scale_loss;
use crate::step::outcome::Outcome;
use crate::step::update::Update;

pub use activations::Activations;

/// A model in segments, trained with the activations of one segment in memory.
///
/// A backward pass of candle needs the activations of the whole model, and returns all gradients at once.
/// `Segments` keeps only the inputs of segments. In the backward pass it computes each segment again, gives
/// the gradients of the segment to the step, and frees them. The price is a second forward pass, which is
/// about a third of a step.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, embedding, linear, loss::cross_entropy};
/// use optimisers::{AdamW, MixedPrecision, Segments, Update, setup};
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, BF16, &Device::Cpu);
/// let table = embedding(10, 8, builder.pp("table"))?;
/// let blocks = (0..3).map(|i| linear(8, 8, builder.pp(i))).collect::<Result<Vec<_>, _>>()?;
/// let head = linear(8, 10, builder.pp("head"))?;
/// let mut state = setup(MixedPrecision::new(F32, AdamW::new(1e-2)), &variables)?;
///
/// let (tokens, targets) = (Tensor::new(&[1u32, 2, 3], &Device::Cpu)?, Tensor::new(&[2u32, 3, 4], &Device::Cpu)?);
/// for _ in 0..5 {
///     let (loss, outcome) = Segments::new(&tokens)
///         .then(|tokens| table.forward(tokens))
///         .each(&blocks, |block, x| x + block.forward(x)?.relu()?)
///         .then(|x| head.forward(x))
///         .train(Update::new(&mut state), &variables, |logits| cross_entropy(&logits.to_dtype(F32)?, &targets))?;
///     println!("{loss}: {outcome:?}");
/// }
/// # assert_eq!(state.steps(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is in memory
/// Memory holds the input of each segment, and the graph and the gradients of one segment. For a transformer
/// with a segment for each block these are the hidden states before each block, and the activations of one
/// block. Segments of several blocks (`each(model.blocks.chunks(2), ..)`) keep fewer inputs and larger
/// graphs. The last segment is not computed again, because the loss follows at once, so let the last segment
/// be the head. Segments before the first variable keep nothing. The page on
/// [memory](crate::guide::memory#activations) has figures.
///
/// # Bits
/// Gradients, and with them parameters and state, have the bits of `loss.backward()` and
/// [`update`](crate::update). This includes the embedding of a usual transformer that is tied to its last
/// layer. In three cases a sum of three or more gradients may have another order, so that last digits
/// differ:
/// - Several segments read one parameter. `Segments` adds up its gradients from the last segment to the
///   first. candle has the same order, except for an operation on the parameter alone (`w.exp()`,
///   `w.to_dtype(..)`) that is the left operand of the next operation.
/// - Several tensors go between two segments, or a closure captures a tensor that depends on variables.
/// - A tensor between two segments is not contiguous.
///
/// # What a segment has to be
/// - A segment reads the same variables and returns the same numbers when it runs again. A segment with
///   dropout does not, because the generator of candle cannot be wound back. So variables and output are
///   compared with those of the first run, and a segment is refused if they differ. While the state has no
///   step, each segment that has to run again does so in the forward pass, before anything is written.
/// - A segment takes contiguous tensors, because a copy of its input is contiguous. For contiguous tensors
///   `LayerNorm` and `RmsNorm` of candle [cut](crate::guide::cuts) the graph, and for other tensors they do
///   not.
/// - A segment detaches no parameter that a later segment trains. `train` may move that parameter before the
///   segment runs again, which is noticed only if the output differs. For such a segment use
///   [`gradients`](Segments::gradients).
/// - A segment may write elsewhere, for example to BatchNorm's running statistics, but it writes in each run.
/// - A closure may capture tensors, such as a mask. If a captured tensor depends on variables, each segment
///   goes through the graph of that tensor again, and the gradients are right.
///
/// Several tensors go between segments as a tuple. A tensor that is not floating-point, or depends on no
/// variable, has no gradient. A sum of further losses, such as those of experts, is one more tensor:
/// `(hidden, sum)`.
#[must_use = "nothing is computed before `train` or `gradients`"]
pub struct Segments<'a, X> {
    input: Vec<Tensor>,
    runs: Vec<SegmentRun<'a>>,
    output: PhantomData<fn() -> X>,
}

/// A segment, as a function of the tensors of its input.
type SegmentRun<'a> = Box<dyn Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + 'a>;

impl<X> std::fmt::Debug for Segments<'_, X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments")
            .field("segments", &self.runs.len())
            .finish_non_exhaustive()
    }
}

impl<'a, X: Activations + 'a> Segments<'a, X> {
    /// Begins with the input of the model, and without segments.
    ///
    /// The input, such as tokens or pictures, must not depend on a variable.
    pub fn new(input: &X) -> Self {
        Segments {
            input: input.tensors(),
            runs: Vec::new(),
            output: PhantomData,
        }
    }

    /// Adds a segment, which takes the output of the segment before it.
    pub fn then<Y: Activations>(
        self,
        segment: impl Fn(&X) -> candle_core::Result<Y> + 'a,
    ) -> Segments<'a, Y> {
        let Segments { input, mut runs, .. } = self;
        runs.push(Box::new(move |x| {
            Ok(segment(&X::from_tensors(x.to_vec()))?.tensors())
        }));
        Segments {
            input,
            runs,
            output: PhantomData,
        }
    }

    /// Adds a segment for each of these parts, such as the blocks of a model.
    pub fn each<T: Copy + 'a>(
        mut self,
        parts: impl IntoIterator<Item = T>,
        segment: impl Fn(T, &X) -> candle_core::Result<X> + 'a,
    ) -> Self {
        let segment = Rc::new(segment);
        for part in parts {
            let segment = segment.clone();
            self = self.then(move |x| segment(part, x));
        }
        self
    }

    /// Trains the model by one step, and returns the loss.
    ///
    /// Each parameter moves as soon as its gradient is complete, and the gradient is freed. `train` runs the
    /// [streamed step](crate::StreamedStep) of [`Update::begin`], with the options of that step. With a
    /// [scaler](Update::scaler), `train` scales the loss, but returns the loss without the scale.
    ///
    /// If the scaler is dynamic and a gradient is not finite, the parameter of this gradient stays, others
    /// move, and the scale falls. To skip such a step as a whole, or to clip by the norm of all gradients,
    /// give the result of [`gradients`](Segments::gradients) to an update with the scaler, or with
    /// [`finite_only`](Update::finite_only).
    ///
    /// # Errors
    /// Before any segment has run: the errors of [`Update::begin`], and a model with memory that is no
    /// variable of candle's.
    ///
    /// Before any parameter has moved:
    /// - The input depends on a variable.
    /// - No output of a segment depends on its input, because something [cuts](crate::guide::cuts) the graph.
    /// - Neither a segment nor the loss reads a parameter, and all gradients are
    ///   [required](crate::StateTree::require_all).
    /// - A segment or the loss reads a variable that the state does not have, and all gradients are required
    ///   (see [`allow_others`](crate::StateTree::allow_others)).
    /// - A segment reads other variables or returns other numbers when it runs again, and the state has no
    ///   step yet.
    ///
    /// After some parameters may have moved (those that only later segments read), as in a step that is
    /// [dropped](crate::StreamedStep#what-a-streamed-step-does-not-promise):
    /// - A segment reads other variables or returns other numbers when it runs again.
    /// - A gradient is not finite, and there is no dynamic scaler.
    /// - [`push`](crate::StreamedStep::push) or [`finish`](crate::StreamedStep::finish) returns another
    ///   error, or an operation of candle fails.
    pub fn train<'s, M: Model + ?Sized>(
        self,
        update: Update<'s>,
        model: &'s M,
        loss: impl FnOnce(&X) -> candle_core::Result<Tensor>,
    ) -> Result<(Tensor, Outcome)> {
        let Update {
            state,
            options,
            mut scaler,
        } = update;
        if let Some(scaler) = &mut scaler {
            scaler.factor()?;
        }
        let update = Update {
            state,
            options,
            scaler: scaler.as_deref_mut(),
        };
        let result = catch_unwind(AssertUnwindSafe(|| self.step(update, model, loss)));
        if let (Err(_) | Ok(Err(_)), Some(scaler)) = (&result, scaler) {
            scaler.forget_loss();
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// [`Segments::train`] without the `forget_loss` after an error or a panic.
    fn step<'s, M: Model + ?Sized>(
        self,
        update: Update<'s>,
        model: &'s M,
        loss: impl FnOnce(&X) -> candle_core::Result<Tensor>,
    ) -> Result<(Tensor, Outcome)> {
        let is_first = update.state.steps() == 0;
        let mut step = update.begin(model)?;
        let paths = step.paths()?;
        let (pass, graph_loss) = self.forward(loss, is_first)?;
        let without_leaf = |x: &&Tensor| !paths.contains_key(&x.id());
        step.warn_of_others(pass.variables.iter().filter(without_leaf))?;
        step.check_complete(|x| pass.first_reader.contains_key(&x.id()))?;
        let (root, loss) = (scale_loss(&graph_loss, step.loss_scale())?, graph_loss.detach());
        drop(graph_loss);
        pass.backward(root, &mut |x, gradient| match paths.get(&x.id()) {
            Some(path) => step.push_of_segment(path, &gradient),
            None => Ok(()),
        })?;
        Ok((loss, step.finish()?))
    }

    /// The loss, and the gradients of all variables, as `loss.backward()` returns them.
    ///
    /// Use `gradients` if an update needs all gradients at once: to clip by their norm, to skip steps as a
    /// whole, or over ranks. [`Update::apply_owned`] then frees each gradient when its parameter moves.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Adam, ClipGlobalNorm, OptimiserChain, Segments, Update, setup};
    ///
    /// let model = vec![Var::new(&[1f32, 2.0], &Device::Cpu)?, Var::new(&[3f32, 4.0], &Device::Cpu)?];
    /// let mut state = setup(OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1))), &model)?;
    /// let input = model[0].ones_like()?;
    /// let (loss, grads) = Segments::new(&input).each(&model, |w, x| x * w.as_tensor()).gradients(|y| y.sum_all())?;
    /// let outcome = Update::new(&mut state).apply_owned(&model, grads)?;
    /// assert_eq!((loss.to_scalar::<f32>()?, outcome.applied), (11.0, 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// With a [`LossScaler`](crate::LossScaler), return the loss in F32 times
    /// [`factor`](crate::LossScaler::factor) from the closure, and give the scaler to the update. The loss
    /// that `gradients` returns then has this factor, too.
    ///
    /// # Errors
    /// If the input depends on a variable, no output of a segment depends on its input, a segment reads other
    /// variables or returns other numbers when it runs again, or an operation of candle fails.
    pub fn gradients(
        self,
        loss: impl FnOnce(&X) -> candle_core::Result<Tensor>,
    ) -> Result<(Tensor, GradStore)> {
        let (pass, root) = self.forward(loss, false)?;
        let loss = root.detach();
        // The store begins with the gradient of the loss alone, which is 1, because candle 0.10 makes no
        // empty store.
        let mut gradients = loss.backward()?;
        pass.backward(root, &mut |x, gradient| {
            gradients.insert(x, gradient);
            Ok(())
        })?;
        Ok((loss, gradients))
    }

    /// Runs all segments and the loss. If `repeats_at_once`, each segment that has to run again does
    /// so right after its first run.
    fn forward(
        self,
        loss: impl FnOnce(&X) -> candle_core::Result<Tensor>,
        repeats_at_once: bool,
    ) -> Result<(ForwardPass<'a>, Tensor)> {
        let Segments { input, mut runs, .. } = self;
        if input.iter().any(|x| !variables(x).is_empty()) {
            let problem = "the input of `Segments` depends on a variable";
            return Err(Error::new(ErrorKind::Argument, problem).with_remedy(
                "compute it in a segment, so that the variable has a gradient, or `detach` it",
            ));
        }
        // The loss follows the last segment at once, so the last segment need not run again.
        let last = runs.pop();
        let mut pass = ForwardPass {
            runs,
            inputs: vec![input],
            reads: Vec::new(),
            first_reader: HashMap::new(),
            variables: Vec::new(),
        };
        for segment in 0..pass.runs.len() {
            pass.advance(segment, repeats_at_once)?;
        }
        let x = &pass.inputs[pass.runs.len()];
        let y = last.map_or_else(|| Ok(x.clone()), |last| last(x))?;
        let loss = loss(&X::from_tensors(y))?;
        pass.record_reads(pass.runs.len(), slice::from_ref(&loss))?;
        Ok((pass, loss))
    }
}

/// The results of a forward pass that the backward pass needs.
struct ForwardPass<'a> {
    /// All segments except the last.
    runs: Vec<SegmentRun<'a>>,
    /// The inputs of all segments, also of the last. Tensors that have a gradient are variables. The inputs
    /// of a segment that need not run again are empty.
    inputs: Vec<Vec<Tensor>>,
    /// The variables that each segment reads.
    reads: Vec<HashSet<TensorId>>,
    /// The first segment that reads each variable.
    first_reader: HashMap<TensorId, usize>,
    /// The variables that segments read, without the inputs of segments.
    variables: Vec<Tensor>,
}

impl ForwardPass<'_> {
    /// Runs a segment, and stores its output as the input of the next.
    fn advance(&mut self, segment: usize, repeats_at_once: bool) -> Result<()> {
        let y = (self.runs[segment])(&self.inputs[segment])?;
        let depend_on_variables = self.record_reads(segment, &y)?;
        let runs_again = depend_on_variables.contains(&true);
        // Outputs with a gradient are copied to variables, because `y` keeps its graph.
        let next_input = |(y, depends_on_variables): (Tensor, bool)| match depends_on_variables {
            true => Ok(Var::from_tensor(&y.detach())?.into_inner()),
            false => Ok(y.detach()),
        };
        self.inputs.push(
            y.into_iter()
                .zip(depend_on_variables)
                .map(next_input)
                .collect::<Result<_>>()?,
        );
        if !runs_again {
            self.inputs[segment].clear();
        } else if repeats_at_once {
            self.run_again(segment, &self.inputs[segment + 1])?;
        }
        Ok(())
    }

    /// Records which variables a segment reads, and returns which of its outputs depend on a variable.
    fn record_reads(&mut self, segment: usize, y: &[Tensor]) -> Result<Vec<bool>> {
        let reads: Vec<Vec<Tensor>> = y.iter().map(variables).collect();
        let inputs: Vec<_> = self.inputs[segment].iter().filter(|x| x.is_variable()).collect();
        for x in reads.iter().flatten() {
            if let Entry::Vacant(entry) = self.first_reader.entry(x.id()) {
                entry.insert(segment);
                if inputs.iter().all(|input| input.id() != x.id()) {
                    self.variables.push(x.clone());
                }
            }
        }
        self.reads.push(reads.iter().flatten().map(Tensor::id).collect());
        if !inputs.is_empty() && !inputs.iter().any(|x| self.first_reader.contains_key(&x.id())) {
            let name = self.name(segment);
            let problem = format!("no output of {name} depends on its input");
            return Err(Error::new(ErrorKind::NoGradient, problem).with_remedy(format!(
                "find what cuts the graph in this segment, because no segment before it has a gradient. \
                 {}",
                cut_hint(&USUAL)
            )));
        }
        Ok(reads.iter().map(|reads| !reads.is_empty()).collect())
    }

    /// Gives `take` each variable with its gradient, from the last segment to the first; `root` is the loss.
    fn backward(
        mut self,
        mut root: Tensor,
        take: &mut dyn FnMut(&Tensor, Tensor) -> Result<()>,
    ) -> Result<()> {
        // The incomplete gradients: variables that earlier segments read as well, with the gradients that
        // later segments have found.
        let mut incomplete: HashMap<TensorId, (Tensor, Tensor)> = HashMap::new();
        while let Some(input) = self.inputs.pop() {
            let segment = self.inputs.len();
            let mut gradients = root.backward()?;
            // The gradient is detached, because candle gives it a graph of its own, with intermediate
            // gradients.
            let mut remove_gradient = |x: &Tensor| gradients.remove(x).map(|gradient| gradient.detach());
            let cotangents: Vec<_> = input
                .iter()
                .map(|x| remove_gradient(x).filter(|_| x.is_variable()))
                .collect();
            let parameters: Vec<_> = variables(&root)
                .into_iter()
                .filter_map(|x| Some((remove_gradient(&x)?, x)))
                .collect();
            drop((gradients, root));
            for (gradient, x) in parameters {
                if self
                    .first_reader
                    .get(&x.id())
                    .is_some_and(|&reader| reader < segment)
                {
                    incomplete.insert(x.id(), (x, gradient));
                } else {
                    take(&x, gradient)?;
                }
            }
            if cotangents.iter().all(Option::is_none) {
                break;
            }
            let y = self.run_again(segment - 1, &input)?;
            let shared = y
                .iter()
                .flat_map(variables)
                .filter_map(|x| incomplete.remove(&x.id()));
            let shared_terms: Vec<_> = shared.map(|(x, gradient)| (x, Some(gradient))).collect();
            // Shared variables come last, because candle takes the terms of a sum from the last to the first.
            // So the segment adds its own gradients to those of later segments, in the order of one graph.
            let terms = y
                .into_iter()
                .zip(cotangents)
                .chain(shared_terms)
                .filter_map(|(y, cotangent)| {
                    // The value of the sum is not used. Its gradient is 1, so the gradient of `y` is the
                    // cotangent.
                    Some((y * cotangent?).and_then(|product| product.sum_all()?.to_dtype(F32)))
                });
            let sum = terms.reduce(|sum, term| {
                let sum = sum?;
                &sum + term?.to_device(sum.device())?
            });
            let Some(sum) = sum.transpose()? else { break };
            root = sum;
        }
        // The other gradients are complete, too: after a `break` no gradient reaches an earlier segment.
        incomplete
            .into_values()
            .try_for_each(|(x, gradient)| take(&x, gradient))
    }

    /// Runs a segment once more, and checks that it returns the same output.
    fn run_again(&self, segment: usize, first_output: &[Tensor]) -> Result<Vec<Tensor>> {
        let y = (self.runs[segment])(&self.inputs[segment])?;
        let mut is_same = y.len() == first_output.len();
        for (y, first) in y.iter().zip(first_output) {
            is_same &= y.shape() == first.shape() && y.dtype() == first.dtype();
            if is_same && y.elem_count() > 0 {
                // Two NaN are the same output, although NaN differs from itself.
                let (differs, are_nan) = (y.ne(first)?, (y.ne(y)? * first.ne(first)?)?);
                is_same = differs.ne(&are_nan)?.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0;
            }
        }
        let name = self.name(segment);
        let reads: HashSet<TensorId> = y.iter().flat_map(variables).map(|x| x.id()).collect();
        if is_same && reads == self.reads[segment] {
            return Ok(y);
        }
        if is_same {
            // A gradient would be lost, or would come after its variable has moved.
            let problem = format!("{name} reads other variables when it runs again");
            return Err(Error::new(ErrorKind::Contract, problem).with_remedy(
                "let each segment read only its input, the model, and what does not change during the step: \
                 no tensor that another segment puts into a cell, and no variable that the segment makes",
            ));
        }
        let problem = format!("{name} returns other numbers for the same input when it runs again");
        Err(Error::new(ErrorKind::Contract, problem).with_remedy(
            "leave dropout out, or multiply by masks that are drawn before the step, because the generator \
             of candle cannot be wound back; for a segment that reads a detached parameter use \
             `Segments::gradients`",
        ))
    }

    fn name(&self, segment: usize) -> String {
        let count = self.runs.len() + 1;
        let loss = if segment + 1 == count {
            ", with the loss,"
        } else {
            ""
        };
        format!("segment {} of {count}{loss}", segment + 1)
    }
}

/// The variables that a tensor depends on.
fn variables(y: &Tensor) -> Vec<Tensor> {
    y.sorted_nodes()
        .into_iter()
        .filter(|node| node.is_variable())
        .cloned()
        .collect()
}
