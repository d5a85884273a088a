//! What one leaf has to do in one step, before anything is written: data for the rooms that do it.

mod check;
mod job;
mod request;
mod step;

pub(crate) use check::expect_gradient;
pub(super) use check::kind_of;
pub(crate) use job::{CounterWrites, Epilogue, Job, JobPool, NumberWrites, OffloadTarget, Operand, Sources};
pub(super) use job::{OwnStorages, Segment, Segments, Sink, slots_mut};
pub(super) use request::{GradientView, ReductionRequest};
pub(super) use step::{FunctionOutput, Link};
pub(crate) use step::{Group, NormLimit, OnNonFinite, Reduction, Step, StepSlots, Steps, TensorStep, Term, TermOf, Then};
pub use step::{Norms, Resolved};
