use crate::engine::{Buffer, Epilogue, Job, OffloadTarget, Operand};
use crate::model::lent::Lend;
use crate::rule::{Flow, Windows};
use crate::tensors::Tensor;

/// What an optimiser wants done with a leaf.
#[doc(hidden)]
#[allow(missing_debug_implementations)]
pub struct Planned<'a> {
    pub(crate) job: Job<'a>,
    pub(crate) progress: Progress,
    pub(crate) windows: Windows,
}

/// How far a leaf comes in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Applied,
    Accumulated,
    /// Without a gradient in a call in which others step.
    WithoutGradient,
    /// The same, in a window that goes on and may still bring a gradient.
    Waiting,
}

impl<'a> Planned<'a> {
    /// The plan for a rule's result. `x` is what the rule saw, `epilogue` what happens if a step is made.
    pub(crate) fn new(
        flow: Flow<'a>,
        path: &'a str,
        x: Operand<'a>,
        epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    ) -> Self {
        let (gradient, progress) = match flow {
            Flow::Step(gradient) if gradient.is_missing() => (gradient, Progress::WithoutGradient),
            Flow::Hold(gradient) if gradient.is_missing() => (gradient, Progress::Waiting),
            Flow::Step(gradient) => (gradient.measured_at_the_end(), Progress::Applied),
            Flow::Hold(gradient) => (gradient.unmeasured(), Progress::Accumulated),
        };
        let epilogue = if progress == Progress::Applied { epilogue } else { Epilogue::StateOnly };
        Planned { windows: gradient.windows(), job: gradient.into_job(path, x, epilogue), progress }
    }

    /// Whether anything changes. Without a gradient only counters of windows can.
    pub(crate) fn moves(&self) -> bool {
        self.progress != Progress::WithoutGradient || !self.job.counters.is_empty()
    }

    /// The plan for an x whose lower bits are in the state.
    pub(crate) fn with_low_bits(mut self, low_bits: &'a mut Buffer) -> Self {
        self.job.low_bits = Some(low_bits);
        self
    }

    /// The plan for gradients on the device of `parameter`, which becomes `staging` after the step. The x of
    /// the plan is `staging` itself, or what is rounded to it.
    pub(crate) fn offloaded(mut self, staging: &'a Tensor, parameter: &'a dyn Lend) -> Self {
        if let Epilogue::Master(rounded) = &mut self.job.epilogue {
            *rounded = staging;
        }
        self.job.offloaded = Some(OffloadTarget::new(staging, parameter));
        self
    }

    /// The plan with a counter of steps that are applied.
    pub(crate) fn counting(mut self, counter: &'a mut u64) -> Self {
        if self.progress == Progress::Applied {
            let next = *counter + 1;
            self.job.counters.push((counter, next));
        }
        self
    }
}
