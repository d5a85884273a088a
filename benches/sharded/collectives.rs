//! What MPI does itself, to compare with. `unsafe`: rsmpi has no call in place, and none that scatters.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::LazyLock;

use half::bf16;
use mpi::ffi;

/// Open MPI's MPI_IN_PLACE, which rsmpi does not name.
const IN_PLACE: *const c_void = std::ptr::without_provenance(1);

/// An operation that may be used by any thread.
struct Operation(ffi::MPI_Op);

// SAFETY: it is made once, and then only read.
unsafe impl Send for Operation {}
// SAFETY: as above.
unsafe impl Sync for Operation {}

static ADD_BF16: LazyLock<Operation> = LazyLock::new(|| {
    // SAFETY: MPI is initialised, and the place is for one operation.
    unsafe {
        let mut operation = ffi::RSMPI_SUM;
        ffi::MPI_Op_create(Some(add_bf16), 1, &mut operation);
        Operation(operation)
    }
});

/// Adds pairs of bf16 numbers, each sum rounded once.
unsafe extern "C" fn add_bf16(
    input: *mut c_void,
    sum: *mut c_void,
    length: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    // SAFETY: MPI gives as many elements of two buffers as it says.
    let (input, sum) = unsafe {
        let length = *length as usize;
        (
            std::slice::from_raw_parts(input.cast::<bf16>(), length),
            std::slice::from_raw_parts_mut(sum.cast::<bf16>(), length),
        )
    };
    for (sum, more) in sum.iter_mut().zip(input) {
        let bits = (wide(*sum) + wide(*more)).to_bits();
        *sum = bf16::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16);
    }
}

/// In a form that the compiler turns into vectors.
pub fn wide(number: bf16) -> f32 {
    f32::from_bits(u32::from(number.to_bits()) << 16)
}

pub fn barrier() {
    // SAFETY: MPI is initialised.
    unsafe { ffi::MPI_Barrier(ffi::RSMPI_COMM_WORLD) };
}

/// The largest number that a rank has.
pub fn largest(own: f64) -> f64 {
    let mut largest = own;
    // SAFETY: both places hold one number.
    unsafe {
        ffi::MPI_Allreduce(
            (&raw const own).cast(),
            (&raw mut largest).cast(),
            1,
            ffi::RSMPI_DOUBLE,
            ffi::RSMPI_MAX,
            ffi::RSMPI_COMM_WORLD,
        )
    };
    largest
}

/// The sum over the ranks.
pub fn all_reduce(numbers: &mut [f32]) {
    let length = c_int::try_from(numbers.len()).expect("less than 2 Gi elements");
    // SAFETY: the place holds so many numbers.
    unsafe {
        ffi::MPI_Allreduce(
            IN_PLACE,
            numbers.as_mut_ptr().cast(),
            length,
            ffi::RSMPI_FLOAT,
            ffi::RSMPI_SUM,
            ffi::RSMPI_COMM_WORLD,
        )
    };
}

/// The sum over the ranks of this rank's part, each of which has as many elements.
pub fn reduce_scatter(numbers: &[bf16], part: &mut [bf16]) {
    let length = c_int::try_from(part.len()).expect("less than 2 Gi elements");
    // SAFETY: there are as many numbers as parts of all ranks have, and MPI takes bf16 for what has its size.
    unsafe {
        ffi::MPI_Reduce_scatter_block(
            numbers.as_ptr().cast(),
            part.as_mut_ptr().cast(),
            length,
            ffi::RSMPI_UINT16_T,
            ADD_BF16.0,
            ffi::RSMPI_COMM_WORLD,
        );
    }
}
