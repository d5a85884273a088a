//! What the device engine needs of whatever runs its code.

use std::sync::Arc;

use candle_core::{Tensor, Var};

use crate::engine::memory::Buffer;
use crate::error::Result;

/// A device during one call: hands out addresses, and runs launches.
///
/// `'a` is how long the data of the call lives.
pub(in crate::engine) trait Backend<'a> {
    /// A function that is ready to run.
    type Function: Clone;

    /// Compiles a source, or finds it compiled. `None`, if that cannot be done and tensor operations are to
    /// do the work instead.
    fn function(&mut self, source: &str) -> Result<Option<Self::Function>>;

    /// The address of the first element of a contiguous tensor that is read.
    fn read(&mut self, tensor: Tensor) -> Result<u64>;

    /// The address of the first element of a variable that is read and written.
    fn write(&mut self, tensor: &'a Tensor) -> Result<u64>;

    /// The address of a state tensor that is read.
    fn read_state(&mut self, state: &'a Buffer) -> Result<u64>;

    /// The address of a state tensor that is read and written.
    fn write_state(&mut self, state: &'a mut Buffer) -> Result<u64>;

    /// The address of the first element of a new variable, which is written.
    fn write_new(&mut self, variable: Var) -> Result<u64>;

    /// Runs the launches one after another. It need not wait until they are done. `results` is how many
    /// numbers they find.
    fn launch(&mut self, launches: Vec<Launch<Self::Function>>, results: usize) -> Result<()>;

    /// Waits for the launches and returns their results. Returns at once if there are none.
    fn read_results(self) -> Result<Vec<f64>>;
}

/// One function over all leaves that need it.
pub(in crate::engine) struct Launch<F> {
    pub(in crate::engine) function: F,
    /// The source of the function.
    #[cfg_attr(not(feature = "emulate"), expect(dead_code, reason = "a device has it compiled"))]
    pub(in crate::engine) source: Arc<str>,
    /// How many leaves there are.
    pub(in crate::engine) leaves: usize,
    /// One row of equal length for each leaf, laid out as the source says.
    pub(in crate::engine) rows: Vec<u64>,
    /// The index of the first block of each leaf.
    pub(in crate::engine) block_offsets: Vec<u32>,
    /// How many blocks there are.
    pub(in crate::engine) blocks: u32,
    /// The index of the first block's result among all results, if the function reduces.
    pub(in crate::engine) results: Option<usize>,
}
