use candle_core::{D, Result as Candle, Tensor};

use super::tensors::lerp;
use super::{MatrixForm, both_non_negative};
use crate::error::Result;
use crate::numbers::value::above_zero;
use crate::rule::{Flow, Gradient, Parameter, Rule, Slot, State, range, state_of_another_rule};
use crate::rules::gradient::weight_decay::with_decay;

crate::hyper_parameters! {
    /// Adafactor: stores only the means of rows and columns of a matrix's second moment.
    ///
    /// The state has 4·(rows + columns) bytes for rows·columns parameters. Source: Shazeer and Stern 2018,
    /// [arXiv 1804.04235](https://arxiv.org/abs/1804.04235).
    ///
    /// ```text
    /// β₂  = 1 - t^τ                                         τ = beta2_decay
    /// R   = β₂·R + (1 - β₂)·(mean of dx² over columns)      one number per row
    /// C   = β₂·C + (1 - β₂)·(mean of dx² over rows)         one number per column
    /// v   = R·C / max(mean of R, ε₁)                        β₂·v + (1 - β₂)·dx² for vectors and numbers
    /// u   = dx / max(√v, ε₁)
    /// dx' = α·u / max(1, rms(u) / d) + η·λ·x,   α = max(ε₂, rms(x))·min(η, 1 / √t)
    /// ```
    ///
    /// Rows and columns are the last two dimensions. A tensor with more dimensions is a stack of matrices, or
    /// one matrix with `matrix: MatrixForm::Flat`. The rule uses candle's tensor operations. It works on
    /// several parameters at a time, with about a million elements together, or on one larger parameter. In
    /// F32 a step needs 12 bytes for each of these elements, in addition to the state, whatever the size of
    /// the model.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Adafactor, setup, update};
    ///
    /// let x = Var::from_tensor(&Tensor::full(2f32, (100, 200), &Device::Cpu)?)?;
    /// let mut state = setup(Adafactor::new(0.25), &x)?;
    /// assert_eq!(state.bytes(), 4 * (100 + 200));
    /// // The first step is η times as long as the parameter, whatever the size of the gradient.
    /// update(&mut state, &x, &[("", Tensor::full(30f32, (100, 200), &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3}", x.get(0)?.get(0)?.to_scalar::<f32>()?), "1.500");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// The sums of rows are candle's. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The rule is torch's `Adafactor`, except for the default of ε₁. In torch ε₁ is the machine epsilon of
    /// the parameter's dtype, which is 0.008 for bf16. Here ε₁ is 1e-15, so that ε₁² is the paper's 1e-30.
    /// The paper adds 1e-30 to dx², takes η = 0.01 and has no λ. Optimisers.jl has no such rule.
    pub struct Adafactor: AdaptiveStep {
        /// η: the largest step, as a fraction of the root mean square of the parameter.
        eta: f64 = 0.01 => range::non_negative,
        /// τ: the exponent of t in 1 - β₂. The more negative τ is, the faster β₂ comes near 1.
        beta2_decay: f64 = -0.8 => not_positive,
        /// ε₁, ε₂: the smallest denominator, and the smallest rms(x) in the formula of α.
        epsilon: (f64, f64) = (1e-15, 1e-3) => both_non_negative,
        /// d: the largest root mean square of u before it is multiplied by α.
        d: f64 = 1.0 => range::positive,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// Which dimensions are rows and columns. Choose `matrix` before `setup`: it decides the state's
        /// shape.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

fn not_positive(value: f64) -> Option<&'static str> {
    (!(value <= 0.0 && value.is_finite())).then_some("a finite number of 0 or less")
}

/// The root mean square. The result is a tensor, because reading the number would wait for the device.
fn rms(x: &Tensor) -> Candle<Tensor> {
    x.sqr()?.mean_all()?.sqrt()
}

impl Adafactor {
    /// Moves the second moment, and returns √v.
    fn root(&self, weight: f64, dx: &Tensor, moments: &mut [Tensor]) -> Candle<Tensor> {
        let square = dx.sqr()?;
        match moments {
            [v] => {
                *v = lerp(v, &square, weight)?;
                v.sqrt()
            }
            [rows, columns] => {
                *rows = lerp(rows, &square.mean_keepdim(D::Minus1)?, weight)?;
                *columns = lerp(columns, &square.mean_keepdim(D::Minus2)?, weight)?;
                let mean = rows
                    .mean_keepdim(D::Minus2)?
                    .maximum(above_zero(self.epsilon.0))?;
                // Roots are multiplied, because the product of two small squares underflows.
                rows.broadcast_div(&mean)?.sqrt()?.broadcast_mul(&columns.sqrt()?)
            }
            _ => square.sqrt(),
        }
    }

    fn step(&self, t: u64, x: &Tensor, dx: &Tensor, moments: &mut [Tensor]) -> Candle<Tensor> {
        let (t, gradient) = (t as f64, self.as_matrices(dx)?);
        let root = self.root(t.powf(self.beta2_decay), &gradient, moments)?;
        let u = (gradient / root.maximum(above_zero(self.epsilon.0))?)?;
        let alpha = (rms(x)?.maximum(self.epsilon.1)? * self.eta.min(t.sqrt().recip()))?;
        let excess = (rms(&u)? / self.d)?.maximum(1.0)?;
        u.broadcast_mul(&(alpha / excess)?)?.reshape(dx.shape())
    }

    /// The shapes of the means of rows and of columns; `None` for fewer than two dimensions.
    fn factor_shapes(&self, x: Parameter<'_>) -> Option<[Vec<usize>; 2]> {
        let (outer, rows, columns) = match *x.shape() {
            [rows, ref others @ ..] if self.matrix == MatrixForm::Flat && !others.is_empty() => {
                (&[][..], rows, others.iter().product())
            }
            [ref outer @ .., rows, columns] => (outer, rows, columns),
            _ => return None,
        };
        Some([[rows, 1], [1, columns]].map(|inner| [outer, &inner].concat()))
    }

    /// Reshapes a tensor so that its last two dimensions are the rows and columns of matrices.
    fn as_matrices(&self, x: &Tensor) -> Candle<Tensor> {
        if self.matrix == MatrixForm::Flat && x.rank() > 2 {
            x.flatten_from(1)
        } else {
            Ok(x.clone())
        }
    }
}

impl Rule for Adafactor {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let [v, row_slot, column_slot] =
            ["v", "row_v", "column_v"].map(|name| Slot::zeros(name).second_moment());
        let Some([rows, columns]) = self.factor_shapes(x) else {
            return State::for_slots(x, &[v]);
        };
        State::for_slots(x, &[])?
            .with_slot(row_slot, x, rows)?
            .with_slot(column_slot, x, columns)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        // A state that was made with another `matrix` has other means of rows.
        if let [(_, row_means), _] = &state.tensors[..]
            && self
                .factor_shapes(x)
                .is_none_or(|[rows, _]| *row_means.shape() != rows)
        {
            return state_of_another_rule(self);
        }
        // The step runs late, during the commit, so that results take memory for few parameters at a time. A
        // late step must not refuse anything, and this step refuses nothing.
        let step = dx.with_tensors_late(state, |t, x, dx, moments| Ok(self.step(t, x, &dx, moments)?));
        Ok(Flow::Step(with_decay(step, self.eta * self.lambda)))
    }
}
