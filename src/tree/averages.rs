//! Weights to evaluate a model with, instead of its parameters.
//!
//! The parameters must come back bit for bit, whatever fails. So `with_averages` works in this order:
//! 1. Compute the averages and copy the parameters. All errors of the arguments come here, before anything is
//!    written.
//! 2. Put the copies aside in the leaves (`ParameterExchange::new`), before the first average is written.
//! 3. Write the averages. Each rank writes its parts, and ranks share them.
//! 4. Run `evaluate`, and write the copies back. After an error or a panic the drop of the
//!    `ParameterExchange` writes them.

use std::collections::BTreeMap;

use super::{Leaf, ParameterExchange, StateTree};
use crate::engine::set_lent;
use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::Model;
use crate::model::lent::{Lend, Lent, copy_of};
use crate::numbers::is_supported;
use crate::ranks::Call;
use crate::rule::Evaluation;
use crate::tensors::Tensor;

impl StateTree {
    /// The weights to evaluate with, by path, in the precision of the average or of the arithmetic.
    ///
    /// A parameter has such weights if it has taken a step and its rule keeps an average:
    /// [`Ema`](crate::Ema), [`UniformAverage`](crate::UniformAverage), [`ScheduleFree`](crate::ScheduleFree),
    /// or a rule of your own with a [`Slot::average`](crate::Slot::average).
    ///
    /// A parameter without a step has no average. Examples are BatchNorm's running statistics, which are
    /// variables in a `VarMap` and move without gradients.
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this method and get whole tensors. Without candle the
    /// numbers are read as those of [`Leaf::tensor`].
    ///
    /// # Errors
    /// If a rule's average has another shape than its parameter, or no float dtype; if `model` is not the
    /// state's.
    pub fn averages<M: Model + ?Sized>(&self, model: &M) -> Result<BTreeMap<String, Tensor>> {
        let parts = self
            .parameters(model)
            .and_then(|parameters| self.own_averages(&parameters));
        Ok(self
            .gather(Call::Averages, parts)?
            .into_iter()
            .map(|(leaf, average)| (self.leaves[leaf].path.clone(), average))
            .collect())
    }

    /// The averages of this rank's parts, each with the index of its leaf.
    fn own_averages(&self, parameters: &[Lent<'_>]) -> Result<Vec<(usize, Tensor)>> {
        let stepped = self
            .leaves
            .iter()
            .zip(parameters)
            .enumerate()
            .filter(|(_, (leaf, _))| leaf.steps > 0);
        stepped
            .filter_map(|(index, (leaf, x))| {
                Some(
                    average_of(leaf, &**x)
                        .transpose()?
                        .map(|average| (index, average)),
                )
            })
            .collect()
    }

    /// Puts the [averages](StateTree::averages), rounded, into the model while `evaluate` runs.
    ///
    /// Before the first step there are no averages, and `evaluate` runs with the parameters.
    ///
    /// The parameters always come back, bit for bit: also after an error or a panic of `evaluate`, and if a
    /// device or another rank fails. Masters and state stay as they are. Do not write to the model in
    /// `evaluate`, because the parameters overwrite it afterwards. If `evaluate` returns a tensor, detach the
    /// tensor, because its graph leads to the variables, and a later `backward` would read the parameters
    /// there. To keep the averages, save the model in `evaluate`, for example by `VarMap::save`. The exchange
    /// takes memory for a copy of the parameters.
    ///
    /// Variables that are no parameters, such as BatchNorm's running statistics, stay as they were in the
    /// training. The example
    /// [`batch_norm`](https://docs.rs/crate/optimisers/latest/source/examples/batch_norm/main.rs) estimates
    /// them anew for the averages. Over [ranks](crate::Setup::over) all ranks call this method. Each rank
    /// gets its parameters back when its own `evaluate` ends.
    ///
    /// # Errors
    /// The errors of `evaluate`, in a type that an [`Error`] can become, such as candle's or
    /// `Box<dyn Error>`. If no rule keeps an average, or `model` is not the state's; `evaluate` does not run
    /// then. If a device fails to write the parameters back. The state then keeps the parameters, and the
    /// next call of this method tries again. Until then, calls that need the parameters fail with an error of
    /// the kind [`Changed`](ErrorKind::Changed).
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, OptimiserChain, UniformAverage, setup, update};
    ///
    /// let x = Var::new(&[4f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(1.0), UniformAverage::default())), &x)?;
    /// for _ in 0..3 {
    ///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
    /// }
    /// let average = state.with_averages(&x, || x.to_vec1::<f32>())?;
    /// assert_eq!(average, [2.0]); // of 3, 2 and 1
    /// assert_eq!(x.to_vec1::<f32>()?, [1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_averages<M, F, T, E>(&mut self, model: &M, evaluate: F) -> std::result::Result<T, E>
    where
        M: Model + ?Sized,
        F: FnOnce() -> std::result::Result<T, E>,
        E: From<Error>,
    {
        let mut exchange = self.exchange_parameters(model)?;
        let result = evaluate()?;
        // The parameters are put back here, because `drop` can only log an error.
        exchange.put_back()?;
        Ok(result)
    }

    /// Puts the averages into the model instead of its parameters.
    fn exchange_parameters<'s, 'm, M: Model + ?Sized>(
        &'s mut self,
        model: &'m M,
    ) -> Result<ParameterExchange<'s, 'm>> {
        let plan = self.plan_exchange(model);
        let AverageExchange {
            averages,
            parameters,
            copies,
        } = self.world.settle(Call::WithAverages, plan)?;
        let exchange = ParameterExchange::new(self, parameters, copies);
        let ParameterExchange { state, parameters } = &exchange;
        let write = |(leaf, average): &(usize, Tensor)| {
            set_lent(&*state.leaves[*leaf].own_part(&*parameters[*leaf])?, average)
        };
        state
            .world
            .settle(Call::AveragesPut, averages.iter().try_for_each(write))?;
        state.share(averages.iter().map(|(leaf, _)| (*leaf, &parameters[*leaf])))?;
        Ok(exchange)
    }

    /// Computes the averages and copies the parameters, before anything is written.
    fn plan_exchange<'m, M: Model + ?Sized>(&mut self, model: &'m M) -> Result<AverageExchange<'m>> {
        let parameters = self.recover_parameters(model)?;
        let averages = self.own_averages(&parameters)?;
        if averages.is_empty()
            && self
                .leaves()
                .map(evaluation_of)
                .filter_map(Result::transpose)
                .next()
                .transpose()?
                .is_none()
        {
            let remedy = "add `Ema` or `UniformAverage` to the end of the chain, or take `ScheduleFree`";
            return Err(Error::new(ErrorKind::Unsupported, "no parameter has an average").with_remedy(remedy));
        }
        let copy = |(leaf, _): &(usize, Tensor)| Ok((*leaf, copy_of("parameter", &*parameters[*leaf])?));
        let copies = averages.iter().map(copy).collect::<Result<_>>()?;
        Ok(AverageExchange {
            averages,
            parameters,
            copies,
        })
    }

    /// Refuses a state whose leaves are lost, or whose model has averages instead of its parameters.
    pub(crate) fn check_parameters(&self) -> Result<()> {
        self.check_leaves()?;
        self.leaves().try_for_each(Leaf::check_parameter)
    }
}

/// The averages that go into the model, and the copies of the parameters that come back.
struct AverageExchange<'m> {
    /// The averages of this rank's parts, each with the index of its leaf.
    averages: Vec<(usize, Tensor)>,
    /// The variables of the model, in the order of the leaves.
    parameters: Vec<Lent<'m>>,
    /// Whole copies of the parameters that are exchanged, each with the index of its leaf.
    copies: Vec<(usize, Tensor)>,
}

/// The weights that a leaf is evaluated with, as its optimiser describes them.
fn evaluation_of(leaf: &Leaf) -> Result<Option<Evaluation<'_>>> {
    leaf.acting()
        .evaluation(&leaf.state)
        .map_err(|error| error.at(&leaf.path))
}

/// The average of this rank's part of a leaf.
fn average_of(leaf: &Leaf, x: &dyn Lend) -> Result<Option<Tensor>> {
    let Some(evaluation) = evaluation_of(leaf)? else {
        return Ok(None);
    };
    let x = leaf.own_part(x)?;
    let label = "the average of its rule";
    if evaluation.shape() != x.shape() {
        return Err(Error::shape(label, evaluation.shape(), x.shape()).at(&leaf.path));
    }
    if !is_supported(evaluation.dtype()) {
        return Err(Error::dtype(label, evaluation.dtype(), FLOATS).at(&leaf.path));
    }
    let precise = || leaf.optimiser.precise(&leaf.state, leaf.parameter(&*x));
    evaluation
        .tensor(precise)
        .map(Some)
        .map_err(|error| error.at(&leaf.path))
}
