//! The dtypes, and what the crate does with which of them.

use std::fmt;

use super::other::Other;

/// Makes the enum.
macro_rules! dtypes {
    ($($(#[doc = $documentation:literal])* $Variant:ident: $name:literal, $size:literal, $is_float:literal;)*) => {
        /// The type of a tensor's elements.
        ///
        /// The names are candle's. The two convert by `into` and compare, so what takes a dtype takes
        /// candle's as well. Parameters and gradients are in F16, BF16, F32 or F64.
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
            $($(#[doc = $documentation])* $Variant,)*
            /// Another dtype of candle's, in which nothing is computed here.
            Other(OtherDType),
        }

        impl DType {
            /// The name in lower case, as candle and files say it: `bf16`.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(DType::$Variant => $name,)*
                    DType::Other(OtherDType(other)) => other.as_str(),
                }
            }

            /// How many bytes an element takes; 0 if it takes less than one.
            pub fn size_in_bytes(self) -> usize {
                match self {
                    $(DType::$Variant => $size,)*
                    DType::Other(OtherDType(other)) => other.size_in_bytes(),
                }
            }

            /// Whether it is a floating-point type.
            pub fn is_float(self) -> bool {
                match self {
                    $(DType::$Variant => $is_float,)*
                    DType::Other(OtherDType(other)) => other.is_float(),
                }
            }
        }

        /// The name of the variant, for every dtype of candle's: `BF16`.
        impl fmt::Debug for DType {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(DType::$Variant => f.write_str(stringify!($Variant)),)*
                    DType::Other(other) => fmt::Debug::fmt(other, f),
                }
            }
        }
    };
}

dtypes! {
    /// Bytes.
    U8: "u8", 1, false;
    /// Integers of 32 bits without a sign.
    U32: "u32", 4, false;
    /// Integers of 16 bits.
    I16: "i16", 2, false;
    /// Integers of 32 bits.
    I32: "i32", 4, false;
    /// Integers of 64 bits.
    I64: "i64", 8, false;
    /// The upper half of an F32: its range, and 8 significant bits.
    BF16: "bf16", 2, true;
    /// 11 significant bits, up to 65504.
    F16: "f16", 2, true;
    /// 24 significant bits.
    F32: "f32", 4, true;
    /// 53 significant bits.
    F64: "f64", 8, true;
}

/// A dtype of candle's that [`DType`] does not name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OtherDType(pub(super) Other);

/// candle's name of it.
impl fmt::Debug for OtherDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
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

/// The dtype that state and arithmetic have for a parameter of `dtype`: F64 for F64, else F32.
pub(crate) fn compute_dtype(dtype: impl Into<DType>) -> DType {
    if dtype.into() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The largest number of the dtype that [`compute_dtype`] gives.
pub(crate) fn largest(dtype: impl Into<DType>) -> f64 {
    if dtype.into() == DType::F64 { f64::MAX } else { f32::MAX.into() }
}

/// Whether the dtype of a master is wider than that of its parameter.
pub(crate) fn is_wider(master: impl Into<DType>, parameter: impl Into<DType>) -> bool {
    parameter.into().size_in_bytes() < master.into().size_in_bytes()
}
