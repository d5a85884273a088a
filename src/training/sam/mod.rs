//! Sharpness-aware minimisation: a step up, to a point that gives the gradient for the step down.
//!
//! The step up is an update with the rule [`Climb`], so it has the checks, engines and ranks of an update.
//! The step up must not change the state of the training, so it works on a `StateTree::scratch_tree`, whose
//! only state is copies of masters. The parameters are copied before the update, and the drop of a
//! [`ParameterExchange`] restores them.

mod climb;

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::gradients::Gradients;
use crate::model::lent::{Lend, Lent, copy_of};
use crate::ranks::Call;
use crate::rule::{IntoOptimiser, Optimiser, State, out_of_range, range};
use crate::step::update::Update;
use crate::stores::MixedPrecision;
use crate::tensors::Tensor;
use crate::tree::{Leaf, ParameterExchange, StateTree};
use climb::Climb;

/// SAM, sharpness-aware minimisation: minimises the largest loss nearby, which leads to flat minima.
///
/// Foret et al. 2020, [arXiv 2010.01412](https://arxiv.org/abs/2010.01412). A step takes two gradients.
///
/// ```text
/// x̂  = x + ρ·dx / ‖(dx of every parameter)‖₂              ascend, with the gradient at x
/// x  = the x before the ascent, bit for bit                restore
/// x' = x - (the step of the optimiser)                     update, with the gradient at x̂
/// ```
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{AdamW, Sam, Update, setup, update};
///
/// let x = Var::new(&[1f64, -2.0], &Device::Cpu)?;
/// let loss = || x.sqr()?.sqr()?.sum_all();
/// let mut state = setup(AdamW::new(0.1), &x)?;
/// let sam = Sam::new(0.05);
/// for _ in 0..50 {
///     let climbed = sam.ascend(Update::new(&mut state), &x, &loss()?.backward()?)?;
///     let grads = loss()?.backward()?;
///     climbed.restore()?;
///     update(&mut state, &x, &grads)?;
/// }
/// assert!(loss()?.to_scalar::<f64>()? < 1e-2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Climbed`] borrows the state until [`restore`](Climbed::restore), so an update, a checkpoint or another
/// ascent before `restore` does not compile. If an error leaves the loop, the parameters are restored as
/// well. Do not write to parameters before `restore`, which would overwrite your values. Other variables that
/// a forward pass moves, such as BatchNorm's running statistics, move twice.
///
/// # What moves
/// - A parameter that is frozen or has no gradient does not move, and is left out of the norm. Tied weights
///   move once, by the sum of their gradients. If no parameter has a gradient, `ascend` returns an error, as
///   an update does.
/// - A parameter with a master on its device ascends from the master, and the result is rounded. If a move is
///   smaller than half a unit in the last place of bf16, most elements stay, and some move by a whole unit.
///   Masters and state stay as they are.
/// - If all gradients are zero, nothing moves. If the norm is infinite or NaN, `ascend` returns an error
///   before anything moves.
///
/// An ascent needs memory for a copy of all parameters, and until `ascend` returns for a copy of all masters.
///
/// # With a loss scaler
/// Scale both losses, and give the scaler to the update. A scale does not change the direction of the ascent.
/// If the first gradients overflow, [`ascend`](Sam::ascend) returns the error
/// [`NotFinite`](crate::ErrorKind::NotFinite). Give these gradients to an update with the
/// [`scaler`](crate::Update::scaler), which skips the call and lowers the scale.
///
/// # With accumulation and over ranks
/// In a window of [`AccumGrad`](crate::AccumGrad) each micro-batch ascends by its own gradient. Over
/// [ranks](crate::Setup::over) all ranks have to call `ascend`. They ascend by the mean of their gradients,
/// with the weights of [`Update::weight`](crate::Update::weight), so the steps are those of one process with
/// the whole batch. The mean costs one more exchange of gradients. In the paper, each device ascends by its
/// own gradient. To do so, set up an undivided state of [`Descent`](crate::Descent) on each rank, only for
/// the ascent.
///
/// # Departures
/// pytorch_optimizer's `SAM` computes the norm in f32, adds 1e-12 to the norm, and adds the ascent to the
/// stored parameter instead of a master. torch, optax's core and Optimisers.jl have no SAM.
/// `optax.contrib.sam` takes the steps up with a separate optimiser.
#[must_use = "it moves nothing until `ascend` is called"]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sam {
    rho: f64,
    is_adaptive: bool,
}

impl Default for Sam {
    /// ρ = 0.05, not adaptive.
    fn default() -> Self {
        Sam::new(0.05)
    }
}

impl Sam {
    /// SAM with ρ, the distance of x̂ from x in the 2-norm of the whole model. 0.05 is usual.
    pub fn new(rho: f64) -> Self {
        Sam {
            rho,
            is_adaptive: false,
        }
    }

    /// ASAM: each element moves in proportion to its size, so the scales of layers do not matter.
    ///
    /// Kwon et al. 2021, [arXiv 2102.11600](https://arxiv.org/abs/2102.11600). A usual ρ is 0.5 to 2.
    ///
    /// ```text
    /// x̂ = x + ρ·x²·dx / ‖(x·dx of every parameter)‖₂
    /// ```
    pub fn adaptive(self) -> Self {
        Sam {
            is_adaptive: true,
            ..self
        }
    }

    /// Moves the model up along its gradient, until [`Climbed::restore`].
    ///
    /// An ascent uses these options of [`Update`]: [`engine`](Update::engine), the [`weight`](Update::weight)
    /// of this rank's gradients, and [`allow_no_gradients`](Update::allow_no_gradients). Other options have
    /// no effect. A [scaler](Update::scaler) stays as it is.
    ///
    /// # Errors
    /// The errors of [`update`](crate::update) about model and gradients. Also if ρ is out of range, or the
    /// norm is infinite or NaN. After an error nothing has moved.
    pub fn ascend<'s, M, G>(&self, update: Update<'s>, model: &'s M, grads: &G) -> Result<Climbed<'s>>
    where
        M: Model + ?Sized,
        G: Gradients + ?Sized,
    {
        let Update {
            state, mut options, ..
        } = update;
        // `finite_only` is off and overflows on the wire are accepted, because the check of the norm finds
        // both. Parameters are not compared with masters, because the ascent only reads masters.
        (options.finite_only, options.keep_masters, options.figures) = (false, true, false);
        options.takes_overflow = true;
        let Ascent {
            mut scratch,
            parameters,
            copies,
        } = match self.prepare(state, model) {
            Ok(ascent) => ascent,
            Err(error) => return state.world.settle(Call::Update, Err(error)),
        };
        // The exchange is made before the update, because parameters must also be restored after an error of
        // the update: a device may have written some, or a rank may have left.
        let mut exchange = ParameterExchange::new(state, parameters, copies);
        let ascent = Update {
            state: &mut scratch,
            options,
            scaler: None,
        };
        let outcome = ascent
            .apply_scaled(model, grads, None)
            .map_err(with_ascent_remedy)?;
        exchange.retain(|index, leaf| scratch.leaves[index].steps() > leaf.steps());
        Ok(Climbed {
            exchange,
            norm: outcome.global_norm,
        })
    }

    /// Makes the scratch tree and the copies, before anything moves.
    fn prepare<'m, M: Model + ?Sized>(&self, state: &mut StateTree, model: &'m M) -> Result<Ascent<'m>> {
        if let Some(expected) = range::non_negative(self.rho) {
            return Err(out_of_range("Sam", "rho", self.rho, expected));
        }
        let parameters = state.recover_parameters(model)?;
        let bare = Arc::new(self.climb().into_optimiser());
        let scratch = state.scratch_tree(|index, leaf| self.stand_in(leaf, &*parameters[index], &bare))?;
        let movable = parameters
            .iter()
            .enumerate()
            .filter(|(index, _)| !state.leaves[*index].is_frozen());
        let copies = movable
            .map(|(index, x)| Ok((index, copy_of("parameter", &**x)?)))
            .collect::<Result<_>>()?;
        Ok(Ascent {
            scratch,
            parameters,
            copies,
        })
    }

    fn climb(&self) -> Climb {
        Climb {
            adaptive: self.is_adaptive,
            ..Climb::new(self.rho)
        }
    }

    /// The optimiser for the ascent of a leaf, and the optimiser's state. If the parameter has a master of
    /// another dtype on its device, the optimiser is `MixedPrecision` with a copy of that master. Otherwise
    /// the optimiser is `bare`.
    fn stand_in(&self, leaf: &Leaf, x: &dyn Lend, bare: &Arc<Optimiser>) -> Result<(Arc<Optimiser>, State)> {
        let part = leaf.own_part(x)?;
        let precise = leaf.optimiser.precise(&leaf.state, &*part)?;
        if leaf.is_frozen() || precise.dtype() == x.dtype() || !precise.device().same_device(x.device()) {
            return Ok((bare.clone(), State::empty()));
        }
        let master = leaf.master(&*part)?;
        Ok((
            Arc::new(MixedPrecision::new(master.dtype(), self.climb()).into_optimiser()),
            State::with_master(&master, State::empty())?,
        ))
    }
}

/// The copies and the state of an ascent.
struct Ascent<'m> {
    /// The state for the ascent.
    scratch: StateTree,
    /// All parameters, in the order of the leaves.
    parameters: Vec<Lent<'m>>,
    /// Copies of the parameters that may move, with the index of their leaf.
    copies: Vec<(usize, Tensor)>,
}

/// The error of an ascent's update, with the remedy for an ascent.
fn with_ascent_remedy(error: Error) -> Error {
    if error.kind() != ErrorKind::NotFinite {
        return error;
    }
    let rank = error.rank();
    let error_of_ascent = error.with_remedy(
        "leave this call out, because there is no direction to move in; with a loss scaler, give the \
         gradients to an update with `Update::scaler`, which skips the call and lowers the scale",
    );
    match rank {
        Some(rank) => error_of_ascent.caused_by_rank(rank),
        None => error_of_ascent,
    }
}

/// A model that [`Sam`] has moved up. Borrows the state until the parameters are restored.
#[must_use = "the parameters come back when this is dropped: keep it until after the second backward pass, \
              and then call `restore`"]
#[derive(Debug)]
pub struct Climbed<'s> {
    exchange: ParameterExchange<'s, 's>,
    norm: Option<f64>,
}

impl Climbed<'_> {
    /// Restores every parameter, bit for bit. Over ranks each rank does so by itself.
    ///
    /// Without this call, for example if an error leaves the loop, the drop restores the parameters, and logs
    /// an error of a device.
    ///
    /// # Errors
    /// If a device fails. The state then keeps the copies of the parameters and refuses calls that need the
    /// parameters. The next [`Sam::ascend`] restores the parameters first.
    pub fn restore(mut self) -> Result<()> {
        self.exchange.put_back()
    }

    /// The norm of the gradients, by which the ascent was divided.
    ///
    /// If the ascent is [adaptive](Sam::adaptive), the norm is that of the products of gradients and
    /// parameters. `None` if there was no gradient and that is [allowed](Update::allow_no_gradients).
    pub fn norm(&self) -> Option<f64> {
        self.norm
    }
}
