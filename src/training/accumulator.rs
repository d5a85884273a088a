//! An accumulator, which collects gradients outside of an optimiser.

use std::collections::{BTreeMap, HashSet};

use crate::engine::{filled, rounded};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::{GradientLookUp, Gradients, ScaledGradients, with_look_up};
use crate::model::lent::Lent;
use crate::model::{Model, Variable, empty_model_error, in_path_order};
use crate::numbers::{DType, check_supported, compute_dtype, counts, widest_compute_dtype};
use crate::step::call::sources;
use crate::step::ranks::exchange::weighted;
use crate::tensors::{Device, Tensor, dtype_of, in_dtype, quotient, repeated_zero, sum, zeros};
use crate::tree::is_trainable;

/// Collects the gradients of several calls, and returns their mean for one [`update`](crate::update).
///
/// ```text
/// add:   sum = sum + w·g                       rounded to the accumulator's dtype
/// take:  mean = sum / Σ w,   sum = 0,  Σ w = 0
/// ```
///
/// In one process [`AccumGrad`](crate::AccumGrad) in the chain is the better choice, because it keeps the
/// sums in the state. Use `Accumulator` for a state that is [divided](crate::Setup::over) among ranks. For
/// such a state, `AccumGrad` sends the gradients of every call, and keeps a part of the sum on each rank
/// (ZeRO stage 2). `Accumulator` keeps the whole sum on each rank, and the sum is sent once per step (stage
/// 1).
///
/// | | memory of each of N ranks, per parameter | sent in a window of n calls, per parameter |
/// | --- | --- | --- |
/// | `Accumulator::new(BF16, ..)` | 2 bytes | 2 bytes |
/// | `Accumulator::new(F32, ..)` | 4 | 4, or 2 with [`Setup::wire`](crate::Setup::wire) or [`wire_as_computed`](crate::Setup::wire_as_computed) |
/// | [`StoreAs`](crate::StoreAs) `([("acc", BF16)], AccumGrad)` | 2 / N | 2 n (bf16 gradients) |
/// | `AccumGrad` | 4 / N | 2 n |
///
/// In all four cases the parameters are also sent once per step. Multiply all figures in the last column by
/// (N - 1) / N. A mean is sent in the dtype of its sum, and the means of all ranks are added up in the
/// compute dtype.
///
/// If micro-batches have different sizes, give each a weight by [`add_weighted`](Accumulator::add_weighted).
/// If ranks collect different sizes or numbers of micro-batches, or none, give the update the sum of the
/// weights: `Update::new(&mut state).weight(accumulator.weight())`. Call `weight` before `take`, which resets
/// the sum of the weights.
///
/// A checkpoint does not contain the sums, so save between steps.
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
/// Add the gradients of scaled losses as they are, and give the result of [`take`](Accumulator::take) to an
/// update with the same [`scaler`](crate::Update::scaler). The scale changes only in such an update, so all
/// gradients have one scale. The mean [carries](crate::ScaledGradients) this scale, and gradients that carry
/// another are refused. If a sum overflows, it is infinite, and the step is skipped.
#[must_use]
#[derive(Debug)]
pub struct Accumulator {
    dtype: DType,
    sums: Vec<GradientSum>,
    weight: u64,
    /// The loss scale that the gradients in the sums carry.
    loss_scale: Option<f64>,
}

/// The sum of a parameter's gradients.
#[derive(Debug)]
struct GradientSum {
    paths: Vec<String>,
    /// The parameter, by which a `GradStore` finds the gradients.
    x: Tensor,
    /// `None` before the first gradient.
    sum: Option<Tensor>,
}

impl Accumulator {
    /// An accumulator for the model's gradients, with sums of `dtype`: F16, BF16, F32 or F64.
    ///
    /// Pass the model that the losses are computed with.
    ///
    /// # Errors
    /// If the dtype is none of these four, if the model has no trainable parameter, or if two parameters have
    /// one path.
    pub fn new<M: Model + ?Sized>(dtype: impl Into<DType>, model: &M) -> Result<Self> {
        let dtype = dtype.into();
        let parameters = in_path_order(model, is_trainable)?;
        if parameters.is_empty() {
            return Err(empty_model_error());
        }
        check_supported("the dtype for `Accumulator::new`", dtype)?;
        let empty_sum = |Variable { paths, x }: Variable<'_>| {
            let x = match x {
                Lent::Tensor(tensor) => tensor,
                // For memory that is no tensor, only shape and dtype are used, and a repeated zero has both.
                x => repeated_zero(x.shape(), x.dtype(), &Device::Cpu)?,
            };
            Ok(GradientSum { paths, x, sum: None })
        };
        Ok(Accumulator {
            dtype,
            sums: parameters.into_iter().map(empty_sum).collect::<Result<_>>()?,
            weight: 0,
            loss_scale: None,
        })
    }

    /// Adds the gradients of a call. Parameters may lack a gradient.
    ///
    /// # Errors
    /// As [`update`](crate::update), but gradients of a scaled loss are accepted if all gradients since the
    /// last [`take`](Accumulator::take) carry the same scale. Also if the weights add up to more than
    /// `u64::MAX / 2`. After an error nothing is added, unless a device has failed.
    pub fn add<G: Gradients + ?Sized>(&mut self, grads: &G) -> Result<()> {
        self.add_weighted(grads, 1)
    }

    /// Adds the gradients of a call with a weight.
    ///
    /// For a loss that is a mean over tokens, the weight is the number of tokens. If the weight is 0, the
    /// gradients are not read.
    ///
    /// # Errors
    /// As [`Accumulator::add`].
    pub fn add_weighted<G: Gradients + ?Sized>(&mut self, grads: &G, weight: u64) -> Result<()> {
        if weight == 0 {
            return Ok(());
        }
        let total_weight = self.weight.saturating_add(weight);
        counts::check("the sum of the weights of the accumulator is", total_weight)
            .map_err(|error| error.with_remedy("add with smaller weights, or `take` the mean first"))?;
        let loss_scale = grads.loss_scale();
        self.check_scale(loss_scale)?;
        let known_paths: HashSet<&str> = self
            .sums
            .iter()
            .flat_map(|sum| &sum.paths)
            .map(String::as_str)
            .collect();
        if let Some(path) = grads.paths().find(|path| !known_paths.contains(path)) {
            let paths = self.sums.iter().map(|sum| &*sum.paths[0]);
            return Err(Error::unknown_path("parameter for the gradient of", path, paths));
        }
        with_look_up(grads, |grads| self.add_gradients(grads, weight))?;
        (self.weight, self.loss_scale) = (total_weight, loss_scale);
        Ok(())
    }

    /// Refuses gradients that do not carry the loss scale of the sums.
    fn check_scale(&self, loss_scale: Option<f64>) -> Result<()> {
        if self.weight == 0 || loss_scale == self.loss_scale {
            return Ok(());
        }
        let name = |scale: Option<f64>| scale.map_or("no scale".to_string(), |scale| scale.to_string());
        let error = Error::new(ErrorKind::LossScale, "the loss scale that the gradients carry is");
        Err(error
            .with_got(name(loss_scale))
            .with_expected(format_args!(
                "{}, as of the gradients in the sum",
                name(self.loss_scale)
            ))
            .with_remedy(
                "call `backward` on what `LossScaler::scale` returns for each loss, and `take` the mean \
                 before an update with the scaler",
            ))
    }

    fn add_gradients(&mut self, grads: &dyn GradientLookUp, weight: u64) -> Result<()> {
        // All gradients are read before the first is added, so that an owner that fails leaves all sums as
        // they were. Only memory that is no tensor is copied for this.
        let mut gradients = Vec::with_capacity(self.sums.len());
        for GradientSum { paths, x, .. } in &self.sums {
            let lenders = sources(paths.iter().map(String::as_str), x, grads)?;
            gradients.push(
                lenders
                    .iter()
                    .map(|lender| lender.tensor_or_copy())
                    .collect::<Result<Vec<_>>>()?,
            );
        }
        for (gradient_sum, parts) in self.sums.iter_mut().zip(gradients) {
            let compute = widest_compute_dtype(parts.iter().map(dtype_of).chain([self.dtype]));
            // The tensor is detached, because a gradient may have a graph, which the sum would keep in
            // memory.
            let widen = |tensor: &Tensor| in_dtype(&tensor.detach(), compute);
            let term = |part: &Tensor| Ok(widen(part)?.reshape(gradient_sum.x.shape())?);
            let total = parts
                .iter()
                .map(term)
                .reduce(|total: Result<Tensor>, term| Ok(sum(&total?, &term?)?));
            let Some(gradient) = total.transpose()? else {
                continue;
            };
            let addend = weighted(gradient, weight, compute)?;
            let old_sum = gradient_sum
                .sum
                .as_ref()
                .map_or_else(|| zeros(addend.shape(), compute, addend.device()), widen)?;
            gradient_sum.sum = Some(rounded(&sum(&old_sum, &addend)?, self.dtype)?);
        }
        Ok(())
    }

    /// The sum of the weights since the last [`take`](Accumulator::take). A call of `add` has the weight 1.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Returns the mean gradients of the parameters that have had a gradient, by path, and resets all sums.
    ///
    /// The mean carries the loss scale of the gradients, if they carry one.
    ///
    /// # Errors
    /// If a device fails. The sums then stay as they are.
    #[must_use = "these are the gradients, which are forgotten here: `drop` them to begin anew without"]
    pub fn take(&mut self) -> Result<ScaledGradients<BTreeMap<String, Tensor>>> {
        let compute = compute_dtype(self.dtype);
        let mut means = BTreeMap::new();
        for GradientSum { paths, sum, .. } in &self.sums {
            let Some(sum) = sum else { continue };
            let weight = filled(self.weight as f64, (), compute, sum.device())?;
            let mean = in_dtype(&quotient(&in_dtype(sum, compute)?, &weight)?, self.dtype)?;
            means.insert(paths[0].clone(), mean);
        }
        // The sums are reset after all means are computed, so that an error loses no sum.
        self.sums
            .iter_mut()
            .for_each(|gradient_sum| gradient_sum.sum = None);
        self.weight = 0;
        Ok(ScaledGradients::new(means, self.loss_scale.take()))
    }
}
