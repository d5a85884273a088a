//! This crate's optimisers behind candle-nn's `Optimizer` trait.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::candle::{CandleVariable, of_candle};
use crate::rule::IntoOptimiser;
use crate::step::outcome::Outcome;
use crate::step::setup::setup;
use crate::step::update::update;
use crate::tree::{Leaf, StateTree, is_trainable};

/// Any optimiser of this crate as a [`candle_nn::Optimizer`], for training loops that use that trait.
///
/// It owns the variables and their [`StateTree`]; a step is [`update`](crate::update). One line of an
/// existing loop changes. λ is 0.01 by default, like candle-nn's weight decay, so
/// `candle_nn::AdamW::new_lr(variables.all_vars(), lr)` becomes:
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
/// [`for_model`](CandleOptimizer::for_model) keeps the names of the model. `new`, which the trait has, names
/// the leaves by their places in the list: `0`, `1`, and so on. `VarMap::all_vars` has another order in each
/// run of the program, so such a state is refused where leaves are found by name: it is neither saved nor
/// [restored](crate::CheckpointFile::restore), and not [bound](StateTree::rebind) to another model. For a
/// list that has the same order in each run write `for_model(&list, rule)`. A restore compares shapes, and
/// [warns](crate::Warning::OrderUnseen) if all are equal.
///
/// With equal settings its steps are candle-nn's up to rounding. `Descent` has those of `SGD` bit for bit.
/// `AdamW` rounds in other places: over 100 steps of an MLP the losses agree to 1e-13 in f64 and to 1e-5 in
/// f32. Models that let roundings grow, such as deep convolutional networks, go further apart in f32.
///
/// # Departures
/// From candle-nn's optimisers:
/// - A variable that is listed twice moves once in a step. Integer variables are passed over, as there.
/// - A step without a gradient for any variable is an error ([`NoGradient`](crate::ErrorKind::NoGradient));
///   candle-nn does nothing. An empty list is accepted by both, and steps do nothing.
/// - [`set_learning_rate`](https://docs.rs/candle-nn/0.11/candle_nn/optim/trait.Optimizer.html#tymethod.set_learning_rate)
///   refuses a rate that is negative or not finite, and any rate if no rule has one or a
///   [schedule](crate::StateTree::schedule) alone decides it. It cannot fail, so the next step returns the
///   error and applies nothing; the learning rate stays as it was.
/// - [`learning_rate`](https://docs.rs/candle-nn/0.11/candle_nn/optim/trait.Optimizer.html#tymethod.learning_rate)
///   is that of the first leaf: NaN if there is none.
/// - If several members of a chain have a rate, both mean [their product](crate::Adjust::adjust), as in
///   torch's RMSprop with momentum.
///
/// Errors of this crate arrive as candle's, with their message.
#[must_use = "it trains nothing until `backward_step` or `step` is called"]
#[derive(Debug)]
pub struct CandleOptimizer<O: IntoOptimiser> {
    /// The variables, by all their paths.
    variables: BTreeMap<String, Tensor>,
    state: StateTree,
    outcome: Option<Outcome>,
    /// The first error of `set_learning_rate` that no step has returned yet.
    refused: Option<Error>,
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
        for CandleVariable { paths, tensor } in of_candle(model, is_trainable)? {
            variables.extend(paths.into_iter().map(|path| (path, tensor.clone())));
        }
        Ok(CandleOptimizer { variables, state, outcome: None, refused: None, optimiser: PhantomData })
    }

    /// The state of all variables.
    pub fn state(&self) -> &StateTree {
        &self.state
    }

    /// The state, to adjust it or freeze parts, to [require all](StateTree::require_all) gradients, or to
    /// [restore](crate::CheckpointFile::restore) a saved one.
    ///
    /// With the model it also goes into an [`Update`](crate::Update) or a [`LossScaler`](crate::LossScaler),
    /// for steps that candle's trait cannot express.
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

    /// What the last step did; `None` before the first step and after one that failed.
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

    /// The state alone, to go on with [`update`](crate::update) and the model.
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
            Err(error) if error.kind() == ErrorKind::Model && !vars.iter().any(|x| is_trainable(x)) => {
                StateTree::new(Vec::new(), Vec::new())
            }
            state => state?,
        };
        state.leaves.iter_mut().for_each(|leaf| leaf.is_place = true);
        Ok(Self::with_state(&vars, state)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.outcome = None;
        if let Some(error) = self.refused.take() {
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

    fn learning_rate(&self) -> f64 {
        self.state.leaves().next().and_then(Leaf::learning_rate).unwrap_or(f64::NAN)
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        if self.variables.is_empty() {
            return;
        }
        if let Err(error) = self.state.adjust(learning_rate) {
            self.refused.get_or_insert(error);
        }
    }
}
