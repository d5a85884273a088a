//! Converts between numbers in 8 bits and compute types, a block at a time. A record is 128 such numbers with
//! their scale. `unsafe`: instructions that only some processors have.
#![allow(unsafe_code)]

use crate::engine::Isa;
use crate::engine::kernel::per_isa;
use crate::numbers::Code;
use crate::numbers::codes::RECORD;
use crate::numbers::value::Compute;

per_isa! {
    /// Decodes the numbers of a record from `first` on.
    pub(super) fn decoded<T: Compute>(isa, code: Code, record: &[u8; RECORD], first: usize, dst: &mut [T]) {
        code.decode(record, first, dst, |number| T::rounded(number.into()));
    }
}

per_isa! {
    /// Encodes numbers as records.
    pub(super) fn encoded<T: Compute>(isa, code: Code, src: &[T], records: &mut [[u8; RECORD]]) {
        code.encode(src, |value| value.as_() as f32, records);
    }
}
