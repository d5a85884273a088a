//! Trains a network on handwritten digits with burn's AdamW and with this crate's, in f32 and on bf16
//! parameters with f32 masters, in turns. Run with `cargo run --release`.

#[path = "../../support/digits.rs"]
mod digits;
mod network;
#[allow(dead_code, reason = "other examples draw numbers, too")]
#[path = "../../support/random.rs"]
mod random;

use std::error::Error;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_optimisers::ModuleOptimizer;
use optimisers::{AdamW, MixedPrecision};

use digits::{Digit, PIXELS, digits, shuffle};
use network::Network;
use random::Random;

const ETA: f64 = 1e-3;
const BATCH: usize = 64;
const EPOCHS: usize = 20;

/// One of the three to compare.
struct Run {
    name: &'static str,
    network: Network,
    optimizer: Optimizer,
    loss: f32,
    /// Of the optimiser alone, and of all, for each step.
    of_optimizer: Vec<Duration>,
    of_step: Vec<Duration>,
}

/// Takes a network and gradients, and gives the network after a step.
type Optimizer = Box<dyn FnMut(Network, GradientsParams) -> Result<Network, Box<dyn Error>>>;

impl Run {
    fn new(name: &'static str, network: Network, optimizer: Optimizer) -> Self {
        Run {
            name,
            network,
            optimizer,
            loss: f32::NAN,
            of_optimizer: Vec::new(),
            of_step: Vec::new(),
        }
    }

    fn step(mut self, images: Tensor<2>, labels: Tensor<1, Int>) -> Result<Self, Box<dyn Error>> {
        let start = Instant::now();
        let loss = CrossEntropyLossConfig::new()
            .init(&labels.device())
            .forward(self.network.forward(images), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &self.network);
        self.loss = loss.inner().into_scalar::<f32>();
        let update = Instant::now();
        self.network = (self.optimizer)(self.network, gradients)?;
        self.of_optimizer.push(update.elapsed());
        self.of_step.push(start.elapsed());
        Ok(self)
    }

    fn accuracy(&self, digits: &[Digit], device: &Device) -> f64 {
        let (images, labels) = tensors(&digits.iter().collect::<Vec<_>>(), device);
        let right = self
            .network
            .forward(images)
            .argmax(1)
            .squeeze_dim::<1>(1)
            .equal(labels);
        right.int().sum().into_scalar::<i64>() as f64 / digits.len() as f64
    }
}

fn tensors(batch: &[&Digit], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let pixels: Vec<f32> = batch
        .iter()
        .flat_map(|digit| digit.pixels.iter().copied())
        .collect();
    let labels: Vec<i64> = batch.iter().map(|digit| digit.label.into()).collect();
    let images = Tensor::from_data(TensorData::new(pixels, [batch.len(), PIXELS]), device);
    (
        images,
        Tensor::from_data(TensorData::new(labels, [batch.len()]), device),
    )
}

fn with(mut optimizer: ModuleOptimizer) -> Optimizer {
    Box::new(move |mut network, gradients| {
        optimizer.step(&mut network, gradients)?;
        Ok(network)
    })
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(0);
    let [train, test] = digits()?;
    let network = Network::new(&device).materialize();
    let half = network.clone().with_dtype(DType::BF16);

    // What burn's configuration says by default.
    let adamw = AdamW {
        lambda: 1e-4,
        epsilon: 1e-5,
        ..AdamW::new(ETA)
    };
    let plain = ModuleOptimizer::new(adamw.clone(), &network)?;
    let mixed = ModuleOptimizer::new(MixedPrecision::new(optimisers::DType::F32, adamw), &half)?;
    println!(
        "{} parameters, {} and {} bytes of state",
        network.num_params(),
        plain.state().bytes(),
        mixed.state().bytes()
    );
    let mut burn = AdamWConfig::new().init();
    let mut runs = vec![
        Run::new(
            "f32, burn's AdamW",
            network.clone(),
            Box::new(move |network, gradients| Ok(burn.step(ETA, network, gradients))),
        ),
        Run::new("f32, AdamW", network, with(plain)),
        Run::new("bf16, AdamW on f32 masters", half, with(mixed)),
    ];

    let mut order: Vec<&Digit> = train.iter().collect();
    let mut random = Random::new(0);
    for _ in 0..EPOCHS {
        shuffle(&mut order, &mut random);
        for batch in order.chunks(BATCH) {
            let (images, labels) = tensors(batch, &device);
            let step = |run: Run| run.step(images.clone(), labels.clone());
            runs = runs.into_iter().map(step).collect::<Result<_, _>>()?;
        }
    }
    println!(
        "{:<28}{:>10}{:>10}{:>16}{:>12}",
        "", "loss", "accuracy", "optimiser, us", "step, us"
    );
    for run in &mut runs {
        let (of_optimizer, of_step) = (median(&mut run.of_optimizer), median(&mut run.of_step));
        println!(
            "{:<28}{:>10.5}{:>10.4}{of_optimizer:>16.0}{of_step:>12.0}",
            run.name,
            run.loss,
            run.accuracy(&test, &device)
        );
    }
    Ok(())
}
