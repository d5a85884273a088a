//! What a call of `update` did.

use crate::figures::LeafFigures;
use crate::paths::Paths;
use crate::warning::Warning;

/// What a call of [`update`](crate::update) did.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The call as a whole.
    pub status: Status,
    /// Parameters that moved.
    pub applied: usize,
    /// Parameters whose gradient went into an accumulator, or has the weight 0 there.
    pub accumulated: usize,
    /// Frozen parameters.
    pub frozen: usize,
    /// Parameters without a gradient, which stayed as they are.
    pub without_gradient: usize,
    /// The paths of those. A `Debug` print of the outcome lists them all.
    pub missing: Paths,
    /// The norm that [`ClipGlobalNorm`](crate::ClipGlobalNorm) took, before clipping and without the loss scale, or
    /// [`SkipOutliers`](crate::SkipOutliers) where nothing is clipped. With several groups the norm of the lowest; all are in [`group_norms`](Outcome::group_norms).
    pub global_norm: Option<f64>,
    /// The norms of all groups, in their order.
    pub group_norms: Vec<(u64, f64)>,
    /// The first parameter, in path order, for whose gradient the call was skipped.
    ///
    /// The gradient has a number that is infinite or NaN, or
    /// [too large to be squared](crate::Update::finite_only).
    pub overflow: Option<String>,
    /// Where the call was skipped by [`SkipOutliers`](crate::SkipOutliers): the norm that was too large. That of the lowest group, if several were.
    pub outlier: Option<Outlier>,
    /// Where all windows of [`AccumGrad`](crate::AccumGrad) were given up, because no call could end them: the gradients of this one are finite, and
    /// together with what was collected before they are not, or are too large to be squared. The first parameter, in path order, of which that is so. The call is skipped, and the next
    /// one is the first of new windows.
    pub given_up: Option<String>,
    /// The scale that the gradients were divided by, where a [`LossScaler`](crate::LossScaler) was used.
    pub loss_scale: Option<f64>,
    /// Norms of every parameter that moved, where the update was asked for them by [`Update::with_figures`](crate::Update::with_figures); else none.
    pub figures: Vec<LeafFigures>,
    /// The warnings that the state met in this call, which are no errors. Each kind comes once in the life of
    /// a state; [`StateTree::warnings`](crate::StateTree::warnings) has them all.
    pub warnings: Vec<Warning>,
}

/// A norm that is too far above those before it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outlier {
    /// The [group](crate::SkipOutliers::group) of parameters.
    pub group: u64,
    /// The norm of their gradients.
    pub norm: f64,
    /// The largest norm that would have been taken.
    pub limit: f64,
}

/// What became of a call of [`update`](crate::update) as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Status {
    /// At least one parameter moved. A learning-rate schedule should advance now.
    Stepped,
    /// No parameter moved, but a window of [`AccumGrad`](crate::AccumGrad) went on: gradients were collected, or the call counts without one, as
    /// where that is [allowed](crate::Update::allow_no_gradients).
    Accumulated,
    /// Nothing changed, but for windows that were [given up](Outcome::given_up) or ended with an [outlier](Outcome::outlier): all parameters with a gradient are
    /// frozen, a gradient is not finite, or a rule asked to skip the call.
    #[default]
    Skipped,
}
