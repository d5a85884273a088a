//! What the crate does with which dtypes.

use candle_core::DType;

/// Whether the engines read and write this dtype.
pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// The dtype that state and arithmetic have for a parameter of `dtype`: F64 for F64, else F32.
pub(crate) fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Whether a master of this dtype says more than a parameter of that one.
pub(crate) fn is_wider(master: DType, parameter: DType) -> bool {
    parameter.size_in_bytes() < master.size_in_bytes()
}
