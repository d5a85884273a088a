//! The outcome of a call of `update`, with the paths and the norms in it.

use std::fmt::{self, Display};
use std::sync::Arc;

use crate::error::warning::Warning;
use crate::rule::LeafNorms;
use crate::tree::{Leaf, Outlier};

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
    /// If windows differ in n, the number counts the calls since all windows last ended together.
    /// [`Update::release_windows`](crate::Update::release_windows) ends windows early.
    pub open_calls: u64,
    /// The number of frozen parameters.
    pub frozen: usize,
    /// The paths of the parameters without a gradient. These parameters stayed as they were.
    pub without_gradient: Paths,
    /// The learning rate of the first parameter that moved, in path order, if its optimiser has one.
    pub learning_rate: Option<f64>,
    /// The norm of [`ClipGlobalNorm`](crate::ClipGlobalNorm), before clipping and without the loss scale.
    ///
    /// Without clipping this is the norm of [`SkipOutliers`](crate::SkipOutliers). With several groups this
    /// is the norm of the lowest group; [`group_norms`](Outcome::group_norms) has all of them.
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
    /// No parameter moved, but a window of [`AccumGrad`](crate::AccumGrad) went on. The window collected
    /// gradients, or counted an [allowed](crate::Update::allow_no_gradients) call without gradients.
    Accumulated,
    /// No parameter moved, for this reason.
    Skipped(SkipReason),
}

/// Why a call of [`update`](crate::update) moved no parameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SkipReason {
    /// All parameters with a gradient are frozen, or no parameter has a gradient and such a call is
    /// [allowed](crate::Update::allow_no_gradients).
    NothingToMove,
    /// A gradient has a number that is infinite or NaN, or
    /// [too large to be squared](crate::Update::finite_only).
    NotFinite {
        /// The first such parameter, in path order.
        path: String,
    },
    /// [`SkipOutliers`](crate::SkipOutliers) found a norm that is too large; if several norms are, this is
    /// the norm of the lowest group.
    Outlier(Outlier),
    /// All windows of [`AccumGrad`](crate::AccumGrad) were given up, because no call could end them. The
    /// gradients of this call are finite, but the sum of a window is not, or is too large to be squared. The
    /// next call is the first of new windows.
    WindowsGivenUp {
        /// The first parameter whose sum is the cause, in path order.
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
        if let Status::Skipped(reason) = &self.status {
            Some(reason)
        } else {
            None
        }
    }

    /// The parameter whose gradient is not finite, if the call was skipped for this reason.
    pub(crate) fn overflow(&self) -> Option<&str> {
        if let Status::Skipped(SkipReason::NotFinite { path }) = &self.status {
            Some(path)
        } else {
            None
        }
    }
}

/// Paths of some parameters of a state, in the order of the state.
///
/// The names are shared with the state and not copied, so thousands of them cost one small allocation.
#[derive(Clone, Default)]
pub struct Paths {
    /// The path of every leaf.
    all_paths: Arc<[String]>,
    /// The leaves whose paths these are.
    leaves: Vec<usize>,
}

impl Paths {
    /// The paths of these leaves.
    pub(crate) fn new(all_paths: &Arc<[String]>, leaves: Vec<usize>) -> Self {
        Paths {
            all_paths: all_paths.clone(),
            leaves,
        }
    }

    /// The number of paths.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether there are no paths.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// The paths.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.leaves.iter().map(|&leaf| self.all_paths[leaf].as_str())
    }
}

impl std::fmt::Debug for Paths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for Paths {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<S: AsRef<str>, const N: usize> PartialEq<[S; N]> for Paths {
    fn eq(&self, other: &[S; N]) -> bool {
        self.iter().eq(other.iter().map(AsRef::as_ref))
    }
}

/// What a step did to one parameter, in norms of gradient, parameter and update.
///
/// Each norm is the root of a sum of squares in f64, over the whole parameter, even if the parameter is
/// divided among ranks.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Adam, Update, setup};
///
/// let model = vec![Var::new(&[1f32, 1.0], &Device::Cpu)?, Var::new(&[-1f32], &Device::Cpu)?];
/// let mut state = setup(Adam::new(1e-3), &model)?;
/// // A ReLU that does not open cuts the second parameter off from the loss.
/// let loss = (model[0].sum_all()? + model[1].relu()?.sum_all()?)?;
/// let figures = Update::new(&mut state).with_figures().apply(&model, &loss.backward()?)?.figures;
///
/// for leaf in &figures {
///     println!("{leaf}");
/// }
/// assert!((figures[0].ratio() - 1e-3).abs() < 1e-9);
/// // The second parameter does not learn, and none moves much too far.
/// let dead: Vec<_> = figures.iter().filter(|leaf| leaf.ratio() < 1e-7).map(|leaf| leaf.path.as_str()).collect();
/// assert_eq!(dead, ["1"]);
/// assert!(figures.iter().all(|leaf| leaf.ratio() < 0.1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeafFigures {
    /// The parameter's path.
    pub path: String,
    /// ‖dx‖ of the gradient before the rules: without the loss scale, the mean of all ranks. With
    /// [`AccumGrad`](crate::AccumGrad) this is the norm of the mean (or sum) over the window.
    pub gradient: f64,
    /// ‖x‖ of the parameter before the step, or of its master if it has one.
    pub parameter: f64,
    /// ‖dx'‖ of the update that is subtracted from x, before rounding to the parameter's dtype.
    pub update: f64,
}

impl LeafFigures {
    /// The figures of a leaf, if its norms were computed.
    pub(super) fn new(leaf: &Leaf, norms: &LeafNorms) -> Option<Self> {
        let (gradient, step_norms) = norms.get()?;
        Some(LeafFigures {
            path: leaf.path.clone(),
            gradient,
            parameter: step_norms.parameter,
            update: step_norms.gradient,
        })
    }

    /// How far the step moved the parameter, relative to its size: update / parameter.
    ///
    /// If the parameter is zero, such as a bias at first, the ratio is infinite, or NaN if the parameter does
    /// not move.
    ///
    /// With Adam and similar rules about 1e-3 is usual for matrices. At 1e-2 and more, the learning rate is
    /// too high or the warm-up too short; at 1e-5 and less, the learning rate is too low. A parameter without
    /// a master loses the step of an element if the step is below 2⁻²⁵ of the element in F32, 2⁻¹² in F16 and
    /// 2⁻⁹ (0.002) in BF16.
    pub fn ratio(&self) -> f64 {
        self.update / self.parameter
    }
}

/// The figures in one line.
impl Display for LeafFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeafFigures {
            path,
            gradient,
            parameter,
            update,
        } = self;
        write!(
            f,
            "{path}: gradient {gradient:.3e}, parameter {parameter:.3e}, update {update:.3e}, ratio {:.3e}",
            self.ratio()
        )
    }
}
