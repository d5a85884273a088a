//! Activations, which go from one segment to the next: a tensor, several tensors, or a type with tensors.

use candle_core::Tensor;

/// The input or output of a segment of [`Segments`](crate::Segments): one tensor or several.
///
/// Implemented for `Tensor`, for tuples of two to four tensors, and for `Vec<Tensor>`. A type of your own
/// lists its tensors in `tensors`, and is built from as many tensors in `from_tensors`.
///
/// ```
/// use candle_core::Tensor;
/// use optimisers::Activations;
///
/// struct Hidden {
///     states: Tensor,
///     mask: Tensor,
/// }
///
/// impl Activations for Hidden {
///     fn tensors(&self) -> Vec<Tensor> {
///         vec![self.states.clone(), self.mask.clone()]
///     }
///
///     fn from_tensors(tensors: Vec<Tensor>) -> Self {
///         let (states, mask) = Activations::from_tensors(tensors);
///         Hidden { states, mask }
///     }
/// }
/// ```
pub trait Activations {
    /// The tensors of this value, in the order in which [`from_tensors`](Activations::from_tensors) takes
    /// them.
    fn tensors(&self) -> Vec<Tensor>;

    /// The value with these tensors.
    ///
    /// # Panics
    /// May panic if the number of tensors differs from that of [`tensors`](Activations::tensors).
    /// [`Segments`](crate::Segments) always passes the right number.
    fn from_tensors(tensors: Vec<Tensor>) -> Self;
}

impl Activations for Tensor {
    fn tensors(&self) -> Vec<Tensor> {
        vec![self.clone()]
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Self {
        let [tensor] = tensors.try_into().expect(COUNT);
        tensor
    }
}

impl Activations for Vec<Tensor> {
    fn tensors(&self) -> Vec<Tensor> {
        self.clone()
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Self {
        tensors
    }
}

macro_rules! tuples {
    ($(($($name:ident: $Tensor:ty),+))*) => {$(
        impl Activations for ($($Tensor),+) {
            fn tensors(&self) -> Vec<Tensor> {
                let ($($name),+) = self;
                vec![$($name.clone()),+]
            }

            fn from_tensors(tensors: Vec<Tensor>) -> Self {
                let [$($name),+] = tensors.try_into().expect(COUNT);
                ($($name),+)
            }
        }
    )*};
}

tuples! {
    (a: Tensor, b: Tensor)
    (a: Tensor, b: Tensor, c: Tensor)
    (a: Tensor, b: Tensor, c: Tensor, d: Tensor)
}

/// The condition of [`Activations::from_tensors`].
const COUNT: &str = "the number of tensors that `tensors` returns";
