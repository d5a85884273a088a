//! A network with one hidden layer on plain vectors, with its own backward pass.

use half::bf16;
use optimisers::{GradientSlices, ParameterSlices};

use crate::digits::{CLASSES, Digit, PIXELS};
use crate::random::Random;

const HIDDEN: usize = 32;

/// y = W·x + b, with weights in bf16.
struct Layer {
    /// `(outputs, inputs)`, row by row.
    weight: Vec<bf16>,
    bias: Vec<bf16>,
    inputs: usize,
}

impl Layer {
    fn new(random: &mut Random, outputs: usize, inputs: usize) -> Self {
        let bound = (inputs as f32).sqrt().recip();
        let weight = (0..outputs * inputs)
            .map(|_| bf16::from_f32(bound * random.uniform()))
            .collect();
        Layer {
            weight,
            bias: vec![bf16::ZERO; outputs],
            inputs,
        }
    }

    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.inputs).zip(&self.bias);
        rows.map(|(row, bias)| {
            bias.to_f32()
                + row
                    .iter()
                    .zip(x)
                    .map(|(weight, x)| weight.to_f32() * x)
                    .sum::<f32>()
        })
        .collect()
    }

    /// The gradient of the inputs, from that of the outputs.
    fn backward(&self, of_outputs: &[f32]) -> Vec<f32> {
        let mut of_inputs = vec![0.0; self.inputs];
        for (row, dy) in self.weight.chunks_exact(self.inputs).zip(of_outputs) {
            of_inputs
                .iter_mut()
                .zip(row)
                .for_each(|(dx, weight)| *dx += weight.to_f32() * dy);
        }
        of_inputs
    }
}

/// The gradients of a layer, in f32.
struct LayerGradients {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl LayerGradients {
    fn zeros(layer: &Layer) -> Self {
        LayerGradients {
            weight: vec![0.0; layer.weight.len()],
            bias: vec![0.0; layer.bias.len()],
        }
    }

    fn add(&mut self, x: &[f32], of_outputs: &[f32]) {
        for ((row, bias), dy) in self
            .weight
            .chunks_exact_mut(x.len())
            .zip(&mut self.bias)
            .zip(of_outputs)
        {
            row.iter_mut().zip(x).for_each(|(weight, x)| *weight += dy * x);
            *bias += dy;
        }
    }
}

pub(crate) struct Network {
    hidden: Layer,
    output: Layer,
}

/// The gradients of all parameters.
pub(crate) struct NetworkGradients {
    hidden: LayerGradients,
    output: LayerGradients,
}

impl NetworkGradients {
    pub(crate) fn show(&self) -> optimisers::Result<GradientSlices<'_>> {
        let NetworkGradients { hidden, output } = self;
        GradientSlices::new()
            .with("hidden.weight", &hidden.weight)?
            .with("hidden.bias", &hidden.bias)?
            .with("output.weight", &output.weight)?
            .with("output.bias", &output.bias)
    }
}

impl Network {
    pub(crate) fn new(random: &mut Random) -> Self {
        Network {
            hidden: Layer::new(random, HIDDEN, PIXELS),
            output: Layer::new(random, CLASSES, HIDDEN),
        }
    }

    /// What the optimiser gets to see, for one call.
    pub(crate) fn lend(&mut self) -> optimisers::Result<ParameterSlices<'_>> {
        let Network { hidden, output } = self;
        ParameterSlices::new()
            .with("hidden.weight", (HIDDEN, PIXELS), &mut hidden.weight)?
            .with("hidden.bias", HIDDEN, &mut hidden.bias)?
            .with("output.weight", (CLASSES, HIDDEN), &mut output.weight)?
            .with("output.bias", CLASSES, &mut output.bias)
    }

    /// The mean of the cross-entropy over a batch, and its gradients.
    pub(crate) fn gradients(&self, batch: &[&Digit]) -> (f32, NetworkGradients) {
        let mut gradients = NetworkGradients {
            hidden: LayerGradients::zeros(&self.hidden),
            output: LayerGradients::zeros(&self.output),
        };
        let mut loss = 0.0;
        let share = (batch.len() as f32).recip();
        for digit in batch {
            let hidden = self.activations(digit);
            let logits = self.output.forward(&hidden);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
            let label = digit.label as usize;
            loss += share * (total.ln() + largest - logits[label]);
            let mut of_logits: Vec<f32> = logits
                .iter()
                .map(|logit| share * (logit - largest).exp() / total)
                .collect();
            of_logits[label] -= share;
            gradients.output.add(&hidden, &of_logits);
            let of_hidden = self.output.backward(&of_logits);
            // tanh' = 1 - tanh²
            let of_sums: Vec<f32> = of_hidden
                .iter()
                .zip(&hidden)
                .map(|(dy, y)| dy * (1.0 - y * y))
                .collect();
            gradients.hidden.add(&digit.pixels, &of_sums);
        }
        (loss, gradients)
    }

    /// How many of the digits it tells right, as a part of 1.
    pub(crate) fn accuracy(&self, digits: &[Digit]) -> f64 {
        let best = |logits: &[f32]| (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let is_right = |digit: &&Digit| {
            best(&self.output.forward(&self.activations(digit))) == Some(digit.label as usize)
        };
        digits.iter().filter(is_right).count() as f64 / digits.len() as f64
    }

    fn activations(&self, digit: &Digit) -> Vec<f32> {
        self.hidden
            .forward(&digit.pixels)
            .into_iter()
            .map(f32::tanh)
            .collect()
    }
}
