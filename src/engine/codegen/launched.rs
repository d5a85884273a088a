//! Printed code for launches over many leaves (parameters with their state): kernels that read, and the
//! function that the host launches.

use super::layout::RowLayout;
use super::print::code;
use super::trace::{BoundKernel, TracedKernel, trace};
use crate::engine::kernel::Reducer;
use crate::engine::plan::{LeafView, Sink};

/// Traces a kernel that reduces elements, or copies elements if there is no reducer. Returns `false` if a
/// dtype cannot be printed.
pub(in crate::engine) fn trace_read(
    view: LeafView<'_, '_>,
    reducer: Option<Reducer>,
    bound: &mut BoundKernel,
) -> bool {
    let sink = reducer.map_or(Sink::Copy(()), |reducer| Sink::Reduce(reducer.op));
    trace(bound, view.job, view.sources(), view.links(), |tracer| {
        let out = if view.is_parameter() { tracer.x } else { tracer.dx };
        (out.node(), sink)
    })
}

/// The source of a launch. The source's function `optimiser` runs the traced kernel on all leaves of a table.
/// The arguments are, in this order: the rows of the table, the index of each leaf's first block, the number
/// of leaves, and, if the kernel reduces, the results, one for each block.
pub(in crate::engine) fn source(layout: &RowLayout) -> String {
    let function = if layout.kernel.reduces() {
        include_str!("reduce.cu")
    } else {
        include_str!("table.cu")
    };
    format!(
        "{}\n\n{}\n{function}",
        code(layout).trim_end(),
        include_str!("leaf_of.cu")
    )
}

impl TracedKernel {
    /// Whether the kernel reduces: each block has one number as its result.
    pub(in crate::engine) fn reduces(&self) -> bool {
        matches!(self.sink, Sink::Reduce(_))
    }
}
