//! Prints a traced kernel as CUDA C: straight-line code with a name for every number.
//!
//! ```text
//! constants    real, THREADS, LANES, CHUNK
//! helpers      the functions of prelude.cu, codes.cu and low_bits.cu that are used
//! struct Leaf  a row of the table
//! run<N>       loads N neighbouring elements, computes each, stores them
//! run_block    in kernels that write, the elements of a block of threads: run<LANES> if aligned, else run<1>
//! ```

use super::THREADS;
use super::helpers::used_helpers;
use super::layout::{Pointer, PointerTo, RowField, RowLayout};
use super::trace::ArrayRole;
use crate::engine::kernel::ReduceOp;
use crate::engine::plan::{Epilogue, Sink};
use crate::numbers::codes::{BLOCK, RECORD};
use crate::numbers::low_bits::LowBits;
use crate::numbers::value::{Binary, Comparison, Node, Unary};
use crate::numbers::{Code, DType};

/// The source without a function for the host. If the kernel writes, `run_block` runs a block of one leaf.
pub(crate) fn code(layout: &RowLayout) -> String {
    let mut head = format!(
        "typedef {} real;\n\n\
         enum : unsigned int {{ THREADS = {THREADS}, LANES = {}, CHUNK = THREADS * LANES }};\n",
        c_type(layout.kernel.compute),
        layout.lanes
    );
    let mut helpers = include_str!("prelude.cu").to_string();
    let encoded: Vec<&Pointer> = encoded_arrays(layout).collect();
    let has_codes = layout.pointers().any(|pointer| pointer.code.is_some());
    let is_split = layout
        .pointers()
        .any(|pointer| pointer.to == PointerTo::LowBits(LowBits::All));
    if has_codes || is_split {
        head += &format!("enum : unsigned int {{ BLOCK = {BLOCK} }};\n");
    }
    if has_codes {
        head += &format!(
            "enum : unsigned int {{ RECORD = {RECORD}, CODED = {} }};\n",
            encoded.len()
        );
        helpers.extend(["\n", include_str!("codes.cu")]);
    }
    if is_split {
        helpers.extend(["\n", include_str!("low_bits.cu")]);
    }
    let encode_calls = indented(encoded.iter().enumerate().map(encode_call), "    ");
    let (function, parameter, block_fn) = match layout.kernel.sink {
        Sink::Reduce(op) => (join_function(op).to_string(), ", double& sum", ""),
        _ if encoded.is_empty() => (String::new(), "", include_str!("step.cu")),
        _ => {
            // Codes are stored after `run`, because the threads of a warp find their scale together.
            let signature = "static __device__ __forceinline__ \
                       void encode_all(const Leaf& leaf, u64 i, unsigned int count, const real* next)";
            (
                format!("{signature} {{\n{encode_calls}}}\n\n"),
                ", real* next",
                include_str!("step_codes.cu"),
            )
        }
    };
    let comment = &layout.comment;
    let fields = indented(
        layout.fields.iter().map(|field| declaration(layout, field)),
        "    ",
    );
    let (loads, element, stores) = (
        indented(load_statements(layout), "    "),
        indented(element_statements(layout), "        "),
        indented(store_statements(layout), "    "),
    );
    let body = format!(
        "struct Leaf {{\n{fields}}};\n\n{function}{comment}\
         template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i{parameter}) {{\n\
         {loads}#pragma unroll\n    for (int j = 0; j < N; ++j) {{\n{element}    }}\n{stores}}}\n\n{block_fn}"
    );
    let helpers = used_helpers(&helpers, &(head.clone() + &body));
    format!("{head}\n{helpers}\n{body}")
}

/// A field of the row as C declares it.
fn declaration(layout: &RowLayout, field: &RowField) -> String {
    match field {
        RowField::Length => "u64 length".into(),
        RowField::Aligned => "u64 aligned".into(),
        RowField::Chunk => "u64 chunk".into(),
        RowField::Power => "double power".into(),
        RowField::Unit => "double unit".into(),
        RowField::Key => "u64 key".into(),
        RowField::Pointer(pointer) => format!("{} {}", pointer.c_type(), pointer.name),
        RowField::Scalars if layout.names.is_empty() => format!("real k[{}]", layout.scalars.len()),
        RowField::Scalars => format!("real {}", layout.names.join(", ")),
    }
}

impl Pointer {
    /// The C type of the pointer itself.
    pub(crate) fn c_type(&self) -> String {
        format!("{}{}*", if self.writes { "" } else { "const " }, self.pointee())
    }

    /// The C type of one value that the pointer points to.
    fn pointee(&self) -> &'static str {
        if self.to == PointerTo::LowBits(LowBits::All) {
            "low_record"
        } else {
            c_type(self.dtype)
        }
    }
}

/// The arrays of codes that are written.
fn encoded_arrays(layout: &RowLayout) -> impl Iterator<Item = &Pointer> {
    layout
        .pointers()
        .filter(|pointer| pointer.writes && pointer.code.is_some())
}

/// The call that encodes the next values of an array.
fn encode_call((index, pointer): (usize, &&Pointer)) -> String {
    let is_signed = pointer.code == Some(Code::Signed);
    format!(
        "encode<{is_signed}>(leaf.{}, i, count, next + {index} * LANES)",
        pointer.name
    )
}

/// The statements that load the elements of each array.
fn load_statements(layout: &RowLayout) -> impl Iterator<Item = String> {
    layout.pointers().filter_map(|pointer| {
        let Pointer {
            name, reads, code, ..
        } = pointer;
        Some(match (code, reads) {
            (Some(_), true) => format!("const Codes<N> {name}_now = load_codes<N>(leaf.{name}, i)"),
            (Some(_), false) => return None,
            (None, true) => format!(
                "Lanes<{}, N> {name}_now = load<N>(leaf.{name}, i)",
                pointer.pointee()
            ),
            (None, false) => format!("Lanes<{}, N> {name}_now", pointer.pointee()),
        })
    })
}

/// The statements that store the elements of each array, except codes.
fn store_statements(layout: &RowLayout) -> impl Iterator<Item = String> {
    let pointers = layout
        .pointers()
        .filter(|pointer| pointer.writes && pointer.code.is_none());
    pointers.map(|Pointer { name, .. }| format!("store<N>(leaf.{name}, i, {name}_now)"))
}

/// The statements for element j: inputs, arithmetic, the next values of state, the result.
fn element_statements(layout: &RowLayout) -> impl Iterator<Item = String> {
    widened_inputs(layout)
        .chain(computed_numbers(layout))
        .chain(narrowed_slots(layout))
        .chain(narrowed_result(layout))
}

/// The statements that name the inputs of the arithmetic, widened to its type.
fn widened_inputs(layout: &RowLayout) -> impl Iterator<Item = String> {
    let arrays = &layout.kernel.arrays;
    layout
        .pointers()
        .filter(|pointer| pointer.reads)
        .filter_map(move |Pointer { to, name, code, .. }| match to {
            PointerTo::Array(_) if code.is_some() => {
                let is_signed = *code == Some(Code::Signed);
                Some(format!(
                    "const real {name} = decode<{is_signed}>({name}_now.at.at[j], {name}_now.unit)"
                ))
            }
            PointerTo::Array(array) if matches!(arrays[*array].role, ArrayRole::SplitX(_)) => {
                Some("const real x = join(x_now.at[j], low_bits_now.at[j])".into())
            }
            PointerTo::Array(_) => Some(format!("const real {name} = widen({name}_now.at[j])")),
            PointerTo::LowBits(_) | PointerTo::Parameter | PointerTo::Copy => None,
        })
}

/// The statements that narrow the next values of state. Values in 8 bits stay wide, because they are encoded
/// after `run`.
fn narrowed_slots(layout: &RowLayout) -> impl Iterator<Item = String> {
    layout.kernel.slots.iter().map(move |&(array, node)| {
        let (value, name) = (operand(layout, node), layout.name_of(array));
        match encoded_arrays(layout).position(|pointer| pointer.name == name) {
            Some(index) => format!("next[{index} * LANES + j] = {value}"),
            None => format!("narrow({value}, {name}_now.at[j])"),
        }
    })
}

/// The statements that take the result of the chain to its sink.
fn narrowed_result(layout: &RowLayout) -> Vec<String> {
    let out = operand(layout, layout.kernel.out);
    let epilogue = match layout.kernel.sink {
        Sink::Reduce(op) => return vec![format!("sum = joined(sum, {})", term(op, &out))],
        Sink::Copy(()) => return vec![format!("narrow({out}, copy_now.at[j])")],
        Sink::Write(epilogue) => epilogue,
    };
    let is_split = layout
        .kernel
        .arrays
        .first()
        .is_some_and(|x| matches!(x.role, ArrayRole::SplitX(_)));
    match epilogue {
        Epilogue::StateOnly => vec![],
        Epilogue::Subtract | Epilogue::Master(_) if is_split => {
            vec![format!("split({out}, x_now.at[j], low_bits_now.at[j])")]
        }
        Epilogue::Subtract => vec![format!("narrow({out}, x_now.at[j])")],
        Epilogue::Master(_) => vec![
            format!("narrow({out}, x_now.at[j])"),
            // The parameter is rounded from the stored master and not from `out`, which may be more precise.
            "narrow(widen(x_now.at[j]), parameter_now.at[j])".into(),
        ],
        Epilogue::Stochastic(()) => {
            vec![format!(
                "narrow_at_random({out}, random_bits(leaf.key, i + j), x_now.at[j])"
            )]
        }
        Epilogue::Kahan(()) => vec![
            format!("const real carry = compensation - {out}"),
            "narrow(x + carry, x_now.at[j])".into(),
            "const real stored = widen(x_now.at[j])".into(),
            // `stored - stored` is 0 for finite numbers only. If the sum is infinite, nothing is carried
            // over: the rounding error would be infinite, and the next sum NaN.
            "narrow(stored - stored == 0 ? carry - (stored - x) : 0, compensation_now.at[j])".into(),
        ],
    }
}

/// The definition of each number that is computed.
fn computed_numbers(layout: &RowLayout) -> impl Iterator<Item = String> {
    let live_nodes = layout
        .kernel
        .nodes
        .iter()
        .enumerate()
        .filter(|&(index, _)| layout.live[index]);
    live_nodes.filter_map(|(index, node)| {
        number(layout, *node).map(|(kind, code)| format!("const {kind} a{index} = {code}"))
    })
}

/// The type and the code of a number that is computed; `None` for inputs and scalars, which have names.
fn number(layout: &RowLayout, node: Node) -> Option<(&'static str, String)> {
    let is_double = layout.kernel.compute == DType::F64;
    let function = |in_float, in_double| if is_double { in_double } else { in_float };
    let name = |node| operand(layout, node);
    Some(match node {
        Node::Input(_) | Node::Scalar(_) => return None,
        Node::Unary(Unary::Neg, a) => ("real", format!("-{}", name(a))),
        Node::Unary(Unary::Sqrt, a) => ("real", format!("{}({})", function("sqrtf", "sqrt"), name(a))),
        Node::Unary(Unary::Abs, a) => ("real", format!("{}({})", function("fabsf", "fabs"), name(a))),
        Node::Binary(op, a, b) => ("real", format!("{} {} {}", name(a), sign(op), name(b))),
        Node::Compare(op, a, b) => ("bool", format!("{} {} {}", name(a), comparison_sign(op), name(b))),
        Node::Select(mask, yes, no) => ("real", format!("{} ? {} : {}", name(mask), name(yes), name(no))),
    })
}

/// The name of a node's number.
fn operand(layout: &RowLayout, node: usize) -> String {
    match layout.kernel.nodes[node] {
        Node::Input(array) => layout.name_of(array).to_string(),
        Node::Scalar(scalar) => {
            let index = layout
                .scalars
                .iter()
                .position(|&used| used == scalar)
                .unwrap_or_default();
            layout
                .names
                .get(index)
                .map_or_else(|| format!("leaf.k[{index}]"), |name| format!("leaf.{name}"))
        }
        _ => format!("a{node}"),
    }
}

fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "double",
        DType::U8 => "unsigned char",
        _ => "float",
    }
}

fn indented(lines: impl Iterator<Item = String>, indent: &str) -> String {
    lines.map(|line| format!("{indent}{line};\n")).collect()
}

/// The C function that joins two totals.
fn join_function(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::AbsMax => {
            "static __device__ __forceinline__ double joined(double a, double b) \
             { return a != a || a >= b ? a : b; }\n\n"
        }
        _ => "static __device__ __forceinline__ double joined(double a, double b) { return a + b; }\n\n",
    }
}

/// The summand of an element in a total.
fn term(op: ReduceOp, gradient: &str) -> String {
    match op {
        ReduceOp::Sum => format!("(double){gradient}"),
        ReduceOp::AbsSum | ReduceOp::AbsMax => format!("fabs((double){gradient})"),
        ReduceOp::SquareSum => format!("(double){gradient} * (double){gradient}"),
        ReduceOp::NonZeros => format!("{gradient} != 0 ? 1.0 : 0.0"),
        ReduceOp::PowerSum => format!("pow(fabs((double){gradient}) / leaf.unit, leaf.power)"),
    }
}

fn sign(op: Binary) -> &'static str {
    match op {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
    }
}

fn comparison_sign(op: Comparison) -> &'static str {
    match op {
        Comparison::Lt => "<",
        Comparison::Le => "<=",
        Comparison::Eq => "==",
    }
}
