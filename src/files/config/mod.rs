//! Reads and writes optimisers and schedules in JSON, TOML and other self-describing formats of serde.
//!
//! Needs the feature `config`.
//!
//! An [`OptimiserConfig`] can be a field of a program's own configuration:
//!
//! ```
//! use candle_core::{DType, Device, Var};
//! use optimisers::config::OptimiserConfig;
//! use std::collections::BTreeMap;
//!
//! #[derive(serde::Deserialize)]
//! struct Training {
//!     epochs: usize,
//!     optimiser: OptimiserConfig,
//! }
//!
//! let text = r#"{
//!     "epochs": 20,
//!     "optimiser": {"MixedPrecision": {"dtype": "F32", "inner": [
//!         {"ClipGlobalNorm": {"omega": 1.0, "non_finite": "Skip"}},
//!         {"AdamW": {"eta": 1e-3, "beta": [0.9, 0.95], "lambda": 0.1}}
//!     ]}}
//! }"#;
//! let training: Training = serde_json::from_str(text)?;
//!
//! let model = BTreeMap::from([("weight", Var::ones((2, 3), DType::BF16, &Device::Cpu)?)]);
//! let state = training.optimiser.setup(&model)?;
//! assert_eq!(state.leaf("weight").and_then(|leaf| leaf.learning_rate()), Some(1e-3));
//! # assert_eq!(training.epochs, 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The format
//!
//! | JSON | Meaning |
//! | --- | --- |
//! | `"AdamW"` | the rule with its defaults |
//! | `{"AdamW": {"eta": 1e-3}}` | the rule with these fields, and the defaults for the others |
//! | `["ClipGrad", {"Adam": {"eta": 1e-3}}]` | an [`OptimiserChain`](crate::OptimiserChain) of these; lists may be nested |
//! | `{"MixedPrecision": {"dtype": "F32", "inner": "Adam"}}` | [`MixedPrecision`](crate::MixedPrecision) around a rule or a list; `"F32"` or `"F64"` |
//! | `{"SplitMaster": {"bits": 32, "inner": "Adam"}}` | [`SplitMaster`](crate::SplitMaster); `"bits": 24` for [24 bits](crate::SplitMaster::of_24_bits) |
//! | `{"Kahan": {"inner": "Adam"}}` | [`Kahan`](crate::Kahan) |
//! | `{"StochasticRounding": {"seed": 0, "inner": "Adam"}}` | [`StochasticRounding`](crate::StochasticRounding) |
//! | `{"DecoupledDecay": {"decay_lambda": 0.1, "inner": "Lion"}}` | [`DecoupledDecay`](crate::DecoupledDecay) around a rule or a list; `"cautious": true` and a `"decay_eta_max"` are optional |
//! | `{"Hyperball": {"inner": "Muon"}}` | [`Hyperball`](crate::Hyperball) around a rule or a list |
//! | `{"Cautious": {"inner": "AdamW"}}` | [`Cautious`](crate::Cautious) around `Adam`, `AdamW`, `NAdam`, `Lion` or a rule that [`Registry::with`] adds; `"unscaled": true` is optional |
//! | `{"StoreAs": {"slots": {"m": "BF16", "v": "Q8"}, "inner": "Adam"}}` | [`StoreAs`](crate::StoreAs) around
//! a rule or a list; `"slots"` has formats by the names of state tensors, or is one format for all tensors
//! that [can have it](crate::StoreAs#what-is-lost): `"Q8"` |
//! | `{"Fallback": {"inner": "Muon", "fallback": "AdamW", "except": ["embedding*"]}}` | [`Fallback`](crate::Fallback): the first rule for matrices, the second for other parameters and for those whose paths match |
//! | `{"Offload": {"MixedPrecision": ...}}` | [`Offload`](crate::Offload) around any of these |
//! | `{"ByPath": [{"pattern": "*.bias", "optimiser": "Adam"}, ...]}` | an optimiser by the parameter's path |
//!
//! The rules are those of [the table](crate::rules), with the fields of their structs. A real number may be
//! written without a point. If the format has no word for infinity, write `"inf"`. A pair is a list of two
//! numbers, and a [`NonFinite`](crate::NonFinite) is the text of its name. `"None"` in a list is the rule
//! that passes the gradient on. `"None"` is refused as a whole optimiser and as a rule of a `Fallback`,
//! because the gradient itself would be the step. In YAML the name of a table may be a tag: `!AdamW {eta:
//! 1e-3}` is `AdamW: {eta: 1e-3}`.
//!
//! To name rules and wrappers of your own, add each to a [`Registry`], by [one line](Registry::with_wrapper).
//! A rule that holds several other rules has these as `"members"`.
//!
//! # Writing a configuration
//!
//! [`OptimiserConfig::of`] writes an optimiser that was built in code. [`OptimiserConfig::of_state`] writes
//! the optimisers of a state, by path. Both configurations can be read again.
//!
//! ```
//! use optimisers::config::OptimiserConfig;
//! use optimisers::{Adjust, AdamW, ClipGlobalNorm, DType, MixedPrecision, OptimiserChain};
//!
//! let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
//! let optimiser = MixedPrecision::new(DType::F32, rule);
//! let text = serde_json::to_string(&OptimiserConfig::of(&optimiser)?)?;
//! let again = serde_json::from_str::<OptimiserConfig>(&text)?.optimiser()?;
//! assert_eq!((again.name(), again.fields()), (optimiser.name(), optimiser.fields()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Schedules
//!
//! A [`Schedule`](crate::Schedule) is a table of its arguments under the name of its constructor:
//!
//! | JSON | Meaning |
//! | --- | --- |
//! | `{"Constant": {"eta": 1e-3}}` | [`constant`](crate::Schedule::constant) |
//! | `{"Linear": {"start": 0, "end": 1e-3, "steps": 100}}` | [`linear`](crate::Schedule::linear); in the same way `Cosine`, `OneMinusSquareRoot`, and `Polynomial` with a `"power"` |
//! | `{"CosineRestarts": {"high": 1e-3, "low": 0, "steps": 100, "factor": 2}}` | [`cosine_restarts`](crate::Schedule::cosine_restarts) |
//! | `{"OneCycle": {"peak": 1e-3, "steps": 1000}}` | [`one_cycle`](crate::Schedule::one_cycle) |
//! | `{"Exponential": {"start": 1e-3, "rate": 0.5, "steps": 100}}` | [`exponential`](crate::Schedule::exponential); in the same way [`Step`](crate::Schedule::step) |
//! | `{"InverseSquareRoot": {"peak": 1e-3, "warmup": 100}}` | [`inverse_square_root`](crate::Schedule::inverse_square_root) |
//! | `{"WarmupStableThen": {"peak": 1e-3, "warmup": 100, "stable": 700, "decay": ...}}` | [`warmup_stable_then`](crate::Schedule::warmup_stable_then) another schedule |
//! | `{"Then": {"first": ..., "steps": 100, "next": ...}}` | [`then`](crate::Schedule::then) |
//!
//! Each can have `"relative": true` and a `"field"`. Schedules for parts of a model are a list of pairs, each
//! a path and a schedule. The empty path means the whole model:
//!
//! ```
//! use candle_core::{DType::F32, Device, Var};
//! use optimisers::{AdamW, Schedule, setup};
//! use std::collections::BTreeMap;
//!
//! let schedules: Vec<(String, Schedule)> = serde_json::from_str(r#"[
//!     ["", {"WarmupStableThen": {
//!         "peak": 1.0, "warmup": 100, "stable": 700, "relative": true,
//!         "decay": {"OneMinusSquareRoot": {"start": 1.0, "end": 0.0, "steps": 200}}
//!     }}],
//!     ["head", {"Constant": {"eta": 0.1, "field": "lambda"}}]
//! ]"#)?;
//!
//! let model = BTreeMap::from(["body", "head"].map(|path| (path, Var::zeros(2, F32, &Device::Cpu).expect("a variable"))));
//! let mut state = setup(AdamW::new(1e-3), &model)?;
//! for (path, schedule) in schedules {
//!     state.at(&path)?.schedule(schedule)?;
//! }
//! let acting = |path| state.leaf(path).and_then(|leaf| leaf.acting().field("lambda"));
//! assert_eq!([acting("body"), acting("head")], [Some(0.01.into()), Some(0.1.into())]);
//!
//! let refused = serde_json::from_str::<Schedule>(r#"{"Linear": {"start": 0, "end": 1, "steps": -1}}"#).unwrap_err();
//! assert_eq!(refused.to_string(), "configuration, at Linear.steps: got -1.0, expected a count");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Optimisers by path
//!
//! Each parameter gets the optimiser of the first pattern that matches its path (any of its paths, if it has
//! several). In a pattern `*` stands for any text, dots included, and `?` for one character. All other
//! characters are literal, and the whole path must match. `"LeaveOut"` or JSON's `null` in place of
//! an optimiser leaves parameters out, as `None` from the closure of [`setup_with`](crate::setup_with) does.
//!
//! ```
//! use candle_core::{DType, Device, Var};
//! use optimisers::config::OptimiserConfig;
//! use std::collections::BTreeMap;
//!
//! #[derive(serde::Deserialize)]
//! struct Training {
//!     optimiser: OptimiserConfig,
//! }
//!
//! let training: Training = toml::from_str(r#"
//!     [[optimiser.ByPath]]
//!     pattern = "*.running_*"
//!     optimiser = "LeaveOut"
//!
//!     [[optimiser.ByPath]]
//!     pattern = "*.bias"
//!     optimiser.AdamW = { eta = 1e-3, lambda = 0.0 }
//!
//!     [[optimiser.ByPath]]
//!     pattern = "*"
//!     [optimiser.ByPath.optimiser.MixedPrecision]
//!     dtype = "F32"
//!     inner = [
//!         { ClipNorm = { omega = 1.0, p = inf } },
//!         { AdamW = { eta = 1e-3, lambda = 0.1 } },
//!     ]
//! "#)?;
//!
//! let variable = |n: usize| Var::zeros(n, DType::BF16, &Device::Cpu);
//! let model = BTreeMap::from([("fc.weight", variable(6)?), ("fc.bias", variable(2)?), ("norm.running_mean", variable(2)?)]);
//! let state = training.optimiser.setup(&model)?;
//! let names: Vec<_> = state.leaves().map(|leaf| (leaf.path(), leaf.optimiser().name())).collect();
//! assert_eq!(names, [
//!     ("fc.bias", "AdamW".to_string()),
//!     ("fc.weight", "MixedPrecision(F32, OptimiserChain(ClipNorm, AdamW))".to_string()),
//! ]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It is an error if no pattern matches a parameter, if a pattern is not the first match of any path, or if
//! two patterns match different paths of one parameter and give different optimisers. [`ClipGlobalNorm`]
//! takes one norm over all parameters whose optimiser has this rule, whichever patterns match these
//! parameters.
//!
//! # Speed
//!
//! An optimiser from a configuration is as fast as one in code, because a chain of boxed rules plans the same
//! steps as a tuple: elementwise rules become one fused pass over memory, and a norm costs one more read of
//! the gradients.
//!
//! # Errors
//!
//! An error names the place in the configuration, the value there, and the values that could be there:
//!
//! ```
//! use optimisers::config::OptimiserConfig;
//!
//! let config: OptimiserConfig = serde_json::from_str(r#"["ClipGrad", {"AdamW": {"beta": 0.9}}]"#)?;
//! let error = config.optimiser().unwrap_err();
//! assert_eq!(error.to_string(), "configuration, at [1].AdamW.beta: got 0.9, expected a pair of reals");
//! # Ok::<(), serde_json::Error>(())
//! ```
//!
//! Data that cannot be an optimiser, whatever rules there are, is refused when the text is read. Examples are
//! a number, and a table with a repeated key. Names, types, ranges and places are checked when the optimiser
//! is built.
//!
//! [`ClipGlobalNorm`]: crate::ClipGlobalNorm

mod form;
mod kinds;
mod registry;
mod schedules;
mod written;

use serde::{Deserialize, Deserializer, Serialize, de};

pub use registry::Registry;

use crate::error::Result;
use crate::model::Model;
use crate::rule::field::Data;
use crate::rule::{Adjust, Optimiser};
use crate::tree::StateTree;
use form::{Form, Place, by_path_data, check_depth, check_form, check_repeats};
use written::{optimiser_data, state_data};

/// An optimiser, or a choice by path, as a text describes it. The [module](self) has the format.
///
/// ```
/// use optimisers::config::OptimiserConfig;
///
/// let config: OptimiserConfig = serde_json::from_str(r#"["ClipGrad", {"AdamW": {"eta": 0.01}}]"#)?;
/// assert_eq!(serde_json::to_string(&config)?, r#"["ClipGrad",{"AdamW":{"eta":0.01}}]"#);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct OptimiserConfig {
    data: Data,
}

impl<'de> Deserialize<'de> for OptimiserConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        OptimiserConfig::new(Data::read_whole(deserializer)?).map_err(de::Error::custom)
    }
}

impl OptimiserConfig {
    /// Describes an optimiser that was built in code, with all its rules, settings and hyper-parameters.
    ///
    /// Values that are equal to defaults are written as well, because another [`Registry`] may have other
    /// defaults. Two kinds of settings are not written: a switch that is off, and an empty list. A rule that
    /// the registry lacks, such as [`Cautious`](crate::Cautious) around another rule than `Adam`, `AdamW`,
    /// `NAdam` and `Lion`, is an error only when the optimiser is built from the configuration.
    ///
    /// # Errors
    /// If lists and tables would be more than 64 deep, or the name of a rule or field is
    /// [reserved](Registry::with). If the optimiser is offloaded [everywhere](crate::Offload::everywhere).
    ///
    /// ```
    /// use optimisers::config::OptimiserConfig;
    /// use optimisers::{ClipGrad, DecoupledDecay, Lion, OptimiserChain};
    ///
    /// let rule = OptimiserChain::new((ClipGrad::new(1.0), DecoupledDecay::new(0.1, Lion::new(1e-4)).cautious()));
    /// let text = serde_json::to_string(&OptimiserConfig::of(&rule)?)?;
    /// let decay = r#"{"cautious":true,"decay_lambda":0.1,"decay_eta_max":0.0,"inner":"#;
    /// let lion = r#"{"Lion":{"eta":0.0001,"beta":[0.9,0.99],"lambda":0.0}}"#;
    /// assert_eq!(text, format!(r#"[{{"ClipGrad":{{"delta":1.0}}}},{{"DecoupledDecay":{decay}{lion}}}}}]"#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(optimiser: &(impl Adjust + ?Sized)) -> Result<Self> {
        Self::for_writing(optimiser_data(&optimiser.description().record())?)
    }

    /// Describes the optimisers of the leaves of a state, with their hyper-parameters.
    ///
    /// If all parameters have the same optimiser and none was left out, the configuration is that optimiser.
    /// Otherwise the configuration is a choice by path: the most frequent optimiser has the pattern `*` if
    /// it occurs more than once, and each other parameter has its path as a pattern.
    /// [`setup`](OptimiserConfig::setup) with the same model makes the same choices. The configuration does
    /// not contain [schedules](crate::StateTree::schedule), nor the values that schedules give.
    ///
    /// # Errors
    /// As [`OptimiserConfig::of`]. Also if a path contains `*` or `?`, and this path as a pattern matches a
    /// parameter with another optimiser. If optimisers differ and parameters have
    /// [no names](crate::CandleOptimizer).
    ///
    /// ```
    /// use candle_core::{DType::F32, Device, Var};
    /// use optimisers::config::OptimiserConfig;
    /// use optimisers::{Descent, setup_with};
    /// use std::collections::BTreeMap;
    ///
    /// let variable = || Var::zeros(2, F32, &Device::Cpu);
    /// let paths = ["a.bias", "a.weight", "b.weight", "norm.running_mean"];
    /// let model = paths.into_iter().map(|path| Ok((path, variable()?))).collect::<optimisers::Result<BTreeMap<_, _>>>()?;
    /// let state = setup_with(&model, |path, _| {
    ///     let eta = if path.ends_with("bias") { 0.5 } else { 0.25 };
    ///     (!path.contains("running")).then(|| Descent::new(eta))
    /// })?;
    ///
    /// let config = OptimiserConfig::of_state(&state)?;
    /// let choices = [
    ///     r#"{"pattern":"a.bias","optimiser":{"Descent":{"eta":0.5}}}"#,
    ///     r#"{"pattern":"norm.running_mean","optimiser":"LeaveOut"}"#,
    ///     r#"{"pattern":"*","optimiser":{"Descent":{"eta":0.25}}}"#,
    /// ];
    /// assert_eq!(serde_json::to_string(&config)?, format!(r#"{{"ByPath":[{}]}}"#, choices.join(",")));
    /// assert_eq!(OptimiserConfig::of_state(&config.setup(&model)?)?, config);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_state(state: &StateTree) -> Result<Self> {
        state.check_leaves()?;
        Self::for_writing(state_data(state)?)
    }

    /// A configuration that this crate writes, and has to be able to read again.
    fn for_writing(data: Data) -> Result<Self> {
        check_depth(&data)?;
        Self::new(data)
    }

    /// A configuration of data that a program has read.
    fn new(data: Data) -> Result<Self> {
        check_repeats(&data, &Place::Whole)?;
        check_form(&data, &Place::Whole)?;
        match Form::read(&data, &Place::Whole)? {
            // The data is made again, with `LeaveOut` in place of JSON's null, which TOML lacks.
            Form::ByPath(entries) => {
                let entries = entries
                    .iter()
                    .map(|entry| (entry.pattern, entry.optimiser.cloned()));
                Ok(OptimiserConfig {
                    data: by_path_data(entries),
                })
            }
            _ => Ok(OptimiserConfig { data }),
        }
    }

    /// Builds the optimiser from the rules of this crate. For more rules see [`Registry::optimiser`].
    ///
    /// # Errors
    /// If a rule or a field is unknown, or a value has the wrong type or is out of range. If the
    /// configuration is by path, because a choice by path needs the model.
    ///
    /// ```
    /// use optimisers::config::OptimiserConfig;
    /// use optimisers::{Adjust, FieldValue};
    ///
    /// let config: OptimiserConfig = serde_json::from_str(r#"{"AdamW": {"eta": 0.01}}"#)?;
    /// let optimiser = config.optimiser()?;
    /// assert_eq!(optimiser.field("eta"), Some(FieldValue::Real(0.01)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn optimiser(&self) -> Result<Optimiser> {
        Registry::default().optimiser(self)
    }

    /// Sets up the state of `model` from the rules of this crate. For more rules see [`Registry::setup`].
    ///
    /// # Errors
    /// As [`OptimiserConfig::optimiser`] and [`setup`](crate::setup). Also if patterns and parameters do not
    /// fit: see [the module](self#optimisers-by-path).
    pub fn setup<M: Model + ?Sized>(&self, model: &M) -> Result<StateTree> {
        Registry::default().setup(self, model)
    }
}
