//! Hyper-parameters that are one of several named values.

use super::FieldValue;
use crate::error::Result;

/// One of several named values, as a [`FieldValue`](crate::FieldValue).
///
/// [`choice!`](crate::choice) defines the enums that such values come from.
#[derive(Clone, Copy, PartialEq)]
pub struct Choice {
    index: usize,
    names: &'static [&'static str],
}

impl Choice {
    /// The value's name.
    pub fn name(self) -> &'static str {
        self.names[self.index]
    }

    /// The names of all values of the enum.
    pub fn names(self) -> &'static [&'static str] {
        self.names
    }

    /// Another value of the same enum, by its name; `None` if the name is unknown.
    ///
    /// ```
    /// use optimisers::{FieldValue, NonFinite};
    ///
    /// let FieldValue::Choice(choice) = NonFinite::Skip.into() else { unreachable!() };
    /// assert_eq!((choice.name(), choice.names()), ("Skip", &["Error", "Pass", "Skip"][..]));
    /// assert_eq!(choice.named("Pass").map(FieldValue::Choice), Some(NonFinite::Pass.into()));
    /// assert!(choice.named("Ignore").is_none());
    /// ```
    pub fn named(self, name: &str) -> Option<Self> {
        let index = self.names.iter().position(|other| *other == name)?;
        Some(Choice { index, ..self })
    }

    /// The names in words, for errors.
    pub(super) fn expected(self) -> String {
        format!("one of {}", self.names.join(", "))
    }
}

/// The value with this index of an enum with these names; for [`choice!`](crate::choice). The index has to be
/// in range.
pub fn choice_of(names: &'static [&'static str], index: usize) -> FieldValue {
    FieldValue::Choice(Choice { index, names })
}

/// The index of a value of an enum with these names; for [`choice!`](crate::choice).
pub fn index_in(names: &'static [&'static str], value: FieldValue) -> Result<usize> {
    match value {
        FieldValue::Choice(choice) if choice.names == names => Ok(choice.index),
        _ => Err(value.type_error(Choice { index: 0, names }.expected())),
    }
}

impl std::fmt::Debug for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Defines an enum as a type of hyper-parameters, for [`hyper_parameters!`](crate::hyper_parameters).
///
/// `adjust_field`, configurations and checkpoints use the names of its values.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Elementwise, Slot, choice, hyper_parameters, range, setup, update, value::Value};
///
/// choice! {
///     /// The direction of a step.
///     #[derive(Default)]
///     pub enum Direction {
///         /// Against the gradient.
///         #[default]
///         Down,
///         /// Along the gradient.
///         Up,
///     }
/// }
///
/// hyper_parameters! {
///     /// Steps of one length.
///     pub struct Walk {
///         /// η: how long a step is.
///         eta: f64 = 1.0 => range::non_negative,
///         /// The direction of the step.
///         direction: Direction = Direction::Down => range::any,
///     }
/// }
///
/// impl Elementwise for Walk {
///     type Scalars = f64;
///     type Slots<T> = [T; 0];
///
///     fn slots(&self) -> [Slot; 0] {
///         []
///     }
///
///     fn scalars(&self, _t: u64) -> f64 {
///         if self.direction == Direction::Up { -self.eta } else { self.eta }
///     }
///
///     fn step<V: Value>(eta: f64, _x: V, dx: V, _slots: &mut [V; 0]) -> V {
///         dx.sign() * eta
///     }
/// }
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(Walk::default(), &x)?;
/// state.all().adjust_field("direction", Direction::Up)?;
/// update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// assert_eq!(x.to_vec1::<f32>()?, [2.0]);
///
/// let error = state.all().adjust_field("direction", true).unwrap_err();
/// assert_eq!((error.got(), error.expected()), (Some("true"), Some("one of Down, Up")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! choice {
    (
        $(#[$meta:meta])*
        $vis:vis enum $Choice:ident {
            $(#[$first_meta:meta])*
            $First:ident,
            $($(#[$name_meta:meta])* $Name:ident,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $Choice {
            $(#[$first_meta])*
            $First,
            $($(#[$name_meta])* $Name,)*
        }

        const _: () = {
            const NAMES: &[&str] = &[stringify!($First) $(, stringify!($Name))*];

            impl From<$Choice> for $crate::FieldValue {
                fn from(value: $Choice) -> Self {
                    $crate::__private::choice_of(NAMES, value as usize)
                }
            }

            impl TryFrom<$crate::FieldValue> for $Choice {
                type Error = $crate::Error;

                fn try_from(value: $crate::FieldValue) -> $crate::Result<Self> {
                    let index = $crate::__private::index_in(NAMES, value)?;
                    Ok([$Choice::$First $(, $Choice::$Name)*][index])
                }
            }
        };
    };
}

choice! {
    /// What a clipping rule does when the norm is infinite or NaN.
    #[derive(Default)]
    pub enum NonFinite {
        /// [`update`](crate::update) returns an error that names the parameter; nothing changes.
        #[default]
        Error,
        /// The factor is computed from this norm as from any other norm.
        ///
        /// torch's `error_if_nonfinite=False` and Optimisers.jl's `throw = false` do the same. The factor of
        /// an infinite norm is 0: finite elements become 0, infinite ones NaN. A norm of NaN gives NaN.
        Pass,
        /// The whole call is skipped: nothing changes, and the outcome reports it.
        Skip,
    }
}

choice! {
    /// How [`AccumGrad`](crate::AccumGrad) combines the gradients that it collects.
    #[derive(Default)]
    pub enum Average {
        /// The sum of the gradients, divided by the number of calls.
        #[default]
        Mean,
        /// The sum of the gradients.
        Sum,
        /// The mean of the gradients, weighted by [`Update::weight`](crate::Update::weight).
        ///
        /// If the weight is the number of tokens of each micro-batch, this mean is the mean over all tokens.
        Weighted,
    }
}
