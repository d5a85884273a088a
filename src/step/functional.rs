//! The functional form of an update, which changes no argument.

use std::collections::BTreeMap;

use super::call::UpdateCall;
use super::leaf::GradientSource;
use super::outcome::Outcome;
use super::pipeline::step;
use super::update::{Update, UpdateOptions, check_known};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::{GradientLookUp, Gradients, with_look_up};
use crate::model::lent::Lend;
use crate::tensors::{Tensor, Var};
use crate::tree::{Leaf, StateTree, not_in_state_error};

impl<'s> Update<'s, &'s StateTree> {
    /// An update without side effects: its `apply` returns the new state and parameters.
    ///
    /// The call copies the state and the parameters. If the copies are too large, use
    /// [`update`](crate::update).
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use candle_core::{Device, Var};
    /// use optimisers::{Momentum, Update, setup, trainables};
    ///
    /// let model = BTreeMap::from([("x", Var::new(&[1f32, 2.0], &Device::Cpu)?)]);
    /// let state = setup(Momentum { rho: 0.5, ..Momentum::new(0.25) }, &model)?;
    /// let start = trainables(&model)?;
    /// let grads = start["x"].sqr()?.sum_all()?.backward()?;
    /// let (state, next, _) = Update::functional(&state).apply(&start, &grads)?;
    /// assert_eq!(next["x"].to_vec1::<f32>()?, [0.5, 1.0]);
    /// assert_eq!(start["x"].to_vec1::<f32>()?, [1.0, 2.0]);
    ///
    /// let grads = next["x"].sqr()?.sum_all()?.backward()?;
    /// let (_, next, _) = Update::functional(&state).finite_only().apply(&next, &grads)?;
    /// assert_eq!(next["x"].to_vec1::<f32>()?, [0.0, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn functional(state: &'s StateTree) -> Self {
        Update {
            state,
            options: UpdateOptions::default(),
            scaler: None,
        }
    }

    /// Returns the new state, the new parameters and the outcome.
    ///
    /// `parameters` has one tensor per leaf of the state, by path, as [`trainables`](crate::trainables)
    /// returns them. `grads` is a map by path, or candle's `GradStore` of a loss computed from these tensors.
    /// The results have the bits that [`update`](crate::update) would write. The new parameters are
    /// variables, and the new state belongs to them: both can go into the next call, or into `update`.
    ///
    /// # Errors
    /// As [`update`](crate::update). Also if a parameter is missing or unknown, or has another shape or dtype
    /// than its leaf; if two paths of one leaf have two tensors. With a [scaler](Update::scaler) also as
    /// [`Update::apply`](crate::Update::apply).
    pub fn apply<G: Gradients + ?Sized>(
        self,
        parameters: &BTreeMap<String, Tensor>,
        grads: &G,
    ) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
        let Update {
            state,
            options,
            scaler,
        } = self;
        let call = UpdateCall::new(options, scaler.as_deref(), grads.loss_scale(), false)?;
        state.check_whole("`Update::functional`")?;
        check_known(state, grads)?;
        let loss_scale = call.loss_scale;
        let (mut state, parameters, mut outcome) =
            with_look_up(grads, |grads| apply_to_copies(call, state, parameters, grads))?;
        if let Some(scaler) = scaler
            && scaler.account(&mut outcome, loss_scale)?
        {
            state.end_windows()?;
        }
        Ok((state, parameters, outcome))
    }
}

/// Applies the step to copies of the state and the parameters.
fn apply_to_copies(
    call: UpdateCall,
    state: &StateTree,
    parameters: &BTreeMap<String, Tensor>,
    grads: &dyn GradientLookUp,
) -> Result<(StateTree, BTreeMap<String, Tensor>, Outcome)> {
    if let Some(path) = parameters.keys().find(|path| state.leaf(path).is_none()) {
        return Err(not_in_state_error(path));
    }
    let originals = state
        .leaves()
        .map(|leaf| parameter(leaf, parameters))
        .collect::<Result<Vec<_>>>()?;
    let copies = originals
        .iter()
        .map(|&(name, x)| Ok((name.clone(), Var::from_tensor(&x.detach())?.into_inner())));
    let copies: BTreeMap<String, Tensor> = copies.collect::<Result<_>>()?;
    let mut state = state.try_clone()?;
    state.rebind(&copies)?;
    let variables = state.parameters(&copies)?;
    // Gradients are looked up by the original tensors, because a `GradStore` does not find them by copies.
    let xs = originals.into_iter().map(|(_, x)| x as &dyn Lend);
    let gradients = GradientSource::look_up_all(&state, xs, grads)?;
    let outcome = step(call, &mut state, &variables, &(), gradients)?;
    Ok((state, copies, outcome))
}

/// The parameter of a leaf, by any of its paths. Refuses several tensors, because only one of them would get
/// its gradient and move.
fn parameter<'p>(leaf: &Leaf, parameters: &'p BTreeMap<String, Tensor>) -> Result<(&'p String, &'p Tensor)> {
    let mut entries = leaf.paths().filter_map(|path| parameters.get_key_value(path));
    let (name, x) = entries.next().ok_or_else(|| leaf.not_in_model_error())?;
    let Some((other_name, _)) = entries.find(|(_, other)| other.id() != x.id()) else {
        return Ok((name, x));
    };
    let problem = format!(
        "{name:?} and {other_name:?} are one variable in the state, but two tensors in the parameters"
    );
    Err(Error::new(ErrorKind::Model, problem)
        .at(name)
        .with_remedy("pass one tensor under both paths, or leave one path out"))
}
