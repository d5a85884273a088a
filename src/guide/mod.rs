//! Pages about the whole: how things are done, what they cost, where people come from.

#[doc = include_str!("checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("coming_from.md")]
pub mod coming_from {}

#[doc = include_str!("cuts.md")]
pub mod cuts {}

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
