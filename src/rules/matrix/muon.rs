use candle_core::{Result as Candle, Tensor};

use super::mean::Mean;
use super::{StepScale, orthogonal_parameters};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, Slots, State, range};
use crate::rules::gradient::weight_decay::WeightDecay;

orthogonal_parameters! {
    /// Muon: momentum whose singular values are all made about 1.
    ///
    /// That is done by the iteration of Newton and Schulz. Source: Jordan et al. 2024, ["Muon: An optimizer
    /// for hidden layers in neural networks"](https://kellerjordan.github.io/posts/muon/).
    ///
    /// ```text
    /// m   = ρ·m + (1 - ρ)·dx
    /// u   = ρ·m / (1 - ρᵗ⁺¹) + (1 - ρ)·dx / (1 - ρᵗ)       m / (1 - ρᵗ) without nesterov
    /// r   = r·‖u‖ / (√rows·max(‖r‖, ε))                    each row r of u, with equilibrate
    /// u   = u / (‖u‖ + ε), then ns_steps times:
    /// u   = a·u + (b·s + c·s²)·u,   s = u·uᵀ                a, b, c by coefficients
    /// u   = u·√min(rows, columns) / max(‖u‖, ε)             with renormalise
    /// dx' = η·(√max(1, rows / columns)·u + λ·x)             or another scale
    /// ```
    ///
    /// # Which matrices
    /// The last two dimensions are rows and columns. A tensor with more is a stack of matrices, each made
    /// orthogonal by itself, with the bits that it would have alone.
    /// [`MatrixForm::Flat`](crate::MatrixForm::Flat) makes it one matrix of its first dimension by the
    /// others, for the kernels of convolutions. Layers that compute several things in one product have their
    /// rows cut: `heads` into equal parts, `parts` into parts of given sizes.
    ///
    /// A vector is refused at [`setup`](crate::setup). Muon is made for the matrices inside a network;
    /// vectors, the embedding and the last layer get another rule, each with its own η:
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{AdamW, Muon, setup};
    /// use std::collections::BTreeMap;
    ///
    /// let variable = |shape: &[usize]| Var::zeros(shape, DType::F32, &Device::Cpu);
    /// let model = BTreeMap::from([
    ///     ("embedding", variable(&[100, 16])?),
    ///     ("hidden.weight", variable(&[16, 16])?),
    ///     ("hidden.bias", variable(&[16])?),
    /// ]);
    /// let rule = Muon::new(0.02).with_fallback(AdamW::new(3e-4)).except(["embedding"]);
    /// let state = setup(rule, &model)?;
    /// let names: Vec<_> = state.leaves().map(|leaf| (leaf.optimiser().name(), leaf.learning_rate().unwrap())).collect();
    /// assert_eq!(names, [("AdamW".into(), 3e-4), ("AdamW".into(), 3e-4), ("Muon".into(), 0.02)]);
    /// assert_eq!(state.bytes(), 4 * (2 * (100 * 16 + 16) + 16 * 16));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Cost
    /// It works with candle's matrix products, in the compute dtype or that of `products`, for about a
    /// million elements or one larger parameter at a time. A step needs 28 bytes for each of these beside the
    /// state, for square matrices in F32.
    ///
    /// On the CPU set the environment variable `RAYON_NUM_THREADS` to the number of cores. Without it
    /// candle 0.11 reads `/proc/cpuinfo` before each product, which takes longer than that of small matrices.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Muon, setup, update};
    ///
    /// // Every direction of a matrix of full rank has a step of about η, however large its part in the gradient is.
    /// let x = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
    /// let mut state = setup(Muon::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[100f64, 0.0], [0.0, 50.0]], &Device::Cpu)?)])?;
    /// assert!(x.abs()?.to_vec2::<f64>()?.iter().enumerate().all(|(i, row)| row[i] > 0.065 && row[i] < 0.125 && row[1 - i] < 1e-9));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// The sums and matrix products are candle's. In F32 they follow the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. Without the feature `candle` the rule is not there.
    ///
    /// # Departures
    /// The momentum is corrected for its start, as in optax's `scale_by_muon`. The author's code and torch's
    /// `Muon` do not correct it, which gives m and dx other weights in the first steps. Both iterate in bf16,
    /// which is `products` here. torch takes matrices only, and its λ is 0.1 by default. Optimisers.jl has no
    /// such rule. nanochat has `equilibrate` and `renormalise` always on, with 1e-6 as the ε of both.
    ///
    /// The author's code (KellerJordan/Muon) makes a matrix of a tensor of four dimensions as
    /// `MatrixForm::Flat` does. Its scale is √max(1, height / width) of the kernel: 1 for a square one. Here,
    /// in timm 1.0.31 and in pytorch_optimizer 4.1.0 it is √max(1, rows / columns) of the flat matrix. For
    /// [8, 4, 3, 3], a matrix of 8 rows and 36 columns, either is 1; for [64, 4, 3, 3] it is 4 / 3 here.
    pub struct Muon, StepScale::Original, {
        /// η: the learning rate.
        eta: f64 = 0.02 => range::non_negative,
        /// ρ: the decay of the momentum.
        rho: f64 = 0.95 => range::decay,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// Whether the momentum is Nesterov's.
        nesterov: bool = true => range::any,
        /// ε: keeps the norm from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Muon {
    fn direction(&self, u: &Tensor) -> Candle<Tensor> {
        let orthogonal = self.orthogonal();
        let [direction] = orthogonal
            .matrices
            .map([u], |[u]| Ok([(orthogonal.of(&u)? * (self.eta * orthogonal.scale(&u)?))?]))?;
        Ok(direction)
    }
}

impl Rule for Muon {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.matrices().check_shape("Muon", x)?;
        State::for_slots(x, &[Slot::zeros("m")])
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        self.matrices().check_shape("Muon", x)?;
        let momentum = dx.map(Mean::new(self.rho, self.nesterov, t), slots);
        let direction = momentum.through(&mut [], false, |_, u, _| Ok(self.direction(&u)?));
        Ok(Flow::Step(direction.step_of(&WeightDecay::new(self.eta * self.lambda), t, Slots::none())))
    }
}
