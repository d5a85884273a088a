//! Numbers without tensors: dtypes, shapes, rounding, 8-bit codes, random bits and decompositions; and
//! [`value`], which arithmetic is written in.

#[cfg(feature = "candle")]
mod candle;
pub(crate) mod codes;
mod dtypes;
mod fingerprint;
mod finite;
pub(crate) mod low_bits;
#[cfg_attr(not(feature = "candle"), path = "no_other.rs")]
mod other;
mod random;
mod records;
mod reflectors;
mod rounding;
mod shape;
mod symmetric;
pub mod value;

pub(crate) use codes::Code;
pub use dtypes::{DType, OtherDType};
pub(crate) use dtypes::{compute_dtype, is_supported, is_wider, largest};
pub(crate) use fingerprint::Fingerprint;
pub(crate) use finite::{first_non_finite, ranges};
pub(crate) use random::{gaussian, key_at, random_bits, random_key};
pub(crate) use records::Records;
pub(crate) use reflectors::orthonormal;
pub(crate) use rounding::{round_to_odd, stochastic_bf16, stochastic_f16};
pub use shape::Shape;
pub(crate) use shape::{UNCOUNTED, elem_count, place_of};
pub(crate) use symmetric::{Eigen, eigen};
