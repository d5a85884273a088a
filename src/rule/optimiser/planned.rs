use crate::engine::{Buffer, Epilogue, Job, Operand};
use crate::model::lent::Lend;
use crate::rule::{Flow, Windows};

/// What an optimiser wants done with a leaf.
pub(crate) struct Planned<'a> {
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
        Planned { windows: gradient.windows(), job: gradient.into_job(x, epilogue), progress }
    }

    /// Whether anything changes. Without a gradient only counters of windows can.
    pub(crate) fn moves(&self) -> bool {
        self.progress != Progress::WithoutGradient || !self.job.counters.is_empty()
    }
}
