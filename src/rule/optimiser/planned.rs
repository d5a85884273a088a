//! The plan that an optimiser makes for one leaf in one call.

use crate::engine::{Buffer, Epilogue, Job, Operand};
use crate::model::lent::Lend;
use crate::rule::{Flow, Windows};

/// The planned work on a leaf.
pub(crate) struct Planned<'a> {
    pub(crate) job: Job<'a>,
    pub(crate) progress: Progress,
    pub(crate) windows: Windows,
}

/// What one call does to a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The leaf makes a step.
    Applied,
    /// The leaf collects a gradient, and the parameter stays.
    Accumulated,
    /// The leaf makes no step, because there is no gradient.
    WithoutGradient,
    /// There is no gradient yet, but the leaf's window goes on and may still get one.
    Waiting,
}

impl<'a> Planned<'a> {
    /// Makes the plan from the result of a rule, which saw `x`. `epilogue` is for a leaf that makes a step.
    pub(crate) fn new(
        flow: Flow<'a>,
        x: Operand<'a>,
        epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    ) -> Self {
        let (gradient, progress) = match flow {
            Flow::Step(gradient) if gradient.is_missing() => (gradient, Progress::WithoutGradient),
            Flow::Hold(gradient) if gradient.is_missing() => (gradient, Progress::Waiting),
            Flow::Step(gradient) => (gradient.measured_at_the_end(), Progress::Applied),
            // Not measured, because a window is measured as a whole when it ends.
            Flow::Hold(gradient) => (gradient.unmeasured(), Progress::Accumulated),
        };
        let epilogue = if progress == Progress::Applied { epilogue } else { Epilogue::StateOnly };
        Planned { windows: gradient.windows(), job: gradient.into_job(x, epilogue), progress }
    }

    /// Whether anything changes. If a step has no gradient, only counters can.
    pub(crate) fn moves(&self) -> bool {
        self.progress != Progress::WithoutGradient || !self.job.counters.is_empty()
    }
}
