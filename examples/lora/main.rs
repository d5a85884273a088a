//! Fine-tuning by LoRA: a trainer written by hand on candle-nn's AdamW, and the same trainer with this crate.
//!
//! A network that has learned the handwritten digits learns them turned upside down. Its weights are frozen, and
//! each layer W gets a trained difference B·A of low rank. `by_hand.rs` is what a trainer on candle writes itself,
//! `train.rs` the same with this crate. Each is run once in one piece, and once stopped and resumed.
//!
//! Run with `cargo run --release --example lora`.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use candle_core::{D, DType, DType::BF16, DType::F32, Device, Result, Tensor, Var};
use candle_nn::loss::cross_entropy;
use digits::{CLASSES, Digit, PIXELS, digits, shuffle};
use optimisers::{Adam, setup, update};
use random::Random;

mod by_hand;
#[path = "../support/digits.rs"]
mod digits;
#[path = "../support/random.rs"]
mod random;
mod train;
#[path = "../support/variable.rs"]
mod variable;

const WIDTHS: [usize; 6] = [PIXELS, 256, 256, 256, 256, CLASSES];
const RANK: usize = 8;
const BATCH: usize = 32;
/// The batches of a step. An epoch has 45 batches, so its last window has one.
const WINDOW: u64 = 4;
const EPOCHS: usize = 8;
const RATE: f64 = 3e-3;

/// The trained factors of all layers by name: `0.a`, `0.b`, `1.a`, ...
type Factors = BTreeMap<String, Var>;

/// What is learned: the frozen weights, batches of images with their labels, and those to test with.
struct Task {
    base: Vec<Tensor>,
    batches: Vec<(Tensor, Tensor)>,
    test: (Tensor, Tensor),
}

impl Task {
    fn new(base: &[Tensor], data: &[Vec<Digit>; 2], dtype: DType, is_turned: bool) -> Result<Self> {
        let images = |digits: &[Digit]| {
            let pixels = digits.iter().flat_map(|digit| match is_turned {
                true => digit.pixels.iter().rev().copied().collect::<Vec<_>>(),
                false => digit.pixels.clone(),
            });
            let pixels = Tensor::from_iter(pixels, &Device::Cpu)?.reshape((digits.len(), PIXELS))?;
            let labels = Tensor::from_iter(digits.iter().map(|digit| digit.label), &Device::Cpu)?;
            Ok((pixels.to_dtype(dtype)?, labels))
        };
        let base = base
            .iter()
            .map(|weight| weight.detach().to_dtype(dtype))
            .collect::<Result<_>>()?;
        Ok(Task {
            base,
            batches: data[0].chunks(BATCH).map(images).collect::<Result<_>>()?,
            test: images(&data[1])?,
        })
    }

    /// A is random and B is 0, so that training begins with the base.
    fn factors(&self) -> Result<Factors> {
        let mut random = Random::new(1);
        let mut factors = Factors::new();
        for (i, weight) in self.base.iter().enumerate() {
            let (outputs, inputs) = weight.dims2()?;
            let bound = 1.0 / (inputs as f32).sqrt();
            let a = random.variable((RANK, inputs), bound, weight.dtype(), &Device::Cpu)?;
            factors.insert(format!("{i}.a"), Var::from_tensor(&a)?);
            factors.insert(
                format!("{i}.b"),
                Var::zeros((outputs, RANK), weight.dtype(), &Device::Cpu)?,
            );
        }
        Ok(factors)
    }

    fn forward(&self, factors: &Factors, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, weight) in self.base.iter().enumerate() {
            let mut y = x.matmul(&weight.t()?)?;
            if let (Some(a), Some(b)) = (factors.get(&format!("{i}.a")), factors.get(&format!("{i}.b"))) {
                y = (y + x.matmul(&a.t()?)?.matmul(&b.t()?)?)?;
            }
            x = if i + 1 < self.base.len() { y.relu()? } else { y };
        }
        x.to_dtype(F32)
    }

    fn loss(&self, factors: &Factors, (images, labels): &(Tensor, Tensor)) -> Result<Tensor> {
        cross_entropy(&self.forward(factors, images)?, labels)
    }

    fn accuracy(&self, factors: &Factors) -> Result<f32> {
        let told = self.forward(factors, &self.test.0)?.argmax(D::Minus1)?;
        told.eq(&self.test.1)?.to_dtype(F32)?.mean_all()?.to_scalar()
    }
}

/// The weights of a network that knows the digits as they are.
fn pretrained(data: &[Vec<Digit>; 2]) -> std::result::Result<Vec<Tensor>, Box<dyn Error>> {
    let mut random = Random::new(0);
    let mut weight = |inputs: usize, outputs: usize| {
        random.variable((outputs, inputs), (3.0 / inputs as f32).sqrt(), F32, &Device::Cpu)
    };
    let weights = WIDTHS
        .windows(2)
        .map(|pair| weight(pair[0], pair[1]))
        .collect::<Result<Vec<_>>>()?;
    let mut task = Task::new(&[], data, F32, false)?;
    task.base.clone_from(&weights);
    let mut state = setup(Adam::new(1e-3), &weights)?;
    for batch in task.batches.iter().cycle().take(8 * task.batches.len()) {
        update(
            &mut state,
            &weights,
            &task.loss(&Factors::new(), batch)?.backward()?,
        )?;
    }
    Ok(task.base)
}

/// Trains for some epochs, from the file unless they begin with the first, and writes the file. Returns the bytes
/// of the optimiser's memory.
type Train = fn(&Task, &Factors, Range<usize>, &Path) -> std::result::Result<usize, Box<dyn Error>>;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut data = digits()?;
    shuffle(&mut data[0], &mut Random::new(0));
    let base = pretrained(&data)?;
    let folder = tempfile::tempdir()?;
    println!(
        "accuracy before: {:.4}",
        Task::new(&base, &data, F32, true)?.accuracy(&Factors::new())?
    );
    println!(
        "{:24} accuracy  bytes: base  trained  ms a batch  lost by resuming",
        ""
    );
    let ways: [(&str, DType, Train); 3] = [
        ("by hand, f32", F32, by_hand::train),
        ("optimisers, f32", F32, train::train),
        ("optimisers, bf16", BF16, train::train),
    ];
    for (name, dtype, train) in ways {
        let task = Task::new(&base, &data, dtype, true)?;
        let [whole, resumed] = [task.factors()?, task.factors()?];
        let begin = Instant::now();
        let bytes = train(&task, &whole, 0..EPOCHS, &folder.path().join("whole.safetensors"))?;
        let milliseconds = begin.elapsed().as_secs_f64() * 1e3 / (EPOCHS * task.batches.len()) as f64;
        let file = folder.path().join("halves.safetensors");
        train(&task, &resumed, 0..EPOCHS / 2, &file)?;
        let resumed = task.factors()?; // as in another process
        train(&task, &resumed, EPOCHS / 2..EPOCHS, &file)?;
        let mut lost = 0f32;
        for (a, b) in whole.values().zip(resumed.values()) {
            let difference = (a.to_dtype(F32)? - b.to_dtype(F32)?)?
                .abs()?
                .max_all()?
                .to_scalar::<f32>()?;
            lost = lost.max(difference);
        }
        assert!(
            lost == 0.0 || name == "by hand, f32",
            "a resumed run of {name} differs by {lost}"
        );
        let size = |weight: &Tensor| weight.elem_count() * weight.dtype().size_in_bytes();
        let base: usize = task.base.iter().map(size).sum();
        let trained = bytes + whole.values().map(|factor| size(factor)).sum::<usize>();
        println!(
            "{name:24} {:.4}    {base:10}  {trained:7}  {milliseconds:10.3}  {lost:e}",
            task.accuracy(&whole)?
        );
    }
    Ok(())
}
