use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Arithmetic, Flow, Gradient, Rule, Slot, State, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Collects the gradients of n calls and lets their mean through on the n-th.
    ///
    /// ```text
    /// calls 1 .. n-1:  acc = acc + dx,   the parameter stays
    /// call n:          dx' = (acc + dx) / n,   acc = 0
    /// ```
    ///
    /// Each gradient is widened to the compute type (or the master's) before anything else, and the sum is kept there: the accumulation
    /// dtype is F32 for an f16 or bf16 model.
    ///
    /// A call counts for every parameter that is not frozen, whether it received a gradient or not; a missing gradient adds nothing. On
    /// the n-th call a parameter with at least one gradient since the last step moves.
    ///
    /// A gradient that is infinite or NaN stays in the sum. To leave such calls out of the window put
    /// `ClipGlobalNorm { omega: f64::INFINITY, non_finite: NonFinite::Skip }` before this rule: the call is skipped, and the window needs one
    /// more.
    ///
    /// # Departures
    /// Optimisers.jl divides each gradient by n in the gradient's own dtype and counts per parameter. torch leaves accumulation to the
    /// user, as a sum in the gradient's dtype.
    pub struct AccumGrad {
        /// How many calls make a step.
        n: u64 = 1 => range::at_least_one,
    }
}

/// `acc += dx`.
#[derive(Clone, Copy)]
struct Collect;

impl Arithmetic for Collect {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        *acc = *acc + dx;
        dx
    }
}

/// `dx' = (acc + dx) / n`, `acc = 0`.
#[derive(Clone, Copy)]
struct Release {
    n: f64,
}

impl Arithmetic for Release {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        let mean = (*acc + dx) / self.n;
        *acc = dx.constant(0.0);
        mean
    }
}

impl Rule for AccumGrad {
    fn init(&self, x: &Tensor) -> Result<State> {
        let state = State::for_slots(x, &[Slot::zeros("acc")])?;
        Ok(State { counters: Vec::new(), ..state }.with_counter("calls").with_counter("received"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let [(_, calls), (_, received)] = &mut counters[..] else {
            return Ok(Flow::Step(dx));
        };
        let last = *calls + 1 >= self.n;
        let total = *received + u64::from(!dx.is_missing());
        let next_calls = if last { 0 } else { *calls + 1 };
        let dx = dx.count(calls, next_calls).count(received, if last { 0 } else { total });
        Ok(match (last, total) {
            (false, _) => Flow::Hold(dx.map(Box::new(Collect), tensors)),
            (true, 0) => Flow::Step(dx),
            (true, _) => Flow::Step(dx.or_zeros().map(Box::new(Release { n: self.n as f64 }), tensors)),
        })
    }
}
