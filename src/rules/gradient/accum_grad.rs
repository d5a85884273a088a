use crate::error::Result;
use crate::numbers::value::Value;
use crate::rule::{
    Arithmetic, Average, Flow, Gradient, Kind, Parameter, Rule, Slot, Slots, State, range,
    state_of_another_rule,
};

crate::hyper_parameters! {
    /// Collects the gradients of n calls and lets their mean through on the n-th.
    ///
    /// ```text
    /// calls 1 .. n-1:  acc = acc + w·dx,   the parameter stays
    /// call n:          dx' = (acc + w·dx) / W,   acc = 0
    ///
    /// average     w                                   W
    /// Mean        1                                   the calls that were counted: n
    /// Sum         1                                   1
    /// Weighted    the weight of the call's update     the sum of all weights
    /// ```
    ///
    /// Each gradient is widened to the compute type (or the master's), and divided by its own loss scale,
    /// before anything else. The sum is kept in the compute type: F32 for an f16 or bf16 model, 4 bytes per
    /// parameter. For another accumulation dtype see [`StoreAs`](crate::StoreAs): in bf16 it takes 2 bytes,
    /// and a thousandth of the sum is already lost when it is added.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AccumGrad, Descent, OptimiserChain, Status, setup, update};
    ///
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::new(1.0))), &x)?;
    /// for (gradient, status, moved) in [(1f32, Status::Accumulated, 0.0), (3.0, Status::Stepped, -2.0)] {
    ///     let outcome = update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!((outcome.status, x.to_vec1::<f32>()?), (status, vec![moved]));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Windows
    /// A call counts for every parameter that is not frozen, whether it received a gradient or not; a missing
    /// gradient adds nothing. On the n-th call every parameter moves that had a gradient since the last step.
    /// With `Mean` the sum is divided by the number of calls all the same.
    ///
    /// The [`StateTree`](crate::StateTree) counts calls, so all parameters with the same n step in the same
    /// call, whatever becomes of one of them in between. A parameter that is thawed or added within a window
    /// joins it: it steps with the others, on the mean of the calls in which it was there. What it had
    /// collected before it was frozen is part of that mean.
    ///
    /// A new n holds from the next call on. The tree counts from the last call that left no window open, and
    /// windows end with its multiples of n. After a step (if there is one n) the next window has n calls. In
    /// the middle of a window, that one may be shorter or longer, and what was collected is divided by the
    /// calls that there were.
    ///
    /// Of two in one chain the second counts the steps of the first. A weighted mean has the weight of all
    /// its gradients.
    ///
    /// A window that no call will fill, as at the end of an epoch, is ended by
    /// [`Update::release_windows`](crate::Update::release_windows).
    ///
    /// # Weights
    /// A gradient of weight 0 is not read, so it may be NaN, as a mean over no tokens is. If all gradients of
    /// a window have weight 0, no step is taken when it ends.
    ///
    /// # Numbers that are not finite
    /// A gradient that is infinite or NaN stays in the sum.
    /// [`Update::finite_only`](crate::Update::finite_only) and [`LossScaler`](crate::LossScaler) skip such
    /// calls, and the window needs one more.
    ///
    /// The sum of finite gradients can be infinite, in F16 from 65504 on. `finite_only`, or a clipping rule
    /// that skips, notices it. If the gradients of the call that ends the window are finite, no other call
    /// could end it: all windows are given up. The [outcome](crate::SkipReason::WindowsGivenUp) and a
    /// [warning](crate::Warning::WindowsGivenUp) name the parameter.
    ///
    /// # Departures
    /// Optimisers.jl divides each gradient by n in the gradient's own dtype and counts per parameter. torch
    /// leaves accumulation to the user, as a sum in the gradient's dtype.
    pub struct AccumGrad: Accumulation {
        /// n: how many calls make a step.
        n: u64 = 1 => range::at_least_one,
        /// What comes of the gradients.
        average: Average = Average::Mean => range::any,
    }
}

/// What a window has counted.
#[derive(Clone, Copy, Default)]
struct Counted {
    calls: u64,
    /// How many gradients count.
    received: u64,
    /// The sum of their weights.
    weight: u64,
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

/// `dx' = acc / total`, `acc = 0`, where the last gradient does not count.
#[derive(Clone, Copy)]
struct ReleaseCollected {
    total: f64,
}

impl Arithmetic for ReleaseCollected {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        let average = *acc / self.total;
        *acc = dx.constant(0.0);
        average
    }
}

impl Rule for AccumGrad {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let state = State::for_slots(x, &[Slot::zeros("acc")])?;
        Ok(State { counters: Vec::new(), is_one: true, ..state }
            .with_counter("calls")
            .with_counter("received")
            .with_counter("weight"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let ([_], [(_, calls), (_, received), (_, weight)]) = (&tensors[..], &mut counters[..]) else {
            return state_of_another_rule(self);
        };
        let acc = Slots(tensors);
        let (dx, ends, counted_calls) = dx.ends_window(self.n, *calls);
        let own = match self.average {
            _ if dx.is_missing() => 0,
            Average::Weighted => dx.weight(),
            Average::Mean | Average::Sum => 1,
        };
        let before = *received;
        let counted = Counted {
            calls: counted_calls,
            received: before + u64::from(own > 0),
            weight: weight.saturating_add(own),
        };
        let next = if ends { Counted::default() } else { counted };
        let dx = dx
            .set_counter(calls, next.calls)
            .set_counter(received, next.received)
            .set_counter(weight, next.weight);

        let total = match self.average {
            Average::Mean => counted.calls as f64,
            Average::Sum => 1.0,
            Average::Weighted => counted.weight as f64,
        };
        let dx = if self.average == Average::Weighted && ends { dx.weighing(counted.weight) } else { dx };
        Ok(match (ends, own, before) {
            (true, 0, 0) if dx.is_missing() => Flow::Step(dx),
            (_, 0, 0) | (false, 0, _) => Flow::Hold(dx.unread()),
            (false, ..) => Flow::Hold(dx.map(Collect { weight: own as f64 }, acc)),
            (true, 0, _) => Flow::Step(
                dx.measured_behind(|dx| dx.unread().or_zeros().release(ReleaseCollected { total }, acc)),
            ),
            (true, _, before) => {
                let release = Release { weight: own as f64, total };
                Flow::Step(dx.measured_behind(|dx| {
                    // Without gradients before this one there is no sum that could have become infinite.
                    if before > 0 { dx.release(release, acc) } else { dx.map(release, acc) }
                }))
            }
        })
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        let State { tensors, counters, .. } = state;
        let ([(_, acc)], [_, _, _]) = (&mut tensors[..], &counters[..]) else {
            return state_of_another_rule(self);
        };
        acc.fill_zero()?;
        counters.iter_mut().for_each(|(_, count)| *count = 0);
        Ok(())
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
