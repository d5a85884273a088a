//! Estimating anew what BatchNorm layers know of their inputs.

use std::collections::HashSet;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::BatchNorm;

use crate::engine::{owned_on, set_tensor};
use crate::error::{Error, Result, StatisticsError, listed};
use crate::model::{Model, by_first_path};
use crate::tree::is_trainable;

/// The running statistics of candle-nn's BatchNorm layers, to be estimated anew for weights that were not trained with them, such as
/// [averages](crate::StateTree::with_averages).
///
/// ```text
/// mean     = mean over batches of: mean of a batch
/// variance = mean over batches of: variance of a batch, with n - 1
/// ```
///
/// Training moves the statistics by themselves, so an average of weights has none of its own; with those of the training a network may
/// evaluate badly. [`estimate`](RunningStatistics::estimate) runs batches in training mode, and [`put_back`](RunningStatistics::put_back) gives the training its
/// statistics back.
///
/// ```
/// use candle_core::{DType::F32, Device, Tensor};
/// use candle_nn::{Module, ModuleT, VarBuilder, VarMap, batch_norm, linear};
/// use optimisers::{Adam, Ema, OptimiserChain, RunningStatistics, setup, update};
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, F32, &Device::Cpu);
/// let (layer, norm) = (linear(2, 3, builder.pp("layer"))?, batch_norm(3, 1e-5, builder.pp("norm"))?);
/// let forward = |batch: &Tensor, train| norm.forward_t(&layer.forward(batch)?, train);
/// let batches = [Tensor::randn(1f32, 1.0, (8, 2), &Device::Cpu)?, Tensor::randn(1f32, 1.0, (8, 2), &Device::Cpu)?];
///
/// let mut state = setup(OptimiserChain::new((Adam::new(0.1), Ema::new(0.9))), &variables)?;
/// for batch in &batches {
///     update(&mut state, &variables, &forward(batch, true)?.sqr()?.mean_all()?.backward()?)?;
/// }
///
/// let mut statistics = RunningStatistics::of_layers([&norm])?;
/// let _evaluated = state.with_averages(&variables, || {
///     statistics.estimate(&batches, |batch| forward(batch, true))?;
///     forward(&batches[0], false)
/// })?;
/// statistics.put_back()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// As torch's `optim.swa_utils.update_bn`, which finds the layers by itself and runs the whole model: candle's layers do not say what they contain, and
/// a model may need more than one input. There the averages are in a model of their own, so nothing has to be put back.
#[derive(Debug)]
pub struct RunningStatistics {
    layers: Vec<Layer>,
    /// What the layers had before the first estimate.
    aside: Option<Vec<[Tensor; 2]>>,
}

/// The statistics of one layer.
#[derive(Debug)]
struct Layer {
    name: String,
    mean: Var,
    variance: Var,
    /// How much of the statistics of a batch a training pass adds to them.
    momentum: f64,
}

/// A variance that no batch has, and that is lost beside one: it tells whether a layer has run. A mean of 0 could be that of a batch.
const NOT_RUN: f64 = -1e-30;

impl RunningStatistics {
    /// Those of these layers, which are named by their places in errors.
    ///
    /// # Errors
    /// If there is no layer, or one has a momentum of 0: a training pass does not show what it has seen then.
    pub fn of_layers<'l>(layers: impl IntoIterator<Item = &'l BatchNorm>) -> Result<Self> {
        let found = layers.into_iter().enumerate().map(|(place, layer)| {
            let (mean, variance) = (Var::from_tensor(layer.running_mean())?, Var::from_tensor(layer.running_var())?);
            Ok(Layer { name: place.to_string(), mean, variance, momentum: layer.momentum() })
        });
        Self::new(found.collect::<Result<_>>()?, Vec::new)
    }

    /// Those of a model's variables that are called `running_mean` and `running_var`, for layers that nobody can reach (in a `Sequential`, or a model of
    /// `candle-transformers`). Their momentum is the one that the model gives them; candle-nn's default is 0.1.
    ///
    /// # Errors
    /// If there are none, one has no partner, or `momentum` is not above 0 and at most 1.
    pub fn of_variables<M: Model + ?Sized>(model: &M, momentum: f64) -> Result<Self> {
        let variables = by_first_path(model, is_trainable)?;
        let means = variables.iter().filter_map(|(path, mean)| Some((path.strip_suffix("running_mean")?, mean)));
        let layers = means.filter(|(prefix, _)| prefix.is_empty() || prefix.ends_with('.')).map(|(prefix, mean)| {
            let path = format!("{prefix}running_var");
            let variance = variables.get(&path).ok_or(StatisticsError::Missing { path })?;
            let (mean, variance) = (Var::from_tensor(mean)?, Var::from_tensor(variance)?);
            Ok(Layer { name: prefix.trim_end_matches('.').to_string(), mean, variance, momentum })
        });
        Self::new(layers.collect::<Result<_>>()?, || listed(variables.keys().map(String::as_str)))
    }

    fn new(mut layers: Vec<Layer>, available: impl FnOnce() -> Vec<String>) -> Result<Self> {
        let mut seen = HashSet::new();
        layers.retain(|layer| seen.insert(layer.mean.id()));
        if layers.is_empty() {
            return Err(StatisticsError::NoLayers { available: available() }.into());
        }
        if let Some(Layer { name, momentum, .. }) = layers.iter().find(|layer| !(layer.momentum > 0.0 && layer.momentum <= 1.0)) {
            return Err(StatisticsError::Momentum { layer: name.clone(), momentum: *momentum }.into());
        }
        Ok(RunningStatistics { layers, aside: None })
    }

    /// Runs `forward` on each batch, in training mode, and makes the statistics the means over all batches. Returns how many there were.
    ///
    /// Every batch counts the same, also a smaller one, and every layer has to run once for each. The first estimate keeps the statistics from before
    /// aside, for [`put_back`](RunningStatistics::put_back).
    ///
    /// # Errors
    /// What `forward` returns; if there is no batch, a layer has not run, or its statistics are infinite or NaN (a batch of one number per feature has no
    /// variance). The statistics are what they were then.
    pub fn estimate<B, T, E: From<Error>>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        forward: impl FnMut(B) -> std::result::Result<T, E>,
    ) -> std::result::Result<usize, E> {
        let before = self.values()?;
        match self.means(batches, forward) {
            Ok((count, means)) => {
                self.set(&means)?;
                self.aside.get_or_insert(before);
                Ok(count)
            }
            Err(error) => {
                self.set(&before)?;
                Err(error)
            }
        }
    }

    /// Gives the layers the statistics that they had before the first [`estimate`](RunningStatistics::estimate). Does nothing without one.
    ///
    /// # Errors
    /// If a device fails.
    pub fn put_back(&mut self) -> Result<()> {
        self.aside.take().map_or(Ok(()), |before| self.set(&before))
    }

    /// The mean statistics of all batches, and how many there are.
    fn means<B, T, E: From<Error>>(
        &self,
        batches: impl IntoIterator<Item = B>,
        mut forward: impl FnMut(B) -> std::result::Result<T, E>,
    ) -> std::result::Result<(usize, Vec<[Tensor; 2]>), E> {
        let mut means: Vec<[Vec<f64>; 2]> = self.layers.iter().map(|layer| [(); 2].map(|()| vec![0.0; layer.mean.elem_count()])).collect();
        let mut count = 0;
        for batch in batches {
            self.layers.iter().try_for_each(Layer::clear)?;
            forward(batch)?;
            count += 1;
            for (layer, means) in self.layers.iter().zip(&mut means) {
                for (mean, own) in means.iter_mut().zip(layer.of_batch(count)?) {
                    mean.iter_mut().zip(own).for_each(|(mean, own)| *mean += (own - *mean) / count as f64);
                }
            }
        }
        if count == 0 {
            return Err(Error::from(StatisticsError::NoBatches).into());
        }
        let tensor = |values: Vec<f64>| Tensor::from_iter(values, &Device::Cpu);
        let tensors = means.into_iter().map(|[mean, variance]| Ok([tensor(mean)?, tensor(variance)?]));
        Ok((count, tensors.collect::<Result<_>>()?))
    }

    fn values(&self) -> Result<Vec<[Tensor; 2]>> {
        let copy = |variable: &Var| owned_on(variable.device(), variable);
        self.layers.iter().map(|layer| Ok([copy(&layer.mean)?, copy(&layer.variance)?])).collect()
    }

    fn set(&self, values: &[[Tensor; 2]]) -> Result<()> {
        for (layer, [mean, variance]) in self.layers.iter().zip(values) {
            set_tensor(&layer.mean, mean)?;
            set_tensor(&layer.variance, variance)?;
        }
        Ok(())
    }
}

impl Layer {
    /// Makes room for the statistics of one batch.
    fn clear(&self) -> Result<()> {
        set_tensor(&self.mean, &self.mean.zeros_like()?)?;
        Ok(set_tensor(&self.variance, &self.not_run()?)?)
    }

    fn not_run(&self) -> candle_core::Result<Tensor> {
        self.variance.zeros_like()?.affine(1.0, NOT_RUN)
    }

    /// The statistics of the batch that has run since: a training pass makes of a running number r and that of the batch b
    /// (1 - momentum)·r + momentum·b.
    fn of_batch(&self, batch: usize) -> Result<[Vec<f64>; 2]> {
        let numbers = |tensor: &Tensor| tensor.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let (mean, variance, cleared) = (numbers(&self.mean)?, numbers(&self.variance)?, numbers(&self.not_run()?)?);
        if variance == cleared {
            return Err(StatisticsError::NotRun { layer: self.name.clone(), batch }.into());
        }
        if mean.iter().chain(&variance).any(|number| !number.is_finite()) {
            return Err(StatisticsError::NonFinite { layer: self.name.clone(), batch }.into());
        }
        let whole = |numbers: Vec<f64>| numbers.into_iter().map(|number| number / self.momentum).collect();
        Ok([whole(mean), whole(variance.into_iter().map(|number| number.max(0.0)).collect())])
    }
}
