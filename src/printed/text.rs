//! The text of a kernel: the engine's code for a leaf (one parameter), and a function of plain arguments that
//! calls the engine's code.
//!
//! The engine's code reads pointers and scalars from a row, a struct. The function makes this row from its
//! arguments, so that programs and the engine run the same code, with the same bits.

use super::kernel::{BufferRole, KernelArgument, KernelArray, PrintedKernel};
use crate::engine::{
    ArrayRole, PointerTo, RowField, RowLayout, THREADS, TracedKernel, code, used_helpers, waits,
};
use crate::numbers::DType;
use crate::rule::{Adjust, Optimiser, SlotFormat};
use crate::rules::{Listing, catalogue, recurrence};

const ENTRY: &str = "optimiser_step";

/// An argument, and its type and name in C.
struct Declaration {
    argument: KernelArgument,
    c_type: String,
    name: String,
}

/// The kernel, and the indices of the traced scalars that the kernel takes.
///
/// `x` is the role of the array that the arithmetic works on. `slots` has the names of state tensors in the
/// order of their arrays, and `dependencies` the names of the causes of each traced scalar.
pub(super) fn kernel(
    traced: &TracedKernel,
    x: &BufferRole,
    slots: &[String],
    dependencies: &[String],
    comment: String,
) -> (PrintedKernel, Vec<usize>) {
    let mut layout = RowLayout::new(traced);
    layout.comment = comment;
    let name = |(index, scalar): (usize, &usize)| format!("k{index}{}", dependencies[*scalar]);
    layout.names = layout.scalars.iter().enumerate().map(name).collect();
    let declarations = declare_arguments(&layout, x, slots);
    let body = code(&layout) + "\n" + &entry_function(&layout, &declarations);
    let kernel = PrintedKernel {
        entry: ENTRY,
        arithmetic: traced.compute,
        threads: THREADS as u32,
        elements_per_block: layout.chunk(),
        source: used_helpers(include_str!("../engine/cuda/intrinsics.cu"), &body) + "\n" + &body,
        host_source: host_source(&body, &declarations),
        arguments: declarations
            .into_iter()
            .map(|declaration| declaration.argument)
            .collect(),
        scalars: layout.names,
    };
    (kernel, layout.scalars)
}

/// The arguments of the function: the fields of a row, except those that the function computes itself.
fn declare_arguments(layout: &RowLayout, x: &BufferRole, slots: &[String]) -> Vec<Declaration> {
    let declaration = |argument, c_type: &str, name: &str| Declaration {
        argument,
        c_type: c_type.to_string(),
        name: name.to_string(),
    };
    let mut declarations = Vec::new();
    for field in &layout.fields {
        match field {
            RowField::Length => declarations.push(declaration(KernelArgument::Length, "u64", "length")),
            RowField::Key => declarations.push(declaration(KernelArgument::Key, "u64", "key")),
            RowField::Pointer(pointer) => {
                let format = if pointer.code.is_some() {
                    SlotFormat::Q8
                } else {
                    pointer.dtype.into()
                };
                let array = KernelArray {
                    name: pointer.name.clone(),
                    role: array_role(layout, pointer.to, x, slots),
                    format,
                    reads: pointer.reads,
                    writes: pointer.writes,
                };
                declarations.push(declaration(
                    KernelArgument::Array(array),
                    &pointer.c_type(),
                    &pointer.name,
                ));
            }
            RowField::Scalars => {
                let scalar = |(index, name): (usize, &String)| {
                    declaration(KernelArgument::Scalar(index), "real", name)
                };
                declarations.extend(layout.names.iter().enumerate().map(scalar));
            }
            // The function computes `Aligned` itself; the other fields belong to reductions.
            RowField::Aligned | RowField::Chunk | RowField::Power | RowField::Unit => {}
        }
    }
    declarations
}

/// The role of the array to which a pointer of the row points.
fn array_role(layout: &RowLayout, to: PointerTo, x: &BufferRole, slots: &[String]) -> BufferRole {
    let arrays = &layout.kernel.arrays;
    match to {
        PointerTo::LowBits(_) => BufferRole::LowBits,
        PointerTo::Parameter | PointerTo::Copy => BufferRole::Parameter,
        PointerTo::Array(index) => match arrays[index].role {
            ArrayRole::X | ArrayRole::SplitX(_) => x.clone(),
            ArrayRole::Gradient => BufferRole::Gradient,
            ArrayRole::Compensation => BufferRole::Compensation,
            ArrayRole::Slot(name) => {
                // `name` is the slot's name in its rule. `slots` has the name with the place in a chain.
                let slot_index = arrays[..index]
                    .iter()
                    .filter(|array| matches!(array.role, ArrayRole::Slot(_)))
                    .count();
                BufferRole::Slot(slots.get(slot_index).map_or(name, |name| name).to_string())
            }
        },
    }
}

/// The comment above the arithmetic: what a step computes.
pub(super) fn comment(optimiser: &Optimiser, parameter: DType, gradient: DType) -> String {
    let listings = catalogue();
    let mut text = format!(
        "// A step of {} for a {parameter} parameter with a {gradient} gradient:\n",
        optimiser.name()
    );
    for member in optimiser.description().all() {
        // Fields are compared, because a rule of the program may have the name of a rule of this crate.
        let field_names = member.rule.fields.iter().map(|field| field.name);
        let is_of_member = |listing: &&Listing| {
            let listed_names = listing.rule.fields().into_iter().map(|(name, _)| name);
            listing.name == member.rule.kind && listed_names.eq(field_names.clone())
        };
        if let Some(name) = listings.iter().find(is_of_member).map(|listing| listing.name)
            && let Some(recurrence) = recurrence(name)
        {
            text += &format!("// {name}: {recurrence}\n");
        }
    }
    text
}

/// The function that a launch calls. It makes a row from its arguments and passes the row to `run_block`.
fn entry_function(layout: &RowLayout, declarations: &[Declaration]) -> String {
    let parameters: Vec<String> = declarations
        .iter()
        .map(|Declaration { c_type, name, .. }| format!("{c_type} {name}"))
        .collect();
    let misalignments: Vec<String> = layout
        .pointers()
        .map(|pointer| {
            format!(
                "(u64){} % ({} * LANES)",
                pointer.name,
                pointer.dtype.size_in_bytes()
            )
        })
        .collect();
    let value = |field: &RowField| match field {
        RowField::Aligned => "aligned".to_string(),
        RowField::Key => "key".to_string(),
        RowField::Pointer(pointer) => pointer.name.clone(),
        RowField::Scalars => layout.names.join(", "),
        _ => "length".to_string(),
    };
    let row: Vec<String> = layout.fields.iter().map(value).collect();
    format!(
        "extern \"C\" __global__ void __launch_bounds__(THREADS) {ENTRY}({}) {{\n    \
         const u64 aligned = ({}) == 0;\n    const Leaf leaf = {{ {} }};\n    \
         const u64 start = (u64)blockIdx.x * CHUNK;\n    if (start < length) run_block(leaf, start);\n}}\n",
        parameters.join(", "),
        misalignments.join(" | "),
        row.join(", ")
    )
}

/// The whole source for the host.
fn host_source(body: &str, declarations: &[Declaration]) -> String {
    let switches = if waits(body) { "#define WAITS\n" } else { "" };
    let values: Vec<String> = declarations
        .iter()
        .enumerate()
        .map(|(index, Declaration { c_type, .. })| format!("*({c_type}*)values_now[{index}]"))
        .collect();
    // `values_now` is a static, because the shim calls `run_thread` without arguments.
    let launch = format!(
        "\nstatic thread_local void** values_now;\n\nstatic void run_thread() {{ {ENTRY}({}); }}\n\n\
         extern \"C\" void launch(unsigned int blocks, void** values) {{\n    \
         values_now = values;\n    run_blocks(blocks);\n}}\n",
        values.join(", ")
    );
    [
        switches,
        include_str!("../engine/emulation/shim.hpp"),
        body,
        include_str!("../engine/emulation/shim_end.hpp"),
        &launch,
    ]
    .concat()
}
