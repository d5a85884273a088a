//! How far AdamW is from itself in f64, by the way in which parameters are kept, in units in the last place.
//!
//! Per way, number and count of steps one line:
//! `error <way> of=<parameter or master> ulp_of=<dtype> steps=<n> worst=<ulp> mean=<ulp> x0=<x> gradient=<first>`.
//! The worst is that of a random search, so the true one is at least as large; the last two columns are where
//! it was found. Every parameter starts as a number of bf16, with gradients that all dtypes hold: between
//! both runs nothing differs but what is rounded on the way. The unit is that of the larger of the parameter
//! at its start and at its end, as one that ends near zero has lost its digits in a subtraction.

#[allow(dead_code, reason = "the examples have more use for it")]
#[path = "../../examples/support/random.rs"]
mod random;

use candle_core::{DType, Device, Tensor, Var};
use clap::Parser;
use half::bf16;
use optimisers::{
    AdamW, IntoOptimiser, Kahan, MixedPrecision, Optimiser, Q8, SplitMaster, StateTree, StochasticRounding,
    StoreAs, setup, update,
};

use random::Random;

/// Measures the error of AdamW by the way in which parameters are kept.
#[derive(Parser)]
struct Options {
    /// Random parameters.
    #[arg(long, default_value_t = 1 << 20)]
    elements: usize,
    /// Steps, after which the errors are reported a second time.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..))]
    steps: u32,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A way to keep parameters: its name, the dtype of the parameter and the optimiser.
type Way = (&'static str, DType, fn() -> Optimiser);

const WAYS: [Way; 7] = [
    ("f32", DType::F32, || Optimiser::new(adamw())),
    ("f32, state in 8 bits", DType::F32, || {
        Optimiser::new(StoreAs::all(Q8, adamw()))
    }),
    ("bf16 with masters", DType::BF16, || {
        Optimiser::new(MixedPrecision::new(DType::F32, adamw()))
    }),
    ("bf16, split masters", DType::BF16, || {
        Optimiser::new(SplitMaster::new(adamw()))
    }),
    ("bf16, Kahan", DType::BF16, || Optimiser::new(Kahan::new(adamw()))),
    ("bf16, stochastic", DType::BF16, || {
        Optimiser::new(StochasticRounding::new(0, adamw()))
    }),
    ("bf16", DType::BF16, || Optimiser::new(adamw())),
];

fn adamw() -> AdamW {
    AdamW {
        lambda: 0.01,
        ..AdamW::new(1e-3)
    }
}

/// A parameter under training.
struct Run {
    x: Var,
    state: StateTree,
}

impl Run {
    fn new(optimiser: impl IntoOptimiser, start: &[f32], dtype: DType) -> Result<Self> {
        let x = Var::from_tensor(&Tensor::new(start, &Device::Cpu)?.to_dtype(dtype)?)?;
        let mut state = setup(optimiser, &x)?;
        state.all().allow_low_precision();
        Ok(Run { x, state })
    }

    fn step(&mut self, gradient: &Tensor) -> Result<()> {
        let gradients = vec![(String::new(), gradient.to_dtype(self.x.dtype())?)];
        update(&mut self.state, &self.x, &gradients)?;
        Ok(())
    }

    fn parameter(&self) -> Result<Vec<f64>> {
        Ok(self.x.to_dtype(DType::F64)?.to_vec1()?)
    }

    fn master(&self) -> Result<Vec<f64>> {
        Ok(self.state.masters(&self.x)?[""].to_dtype(DType::F64)?.to_vec1()?)
    }
}

/// A number of bf16, with an exponent of its own.
fn number(random: &mut Random, exponents: std::ops::Range<i32>) -> f32 {
    let exponent = exponents.start + random.below(exponents.len()) as i32;
    bf16::from_f32(random.uniform() * 2f32.powi(exponent)).to_f32()
}

/// The unit in the last place of a number, in a dtype with that many bits of fraction.
fn ulp(number: f64, fraction: i32) -> f64 {
    let exponent = if number == 0.0 {
        -126
    } else {
        number.abs().log2().floor() as i32
    };
    2f64.powi(exponent.max(-126) - fraction)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut random = Random::new(0);
    let start: Vec<f32> = (0..options.elements)
        .map(|_| number(&mut random, -8..2))
        .collect();
    // Each parameter has gradients of one size, with a direction that prevails. As in a layer, neighbours
    // differ less than others do: state in 8 bits has one scale for 128 of them.
    let blocks: Vec<i32> = (0..options.elements.div_ceil(128))
        .map(|_| random.below(18) as i32 - 22)
        .collect();
    let sizes: Vec<i32> = (0..options.elements)
        .map(|i| blocks[i / 128] + random.below(6) as i32)
        .collect();
    let mut first = Vec::new();
    let mut exact = Run::new(adamw(), &start, DType::F64)?;
    let mut runs = WAYS.map(|(_, dtype, optimiser)| Run::new(optimiser(), &start, dtype));
    println!("elements={} rule={:?}", options.elements, adamw());
    for step in 1..=options.steps {
        let gradients: Vec<f32> = sizes
            .iter()
            .map(|&size| number(&mut random, size..size + 1) + 2f32.powi(size - 2))
            .collect();
        let gradients: Vec<f32> = gradients
            .into_iter()
            .map(|number| bf16::from_f32(number).to_f32())
            .collect();
        let gradient = Tensor::new(gradients.as_slice(), &Device::Cpu)?;
        exact.step(&gradient)?;
        for run in &mut runs {
            run.as_mut().map_err(|error| error.to_string())?.step(&gradient)?;
        }
        if step == 1 {
            first = gradients;
        }
        if step != 1 && step != options.steps {
            continue;
        }
        let expected = exact.parameter()?;
        for ((name, dtype, _), run) in WAYS.iter().zip(&runs) {
            let run = run.as_ref().map_err(|error| error.to_string())?;
            let fraction = if *dtype == DType::F32 { 23 } else { 7 };
            let mut measured = vec![("parameter", fraction, run.parameter()?)];
            if name.contains("masters") {
                measured.push(("master", 23, run.master()?));
            }
            for (of, fraction, got) in measured {
                let errors = got.iter().zip(&expected).zip(&start);
                let errors = errors.map(|((got, x), start)| {
                    (got - x).abs() / ulp(x.abs().max(start.abs().into()), fraction)
                });
                let errors: Vec<f64> = errors.collect();
                let (place, worst) = errors
                    .iter()
                    .enumerate()
                    .max_by(|a, b| a.1.total_cmp(b.1))
                    .ok_or("no parameters")?;
                let mean = errors.iter().sum::<f64>() / errors.len() as f64;
                let ulp_of = if fraction == 23 { "f32" } else { "bf16" };
                println!(
                    "error {name:?} of={of} ulp_of={ulp_of} steps={step} worst={worst:.3} mean={mean:.3} \
                     x0={:e} gradient={:e}",
                    start[place], first[place]
                );
            }
        }
    }
    Ok(())
}
