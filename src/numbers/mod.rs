//! Numbers without tensors: dtypes, shapes, rounding, 8-bit codes, random bits, decompositions, and the check
//! of values from outside (`Requirements`). The types of a rule's arithmetic are in [`value`].

#[cfg(feature = "candle")]
mod candle;
pub(crate) mod codes;
pub(crate) mod counts;
mod dtypes;
mod fingerprint;
mod finite;
pub(crate) mod low_bits;
#[cfg(feature = "candle")]
pub(crate) mod normal;
#[cfg(feature = "candle")]
mod other;
mod random;
mod records;
#[cfg(feature = "candle")]
pub(crate) mod reflectors;
mod requirements;
mod rounding;
mod shape;
#[cfg(feature = "candle")]
pub(crate) mod symmetric;
pub mod value;
mod watch;

pub(crate) use codes::Code;
pub use dtypes::DType;
pub(crate) use dtypes::{
    check_supported, compute_dtype, has_square, is_supported, is_wider, largest_number, smallest_normal,
    widest_compute_dtype,
};
pub(crate) use fingerprint::Fingerprint;
pub(crate) use finite::{first_non_finite, ranges_to_read};
#[cfg(feature = "candle")]
pub use other::OtherDType;
pub(crate) use random::{key_at, random_bits, random_key};
pub(crate) use records::Records;
pub(crate) use requirements::{Requirements, check_finite};
pub(crate) use rounding::{nearest_bf16, round_to_odd, rounded_once, stochastic_bf16, stochastic_f16};
pub use shape::Shape;
pub(crate) use shape::{UNCOUNTED, elem_count, element_offset};
pub(crate) use watch::{Encoding, Watch};
