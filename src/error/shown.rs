//! `Debug` of errors.

/// Declares an enum of errors whose `Debug` is its text. A `main` that returns an error prints `Debug`, and
/// so do `unwrap` and `expect`: the remedy would not reach the person otherwise. `{:#?}` has the variant with
/// its fields. `if "torch"` behind a variant: it is there with that feature of the crate.
macro_rules! errors {
    ($(#[$($of_enum:tt)*])* pub enum $name:ident {
        $($(#[$($of_variant:tt)*])* $variant:ident $({ $($named:tt)* })? $(( $($unnamed:tt)* ))? $(if $feature:literal)?),* $(,)?
    }) => {
        $(#[$($of_enum)*])*
        pub enum $name {
            $($(#[$($of_variant)*])* $(#[cfg(feature = $feature)])? $variant $({ $($named)* })? $(( $($unnamed)* ))?),*
        }

        impl std::fmt::Debug for $name {
            #[allow(irrefutable_let_patterns, reason = "some have one variant")]
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                if f.alternate() {
                    $(
                        $(#[cfg(feature = $feature)])?
                        {
                            $crate::error::shown::errors!(@fields self f $name $variant $({ $($named)* })? $(( $($unnamed)* ))?);
                        }
                    )*
                }
                std::fmt::Display::fmt(self, f)
            }
        }
    };
    (@fields $self:ident $f:ident $name:ident $variant:ident) => {
        if let $name::$variant = $self {
            return $f.write_str(stringify!($variant));
        }
    };
    (@fields $self:ident $f:ident $name:ident $variant:ident { $($(#[$($of_field:tt)*])* $field:ident: $type:ty),* $(,)? }) => {
        if let $name::$variant { $($field),* } = $self {
            return $f.debug_struct(stringify!($variant))$(.field(stringify!($field), $field))*.finish();
        }
    };
    (@fields $self:ident $f:ident $name:ident $variant:ident ($(#[$($of_inner:tt)*])* $inner:ty)) => {
        if let $name::$variant(inner) = $self {
            return $f.debug_tuple(stringify!($variant)).field(inner).finish();
        }
    };
    (@fields $self:ident $f:ident $name:ident $variant:ident ($place:ty, $(#[$($of_inner:tt)*])* $inner:ty)) => {
        if let $name::$variant(place, inner) = $self {
            return $f.debug_tuple(stringify!($variant)).field(place).field(inner).finish();
        }
    };
}
pub(crate) use errors;
