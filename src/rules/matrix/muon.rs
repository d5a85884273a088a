use candle_core::{Result as Candle, Tensor};

use super::momentum::{Mean, momentum_step};
use super::{StepScale, orthogonal_parameters};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Rule, Slot, State, range};

orthogonal_parameters! {
    /// Muon: momentum with all singular values moved near 1.
    ///
    /// The Newton-Schulz iteration moves the values by matrix products. Source: Jordan et al. 2024, ["Muon:
    /// An optimizer for hidden layers in neural networks"](https://kellerjordan.github.io/posts/muon/).
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
    /// Rows and columns are the last two dimensions. A tensor with more dimensions is a stack of matrices.
    /// Each matrix is made orthogonal by itself, with the bits that it would have alone. For the kernels of
    /// convolutions, [`MatrixForm::Flat`](crate::MatrixForm::Flat) makes such a tensor one matrix: its first
    /// dimension by all others. The rows of a layer that computes several things in one product can be cut:
    /// `heads` cuts them into equal parts, `parts` into parts of given sizes.
    ///
    /// [`setup`](crate::setup) refuses a vector. Without `Flat`, `setup` also refuses a tensor of four or
    /// more dimensions with sides below 16 and more matrices than a matrix has numbers, as most kernels are.
    /// Muon is made for the matrices inside a network. Give vectors, the embedding and the last layer another
    /// rule, with its own η:
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
    /// The rule uses candle's matrix products, in the compute dtype or that of `products`. It works on
    /// several parameters at a time, with about a million elements together, or on one larger parameter. For
    /// square matrices in F32 a step needs 28 bytes for each of these elements, in addition to the state.
    ///
    /// On the CPU set the environment variable `RAYON_NUM_THREADS` to the number of cores. Otherwise candle
    /// 0.11 reads `/proc/cpuinfo` before each product, which takes longer than the product of small matrices.
    /// With the variable, 64 parameters of 32 × 32 take less than a tenth of the time. From 256 × 256 on
    /// there is no difference (machine not recorded).
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
    /// Sums and matrix products are candle's. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The momentum is corrected for its start, as in optax's `scale_by_muon`. The author's code and torch's
    /// `Muon` do not correct it, which gives m and dx other weights in the first steps. The author's code and
    /// torch iterate in bf16, which is a choice of `products` here. torch takes only matrices, and its λ is
    /// 0.1 by default. Optimisers.jl has no such rule. nanochat has both `equilibrate` and `renormalise`,
    /// with an ε of 1e-6.
    ///
    /// The author's code (KellerJordan/Muon) takes a tensor of four dimensions as `MatrixForm::Flat` does,
    /// but scales its step by √max(1, height / width) of the kernel: 1 for a square kernel. Here, in timm
    /// 1.0.31 and in pytorch_optimizer 4.1.0 the factor is √max(1, rows / columns) of the flat matrix: also 1
    /// for the shape (8, 4, 3, 3), but 4 / 3 for (64, 4, 3, 3).
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
        let [direction] = orthogonal.matrices.map([u], |[u]| {
            Ok([(orthogonal.orthogonalise(&u)? * (self.eta * orthogonal.scale(&u)?))?])
        })?;
        Ok(direction)
    }
}

impl Rule for Muon {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.matrices().check_shape("Muon", x)?;
        State::for_slots(x, &[Slot::zeros("m")])
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.matrices().check_shape("Muon", x)?;
        let momentum = |t| Mean::new(self.rho, self.nesterov, t);
        let decay = self.eta * self.lambda;
        momentum_step(self, state, dx, momentum, |u, []| self.direction(u), decay)
    }
}
