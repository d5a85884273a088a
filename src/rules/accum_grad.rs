use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Arithmetic, Average, Flow, Gradient, Kind, Rule, Slot, State, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Collects the gradients of n calls and lets their mean through on the n-th.
    ///
    /// ```text
    /// calls 1 .. n-1:  acc = acc + w·dx,   the parameter stays
    /// call n:          dx' = (acc + w·dx) / W,   acc = 0
    ///
    /// average     w                                   W
    /// Mean        1                                   n
    /// Sum         1                                   1
    /// Weighted    the weight of the call's update     the sum of all weights
    /// ```
    ///
    /// Each gradient is widened to the compute type (or the master's), and divided by its own loss scale, before anything else. The sum is kept
    /// in the compute type: F32 for an f16 or bf16 model, 4 bytes per parameter. For another accumulation dtype see
    /// [`StoreAs`](crate::StoreAs): in bf16 it takes 2 bytes, and a thousandth of the sum is already lost when it is added.
    ///
    /// A call counts for every parameter that is not frozen, whether it received a gradient or not; a missing gradient adds nothing. On
    /// the n-th call a parameter with at least one gradient since the last step moves. With `Mean` the sum is divided by n all the same.
    ///
    /// A gradient that is infinite or NaN stays in the sum. [`Update::finite_only`](crate::Update::finite_only) and
    /// [`LossScaler`](crate::LossScaler) skip such calls, and the window needs one more.
    ///
    /// # Departures
    /// Optimisers.jl divides each gradient by n in the gradient's own dtype and counts per parameter. torch leaves accumulation to the
    /// user, as a sum in the gradient's dtype.
    pub struct AccumGrad {
        /// How many calls make a step.
        n: u64 = 1 => range::at_least_one,
        /// What comes of the gradients.
        average: Average = Average::Mean => range::any,
    }
}

/// `acc += w·dx`.
#[derive(Clone, Copy)]
struct Collect {
    weight: f64,
}

impl Arithmetic for Collect {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        *acc = *acc + dx * self.weight;
        dx
    }
}

/// `dx' = (acc + w·dx) / total`, `acc = 0`.
#[derive(Clone, Copy)]
struct Release {
    weight: f64,
    total: f64,
}

impl Arithmetic for Release {
    type Slots<T> = [T; 1];
    const KEEPS_NON_FINITE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        let average = (*acc + dx * self.weight) / self.total;
        *acc = dx.constant(0.0);
        average
    }
}

/// The counters, with the values they have.
struct Window<'a> {
    calls: &'a mut u64,
    received: &'a mut u64,
    /// The sum of the weights of the gradients that were received.
    weight: &'a mut u64,
}

impl Rule for AccumGrad {
    fn init(&self, x: &Tensor) -> Result<State> {
        let state = State::for_slots(x, &[Slot::zeros("acc")])?;
        Ok(State { counters: Vec::new(), ..state }.with_counter("calls").with_counter("received").with_counter("weight"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let [(_, calls), (_, received), (_, weight)] = &mut counters[..] else {
            return Ok(Flow::Step(dx));
        };
        let window = Window { calls, received, weight };
        let last = *window.calls + 1 >= self.n;
        let own_weight = if self.average == Average::Weighted { dx.weight() } else { 1 };
        let (received, weight) = match dx.is_missing() {
            true => (*window.received, *window.weight),
            false => (*window.received + 1, window.weight.saturating_add(own_weight)),
        };
        let total = match self.average {
            Average::Mean => self.n,
            Average::Sum => 1,
            // Nothing was received that counts.
            Average::Weighted => weight.max(1),
        };
        let next = if last { [0; 3] } else { [*window.calls + 1, received, weight] };
        let dx = dx.count(window.calls, next[0]).count(window.received, next[1]).count(window.weight, next[2]);
        let (weight, total) = (own_weight as f64, total as f64);
        Ok(match (last, received) {
            (false, _) => Flow::Hold(dx.map(Collect { weight }, tensors)),
            (true, 0) => Flow::Step(dx),
            (true, _) => Flow::Step(dx.or_zeros().map(Release { weight, total }, tensors)),
        })
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        for (_, counter) in &mut state.counters {
            *counter = 0;
        }
        state.tensors.iter_mut().try_for_each(|(_, acc)| Ok(acc.fill_zero()?))
    }
}
