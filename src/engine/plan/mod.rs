//! What one leaf (a parameter with its state) has to do in one training step, as data for the engines.
//! Nothing is written yet.
//!
//! A [`Step`] is one part of a leaf's chain. A **link** is the elementwise arithmetic of a
//! [`Step`], with its state. A **sink** is the destination of a chain's result. A **view** is what is read of
//! a leaf: x, or the gradient after the first few [`Step`]s. A **probe** is arithmetic whose result is only
//! reduced to a number. A **turn** of the reduce stage evaluates all [`Step`]s that depend on no other
//! pending [`Step`].

mod check;
mod job;
mod request;
mod step;

pub(crate) use check::check_gradient;
pub(super) use check::kind_of;
pub(crate) use job::{
    CounterWrites, Epilogue, Job, JobPool, NumberWrites, OffloadTarget, Operand, Progress, Sources, Windows,
};
pub(super) use job::{Sink, copy_in_shape, slots_mut, sources_after};
pub(super) use request::{LeafView, ReductionRequest};
pub(super) use step::{FunctionOutput, Link};
pub(crate) use step::{
    Group, NormLimit, OnNonFinite, Reduction, Step, StepSlots, Steps, TensorStep, Term, TermOf, Then,
};
pub use step::{Norms, Resolved};
