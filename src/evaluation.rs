//! Weights to evaluate a model with, in place of its parameters.

use std::collections::BTreeMap;

use candle_core::Tensor;

use crate::engine::{owned_on, set_tensor};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::tree::StateTree;

impl StateTree {
    /// The weights to evaluate with, by path: of every parameter whose rule keeps an average ([`Ema`](crate::Ema),
    /// [`UniformAverage`](crate::UniformAverage), [`ScheduleFree`](crate::ScheduleFree)), in the precision of the average.
    ///
    /// # Errors
    /// If `model` is not the state's.
    pub fn averages<M: Model + ?Sized>(&self, model: &M) -> Result<BTreeMap<String, Tensor>> {
        let parameters = self.parameters(model)?;
        let mut averages = BTreeMap::new();
        for (leaf, x) in self.leaves.iter().zip(&parameters) {
            let average = leaf.optimiser.evaluation(&leaf.state, x).map_err(|error| error.at(&leaf.path))?;
            averages.extend(average.map(|average| (leaf.path.clone(), average)));
        }
        Ok(averages)
    }

    /// Puts the [averages](StateTree::averages), rounded, into the model, until [`swap_out_averages`](StateTree::swap_out_averages). Meanwhile
    /// updates and checkpoints are refused. Returns how many parameters were exchanged.
    ///
    /// Nothing of the training is lost: masters and state stay, and the parameters are kept aside.
    ///
    /// # Errors
    /// If no parameter has an average, or they are in the model already; if `model` is not the state's.
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
        self.expect_parameters()?;
        let parameters = self.parameters(model)?;
        let averages = self.averages(model)?;
        if averages.is_empty() {
            return Err(Error::NoAverages);
        }
        let mut aside = Vec::with_capacity(parameters.len());
        for (leaf, x) in self.leaves.iter().zip(&parameters) {
            aside.push(averages.contains_key(&leaf.path).then(|| owned_on(x.device(), x)).transpose()?);
        }
        for ((leaf, x), aside) in self.leaves.iter_mut().zip(&parameters).zip(aside) {
            if let Some(average) = averages.get(&leaf.path) {
                set_tensor(x, average)?;
            }
            leaf.aside = aside;
        }
        Ok(averages.len())
    }

    /// Puts the parameters back into the model.
    ///
    /// # Errors
    /// If `model` is not the state's.
    pub fn swap_out_averages<M: Model + ?Sized>(&mut self, model: &M) -> Result<()> {
        let parameters = self.parameters(model)?;
        for (leaf, x) in self.leaves.iter_mut().zip(&parameters) {
            if let Some(aside) = &leaf.aside {
                set_tensor(x, aside)?;
            }
            leaf.aside = None;
        }
        Ok(())
    }

    /// Refuses to go on while the model has averages in place of its parameters.
    pub(crate) fn expect_parameters(&self) -> Result<()> {
        match self.leaves.iter().find(|leaf| leaf.aside.is_some()) {
            Some(leaf) => Err(Error::AveragesInModel { path: leaf.path.clone() }),
            None => Ok(()),
        }
    }
}
