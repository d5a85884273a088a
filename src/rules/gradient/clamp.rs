use half::{bf16, f16};

use crate::error::Result;
use crate::numbers::DType;
use crate::numbers::value::Value;
use crate::rule::{Adjust, Arithmetic, Flow, Gradient, Kind, Parameter, Rule, Slots, State, out_of_range};

crate::hyper_parameters! {
    /// Bounds on the parameter, for the end of a chain: a step ends at a bound that it would cross.
    ///
    /// ```text
    /// dx' = x - clamp(x - dx, low, high)
    /// ```
    ///
    /// If a parameter starts within the bounds, it is exactly within them after each step: dx' is chosen so
    /// that x - dx', after rounding, does not cross a bound. If the dtype of the parameter (or its master)
    /// does not have the bound, the next number inside is used instead. If a parameter starts outside, its
    /// first step moves it to the bound, up to the rounding of its distance.
    ///
    /// Which numbers are within the bounds depends on how the parameter is stored:
    ///
    /// - Without a wrapper, and with [`StochasticRounding`](crate::StochasticRounding) or
    ///   [`SplitMaster`](crate::SplitMaster): the parameter, and a split master.
    /// - [`MixedPrecision`](crate::MixedPrecision): the master. If the bounds are numbers of the parameter's
    ///   dtype, such as 0, 0.5 or 1, the parameter is within them, too. Otherwise rounding the master can
    ///   take the parameter half a unit beyond a bound.
    /// - [`Kahan`](crate::Kahan): the rounding error of earlier steps is added to a step, and can take the
    ///   parameter a unit beyond a bound. The next step brings the parameter back.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Clamp, Descent, OptimiserChain, setup, update};
    ///
    /// let x = Var::new(&[0.1f32, 0.5, 0.9], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(0.25), Clamp::new((0.0, 1.0)))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32, 1.0, -1.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [0.0, 0.25, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A rule after `Clamp` that makes steps causes a [warning](crate::Warning::WrongOrder).
    ///
    /// # Errors
    /// An [`update`](crate::update) refuses bounds between which the parameter's dtype has no number.
    ///
    /// # Departures
    /// optax's `projections` are functions that a program calls itself. torch and Optimisers.jl have no
    /// counterpart.
    pub struct Clamp: Bound {
        /// The smallest and the largest number that the parameter can be; either can be infinite.
        bounds: (f64, f64) = (f64::NEG_INFINITY, f64::INFINITY) => in_order,
    }
}

fn in_order((low, high): (f64, f64)) -> Option<&'static str> {
    (low.is_nan() || high.is_nan() || low > high).then_some("two numbers, the first not above the second")
}

/// The smallest number of a dtype that is not below `value`.
fn round_up(value: f64, dtype: DType) -> f64 {
    // Returns the bits of the next number above. The bits of a negative number are counted down. -0 is
    // followed by the smallest positive number.
    let bits_above = |bits: u16| match bits {
        0x8000 => 1,
        bits if bits & 0x8000 == 0 => bits + 1,
        bits => bits - 1,
    };
    let nearest_or_above = |nearest: f64, above: f64| if nearest >= value { nearest } else { above };
    match dtype {
        DType::F16 => {
            let nearest = f16::from_f64(value);
            nearest_or_above(
                nearest.to_f64(),
                f16::from_bits(bits_above(nearest.to_bits())).to_f64(),
            )
        }
        DType::BF16 => {
            let nearest = bf16::from_f64(value);
            nearest_or_above(
                nearest.to_f64(),
                bf16::from_bits(bits_above(nearest.to_bits())).to_f64(),
            )
        }
        DType::F32 => {
            let nearest = value as f32;
            nearest_or_above(nearest.into(), nearest.next_up().into())
        }
        _ => value,
    }
}

impl Clamp {
    /// The bounds, moved inside to numbers of a dtype. Refuses bounds between which the dtype has no number.
    fn bounds_in(&self, dtype: DType) -> Result<(f64, f64)> {
        let (low, high) = (round_up(self.bounds.0, dtype), -round_up(-self.bounds.1, dtype));
        if low <= high && low < f64::INFINITY && high > f64::NEG_INFINITY {
            return Ok((low, high));
        }
        let expected =
            format!("bounds with a number of {dtype:?} between them, in which the parameter is stored");
        Err(out_of_range(&self.name(), "bounds", self.bounds, expected))
    }
}

#[derive(Clone, Copy)]
struct ClampStep {
    low: f64,
    high: f64,
}

/// The dx for which x - dx, after rounding, is `bound` or the nearest possible number inside. `inside` is 1
/// if numbers above `bound` are inside, and -1 if numbers below `bound` are.
///
/// 1. Try x - bound, which is itself rounded and can be too far.
/// 2. Try one or two units in the last place of f64 less. In f32 this changes nothing.
/// 3. Otherwise take one or two units in the last place of f32 less.
#[inline(always)]
fn step_to_bound<V: Value>(x: V, bound: V, inside: V) -> V {
    let distance = x - bound;
    let lands_inside = |distance: V| ((x - distance - bound) * inside).ge(x.constant(0.0));
    let shortened = |units: f64| distance - distance.abs() * units * inside;
    let [fine, coarse] = [f64::EPSILON, f64::from(f32::EPSILON)].map(shortened);
    let nudged = V::select(lands_inside(fine), fine, coarse);
    V::select(lands_inside(distance), distance, nudged)
}

impl Arithmetic for ClampStep {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        let (low, high, next) = (x.constant(self.low), x.constant(self.high), x - dx);
        // A step crosses one bound at most, so one computation serves both bounds. NaN compares as false and
        // stays.
        let is_low = next.lt(low);
        let by_bound = |for_low: V, for_high: V| V::select(is_low, for_low, for_high);
        let limited = step_to_bound(
            x,
            by_bound(low, high),
            by_bound(x.constant(1.0), x.constant(-1.0)),
        );
        by_bound(limited, V::select(next.gt(high), limited, dx))
    }
}

impl Rule for Clamp {
    fn apply<'a>(&'a self, _state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let (low, high) = self.bounds_in(x.dtype())?;
        Ok(Flow::Step(dx.map(ClampStep { low, high }, Slots::none())))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::value::Lane;

    type Rounding = fn(f64) -> f64;

    const ROUNDINGS: [(DType, Rounding); 3] = [
        (DType::F16, |x| f16::from_f64(x).to_f64()),
        (DType::BF16, |x| bf16::from_f64(x).to_f64()),
        (DType::F32, |x| f64::from(x as f32)),
    ];

    #[test]
    fn a_bound_is_the_next_number_inside() {
        for value in [
            0.1,
            -0.1,
            1.0,
            0.0,
            -0.0,
            1e-30,
            -1e-30,
            1e-320,
            65519.9,
            3e38,
            f64::NEG_INFINITY,
        ] {
            for (dtype, round) in ROUNDINGS {
                let bound = round_up(value, dtype);
                assert!(
                    bound >= value && round(bound) == bound,
                    "{value:e} in {dtype:?}: {bound:e}"
                );
                let between = round(value / 2.0 + bound / 2.0);
                assert!(
                    between <= value || between >= bound,
                    "{value:e} in {dtype:?}: {between:e} before {bound:e}"
                );
            }
        }
    }

    /// Differences of numbers of every magnitude within the bounds, most of which are rounded.
    #[test]
    fn what_is_subtracted_leaves_a_number_within() {
        let clamped = |x: f32, (low, high): (f32, f32), dx: f32| {
            let step = ClampStep {
                low: low.into(),
                high: high.into(),
            };
            x - step.step(Lane(x), Lane(dx), &mut []).0
        };
        let magnitudes = (-40..=30)
            .step_by(5)
            .flat_map(|power| [1.1, 1.7].map(|digits| digits * 2f32.powi(power)));
        let numbers: Vec<f32> = magnitudes.flat_map(|x| [x, -x]).chain([0.0]).collect();
        for &low in &numbers {
            for &high in numbers.iter().filter(|&&high| high >= low) {
                for &x in numbers.iter().filter(|x| (low..=high).contains(x)) {
                    for dx in [f32::INFINITY, 3e30, -3e30, x - low, x - high, 0.3] {
                        let end = clamped(x, (low, high), dx);
                        assert!(
                            (low..=high).contains(&end),
                            "{x:e} - {dx:e} in {low:e}..{high:e}: {end:e}"
                        );
                    }
                }
            }
        }
        assert!(clamped(1.0, (0.0, 2.0), f32::NAN).is_nan());
    }
}
