//! The text of a kernel: the engine's code for a leaf (one parameter), and a function of plain arguments that
//! calls it.
//!
//! The engine's code reads pointers and scalars from a row, a struct. The function makes this row of its
//! arguments, so that programs and the engine run the same code, with the same bits.

use super::kernel::{BufferRole, KernelArgument, KernelArray, PrintedKernel};
use crate::engine::{ArrayRole, PointerTo, RowField, RowLayout, THREADS, TracedKernel, code, used, waits};
use crate::numbers::DType;
use crate::rule::{Adjust, Optimiser, SlotFormat};
use crate::rules::{Listing, catalogue, recurrence};

const ENTRY: &str = "optimiser_step";

/// An argument, and its type and name in C.
struct Declaration {
    argument: KernelArgument,
    kind: String,
    name: String,
}

/// Makes the kernel, and the indices of the traced scalars that it takes.
///
/// `x` is the role of the array that the arithmetic works on. `slots` has the names of state tensors in the
/// order of their arrays, and `dependencies` those of the traced scalars.
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
    let declared = declared(&layout, x, slots);
    let body = code(&layout) + "\n" + &entry(&layout, &declared);
    let kernel = PrintedKernel {
        entry: ENTRY,
        arithmetic: traced.compute,
        threads: THREADS as u32,
        elements_per_block: layout.chunk(),
        source: used(include_str!("../engine/cuda/intrinsics.cu"), &body) + "\n" + &body,
        host_source: host(&body, &declared),
        arguments: declared.into_iter().map(|declared| declared.argument).collect(),
        scalars: layout.names,
    };
    (kernel, layout.scalars)
}

/// The arguments of the function: the fields of a row, except those that it computes itself.
fn declared(layout: &RowLayout, x: &BufferRole, slots: &[String]) -> Vec<Declaration> {
    let new = |argument, kind: &str, name: &str| Declaration {
        argument,
        kind: kind.to_string(),
        name: name.to_string(),
    };
    let mut all = Vec::new();
    for field in &layout.fields {
        match field {
            RowField::Length => all.push(new(KernelArgument::Length, "u64", "length")),
            RowField::Key => all.push(new(KernelArgument::Key, "u64", "key")),
            RowField::Pointer(pointer) => {
                let format = if pointer.code.is_some() { SlotFormat::Q8 } else { pointer.dtype.into() };
                let role = role(layout, pointer.to, x, slots);
                let array = KernelArray {
                    name: pointer.name.clone(),
                    role,
                    format,
                    reads: pointer.reads,
                    writes: pointer.writes,
                };
                all.push(new(KernelArgument::Array(array), &pointer.c_type(), &pointer.name));
            }
            RowField::Scalars => {
                let scalar =
                    |(index, name): (usize, &String)| new(KernelArgument::Scalar(index), "real", name);
                all.extend(layout.names.iter().enumerate().map(scalar));
            }
            // `entry` computes `Aligned` itself; the other fields belong to reductions.
            RowField::Aligned | RowField::Chunk | RowField::Power | RowField::Unit => {}
        }
    }
    all
}

fn role(layout: &RowLayout, to: PointerTo, x: &BufferRole, slots: &[String]) -> BufferRole {
    let arrays = &layout.kernel.arrays;
    match to {
        PointerTo::LowBits(_) => BufferRole::LowBits,
        PointerTo::Parameter | PointerTo::Copy => BufferRole::Parameter,
        PointerTo::Array(index) => match arrays[index].role {
            ArrayRole::X | ArrayRole::SplitX(_) => x.clone(),
            ArrayRole::Gradient => BufferRole::Gradient,
            ArrayRole::Compensation => BufferRole::Compensation,
            ArrayRole::Slot(name) => {
                // The array has the rule's own name for it, `slots` the name with the place in a chain.
                let before =
                    arrays[..index].iter().filter(|array| matches!(array.role, ArrayRole::Slot(_))).count();
                BufferRole::Slot(slots.get(before).map_or(name, |name| name).to_string())
            }
        },
    }
}

/// What a step computes, as the comment above its arithmetic.
pub(super) fn comment(optimiser: &Optimiser, parameter: DType, gradient: DType) -> String {
    let listed = catalogue();
    let mut text = format!(
        "// A step of {} for a {parameter} parameter with a {gradient} gradient:\n",
        optimiser.name()
    );
    for member in optimiser.description().all() {
        // Fields are compared, because a rule of the program may have the name of one of this crate's.
        let names = member.rule.fields.iter().map(|field| field.name);
        let is_it = |listing: &&Listing| {
            let own = listing.rule.fields().into_iter().map(|(name, _)| name);
            listing.name == member.rule.kind && own.eq(names.clone())
        };
        if let Some(name) = listed.iter().find(is_it).map(|listing| listing.name)
            && let Some(recurrence) = recurrence(name)
        {
            text += &format!("// {name}: {recurrence}\n");
        }
    }
    text
}

/// The function that a launch calls. It makes the row of its arguments and passes it to `run_block`.
fn entry(layout: &RowLayout, declared: &[Declaration]) -> String {
    let parameters: Vec<String> =
        declared.iter().map(|Declaration { kind, name, .. }| format!("{kind} {name}")).collect();
    let odd: Vec<String> = layout
        .pointers()
        .map(|pointer| format!("(u64){} % ({} * LANES)", pointer.name, pointer.dtype.size_in_bytes()))
        .collect();
    let of_field = |field: &RowField| match field {
        RowField::Aligned => "aligned".to_string(),
        RowField::Key => "key".to_string(),
        RowField::Pointer(pointer) => pointer.name.clone(),
        RowField::Scalars => layout.names.join(", "),
        _ => "length".to_string(),
    };
    let row: Vec<String> = layout.fields.iter().map(of_field).collect();
    format!(
        "extern \"C\" __global__ void __launch_bounds__(THREADS) {ENTRY}({}) {{\n    \
         const u64 aligned = ({}) == 0;\n    const Leaf leaf = {{ {} }};\n    \
         const u64 start = (u64)blockIdx.x * CHUNK;\n    if (start < length) run_block(leaf, start);\n}}\n",
        parameters.join(", "),
        odd.join(" | "),
        row.join(", ")
    )
}

/// The whole source for the host.
fn host(body: &str, declared: &[Declaration]) -> String {
    let switches = if waits(body) { "#define WAITS\n" } else { "" };
    let values: Vec<String> = declared
        .iter()
        .enumerate()
        .map(|(index, Declaration { kind, .. })| format!("*({kind}*)values_now[{index}]"))
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
