//! The public side of a step: [`update`] and [`Update`].
//!
//! `apply`, `apply_owned` and `release_windows` lead to `Update::run`. All that can fail in `run` before
//! `step` (`step/pipeline.rs`) is in one closure, `begin`, which also returns the error of an earlier
//! look-up. An error of `begin` goes through `settle`, because the other ranks may already wait for this
//! rank.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(crate) use super::call::UpdateOptions;
use super::call::{UpdateCall, sources};
use super::leaf::GradientSource;
use super::loss_scaler::LossScaler;
use super::outcome::Outcome;
use super::pipeline::step;
use crate::engine::{Engine, Sources};
use crate::error::Result;
use crate::model::Model;
use crate::model::gradients::{GradientLookUp, Gradients, look_up, with_look_up};
use crate::model::lent::Lent;
use crate::ranks::Call;
use crate::tree::{Leaf, StateTree};

/// Applies one step to every parameter of `model`, in place.
///
/// `model` is the model that was given to [`setup`](crate::setup). `grads` is candle's `GradStore`, or a map
/// or list of gradients by path. All checks and norms come before the first write, so an error about the
/// arguments leaves model and state as they were; a failing device [may
/// not](#what-is-left-in-the-middle).
///
/// A parameter without a gradient keeps its value, its state and its counters. Only a window of
/// [`AccumGrad`](crate::AccumGrad) advances, and an [average](crate::Ema) counts the step. The outcome lists
/// such parameters in each call, a [warning](crate::Warning::WithoutGradient) names them once, and
/// [`StateTree::require_all`] makes a missing gradient an error. Some operations of candle cut gradients
/// without an error: see [the list](crate::guide::cuts).
///
/// A gradient of zeros is a gradient. Gradients may have any float dtype and any layout, and may be the
/// parameter itself or a view of the parameter.
///
/// A gradient that is infinite or NaN is applied, and a [warning](crate::Warning::ParameterNotFinite) reports
/// the parameter. A clipping rule can refuse such a gradient, and [`Update::finite_only`] skips the call.
///
/// # Concurrency
/// Another thread may evaluate the model during an update. Each parameter is replaced as a whole, one after
/// another, so an evaluation can see some parameters before the step and others after it, but no half-written
/// parameter. If that matters, evaluate a copy of the model. Under [`Offload`](crate::Offload) a parameter of
/// more than about a million elements is written in parts, and can be seen half-written.
///
/// Do not hold a storage guard (`Tensor::storage_and_layout`) of a parameter across the call: the call would
/// wait for the guard for ever. Several threads may update several models, even if the gradients are
/// variables of other models. Threads that lock several parameters at once must lock them in one order, as
/// evaluations of one model do: candle's locks let no reader pass a waiting writer, so two readers with
/// different orders deadlock as soon as a third thread writes.
///
/// On a CUDA device candle has a stream for each thread of the host. The fused engine waits for all streams,
/// and all streams wait for it. `Offload` and candle's tensor operations ([`Engine::Tensors`], devices
/// without a fused engine) use only the stream of the calling thread. There, a thread that has run a backward
/// pass must call `Device::synchronize` before another thread uses the gradients, and so must a thread that
/// has updated the model before another thread evaluates it. The page [`devices`](crate::guide::devices)
/// lists what has been run on a GPU.
///
/// # Errors
/// - The model is not the state's.
/// - No parameter has a gradient, or over ranks a rank with a weight above 0 has none, or not all have that
///   are [required](StateTree::require_all).
/// - A gradient has an unknown name, another shape or device, or a dtype that is not floating-point.
/// - The storage of a parameter, master or gradient does not hold its elements, because an in-place operation
///   has exchanged the storage, or because the tensor was made so ([`Memory`](crate::ErrorKind::Memory)).
/// - An owner of [lent memory](crate::Lend) does not lend its memory, or lends other memory than it has
///   described.
/// - A parameter was changed outside of `update` although it [follows a master](crate::MixedPrecision), or
///   although the state has its [copy](crate::Slot::parameter), its [norm](crate::Hyperball) or its [rounding
///   errors](crate::Kahan). Or the model holds other weights instead of its parameters. Both are errors of
///   the kind [`Changed`](crate::ErrorKind::Changed).
/// - A clipping rule refuses a norm that is not finite.
/// - Two [schedules](StateTree::schedule) on numbers of one field cross.
/// - A device fails, usually for lack of memory.
/// - The state is [divided](crate::Setup::over) among ranks, and another rank refuses the call, has left,
///   makes another call, or brings data that does not match.
///
/// # Panics
/// If a rule outside of this crate, or an owner of [lent memory](crate::Lend), panics. Model and state are
/// then as they were, unless the panic came while parameters were written: arithmetic, a [late
/// function](crate::Gradient::with_tensors_late) and an owner can panic at that stage.
/// [`Rule`](crate::Rule#panics) describes what such a panic leaves. After that stage an owner, a rule's
/// description or a logger can panic. Then the step counts and has used up the scaled loss, and over ranks
/// all ranks have the new parameters.
///
/// # What is left in the middle
/// While parameters are written, only four things can fail: a device, a rule's [late
/// function](crate::Gradient::with_tensors_late), a tensor whose storage is exchanged at that very time, and
/// an owner of [lent memory](crate::Lend) that no longer lends what it lent in the plan. The error names the
/// parameters that have moved. If an owner failed after its memory was written, its parameter is among them.
/// Such an error leaves
///
/// - on the CPU, every parameter with its state and counters either as it was or moved as a whole. The
///   parameter of a function that failed is as it was;
/// - on a device, parameters and state that have moved in part, without their counters, because launched
///   kernels cannot be undone;
/// - under [`Offload`](crate::Offload), also masters that are ahead of their parameters (in a large
///   parameter, partly). The next update compares samples, and may miss the difference;
/// - the count of calls in windows of [`AccumGrad`](crate::AccumGrad) as it was;
/// - over [ranks](crate::Setup::over), if a rank has left or an owner fails: state that has moved in part,
///   and parameters that only some ranks have updated. Start all ranks anew from a checkpoint.
///
/// Model and state are usable after such an error, but no longer fit each other: restore both from a
/// checkpoint, or from a copy. [`Update::functional`] leaves the originals intact.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Status, setup, update};
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let grads = x.sqr()?.sum_all()?.backward()?;
/// let outcome = update(&mut state, &x, &grads)?;
/// assert_eq!((outcome.status, outcome.applied), (Status::Stepped, 1));
/// assert_eq!(x.to_vec1::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn update<M: Model + ?Sized, G: Gradients + ?Sized>(
    state: &mut StateTree,
    model: &M,
    grads: &G,
) -> Result<Outcome> {
    Update::new(state).apply(model, grads)
}

/// An [`update`] with options, such as [`finite_only`](Update::finite_only) or [`weight`](Update::weight).
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, SkipReason, Status, Update, setup};
///
/// let x = Var::new(&[0f32, f32::INFINITY], &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let outcome = Update::new(&mut state).finite_only().apply(&x, &x.sqr()?.sum_all()?.backward()?)?;
/// assert_eq!(outcome.status, Status::Skipped(SkipReason::NotFinite { path: "".to_string() }));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Update::functional`] is the form over a shared reference to a state.
#[must_use = "an update does nothing until `apply` is called"]
#[derive(Debug)]
pub struct Update<'s, S = &'s mut StateTree> {
    pub(crate) state: S,
    pub(crate) options: UpdateOptions,
    pub(crate) scaler: Option<&'s mut LossScaler>,
}

impl<'s> Update<'s> {
    /// An update of `state`, with the default options.
    pub fn new(state: &'s mut StateTree) -> Self {
        Update {
            state,
            options: UpdateOptions::default(),
            scaler: None,
        }
    }
}

/// Options of an update.
impl<'s, S> Update<'s, S> {
    /// Chooses the engine.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.options.engine = engine;
        self
    }

    /// Divides the gradients by the scale that `scaler` has multiplied their loss by.
    ///
    /// The call checks that all gradients are finite, divides them, and applies the step. If a gradient is
    /// not finite, no parameter moves: the outcome is skipped and names the parameter, and a dynamic scale
    /// falls.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, LossScaler, Update, setup, trainables};
    ///
    /// let model = vec![Var::new(&[1f32, 2.0], &Device::Cpu)?];
    /// let mut scaler = LossScaler::dynamic();
    /// let (mut state, parameters) = (setup(Descent::new(0.25), &model)?, trainables(&model)?);
    /// let grads = scaler.scale(&parameters["0"].sqr()?.sum_all()?)?.backward()?;
    /// let (_, next, _) = Update::functional(&state).scaler(&mut scaler).apply(&parameters, &grads)?;
    /// assert_eq!(next["0"].to_vec1::<f32>()?, [0.5, 1.0]);
    ///
    /// let grads = scaler.scale(&model[0].sqr()?.sum_all()?)?.backward()?;
    /// Update::new(&mut state).scaler(&mut scaler).apply(&model, &grads)?;
    /// assert_eq!(model[0].to_vec1::<f32>()?, [0.5, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scaler(mut self, scaler: &'s mut LossScaler) -> Self {
        self.scaler = Some(scaler);
        self
    }

    /// Skips the call if a gradient has a number that is infinite, NaN or too large to be squared.
    ///
    /// In a skipped call no parameter moves, and the outcome names the parameter of this gradient. Numbers
    /// that are too large matter only for rules that keep squares.
    ///
    /// Open windows of [`AccumGrad`](crate::AccumGrad) keep their sums and do not count a skipped call. If
    /// the gradients of the call are finite but the sum of a window is not, all windows are [given
    /// up](crate::SkipReason::WindowsGivenUp).
    ///
    /// Squares are checked because an infinite [second moment](crate::Slot::second_moment) stays infinite:
    /// its parameter does not move any more, or is NaN. So after loss scale and clipping no number may
    /// exceed a quarter of the root of the largest number in the dtype of the second moment: 4.6e18 in F32,
    /// bf16 and 8 bits, 3.3e153 in F64. For rules that add up squares of a whole tensor
    /// ([`Adafactor`](crate::Adafactor), [`Shampoo`](crate::Shampoo), [`SOAP`](crate::SOAP) and the like) the
    /// limit is divided by the root of the number of elements. Clipping before such a rule makes gradients
    /// small enough, so that no call is skipped for large numbers.
    ///
    /// The check reads the gradients once more. It costs nothing if
    /// [`ClipGlobalNorm`](crate::ClipGlobalNorm), which reads them anyway, is first in the chain; f64 is the
    /// exception, because the norm of finite numbers in f64 can be infinite. bf16 needs the check as f16
    /// does: its range is that of f32, but an exploding loss leaves that range too.
    pub fn finite_only(mut self) -> Self {
        self.options.finite_only = true;
        self
    }

    /// Sets the weight of this call in the weighted mean of [`AccumGrad`](crate::AccumGrad) or over ranks;
    /// default 1.
    ///
    /// For a loss that is a mean over tokens, pass the number of tokens, and set the field `average` of
    /// `AccumGrad` to [`Average::Weighted`](crate::Average::Weighted). In one process nothing else reads the
    /// weight: with the default `Average::Mean` every call counts alike, and the gradients of a call with
    /// weight 0 are read. With `Average::Weighted` these gradients are not read. Over ranks, a rank without
    /// data takes part with weight 0; its call needs neither gradients nor, with a [scaler](Update::scaler),
    /// a scaled loss. A weight above `u64::MAX / 2` is refused, and so are weights of a window or of all
    /// ranks that add up to more.
    pub fn weight(mut self, count: u64) -> Self {
        self.options.weight = count;
        self
    }

    /// If a parameter was changed outside of `update`, goes on from its master and overwrites the change.
    ///
    /// Without this option such a parameter is an error if the update notices the change; on a device it is
    /// noticed only until the parameter's first step, see [`MixedPrecision`](crate::MixedPrecision). All else
    /// that follows from the parameter stays as well: copies, such as the slow weights of
    /// [`Lookahead`](crate::Lookahead), the norm of [`Hyperball`](crate::Hyperball), and what
    /// [`Kahan`](crate::Kahan) has lost. So this option is for a program that masks or clamps its weights
    /// after each step.
    pub fn keep_masters(mut self) -> Self {
        self.options.keep_masters = true;
        self
    }

    /// Also computes the norms of gradient, parameter and update, for every parameter that moves.
    ///
    /// [`Outcome::figures`](crate::Outcome::figures) has the norms. Their [ratio](crate::LeafFigures::ratio),
    /// plotted over time, shows which parameters do not learn, and which explode. Without this option the
    /// norms cost nothing.
    ///
    /// The norms change no bit of the step, and are the same on any number of threads and ranks. Because all
    /// of them are computed before anything is written, gradients and state are read twice, the arithmetic is
    /// done twice, and results of functions of whole tensors (such as [`Muon`](crate::Muon)'s) are kept for
    /// all parameters until then. On a device the step waits for its norms, and over ranks no gradient comes
    /// piece by piece. So use this option in every tenth step, for example.
    pub fn with_figures(mut self) -> Self {
        self.options.figures = true;
        self
    }

    /// Accepts a call in which no parameter has a gradient, such as an empty micro-batch.
    ///
    /// Without this option such a call is an error, also if a single rank (with a weight above 0) lacks all
    /// gradients. Windows of [`AccumGrad`](crate::AccumGrad) count the call. The last call of a window makes
    /// the step from what the other calls of the window have collected. Otherwise the outcome is
    /// [`Accumulated`](crate::Status::Accumulated), or [`Skipped`](crate::Status::Skipped) if no window
    /// counted the call.
    pub fn allow_no_gradients(mut self) -> Self {
        self.options.allow_no_gradients = true;
        self
    }
}

impl<'s> Update<'s> {
    /// Applies the step.
    ///
    /// # Errors
    /// As [`update`]. With a [scaler](Update::scaler) also if no loss was scaled since the last update
    /// (unless this is a rank of weight 0), or if the scale would fall below its floor.
    pub fn apply<M: Model + ?Sized, G: Gradients + ?Sized>(self, model: &M, grads: &G) -> Result<Outcome> {
        let loss_scale = grads.loss_scale();
        self.apply_scaled(model, grads, loss_scale)
    }

    /// Applies the step to gradients that the call owns, and frees each once its parameter is written.
    ///
    /// The bits and the outcome are those of [`apply`](Update::apply). The freed memory is available to the
    /// rest of the step (results of functions of whole tensors, as of [`Muon`](crate::Muon)), to the
    /// allocator and to other threads. Other entries of the collection, such as those of a `GradStore` for
    /// other tensors, are freed before the first parameter is written.
    ///
    /// All gradients exist when the call begins. To free each before the next is computed, see
    /// [`begin`](Update::begin).
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{AdamW, Update, setup};
    ///
    /// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    /// let mut state = setup(AdamW::new(0.1), &x)?;
    /// let outcome = Update::new(&mut state).apply_owned(&x, x.sqr()?.sum_all()?.backward()?)?;
    /// assert_eq!(outcome.applied, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # What is not freed
    /// - A tensor to which the program has another handle, and memory that the collection only borrows:
    ///   [`GradientSlices`](crate::GradientSlices), or a list of `&Tensor`.
    /// - Gradients over [ranks](crate::Setup::over), and those of parameters on a device that have one chain
    ///   of rules: these are freed together.
    ///
    /// # Errors
    /// As [`apply`](Update::apply). The gradients are freed after an error, too.
    pub fn apply_owned<M: Model + ?Sized, G: Gradients>(self, model: &M, grads: G) -> Result<Outcome> {
        let loss_scale = grads.loss_scale();
        // If the collection only lends its gradients, these variables own the collection, because the sources
        // borrow from it until the step ends.
        let (mut owned_grads, mut collection, mut map) = (None, None, None);
        self.run(model, loss_scale, Ok(&()), |state, parameters| {
            check_known(state, &grads)?;
            // All leaves are looked up at once, because the collection has handles, too, and must be dropped
            // before the step.
            if let Some(sources) = with_look_up(&grads, |grads| owned_sources(state, parameters, grads))? {
                drop(grads);
                return Ok(sources);
            }
            let grads = look_up(collection.insert(&*owned_grads.insert(grads)), &mut map)?;
            GradientSource::look_up_all(state, parameters.iter().map(|x| &**x), grads)
        })
    }

    /// Ends the open windows of [`AccumGrad`](crate::AccumGrad) by a step with what they have collected.
    ///
    /// Use this method if too few calls remain to fill the last window of an epoch. The mean is over the
    /// calls that the window has counted, and the next call is the first of new windows. If nothing was
    /// collected, no step is made, and the outcome is [`NothingToMove`](crate::SkipReason::NothingToMove).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AccumGrad, Descent, OptimiserChain, Update, setup, update};
    ///
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((AccumGrad::new(4), Descent::new(1.0))), &x)?;
    /// for gradient in [5f32, 6.0] {
    ///     let outcome = update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert!(outcome.open_calls > 0);
    /// }
    /// let outcome = Update::new(&mut state).release_windows(&x)?;
    /// assert_eq!((outcome.applied, outcome.open_calls, x.to_vec1::<f32>()?), (1, 0, vec![-5.5]));
    /// assert!(!Update::new(&mut state).release_windows(&x)?.has_stepped());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Parameters without a window stay as they are, and [`require_all`](crate::StateTree::require_all) has
    /// no effect. Over [ranks](crate::Setup::over) all ranks have to make this call. A
    /// [scaler](Update::scaler) needs no new loss and keeps its scale, because each gradient was divided by
    /// its loss scale when it was collected. If the sum of a window is not finite and a scaler or
    /// [`finite_only`](Update::finite_only) checks it, all windows are [given
    /// up](crate::SkipReason::WindowsGivenUp).
    ///
    /// # Errors
    /// As [`update`].
    pub fn release_windows<M: Model + ?Sized>(self, model: &M) -> Result<Outcome> {
        let Update {
            state,
            options,
            scaler,
        } = self;
        let options = UpdateOptions {
            // The scaler's check for finite numbers stays, because a sum of finite gradients can overflow.
            finite_only: options.finite_only || scaler.is_some(),
            allow_no_gradients: true,
            releases_windows: true,
            ..options
        };
        let update = Update {
            state,
            options,
            scaler: None,
        };
        update.run(model, None, Ok(&()), |_, _| Ok(Vec::new()))
    }

    /// Applies the step. `loss_scale` is the scale that the gradients report for their loss; with `None`
    /// their scale is not checked.
    pub(crate) fn apply_scaled<M, G>(self, model: &M, grads: &G, loss_scale: Option<f64>) -> Result<Outcome>
    where
        M: Model + ?Sized,
        G: Gradients + ?Sized,
    {
        let mut map = None;
        let collection = look_up(&grads, &mut map);
        self.run(model, loss_scale, collection, |state, _| {
            check_known(state, grads).map(|()| Vec::new())
        })
    }

    /// Applies the step to the gradients in `grads`, or to the sources that `make_sources` returns, one for
    /// each leaf.
    fn run<'g, M: Model + ?Sized>(
        self,
        model: &M,
        loss_scale: Option<f64>,
        grads: Result<&'g dyn GradientLookUp>,
        make_sources: impl FnOnce(&StateTree, &[Lent<'_>]) -> Result<Vec<GradientSource<'g>>>,
    ) -> Result<Outcome> {
        let Update {
            state,
            options,
            mut scaler,
        } = self;
        let begin = || {
            let call = UpdateCall::new(options, scaler.as_deref(), loss_scale, state.world.is_divided())?;
            // The model is read before the gradients: if a parameter was added after `setup`, the error about
            // the parameter is more useful than the error about its gradient.
            let parameters = state.parameters(model)?;
            let by_leaf = make_sources(state, &parameters)?;
            Ok((call, parameters, by_leaf, grads?))
        };
        let (call, parameters, by_leaf, grads) = match begin() {
            Ok(arguments) => arguments,
            // The other ranks wait in their agreement on the call.
            Err(error) => return state.world.settle(Call::Update, Err(error)),
        };
        let (scale, counts) = (call.loss_scale, (state.steps, state.calls));
        let result = catch_unwind(AssertUnwindSafe(|| {
            step(call, state, &parameters, grads, by_leaf)
        }));
        let mut outcome = result.unwrap_or_else(|panic| {
            // The gradients of a call that was counted must not be applied once more.
            if let (true, Some(scaler)) = ((state.steps, state.calls) != counts, &mut scaler) {
                scaler.forget_loss();
            }
            resume_unwind(panic)
        })?;
        if let Some(scaler) = &mut scaler
            && scaler.account(&mut outcome, scale)?
        {
            state.end_windows()?;
        }
        Ok(outcome)
    }
}

/// Handles of the gradients of all leaves; `None` if any gradient is memory that the collection only lends.
fn owned_sources(
    state: &StateTree,
    parameters: &[Lent<'_>],
    grads: &dyn GradientLookUp,
) -> Result<Option<Vec<GradientSource<'static>>>> {
    let source = |(leaf, x): (&Leaf, &Lent<'_>)| {
        let handles = sources(leaf.paths(), &**x, grads)?
            .into_iter()
            .map(Lent::into_owned);
        Ok(handles
            .collect::<Option<Sources<'_>>>()
            .map(GradientSource::from_handles))
    };
    state.leaves().zip(parameters).map(source).collect()
}

/// Refuses a gradient for a path that the state neither has nor left out.
pub(super) fn check_known<G: Gradients + ?Sized>(state: &StateTree, grads: &G) -> Result<()> {
    let unknown = grads.paths().find(|path| state.leaf_index(path).is_none());
    unknown.map_or(Ok(()), |path| Err(state.unknown_gradient_error(path)))
}
