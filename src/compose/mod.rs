//! Rules made of rules, and the optimisers that decide how a parameter is stored.

/// The hyper-parameters of a wrapper that adds none: those of its `inner`.
macro_rules! fields_of_inner {
    () => {
        fn fields(&self) -> Vec<(&'static str, $crate::rule::FieldValue)> {
            self.inner.fields()
        }

        fn places(&self) -> Vec<String> {
            self.inner.places()
        }

        fn set_field(&mut self, field: &str, value: $crate::rule::FieldValue) -> $crate::error::Result<bool> {
            self.inner.set_field(field, value)
        }

        fn set_fields(&mut self, values: &[$crate::rule::FieldValue]) -> $crate::error::Result<()> {
            self.inner.set_fields(values)
        }

        fn defaults(&self) -> Vec<(String, Vec<(&'static str, $crate::rule::FieldValue)>)> {
            self.inner.defaults()
        }
    };
}
use fields_of_inner;

mod cautious;
mod chain;
mod either;
mod maximise;
mod mixed;
mod narrow;
mod offload;
mod store_as;

pub use cautious::Cautious;
pub use chain::{Members, OptimiserChain};
pub use either::Either;
pub use maximise::maximise;
pub use mixed::MixedPrecision;
pub use narrow::{Kahan, SplitMaster, StochasticRounding};
pub use offload::Offload;
pub use store_as::StoreAs;
