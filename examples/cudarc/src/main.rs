//! A program without candle that trains in buffers of its own: softmax regression on the digits with cudarc,
//! in bf16 with f32 masters. AdamW is a kernel that `optimisers` prints, gradients are clipped by their
//! global norm, and each step is compared with `update` on the CPU, bit by bit.
//!
//! `cargo run --release` needs an NVIDIA GPU and the library of NVRTC.

// It launches kernels.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::{CompileOptions, Ptx, compile_ptx_with_opts};
use half::bf16;
use optimisers::DType::{BF16, F32};
use optimisers::printed::{BufferRole, Printed, PrintedKernel, PrintedStep, printed};
use optimisers::*;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const MODEL: &str = include_str!("model.cu");
const LARGEST_NORM: f64 = 0.5;

/// `Scale` has the factor by which gradients are clipped.
fn optimiser() -> MixedPrecision<OptimiserChain<(Scale, AdamW)>> {
    MixedPrecision::new(F32, OptimiserChain::new((Scale::new(1.0), AdamW::new(0.05))))
}

fn compiled(source: &str, (major, minor): (i32, i32)) -> Result<Ptx> {
    let mut options: Vec<String> = PrintedKernel::CUDA_FLAGS.map(String::from).into();
    options.push(format!("--gpu-architecture=compute_{major}{minor}"));
    Ok(compile_ptx_with_opts(
        source,
        CompileOptions {
            options,
            ..Default::default()
        },
    )?)
}

fn grid(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// A parameter, its gradient and its state.
struct Parameter {
    x: CudaSlice<bf16>,
    dx: CudaSlice<f32>,
    state: HashMap<BufferRole, CudaSlice<u8>>,
}

impl Parameter {
    fn new(x: &[bf16], adamw: &Printed, stream: &Arc<CudaStream>) -> Result<Self> {
        let buffers = adamw.state().iter();
        let state = buffers.map(|own| Ok((own.role.clone(), stream.clone_htod(&own.start_bytes(x)?)?)));
        let state = state.collect::<Result<_>>()?;
        Ok(Parameter {
            x: stream.clone_htod(x)?,
            dx: stream.alloc_zeros(x.len())?,
            state,
        })
    }

    fn step(&self, step: &PrintedStep, function: &CudaFunction, stream: &Arc<CudaStream>) -> Result<()> {
        let words = step.words(self.x.len(), |array| match &array.role {
            BufferRole::Parameter => self.x.device_ptr(stream).0,
            BufferRole::Gradient => self.dx.device_ptr(stream).0,
            role => self.state[role].device_ptr(stream).0,
        });
        let mut launch = stream.launch_builder(function);
        words.iter().for_each(|word| _ = launch.arg(word));
        // SAFETY: the words are the arguments of the kernel, for arrays with a number for each of `x`.
        unsafe { launch.launch(grid(step.kernel.blocks(self.x.len()), step.kernel.threads))? };
        Ok(())
    }
}

fn slices([weight, bias]: &mut [Vec<bf16>; 2]) -> optimisers::Result<ParameterSlices<'_>> {
    ParameterSlices::new()
        .with("weight", 640, weight)?
        .with("bias", 10, bias)
}

fn main() -> Result<()> {
    let context = CudaContext::new(0)?;
    let (stream, capability) = (context.default_stream(), context.compute_capability()?);
    let mut adamw = printed(optimiser(), BF16, F32)?;
    let update_kernel = context.load_module(compiled(adamw.kernel().source(), capability)?)?;
    let update_kernel = update_kernel.load_function(adamw.kernel().entry)?;
    let model = context.load_module(compiled(MODEL, capability)?)?;
    let load = |name| model.load_function(name);
    let (forward, backward, square) = (load("forward")?, load("backward")?, load("square")?);

    let numbers = include_str!("../../data/digits.csv")
        .split_terminator([',', '\n'])
        .map(str::parse);
    let images = stream.clone_htod(&numbers.collect::<std::result::Result<Vec<u8>, _>>()?)?;
    let length = images.len() as i32 / 65;
    let mut errors = stream.alloc_zeros::<f32>(10 * length as usize)?;
    let mut losses = stream.alloc_zeros::<f32>(length as usize)?;
    let mut squares = stream.alloc_zeros::<f64>(1)?;
    // The same parameters on the CPU.
    let mut twin = [vec![bf16::ZERO; 640], vec![bf16::ZERO; 10]];
    let mut weight = Parameter::new(&twin[0], &adamw, &stream)?;
    let mut bias = Parameter::new(&twin[1], &adamw, &stream)?;
    let mut state = setup(optimiser(), &slices(&mut twin)?)?;

    for index in 1..=100 {
        let mut run = stream.launch_builder(&forward);
        run.arg(&weight.x)
            .arg(&bias.x)
            .arg(&images)
            .arg(&mut errors)
            .arg(&mut losses)
            .arg(&length);
        // SAFETY: here and below, the arguments are those in `model.cu`, with the lengths there.
        unsafe { run.launch(grid(length as u32 / 128 + 1, 128))? };
        let mut run = stream.launch_builder(&backward);
        run.arg(&errors)
            .arg(&images)
            .arg(&mut weight.dx)
            .arg(&mut bias.dx)
            .arg(&length);
        unsafe { run.launch(grid(10, 65))? };
        let mut run = stream.launch_builder(&square);
        unsafe {
            run.arg(&weight.dx)
                .arg(&bias.dx)
                .arg(&mut squares)
                .launch(grid(1, 1))?
        };

        let norm = stream.clone_dtoh(&squares)?[0].sqrt();
        let factor = if norm.is_finite() {
            (LARGEST_NORM / norm).min(1.0)
        } else {
            Err("an infinite gradient")?
        };
        adamw.adjust_field("alpha", factor)?;
        let step = adamw.step()?;
        assert_eq!(
            step.kernel.source(),
            adamw.kernel().source(),
            "this chain has one kernel in all steps"
        );
        [&weight, &bias]
            .into_iter()
            .try_for_each(|x| x.step(&step, &update_kernel, &stream))?;

        state.all().adjust_field("alpha", factor)?;
        let (dw, db) = (stream.clone_dtoh(&weight.dx)?, stream.clone_dtoh(&bias.dx)?);
        update(
            &mut state,
            &slices(&mut twin)?,
            &GradientSlices::new().with("weight", &dw)?.with("bias", &db)?,
        )?;
        assert_eq!(
            [stream.clone_dtoh(&weight.x)?, stream.clone_dtoh(&bias.x)?],
            twin,
            "other bits"
        );
        if index % 20 == 0 {
            let loss = stream.clone_dtoh(&losses)?.iter().sum::<f32>() / length as f32;
            println!("step {index}: loss {loss:.4}, gradients times {factor:.3}, the bits of `update`");
        }
    }
    Ok(())
}

/// NVRTC needs no GPU.
#[test]
fn nvrtc_takes_the_kernels() -> Result<()> {
    let adamw = printed(optimiser(), BF16, F32)?;
    [MODEL, adamw.kernel().source()]
        .iter()
        .try_for_each(|source| compiled(source, (9, 0)).map(drop))
}
