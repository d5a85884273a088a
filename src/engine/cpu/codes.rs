//! Between numbers in 8 bits and compute types, a block at a time. `unsafe`: instructions that only some processors have.
#![allow(unsafe_code)]

use crate::engine::Isa;
use crate::engine::kernel::per_isa;
use crate::numbers::Code;
use crate::numbers::codes::BLOCK;
use crate::value::Compute;

per_isa! {
    /// The numbers of a record from `first` on.
    pub(super) fn decoded<T: Compute>(isa, code: Code, record: &[u8], first: usize, dst: &mut [T]) {
        code.decode(record, first, dst, |number| T::rounded(number.into()));
    }
}

per_isa! {
    /// The record of numbers.
    pub(super) fn encoded<T: Compute>(isa, code: Code, src: &[T], record: &mut [u8]) {
        let mut numbers = [0.0; BLOCK];
        for (number, src) in numbers.iter_mut().zip(src) {
            *number = src.as_() as f32;
        }
        code.encode(&numbers[..src.len().min(BLOCK)], record);
    }
}
