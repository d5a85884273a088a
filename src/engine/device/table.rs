//! The leaves (parameters with their state) of a call as tables: one table for each traced kernel, with a row
//! for each leaf.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::Tensor;
use smallvec::SmallVec;

use super::backend::{Backend, Launch};
use crate::engine::codegen::launched::source;
use crate::engine::codegen::{BoundKernel, PointerTo, RowField, RowLayout, TracedKernel};
use crate::engine::kernel::{Reducer, chunk_length};
use crate::engine::memory::Buffer;
use crate::error::{Error, Result};
use crate::model::lent::defect;
use crate::numbers::DType;
use crate::tensors::allocate;

/// The launches of one call, while they are prepared.
pub(super) struct Tables<'a, B: Backend<'a>> {
    pub(super) backend: B,
    groups: Vec<KernelGroup<B::Function>>,
    /// The last trace, whose memory the next trace uses again.
    last_trace: BoundKernel,
    /// The scalars of all leaves.
    scalars: Vec<f64>,
    call: std::marker::PhantomData<&'a ()>,
}

/// Leaves with the same traced kernel.
struct KernelGroup<F> {
    kernel: TracedKernel,
    printed: Arc<PrintedSource>,
    /// `None` if the source does not compile.
    function: Option<F>,
    rows: Vec<u64>,
    block_offsets: Vec<u32>,
    blocks: u32,
}

struct PrintedSource {
    layout: RowLayout,
    source: Arc<str>,
}

/// The group of one leaf, and the range of the leaf's scalars in [`Tables`].
pub(super) struct RowHandle {
    group: usize,
    scalars: Range<usize>,
}

/// The data of a leaf, from which its row is made.
pub(super) struct LeafData<'a> {
    pub(super) length: usize,
    /// How many elements the whole leaf has. This process may have a part of the leaf.
    pub(super) leaf_length: usize,
    /// The arrays of the trace, in its order: x, the gradients, the state tensors of the steps, Kahan's
    /// compensation. `None` once an address has been taken.
    pub(super) arrays: SmallVec<[Option<LeafArray<'a>>; 4]>,
    /// The address of the low bits of x, if x has some.
    pub(super) low_bits: Option<u64>,
    /// The parameter that follows a master, or a new tensor for the elements.
    pub(super) target: Option<Tensor>,
    pub(super) key: u64,
    pub(super) reducer: Option<Reducer>,
}

/// An array that a kernel works on. Its address is taken when the row is filled.
pub(super) enum LeafArray<'a> {
    Tensor(&'a Tensor),
    /// State that is only read.
    ReadState(&'a Buffer),
    State(&'a mut Buffer),
    /// An array with a known address, which several segments use.
    Address(u64),
}

impl<'a> LeafArray<'a> {
    /// The same array for one more segment; `None` for state that is written, which is borrowed once.
    pub(super) fn duplicate(&self) -> Option<Self> {
        match *self {
            LeafArray::Tensor(tensor) => Some(LeafArray::Tensor(tensor)),
            LeafArray::ReadState(state) => Some(LeafArray::ReadState(state)),
            LeafArray::Address(address) => Some(LeafArray::Address(address)),
            LeafArray::State(_) => None,
        }
    }

    fn address<B: Backend<'a>>(self, backend: &mut B, writes: bool) -> Result<u64> {
        match self {
            LeafArray::Tensor(tensor) if writes => backend.write_address(tensor.clone()),
            LeafArray::Tensor(tensor) if tensor.is_contiguous() => backend.read_address(tensor.clone()),
            LeafArray::Tensor(tensor) => {
                let copy = || tensor.contiguous();
                let dtype = tensor.dtype().into();
                backend.read_address(allocate(tensor.elem_count(), dtype, tensor.device(), copy)?)
            }
            LeafArray::State(state) if writes => backend.write_state_address(state),
            LeafArray::State(state) => backend.read_state_address(state),
            LeafArray::ReadState(state) => backend.read_state_address(state),
            LeafArray::Address(address) => Ok(address),
        }
    }
}

/// The blocks of a leaf among those of its group.
pub(super) struct BlockRange {
    group: usize,
    blocks: Range<usize>,
}

/// The source and layout of a kernel, printed once in the life of the process.
fn print_once(kernel: &TracedKernel) -> Arc<PrintedSource> {
    static PRINTED: LazyLock<Mutex<HashMap<TracedKernel, Arc<PrintedSource>>>> =
        LazyLock::new(Mutex::default);
    let mut sources = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    let print = || {
        let layout = RowLayout::new(kernel);
        Arc::new(PrintedSource {
            source: source(&layout).into(),
            layout,
        })
    };
    sources.entry(kernel.clone()).or_insert_with(print).clone()
}

impl<'a, B: Backend<'a>> Tables<'a, B> {
    pub(super) fn new(backend: B) -> Self {
        let (groups, scalars, call) = (Vec::new(), Vec::new(), std::marker::PhantomData);
        Tables {
            backend,
            groups,
            last_trace: BoundKernel::new(),
            scalars,
            call,
        }
    }

    /// The handle of a leaf with this trace. Returns `None` if a dtype cannot be printed or the source does
    /// not compile.
    pub(super) fn handle(
        &mut self,
        trace: impl FnOnce(&mut BoundKernel) -> bool,
    ) -> Result<Option<RowHandle>> {
        if !trace(&mut self.last_trace) {
            return Ok(None);
        }
        let BoundKernel { kernel, scalars } = &self.last_trace;
        let group = match self.groups.iter().position(|group| group.kernel == *kernel) {
            Some(index) => index,
            None => {
                let printed = print_once(kernel);
                let function = self.backend.function(&printed.source)?;
                self.groups.push(KernelGroup {
                    kernel: kernel.clone(),
                    printed,
                    function,
                    rows: Vec::new(),
                    block_offsets: Vec::new(),
                    blocks: 0,
                });
                self.groups.len() - 1
            }
        };
        let first = self.scalars.len();
        self.scalars.extend(scalars);
        let scalars = first..self.scalars.len();
        Ok(self.groups[group]
            .function
            .is_some()
            .then_some(RowHandle { group, scalars }))
    }

    /// Fills the row of a leaf.
    pub(super) fn add(&mut self, handle: &RowHandle, mut data: LeafData<'a>) -> Result<BlockRange> {
        let group = &mut self.groups[handle.group];
        let (layout, scalars) = (&group.printed.layout, &self.scalars[handle.scalars.clone()]);
        // Chunks of a sum follow from the whole leaf, so that dividing the leaf among ranks changes no sum.
        let chunk = if data.reducer.is_some() {
            chunk_length(data.leaf_length)
        } else {
            layout.chunk()
        };
        let blocks = data.length.div_ceil(chunk) as u32;

        let (start, mut aligned) = (group.rows.len(), true);
        for field in &layout.fields {
            let reducer = data.reducer.unwrap_or(Reducer::sum());
            match field {
                RowField::Length => group.rows.push(data.length as u64),
                // This word is set below, because alignment depends on all pointers.
                RowField::Aligned => group.rows.push(0),
                RowField::Chunk => group.rows.push(chunk as u64),
                RowField::Power => group.rows.push(reducer.p.to_bits()),
                RowField::Unit => group.rows.push(reducer.unit.to_bits()),
                RowField::Key => group.rows.push(data.key),
                RowField::Scalars => push_scalars(
                    &mut group.rows,
                    group.kernel.compute,
                    layout.scalars.iter().map(|&index| scalars[index]),
                ),
                RowField::Pointer(pointer) => {
                    let address = match pointer.to {
                        PointerTo::Array(array) => {
                            let array = data.arrays.get_mut(array).and_then(Option::take);
                            let array = array.ok_or_else(missing_data)?;
                            array.address(&mut self.backend, pointer.writes)?
                        }
                        PointerTo::LowBits(_) => data.low_bits.ok_or_else(missing_data)?,
                        PointerTo::Parameter | PointerTo::Copy => {
                            let target = data.target.take().ok_or_else(missing_data)?;
                            self.backend.write_address(target)?
                        }
                    };
                    aligned &= address.is_multiple_of((pointer.dtype.size_in_bytes() * layout.lanes) as u64);
                    group.rows.push(address);
                }
            }
        }
        if let Some(field) = layout.fields.iter().position(|field| *field == RowField::Aligned) {
            group.rows[start + field] = aligned.into();
        }
        let first = group.blocks as usize;
        group.block_offsets.push(group.blocks);
        group.blocks += blocks;
        Ok(BlockRange {
            group: handle.group,
            blocks: first..first + blocks as usize,
        })
    }

    /// Runs all launches, and waits for their results if there are any.
    pub(super) fn run(mut self) -> Result<Results> {
        let (mut launches, mut group_offsets, mut result_count) =
            (Vec::new(), Vec::with_capacity(self.groups.len()), 0);
        for KernelGroup {
            kernel,
            printed,
            function,
            rows,
            block_offsets,
            blocks,
        } in self.groups
        {
            group_offsets.push(result_count);
            // Leaves without elements have no blocks, and CUDA refuses a launch without blocks.
            let (Some(function), 1..) = (function, blocks) else {
                continue;
            };
            let first_result = kernel.reduces().then_some(result_count);
            result_count += first_result.map_or(0, |_| blocks as usize);
            launches.push(Launch {
                function,
                source: printed.source.clone(),
                rows,
                block_offsets,
                blocks,
                first_result,
            });
        }
        if !launches.is_empty() {
            self.backend.launch(launches, result_count)?;
        }
        Ok(Results {
            group_offsets,
            values: self.backend.read_results()?,
        })
    }
}

pub(super) struct Results {
    /// The index of the first result of each group.
    group_offsets: Vec<usize>,
    values: Vec<f64>,
}

impl Results {
    /// The results of a leaf's blocks.
    pub(super) fn of_leaf(&self, BlockRange { group, blocks }: &BlockRange) -> &[f64] {
        let first = self.group_offsets[*group];
        &self.values[first + blocks.start..first + blocks.end]
    }
}

fn missing_data() -> Error {
    defect("a leaf lacks data that its kernel works on")
}

/// Appends the scalars in the type of the arithmetic, two in a word if that type is F32.
fn push_scalars(rows: &mut Vec<u64>, compute: DType, mut scalars: impl Iterator<Item = f64>) {
    let bits = |scalar: f64| u64::from((scalar as f32).to_bits());
    match compute {
        DType::F64 => rows.extend(scalars.map(f64::to_bits)),
        _ => {
            while let Some(low) = scalars.next() {
                rows.push(bits(low) | scalars.next().map_or(0, |high| bits(high) << 32));
            }
        }
    }
}
