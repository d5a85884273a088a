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
pub mod engine;
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
mod maximise;
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
mod running_statistics;
mod sam;
mod schedule;
mod scheduler;
mod setup;
mod slices;
mod tensor_file;
#[cfg(feature = "torch")]
pub mod torch;
mod tree;
mod twin;
mod update;
mod updated;
pub mod value;
mod views;
mod warning;
mod weights;
mod world;

pub use accumulator::Accumulator;
pub use audit::{Audit, Audited, Reach, audit};
/// candle's, which dtypes are said by: for programs without a dependency on candle.
pub use candle_core::DType;
pub use candle_optimizer::CandleOptimizer;
pub use checkpoint::{Checkpoint, CheckpointFile, DefaultTaken, Restored};
pub use compose::{
    Cautious, DecoupledDecay, Either, Fallback, Kahan, Members, MixedPrecision, Offload, OptimiserChain, SplitMaster, StochasticRounding,
    StoreAs,
};
pub use cuts::{CUTS, Cut};
pub use engine::{Arithmetic, Engine, Norms, Resolved};
#[cfg(feature = "printed")]
pub use error::PrintingError;
#[cfg(feature = "torch")]
pub use error::TorchError;
pub use error::{
    CheckpointError, ClimbError, CommunicationError, ConfigurationError, Error, MasterError, MatrixError, PatternError, PrecisionError,
    RanksError, Result, ScheduleError, SliceError, StateError, StatisticsError, StorageError, StructureError, WeightsError,
};
pub use figures::{Figures, LeafFigures};
pub use gradients::Gradients;
pub use lent::{MemoryMut, MemoryRef};
pub use loss_scaler::{DynamicScale, LossScaler, OnOverflow};
pub use matrices::{MatrixForm, NewtonSchulz, Products, StepScale};
pub use maximise::maximise;
pub use model::{Model, Visitor};
pub use outcome::{Outcome, Outlier, Status};
pub use paths::Paths;
pub use precision::{Autocast, AutocastLayer, InDtype, PrecisionPolicy};
#[cfg(feature = "printed")]
pub use printed::printed;
pub use rule::{
    Adjust, Average, Choice, Choices, Counters, Elementwise, Field, FieldValue, Flow, Gradient, Kind, NonFinite, Norm, Numbers, Optimiser,
    Parts, Rule, Sizes, Slot, SlotFormat, SlotFormat::Q8, Slots, State, Summation, Sums, range,
};
pub use rules::listed::*;
pub use running_statistics::RunningStatistics;
pub use sam::{Climbed, Sam};
pub use schedule::Schedule;
pub use scheduler::{Drive, Plateau, PlateauMode, PlateauThreshold, ReduceOnPlateau, Scheduler};
pub use setup::{Setup, broadcast, setup, setup_with};
pub use slices::{GradientSlices, ParameterSlices};
pub use tree::{Leaf, MasterValues, Selection, StateChange, StateTree};
pub use twin::Twin;
pub use update::{Update, update, update_on};
pub use updated::updated;
pub use views::{Structure, destructure, trainables};
pub use warning::Warning;
pub use weights::Weights;
pub use world::{Communicator, LocalRank, ranks};

/// What the macros of this crate use.
#[doc(hidden)]
pub mod __private {
    pub use crate::model::field_name;
    pub use crate::rule::{check, set, wrong_type};
}
