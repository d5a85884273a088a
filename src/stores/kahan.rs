use crate::rule::{Describe, Describer, IntoOptimiser, Optimiser, Rule, Store};

/// Trains f16 and bf16 parameters without a master, by Kahan's summation.
///
/// The rounding error of a step is kept in a second number of the parameter's dtype, and added to the next
/// step.
///
/// ```text
/// y = c - rule(x, dx)
/// x' = x + y, rounded
/// c = y - (x' - x), rounded          the arithmetic is in f32
/// ```
///
/// Parameter and compensation together carry about twice the digits of the dtype. Source: Zamirai et al.
/// 2020, "Revisiting BFloat16 Training", [arXiv 2010.06192](https://arxiv.org/abs/2010.06192). Parameters in
/// F32 or F64 are stored as without this wrapper. After new weights call
/// [`refresh_masters`](crate::StateTree::refresh_masters), which drops the rounding errors of the old
/// weights. Until then an [`update`](crate::update) on the CPU refuses the new weights. A program that masks
/// or clamps its weights after each step calls [`keep_masters`](crate::Update::keep_masters).
///
/// State per parameter: `compensation` (2 bytes) and the rule's state, in f32 unless
/// [`StoreAs`](crate::StoreAs) changes the dtype.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{Descent, Kahan, setup, update};
///
/// let x = Var::ones(1, BF16, &Device::Cpu)?;
/// let mut state = setup(Kahan::new(Descent::new(1e-4)), &x)?;
/// for _ in 0..1000 {
///     // Each step alone is lost in bf16.
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// }
/// assert!((x.to_dtype(F32)?.to_vec1::<f32>()?[0] - 0.9).abs() < 0.004);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Kahan<R> {
    store: Store,
    inner: R,
}

impl<R: Rule + Clone> Kahan<R> {
    /// Runs `inner`, and keeps the rounding errors of its steps.
    pub fn new(inner: R) -> Self {
        Kahan {
            store: Store::Compensated,
            inner,
        }
    }
}

impl<R: Rule + Clone> Describe for Kahan<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        self.store.describe(&mut self.inner, rule);
    }
}

impl<R: Rule + Clone> IntoOptimiser for Kahan<R> {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::with_store(self.store, self.inner)
    }
}
