use super::decoupled_decay::{check_rate, rate_of, without_copies};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::value::{Arithmetic, Value};
use crate::numbers::{DType, compute_dtype, has_square};
use crate::rule::{
    Describe, Describer, Flow, Gradient, Kind, Parameter, Parts, Resolved, Role, Rule, Slots, State, Sums,
    range,
};

/// Hyperball: every parameter keeps the norm that it has before the first step of its rule.
///
/// The learning rate is then the length of a step relative to this norm. Source: Wen et al. 2026, "Hyperball
/// Optimization", [arXiv 2606.16899](https://arxiv.org/abs/2606.16899).
///
/// ```text
/// u   = rule(x, dx)
/// R   = ‖x‖ before the first step
/// dx' = x - R·n(x - η·R·n(u)),   n(v) = v / ‖v‖        η is the rule's eta
/// ```
///
/// The wrapper is for matrices inside a network, whose norms a weight decay otherwise keeps in balance. Give
/// embeddings, the last layer, biases and the weights of normalisations other rules. Around
/// [`Adam`](crate::Adam) `Hyperball` is the paper's AdamH, around [`Muon`](crate::Muon) MuonH. Factors of the
/// whole step, such as Muon's `scale`, have no effect, because u is normalised. A weight decay of the wrapped
/// rule is a part of u, and has no use here. A parameter of one element does not move.
///
/// ```
/// use candle_core::{DType::F32, Device, Tensor, Var};
/// use optimisers::{AdamW, Fallback, Hyperball, Muon, setup, update};
/// use std::collections::BTreeMap;
///
/// let hidden = Var::new(&[[3f32, 0.0], [0.0, 4.0]], &Device::Cpu)?;
/// let model = BTreeMap::from([
///     ("embedding.weight", Var::ones((9, 2), F32, &Device::Cpu)?),
///     ("hidden.weight", hidden.clone()),
///     ("hidden.bias", Var::zeros(2, F32, &Device::Cpu)?),
///     ("head.weight", Var::ones((9, 2), F32, &Device::Cpu)?),
/// ]);
/// let rule = Fallback::new(Hyperball::new(Muon::new(0.02)), AdamW::new(3e-4)).except(["emb*", "head*"]);
/// let mut state = setup(rule, &model)?;
/// update(&mut state, &model, &[("hidden.weight", Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?)])?;
/// assert_eq!(format!("{:.4}", hidden.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt()), "5.0000");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Norms are of one parameter (or its master), in f64, and cost two more reads of the parameter, of the
/// gradient and of the state. The state has R as the number `radius`. After new weights, by
/// [`set_masters`](crate::StateTree::set_masters) or [`refresh_masters`](crate::StateTree::refresh_masters),
/// and after new [rows](crate::StateTree::resize_rows), R is the norm that the parameter has then. On the CPU
/// an [`update`](crate::update) refuses weights that were changed without such a call; a program that masks
/// or clamps its weights after each step calls [`keep_masters`](crate::Update::keep_masters). If the norm of
/// u is below 2.6e-23 (in f64 below 1.5e-154), its square is 0 and u has no direction: the step only scales x
/// to the norm R.
///
/// # Errors
/// [`setup`](crate::setup) refuses the rules that it refuses in a [`DecoupledDecay`](crate::DecoupledDecay).
/// An [`update`](crate::update) refuses a parameter whose norm is 0 before the first step, or later, before
/// the parameter is scaled to R.
///
/// # Departures
/// The rule is the paper's. NVIDIA's Emerging-Optimizers takes one R for all parameters, and levanter
/// measures the norm again in each step. heavyball raises norms below 1e-12 to 1e-12.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Hyperball<R> {
    inner: R,
}

impl<R: Rule + Clone> Hyperball<R> {
    /// Runs `inner`, whose learning rate becomes the length of a step relative to the parameter's norm.
    pub fn new(inner: R) -> Self {
        Hyperball { inner }
    }

    fn rate(&self) -> Result<f64> {
        rate_of(&self.inner.description(), "Hyperball", "a step")
    }
}

impl<R: Rule + Clone> Describe for Hyperball<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Hyperball");
        rule.holds(&mut self.inner);
        rule.role(Role::Step);
        rule.require(|| check_rate(&self.inner.description(), "Hyperball"));
    }
}

/// The summands of ⟨x, u⟩.
#[derive(Clone, Copy)]
struct InnerProduct;

impl Arithmetic for InnerProduct {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        x * dx
    }
}

/// x - k·(x - c·u) as a sum. The fields are the factors of x and u: 1 - k and k·c.
#[derive(Clone, Copy)]
struct SphereStep(f64, f64);

impl Arithmetic for SphereStep {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        x * self.0 + dx * self.1
    }
}

impl<R: Rule + Clone> Rule for Hyperball<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.rate()?;
        let range = if compute_dtype(x.dtype()) == DType::F64 {
            range::non_negative
        } else {
            norm_of_f32
        };
        let state = State::empty()
            .with_number("radius", 0.0, range)
            .zeroed_by_new_weights("radius");
        without_copies(
            state.restarted_by_new_rows("radius").with_held(self, x)?,
            self,
            "a rule that computes the parameter from the copy cannot be inside this wrapper",
        )
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let (eta, stored_radius) = (self.rate()?, state.number("radius")?);
        let compute = compute_dtype(x.dtype());
        let Parts { numbers, held, .. } = state.parts();
        self.inner.apply(held.inner()?, x, dx)?.and_then(|step| {
            let sums = Sums::new(Slots::none(), numbers).norms().sum(InnerProduct, 0..0);
            Ok(step.try_map_with_sums(sums, move |sums| {
                let (norm_x, norm_u) = (sums[0], sums[1]);
                let radius = if stored_radius == 0.0 {
                    norm_x
                } else {
                    stored_radius
                };
                let ratio = radius / norm_x;
                let has_factor = if compute == DType::F64 {
                    ratio.is_normal()
                } else {
                    (ratio as f32).is_normal()
                };
                if norm_x > 0.0 && norm_x.is_finite() && !has_factor {
                    return Err(radius_error(radius, norm_x));
                }
                let c = if has_square(norm_u, compute) {
                    eta * radius / norm_u
                } else {
                    0.0
                };
                // ‖x - c·u‖ follows from both norms and ⟨x, u⟩. No term is negative, so nothing cancels. The
                // product is limited to ±‖x‖·‖u‖, because its sum is rounded, and can be infinite in f32.
                let product = sums[2].max(-norm_x * norm_u).min(norm_x * norm_u);
                let moved_norm =
                    ((norm_x - c * norm_u).powi(2) + 2.0 * c * (norm_x * norm_u - product)).sqrt();
                // All ranks have the same sums, so all ranks refuse or none does. If u is 0 too, x can stay
                // at 0.
                if moved_norm == 0.0 && norm_u > 0.0 {
                    return Err(zero_norm_error());
                }
                let k = if moved_norm == 0.0 {
                    1.0
                } else {
                    radius / moved_norm
                };
                Ok(Resolved::new(SphereStep(1.0 - k, k * c), [radius]))
            }))
        })
    }

    fn kind(&self) -> Kind {
        self.inner.kind().max(Kind::WholeTensor)
    }
}

/// The check of the norm of a tensor of F32, which has fewer than 2⁶⁴ elements.
fn norm_of_f32(norm: f64) -> Option<&'static str> {
    let (smallest, largest) = (f64::from(f32::from_bits(1)), f64::from(f32::MAX) * 2f64.powi(32));
    let is_norm = norm == 0.0 || (smallest..=largest).contains(&norm);
    (!is_norm).then_some("a norm of numbers of F32: 0, or from 1.4e-45 to 1.46e48")
}

/// The error for an R that was set from outside, and to which no factor of the arithmetic leads.
fn radius_error(radius: f64, norm: f64) -> Error {
    let problem = "`Hyperball` scales the norm of the parameter to the number `radius`, but the norm is";
    Error::new(ErrorKind::Argument, problem)
        .with_got(format_args!("{norm:e}"))
        .with_expected(format_args!("about `radius`, {radius:e}"))
        .with_remedy("call `refresh_masters`, which takes the norm of the parameter as it is")
}

/// The error for a parameter of norm 0, which no factor scales to R.
fn zero_norm_error() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "`Hyperball` scales the norm of the parameter to the first norm, but the norm is",
    )
    .with_got(0)
    .with_expected("a number above 0")
    .with_remedy("give a parameter that starts at 0 another rule, by `Fallback::except` or `setup_with`")
}
