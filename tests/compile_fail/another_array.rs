//! Code that trusts a length takes arrays only: nobody else says how long they are.

use optimisers::engine::Array;

/// Slots that could say anything of its length.
pub struct Liar<T>(Vec<T>);

impl<T> AsRef<[T]> for Liar<T> {
    fn as_ref(&self) -> &[T] {
        &self.0
    }
}

impl<T> AsMut<[T]> for Liar<T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> Array<T> for Liar<T> {
    const LEN: usize = 1000;

    fn from_fn(mut make: impl FnMut(usize) -> T) -> Self {
        Liar(vec![make(0)])
    }
}
