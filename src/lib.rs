// README's picture is a file that docs.rs does not have. `losses.md` defines the picture's link with the
// picture's data. `losses.md` comes first, because the first of two definitions of a link is used.
#![cfg_attr(doc, doc = include_str!("../examples/digits/losses.md"))]
// README's links lead to docs.rs. These links stay within the documentation, so that they work before the
// release.
//! [checkpoints]: guide::checkpoints
//! [coming from]: guide::coming_from
//! [cuts]: guide::cuts
//! [devices]: guide::devices
//! [frameworks]: guide::frameworks
//! [many machines]: many_machines
//! [measurements]: guide::measurements
//! [memory]: guide::memory
//! [`printed`]: mod@printed
//! [recipes]: guide::recipes
//! [rules]: rules
//! [two candles]: Model#two-candles
#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! - **Pages**: [`guide`] has programs by task, the names of other libraries, and a first run on a GPU.
//! - **Rules**: [`rules`] has all rules in one table. `optimisers::AdamW` and `optimisers::rules::AdamW` are
//!   one type.
//! - **Around rules**: [`OptimiserChain`] (rules one after another), [`Fallback`] (another rule for some
//!   parameters), [`Cautious`], [`DecoupledDecay`], [`Hyperball`].
//! - **How a parameter or its state is kept**: [`MixedPrecision`], [`SplitMaster`], [`Kahan`],
//!   [`StochasticRounding`], [`StoreAs`], [`Offload`].
//! - **To set up and to step**: [`setup`], [`setup_with`] and [`Setup`]; [`update`] and [`Update`], which
//!   return an [`Outcome`]; [`StreamedStep`], whose gradients come one at a time; [`CandleOptimizer`], which
//!   replaces candle-nn's optimisers.
//! - **The state**: a [`StateTree`] has a [`Leaf`] for each parameter; [`StateTree::at`] selects leaves to
//!   freeze, adjust or replace.
//! - **The model**: [`Model`], which [`model!`] implements for structs; [`Gradients`]; [`trainables`].
//! - **To drive a training**: [`Schedule`], [`ReduceOnPlateau`], [`LossScaler`],
//!   [`Accumulator`], [`Sam`], [`Autocast`], [`PrecisionPolicy`].
//! - **To save and load**: [`Checkpoint`], [`CheckpointFile`], [`Weights`], and with features the modules
//!   `config` and `torch`.
//! - **To look for problems**: [`audit`] before a training; [`Update::with_figures`],
//!   [`StateTree::warnings`] and [`Warning`] during the training.
//! - **Many machines**: [`many_machines`], [`ranks`], [`Communicator`].
//! - **Without candle** (`default-features = false`): [`ParameterSlices`], [`GradientSlices`], [`Lend`]. For
//!   buffers on devices, the module [`printed`](mod@printed).
//! - **To write a rule**: [`Elementwise`], [`Rule`], [`hyper_parameters!`], [`value`] and [`Gradient`].
//!
//! # Four words
//!
//! - A *leaf* is one parameter's place in the state: its rule, state tensors, counters and schedules.
//! - A *slot* is one state tensor of a rule, such as Adam's first moment `m`.
//! - A *window* is the calls (micro-batches) whose gradients accumulation joins in one step.
//! - A *plan* is a list of steps, to which each rule adds its own before anything is computed. One pass over
//!   memory then runs all steps.
// With this attribute docs.rs shows the feature that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_debug_implementations, unreachable_pub)]

mod engine;
mod error;
mod files;
pub mod guide;
mod model;
mod numbers;
pub mod printed;
mod ranks;
mod rule;
pub mod rules;
mod step;
mod stores;
mod tensors;
mod training;
mod tree;
mod wrappers;

#[doc = include_str!("many_machines.md")]
pub mod many_machines {}

pub use engine::{Engine, Isa, Norms, Resolved};
pub use error::warning::Warning;
pub use error::{Error, ErrorKind, Result};
pub use files::checkpoint::{
    Checkpoint, CheckpointFile, CheckpointSaver, FieldDifference, NewestCheckpoint, Restored,
};
#[cfg(feature = "config")]
pub use files::config;
#[cfg(feature = "torch")]
pub use files::torch;
pub use files::weights::Weights;
pub use model::gradients::{GradientMap, Gradients, ScaledGradients};
pub use model::lent::{Lend, MemoryMut, MemoryRef, View};
pub use model::slices::{GradientSlices, ParameterSlices, TensorSlice};
pub use model::{Model, Visitor};
pub use numbers::value;
#[doc(no_inline)]
pub use numbers::value::Arithmetic;
pub use numbers::{DType, Shape};
pub use printed::printed;
#[cfg(feature = "mpi")]
pub use ranks::mpi;
#[cfg(feature = "nccl")]
pub use ranks::nccl;
pub use ranks::{CommunicationError, Communicator, LocalRank, ranks};
pub use rule::{
    Adjust, Average, Choice, Counters, Describe, Describer, Elementwise, Evaluation, FieldValue, Flow,
    Gradient, HeldStates, IntoOptimiser, Kind, NonFinite, Norm, Numbers, Optimiser, Parameter, Parts, Role,
    Rule, Setting, Sizes, Slot, SlotFormat, SlotFormat::Q8, Slots, State, Sums, range,
};
// The rules are hidden here, because the documentation has them in `rules`.
#[doc(hidden, no_inline)]
pub use rules::{adam::*, average::*, descent::*, gradient::*, schedule_free::*};
pub use step::loss_scaler::{DynamicScale, LossScaler, OnOverflow};
pub use step::outcome::{LeafFigures, Outcome, Paths, SkipReason, Status};
pub use step::setup::{Setup, broadcast, setup, setup_with};
pub use step::streamed::StreamedStep;
pub use step::update::{Update, update};
pub use stores::*;
pub use training::accumulator::Accumulator;
pub use training::plateau::ReduceOnPlateau;
pub use training::sam::{Climbed, Sam};
pub use tree::schedule::Schedule;
pub use tree::{Leaf, MasterValues, Outlier, Selection, StateChange, StateTree, StateValue};
pub use wrappers::*;

// The items below are named one by one, because the compiler's error mentions a missing feature only for
// named items.
#[cfg(feature = "candle")]
pub use numbers::OtherDType;
#[cfg(feature = "candle")]
pub use rules::matrix::{MatrixForm, NewtonSchulz, Products, StepScale};
#[cfg(feature = "candle")]
#[doc(hidden, no_inline)]
pub use rules::{
    APOLLO, AdaMuon, Adafactor, AdaptiveClip, Centralise, GaLore, GradNoise, Muon, NorMuon, SOAP, Shampoo,
};
#[cfg(feature = "candle")]
pub use step::loss_scaler::scaled::ScaledLoss;
#[cfg(feature = "candle")]
pub use training::audit::{Audit, Audited, Reach, audit};
#[cfg(feature = "candle")]
pub use training::candle_optimizer::CandleOptimizer;
#[cfg(feature = "candle")]
pub use training::destructure::{Structure, destructure, trainables};
#[cfg(feature = "candle")]
pub use training::precision::{Autocast, AutocastLayer, InDtype, PrecisionPolicy};
#[cfg(feature = "candle")]
pub use training::segments::{Activations, Segments};

/// Items for the macros and the tests of this crate.
#[doc(hidden)]
pub mod __private {
    #[cfg(feature = "cuda")]
    pub use crate::engine::cuda;
    #[cfg(feature = "emulate")]
    pub use crate::engine::emulation;
    pub use crate::model::field_name;
    pub use crate::rule::field::{choice_of, index_in};
}
