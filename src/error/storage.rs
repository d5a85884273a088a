use candle_core::DType;

use super::Error;
use super::shown::errors;

errors! {
/// The memory of a tensor is not what the tensor says.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// A storage that holds fewer elements than its tensor has, or others. candle gives it to in-place
    /// operations by `&mut`, so any of them can put another in its place.
    #[error(
        "the storage of the {tensor} holds {} elements of {:?}, expected {} of {:?}: something has put another storage in its place (an in-place operation or `Tensor::from_storage` can); make the tensor anew{}",
        got.1, got.0, expected.1, expected.0, moved_before(moved)
    )]
    Exchanged {
        /// What the tensor is: `parameter`, `master` or `gradient`.
        tensor: &'static str,
        /// The dtype that the tensor says, and how many elements there must be at least.
        expected: (DType, usize),
        /// What there is.
        got: (DType, usize),
        /// The parameters that had moved before this was found: none, unless the storage was exchanged during
        /// the call.
        moved: Vec<String>,
    },

    /// Memory of other elements than its owner says.
    #[error(
        "the memory lent for the {tensor} has {} elements of {:?}, expected {} of {:?}: `Lend::read` and `Lend::write` have to hand over what `shape` and `dtype` say{}",
        got.1, got.0, expected.1, expected.0, moved_before(moved)
    )]
    Lent {
        /// What it is: `parameter`, `master` or `gradient`.
        tensor: &'static str,
        /// The dtype and the number of elements that its owner says.
        expected: (DType, usize),
        /// What there is.
        got: (DType, usize),
        /// The parameters that had moved before this was found: none, unless the owner said something else during
        /// the call.
        moved: Vec<String>,
    },

    /// Memory whose owner has not run the function that it was given, or more than once.
    #[error(
        "the owner of the {tensor} of {} elements of {:?} has not run the function that `Lend::read` or `Lend::write` was given, or not once{}",
        expected.1, expected.0, moved_before(moved)
    )]
    NotLent {
        /// What it is: `parameter`, `master` or `gradient`.
        tensor: &'static str,
        /// The dtype and the number of elements that its owner says.
        expected: (DType, usize),
        /// As in [`StorageError::Lent`].
        moved: Vec<String>,
    },

    /// Memory whose owner returns an error of its own.
    #[error("the owner of the {tensor} does not lend it: {error}{}", moved_before(moved))]
    Owner {
        /// What it is: `parameter`, `master` or `gradient`.
        tensor: &'static str,
        /// What the owner says.
        error: Box<Error>,
        /// As in [`StorageError::Lent`].
        moved: Vec<String>,
    },

    /// A parameter that is lent with strides.
    #[error("the {tensor} does not lie in row-major order: `Lend::read` has to hand over parameters as `Lend::write` does")]
    OtherOrder {
        /// What it is: `parameter`, or `master`.
        tensor: &'static str,
    },

    /// Two parameters in one memory that may be one, or overlap.
    #[error(
        "{:?} and {:?} are in one memory, and may be one parameter: `Lend::memory` and `Lend::offset` have to say where each begins (handles of one tensor at one offset, with one shape and dtype; several tensors at others)",
        paths[0], paths[1]
    )]
    OneMemory {
        /// Their paths.
        paths: [String; 2],
    },

    /// Memory that is lent to be read, and was to be written.
    #[error("the memory of the {tensor} can only be read")]
    ReadOnly {
        /// What it is: `gradient` or `master`.
        tensor: &'static str,
    },

    /// Strides that lead out of the numbers, or are not as many as the dimensions.
    #[error("elements of shape {dims:?} with strides {strides:?} reach over {expected} elements, got {got}")]
    Strides {
        /// The dimensions.
        dims: Vec<usize>,
        /// How far apart the elements lie in each.
        strides: Vec<usize>,
        /// How many numbers there must be at least.
        expected: usize,
        /// How many there are.
        got: usize,
    },
}
}

fn moved_before(moved: &[String]) -> String {
    if moved.is_empty() {
        return String::new();
    }
    format!(". This came up during the call, and {} had moved before: take model and state from a checkpoint", moved.join(", "))
}
