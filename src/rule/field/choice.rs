//! Hyper-parameters that are one of several named values.

use super::FieldValue;

/// One of several named values, as a [`FieldValue`](crate::FieldValue).
///
/// [`choice!`](crate::choice) defines the enums that such values come from.
#[derive(Clone, Copy)]
pub struct Choice {
    index: usize,
    of: &'static Choices,
}

/// The named values that a [`Choice`] is one of; for [`choice!`](crate::choice).
#[derive(Debug, PartialEq, Eq)]
pub struct Choices {
    /// All of them in words, for errors.
    pub expected: &'static str,
    /// Their names.
    pub names: &'static [&'static str],
}

impl Choice {
    /// The value's name.
    pub fn name(self) -> &'static str {
        self.of.names[self.index]
    }

    /// The names of all values that it could be.
    pub fn names(self) -> &'static [&'static str] {
        self.of.names
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
        let index = self.of.names.iter().position(|known| *known == name)?;
        Some(Choice { index, ..self })
    }

    /// Whether both are values of one enum.
    pub(super) fn is_of(self, other: Self) -> bool {
        self.of == other.of
    }

    pub(super) fn expected(self) -> &'static str {
        self.of.expected
    }
}

/// The value with this index, which has to be in range; for [`choice!`](crate::choice).
pub fn choice_of(of: &'static Choices, index: usize) -> FieldValue {
    FieldValue::Choice(Choice { index, of })
}

/// The index of a value that is one of these; for [`choice!`](crate::choice).
pub fn index_in(of: &Choices, value: FieldValue) -> Option<usize> {
    let FieldValue::Choice(choice) = value else { return None };
    (choice.of == of).then_some(choice.index)
}

impl PartialEq for Choice {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index && self.of == other.of
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
///     /// Which way to go.
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
///         /// Which way it goes.
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

        impl $Choice {
            const CHOICES: $crate::__private::Choices = $crate::__private::Choices {
                expected: concat!("one of ", stringify!($First) $(, ", ", stringify!($Name))*),
                names: &[stringify!($First) $(, stringify!($Name))*],
            };
        }

        impl From<$Choice> for $crate::FieldValue {
            fn from(value: $Choice) -> Self {
                const CHOICES: &$crate::__private::Choices = &$Choice::CHOICES;
                $crate::__private::choice_of(CHOICES, value as usize)
            }
        }

        impl $crate::__private::Field for $Choice {
            const EXPECTED: &'static str = Self::CHOICES.expected;

            fn from_value(value: $crate::FieldValue) -> Option<Self> {
                [$Choice::$First $(, $Choice::$Name)*].get($crate::__private::index_in(&Self::CHOICES, value)?).copied()
            }
        }
    };
}

choice! {
    /// What a clipping rule does when the norm is infinite or NaN.
    #[derive(Default)]
    pub enum NonFinite {
        /// [`update`](crate::update) returns an error that names the parameter; nothing changes.
        #[default]
        Error,
        /// The factor is computed from the norm as from any other.
        ///
        /// As with torch's `error_if_nonfinite=False` and Optimisers.jl's `throw = false`. The factor of an
        /// infinite norm is 0: finite elements become 0, infinite ones NaN. A norm of NaN gives NaN.
        Pass,
        /// The whole call is skipped: nothing changes, and the outcome reports it.
        Skip,
    }
}

choice! {
    /// How [`AccumGrad`](crate::AccumGrad) combines the gradients that it collects.
    #[derive(Default)]
    pub enum Average {
        /// Their sum divided by the number of calls.
        #[default]
        Mean,
        /// Their sum.
        Sum,
        /// Their mean, weighted by [`Update::weight`](crate::Update::weight).
        ///
        /// With the number of tokens of each micro-batch as weight it is the mean over all tokens.
        Weighted,
    }
}
