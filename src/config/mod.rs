//! Optimisers built at run time from JSON, TOML or any other self-describing format that serde reads. Needs the feature `config`.
//!
//! An [`OptimiserConfig`] is a value like any other in a program's configuration:
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
//! # What can be written
//!
//! | JSON | Meaning |
//! | --- | --- |
//! | `"AdamW"` | the rule with its defaults |
//! | `{"AdamW": {"eta": 1e-3}}` | with these fields and the defaults for the others |
//! | `["ClipGrad", {"Adam": {"eta": 1e-3}}]` | an [`OptimiserChain`](crate::OptimiserChain) of these; lists may be nested |
//! | `{"MixedPrecision": {"dtype": "F32", "inner": "Adam"}}` | [`MixedPrecision`](crate::MixedPrecision) around a rule or a list; `"F32"` or `"F64"` |
//! | `{"SplitMaster": {"bits": 32, "inner": "Adam"}}` | [`SplitMaster`](crate::SplitMaster); 24 for [24 bits](crate::SplitMaster::of_24_bits) |
//! | `{"Kahan": {"inner": "Adam"}}` | [`Kahan`](crate::Kahan) |
//! | `{"StochasticRounding": {"seed": 0, "inner": "Adam"}}` | [`StochasticRounding`](crate::StochasticRounding) |
//! | `{"DecoupledDecay": {"lambda": 0.1, "inner": "Lion"}}` | [`DecoupledDecay`](crate::DecoupledDecay) around a rule or a list; with `"cautious": true`, or an `"eta_max"` |
//! | `{"StoreAs": {"slots": {"m": "BF16", "v": "Q8"}, "inner": "Adam"}}` | [`StoreAs`](crate::StoreAs) around a rule or a list: by the names of its state tensors, or `"slots": "Q8"` for all of them |
//! | `{"Fallback": {"inner": "Muon", "fallback": "AdamW", "except": ["embedding*"]}}` | [`Fallback`](crate::Fallback): the first rule for matrices, the second for other parameters and for those whose paths match |
//! | `{"Offload": {"MixedPrecision": ...}}` | [`Offload`](crate::Offload) around any of these |
//! | `{"ByPath": [{"pattern": "*.bias", "optimiser": "Adam"}, ...]}` | an optimiser by the parameter's path |
//!
//! Rules are those of [the table](crate::rules), with the fields of their structs. A real number may be written without
//! a point; infinity is `"inf"` where the format has no word for it. A pair is a list of two numbers, a
//! [`NonFinite`](crate::NonFinite) its name as a text. Rules of your own are named in the same way once a [`Registry`] knows them.
//!
//! # Optimisers by path
//!
//! Each parameter gets the optimiser of the first pattern that matches its path (any of its paths, if it has several). In a pattern
//! `*` stands for any text, dots included, and `?` for one character; everything else is literal, and the whole path must match.
//! `"LeaveOut"` in place of an optimiser (or JSON's `null`) leaves the parameters out, as [`setup_with`](crate::setup_with) does for
//! those without optimiser.
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
//! A parameter that no pattern matches is an error, and so is a pattern that decides for no parameter. Where a parameter has several paths and
//! each has a pattern of its own, with another optimiser and with no path in common, that is an error, too. [`ClipGlobalNorm`] takes one norm
//! over all parameters that have it, whichever pattern they got it from.
//!
//! # Speed
//!
//! What is built here is as fast as what is written in code. A chain hands the engine the same list of steps whether its members are a
//! tuple or boxed, so every chain of elementwise rules, of any length, in any order, nested, and inside `MixedPrecision`, is one fused
//! pass over memory. [`ClipNorm`](crate::ClipNorm) and [`ClipGlobalNorm`] cost one more read of the gradients, as they do everywhere.
//!
//! # Errors
//!
//! An error says where in the configuration it is, what is there, and what could be:
//!
//! ```
//! use optimisers::config::OptimiserConfig;
//!
//! let config: OptimiserConfig = serde_json::from_str(r#"["ClipGrad", {"AdamW": {"beta": 0.9}}]"#)?;
//! let error = config.optimiser().unwrap_err();
//! assert_eq!(error.to_string(), "optimiser configuration, at [1].AdamW.beta: expected a pair of reals, got 0.9");
//! # Ok::<(), serde_json::Error>(())
//! ```
//!
//! What cannot be an optimiser whatever rules there are (a number, an unknown dtype, `MixedPrecision` in a list) is refused as the text is
//! read; names, types and ranges when the optimiser is built.
//!
//! [`ClipGlobalNorm`]: crate::ClipGlobalNorm

mod data;
mod form;
mod patterns;
mod place;
mod registry;

use serde::{Deserialize, Serialize};

pub use registry::Registry;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::rule::Optimiser;
use crate::tree::StateTree;
use data::Data;
use form::Form;

/// An optimiser as a text describes it; see the [module](self) for what can be written.
///
/// ```
/// use optimisers::config::OptimiserConfig;
///
/// let config: OptimiserConfig = serde_json::from_str(r#"["ClipGrad", {"AdamW": {"eta": 0.01}}]"#)?;
/// assert_eq!(serde_json::to_string(&config)?, r#"["ClipGrad",{"AdamW":{"eta":0.01}}]"#);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Data", into = "Data")]
pub struct OptimiserConfig {
    form: Form,
}

impl TryFrom<Data> for OptimiserConfig {
    type Error = Error;

    fn try_from(data: Data) -> Result<Self> {
        Form::read(data).map(|form| OptimiserConfig { form })
    }
}

impl From<OptimiserConfig> for Data {
    fn from(config: OptimiserConfig) -> Self {
        config.form.write()
    }
}

impl OptimiserConfig {
    /// The optimiser, of the rules of this crate. For more rules see [`Registry::optimiser`].
    ///
    /// # Errors
    /// If a rule or a field is unknown, a value is of the wrong type or out of range, or the configuration is one by path, which needs
    /// the model.
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
    pub fn optimiser(&self) -> Result<Box<dyn Optimiser>> {
        Registry::default().optimiser(self)
    }

    /// The state of this optimiser for every trainable parameter of `model`. For more rules see [`Registry::setup`].
    ///
    /// # Errors
    /// As [`OptimiserConfig::optimiser`] and [`setup`](crate::setup); if a parameter matches no pattern, and if a pattern decides for no
    /// parameter.
    pub fn setup<M: Model + ?Sized>(&self, model: &M) -> Result<StateTree> {
        Registry::default().setup(self, model)
    }
}
