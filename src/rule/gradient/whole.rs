//! Functions of whole tensors, which rules write with candle's operations.

use candle_core::Tensor;

use super::Gradient;
use crate::engine::{Step, StepSlots, TensorStep};
use crate::error::Result;
use crate::rule::{Slots, State};

impl<'a> Gradient<'a> {
    /// Appends a function of the whole tensor, for rules that are not elementwise.
    ///
    /// The function receives the step's number (1 for the first), the parameter (its master, if it has one),
    /// the gradient and the state's tensors, all in the compute dtype. The function returns the new gradient,
    /// and may replace the state's tensors by tensors of equal shapes, which are rounded to the dtypes of the
    /// state. The function runs before anything is written, and only if there is a gradient and the parameter
    /// has elements. The state's first counter counts these steps; without a counter the number is always 1.
    ///
    /// The results of the function are kept until everything has been computed: in F32 4 bytes per element of
    /// the model. If the function refuses nothing, [`Gradient::with_tensors_late`] needs less memory.
    pub fn with_tensors<F>(self, state: &'a mut State, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.append_counted(state, true, function)
    }

    /// [`Gradient::with_tensors`] for a function that fails only if a device fails.
    ///
    /// The function runs while parameters are written, a few parameters at a time, so its results take little
    /// memory. If the function fails nevertheless, the parameters before this parameter have moved. If a
    /// later rule takes a norm or sums, or has a function by `with_tensors`, this function runs before
    /// anything is written.
    pub fn with_tensors_late<F>(self, state: &'a mut State, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.append_counted(state, false, function)
    }

    /// Appends a function of the whole tensor, and counts the step with the state's first counter.
    fn append_counted<F>(self, state: &'a mut State, may_refuse: bool, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        let State {
            tensors, counters, ..
        } = state;
        let (gradient, step) = match counters.first_mut() {
            Some((_, t)) => self.count_step(t),
            None => (self, 1),
        };
        gradient.append_function(tensors, may_refuse, move |x, dx, slots| {
            function(step, x, dx, slots)
        })
    }

    /// [`Gradient::with_tensors`] on these state tensors, without the number of the step.
    ///
    /// For a wrapper, which cannot lend its whole state, because the inner rule has borrowed a part.
    pub fn map_tensors<F>(self, Slots(slots): Slots<'a>, function: F) -> Self
    where
        F: FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.append_function(slots, true, function)
    }

    /// Appends a function of the whole tensor, and counts no step.
    pub(crate) fn append_function<F>(mut self, slots: StepSlots<'a>, may_refuse: bool, function: F) -> Self
    where
        F: FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        if !self.missing {
            self.steps.push(Step::Tensor(Box::new(TensorStep {
                function: Box::new(function),
                slots,
                may_refuse,
            })));
        }
        self
    }
}
