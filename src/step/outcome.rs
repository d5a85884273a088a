//! The outcome of a call of `update`.

use super::figures::LeafFigures;
use super::paths::Paths;
use crate::error::warning::Warning;
use crate::tree::Outlier;

/// What a call of [`update`](crate::update) did.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether the call stepped, accumulated or was skipped.
    pub status: Status,
    /// The number of parameters that moved.
    pub applied: usize,
    /// The number of parameters whose gradient went into an accumulator, also with weight 0.
    pub accumulated: usize,
    /// The number of calls in windows of [`AccumGrad`](crate::AccumGrad) that are open after this call.
    ///
    /// If windows differ in n, these are the calls since all windows last ended together.
    /// [`Update::release_windows`](crate::Update::release_windows) ends windows early.
    pub open_calls: u64,
    /// The number of frozen parameters.
    pub frozen: usize,
    /// The paths of the parameters without a gradient, which stayed as they are.
    pub without_gradient: Paths,
    /// The learning rate of the first parameter that moved, in path order, if its optimiser has one.
    pub learning_rate: Option<f64>,
    /// The norm of [`ClipGlobalNorm`](crate::ClipGlobalNorm), before clipping and without the loss scale.
    ///
    /// Without clipping it is the norm of [`SkipOutliers`](crate::SkipOutliers). With several groups it is
    /// the norm of the lowest group; [`group_norms`](Outcome::group_norms) has all of them.
    pub global_norm: Option<f64>,
    /// The norms of all groups, in the order of groups.
    pub group_norms: Vec<(u64, f64)>,
    /// The scale that the gradients were divided by; `None` without a [`LossScaler`](crate::LossScaler), or
    /// if it is [off](crate::LossScaler::enabled).
    pub loss_scale: Option<f64>,
    /// Norms of each parameter that moved; empty without
    /// [`Update::with_figures`](crate::Update::with_figures).
    pub figures: Vec<LeafFigures>,
    /// The warnings that are new in this call.
    ///
    /// A state gives each kind of warning once in its life;
    /// [`StateTree::warnings`](crate::StateTree::warnings) has all of them.
    pub warnings: Vec<Warning>,
}

/// The kind of outcome of a call of [`update`](crate::update).
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// At least one parameter moved, and [`StateTree::steps`](crate::StateTree::steps) has counted the step.
    Stepped,
    /// No parameter moved, but a window of [`AccumGrad`](crate::AccumGrad) went on. It collected gradients,
    /// or counted a call without any, if that is [allowed](crate::Update::allow_no_gradients).
    Accumulated,
    /// No parameter moved, for this reason.
    Skipped(SkipReason),
}

/// Why a call of [`update`](crate::update) moved no parameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SkipReason {
    /// All parameters with a gradient are frozen, or no parameter has a gradient and that is
    /// [allowed](crate::Update::allow_no_gradients).
    NothingToMove,
    /// A gradient has a number that is infinite or NaN, or
    /// [too large to be squared](crate::Update::finite_only).
    NotFinite {
        /// The first such parameter, in path order.
        path: String,
    },
    /// [`SkipOutliers`](crate::SkipOutliers) found a norm that is too large; if several are, this is the norm
    /// of the lowest group.
    Outlier(Outlier),
    /// All windows of [`AccumGrad`](crate::AccumGrad) were given up, because no call could end them. The
    /// gradients of this call are finite, but the sum of a window is not, or is too large to be squared. The
    /// next call is the first of new windows.
    WindowsGivenUp {
        /// The first such parameter, in path order.
        path: String,
    },
}

impl SkipReason {
    /// The reason and what to do, for a warning of many skipped calls. `None` if nothing is wrong.
    pub(super) fn advice(&self) -> Option<String> {
        match self {
            SkipReason::NothingToMove => None,
            SkipReason::NotFinite { path } => Some(format!(
                "the gradient of {path:?} is infinite, NaN or too large to be squared. If the loss is not finite \
                 either, go on from a checkpoint with a smaller learning rate; otherwise look for the operation \
                 that leaves the range of its dtype, or begin with a smaller loss scale"
            )),
            SkipReason::Outlier(Outlier { norm, limit, .. }) => Some(format!(
                "the norm of the gradients, {norm}, is above the limit of `SkipOutliers`, {limit}. Go on from a \
                 checkpoint if the loss rises, or give `SkipOutliers` a larger `sigma`"
            )),
            SkipReason::WindowsGivenUp { path } => Some(format!(
                "the sum of the gradients collected for {path:?} leaves the range of its dtype. Collect the sum \
                 in F32, fewer calls, or smaller gradients"
            )),
        }
    }
}

impl Default for Status {
    fn default() -> Self {
        Status::Skipped(SkipReason::NothingToMove)
    }
}

impl Outcome {
    /// Whether a parameter moved.
    pub fn has_stepped(&self) -> bool {
        self.status == Status::Stepped
    }

    /// Why the call was skipped, if it was.
    pub fn skipped(&self) -> Option<&SkipReason> {
        if let Status::Skipped(reason) = &self.status { Some(reason) } else { None }
    }

    /// The parameter whose gradient is not finite, if the call was skipped for this reason.
    pub(crate) fn overflow(&self) -> Option<&str> {
        if let Status::Skipped(SkipReason::NotFinite { path }) = &self.status { Some(path) } else { None }
    }
}
