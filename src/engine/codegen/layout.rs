//! The fields of a row, as a list. The printed code declares these fields, and the launch fills them.

use super::THREADS;
use super::trace::{ArrayRole, TracedArray, TracedKernel};
use crate::engine::kernel::ReduceOp;
use crate::engine::plan::{Epilogue, Sink};
use crate::numbers::codes::BLOCK;
use crate::numbers::low_bits::LowBits;
use crate::numbers::value::Node;
use crate::numbers::{Code, DType};

/// What the printed code and the table have in common.
pub(crate) struct RowLayout {
    /// The kernel, with equal expressions merged.
    pub(crate) kernel: TracedKernel,
    /// Which nodes of the kernel the results depend on.
    pub(super) live: Vec<bool>,
    pub(crate) fields: Vec<RowField>,
    /// Which scalars of the kernel the code uses, in the order of the field [`RowField::Scalars`].
    pub(crate) scalars: Vec<usize>,
    /// The names of these scalars. If the list is empty, the code has the scalars as an array.
    pub(crate) names: Vec<String>,
    /// The comment above the arithmetic.
    pub(crate) comment: String,
    /// How many neighbouring elements a thread has: those that 16 bytes of the widest array hold, or the
    /// thread's share of a record of codes.
    pub(in crate::engine) lanes: usize,
}

/// A field of a row: a word of 8 bytes, except for the scalars.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RowField {
    /// How many elements the leaf has.
    Length,
    /// Whether every pointer is aligned to the access of all lanes at once.
    Aligned,
    /// How many elements a block reduces.
    Chunk,
    /// The exponent of a sum of powers.
    Power,
    /// The number that elements are divided by before their powers are taken.
    Unit,
    /// The key of the random bits.
    Key,
    Pointer(Pointer),
    /// The scalars, in the type of the arithmetic: two in a word, if it is F32.
    Scalars,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pointer {
    pub(crate) to: PointerTo,
    /// The dtype of what is read and written for each element.
    pub(crate) dtype: DType,
    /// The code, if the bytes are codes of numbers.
    pub(crate) code: Option<Code>,
    pub(crate) name: String,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PointerTo {
    Array(usize),
    LowBits(LowBits),
    /// The parameter that follows a master.
    Parameter,
    /// A new tensor for the elements.
    Copy,
}

impl RowLayout {
    pub(crate) fn new(kernel: &TracedKernel) -> Self {
        let kernel = kernel.merged();
        let live = kernel.live_nodes();
        let live_scalar = |(node, live): (&Node, &bool)| {
            if let (Node::Scalar(scalar), true) = (node, live) {
                Some(*scalar)
            } else {
                None
            }
        };
        let scalars: Vec<usize> = kernel.nodes.iter().zip(&live).filter_map(live_scalar).collect();
        let pointers = pointers(&kernel, &live);
        // The parameter that follows a master does not count, because it is narrower than the master.
        let sizes = pointers
            .iter()
            .filter(|pointer| pointer.to != PointerTo::Parameter)
            .map(|pointer| pointer.dtype.size_in_bytes());
        // The 32 threads of a warp share a record of codes, because they find the record's scale together.
        let has_codes = pointers.iter().any(|pointer| pointer.code.is_some());
        let lanes = if has_codes {
            BLOCK / 32
        } else {
            16 / sizes.max().unwrap_or(4)
        };
        let mut fields = vec![RowField::Length, RowField::Aligned];
        match kernel.sink {
            Sink::Reduce(ReduceOp::PowerSum) => {
                fields.extend([RowField::Chunk, RowField::Power, RowField::Unit])
            }
            Sink::Reduce(_) => fields.push(RowField::Chunk),
            Sink::Write(Epilogue::Stochastic(())) => fields.push(RowField::Key),
            Sink::Write(_) | Sink::Copy(()) => {}
        }
        fields.extend(pointers.into_iter().map(RowField::Pointer));
        fields.extend((!scalars.is_empty()).then_some(RowField::Scalars));
        RowLayout {
            kernel,
            live,
            fields,
            scalars,
            names: Vec::new(),
            comment: String::new(),
            lanes,
        }
    }

    /// How many elements a block of threads writes. Each thread has one turn, so that the blocks that run at
    /// one time are next to each other in memory: with 16 turns an H200 moved 5 % fewer bytes in a second.
    pub(crate) fn chunk(&self) -> usize {
        THREADS * self.lanes
    }

    pub(crate) fn pointers(&self) -> impl Iterator<Item = &Pointer> {
        self.fields.iter().filter_map(|field| {
            if let RowField::Pointer(pointer) = field {
                Some(pointer)
            } else {
                None
            }
        })
    }

    /// The name that an array has in the printed code, if the code reads or writes the array.
    pub(super) fn name_of(&self, array: usize) -> &str {
        self.pointers()
            .find(|pointer| pointer.to == PointerTo::Array(array))
            .map_or("", |pointer| &pointer.name)
    }
}

/// The pointers of a row: to the arrays that are read or written, and to the targets of results.
fn pointers(kernel: &TracedKernel, live: &[bool]) -> Vec<Pointer> {
    let mut pointers = Vec::new();
    for (array, &TracedArray { role, dtype, code }) in kernel.arrays.iter().enumerate() {
        let (reads, writes) = (kernel.reads(live, array), kernel.writes(array));
        if !reads && !writes {
            continue;
        }
        let dtype = if code.is_some() { DType::U8 } else { dtype };
        pointers.push(Pointer {
            to: PointerTo::Array(array),
            dtype,
            code,
            name: array_name(kernel, array),
            reads,
            writes,
        });
        if let ArrayRole::SplitX(low_bits) = role {
            // In a record of low bits, one access reads or writes the 16-bit values of neighbours. So
            // `aligned` depends on the size of a 16-bit value.
            let dtype = if low_bits == LowBits::All {
                DType::I16
            } else {
                DType::U8
            };
            pointers.push(Pointer {
                to: PointerTo::LowBits(low_bits),
                dtype,
                code: None,
                name: "low_bits".into(),
                reads,
                writes,
            });
        }
    }
    let result_pointer = |to, dtype, name: &str| Pointer {
        to,
        dtype,
        code: None,
        name: name.into(),
        reads: false,
        writes: true,
    };
    match kernel.sink {
        Sink::Write(Epilogue::Master(dtype)) => {
            pointers.push(result_pointer(PointerTo::Parameter, dtype, "parameter"))
        }
        Sink::Copy(()) => pointers.push(result_pointer(PointerTo::Copy, kernel.compute, "copy")),
        _ => {}
    }
    pointers
}

/// The name of an array. The name of a state tensor ends with the array's index, so no two names are equal.
fn array_name(kernel: &TracedKernel, array: usize) -> String {
    match kernel.arrays[array].role {
        ArrayRole::X | ArrayRole::SplitX(_) => "x".into(),
        ArrayRole::Gradient
            if kernel
                .arrays
                .iter()
                .filter(|array| array.role == ArrayRole::Gradient)
                .count()
                == 1 =>
        {
            "dx".into()
        }
        ArrayRole::Gradient => format!("dx_{array}"),
        ArrayRole::Compensation => "compensation".into(),
        ArrayRole::Slot(name) => {
            let name: String = name
                .chars()
                .filter(|letter| letter.is_ascii_alphanumeric())
                .collect();
            format!("state_{name}_{array}")
        }
    }
}
