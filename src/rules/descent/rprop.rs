use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Rprop: a step size for each element, which depends only on the signs of the gradients.
    ///
    /// Rprop is made for gradients of the whole data set. Source: Riedmiller and Braun 1993, "A direct
    /// adaptive method for faster backpropagation learning: the RPROP algorithm", without
    /// weight-backtracking.
    ///
    /// ```text
    /// s·dx > 0:   f = ℓ₂,   s = sign(dx)
    /// s·dx < 0:   f = ℓ₁,   s = 0
    /// s·dx = 0:   f = 1,    s = sign(dx)
    /// step = clamp(f·step, γ₁, γ₂),   dx' = step·s
    /// ```
    ///
    /// There is no learning rate. A [schedule](crate::StateTree::schedule) of γ₂ (`gamma2`) limits the steps.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Rprop, setup, update};
    ///
    /// // Only the signs count: steps of 0.5 and 1, no step where the sign changes, then a step of 0.5.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Rprop { ell: (0.5, 2.0), ..Rprop::new(0.5) }, &x)?;
    /// for gradient in [[8f32], [0.1], [-3.0], [-7.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule equals torch's `Rprop`, where `lr` is the first step size, 0.01 by default. Optimisers.jl,
    /// where η is the first step size, limits only step sizes that change, and keeps the gradient instead of
    /// its sign, so the signs of two gradients are lost if their product underflows.
    pub struct Rprop: AdaptiveStep {
        /// The first step size of every element. Only [`setup`](crate::setup) reads `first_step_size`.
        first_step_size: f64 = 1e-3 => range::non_negative,
        /// ℓ₁, ℓ₂: the factors of a step size if the sign changes, and if the sign stays.
        ell: (f64, f64) = (0.5, 1.2) => shrink_and_grow,
        /// γ₁, γ₂: the smallest and the largest step size.
        gamma: (f64, f64) = (1e-6, 50.0) => in_order,
    }
}

fn shrink_and_grow((shrink, grow): (f64, f64)) -> Option<&'static str> {
    let fits = shrink > 0.0 && shrink <= 1.0 && grow >= 1.0 && grow.is_finite();
    (!fits).then_some("a number in (0, 1] and a finite one of 1 or more")
}

fn in_order((smallest, largest): (f64, f64)) -> Option<&'static str> {
    let fits = smallest >= 0.0 && smallest <= largest && largest.is_finite();
    (!fits).then_some("two finite numbers of 0 or more, the smaller first")
}

impl Elementwise for Rprop {
    type Scalars = ((f64, f64), (f64, f64));
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [
            Slot::zeros("sign"),
            Slot::full("step_size", self.first_step_size).non_negative(),
        ]
    }

    fn scalars(&self, _t: u64) -> Self::Scalars {
        (self.ell, self.gamma)
    }

    #[inline(always)]
    fn step<V: Value>((ell, gamma): Self::Scalars, _x: V, dx: V, [sign, step]: &mut [V; 2]) -> V {
        let zero = dx.constant(0.0);
        let agreement = *sign * dx;
        let changed = V::select(
            agreement.gt(zero),
            *step * ell.1,
            V::select(agreement.lt(zero), *step * ell.0, *step),
        );
        *step = changed.clamp(gamma.0, gamma.1);
        *sign = V::select(agreement.lt(zero), zero, dx.sign());
        *step * *sign
    }
}
