//! The dtypes, and which of them the crate computes in.

use std::fmt;

use crate::error::{Error, ErrorKind, FLOATS, Result};

/// The type of a tensor's elements.
///
/// The names are those of candle's `DType`. The two types convert by `into` and can be compared, so functions
/// that take a dtype take candle's as well. Parameters and gradients are in F16, BF16, F32 or F64.
///
/// ```
/// use optimisers::{AdamW, DType, MixedPrecision};
///
/// assert_eq!(MixedPrecision::new(candle_core::DType::F32, AdamW::new(0.1)), MixedPrecision::new(DType::F32, AdamW::new(0.1)));
/// assert!(DType::BF16 == candle_core::DType::BF16 && candle_core::DType::F16 != DType::BF16);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// Bytes.
    U8,
    /// Integers of 32 bits without a sign.
    U32,
    /// Integers of 16 bits.
    I16,
    /// Integers of 32 bits.
    I32,
    /// Integers of 64 bits.
    I64,
    /// The upper half of an F32: the range of F32, and 8 significant bits.
    BF16,
    /// 11 significant bits, up to 65504.
    F16,
    /// 24 significant bits.
    F32,
    /// 53 significant bits.
    F64,
    /// Another dtype of candle's. This crate does not compute in it.
    #[cfg(feature = "candle")]
    Other(super::OtherDType),
}

impl DType {
    /// The name in lower case, the size in bytes, and whether the dtype is a floating-point type.
    fn facts(self) -> (&'static str, usize, bool) {
        match self {
            DType::U8 => ("u8", 1, false),
            DType::U32 => ("u32", 4, false),
            DType::I16 => ("i16", 2, false),
            DType::I32 => ("i32", 4, false),
            DType::I64 => ("i64", 8, false),
            DType::BF16 => ("bf16", 2, true),
            DType::F16 => ("f16", 2, true),
            DType::F32 => ("f32", 4, true),
            DType::F64 => ("f64", 8, true),
            #[cfg(feature = "candle")]
            DType::Other(other) => other.facts(),
        }
    }

    /// The name in lower case, as in candle and in files: `bf16`.
    pub fn as_str(self) -> &'static str {
        self.facts().0
    }

    /// How many bytes an element takes; 0 if an element takes less than one byte.
    pub fn size_in_bytes(self) -> usize {
        self.facts().1
    }

    /// Whether the dtype is a floating-point type.
    pub fn is_float(self) -> bool {
        self.facts().2
    }
}

/// The name of the variant as in candle, for candle's other dtypes as well: `BF16`.
impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.as_str().to_uppercase())
    }
}

/// The name of the variant: `BF16`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Whether the engines read and write this dtype.
pub(crate) fn is_supported(dtype: impl Into<DType>) -> bool {
    matches!(dtype.into(), DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// Refuses a dtype that the engines do not read and write. `subject` is what a program has chosen the dtype for,
/// as the beginning of the error: "the dtype of the gradient".
pub(crate) fn check_supported(subject: impl fmt::Display, dtype: impl Into<DType>) -> Result<()> {
    let dtype = dtype.into();
    if is_supported(dtype) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Argument, format!("{subject} is"))
        .with_got(format_args!("{dtype:?}"))
        .with_expected(FLOATS))
}

/// The dtype of state and arithmetic for a parameter of `dtype`: F64 for F64, otherwise F32.
pub(crate) fn compute_dtype(dtype: impl Into<DType>) -> DType {
    widest_compute_dtype([dtype])
}

/// The dtype of arithmetic on numbers of these dtypes: F64 if one of them is F64, otherwise F32.
pub(crate) fn widest_compute_dtype(dtypes: impl IntoIterator<Item = impl Into<DType>>) -> DType {
    if dtypes.into_iter().any(|dtype| dtype.into() == DType::F64) {
        DType::F64
    } else {
        DType::F32
    }
}

/// Whether the square of a norm is above 0 in the dtype of the arithmetic. A small number of F32 has the
/// square 0 in F32, but not in F64.
pub(crate) fn has_square(norm: f64, compute: DType) -> bool {
    let square = norm * norm;
    if compute == DType::F64 {
        square > 0.0
    } else {
        square as f32 > 0.0
    }
}

/// The largest number of [`compute_dtype`].
pub(crate) fn largest_number(dtype: impl Into<DType>) -> f64 {
    if dtype.into() == DType::F64 {
        f64::MAX
    } else {
        f32::MAX.into()
    }
}

/// The smallest number of [`compute_dtype`] that has all significant bits.
pub(crate) fn smallest_normal(dtype: impl Into<DType>) -> f64 {
    if dtype.into() == DType::F64 {
        f64::MIN_POSITIVE
    } else {
        f32::MIN_POSITIVE.into()
    }
}

/// Whether the dtype of a master has more bytes than the dtype of its parameter.
pub(crate) fn is_wider(master: impl Into<DType>, parameter: impl Into<DType>) -> bool {
    parameter.into().size_in_bytes() < master.into().size_in_bytes()
}
