//! Code that trusts a length takes arrays only: nobody else can name the trait and say how long they are.

use optimisers::value::Array;

/// Slots that could say anything of its length.
pub struct Liar<T>(Vec<T>);

impl<T> Array<T> for Liar<T> {
    const LEN: usize = 1000;

    fn from_fn(mut make: impl FnMut(usize) -> T) -> Self {
        Liar(vec![make(0)])
    }
}
