//! The interface between the device engine and what runs its code: `cuda` or `emulation`.

use std::sync::Arc;

use candle_core::Tensor;

use crate::engine::memory::Buffer;
use crate::error::Result;

/// A device during one call (a commit, or a turn of reductions): hands out addresses, then runs launches.
///
/// The data of the call lives for `'a`.
pub(in crate::engine) trait Backend<'a> {
    /// A function that is ready to run.
    type Function: Clone;

    /// The function of a source, which is compiled if it is new. `None` if the source does not compile, so
    /// that tensor operations have to do the work.
    fn function(&mut self, source: &str) -> Result<Option<Self::Function>>;

    /// The address of the first element of a contiguous tensor that is read. Takes the tensor by value,
    /// because the tensor may be a copy that nothing else holds.
    fn read_address(&mut self, tensor: Tensor) -> Result<u64>;

    /// The address of the first element of a contiguous tensor that is read and written.
    fn write_address(&mut self, tensor: Tensor) -> Result<u64>;

    fn read_state_address(&mut self, state: &'a Buffer) -> Result<u64>;

    fn write_state_address(&mut self, state: &'a mut Buffer) -> Result<u64>;

    /// Runs the launches one after another, and may return before they are done. Together they have
    /// `result_count` results.
    fn launch(&mut self, launches: Vec<Launch<Self::Function>>, result_count: usize) -> Result<()>;

    /// The results. Waits for the launches if they have results, otherwise returns at once.
    fn read_results(self) -> Result<Vec<f64>>;
}

/// One function, and the table of all leaves that it runs on.
pub(in crate::engine) struct Launch<F> {
    pub(in crate::engine) function: F,
    #[cfg_attr(
        not(feature = "emulate"),
        expect(dead_code, reason = "a device has it compiled")
    )]
    pub(in crate::engine) source: Arc<str>,
    /// One row of equal length for each leaf, with the fields that the source declares.
    pub(in crate::engine) rows: Vec<u64>,
    /// The index of the first block of each leaf.
    pub(in crate::engine) block_offsets: Vec<u32>,
    pub(in crate::engine) blocks: u32,
    /// The index of the first block's result among all results, if the function reduces.
    pub(in crate::engine) first_result: Option<usize>,
}
