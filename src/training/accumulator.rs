//! Gradients that are collected outside of an optimiser.

use std::collections::{BTreeMap, HashMap};

use crate::engine::filled;
use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::gradients::{GradientMap, Gradients};
use crate::model::lent::{Lend, Lent};
use crate::model::{Model, Variable, empty_model, in_path_order};
use crate::numbers::{DType, compute_dtype, is_supported};
use crate::rules::Scale;
use crate::step::setup::setup;
use crate::step::update::Update;
use crate::tensors::{Device, Tensor, Var, quotient};
use crate::tree::{StateTree, is_trainable};

/// Collects the gradients of several calls, and returns their mean for one [`update`](crate::update).
///
/// ```text
/// add:   sum = sum + w·g                       rounded to the accumulator's dtype
/// take:  mean = sum / Σ w,   sum = 0,  Σ w = 0
/// ```
///
/// [`AccumGrad`](crate::AccumGrad) in the chain does the same inside of the state, and is the better choice
/// in one process. Use this for a state that is [divided](crate::Setup::over) among ranks. There `AccumGrad`
/// sends the gradients of every call to their owners and keeps a part of the sum on each rank (ZeRO stage 2).
/// This sums the whole gradient in memory of its own and sends it once per step (stage 1).
///
/// | | memory of each of N ranks, per parameter | sent in a window of n calls, per parameter |
/// | --- | --- | --- |
/// | `Accumulator::new(BF16, ..)` | 2 bytes | 2 bytes |
/// | `Accumulator::new(F32, ..)` | 4 | 4, or 2 with [`Setup::wire`](crate::Setup::wire) |
/// | [`StoreAs`](crate::StoreAs) `([("acc", BF16)], AccumGrad)` | 2 / N | 2 n (bf16 gradients) |
/// | `AccumGrad` | 4 / N | 2 n |
///
/// Each of these also sends the parameters once per step. Multiply all that is sent by (N - 1) / N. Sums are
/// sent in the dtype in which they are kept; the ranks' means are added up in the dtype of the arithmetic.
///
/// For micro-batches of different sizes give each a weight by [`add_weighted`](Accumulator::add_weighted),
/// and the update the sum of the weights: `Update::new(&mut state).weight(accumulator.weight())`, before
/// `take`.
///
/// A checkpoint does not have the sums: save between steps.
///
/// ```
/// use candle_core::{DType::F32, Device, Tensor, Var};
/// use optimisers::{Accumulator, Descent, setup, update};
///
/// let x = Var::new(&[0f32], &Device::Cpu)?;
/// let mut state = setup(Descent::new(1.0), &x)?;
/// let mut collected = Accumulator::new(F32, &x)?;
/// for gradient in [1f32, 3.0] {
///     collected.add(&[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
/// }
/// update(&mut state, &x, &collected.take()?)?;
/// assert_eq!(x.to_vec1::<f32>()?, [-2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Loss scaling
/// Add the gradients of scaled losses as they are, and give the result of [`take`](Accumulator::take) to
/// [`LossScaler::update`](crate::LossScaler::update): the scale does not change between two of its calls. A
/// sum that has overflowed is infinite, and the step is skipped.
#[must_use]
#[derive(Debug)]
pub struct Accumulator {
    dtype: DType,
    /// The model's parameters by all of their paths.
    parameters: BTreeMap<String, Tensor>,
    /// The sums, if there are any.
    sums: Option<GradientSums>,
    weight: u64,
}

/// The sums, as parameters of a state: each call is a step of `Scale` by -1.
#[derive(Debug)]
struct GradientSums {
    by_path: BTreeMap<String, Var>,
    state: StateTree,
}

impl Accumulator {
    /// An accumulator for the model's gradients, with sums of `dtype`: F16, BF16, F32 or F64.
    ///
    /// The model is the one that the losses are computed with.
    ///
    /// # Errors
    /// If the dtype is any other, or the model has no trainable parameter, or one path for two.
    pub fn new<M: Model + ?Sized>(dtype: impl Into<DType>, model: &M) -> Result<Self> {
        let dtype = dtype.into();
        let known = in_path_order(model, is_trainable)?;
        if known.is_empty() {
            return Err(empty_model());
        }
        if !is_supported(dtype) {
            return Err(Error::new(ErrorKind::Argument, "`Accumulator::new` asks for")
                .with_got(format_args!("{dtype:?}"))
                .with_expected(FLOATS));
        }
        let mut parameters = BTreeMap::new();
        for Variable { paths, x } in known {
            let x = match x {
                Lent::Tensor(tensor) => tensor,
                // Memory that is no tensor: only shape and dtype are kept, which takes no memory.
                x => Tensor::zeros((), x.dtype().into(), &Device::Cpu)?.broadcast_as(x.shape())?,
            };
            parameters.extend(paths.into_iter().map(|path| (path, x.clone())));
        }
        Ok(Accumulator { dtype, parameters, sums: None, weight: 0 })
    }

    /// Adds the gradients of a call. A parameter may lack one.
    ///
    /// # Errors
    /// As [`update`](crate::update); nothing has been added then.
    pub fn add<G: Gradients + ?Sized>(&mut self, grads: &G) -> Result<()> {
        self.add_weighted(grads, 1)
    }

    /// Adds the gradients of a call with a weight.
    ///
    /// For a loss that is a mean over tokens, the weight is the number of tokens. With 0 the gradients are
    /// not read.
    ///
    /// # Errors
    /// As [`Accumulator::add`].
    pub fn add_weighted<G: Gradients + ?Sized>(&mut self, grads: &G, weight: u64) -> Result<()> {
        if weight == 0 {
            return Ok(());
        }
        let sums = match self.sums.take() {
            Some(sums) => sums,
            None => GradientSums::zeros(self.dtype, &self.parameters)?,
        };
        let GradientSums { by_path, state } = self.sums.insert(sums);
        state.adjust_field("alpha", -(weight as f64))?;
        let grads = OfModel { grads, parameters: &self.parameters };
        Update::new(state).allow_no_gradients().apply(by_path, &grads)?;
        self.weight = self.weight.saturating_add(weight);
        Ok(())
    }

    /// The sum of the weights of all calls since the last [`take`](Accumulator::take); each is 1 by default.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Returns the means, by path, of the parameters that have had a gradient, and begins anew.
    ///
    /// # Errors
    /// If a device fails; all is as it was then.
    #[must_use = "these are the gradients, which are forgotten here: `drop` them to begin anew without"]
    pub fn take(&mut self) -> Result<BTreeMap<String, Tensor>> {
        let Some(GradientSums { by_path, state }) = &self.sums else { return Ok(BTreeMap::new()) };
        let mean = |sum: &Tensor| {
            if self.weight == 1 {
                return Ok(sum.detach());
            }
            let compute = compute_dtype(self.dtype);
            let weight = filled(self.weight as f64, (), compute, sum.device())?;
            quotient(&sum.detach().to_dtype(compute.into())?, &weight)?.to_dtype(self.dtype.into())
        };
        let leaves = state.leaves().filter(|leaf| leaf.has_had_gradient());
        let means = leaves
            .map(|leaf| Ok((leaf.path().to_string(), mean(&by_path[leaf.path()])?)))
            .collect::<Result<_>>()?;
        (self.sums, self.weight) = (None, 0);
        Ok(means)
    }
}

impl GradientSums {
    fn zeros(dtype: DType, parameters: &BTreeMap<String, Tensor>) -> Result<Self> {
        let mut known = HashMap::new();
        let mut by_path = BTreeMap::new();
        for (path, x) in parameters {
            let sum = match known.get(&x.id()) {
                Some(sum) => Var::clone(sum),
                None => Var::zeros(x.shape(), dtype.into(), x.device())?,
            };
            known.insert(x.id(), sum.clone());
            by_path.insert(path.clone(), sum);
        }
        // Sums of 16 bits are chosen by the program, so this state does not warn of lost parts.
        let state = setup(Scale::new(-1.0), &by_path)?.without_warnings();
        Ok(GradientSums { by_path, state })
    }
}

/// A model's gradients as those of the sums, which have other identities.
struct OfModel<'g, G: ?Sized> {
    grads: &'g G,
    parameters: &'g BTreeMap<String, Tensor>,
}

impl<G: Gradients + ?Sized> Gradients for OfModel<'_, G> {
    fn gradient(&self, path: &str, _sum: &dyn Lend) -> Option<&dyn Lend> {
        self.grads.gradient(path, self.parameters.get(path)?)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.grads.paths()
    }

    fn by_path(&self) -> bool {
        self.grads.by_path()
    }

    fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
        self.grads.indexed()
    }
}
