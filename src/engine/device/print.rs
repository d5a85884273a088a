//! A recording as CUDA C: straight-line code with a name for every number.

use candle_core::DType;

use super::machine::THREADS;
use super::recording::{Array, End, Folding, Recording, Role};
use crate::value::{Binary, Comparison, Node, Unary};

/// How many elements a block works on in a step.
pub(super) const CHUNK: usize = 1 << 14;

/// A recording with what its table and its source need to agree on.
pub(super) struct Program {
    recording: Recording,
    live: Vec<bool>,
    /// Which arrays are read or written, in the order of the table.
    pub(super) arrays: Vec<usize>,
    /// Which scalars the code uses, in the order of the table.
    pub(super) scalars: Vec<usize>,
    /// How many neighbouring elements one access moves: 128 bits of the widest.
    pub(super) lanes: usize,
}

/// A field of a leaf that points to its data.
struct Pointer {
    to: &'static str,
    name: String,
    /// What is there.
    role: Role,
    reads: bool,
    writes: bool,
}

impl Program {
    pub(super) fn new(recording: &Recording) -> Self {
        let recording = recording.shared();
        let live = recording.live();
        let arrays: Vec<usize> =
            (0..recording.arrays.len()).filter(|&array| recording.reads(&live, array) || recording.writes(array)).collect();
        let used = |(node, live): (&Node, &bool)| if let (Node::Scalar(scalar), true) = (node, live) { Some(*scalar) } else { None };
        let scalars = recording.nodes.iter().zip(&live).filter_map(used).collect();
        let of_elements = arrays.iter().map(|&array| &recording.arrays[array]).filter(|array| array.role != Role::Found);
        let written = match recording.end {
            End::Copy => recording.compute.size_in_bytes(),
            _ => 0,
        };
        let widest = of_elements.map(|array| array.dtype.size_in_bytes()).chain([written]).max().unwrap_or(4);
        Program { live, arrays, scalars, lanes: 16 / widest, recording }
    }

    /// The source, whose function does what was recorded to all leaves.
    pub(super) fn source(&self) -> String {
        match self.recording.end {
            End::Total(fold) | End::Follow(fold) => self.source_of_join(fold),
            _ => self.source_over_elements(),
        }
    }

    fn source_over_elements(&self) -> String {
        let real = c_type(self.recording.compute);
        let prelude = include_str!("prelude.cu");
        let constants = format!("enum : unsigned int {{ THREADS = {THREADS}, CHUNK = {CHUNK}, LANES = {} }};", self.lanes);
        let (joined, sum, function) = match self.recording.end {
            End::Fold(fold) => (joined(fold), ", double& sum", include_str!("fold.cu")),
            _ => ("", "", include_str!("step.cu")),
        };
        let fields = indented(self.fields(), "    ");
        let (loads, element, stores) =
            (indented(self.loads(), "    "), indented(self.element(), "        "), indented(self.stores(), "    "));
        format!(
            "typedef {real} real;\n\n{prelude}\n{constants}\n\nstruct Leaf {{\n{fields}}};\n\n{joined}\
             template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i{sum}) {{\n\
             {loads}#pragma unroll\n    for (int j = 0; j < N; ++j) {{\n{element}    }}\n{stores}}}\n\n{function}"
        )
    }

    /// The source that has a block for each leaf.
    fn source_of_join(&self, fold: Folding) -> String {
        let (fields, joined, total) = (indented(self.fields(), "    "), joined(fold), include_str!("join.cu"));
        let joined_parts = |&array: &usize| {
            let name = self.name(array);
            let scale = if fold == Folding::Squares { format!(" * leaf.{name}_scale") } else { String::new() };
            let total = format!("total(leaf.{name}, leaf.{name}_count) * leaf.{name}_scale{scale}");
            let number = if matches!(self.recording.end, End::Follow(_)) { finished(fold, &total) } else { total };
            format!("const real {name} = {number}")
        };
        let mut lines: Vec<String> = self.arrays.iter().map(joined_parts).collect();
        lines.extend(self.computed());
        lines.push(format!("if (threadIdx.x == 0) results[blockIdx.x] = {}", self.operand(self.recording.out)));
        let lines = indented(lines, "    ");
        format!(
            "typedef double real;\ntypedef unsigned long long u64;\n\nenum : unsigned int {{ THREADS = {THREADS} }};\n\n\
             struct Leaf {{\n{fields}}};\n\n{joined}{total}\n\
             extern \"C\" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int*, unsigned int, double* results) {{\n\
             \x20   const Leaf leaf = leaves[blockIdx.x];\n{lines}}}\n"
        )
    }

    /// What the table says of a leaf.
    fn fields(&self) -> Vec<String> {
        let head: &[&str] = match self.recording.end {
            End::Follow(Folding::Powers) => &["double root"],
            End::Total(_) | End::Follow(_) => &[],
            End::Fold(Folding::Powers) => &["u64 length", "u64 aligned", "u64 chunk", "double power"],
            End::Fold(_) => &["u64 length", "u64 aligned", "u64 chunk"],
            End::Random => &["u64 length", "u64 aligned", "u64 key"],
            _ => &["u64 length", "u64 aligned"],
        };
        let mut fields: Vec<String> = head.iter().map(|&field| field.into()).collect();
        for Pointer { to, name, role, writes, .. } in self.pointers() {
            fields.push(format!("{}{to}* {name}", if writes { "" } else { "const " }));
            if let Role::Total(_) = role {
                fields.extend([format!("u64 {name}_count"), format!("double {name}_scale")]);
            }
        }
        if !self.scalars.is_empty() {
            fields.push(format!("real k[{}]", self.scalars.len()));
        }
        fields
    }

    /// The pointers of a leaf, in the order of the table.
    fn pointers(&self) -> Vec<Pointer> {
        let mut pointers = Vec::new();
        for &array in &self.arrays {
            let (reads, writes) = (self.reads(array), self.recording.writes(array));
            let Array { role, dtype } = self.recording.arrays[array];
            pointers.push(Pointer { to: c_type(dtype), name: self.name(array), role, reads, writes });
            if role == Role::SplitX {
                pointers.push(Pointer { to: "short", name: "rest".into(), role, reads, writes });
            }
        }
        let result = match self.recording.end {
            End::Master(dtype) => Some((dtype, "parameter")),
            End::Copy => Some((self.recording.compute, "copy")),
            _ => None,
        };
        if let Some((dtype, name)) = result {
            pointers.push(Pointer { to: c_type(dtype), name: name.into(), role: Role::X, reads: false, writes: true });
        }
        pointers
    }

    /// The name of an array; those of state have a number, so that they are no other name.
    fn name(&self, array: usize) -> String {
        match self.recording.arrays[array].role {
            Role::X | Role::SplitX => "x".into(),
            Role::Gradient if self.recording.arrays.iter().filter(|array| array.role == Role::Gradient).count() == 1 => "dx".into(),
            Role::Gradient => format!("dx_{array}"),
            Role::Compensation => "compensation".into(),
            Role::Found => format!("found_{array}"),
            Role::Total(name) => name.into(),
            Role::Slot(name) => {
                let name: String = name.chars().filter(|letter| letter.is_ascii_alphanumeric()).collect();
                format!("state_{name}_{array}")
            }
        }
    }

    fn reads(&self, array: usize) -> bool {
        self.recording.reads(&self.live, array)
    }

    fn loads(&self) -> Vec<String> {
        let load = |Pointer { to, name, role, reads, .. }| {
            if role == Role::Found {
                return format!("const real {name} = (real)*leaf.{name}");
            }
            let from = if reads { format!(" = load<N>(leaf.{name}, i)") } else { String::new() };
            format!("Lanes<{to}, N> {name}_now{from}")
        };
        self.pointers().into_iter().map(load).collect()
    }

    fn stores(&self) -> Vec<String> {
        let written = self.pointers().into_iter().filter(|pointer| pointer.writes);
        written.map(|Pointer { name, .. }| format!("store<N>(leaf.{name}, i, {name}_now)")).collect()
    }

    /// What happens to element j.
    fn element(&self) -> Vec<String> {
        let Recording { arrays, slots, out, end, .. } = &self.recording;
        let mut lines = Vec::new();
        for &array in self.arrays.iter().filter(|&&array| self.reads(array)) {
            let name = self.name(array);
            match arrays[array].role {
                Role::Found => {}
                Role::SplitX => lines.push("const real x = join(x_now.at[j], rest_now.at[j])".into()),
                _ => lines.push(format!("const real {name} = widen({name}_now.at[j])")),
            }
        }
        lines.extend(self.computed());
        for &(array, node) in slots {
            lines.push(format!("narrow({}, {}_now.at[j])", self.operand(node), self.name(array)));
        }
        let out = || self.operand(*out);
        let x_role = arrays.first().map(|x| x.role);
        match end {
            End::Slots | End::Total(_) | End::Follow(_) => {}
            End::Copy => lines.push(format!("narrow({}, copy_now.at[j])", out())),
            End::Plain | End::Master(_) if x_role == Some(Role::SplitX) => {
                lines.push(format!("split({}, x_now.at[j], rest_now.at[j])", out()))
            }
            End::Plain => lines.push(format!("narrow({}, x_now.at[j])", out())),
            End::Master(_) => {
                lines.push(format!("narrow({}, x_now.at[j])", out()));
                lines.push("narrow(widen(x_now.at[j]), parameter_now.at[j])".into());
            }
            End::Random => lines.push(format!("narrow_at_random({}, random_bits(leaf.key, i + j), x_now.at[j])", out())),
            End::Kahan => {
                lines.push(format!("const real carry = compensation - {}", out()));
                lines.push("narrow(x + carry, x_now.at[j])".into());
                lines.push("narrow(carry - (widen(x_now.at[j]) - x), compensation_now.at[j])".into());
            }
            End::Fold(fold) => lines.push(format!("sum = joined(sum, {})", term(*fold, &out()))),
        }
        lines
    }

    /// The numbers that are computed, each with its name.
    fn computed(&self) -> impl Iterator<Item = String> {
        let live = self.recording.nodes.iter().enumerate().filter(|&(number, _)| self.live[number]);
        live.filter_map(|(number, node)| self.code(*node).map(|(kind, code)| format!("const {kind} a{number} = {code}")))
    }

    /// The type and the code of a number that is computed.
    fn code(&self, node: Node) -> Option<(&'static str, String)> {
        let double = self.recording.compute == DType::F64;
        let function = |float, real| if double { real } else { float };
        let name = |node| self.operand(node);
        Some(match node {
            Node::Input(_) | Node::Scalar(_) => return None,
            Node::Unary(Unary::Neg, a) => ("real", format!("-{}", name(a))),
            Node::Unary(Unary::Sqrt, a) => ("real", format!("{}({})", function("sqrtf", "sqrt"), name(a))),
            Node::Unary(Unary::Abs, a) => ("real", format!("{}({})", function("fabsf", "fabs"), name(a))),
            Node::Binary(op, a, b) => {
                let sign = match op {
                    Binary::Add => "+",
                    Binary::Sub => "-",
                    Binary::Mul => "*",
                    Binary::Div => "/",
                };
                ("real", format!("{} {sign} {}", name(a), name(b)))
            }
            Node::Compare(op, a, b) => {
                let sign = match op {
                    Comparison::Lt => "<",
                    Comparison::Le => "<=",
                    Comparison::Eq => "==",
                };
                ("bool", format!("{} {sign} {}", name(a), name(b)))
            }
            Node::Select(mask, yes, no) => ("real", format!("{} ? {} : {}", name(mask), name(yes), name(no))),
        })
    }

    fn operand(&self, node: usize) -> String {
        match self.recording.nodes[node] {
            Node::Input(array) => self.name(array),
            Node::Scalar(scalar) => {
                format!("leaf.k[{}]", self.scalars.iter().position(|&used| used == scalar).unwrap_or_default())
            }
            _ => format!("a{node}"),
        }
    }
}

fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "double",
        _ => "float",
    }
}

fn indented(lines: Vec<String>, by: &str) -> String {
    lines.into_iter().map(|line| format!("{by}{line};\n")).collect()
}

/// How two folds become one.
fn joined(fold: Folding) -> &'static str {
    match fold {
        Folding::Largest => "static __device__ __forceinline__ double joined(double a, double b) { return a != a || a >= b ? a : b; }\n\n",
        _ => "static __device__ __forceinline__ double joined(double a, double b) { return a + b; }\n\n",
    }
}

/// What an element adds to a fold.
fn term(fold: Folding, gradient: &str) -> String {
    match fold {
        Folding::Total => format!("(double){gradient}"),
        Folding::Sum | Folding::Largest => format!("fabs((double){gradient})"),
        Folding::Squares => format!("(double){gradient} * (double){gradient}"),
        Folding::NonZeros => format!("{gradient} != 0 ? 1.0 : 0.0"),
        Folding::Powers => format!("pow(fabs((double){gradient}), leaf.power)"),
    }
}

/// The norm from the folded total.
fn finished(fold: Folding, total: &str) -> String {
    match fold {
        Folding::Squares => format!("sqrt({total})"),
        Folding::Powers => format!("pow({total}, leaf.root)"),
        Folding::Total | Folding::Sum | Folding::Largest | Folding::NonZeros => total.to_string(),
    }
}
