use super::window_sum::{WindowSum, slots};
use crate::error::Result;
use crate::rule::{
    Average, Flow, Gradient, Kind, Parameter, Rule, State, Summation, range, state_of_another_rule,
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
    /// # Order of the sum
    /// With [`Summation::Pairwise`] neighbours are added first, then pairs of neighbours, and so on, as those
    /// of [ranks](crate::Setup::over) are:
    ///
    /// ```text
    /// 4 gradients:  (w₁·dx₁ + w₂·dx₂) + (w₃·dx₃ + w₄·dx₄)
    /// 7 gradients:  ((1 + 2) + (3 + 4)) + ((5 + 6) + 7)
    /// ```
    ///
    /// So the mean of n micro-batches has the same bits on 1 rank with windows of n, on 2 with n / 2, ... on
    /// n with 1, if
    ///
    /// - n is a power of two, and each micro-batch has a gradient;
    /// - rank r of N takes the micro-batches r, N + r, 2·N + r, ...;
    /// - no sum is too large or too small for a normal number.
    ///
    /// The error of such a sum grows with log₂ n, not with n. It takes ⌊log₂ n⌋ tensors, at least one: `acc`,
    /// `acc1`, `acc2`, ... A call reads and writes one or two of them on average, as two sums of equal length
    /// become one.
    ///
    /// Gradients that are missing or have weight 0 are passed over: the next one takes their place. If a new
    /// n makes a window too long for its tensors, what comes is added to the last sum. An n that takes
    /// another number of tensors, and another order, are set by [`replace`](crate::Selection::replace), which
    /// then begins a new window.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AccumGrad, Average, Descent, OptimiserChain, Summation, setup, update};
    ///
    /// for (order, moved) in [(Summation::InOrder, -16_777_216f32), (Summation::Pairwise, -16_777_218.0)] {
    ///     let x = Var::new(&[0f32], &Device::Cpu)?;
    ///     let collect = AccumGrad { average: Average::Sum, order, ..AccumGrad::new(4) };
    ///     let mut state = setup(OptimiserChain::new((collect, Descent::new(1.0))), &x)?;
    ///     for gradient in [16_777_215f32, 1.0, 1.0, 1.0] {
    ///         update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     }
    ///     assert_eq!(x.to_vec1::<f32>()?, [moved]);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
        /// In which order they are added.
        order: Summation = Summation::InOrder => range::any,
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

impl Rule for AccumGrad {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let state = State::for_slots(x, &slots(self.order, self.n))?;
        Ok(State { counters: Vec::new(), is_one: true, ..state }
            .with_counter("calls")
            .with_counter("received")
            .with_counter("weight"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let [(_, calls), (_, received), (_, weight)] = &mut counters[..] else {
            return state_of_another_rule(self);
        };
        let Some(sum) = WindowSum::of(*received, self.order, self.n, tensors) else {
            return state_of_another_rule(self);
        };
        let (dx, ends) = dx.ends_window(self.n);
        let own = match self.average {
            _ if dx.is_missing() => 0,
            Average::Weighted => dx.weight(),
            Average::Mean | Average::Sum => 1,
        };
        let before = *received;
        let counted = Counted {
            calls: *calls + 1,
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
            (false, ..) => Flow::Hold(sum.collect(dx, own as f64)),
            (true, 0, _) => {
                Flow::Step(dx.measured_behind(|dx| sum.release(dx.unread().or_zeros(), None, total)))
            }
            (true, ..) => Flow::Step(dx.measured_behind(|dx| sum.release(dx, Some(own as f64), total))),
        })
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        let [calls, received, weight] = &mut state.counters[..] else { return state_of_another_rule(self) };
        if WindowSum::of(received.1, self.order, self.n, &mut state.tensors).is_none() {
            return state_of_another_rule(self);
        }
        state.tensors.iter_mut().try_for_each(|(_, sum)| sum.fill_zero())?;
        [calls, received, weight].into_iter().for_each(|(_, count)| *count = 0);
        Ok(())
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
