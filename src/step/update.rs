//! One step of a whole model: plan, reduce, commit.

use super::call::UpdateCall;
pub(crate) use super::call::UpdateOptions;
use super::pipeline::step;

use super::loss_scaler::LossScaler;
use super::outcome::Outcome;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::gradients::{GradientLookUp, Gradients};
use crate::ranks::Call;
use crate::tree::StateTree;

/// Applies one step to every parameter of `model`, in place.
///
/// `model` is the one that [`setup`](crate::setup) saw; `grads` is candle's `GradStore`, or a map or list by
/// path. All checks and all norms come before the first write: after an error about what was passed in, model
/// and state are as they were. What a device leaves that fails later is [below](#what-is-left-in-the-middle).
///
/// A parameter without a gradient stays untouched, its state and counters too (an accumulation window still
/// advances, see [`AccumGrad`](crate::AccumGrad)). The outcome names it, a
/// [warning](crate::Warning::WithoutGradient) does once, and [`StateTree::require_all`] makes it an error:
/// candle loses gradients without a word, see [the list](crate::guide::cuts). A gradient of zeros is a
/// gradient. Gradients may have any float dtype and any layout, and may be the parameter or a view of it.
///
/// A gradient that is infinite or NaN is written, unless a clipping rule refuses it or
/// [`Update::finite_only`] skips the call; a [warning](crate::Warning::ParameterNotFinite) says so then.
///
/// # Concurrency
/// The model may be evaluated in another thread meanwhile. Each parameter is replaced as a whole, one after
/// another, so an evaluation can see some parameters before the step and some after it, never a parameter
/// half-way; copy the model first where that matters. Under [`Offload`](crate::Offload) a parameter of more
/// than about a million elements goes up in parts, and can be seen half-way. Do not hold a storage guard
/// (`Tensor::storage_and_layout`) of a parameter across the call, which would wait for it for ever. Several
/// models may be updated in several threads, also with gradients that are variables of one another. Threads
/// that hold several parameters at once have to take them in one order, as evaluations of one model do:
/// candle's locks let no reader pass a writer who waits, so that two readers in two orders wait for each
/// other as soon as anybody writes.
///
/// On a CUDA device candle has a stream for each thread of the host. The fused engine waits for all of them,
/// and all of them wait for it. `Offload` and candle's tensor operations ([`Engine::Tensors`], devices
/// without a fused engine) work on the stream of the calling thread: there a backward pass in another thread
/// has to be finished (`Device::synchronize` in that thread) before its gradients are used, and an update
/// before another thread evaluates the model. None of this has been run on a GPU yet.
///
/// # Errors
/// - The model is not the state's.
/// - No parameter has a gradient, or not all that are [required](StateTree::require_all).
/// - A gradient has an unknown name, another shape or device, or a dtype that is not floating-point.
/// - The storage of a parameter, master or gradient does not hold its elements: an in-place operation of the
///   program has put another in its place, or the tensor was made of it
///   ([`Memory`](crate::ErrorKind::Memory)).
/// - An owner of [lent memory](crate::Lend) refuses it, or lends something else than it says.
/// - A parameter was changed that [follows a master](crate::MixedPrecision), or, before its first step, one
///   that a rule [keeps a copy](crate::Slot::parameter) of, or other weights are in the model in place of its
///   parameters ([`Changed`](crate::ErrorKind::Changed)).
/// - A clipping rule refuses a norm that is not finite.
/// - A device fails, for want of memory as a rule.
/// - The state is [divided](crate::Setup::over) among ranks, and another rank refuses the call, has left, or
///   brings something that does not go together.
///
/// # Panics
/// If a rule outside of this crate or an owner of [lent memory](crate::Lend) does. Then model and state are
/// as they were, unless it was arithmetic or a [late function](crate::Gradient::with_tensors_late) or such an
/// owner that panicked while parameters were written: [`Rule`](crate::Rule#panics) says what that leaves.
///
/// # What is left in the middle
/// While parameters are written only four things can fail: a device, a function of a rule that asked to run
/// that [late](crate::Gradient::with_tensors_late), a tensor whose storage is exchanged at that very time,
/// and an owner of [lent memory](crate::Lend) that lends it no more, or other memory, though it has in the
/// plan. The error of the last two names the parameters that have moved. An error of any of these leaves
///
/// - on the CPU, every parameter with its state and counters as it was or moved as a whole. The one whose
///   function failed is as it was;
/// - on a device, parameters and state in part and without their counters, because launches are not taken
///   back;
/// - under [`Offload`](crate::Offload), also masters that are ahead of their parameters, in a large one in
///   part. The next update compares samples, which may miss it;
/// - the number of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted as it was;
/// - over [ranks](crate::Setup::over), of which one has left, state that has moved in part, and parameters
///   that some ranks have and others not: start all anew from a checkpoint.
///
/// Model and state can be used then, but they do not belong together: take both from a checkpoint, or from a
/// copy. With [`Update::functional`] the originals are whole.
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
pub fn update<M: Model + ?Sized, G: Gradients + ?Sized>(state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome> {
    Update::new(state).apply(model, grads)
}

/// An [`update`] with more to say about how it is done.
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
/// With a borrowed state in place of a mutable one it is the [functional](Update::functional) form.
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

/// An update with no more to say than its state.
impl<'s, S> Update<'s, S> {
    /// Chooses the engine.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.options.engine = engine;
        self
    }

    /// Divides the gradients by the scale of their loss, which this has scaled. [`LossScaler::update`] is the
    /// short form, and says what happens.
    pub fn scaler(mut self, scaler: &'s mut LossScaler) -> Self {
        self.scaler = Some(scaler);
        self
    }

    /// Skips the call if a gradient has a number that is infinite, NaN or too large to be squared.
    ///
    /// Nothing moves then, and the outcome names the parameter. What is too large matters only where a rule
    /// keeps squares.
    ///
    /// A [second moment](crate::Slot::second_moment) that is infinite stays so, and its parameter stands
    /// still or is NaN from then on. So behind the loss scale, and behind what clips, no number may be above
    /// a quarter of the root of the largest in the dtype of the second moment: 4.6e18 in F32, of which bf16
    /// and 8 bits have the range, and 3.3e153 in F64. Rules that add up squares of a whole tensor
    /// ([`Adafactor`](crate::Adafactor), [`Shampoo`](crate::Shampoo), [`SOAP`](crate::SOAP) and the like)
    /// have that divided by the root of the number of elements. Clipping in front of such a rule makes the
    /// gradient small enough, and then no call is skipped.
    ///
    /// It costs one more read of the gradients, or nothing where [`ClipGlobalNorm`](crate::ClipGlobalNorm) is
    /// the first in the chain, which reads them anyway (but for f64, where the norm of finite numbers can be
    /// infinite). bf16 needs it as well as f16: its range is that of f32, but a loss that explodes gets
    /// there.
    pub fn finite_only(mut self) -> Self {
        self.options.finite_only = true;
        self
    }

    /// How much the gradients of this call count where [`AccumGrad`](crate::AccumGrad) takes a weighted mean:
    /// for a loss that is a mean over tokens, the number of tokens. 1 if not said. With 0 they are not read
    /// there.
    pub fn weight(mut self, count: u64) -> Self {
        self.options.weight = count;
        self
    }

    /// Goes on from the masters where parameters were changed since, and overwrites the change. Without this
    /// such a parameter is an error, if it is noticed: on a device only until the parameter's first step, see
    /// [`MixedPrecision`](crate::MixedPrecision). Copies that rules keep of the parameter, such as the slow
    /// weights of [`Lookahead`](crate::Lookahead), stay as well.
    pub fn keep_masters(mut self) -> Self {
        self.options.keep_masters = true;
        self
    }

    /// Also finds, for every parameter that moves, the norms of gradient, parameter and update:
    /// [`Outcome::figures`](crate::Outcome::figures), to plot, and to find by their
    /// [ratio](crate::LeafFigures::ratio) what does not learn, or explodes. Without it they cost nothing.
    ///
    /// They change no bit of the step, and are the same on any number of threads and ranks. The gradients are
    /// read once more, and so is everything else that the rules work on, because all is found before anything
    /// is written: the arithmetic is done twice, and what functions of whole tensors return (as
    /// [`Muon`](crate::Muon)'s) is kept for all parameters until then. On a device the step waits for its
    /// norms, and over ranks no gradient comes piece by piece. So ask in every tenth step, say.
    pub fn with_figures(mut self) -> Self {
        self.options.figures = true;
        self
    }

    /// Takes a call in which no parameter has a gradient, which is an error otherwise: a micro-batch that has
    /// nothing to say.
    ///
    /// Windows of [`AccumGrad`](crate::AccumGrad) count it, and its last call makes a step of what the others
    /// have collected. The outcome is [`Accumulated`](crate::Status::Accumulated) where a window counted it,
    /// and [`Skipped`](crate::Status::Skipped) where there is none.
    pub fn allow_no_gradients(mut self) -> Self {
        self.options.allow_no_gradients = true;
        self
    }
}

impl<'s> Update<'s> {
    /// Applies the step.
    ///
    /// # Errors
    /// As [`update`]; with a [scaler](Update::scaler) also as [`LossScaler::update`].
    pub fn apply<M: Model + ?Sized, G: Gradients + ?Sized>(self, model: &M, grads: &G) -> Result<Outcome> {
        let Update { state, options, scaler } = self;
        let found = || {
            let call = UpdateCall::new(options, scaler.as_deref())?;
            let map = grads.indexed()?;
            let (parameters, twins) = state.pairs(model)?;
            if !twins.is_empty() {
                state.expect_whole("an update with a `Twin`")?;
            }
            // After the model: what is in it and not in the state was added since `setup`, which says more.
            expect_known(state, grads)?;
            Ok((call, map, parameters, twins))
        };
        let (call, map, parameters, twins) = match found() {
            Ok(found) => found,
            // The other ranks wait for this one to say so.
            Err(error) => return state.settle(Call::Update, Err(error)),
        };
        let mut outcome = step(call, state, &parameters, &twins, map.as_ref().map_or(&grads as &dyn GradientLookUp, |map| map))?;
        if let Some(scaler) = scaler
            && scaler.account(&mut outcome, call.loss_scale)?
        {
            state.end_windows()?;
        }
        Ok(outcome)
    }
}

/// Refuses a gradient for a name that the state does not know.
pub(super) fn expect_known<G: Gradients + ?Sized>(state: &StateTree, grads: &G) -> Result<()> {
    match grads.paths().find(|path| !state.knows(path)) {
        Some(path) => Err(Error::unknown("parameter for the gradient of", path, &state.listed())),
        None => Ok(()),
    }
}

impl LossScaler {
    /// [`update`](crate::update) with the gradients of a loss that this scaler has scaled.
    ///
    /// One call finds out whether all gradients are finite, divides them, and applies the step. If one is not
    /// finite nothing moves, and the outcome is skipped and names the parameter.
    ///
    /// With more to say about how it is done there is [`Update::scaler`], which the functional form has too:
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
    /// Update::new(&mut state).scaler(&mut scaler).with_figures().apply(&model, &grads)?;
    /// assert_eq!(model[0].to_vec1::<f32>()?, [0.5, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`update`](crate::update); also if no loss was scaled since the last update, or the scale would
    /// fall below its floor.
    pub fn update<M, G>(&mut self, state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome>
    where
        M: Model + ?Sized,
        G: Gradients + ?Sized,
    {
        Update::new(state).scaler(self).apply(model, grads)
    }
}
