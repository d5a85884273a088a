//! What only launches over many leaves need: kernels that read, and a function for the host to call.

use super::layout::RowLayout;
use super::print::code;
use super::trace::{BoundKernel, TracedKernel, Tracer, trace};
use crate::engine::kernel::Reducer;
use crate::engine::memory::Buffer;
use crate::engine::plan::{GradientView, Sink};

/// Traces elements that are reduced, or copied to a tensor of the compute dtype. `false`, if a dtype is not
/// printed.
pub(in crate::engine) fn trace_read(
    view: GradientView<'_, '_>,
    reducer: Option<Reducer>,
    into: &mut BoundKernel,
) -> bool {
    let job = view.job;
    let low_bits = job.low_bits.as_deref().map(Buffer::as_low_bits);
    trace(into, job.compute, |graph, arrays, slots| {
        let mut tracer = Tracer::new(graph, arrays, slots, job.x.dtype(), low_bits, view.sources());
        if view.is_parameter() {
            tracer.dx = tracer.x;
        }
        tracer.run(view.links());
        (tracer.dx.node(), reducer.map_or(Sink::Copy(()), |reducer| Sink::Reduce(reducer.op)))
    })
}

/// The source of a launch, whose function `optimiser` runs the traced kernel on all leaves of a table. Its
/// arguments are, in this order: the rows of the table, the index of each leaf's first block, the number of
/// leaves, and, if it reduces, where each block writes its result.
pub(in crate::engine) fn source(layout: &RowLayout) -> String {
    let function = if layout.kernel.reduces() { include_str!("reduce.cu") } else { include_str!("table.cu") };
    format!("{}\n\n{}\n{function}", code(layout).trim_end(), include_str!("leaf_of.cu"))
}

impl TracedKernel {
    /// Whether the kernel reduces: each block finds a number.
    pub(in crate::engine) fn reduces(&self) -> bool {
        matches!(self.sink, Sink::Reduce(_))
    }
}
