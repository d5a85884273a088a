//! The macro that declares the struct of a rule and implements its description.

/// Declares the struct of a rule with its defaults and ranges.
///
/// The struct has public fields, implements `Clone`, `Debug`, `PartialEq`, `Default` and
/// [`Describe`](crate::Describe), and has a `new` that takes the first field. Each field has the form
/// `name: type = default => range,`. The range is a function of [`range`](crate::range), or a similar
/// function. The type is `f64`, a pair or triple of `f64`, `u64`, `bool`, [`Sizes`](crate::Sizes) or an enum
/// of [`choice!`](crate::choice). A [`Role`](crate::Role) may follow the name of the struct, as in
/// `pub struct Limited: Step`.
///
/// Fields can be added later, but not before the first field. A checkpoint without the new field is restored
/// with the default of the field. So the default should be the value with which the rule acts as before.
///
/// ```
/// use optimisers::{hyper_parameters, range};
///
/// hyper_parameters! {
///     /// Gradient descent with a speed limit.
///     pub struct Limited {
///         /// η: the learning rate.
///         eta: f64 = 0.1 => range::non_negative,
///         /// The largest step.
///         delta: f64 = 1.0 => range::positive,
///     }
/// }
///
/// assert_eq!(Limited::new(0.5), Limited { eta: 0.5, delta: 1.0 });
/// ```
#[macro_export]
macro_rules! hyper_parameters {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Rule:ident $(: $role:ident)? {
            $(#[$first_meta:meta])*
            $first:ident: $First:ty = $first_default:expr => $first_range:expr,
            $($(#[$field_meta:meta])* $field:ident: $Field:ty = $default:expr => $range:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[must_use = "a rule does nothing by itself: pass it to `setup`"]
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $Rule {
            $(#[$first_meta])*
            pub $first: $First,
            $($(#[$field_meta])* pub $field: $Field,)*
        }

        impl Default for $Rule {
            fn default() -> Self {
                Self { $first: $first_default, $($field: $default,)* }
            }
        }

        impl $Rule {
            #[doc = concat!("With the given `", stringify!($first), "` and the default for everything else.")]
            // The update syntax is needless for a rule with one field.
            #[allow(clippy::needless_update)]
            pub fn new($first: $First) -> Self {
                Self { $first, ..Self::default() }
            }
        }

        impl $crate::Describe for $Rule {
            fn describe(&mut self, rule: &mut $crate::Describer<'_>) {
                let default = Self::default();
                rule.kind(stringify!($Rule));
                $(rule.role($crate::Role::$role);)?
                rule.field($crate::__private::field_name(stringify!($first)), &mut self.$first, default.$first, $first_range);
                $(rule.field($crate::__private::field_name(stringify!($field)), &mut self.$field, default.$field, $range);)*
            }
        }
    };
}
