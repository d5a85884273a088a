use candle_core::DType;

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
}
}

fn moved_before(moved: &[String]) -> String {
    if moved.is_empty() {
        return String::new();
    }
    format!(". It was exchanged during the call, and {} had moved before: take model and state from a checkpoint", moved.join(", "))
}
