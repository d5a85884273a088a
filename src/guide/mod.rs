//! Pages for users, each with its conclusion first.
//!
//! | question | page |
//! | --- | --- |
//! | How do I write it? | [`recipes`] |
//! | What was it called in torch, DeepSpeed, Accelerate, optax, candle-nn, burn or Optimisers.jl? | [`coming_from`] |
//! | How many bytes does it take, and which store do I choose? | [`memory`] |
//! | How fast and how exact is it, on which machine? | [`measurements`] |
//! | How do I train on a GPU, and what runs on which device? | [`devices`] |
//! | Why does a layer not train? | [`cuts`] |
//! | Why is a `VarMap` no model? | [`Model`](crate::Model#two-candles) |
//! | What is in a checkpoint? | [`checkpoints`] |
//! | How do I use it without candle? | [`frameworks`] |
//! | How do I train on many machines? | [`many_machines`](crate::many_machines) |

#[doc = include_str!("checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("coming_from.md")]
pub mod coming_from {}

#[doc = include_str!("cuts.md")]
pub mod cuts {}

#[doc = include_str!("devices_first.md")]
#[doc = "```no_run"]
#[doc = include_str!("../../examples/cuda/main.rs")]
#[doc = "```"]
#[doc = include_str!("devices.md")]
pub mod devices {}

#[doc = include_str!("frameworks.md")]
pub mod frameworks {}

#[doc = include_str!("measurements.md")]
pub mod measurements {}

#[doc = include_str!("memory.md")]
pub mod memory {}

#[doc = include_str!("recipes.md")]
#[doc = "\n# The model of the shorter ones\n```"]
#[doc = include_str!("recipe_model.rs")]
#[doc = "```"]
pub mod recipes {}
