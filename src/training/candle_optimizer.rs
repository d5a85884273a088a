//! An adaptor that gives this crate's optimisers candle-nn's `Optimizer` trait.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::candle::{CandleVariable, candle_variables};
use crate::rule::IntoOptimiser;
use crate::step::outcome::Outcome;
use crate::step::setup::setup;
use crate::step::update::update;
use crate::training::audit::unknown_variables;
use crate::tree::{Leaf, StateTree, is_trainable};

/// Any optimiser of this crate as a [`candle_nn::Optimizer`], for training loops that use that trait.
///
/// The adaptor owns the variables and their [`StateTree`], and a step is an [`update`](crate::update). In an
/// existing loop one line changes: instead of `candle_nn::AdamW::new_lr(variables.all_vars(), lr)` write the
/// line with `for_model` below. The weight decay λ is 0.01 by default, as in candle-nn.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear, loss::mse};
/// use optimisers::{AdamW, CandleOptimizer};
///
/// let variables = VarMap::new();
/// let model = linear(4, 1, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
/// let (inputs, targets) = (Tensor::ones((8, 4), DType::F32, &Device::Cpu)?, Tensor::ones((8, 1), DType::F32, &Device::Cpu)?);
///
/// let mut optimizer = CandleOptimizer::for_model(&variables, AdamW::new(0.05))?;
/// for _ in 0..200 {
///     optimizer.backward_step(&mse(&model.forward(&inputs)?, &targets)?)?;
/// }
/// assert!(mse(&model.forward(&inputs)?, &targets)?.to_scalar::<f32>()? < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`for_model`](CandleOptimizer::for_model) keeps the names of the model. The trait's `new` names parameters
/// by their places in the list: `0`, `1`, and so on. `VarMap::all_vars` has another order in each run of the
/// program. So calls that find parameters by name refuse a state from `new`: the state cannot be saved,
/// [restored](crate::CheckpointFile::restore), or [bound](StateTree::rebind) to another model. If your list
/// has the same order in each run, write `for_model(&list, rule)`. A restore then compares shapes, and
/// [warns](crate::Warning::OrderUnseen) if some shapes are equal.
///
/// With equal settings the steps are candle-nn's up to rounding. `Descent` has the steps of `SGD` bit for
/// bit. `AdamW` rounds in other places: over 100 steps of an MLP the losses agree to 1e-13 in f64 and to 1e-5
/// in f32 (`cargo test adamw_has_the_losses`). In models that amplify roundings, such as deep convolutional
/// networks, f32 losses differ more.
///
/// # Departures
/// The differences from candle-nn's optimisers:
/// - A variable that is listed twice moves once in a step. Integer variables are passed over, as in
///   candle-nn.
/// - If the loss reaches a variable that the optimiser does not have, `backward_step`
///   [warns](crate::Warning::NotInState) once, or refuses the loss if the state [requires
///   all](StateTree::require_all) gradients.
/// - If no variable has a gradient, a step is an error ([`NoGradient`](crate::ErrorKind::NoGradient));
///   candle-nn does nothing. Both crates accept an empty list of variables, whose steps do nothing.
/// - [`set_learning_rate`](https://docs.rs/candle-nn/0.11/candle_nn/optim/trait.Optimizer.html#tymethod.set_learning_rate)
///   refuses a rate that is negative or not finite. It refuses any rate if no rule has a rate, or if a
///   [schedule](crate::StateTree::schedule) alone decides the rate. The method cannot return an error, so the
///   next step returns the error and applies nothing. The learning rate stays as it was.
/// - [`learning_rate`](https://docs.rs/candle-nn/0.11/candle_nn/optim/trait.Optimizer.html#tymethod.learning_rate)
///   is the rate of the first parameter, or NaN if the first parameter has no rate.
/// - If several members of a chain have a rate, both methods use [the product](crate::Adjust::adjust) of the
///   rates, as in torch's RMSprop with momentum.
///
/// Errors of this crate are converted to candle's, with the same message.
#[must_use = "it trains nothing until `backward_step` or `step` is called"]
#[derive(Debug)]
pub struct CandleOptimizer<O: IntoOptimiser> {
    /// The variables, by all their paths.
    variables: BTreeMap<String, Tensor>,
    state: StateTree,
    outcome: Option<Outcome>,
    /// Whether the state required all gradients in the last `warn_of_others`; `None` before the first.
    required_all_in_check: Option<bool>,
    /// The first error of `set_learning_rate` that no step has returned yet.
    rate_error: Option<Error>,
    optimiser: PhantomData<O>,
}

impl<O: IntoOptimiser> CandleOptimizer<O> {
    /// An optimiser for every trainable variable of `model`, under the model's paths.
    ///
    /// # Errors
    /// As [`setup`](crate::setup).
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{Optimizer, VarBuilder, VarMap, linear};
    /// use optimisers::{Adam, CandleOptimizer, MixedPrecision};
    ///
    /// let variables = VarMap::new();
    /// let _layer = linear(4, 2, VarBuilder::from_varmap(&variables, DType::BF16, &Device::Cpu).pp("layer"))?;
    /// let optimizer = CandleOptimizer::for_model(&variables, MixedPrecision::new(DType::F32, Adam::new(1e-3)))?;
    /// assert_eq!(optimizer.learning_rate(), 1e-3);
    /// let paths: Vec<_> = optimizer.state().leaves().map(|leaf| leaf.path()).collect();
    /// assert_eq!(paths, ["layer.bias", "layer.weight"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn for_model<M: Model + ?Sized>(model: &M, optimiser: O) -> Result<Self> {
        Self::with_state(model, setup(optimiser, model)?)
    }

    fn with_state<M: Model + ?Sized>(model: &M, state: StateTree) -> Result<Self> {
        let mut variables = BTreeMap::new();
        for CandleVariable { paths, tensor } in candle_variables(model, is_trainable)? {
            variables.extend(paths.into_iter().map(|path| (path, tensor.clone())));
        }
        Ok(CandleOptimizer {
            variables,
            state,
            outcome: None,
            required_all_in_check: None,
            rate_error: None,
            optimiser: PhantomData,
        })
    }

    /// The state of all variables.
    pub fn state(&self) -> &StateTree {
        &self.state
    }

    /// The state of all variables, for changes: to adjust or freeze parts, to [require
    /// all](StateTree::require_all) gradients, or to [restore](crate::CheckpointFile::restore).
    ///
    /// The list of variables in this optimiser never changes. To add or remove parameters, go on with
    /// [`into_state`](CandleOptimizer::into_state) and [`update`](crate::update).
    ///
    /// For steps that candle's trait cannot express, for example with a [`LossScaler`](crate::LossScaler),
    /// give the state to an [`Update`](crate::Update).
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use candle_nn::Optimizer;
    /// use optimisers::{Adam, CandleOptimizer};
    ///
    /// let vars = vec![Var::zeros(2, DType::F32, &Device::Cpu)?, Var::zeros(3, DType::F32, &Device::Cpu)?];
    /// let mut optimizer = CandleOptimizer::new(vars, Adam::new(1e-3))?;
    /// optimizer.state_mut().at("1")?.adjust_field("beta", (0.8, 0.99))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn state_mut(&mut self) -> &mut StateTree {
        &mut self.state
    }

    /// The outcome of the last step; `None` before the first step and after a step that failed.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_nn::Optimizer;
    /// use optimisers::{CandleOptimizer, Descent};
    ///
    /// let x = Var::new(1f32, &Device::Cpu)?;
    /// let mut optimizer = CandleOptimizer::new(vec![x.clone()], Descent::new(0.5))?;
    /// optimizer.backward_step(&x.sqr()?)?;
    /// assert_eq!(optimizer.outcome().map(|outcome| outcome.applied), Some(1));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// Returns the state, to continue with [`update`](crate::update) and the model.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_nn::Optimizer;
    /// use optimisers::{CandleOptimizer, Descent, update};
    ///
    /// let x = Var::new(1f32, &Device::Cpu)?;
    /// let mut optimizer = CandleOptimizer::for_model(&x, Descent::new(0.5))?;
    /// optimizer.backward_step(&x.sqr()?)?;
    /// let mut state = optimizer.into_state();
    /// update(&mut state, &x, &x.sqr()?.backward()?)?;
    /// assert_eq!(state.leaf("").map(|leaf| leaf.steps()), Some(2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_state(self) -> StateTree {
        self.state
    }
}

impl<O: IntoOptimiser> candle_nn::Optimizer for CandleOptimizer<O> {
    type Config = O;

    fn new(vars: Vec<Var>, optimiser: O) -> candle_core::Result<Self> {
        let mut state = match setup(optimiser, &vars) {
            // `setup` refuses a model without parameters, but candle-nn accepts an empty list.
            Err(error) if error.kind() == ErrorKind::Model && !vars.iter().any(|x| is_trainable(x)) => {
                StateTree::new(Vec::new(), Vec::new())
            }
            state => state?,
        };
        state.leaves.iter_mut().for_each(|leaf| leaf.is_unnamed = true);
        Ok(Self::with_state(&vars, state)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.outcome = None;
        if let Some(error) = self.rate_error.take() {
            return Err(error.into());
        }
        let outcome = if self.variables.is_empty() {
            Outcome::default()
        } else {
            update(&mut self.state, &self.variables, grads)?
        };
        self.outcome = Some(outcome);
        Ok(())
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        self.outcome = None;
        let requires_all = Some(self.state.requires_all());
        let warning = if self.required_all_in_check == requires_all || !self.state.looks_for_others() {
            None
        } else {
            let nodes = loss.sorted_nodes();
            let others = unknown_variables(&nodes, |x| self.state.by_id().contains_key(&x.id()));
            self.state.warn_of_others(&others)?
        };
        self.step(&loss.backward()?)?;
        self.required_all_in_check = requires_all;
        self.outcome
            .iter_mut()
            .for_each(|outcome| outcome.warnings.extend(warning.clone()));
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.state
            .leaves()
            .next()
            .and_then(Leaf::learning_rate)
            .unwrap_or(f64::NAN)
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        if self.variables.is_empty() {
            return;
        }
        if let Err(error) = self.state.adjust(learning_rate) {
            self.rate_error.get_or_insert(error);
        }
    }
}
