#![doc = include_str!("../README.md")]
// docs.rs says of each item which feature it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_debug_implementations, unreachable_pub)]

mod accumulator;
mod audit;
mod candle_optimizer;
mod checkpoint;
mod compose;
#[cfg(feature = "config")]
pub mod config;
mod consistency;
mod cuts;
mod engine;
mod error;
mod field;
mod figures;
mod gradients;
pub mod guide;
mod lent;
mod loss_scaler;
#[doc = include_str!("many_machines.md")]
pub mod many_machines {}
mod matrices;
mod missing;
mod model;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod numbers;
mod outcome;
mod paths;
mod patterns;
mod precision;
pub mod prelude;
#[cfg(feature = "printed")]
pub mod printed;
mod rule;
pub mod rules;
mod sam;
mod scheduler;
mod setup;
mod slices;
mod tensor_file;
#[cfg(feature = "torch")]
pub mod torch;
mod tree;
mod twin;
mod update;
pub mod value;
mod views;
mod warning;
mod weights;
mod world;

pub use accumulator::Accumulator;
pub use audit::{Audit, Audited, Reach, audit};
pub use candle_optimizer::CandleOptimizer;
pub use checkpoint::{Checkpoint, CheckpointFile, DefaultTaken, Restored};
pub use compose::{
    Cautious, DecoupledDecay, Fallback, Kahan, MixedPrecision, Offload, OptimiserChain, SplitMaster, StochasticRounding, StoreAs,
};
pub use engine::{Engine, Isa, Norms, Resolved};
pub use error::{Error, ErrorKind, Result, TensorProblem};
pub use figures::LeafFigures;
pub use gradients::{GradientMap, Gradients};
pub use lent::{Lend, MemoryMut, MemoryRef, View};
pub use loss_scaler::{DynamicScale, LossScaler, OnOverflow};
pub use matrices::{MatrixForm, NewtonSchulz, Products, StepScale};
pub use model::{Model, Visitor};
pub use numbers::{DType, OtherDType, Shape};
pub use outcome::{Outcome, Outlier, SkipReason, Status};
pub use paths::Paths;
pub use precision::{Autocast, AutocastLayer, InDtype, PrecisionPolicy};
#[cfg(feature = "printed")]
pub use printed::printed;
pub use rule::{
    Adjust, Average, Choice, Counters, Describe, Describer, Elementwise, Evaluation, FieldValue, Flow, Gradient, HeldStates, Kind,
    NonFinite, Norm, Numbers, Optimiser, Parameter, Parts, Role, Rule, Setting, Sizes, Slot, SlotFormat, SlotFormat::Q8, Slots, State,
    Summation, Sums, range,
};
pub use rules::listed::*;
pub use sam::{Climbed, Sam};
pub use scheduler::{ReduceOnPlateau, Schedule, Scheduler};
pub use setup::{Setup, broadcast, setup, setup_with};
pub use slices::{GradientSlices, ParameterSlices};
pub use tree::{Leaf, MasterValues, Selection, StateChange, StateTree};
pub use twin::Twin;
pub use update::{Update, update};
pub use value::Arithmetic;
pub use views::{Structure, destructure, trainables};
pub use warning::Warning;
pub use weights::Weights;
pub use world::{CommunicationError, Communicator, LocalRank, ranks};

/// What the macros and the tests of this crate use.
#[doc(hidden)]
pub mod __private {
    #[cfg(feature = "cuda")]
    pub use crate::engine::cuda;
    #[cfg(feature = "emulate")]
    pub use crate::engine::emulation;
    pub use crate::field::{Choices, Field, choice_of, index_in};
    pub use crate::model::field_name;
}
