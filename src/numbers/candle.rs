//! Conversions of candle's dtypes and shapes to this crate's, and back.

use super::{DType, OtherDType, Shape};

/// Implements the conversions of dtypes. The list has the dtypes that both crates name. Other dtypes are
/// wrapped in [`OtherDType`].
macro_rules! dtypes {
    ($($Variant:ident)*) => {
        impl From<candle_core::DType> for DType {
            fn from(dtype: candle_core::DType) -> Self {
                match dtype {
                    $(candle_core::DType::$Variant => DType::$Variant,)*
                    other => DType::Other(OtherDType(other)),
                }
            }
        }

        impl From<DType> for candle_core::DType {
            fn from(dtype: DType) -> Self {
                match dtype {
                    $(DType::$Variant => candle_core::DType::$Variant,)*
                    DType::Other(OtherDType(other)) => other,
                }
            }
        }
    };
}

dtypes! { U8 U32 I16 I32 I64 BF16 F16 F32 F64 }

impl PartialEq<candle_core::DType> for DType {
    fn eq(&self, other: &candle_core::DType) -> bool {
        *self == DType::from(*other)
    }
}

impl PartialEq<DType> for candle_core::DType {
    fn eq(&self, other: &DType) -> bool {
        other == self
    }
}

impl From<candle_core::Shape> for Shape {
    fn from(shape: candle_core::Shape) -> Self {
        shape.into_dims().into()
    }
}

impl From<&candle_core::Shape> for Shape {
    fn from(shape: &candle_core::Shape) -> Self {
        shape.dims().into()
    }
}

impl From<Shape> for candle_core::Shape {
    fn from(shape: Shape) -> Self {
        shape.into_dims().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candles_dtypes_come_back_as_they_went() {
        use candle_core::DType::*;
        for dtype in [
            U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F6E2M3, F6E3M2, F4, F8E8M0,
        ] {
            let own = DType::from(dtype);
            assert_eq!((own == dtype, candle_core::DType::from(own)), (true, dtype));
            assert!(dtype == own, "{dtype:?}");
            assert_eq!(format!("{own:?} {own}"), format!("{dtype:?} {dtype:?}"));
            let (expected, got) = (
                (dtype.as_str(), dtype.size_in_bytes(), dtype.is_float()),
                (own.as_str(), own.size_in_bytes(), own.is_float()),
            );
            assert_eq!(got, expected);
        }
        assert_eq!(size_of::<DType>(), 1);
    }
}
