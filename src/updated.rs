//! The functional twins of `update`.

use std::collections::BTreeMap;

use candle_core::{Tensor, Var};

use crate::engine::owned_on;
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::lent::INSIDE;
use crate::loss_scaler::LossScaler;
use crate::outcome::Outcome;
use crate::tree::{Leaf, StateTree};
use crate::update::{How, Update, expect_known, gradients_of, step};

/// [`update`](crate::update) without side effects: returns the new state and the new parameters, and leaves its arguments as they are.
///
/// `parameters` are by path, one per leaf of the state, as [`trainables`](crate::trainables) gives them; `grads` is a map by path, or candle's
/// `GradStore` of a loss that was computed from these tensors. The results are the bits that `update` would have written. The new
/// parameters are variables again, and the new state is theirs: both can go into the next `updated`, or into `update`.
///
/// It copies the state and the parameters; where that is too much, use `update`. With more to say about how it is done there are
/// [`Update::functional`] and [`LossScaler::updated`].
///
/// # Errors
/// As [`update`](crate::update), if a parameter is missing or unknown, or if one has another shape or dtype than its leaf.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Var};
/// use optimisers::{Momentum, setup, trainables, updated};
///
/// let model = BTreeMap::from([("x", Var::new(&[1f32, 2.0], &Device::Cpu)?)]);
/// let state = setup(Momentum { rho: 0.5, ..Momentum::new(0.25) }, &model)?;
/// let start = trainables(&model)?;
/// let grads = start["x"].sqr()?.sum_all()?.backward()?;
/// let (state, next, _) = updated(&state, &start, &grads)?;
/// assert_eq!(next["x"].to_vec1::<f32>()?, [0.5, 1.0]);
/// assert_eq!(start["x"].to_vec1::<f32>()?, [1.0, 2.0]);
///
/// let grads = next["x"].sqr()?.sum_all()?.backward()?;
/// let (_, next, _) = updated(&state, &next, &grads)?;
/// assert_eq!(next["x"].to_vec1::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn updated<G: Gradients + ?Sized>(
    state: &StateTree,
    parameters: &BTreeMap<String, Tensor>,
    grads: &G,
) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
    Update::functional(state).apply(parameters, grads)
}

impl<'s> Update<'s, &'s StateTree> {
    /// An update as [`updated`] does it: it leaves its arguments as they are, and returns the new ones.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AccumGrad, Average, Descent, OptimiserChain, Update, setup, trainables};
    ///
    /// let model = vec![Var::new(&[1f32], &Device::Cpu)?];
    /// let weighted = AccumGrad { average: Average::Weighted, ..AccumGrad::new(2) };
    /// let mut state = setup(OptimiserChain::new((weighted, Descent::new(0.5))), &model)?;
    /// let mut parameters = trainables(&model)?;
    /// for (tokens, gradient) in [(1, 4f32), (3, 0.0)] {
    ///     let grads = [("0", Tensor::new(&[gradient], &Device::Cpu)?)];
    ///     (state, parameters, _) = Update::functional(&state).finite_only().weight(tokens).apply(&parameters, &grads)?;
    /// }
    /// assert_eq!(parameters["0"].to_vec1::<f32>()?, [0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn functional(state: &'s StateTree) -> Self {
        Update { state, how: How::default(), low: None }
    }

    /// Returns the new state, the new parameters and what was done.
    ///
    /// # Errors
    /// As [`updated`].
    pub fn apply<G: Gradients + ?Sized>(
        self,
        parameters: &BTreeMap<String, Tensor>,
        grads: &G,
    ) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
        match grads.indexed(INSIDE)? {
            Some(grads) => applied(self.how, self.state, parameters, &grads),
            None => applied(self.how, self.state, parameters, grads),
        }
    }
}

/// The functional update with no more to say than its state.
impl<'s> From<&'s StateTree> for Update<'s, &'s StateTree> {
    fn from(state: &'s StateTree) -> Self {
        Update::functional(state)
    }
}

impl LossScaler {
    /// [`LossScaler::update`] without side effects on state and parameters, as [`updated`]. It takes a state, or an [`Update::functional`] with more to
    /// say about how it is done.
    ///
    /// # Errors
    /// As [`LossScaler::update`] and [`updated`].
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, LossScaler, Update, setup, trainables};
    ///
    /// let model = vec![Var::new(&[1f32, 2.0], &Device::Cpu)?];
    /// let mut scaler = LossScaler::dynamic();
    /// let (state, parameters) = (setup(Descent::new(0.25), &model)?, trainables(&model)?);
    /// let grads = scaler.scale(&parameters["0"].sqr()?.sum_all()?)?.backward()?;
    /// let (state, parameters, _) = scaler.updated(&state, &parameters, &grads)?;
    ///
    /// let grads = scaler.scale(&parameters["0"].sqr()?.sum_all()?)?.backward()?;
    /// let (_, parameters, _) = scaler.updated(Update::functional(&state).keep_masters(), &parameters, &grads)?;
    /// assert_eq!(parameters["0"].to_vec1::<f32>()?, [0.25, 0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn updated<'s, G: Gradients + ?Sized>(
        &mut self,
        update: impl Into<Update<'s, &'s StateTree>>,
        parameters: &BTreeMap<String, Tensor>,
        grads: &G,
    ) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
        let mut update = update.into();
        let scale = self.prepare(&mut update.how)?;
        let (mut state, parameters, mut outcome) = update.apply(parameters, grads)?;
        if self.account(&mut outcome, scale)? {
            Update::new(&mut state).end_window()?;
        }
        Ok((state, parameters, outcome))
    }
}

fn applied<G: Gradients + ?Sized>(
    how: How,
    state: &StateTree,
    parameters: &BTreeMap<String, Tensor>,
    grads: &G,
) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
    state.expect_whole("`updated`")?;
    expect_known(state, grads)?;
    if let Some(path) = parameters.keys().find(|path| state.leaf(path).is_none()) {
        return Err(Error::UnknownParameter { path: path.clone() });
    }
    let mut found = Vec::with_capacity(state.len());
    let mut by_path: BTreeMap<&str, Tensor> = BTreeMap::new();
    for leaf in state.leaves() {
        let (name, x) = parameter(leaf, parameters)?;
        by_path.extend(gradients_of(leaf, x, grads).map(|(path, gradient)| (path, gradient.clone())));
        found.push((name, x));
    }
    let next = found.into_iter().map(|(name, x)| Ok((name.clone(), Var::from_tensor(&owned_on(x.device(), x)?)?.into_inner())));
    let next: BTreeMap<String, Tensor> = next.collect::<Result<_>>()?;
    let mut state = state.try_clone()?;
    state.rebind(&next)?;
    let variables = state.parameters(&next)?;
    let outcome = step(how, &mut state, &variables, None, &by_path)?;
    Ok((state, next, outcome))
}

/// The parameter of a leaf, by any of its paths.
fn parameter<'p>(leaf: &Leaf, parameters: &'p BTreeMap<String, Tensor>) -> Result<(&'p String, &'p Tensor)> {
    let found = leaf.paths().find_map(|path| parameters.get_key_value(path));
    found.ok_or_else(|| Error::MissingParameter { path: leaf.path().to_string() })
}
