//! Accumulation of gradients over a window: the n calls that lead to one step.
//!
//! The tree counts calls, so that all leaves (parameters with their state) end their windows in the same
//! call. A leaf's own counters only decide whether the leaf has collected something, and the divisor of its
//! sum. Three facts decide what a call does:
//!
//! ```text
//! window  gradient   collected
//! ends    counts     before     what happens
//! no      no         any        the call is held, the gradient is not read
//! no      yes        any        the call is held, acc = acc + w·dx
//! yes     missing    no         a step without a gradient
//! yes     weight 0   no         the call is held, the gradient is not read
//! yes     no         yes        a step by acc / W
//! yes     yes        any        a step by (acc + w·dx) / W
//! ```

use crate::error::Result;
use crate::numbers::counts;
use crate::numbers::value::Value;
use crate::rule::{
    Arithmetic, Average, Flow, Gradient, Kind, Parameter, Parts, Rule, Slot, State, range,
    state_of_another_rule,
};

crate::hyper_parameters! {
    /// Collects the gradients of n calls, and lets their mean through in the n-th call.
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
    /// Each gradient is first widened to the compute type (or the master's) and divided by its own loss
    /// scale. The sum is in the compute type: F32 for an f16 or bf16 model, 4 bytes per parameter.
    /// [`StoreAs`](crate::StoreAs) keeps the sum in another dtype. In bf16 the sum takes 2 bytes, but loses a
    /// gradient that is a thousandth of the sum.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AccumGrad, Descent, OptimiserChain, Status, setup, update};
    ///
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::new(1.0))), &x)?;
    /// for (gradient, status, expected) in [(1f32, Status::Accumulated, 0.0), (3.0, Status::Stepped, -2.0)] {
    ///     let outcome = update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!((outcome.status, x.to_vec1::<f32>()?), (status, vec![expected]));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Windows
    /// A window is the n calls of one step. A call counts for every parameter that is not frozen, with or
    /// without a gradient. A missing gradient adds nothing, but `Mean` still divides by the number of calls.
    /// In the n-th call every parameter moves that had a gradient since the last step.
    ///
    /// The [`StateTree`](crate::StateTree) counts calls, so all parameters with the same n step in the same
    /// call. A parameter that is thawed or added within a window steps with the others, on the mean of the
    /// calls in which it took part. The calls before the parameter was frozen count, too.
    ///
    /// A new n holds from the next call on. The tree counts from the last call that left no window open, and
    /// windows end at multiples of n. If all parameters have one n, and n is changed after a step, the next
    /// window has n calls. If n is changed within a window, this window can be shorter or longer (after 3
    /// calls, a new n = 3 ends the window at the sixth call); the sum is divided by the number of calls in
    /// the window. To begin the new n with a new window, call
    /// [`Update::release_windows`](crate::Update::release_windows) before the change.
    ///
    /// In a chain with two of these rules, the second counts the steps of the first. The weight of a weighted
    /// mean that the first rule returns is the sum of the weights of its gradients.
    ///
    /// [`Update::release_windows`](crate::Update::release_windows) ends a window that no call will fill, as
    /// at the end of an epoch.
    ///
    /// # Weights
    /// With `Average::Weighted` a gradient of weight 0 is not read, so the gradient may be NaN, as a mean
    /// over no tokens is. If all gradients of a window have weight 0, the window ends without a step. Over
    /// ranks, a call in which all weights are 0 needs
    /// [`Update::allow_no_gradients`](crate::Update::allow_no_gradients).
    ///
    /// # Numbers that are not finite
    /// Without a check, a gradient that is infinite or NaN stays in the sum.
    /// [`Update::finite_only`](crate::Update::finite_only) and [`LossScaler`](crate::LossScaler) skip such a
    /// call, which then does not count for the window.
    ///
    /// The sum of finite gradients can be infinite, in F16 from 65504 on. `finite_only`, or a clipping rule
    /// that skips, detects it. If the sum is infinite although the gradients of the call that ends the window
    /// are finite, no later call could end the window either. Therefore all windows are given up. The
    /// [outcome](crate::SkipReason::WindowsGivenUp) and a [warning](crate::Warning::WindowsGivenUp) name the
    /// parameter.
    ///
    /// # Departures
    /// Optimisers.jl divides each gradient by n in the gradient's own dtype and counts per parameter. torch
    /// leaves accumulation to the user, as a sum in the gradient's dtype.
    pub struct AccumGrad: Accumulation {
        /// n: the number of calls for one step.
        n: u64 = 1 => range::at_least_one,
        /// How gradients are combined: mean, sum or weighted mean. Change `average` only between windows,
        /// because the sum of an open window has the weights of the old value.
        average: Average = Average::Mean => range::any,
    }
}

/// The counts of one window, for one leaf.
#[derive(Clone, Copy, Default)]
struct WindowCounts {
    calls: u64,
    /// The number of gradients in the sum.
    received: u64,
    /// The sum of the weights of these gradients.
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

/// `dx' = acc / total`, `acc = 0`, if the last gradient does not count.
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
        Ok(State {
            counters: Vec::new(),
            is_taken_whole: true,
            ..state
        }
        .with_counter("calls")
        .with_counter("received")
        .with_counter("weight"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts {
            slots: acc, counters, ..
        } = state.parts();
        let [calls, received, weight] = counters.array()?;
        let (dx, window_ends, counted_calls) = dx.count_in_window(self.n, *calls);
        let gradient_weight = match self.average {
            _ if dx.is_missing() => 0,
            Average::Weighted => dx.weight(),
            Average::Mean | Average::Sum => 1,
        };
        let received_before = *received;
        let next_weight = weight.saturating_add(gradient_weight);
        counts::check("the sum of the weights of its window is", next_weight).map_err(|error| {
            error.with_remedy(
                "set smaller weights with `Update::weight`, or end the window with `Update::release_windows`",
            )
        })?;
        let window = WindowCounts {
            calls: counted_calls,
            received: counts::add(received_before, u64::from(gradient_weight > 0)),
            weight: next_weight,
        };
        let next = if window_ends {
            WindowCounts::default()
        } else {
            window
        };
        let dx = dx
            .set_counter(calls, next.calls)
            .set_counter(received, next.received)
            .set_counter(weight, next.weight);

        let total = match self.average {
            Average::Mean => window.calls as f64,
            Average::Sum => 1.0,
            Average::Weighted => window.weight as f64,
        };
        // A second window in the chain weighs this mean by the weights of all its gradients.
        let dx = if self.average == Average::Weighted && window_ends {
            dx.with_weight(window.weight)
        } else {
            dx
        };
        // The table in the head of this file has these cases.
        Ok(match (window_ends, gradient_weight, received_before) {
            // The call is not held, because this parameter is reported as one without a gradient, while other
            // parameters step.
            (true, 0, 0) if dx.is_missing() => Flow::Step(dx),
            (_, 0, 0) | (false, 0, _) => Flow::Hold(dx.discard()),
            (false, ..) => Flow::Hold(dx.map(
                Collect {
                    weight: gradient_weight as f64,
                },
                acc,
            )),
            // `measure_after` moves the reported norm of the gradient to the mean, on which the step is
            // made.
            (true, 0, _) => Flow::Step(
                dx.measure_after(|dx| dx.discard().or_zeros().release(ReleaseCollected { total }, acc)),
            ),
            (true, ..) => {
                let release = Release {
                    weight: gradient_weight as f64,
                    total,
                };
                Flow::Step(dx.measure_after(|dx| {
                    // If nothing was collected, no sum can be infinite, and the check of this gradient is
                    // enough.
                    if received_before > 0 {
                        dx.release(release, acc)
                    } else {
                        dx.map(release, acc)
                    }
                }))
            }
        })
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        let State {
            tensors, counters, ..
        } = state;
        let ([(_, acc)], [_, _, _]) = (&mut tensors[..], &counters[..]) else {
            return state_of_another_rule(self);
        };
        acc.fill_zero()?;
        counters.iter_mut().for_each(|(_, count)| *count = 0);
        Ok(())
    }
}
