//! The public side of a step: [`update`] and [`Update`].

pub(crate) use super::call::UpdateOptions;
use super::call::{UpdateCall, sources};
use super::leaf::GradientSource;
use super::loss_scaler::LossScaler;
use super::outcome::Outcome;
use super::pipeline::step;
use crate::engine::{Engine, Sources};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::gradients::{GradientLookUp, Gradients, look_up, looked_up};
use crate::model::lent::Lent;
use crate::ranks::Call;
use crate::tree::{Leaf, StateTree};

/// Applies one step to every parameter of `model`, in place.
///
/// `model` is the one given to [`setup`](crate::setup); `grads` is candle's `GradStore`, or a map or list by
/// path. All checks and all norms come before the first write: after an error about the arguments, model and
/// state are as they were. For a device that fails later see [below](#what-is-left-in-the-middle).
///
/// A parameter without a gradient stays untouched, its state and counters too (but a window of
/// [`AccumGrad`](crate::AccumGrad) advances, and an [average](crate::Ema) counts the step). The outcome names
/// it in each call, a [warning](crate::Warning::WithoutGradient) once, and [`StateTree::require_all`] makes
/// it an error. Some operations of candle cut gradients without an error, see [the
/// list](crate::guide::cuts). A gradient of zeros is a gradient. Gradients may have any float dtype and any
/// layout, and may be the parameter or a view of it.
///
/// A gradient that is infinite or NaN is applied, with a [warning](crate::Warning::ParameterNotFinite),
/// unless a clipping rule refuses it or [`Update::finite_only`] skips the call.
///
/// # Concurrency
/// Another thread may evaluate the model meanwhile. Each parameter is replaced as a whole, one after another.
/// So an evaluation can see some parameters before the step and some after it, but never one half-way; copy
/// the model first if that matters. Under [`Offload`](crate::Offload) a parameter of more than about a
/// million elements is written in parts, and can be seen half-way.
///
/// Do not hold a storage guard (`Tensor::storage_and_layout`) of a parameter across the call, which would
/// wait for it for ever. Several models may be updated in several threads, even with gradients that are
/// variables of one another. Threads that lock several parameters at once have to do so in one order, as
/// evaluations of one model do. candle's locks let no reader pass a waiting writer, so two readers in two
/// orders deadlock when anybody writes.
///
/// On a CUDA device candle has a stream for each thread of the host. The fused engine waits for all of them,
/// and all of them wait for it. `Offload` and candle's tensor operations ([`Engine::Tensors`], devices
/// without a fused engine) work on the stream of the calling thread: there a backward pass in another thread
/// has to be finished (`Device::synchronize` in that thread) before its gradients are used, and an update
/// before another thread evaluates the model. The page [`devices`](crate::guide::devices) says what has been
/// run on a GPU.
///
/// # Errors
/// - The model is not the state's.
/// - No parameter has a gradient, or not all that are [required](StateTree::require_all).
/// - A gradient has an unknown name, another shape or device, or a dtype that is not floating-point.
/// - The storage of a parameter, master or gradient does not hold its elements, because an in-place operation
///   has exchanged it, or the tensor was made so ([`Memory`](crate::ErrorKind::Memory)).
/// - An owner of [lent memory](crate::Lend) refuses it, or lends something else than it says.
/// - A parameter was changed that [follows a master](crate::MixedPrecision), or of which a rule [keeps a
///   copy](crate::Slot::parameter); or the model has other weights in place of its parameters
///   ([`Changed`](crate::ErrorKind::Changed)).
/// - A clipping rule refuses a norm that is not finite.
/// - A device fails, usually for lack of memory.
/// - The state is [divided](crate::Setup::over) among ranks, and another rank refuses the call, has left, or
///   makes another call or brings something that does not match.
///
/// # Panics
/// If a rule outside of this crate, or an owner of [lent memory](crate::Lend), panics. Model and state are
/// then as they were, unless parameters were being written: arithmetic, a [late
/// function](crate::Gradient::with_tensors_late) or an owner can panic there. [`Rule`](crate::Rule#panics)
/// says what that leaves.
///
/// # What is left in the middle
/// While parameters are written only four things can fail: a device, a rule's [late
/// function](crate::Gradient::with_tensors_late), a tensor whose storage is exchanged at that very time, and
/// an owner of [lent memory](crate::Lend) that no longer lends what it lent in the plan. The error names the
/// parameters that have moved: the owner's own is among them, if the owner failed after its memory was
/// written. Such an error leaves
///
/// - on the CPU, every parameter with its state and counters either as it was or moved as a whole. A
///   parameter whose function failed is as it was;
/// - on a device, parameters and state moved in part, without their counters, as launches are not taken back;
/// - under [`Offload`](crate::Offload), also masters ahead of their parameters (in a large one, in part). The
///   next update compares samples, which may miss it;
/// - the count of calls in windows of [`AccumGrad`](crate::AccumGrad) as it was;
/// - over [ranks](crate::Setup::over), if one has left or an owner fails, state that has moved in part, and
///   parameters that only some ranks have: start all ranks anew from a checkpoint.
///
/// Model and state are usable then, but no longer fit each other: take both from a checkpoint, or from a
/// copy. With [`Update::functional`] the originals are intact.
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
/// Over a shared reference to a state it is the [functional](Update::functional) form.
#[must_use = "an update does nothing until `apply` is called"]
#[derive(Debug)]
pub struct Update<'s, S = &'s mut StateTree> {
    pub(crate) state: S,
    pub(crate) options: UpdateOptions,
    pub(crate) scaler: Option<&'s mut LossScaler>,
}

impl<'s> Update<'s> {
    /// An update of this state.
    pub fn new(state: &'s mut StateTree) -> Self {
        Update { state, options: UpdateOptions::default(), scaler: None }
    }
}

/// An update of this state, with the default options.
impl<'s, S> Update<'s, S> {
    /// Chooses the engine.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.options.engine = engine;
        self
    }

    /// Divides the gradients by the scale of their loss, which this scaler has scaled.
    ///
    /// The call checks that all gradients are finite, divides them, and applies the step. If one is not
    /// finite nothing moves; the outcome is skipped and names the parameter, and a dynamic scale falls.
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
    /// Nothing moves then, and the outcome names the parameter. Too large matters only for rules that keep
    /// squares.
    ///
    /// Open windows of [`AccumGrad`](crate::AccumGrad) keep their sums: the call does not count in them. If
    /// the gradients of the call are finite but the sum of a window is not, all windows are [given
    /// up](crate::SkipReason::WindowsGivenUp).
    ///
    /// An infinite [second moment](crate::Slot::second_moment) stays infinite, and its parameter stands still
    /// or is NaN from then on. So after loss scale and clipping no number may exceed a quarter of the root of
    /// the largest number in the dtype of the second moment: 4.6e18 in F32, bf16 and 8 bits, 3.3e153 in F64.
    /// For rules that add up squares of a whole tensor ([`Adafactor`](crate::Adafactor),
    /// [`Shampoo`](crate::Shampoo), [`SOAP`](crate::SOAP) and the like) the limit is divided by the root of
    /// the number of elements. Clipping in front of such a rule makes gradients small enough, and no call is
    /// skipped.
    ///
    /// It costs one more read of the gradients. It costs nothing if
    /// [`ClipGlobalNorm`](crate::ClipGlobalNorm), which reads them anyway, is first in the chain; except in
    /// f64, where the norm of finite numbers can be infinite. bf16 needs the check as f16 does: its range is
    /// that of f32, but a loss that explodes gets there.
    pub fn finite_only(mut self) -> Self {
        self.options.finite_only = true;
        self
    }

    /// The weight of this call in the weighted mean of [`AccumGrad`](crate::AccumGrad) or over ranks; default
    /// 1.
    ///
    /// For a loss that is a mean over tokens, pass the number of tokens. With 0 the gradients are not read.
    pub fn weight(mut self, count: u64) -> Self {
        self.options.weight = count;
        self
    }

    /// Goes on from the masters of parameters that were changed, and overwrites the change.
    ///
    /// Without this such a parameter is an error, if the update notices it: on a device only until the
    /// parameter's first step, see [`MixedPrecision`](crate::MixedPrecision). Copies that rules keep of the
    /// parameter, such as the slow weights of [`Lookahead`](crate::Lookahead), stay as well.
    pub fn keep_masters(mut self) -> Self {
        self.options.keep_masters = true;
        self
    }

    /// Also computes the norms of gradient, parameter and update, for every parameter that moves.
    ///
    /// [`Outcome::figures`](crate::Outcome::figures) has them. Plot them; their
    /// [ratio](crate::LeafFigures::ratio) shows what does not learn, or explodes. Without this method they
    /// cost nothing.
    ///
    /// They change no bit of the step, and are the same on any number of threads and ranks. All norms are
    /// computed before anything is written. So gradients and state are read twice, the arithmetic is done
    /// twice, and results of functions of whole tensors (such as [`Muon`](crate::Muon)'s) are kept for all
    /// parameters until then. On a device the step waits for its norms, and over ranks no gradient comes
    /// piece by piece. So ask for them in every tenth step, say.
    pub fn with_figures(mut self) -> Self {
        self.options.figures = true;
        self
    }

    /// Accepts a call in which no parameter has a gradient, such as an empty micro-batch; else it is an
    /// error.
    ///
    /// Windows of [`AccumGrad`](crate::AccumGrad) count it; as the last call of a window it makes the step
    /// from what the others have collected. The outcome is [`Accumulated`](crate::Status::Accumulated) if a
    /// window counted it, and [`Skipped`](crate::Status::Skipped) without one.
    pub fn allow_no_gradients(mut self) -> Self {
        self.options.allow_no_gradients = true;
        self
    }
}

impl<'s> Update<'s> {
    /// Applies the step.
    ///
    /// # Errors
    /// As [`update`]; with a [scaler](Update::scaler) also if no loss was scaled since the last update, or
    /// the scale would fall below its floor.
    pub fn apply<M: Model + ?Sized, G: Gradients + ?Sized>(self, model: &M, grads: &G) -> Result<Outcome> {
        let loss_scale = grads.loss_scale();
        self.apply_scaled(model, grads, loss_scale)
    }

    /// Applies the step to gradients that it takes: the memory of each is free once its parameter is written.
    ///
    /// The bits and the outcome are those of [`apply`](Update::apply). What goes on in the step then has the
    /// memory: results of functions of whole tensors (as of [`Muon`](crate::Muon)), what an allocator gives
    /// back, and other threads. What the collection has beside the gradients of this state's parameters, such
    /// as other entries of a `GradStore`, is free before the first parameter is written.
    ///
    /// All gradients are there when the call begins. To free each before the next one is computed, see
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
    /// - A tensor of which the program has another handle, and memory that the collection only borrows:
    ///   [`GradientSlices`](crate::GradientSlices), or a list of `&Tensor`.
    /// - Over [ranks](crate::Setup::over), and of parameters with one chain of rules on a device, gradients
    ///   are freed together.
    ///
    /// # Errors
    /// As [`apply`](Update::apply). The gradients are gone then, too.
    pub fn apply_owned<M: Model + ?Sized, G: Gradients>(self, model: &M, grads: G) -> Result<Outcome> {
        let loss_scale = grads.loss_scale();
        // They keep the collection until the step ends, if its gradients are only lent.
        let (mut kept, mut collection, mut map) = (None, None, None);
        self.run(model, loss_scale, |state, parameters| {
            check_known(state, &grads)?;
            if let Some(owned) = looked_up(&grads, |grads| owned(state, parameters, grads))? {
                drop(grads);
                return Ok(owned);
            }
            let grads = look_up(collection.insert(&*kept.insert(grads)), &mut map)?;
            Ok(GradientSource::all(grads, state.len()))
        })
    }

    /// Ends the open windows of [`AccumGrad`](crate::AccumGrad) by a step of what they have collected.
    ///
    /// For the last window of an epoch, if too few calls are left to fill it. Its mean is over the calls that
    /// there were, and the next call is the first of new windows. If nothing was collected, no step is made,
    /// and the outcome is [`NothingToMove`](crate::SkipReason::NothingToMove).
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
    /// Parameters without a window stay as they are, and [`require_all`](crate::StateTree::require_all) asks
    /// for nothing. Over [ranks](crate::Setup::over) all call this. Each gradient was divided by its loss
    /// scale when it was collected. So a [scaler](Update::scaler) needs no new loss, and keeps its scale; a
    /// sum that is not finite is [given up](crate::SkipReason::WindowsGivenUp).
    ///
    /// # Errors
    /// As [`update`].
    pub fn release_windows<M: Model + ?Sized>(self, model: &M) -> Result<Outcome> {
        let Update { state, options, scaler } = self;
        let options = UpdateOptions {
            finite_only: options.finite_only || scaler.is_some(),
            allow_no_gradients: true,
            releases_windows: true,
            ..options
        };
        let update = Update { state, options, scaler: None };
        update
            .run(model, None, |state, _| Ok(state.leaves.iter().map(|_| GradientSource::found([])).collect()))
    }

    /// Applies the step to gradients that know this scale of their loss; with `None` their scale does not
    /// matter.
    pub(crate) fn apply_scaled<M, G>(self, model: &M, grads: &G, loss_scale: Option<f64>) -> Result<Outcome>
    where
        M: Model + ?Sized,
        G: Gradients + ?Sized,
    {
        let mut map = None;
        self.run(model, loss_scale, |state, _| {
            check_known(state, grads)?;
            Ok(GradientSource::all(look_up(&grads, &mut map)?, state.len()))
        })
    }

    /// Applies the step to the gradients that `find` finds for the leaves of the state and their parameters.
    fn run<'g, M: Model + ?Sized>(
        self,
        model: &M,
        loss_scale: Option<f64>,
        find: impl FnOnce(&StateTree, &[Lent<'_>]) -> Result<Vec<GradientSource<'g>>>,
    ) -> Result<Outcome> {
        let Update { state, options, mut scaler } = self;
        let found = || {
            let call = UpdateCall::new(options, scaler.as_deref(), loss_scale)?;
            // The model first: a parameter that the state lacks was added after `setup`, and that error is
            // more useful than the one about its gradient.
            let parameters = state.parameters(model)?;
            let gradients = find(state, &parameters)?;
            Ok((call, parameters, gradients))
        };
        let (call, parameters, gradients) = match found() {
            Ok(found) => found,
            // The other ranks wait for this one's refusal.
            Err(error) => return state.settle(Call::Update, Err(error)),
        };
        let scale = call.loss_scale;
        let mut outcome = step(call, state, &parameters, gradients)?;
        if let Some(scaler) = &mut scaler
            && scaler.account(&mut outcome, scale)?
        {
            state.end_windows()?;
        }
        Ok(outcome)
    }
}

/// Handles of the gradients of all leaves; `None` if any is memory that is only lent.
fn owned(
    state: &StateTree,
    parameters: &[Lent<'_>],
    grads: &dyn GradientLookUp,
) -> Result<Option<Vec<GradientSource<'static>>>> {
    let of_leaf = |(leaf, x): (&Leaf, &Lent<'_>)| {
        let owned = sources(leaf.paths(), &**x, grads)?.into_iter().map(Lent::into_owned);
        Ok(owned.collect::<Option<Sources<'_>>>().map(GradientSource::found))
    };
    state.leaves.iter().zip(parameters).map(of_leaf).collect()
}

/// Refuses a gradient for a name that the state does not know.
pub(super) fn check_known<G: Gradients + ?Sized>(state: &StateTree, grads: &G) -> Result<()> {
    match grads.paths().find(|path| !state.knows(path)) {
        Some(path) => Err(Error::unknown("parameter for the gradient of", path, &state.listed())),
        None => Ok(()),
    }
}
