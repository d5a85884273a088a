//! BatchNorm's running statistics for averages of the weights, as torch's `optim.swa_utils.update_bn`.
//! Training moves the statistics by themselves, so an average of weights has none of its own, and with those
//! of the training it may evaluate badly.
//!
//! Run with `cargo run --release --example batch_norm`.

use candle_core::{DType::F32, Device, Result, Tensor, Var};
use candle_nn::{BatchNorm, Linear, Module, ModuleT, VarBuilder, VarMap, batch_norm, linear, loss::mse};
use optimisers::{Adam, Ema, OptimiserChain, model, setup, update};

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}
model!(Net { first, norm, last });

impl Net {
    fn forward(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        self.last
            .forward(&self.norm.forward_t(&self.first.forward(inputs)?, train)?.relu()?)
    }

    /// It learns a sum of squares.
    fn loss(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        mse(&self.forward(inputs, train)?, &inputs.sqr()?.sum_keepdim(1)?)
    }
}

/// The variables of a layer's statistics, which are its mean and its variance.
fn statistics(norm: &BatchNorm) -> Result<[Var; 2]> {
    Ok([
        Var::from_tensor(norm.running_mean())?,
        Var::from_tensor(norm.running_var())?,
    ])
}

/// Makes the statistics of a layer the means over these batches; `forward` runs the model in training mode.
/// Every batch counts the same, and the layer runs once for each.
fn estimate(norm: &BatchNorm, batches: &[Tensor], forward: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
    let [mean, variance] = statistics(norm)?;
    let mut sums = [mean.zeros_like()?, variance.zeros_like()?];
    for batch in batches {
        // A pass makes of a running number r and the batch's b (1 - momentum)·r + momentum·b.
        mean.set(&mean.zeros_like()?)?;
        variance.set(&variance.zeros_like()?)?;
        forward(batch)?;
        sums = [
            (&sums[0] + mean.as_detached_tensor())?,
            (&sums[1] + variance.as_detached_tensor())?,
        ];
    }
    let share = 1.0 / (norm.momentum() * batches.len() as f64);
    mean.set(&(&sums[0] * share)?)?;
    variance.set(&(&sums[1] * share)?)
}

fn main() -> Result<()> {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, F32, &Device::Cpu);
    let (first, last) = (
        linear(4, 16, builder.pp("first"))?,
        linear(16, 1, builder.pp("last"))?,
    );
    let net = Net {
        first,
        norm: batch_norm(16, 1e-5, builder.pp("norm"))?,
        last,
    };

    let batches = (0..20)
        .map(|_| Tensor::randn(1f32, 1.0, (32, 4), &Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let mut state = setup(OptimiserChain::new((Adam::new(0.05), Ema::new(0.99))), &net)?;
    for batch in batches.iter().cycle().take(200) {
        update(&mut state, &net, &net.loss(batch, true)?.backward()?)?;
    }

    let [mean, variance] = statistics(&net.norm)?;
    let of_training = [mean.copy()?, variance.copy()?];
    let [before, after] = state.with_averages(&net, || {
        let loss = || net.loss(&Tensor::cat(&batches, 0)?, false)?.to_scalar::<f32>();
        let before = loss()?;
        estimate(&net.norm, &batches, |batch| net.forward(batch, true))?;
        Result::Ok([before, loss()?])
    })?;
    // The training goes on with its own.
    mean.set(&of_training[0])?;
    variance.set(&of_training[1])?;
    println!(
        "loss of the averages: {before:.4} with the statistics of the training, {after:.4} with their own"
    );
    Ok(())
}
