//! A macro for elementwise rules that also implement `Rule::evaluation`.

/// Implements `Rule` for a struct by the functions `init`, `apply` and `evaluation` of a module, which its
/// family shares. `rule_by` is a macro, because a blanket implementation would overlap with that for
/// `Elementwise`.
macro_rules! rule_by {
    ($Rule:ident, $($module:ident)::+) => {
        impl $crate::rule::Rule for $Rule {
            fn init(&self, x: $crate::rule::Parameter<'_>) -> $crate::error::Result<$crate::rule::State> {
                $($module)::+::init(self, x)
            }

            fn apply<'a>(
                &'a self,
                state: &'a mut $crate::rule::State,
                _x: $crate::rule::Parameter<'a>,
                dx: $crate::rule::Gradient<'a>,
            ) -> $crate::error::Result<$crate::rule::Flow<'a>> {
                $($module)::+::apply(self, state, dx)
            }

            fn kind(&self) -> $crate::rule::Kind {
                $crate::rule::Kind::Elementwise
            }

            fn evaluation<'s>(
                &self,
                state: &'s $crate::rule::State,
            ) -> $crate::error::Result<Option<$crate::rule::Evaluation<'s>>> {
                $($module)::+::evaluation(self, state)
            }
        }
    };
}
pub(super) use rule_by;
