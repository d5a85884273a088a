//! What a call of `update` did.

/// What a call of [`update`](crate::update) did.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The call as a whole.
    pub status: Status,
    /// Parameters that moved.
    pub applied: usize,
    /// Parameters whose gradient went into an accumulator.
    pub accumulated: usize,
    /// Frozen parameters.
    pub frozen: usize,
    /// Parameters without a gradient, which stayed as they are.
    pub without_gradient: usize,
    /// The norm that [`ClipGlobalNorm`](crate::ClipGlobalNorm) took, before clipping and without the loss scale. With several groups the norm
    /// of the lowest; all are in [`group_norms`](Outcome::group_norms).
    pub global_norm: Option<f64>,
    /// The norms of all groups of [`ClipGlobalNorm`](crate::ClipGlobalNorm), in the order of the groups.
    pub group_norms: Vec<(u64, f64)>,
    /// Where the call was skipped because of a number that is infinite or NaN: the first parameter, in path order, with one in its gradient.
    pub overflow: Option<String>,
    /// The scale that the gradients were divided by, where a [`LossScaler`](crate::LossScaler) was used.
    pub loss_scale: Option<f64>,
}

/// What became of a call of [`update`](crate::update) as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Status {
    /// At least one parameter moved. A learning-rate schedule should advance now.
    Stepped,
    /// The call counts in a window: gradients were collected, or none came where that is [allowed](crate::Update::allow_no_gradients). No parameter moved.
    Accumulated,
    /// Nothing changed: all parameters are frozen, a gradient is not finite, or a rule asked to skip the call.
    #[default]
    Skipped,
}
