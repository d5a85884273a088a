use candle_core::Shape;

use super::shown::errors;
use crate::field::Sizes;

errors! {
/// A parameter that is not made of the matrices that its rule works on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// A vector or a number.
    #[error(
        "{rule} works on matrices, got the shape {shape:?}; give vectors and numbers to another rule, as `{rule}::with_fallback(AdamW::new(3e-4))` does, or choose one with `setup_with`"
    )]
    NoMatrix {
        /// The rule.
        rule: String,
        /// The parameter's shape.
        shape: Shape,
    },

    /// Rows that cannot be cut into so many heads.
    #[error(
        "{rule}: heads is {heads}, which does not divide the {rows} rows of a matrix; give this parameter a rule of its own with `setup_with`"
    )]
    Heads {
        /// The rule.
        rule: String,
        /// Into how many parts the rows are to be cut.
        heads: u64,
        /// How many rows there are.
        rows: usize,
    },

    /// Parts that are not all rows, or heads of parts.
    #[error(
        "{rule}: parts is {parts}, which are {total} rows in parts with heads {heads}, expected the {rows} rows of a matrix and heads 1; heads of equal size can be counted over all parts"
    )]
    Parts {
        /// The rule.
        rule: String,
        /// The rows of the parts.
        parts: Sizes,
        /// All of them.
        total: usize,
        /// How many rows there are.
        rows: usize,
        /// Into how many parts the rows are to be cut besides.
        heads: u64,
    },
}
}
