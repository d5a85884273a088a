//! Weights to evaluate a model with, in place of its parameters.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::{Leaf, StateTree, Twins};
use crate::engine::{owned_on, set_tensor};
use crate::error::{Error, MasterError, Result};
use crate::model::Model;
use crate::numbers::is_supported;
use crate::world::Call;

impl StateTree {
    /// The weights to evaluate with, by path: of every parameter that has taken a step and whose rule keeps an average ([`Ema`](crate::Ema),
    /// [`UniformAverage`](crate::UniformAverage), [`ScheduleFree`](crate::ScheduleFree), or a rule of one's own with a
    /// [`Slot::average`](crate::Slot::average)), in the precision of the average.
    ///
    /// Without a step there is no average. So it is with BatchNorm's running statistics, which are variables in a `VarMap` and move without gradients.
    ///
    /// Over [ranks](crate::Setup::over) all call this, and each gets the whole.
    ///
    /// # Errors
    /// If a rule's average has another shape than its parameter or no float dtype, or `model` is not the state's.
    pub fn averages<M: Model + ?Sized>(&self, model: &M) -> Result<BTreeMap<String, Tensor>> {
        let parts = self.parameters(model).and_then(|parameters| self.own_averages(&parameters));
        let whole = self.whole(self.settle(Call::Averages, parts)?)?;
        Ok(whole.into_iter().map(|(leaf, average)| (self.leaves[leaf].path.clone(), average)).collect())
    }

    /// The averages of what this rank has of the parameters, each with the index of its leaf.
    fn own_averages(&self, parameters: &[Tensor]) -> Result<Vec<(usize, Tensor)>> {
        let moved = self.leaves.iter().zip(parameters).enumerate().filter(|(_, (leaf, _))| leaf.steps > 0);
        moved.filter_map(|(index, (leaf, x))| Some(average(leaf, x).transpose()?.map(|average| (index, average)))).collect()
    }

    /// Puts the [averages](StateTree::averages), rounded, into the model, until [`swap_out_averages`](StateTree::swap_out_averages). Returns how many
    /// parameters were exchanged: none before the first step. The low-precision half of a [`Twin`](crate::Twin), which computes, is exchanged too.
    ///
    /// Nothing of the training is lost: masters and state stay, and the parameters are kept aside. Meanwhile [`masters`](StateTree::masters) and
    /// [`save_masters`](StateTree::save_masters) have the training's numbers; updates, checkpoints, and what gives the model new weights or
    /// another state are refused. Do not write to the model meanwhile: it would be gone after the exchange.
    ///
    /// What is no parameter, such as BatchNorm's running statistics, stays what it was in the training.
    /// [`RunningStatistics`](crate::RunningStatistics) estimates it anew for the averages. Over [ranks](crate::Setup::over) all call this.
    ///
    /// # Errors
    /// If no rule keeps an average, or they are in the model already; if `model` is not the state's. Nothing changes then.
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
    /// state.swap_in_averages(&x)?;
    /// assert_eq!(x.to_vec1::<f32>()?, [2.0]); // of 3, 2 and 1
    /// state.swap_out_averages(&x)?;
    /// assert_eq!(x.to_vec1::<f32>()?, [1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn swap_in_averages<M: Model + ?Sized>(&mut self, model: &M) -> Result<usize> {
        let prepared = self.settle(Call::Averages, self.prepared_averages(model))?;
        let twins = Twins::of(model);
        let put = |(leaf, average, x): &(usize, Tensor, Tensor)| set_tensor(&self.leaves[*leaf].own_part(x)?, average).map_err(Error::from);
        self.settle(Call::Averages, prepared.averages.iter().try_for_each(put))?;
        self.share(prepared.averages.iter().map(|(leaf, _, x)| (*leaf, x.clone())))?;
        let count = prepared.averages.len();
        for ((leaf, _, x), aside) in prepared.averages.into_iter().zip(prepared.asides) {
            twins.follow(&x)?;
            self.leaves[leaf].aside = Some(aside);
        }
        Ok(count)
    }

    /// What can be refused comes before anything is written.
    fn prepared_averages<M: Model + ?Sized>(&self, model: &M) -> Result<Prepared> {
        self.expect_parameters()?;
        let parameters = self.parameters(model)?;
        let averages = self.own_averages(&parameters)?;
        let keeps_average = |(leaf, x): (&Leaf, &Tensor)| average(leaf, x).transpose();
        if averages.is_empty() && self.leaves.iter().zip(&parameters).find_map(keeps_average).transpose()?.is_none() {
            return Err(Error::NoAverages);
        }
        let aside = |(leaf, _): &(usize, Tensor)| owned_on(parameters[*leaf].device(), &parameters[*leaf]);
        let asides = averages.iter().map(aside).collect::<candle_core::Result<_>>()?;
        let averages = averages.into_iter().map(|(leaf, average)| (leaf, average, parameters[leaf].clone())).collect();
        Ok(Prepared { averages, asides })
    }

    /// Puts the parameters back into the model.
    ///
    /// # Errors
    /// If `model` is not the state's.
    pub fn swap_out_averages<M: Model + ?Sized>(&mut self, model: &M) -> Result<()> {
        let parameters = self.parameters(model)?;
        self.put_back(&parameters, &Twins::of(model))
    }

    /// Refuses to go on while the model has averages in place of its parameters.
    pub(crate) fn expect_parameters(&self) -> Result<()> {
        self.leaves.iter().try_for_each(Leaf::expect_parameter)
    }
}

/// What goes into the model, and what is kept meanwhile.
struct Prepared {
    /// Leaves by index, the averages of what this rank has of them, and their parameters.
    averages: Vec<(usize, Tensor, Tensor)>,
    /// Copies of these parameters, whole.
    asides: Vec<Tensor>,
}

/// The weights of a leaf, or of what this rank has of it, to evaluate with.
fn average(leaf: &Leaf, x: &Tensor) -> Result<Option<Tensor>> {
    let x = &leaf.own_part(x)?;
    let average = leaf.optimiser.evaluation(&leaf.state, leaf.parameter(x)).map_err(|error| error.at(&leaf.path))?;
    match average {
        Some(average) if average.shape() != x.shape() || !is_supported(average.dtype()) => {
            let (expected, got) = ((x.shape().clone(), x.dtype()), (average.shape().clone(), average.dtype()));
            Err(MasterError::Shape { path: leaf.path.clone(), expected, got }.into())
        }
        average => Ok(average),
    }
}
