//! A first run on a GPU: times the fused engine, and candle's tensor operations on the same parameters.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear};
use optimisers::{AdamW, ClipGlobalNorm, Engine, MixedPrecision, OptimiserChain, Update, setup};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::new_cuda(0)?;
    let variables = VarMap::new();
    let model = linear(4096, 4096, VarBuilder::from_varmap(&variables, DType::BF16, &device))?;
    let inputs = Tensor::randn(0f32, 1.0, (64, 4096), &device)?.to_dtype(DType::BF16)?;

    let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-4)));
    let mut state = setup(MixedPrecision::new(DType::F32, rule), &variables)?;
    for engine in [Engine::Fused, Engine::Tensors] {
        let (mut losses, mut shortest) = (Vec::new(), f64::INFINITY);
        for _ in 0..20 {
            let loss = model.forward(&inputs)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
            let grads = loss.backward()?;
            losses.push(loss.to_scalar::<f32>()?);
            device.synchronize()?; // otherwise the time would have the backward pass in it
            let start = Instant::now();
            Update::new(&mut state).engine(engine).apply(&variables, &grads)?;
            device.synchronize()?;
            shortest = shortest.min(start.elapsed().as_secs_f64());
        }
        println!("{engine:?}: {:.3} ms a step, loss {:.4} to {:.4}", 1e3 * shortest, losses[0], losses[19]);
    }
    Ok(())
}
