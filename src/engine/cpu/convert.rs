//! Converts between storage types and compute types, a block at a time. Numbers in 8 bits lie in records of
//! 128 with their scale. `unsafe` is for raw storage pointers and instructions that only some processors
//! have.
//!
//! Widening is exact. Narrowing to 16 bits rounds to nearest, ties to even, in one rounding from the compute
//! type, with the same bits on every instruction set:
//!
//! 1. To round to bf16, just under half of the last kept bit is added to the bits, or exactly half if that
//!    bit is odd. A carry goes into the exponent, up to infinity. NaN is handled separately, because the
//!    carry could make -0 of a NaN.
//! 2. f64 is first rounded to f32, to odd, so that the two roundings have the bits of a single rounding.
//! 3. With AVX2, `avx2.rs` converts f32, because the compiler does not find the best instructions. With
//!    AVX-512, `avx2.rs` converts only between f32 and f16. In all other cases the loops of this file run.
//!
//! Records (codes, and low bits of a split master) can be read in parts, but are written whole: [`store`]
//! must begin where a record begins, and end where a record or the leaf ends.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::avx2;

use std::ops::Range;

use half::{bf16, f16};

use super::pointers::{DataPtr, Elements, LowPtr};
use crate::engine::Isa;
use crate::engine::kernel::{self, LaneArrays, Lanes, per_isa};
use crate::numbers::codes::{self, BLOCK, BLOCKS_TOGETHER, RECORD};
use crate::numbers::low_bits::{self, LOW_RECORD, join_block, joined_24, split_24, split_block};
use crate::numbers::value::Compute;
use crate::numbers::{
    Code, key_at, nearest_bf16, random_bits, round_to_odd, stochastic_bf16, stochastic_f16,
};

/// Rounds to bf16 as a step does.
pub(crate) fn to_bf16(src: &[f32], dst: &mut [bf16]) {
    f32::to_bf16s(Isa::best(), src, dst);
}

/// Rounds to f16 as a step does.
pub(crate) fn to_f16(src: &[f32], dst: &mut [f16]) {
    f32::to_f16(Isa::best(), src, dst);
}

/// A compute type that can be read from and written to every storage type.
pub(super) trait Storable: Compute {
    /// The length of a block of this type, which has as many bytes as a block of f32.
    const BLOCK: usize = kernel::BLOCK * size_of::<f32>() / size_of::<Self>();
    fn lanes(arrays: LaneArrays<'_, Self>) -> Lanes<'_>;
    fn from_f16(isa: Isa, src: &[f16], dst: &mut [Self]);
    fn to_f16(isa: Isa, src: &[Self], dst: &mut [f16]);
    fn from_bf16(value: bf16) -> Self;
    fn to_bf16s(isa: Isa, src: &[Self], dst: &mut [bf16]) {
        convert_each(isa, src, dst, Self::to_bf16);
    }
    fn to_bf16(self) -> bf16;
    /// [`Storable::to_bf16`] for any number but NaN, in fewer instructions.
    fn nearest_bf16(self) -> bf16;
    fn widen(value: f32) -> Self;
    fn narrow(self) -> f32;
    /// Decodes a record from number `first` on.
    fn decode(isa: Isa, code: Code, record: &[u8; RECORD], first: usize, dst: &mut [Self]) {
        decode_part(isa, code, record, first, dst);
    }
    fn encode(isa: Isa, code: Code, src: &[Self], records: &mut [[u8; RECORD]]) {
        encode_records(isa, code, src, records);
    }
    fn from_24(isa: Isa, high: &[bf16], low: &[u8], dst: &mut [Self]) {
        join_each_24(isa, high, low, dst);
    }
    fn to_24(isa: Isa, src: &[Self], high: &mut [bf16], low: &mut [u8]) {
        split_each_24(isa, src, high, low);
    }
    /// The elements of the data. `None` if the data has another type.
    fn elements_of(data: DataPtr) -> Option<Elements<Self>>;
    fn data_ptr(numbers: &mut [Self]) -> DataPtr;
}

impl Storable for f32 {
    fn lanes(arrays: LaneArrays<'_, f32>) -> Lanes<'_> {
        Lanes::F32(arrays)
    }

    fn from_f16(isa: Isa, src: &[f16], dst: &mut [f32]) {
        match isa {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            #[cfg(target_arch = "x86_64")]
            Isa::AVX512 | Isa::AVX2 => unsafe { avx2::widen_f16(src, dst) },
            _ => convert_each(isa, src, dst, f16::to_f32_const),
        }
    }

    fn to_f16(isa: Isa, src: &[f32], dst: &mut [f16]) {
        match isa {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            #[cfg(target_arch = "x86_64")]
            Isa::AVX512 | Isa::AVX2 => unsafe { avx2::narrow_f16(src, dst) },
            _ => convert_each(isa, src, dst, f16::from_f32_const),
        }
    }

    fn to_bf16s(isa: Isa, src: &[f32], dst: &mut [bf16]) {
        match isa {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            #[cfg(target_arch = "x86_64")]
            Isa::AVX2 => unsafe { avx2::narrow_bf16(src, dst, f32::to_bf16) },
            _ => convert_each(isa, src, dst, f32::to_bf16),
        }
    }

    #[inline(always)]
    fn from_bf16(value: bf16) -> f32 {
        f32::from_bits(u32::from(value.to_bits()) << 16)
    }

    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        let (nearest, quiet) = (
            u32::from(self.nearest_bf16().to_bits()),
            (self.to_bits() >> 16) | 0x40,
        );
        bf16::from_bits(if self.is_nan() { quiet } else { nearest } as u16)
    }

    #[inline(always)]
    fn nearest_bf16(self) -> bf16 {
        nearest_bf16(self.to_bits())
    }

    #[inline(always)]
    fn widen(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn narrow(self) -> f32 {
        self
    }

    fn decode(isa: Isa, code: Code, record: &[u8; RECORD], first: usize, dst: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if let (Isa::AVX2, 0, Ok(block)) = (isa, first, <&mut [f32; BLOCK]>::try_from(&mut *dst)) {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            if unsafe { avx2::decode(code, record, block) } {
                return;
            }
        }
        decode_part(isa, code, record, first, dst);
    }

    fn encode(isa: Isa, code: Code, src: &[f32], records: &mut [[u8; RECORD]]) {
        for (src, records) in src
            .chunks(BLOCKS_TOGETHER * BLOCK)
            .zip(records.chunks_mut(BLOCKS_TOGETHER))
        {
            #[cfg(target_arch = "x86_64")]
            if let (Isa::AVX2, (blocks, [])) = (isa, src.as_chunks()) {
                // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
                if unsafe { avx2::encode(code, blocks, records) } {
                    continue;
                }
            }
            encode_records(isa, code, src, records);
        }
    }

    fn from_24(isa: Isa, high: &[bf16], low: &[u8], dst: &mut [f32]) {
        match isa {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            #[cfg(target_arch = "x86_64")]
            Isa::AVX2 => unsafe { avx2::join_24(high, low, dst, joined_24) },
            _ => join_each_24(isa, high, low, dst),
        }
    }

    fn to_24(isa: Isa, src: &[f32], high: &mut [bf16], low: &mut [u8]) {
        match isa {
            // SAFETY: there is such an `Isa` only if the processor has these instructions (`detect`).
            #[cfg(target_arch = "x86_64")]
            Isa::AVX2 => unsafe { avx2::split_24(src, high, low, split_24) },
            _ => split_each_24(isa, src, high, low),
        }
    }

    fn elements_of(data: DataPtr) -> Option<Elements<f32>> {
        if let DataPtr::F32(elements) = data {
            Some(elements)
        } else {
            None
        }
    }

    fn data_ptr(numbers: &mut [f32]) -> DataPtr {
        DataPtr::F32(Elements::from_slice(numbers))
    }
}

impl Storable for f64 {
    fn lanes(arrays: LaneArrays<'_, f64>) -> Lanes<'_> {
        Lanes::F64(arrays)
    }

    fn from_f16(isa: Isa, src: &[f16], dst: &mut [f64]) {
        convert_each(isa, src, dst, |value| f64::from(value.to_f32_const()));
    }

    fn to_f16(isa: Isa, src: &[f64], dst: &mut [f16]) {
        convert_each(isa, src, dst, |value| f16::from_f32_const(round_to_odd(value)));
    }

    #[inline(always)]
    fn from_bf16(value: bf16) -> f64 {
        f64::from(f32::from_bf16(value))
    }

    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        round_to_odd(self).to_bf16()
    }

    #[inline(always)]
    fn nearest_bf16(self) -> bf16 {
        round_to_odd(self).nearest_bf16()
    }

    #[inline(always)]
    fn widen(value: f32) -> f64 {
        value.into()
    }

    #[inline(always)]
    fn narrow(self) -> f32 {
        self as f32
    }

    fn elements_of(data: DataPtr) -> Option<Elements<f64>> {
        if let DataPtr::F64(elements) = data {
            Some(elements)
        } else {
            None
        }
    }

    fn data_ptr(numbers: &mut [f64]) -> DataPtr {
        DataPtr::F64(Elements::from_slice(numbers))
    }
}

per_isa! {
    /// The sum of two gradients, widened.
    pub(super) fn sum_bf16<T: Storable>(isa, a: &[bf16], b: &[bf16], dst: &mut [T]) {
        for ((dst, a), b) in dst.iter_mut().zip(a).zip(b) {
            *dst = T::from_bf16(*a) + T::from_bf16(*b);
        }
    }
}

per_isa! {
    /// Joins upper parts with the low bits of a record from `first` on.
    fn join_record<T: Storable>(isa, high: &[bf16], record: &[u8; LOW_RECORD], first: usize, dst: &mut [T]) {
        join_block(high, record, first, dst, T::widen);
    }
}

per_isa! {
    fn split_record<T: Storable>(isa, src: &[T], high: &mut [bf16], record: &mut [u8; LOW_RECORD]) {
        split_block(src, |value| value.narrow(), high, record);
    }
}

per_isa! {
    /// Joins the two parts of numbers of 24 bits. The upper part, a bf16, is rounded.
    fn join_each_24<T: Storable>(isa, high: &[bf16], low: &[u8], dst: &mut [T]) {
        for ((dst, high), low) in dst.iter_mut().zip(high).zip(low) {
            *dst = T::widen(joined_24(*high, *low));
        }
    }
}

per_isa! {
    fn split_each_24<T: Storable>(isa, src: &[T], high: &mut [bf16], low: &mut [u8]) {
        for ((src, high), low) in src.iter().zip(high).zip(low) {
            (*high, *low) = split_24(src.narrow());
        }
    }
}

per_isa! {
    /// Kahan's sum of x - dx in one loop, see `Pass::store_kahan_sum`.
    pub(super) fn compensate_bf16<T: Storable>(isa, x: &[T], dx: &[T], sum: &mut [bf16], compensation: &mut [bf16]) {
        for (((x, dx), sum), compensation) in x.iter().zip(dx).zip(sum).zip(compensation) {
            let carry = T::from_bf16(*compensation) - *dx;
            *sum = (*x + carry).to_bf16();
            let stored = T::from_bf16(*sum);
            // The loss is 0 after an infinite sum, as in `Pass::store_kahan_sum`. After a finite sum the loss
            // is never NaN, so `nearest_bf16` can round the loss.
            let loss = if stored.is_finite() { carry - (stored - *x) } else { T::zero() };
            *compensation = loss.nearest_bf16();
        }
    }
}

per_isa! {
    fn round_at_random<T: Storable, D: Copy, F: Fn(f32, u32) -> D>(isa, src: &[T], dst: &mut [D], first: u32, key: u64, round: F) {
        let mut element = first;
        for (src, dst) in src.iter().zip(dst) {
            *dst = round(src.narrow(), random_bits(key, element));
            element = element.wrapping_add(1);
        }
    }
}

per_isa! {
    fn convert_each<S: Copy, D: Copy, F: Fn(S) -> D>(isa, src: &[S], dst: &mut [D], convert: F) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = convert(*src);
        }
    }
}

#[inline(always)]
fn cast<S: Compute, T: Compute>(value: S) -> T {
    T::rounded(value.as_())
}

/// Cuts `offset..offset + length` where records begin. The parts are relative to `offset`.
fn record_parts(offset: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let part = start..length.min(start + BLOCK - (offset + start) % BLOCK);
        start = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// Reads `dst.len()` elements of `data` from `offset` on.
///
/// # Safety
/// The data must hold these elements, and nothing may write them meanwhile.
pub(super) unsafe fn load<T: Storable>(isa: Isa, data: DataPtr, offset: usize, dst: &mut [T]) {
    let length = dst.len();
    macro_rules! source {
        ($pointer:ident) => {
            // SAFETY: the caller promises that these elements exist and are not written.
            unsafe { $pointer.read(offset, length) }
        };
    }
    match data {
        DataPtr::F16(pointer) => T::from_f16(isa, source!(pointer), dst),
        DataPtr::Bf16(pointer) => convert_each(isa, source!(pointer), dst, T::from_bf16),
        DataPtr::F32(pointer) => convert_each(isa, source!(pointer), dst, cast),
        DataPtr::F64(pointer) => convert_each(isa, source!(pointer), dst, cast),
        DataPtr::Split(high, LowPtr::Records(records)) => {
            let high = source!(high);
            let bytes = low_bits::stored_bytes(offset % BLOCK + length);
            // SAFETY: the caller promises that these elements exist and are not written.
            let records = unsafe { records.read(offset / BLOCK * LOW_RECORD, bytes) }
                .as_chunks()
                .0;
            for (part, record) in record_parts(offset, length).zip(records) {
                join_record(
                    isa,
                    &high[part.clone()],
                    record,
                    (offset + part.start) % BLOCK,
                    &mut dst[part],
                );
            }
        }
        DataPtr::Split(high, LowPtr::U8(low)) => T::from_24(isa, source!(high), source!(low), dst),
        DataPtr::Coded(records, code) => {
            let bytes = codes::stored_bytes(offset % BLOCK + length);
            // SAFETY: the caller promises that these elements exist and are not written.
            let records = unsafe { records.read(offset / BLOCK * RECORD, bytes) }
                .as_chunks()
                .0;
            for (part, record) in record_parts(offset, length).zip(records) {
                T::decode(isa, code, record, (offset + part.start) % BLOCK, &mut dst[part]);
            }
        }
    }
}

/// Writes `src` to the elements of `data` from `offset` on. Records are written whole.
///
/// # Safety
/// The data must hold these elements, and nothing else may access them meanwhile. If the data is in records,
/// all elements of the records must be among these elements.
pub(super) unsafe fn store<T: Storable>(isa: Isa, src: &[T], data: DataPtr, offset: usize) {
    let length = src.len();
    macro_rules! target {
        ($pointer:ident) => {
            // SAFETY: the caller promises that these elements exist and that the access is exclusive.
            unsafe { $pointer.write(offset, length) }
        };
    }
    match data {
        DataPtr::F16(pointer) => T::to_f16(isa, src, target!(pointer)),
        DataPtr::Bf16(pointer) => T::to_bf16s(isa, src, target!(pointer)),
        DataPtr::F32(pointer) => convert_each(isa, src, target!(pointer), cast),
        DataPtr::F64(pointer) => convert_each(isa, src, target!(pointer), cast),
        DataPtr::Split(high, LowPtr::Records(records)) => {
            let high = target!(high);
            // SAFETY: the caller promises that these elements exist, that the access is exclusive, and that
            // their records have no other elements.
            let records =
                unsafe { records.write(offset / BLOCK * LOW_RECORD, low_bits::stored_bytes(length)) }
                    .as_chunks_mut()
                    .0;
            for ((src, high), record) in src.chunks(BLOCK).zip(high.chunks_mut(BLOCK)).zip(records) {
                split_record(isa, src, high, record);
            }
        }
        DataPtr::Split(high, LowPtr::U8(low)) => T::to_24(isa, src, target!(high), target!(low)),
        DataPtr::Coded(records, code) => {
            // SAFETY: the caller promises that these elements exist, that the access is exclusive, and that
            // their records have no other elements.
            let records = unsafe { records.write(offset / BLOCK * RECORD, codes::stored_bytes(length)) };
            T::encode(isa, code, src, records.as_chunks_mut().0);
        }
    }
}

/// [`store`], but rounds numbers up or down at random if the data has 16 bits.
///
/// # Safety
/// As [`store`].
pub(super) unsafe fn store_at_random<T: Storable>(
    isa: Isa,
    src: &[T],
    data: DataPtr,
    offset: usize,
    key: u64,
) {
    // The key changes every 2³² elements.
    let elements_until_next_key = (1 << 32) - (offset as u64 & 0xffff_ffff);
    if src.len() as u64 > elements_until_next_key {
        let (first, rest) = src.split_at(elements_until_next_key as usize);
        // SAFETY: the caller promises that all elements exist and that the access is exclusive. Each part has
        // some of these elements.
        return unsafe {
            store_at_random(isa, first, data, offset, key);
            store_at_random(isa, rest, data, offset + first.len(), key);
        };
    }
    let (length, first, key) = (src.len(), offset as u32, key_at(key, offset));
    match data {
        // SAFETY: the caller promises that these elements exist and that the access is exclusive.
        DataPtr::Bf16(elements) => round_at_random(
            isa,
            src,
            unsafe { elements.write(offset, length) },
            first,
            key,
            stochastic_bf16,
        ),
        // SAFETY: the caller promises that these elements exist and that the access is exclusive.
        DataPtr::F16(elements) => round_at_random(
            isa,
            src,
            unsafe { elements.write(offset, length) },
            first,
            key,
            stochastic_f16,
        ),
        // SAFETY: the caller promises that these elements exist and that the access is exclusive.
        data => unsafe { store(isa, src, data, offset) },
    }
}

/// Reads the elements of `data` at the offsets that `positions` yields.
///
/// # Safety
/// The data must hold these elements, and nothing may write them meanwhile.
pub(super) unsafe fn gather<T: Storable>(
    data: DataPtr,
    positions: impl Iterator<Item = usize>,
    dst: &mut [T],
) {
    for (dst, position) in dst.iter_mut().zip(positions) {
        // SAFETY: the caller promises that the element exists and that nothing writes it.
        unsafe { load(Isa::PORTABLE, data, position, std::slice::from_mut(dst)) };
    }
}

per_isa! {
    /// Decodes a record from number `first` on.
    fn decode_part<T: Compute>(isa, code: Code, record: &[u8; RECORD], first: usize, dst: &mut [T]) {
        code.decode(record, first, dst, |number| T::rounded(number.into()));
    }
}

per_isa! {
    /// Encodes numbers as records.
    fn encode_records<T: Compute>(isa, code: Code, src: &[T], records: &mut [[u8; RECORD]]) {
        code.encode(src, |value| value.as_() as f32, records);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pointers::{buffer_ptr_mut, low_bits_ptr_mut};
    use super::*;
    use crate::engine::memory::Buffer;
    use crate::numbers::DType;
    use crate::tensors::{Device, Tensor};

    fn narrow_both(isa: Isa, values: &[f32]) -> (Vec<u16>, Vec<u16>) {
        let mut halves = vec![f16::ZERO; values.len()];
        let mut brains = vec![bf16::ZERO; values.len()];
        f32::to_f16(isa, values, &mut halves);
        f32::to_bf16s(isa, values, &mut brains);
        (
            halves.iter().map(|h| h.to_bits()).collect(),
            brains.iter().map(|b| b.to_bits()).collect(),
        )
    }

    /// Every upper half of an f32 with lower halves around each rounding decision.
    fn around_every_tie() -> Vec<f32> {
        let lows = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u32::from(u16::MAX))
            .flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low)))
            .collect()
    }

    #[test]
    fn narrowing_is_the_same_on_every_instruction_set() {
        let values = around_every_tie();
        let portable = narrow_both(Isa::PORTABLE, &values);
        for isa in [Isa::avx2(), Isa::avx512()].into_iter().flatten() {
            assert_eq!(narrow_both(isa, &values), portable);
            // A call with a NaN converts all its numbers by portable code.
            for values in values.chunks(75) {
                assert_eq!(narrow_both(isa, values), narrow_both(Isa::PORTABLE, values));
            }
        }
        for (value, bits) in values.iter().zip(&portable.1) {
            assert_eq!(*bits, bf16::from_f32(*value).to_bits(), "{value:e}");
        }
    }

    #[test]
    fn numbers_of_24_bits_are_the_same_on_every_instruction_set() {
        let values = around_every_tie();
        let round_trip = |isa, values: &[f32]| {
            let (mut high, mut low, mut back) = (
                vec![bf16::ZERO; values.len()],
                vec![0; values.len()],
                vec![0f32; values.len()],
            );
            f32::to_24(isa, values, &mut high, &mut low);
            f32::from_24(isa, &high, &low, &mut back);
            let bits: Vec<u32> = back.into_iter().map(f32::to_bits).collect();
            (high.into_iter().map(bf16::to_bits).collect::<Vec<_>>(), low, bits)
        };
        for isa in [Isa::avx2(), Isa::avx512()].into_iter().flatten() {
            assert_eq!(round_trip(isa, &values), round_trip(Isa::PORTABLE, &values));
            // A call with a NaN converts all its numbers by portable code.
            for values in values.chunks(75) {
                assert_eq!(round_trip(isa, values), round_trip(Isa::PORTABLE, values));
            }
        }
    }

    #[test]
    fn widening_is_the_same_on_every_instruction_set() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut portable = vec![0f32; halves.len()];
        f32::from_f16(Isa::PORTABLE, &halves, &mut portable);
        let mut vector = vec![0f32; halves.len()];
        f32::from_f16(Isa::best(), &halves, &mut vector);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&portable), bits(&vector));
    }

    /// Narrows all 2³² floats and compares the results with those of `half`:
    /// `cargo test --release --lib every_float -- --ignored --nocapture`.
    #[test]
    #[ignore = "takes minutes"]
    fn every_float_is_narrowed_as_half_narrows_it() {
        for isa in [Some(Isa::PORTABLE), Isa::avx2(), Isa::avx512()]
            .into_iter()
            .flatten()
        {
            for chunk in 0..1 << 16 {
                let values: Vec<f32> = (0..1 << 16)
                    .map(|low| f32::from_bits(chunk << 16 | low))
                    .collect();
                let (halves, brains) = narrow_both(isa, &values);
                for ((value, half), brain) in values.iter().zip(halves).zip(brains) {
                    assert_eq!(
                        half,
                        f16::from_f32_const(*value).to_bits(),
                        "{value:e} on {isa:?}"
                    );
                    assert_eq!(brain, bf16::from_f32(*value).to_bits(), "{value:e} on {isa:?}");
                }
            }
            println!("narrowed {isa:?}: no difference among all floats");
        }
    }

    /// Encodes all floats from 0 to 1, in records whose largest number is 1:
    /// `cargo test --release --lib every_code -- --ignored --nocapture`.
    #[test]
    #[ignore = "takes minutes"]
    fn every_code_is_near_its_number() {
        for isa in [Some(Isa::PORTABLE), Isa::avx2(), Isa::avx512()]
            .into_iter()
            .flatten()
        {
            for code in [Code::Signed, Code::NonNegative] {
                let mut worst = (0.0, 0f32);
                for first in (0..=1f32.to_bits()).step_by(BLOCK - 1) {
                    // The first number sets the scale.
                    let mut numbers: [f32; BLOCK] =
                        std::array::from_fn(|i| f32::from_bits(first + i as u32 - u32::from(i > 0)).min(1.0));
                    numbers[0] = 1.0;
                    let (mut record, mut back) = ([0; RECORD], [0f32; BLOCK]);
                    f32::encode(isa, code, &numbers, std::slice::from_mut(&mut record));
                    f32::decode(isa, code, &record, 0, &mut back);
                    for (number, back) in numbers.iter().zip(back) {
                        let smallest = 1.125 * 2f32.powi(if code == Code::Signed { -15 } else { -31 });
                        if *number < smallest {
                            // 0 is the neighbour of the smallest code. Without a sign, only 0 becomes 0.
                            let is_near = code == Code::Signed || (*number == 0.0) == (back == 0.0);
                            assert!(
                                is_near && back <= smallest * 1.25,
                                "{number:e} became {back:e} on {isa:?}"
                            );
                            continue;
                        }
                        // An octave has eight codes.
                        let error =
                            f64::from((number - back).abs()) / 2f64.powi(number.log2().floor() as i32 - 3);
                        worst = if error > worst.0 { (error, *number) } else { worst };
                        assert!(error <= 1.0, "{number:e} became {back:e} on {isa:?}");
                    }
                }
                println!(
                    "codes {isa:?} {code:?}: at most {:.6} of the distance of two codes, for {:e}",
                    worst.0, worst.1
                );
            }
        }
    }

    /// Records of numbers of all sizes and zeros of both signs, some with a number that is not finite.
    ///
    /// Each record is encoded alone, and all records are encoded together.
    #[test]
    fn codes_are_the_same_on_every_instruction_set() {
        // More blocks than are encoded together, and a short block.
        const LENGTH: usize = (BLOCKS_TOGETHER + 1) * BLOCK + 37;
        let mut state = 7u64;
        let mut random = || {
            state = state
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as u32
        };
        for round in 0..500u32 {
            let mut numbers = [0f32; LENGTH];
            for (block, numbers) in numbers.chunks_mut(BLOCK).enumerate() {
                let spread = [1, 8, 40, 255][(round as usize + block) % 4];
                for number in numbers {
                    let exponent = (255 - spread.min(1 + round % 255) + random() % spread).min(254);
                    *number = f32::from_bits(random() << 31 | exponent << 23 | random() & 0x7f_ffff);
                }
            }
            (0..random() % 16).for_each(|_| {
                numbers[random() as usize % LENGTH] = [0.0, -0.0, 1e-45][random() as usize % 3]
            });
            if round % 3 == 0 {
                numbers[random() as usize % LENGTH] =
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random() as usize % 3];
            }
            if round < 6 {
                numbers[round as usize * BLOCK..]
                    .iter_mut()
                    .take(BLOCK)
                    .for_each(|number| *number = -0.0);
            }
            for code in [Code::Signed, Code::NonNegative] {
                let round_trip = |isa, together: usize| {
                    let mut records = [[0; RECORD]; LENGTH.div_ceil(BLOCK)];
                    for (numbers, records) in
                        numbers.chunks(together * BLOCK).zip(records.chunks_mut(together))
                    {
                        f32::encode(isa, code, numbers, records);
                    }
                    let mut back = [0f32; LENGTH];
                    for (back, record) in back.chunks_mut(BLOCK).zip(&records) {
                        f32::decode(isa, code, record, 0, back);
                    }
                    (records, back.map(f32::to_bits))
                };
                let portable = round_trip(Isa::PORTABLE, 1);
                for isa in [Some(Isa::PORTABLE), Isa::avx2(), Isa::avx512()]
                    .into_iter()
                    .flatten()
                {
                    assert!(round_trip(isa, 1) == portable, "{code:?} on {isa:?} {numbers:?}");
                    assert!(
                        round_trip(isa, numbers.len()) == portable,
                        "{code:?} on {isa:?} together {numbers:?}"
                    );
                }
            }
        }
    }

    /// Reads parts of records that begin and end anywhere, and writes records in the middle.
    #[test]
    fn any_part_of_records_is_read() {
        const LENGTH: usize = (BLOCKS_TOGETHER + 1) * BLOCK + 37;
        let numbers: Vec<f32> = (0..LENGTH).map(|i| (i as f32 - 300.0) * 0.37).collect();
        let zeros = |dtype: DType| Tensor::zeros(LENGTH, dtype.into(), &Device::Cpu).expect("zeros");
        let mut codes = Buffer::coded(&zeros(DType::F32), Code::Signed).expect("state in 8 bits");
        let mut low = Buffer::of_zeros(
            LENGTH.into(),
            DType::U8,
            Some(crate::numbers::Records::LowBits),
            &Device::Cpu,
        )
        .expect("low bits");
        let mut high = Buffer::new(&zeros(DType::BF16)).expect("bf16");
        let low = low_bits_ptr_mut(&mut low).expect("memory");
        let split = buffer_ptr_mut(&mut high)
            .expect("memory")
            .with_low_bits(Some(low))
            .expect("both parts");
        let coded = buffer_ptr_mut(&mut codes).expect("memory");
        for (data, is_exact) in [(coded, false), (split, true)] {
            let read = |offset, length| {
                let mut part = vec![0f32; length];
                // SAFETY: the memory has `LENGTH` numbers, no caller reads more, and nothing writes
                // meanwhile.
                unsafe { load(Isa::best(), data, offset, &mut part) };
                part
            };
            // SAFETY: the memory has these numbers, and nothing else uses the memory.
            unsafe { store(Isa::best(), &numbers, data, 0) };
            let whole = read(0, LENGTH);
            assert!(!is_exact || whole == numbers);
            for (offset, length) in [
                (0, 1),
                (5, 3),
                (100, 60),
                (BLOCK, 2 * BLOCK),
                (130, 400),
                (500, LENGTH - 500),
            ] {
                assert_eq!(
                    read(offset, length),
                    whole[offset..offset + length],
                    "{length} from {offset} of {data:?}"
                );
            }
            // SAFETY: the memory has these numbers, and nothing else uses the memory.
            unsafe { store(Isa::best(), &numbers[..2 * BLOCK], data, 3 * BLOCK) };
            assert_eq!(read(0, 3 * BLOCK), whole[..3 * BLOCK]);
            assert_eq!(read(3 * BLOCK, 2 * BLOCK), whole[..2 * BLOCK]);
            assert_eq!(read(5 * BLOCK, 37), whole[5 * BLOCK..]);
        }
    }

    #[test]
    fn f64_is_rounded_once() {
        // 1 + 2^-11 is a tie of f16, and 1 + 2^-8 a tie of bf16. A little more must round up, although f32
        // cannot hold so little.
        let excess = 2f64.powi(-40);
        let mut half = [f16::ZERO];
        f64::to_f16(Isa::best(), &[1.0 + 2f64.powi(-11) + excess], &mut half);
        assert_eq!(half[0].to_bits(), f16::ONE.to_bits() + 1);
        assert_eq!(
            (1.0 + 2f64.powi(-8) + excess).to_bf16().to_bits(),
            bf16::ONE.to_bits() + 1
        );
        assert_eq!((1.0 + 2f64.powi(-8)).to_bf16(), bf16::ONE);
        assert_eq!(1e300f64.to_bf16(), bf16::INFINITY);
        assert_eq!((-1e300f64).to_bf16(), bf16::NEG_INFINITY);
        assert!(f64::NAN.to_bf16().is_nan());
    }
}
