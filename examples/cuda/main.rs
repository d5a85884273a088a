//! A first run on a GPU: times the fused engine, and candle's tensor operations on the same parameters.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear};
use optimisers::{AdamW, ClipGlobalNorm, Engine, MixedPrecision, OptimiserChain, Update, setup};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::new_cuda(0)?;
    let variables = VarMap::new();
    let model = linear(
        4096,
        4096,
        VarBuilder::from_varmap(&variables, DType::BF16, &device),
    )?;
    let inputs = Tensor::randn(0f32, 1.0, (64, 4096), &device)?.to_dtype(DType::BF16)?;

    let mut milliseconds = [f64::INFINITY; 2];
    for (engine, shortest) in [Engine::Fused, Engine::Tensors]
        .into_iter()
        .zip(&mut milliseconds)
    {
        let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-4)));
        let mut state = setup(MixedPrecision::new(DType::F32, rule), &variables)?;
        for _ in 0..20 {
            let loss = model.forward(&inputs)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
            let grads = loss.backward()?;
            device.synchronize()?; // otherwise the time would have the backward pass in it
            let start = Instant::now();
            Update::new(&mut state).engine(engine).apply(&variables, &grads)?;
            device.synchronize()?;
            *shortest = shortest.min(1e3 * start.elapsed().as_secs_f64());
        }
        println!("{engine:?}: {shortest:.3} ms a step");
    }
    let [fused, tensors] = milliseconds;
    if fused > tensors / 1.5 {
        return Err("candle's tensor operations ran both times".into());
    }
    println!("the fused engine ran: {:.1} times as fast", tensors / fused);
    Ok(())
}
