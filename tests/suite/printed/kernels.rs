//! Kernels for runtimes with buffers of their own, compiled for the host: the bits of an update, with plain
//! memory in place of tensors.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::{Device, Tensor};
use libloading::Library;
use optimisers::printed::{
    BufferRole, BufferStart, KernelArgument, Printed, PrintedKernel, PrintedProgress, PrintedStep, printed,
};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, Average, Cautious, Clamp, ClipGlobalNorm, ClipGrad, ClipNorm, Descent,
    Describe, Describer, Ema, ErrorKind, FieldValue, Flow, Gradient, IntoOptimiser, Kahan, Kind, LAMB, Lend,
    Lookahead, MixedPrecision, Momentum, Muon, Offload, Optimiser, OptimiserChain, Parameter, Prodigy, Q8,
    RAdam, RMSProp, Rprop, Rule, Scale, ScheduleFree, SplitMaster, State, StochasticRounding, StoreAs, View,
    WeightDecay, rules, setup, update,
};

use crate::engine::emulated::can_run;
use support::common::{Vars, bits, grads, is_kind, model, random};
use support::tested::Tested;

const STEPS: usize = 4;

/// An optimiser, and what it is printed for.
struct Case {
    optimiser: Optimiser,
    parameter: DType,
    gradient: DType,
    length: usize,
}

impl Case {
    fn new(optimiser: impl IntoOptimiser, parameter: DType) -> Self {
        Case {
            optimiser: Optimiser::new(optimiser),
            parameter,
            gradient: parameter,
            length: 301,
        }
    }

    fn printed(&self) -> Printed {
        printed(self.optimiser.clone(), self.parameter, self.gradient)
            .expect("a printed optimiser")
            .at_path("0")
    }

    fn numbers(&self, seed: usize, dtype: DType) -> Tensor {
        random(seed as u64, &[self.length], dtype, &Device::Cpu)
    }

    fn what(&self) -> String {
        format!(
            "{} for {:?} with {:?}",
            self.optimiser.name(),
            self.parameter,
            self.gradient
        )
    }
}

/// The learning rate of a step, where there is one.
fn eta(step: usize) -> f64 {
    0.1 / step as f64
}

/// The steps of a case.
fn steps(case: &Case) -> Vec<PrintedStep> {
    let mut printed = case.printed();
    let has_eta = case.optimiser.field("eta").is_some();
    let mut step = |step| {
        if has_eta {
            printed.adjust_field("eta", eta(step)).expect("a learning rate");
        }
        printed.step().expect("a step")
    };
    (1..=STEPS).map(&mut step).collect()
}

/// Functions for kernels: all in one library, each kernel in a namespace of its own.
struct Compiled {
    library: Library,
    indices: HashMap<String, usize>,
}

type Launch = unsafe extern "C" fn(blocks: u32, values: *const *const c_void);

impl Compiled {
    fn new<'k>(kernels: impl Iterator<Item = &'k PrintedKernel>) -> Self {
        let (mut indices, mut text) = (
            HashMap::new(),
            "#include <setjmp.h>\n#include <ucontext.h>\n".to_string(),
        );
        for kernel in kernels {
            if indices.contains_key(kernel.source()) {
                continue;
            }
            let (index, entry) = (indices.len(), kernel.entry);
            indices.insert(kernel.source().to_string(), index);
            text += &format!(
                "#define launch launch_{index}\n#define {entry} {entry}_{index}\n\
                 namespace kernel_{index} {{\n"
            );
            text += kernel.host_source();
            text += &format!("}}\n#undef launch\n#undef {entry}\n#undef WAITS\n");
        }
        Compiled {
            library: compiled(&text, "-O0"),
            indices,
        }
    }

    fn launch(&self, kernel: &PrintedKernel, length: usize, words: &[u64]) {
        let name = format!("launch_{}\0", self.indices[kernel.source()]);
        launch(&self.library, &name, kernel.blocks(length), words);
    }
}

fn compiled(text: &str, level: &str) -> Library {
    let folder = tempfile::tempdir().expect("a folder");
    let library = folder.path().join("kernels.so");
    let mut command = Command::new(std::env::var_os("CXX").unwrap_or("c++".into()));
    command
        .args([
            "-x",
            "c++",
            "-",
            "-std=c++17",
            level,
            "-ffp-contract=off",
            // As the compilers of some distributions do by themselves.
            "-U_FORTIFY_SOURCE",
            "-D_FORTIFY_SOURCE=2",
            "-fPIC",
            "-shared",
            "-w",
            "-o",
        ])
        .arg(&library);
    let mut compiler = command.stdin(Stdio::piped()).spawn().expect("a compiler");
    compiler
        .stdin
        .take()
        .expect("its input")
        .write_all(text.as_bytes())
        .expect("a written text");
    assert!(compiler.wait().expect("its end").success());
    // SAFETY: the library has no initialisers.
    unsafe { Library::new(library) }.expect("a library")
}

fn launch(library: &Library, name: &str, blocks: u32, words: &[u64]) {
    let values: Vec<*const c_void> = words.iter().map(|word| std::ptr::from_ref(word).cast()).collect();
    // SAFETY: the function has this type, and the words are the addresses of buffers of the lengths that the
    // kernel says.
    unsafe { library.get::<Launch>(name.as_bytes()).expect("a function")(blocks, values.as_ptr()) }
}

/// Memory whose first byte is `shift` bytes behind a place where every access is aligned.
struct Buffer {
    words: Vec<u128>,
    shift: usize,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: &[u8], shift: usize) -> Self {
        let mut buffer = Buffer {
            words: vec![0; (bytes.len() + shift).div_ceil(16).max(1)],
            shift,
            bytes: bytes.len(),
        };
        buffer.all_mut()[shift..shift + bytes.len()].copy_from_slice(bytes);
        buffer
    }

    fn all_mut(&mut self) -> &mut [u8] {
        let length = 16 * self.words.len();
        // SAFETY: that many bytes, all of which have values.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), length) }
    }

    fn address(&mut self) -> u64 {
        let shift = self.shift;
        self.all_mut()[shift..].as_mut_ptr() as u64
    }

    /// What the records of `SplitMaster` say of so many elements.
    fn distances(&mut self, length: usize) -> Tensor {
        let (shift, bytes) = (self.shift, self.bytes);
        let records = self.all_mut()[shift..shift + bytes].as_chunks::<272>().0;
        let distance = |i: usize| {
            let (record, place) = (&records[i / 128], i % 128);
            let low = i16::from_le_bytes([record[2 * place], record[2 * place + 1]]);
            if record[256 + place / 8] >> (place % 8) & 1 == 1 {
                32768.0
            } else {
                f32::from(low)
            }
        };
        Tensor::from_iter((0..length).map(distance), &Device::Cpu).expect("a tensor")
    }

    fn tensor(&mut self, dtype: DType) -> Tensor {
        let (shift, bytes) = (self.shift, self.bytes);
        let data = &self.all_mut()[shift..shift + bytes];
        Tensor::from_raw_buffer(data, dtype, &[bytes / dtype.size_in_bytes()], &Device::Cpu)
            .expect("a tensor")
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).expect("bytes");
    bytes
}

/// The buffers of a parameter before its first step.
fn buffers(case: &Case, shift: usize) -> BTreeMap<String, (Buffer, optimisers::SlotFormat)> {
    let x = case.numbers(9, case.parameter);
    let printed = case.printed();
    let of_state = printed.state().iter().map(|state| {
        let mut start = Vec::new();
        let mut copy = |view: View<'_>| {
            start = state.start_bytes(view.in_order().expect("a vector"))?;
            Ok(())
        };
        Lend::read(&x, &mut copy).expect("the start of a buffer");
        assert_eq!(start.len(), state.bytes(case.length));
        (
            format!("{:?}", state.role),
            (Buffer::new(&start, shift), state.format),
        )
    });
    let parameter = (
        "Parameter".to_string(),
        (Buffer::new(&bytes(&x), shift), case.parameter.into()),
    );
    of_state.chain([parameter]).collect()
}

/// The bits of the named tensors after each step of `update`; the parameter's under `Parameter`.
fn expected(case: &Case) -> Vec<BTreeMap<String, Vec<u64>>> {
    let model: Vars = model(&[case.numbers(9, case.parameter)]);
    let mut state = setup(case.optimiser.clone(), &model).expect("a state");
    let has_eta = case.optimiser.field("eta").is_some();
    let mut step = |step: usize| {
        if has_eta {
            state
                .all()
                .adjust_field("eta", eta(step))
                .expect("a learning rate");
        }
        update(
            &mut state,
            &model,
            &grads([Some(case.numbers(step, case.gradient))]),
        )
        .expect("an update");
        let leaf = state.leaf("0").expect("a leaf");
        let of_state = leaf.tensor_names().into_iter().map(|name| {
            let tensor = leaf.tensor(&name).expect("a tensor");
            let role = match name.as_str() {
                "master" => "Master".to_string(),
                "rest" => "LowBits".to_string(),
                "compensation" => "Compensation".to_string(),
                _ => format!("Slot({name:?})"),
            };
            (role, bits(&tensor))
        });
        of_state
            .chain([("Parameter".to_string(), bits(&model["0"]))])
            .collect()
    };
    (1..=STEPS).map(&mut step).collect()
}

/// Asserts that the steps have the bits of `update`, in parameter and state.
fn assert_agrees(case: &Case, steps: &[PrintedStep], compiled: &Compiled, shift: usize) {
    let mut memory = buffers(case, shift);
    for (index, (step, expected)) in steps.iter().zip(expected(case)).enumerate() {
        let mut gradient = Buffer::new(&bytes(&case.numbers(index + 1, case.gradient)), shift);
        let words = step.words(case.length, |array| match &array.role {
            BufferRole::Gradient => gradient.address(),
            role => memory
                .get_mut(&format!("{role:?}"))
                .unwrap_or_else(|| panic!("{}: {role:?}", case.what()))
                .0
                .address(),
        });
        compiled.launch(&step.kernel, case.length, &words);
        assert_eq!(memory.len(), expected.len(), "{}", case.what());
        for (role, (buffer, format)) in &mut memory {
            // Codes are compared by what follows from them.
            let optimisers::SlotFormat::Dtype(dtype) = *format else {
                continue;
            };
            let tensor = if (role.as_str(), dtype) == ("LowBits", optimisers::DType::I16) {
                buffer.distances(case.length)
            } else {
                buffer.tensor(dtype.into())
            };
            assert!(
                bits(&tensor) == expected[role],
                "{}, step {}: {role}",
                case.what(),
                index + 1
            );
        }
    }
}

fn assert_all_agree(cases: &[Case]) {
    let steps: Vec<Vec<PrintedStep>> = cases.iter().map(steps).collect();
    let compiled = Compiled::new(steps.iter().flatten().map(|step| &*step.kernel));
    for (case, steps) in cases.iter().zip(&steps) {
        assert_agrees(case, steps, &compiled, 0);
        if case.length == 301 {
            assert_agrees(
                case,
                steps,
                &compiled,
                case.parameter
                    .size_in_bytes()
                    .max(case.gradient.size_in_bytes())
                    .max(8),
            );
        }
    }
}

fn elementwise() -> impl Iterator<Item = Box<dyn Rule>> {
    rules::catalogue()
        .into_iter()
        .filter(|listing| listing.rule.kind() == Kind::Elementwise)
        .map(|listing| listing.rule)
}

#[test]
fn every_elementwise_rule_has_the_bits_of_an_update_in_f32() {
    if can_run() {
        let cases: Vec<Case> = elementwise().map(|rule| Case::new(rule, F32)).collect();
        assert!(cases.len() > 35, "{}", cases.len());
        assert_all_agree(&cases);
    }
}

#[test]
fn every_elementwise_rule_has_the_bits_of_an_update_in_bf16_with_masters() {
    if can_run() {
        assert_all_agree(
            &elementwise()
                .map(|rule| Case::new(MixedPrecision::new(F32, rule), BF16))
                .collect::<Vec<_>>(),
        );
    }
}

#[test]
fn every_way_to_store_parameters_has_the_bits_of_an_update() {
    if !can_run() {
        return;
    }
    let rule = || AdamW {
        lambda: 0.1,
        ..AdamW::new(0.1)
    };
    let chain = || {
        OptimiserChain::new((
            ClipGrad::new(0.5),
            WeightDecay::new(0.1),
            Adam::new(0.1),
            Lookahead {
                k: 2,
                ..Lookahead::default()
            },
        ))
    };
    let mut cases = Vec::new();
    for dtype in [F16, BF16, F32, F64] {
        cases.push(Case::new(rule(), dtype));
        cases.push(Case::new(MixedPrecision::new(F32, chain()), dtype));
        cases.push(Case::new(MixedPrecision::new(F64, rule()), dtype));
        cases.push(Case::new(Kahan::new(rule()), dtype));
        cases.push(Case::new(StochasticRounding::new(3, rule()), dtype));
        if dtype != F16 {
            cases.push(Case::new(SplitMaster::new(chain()), dtype));
            cases.push(Case::new(SplitMaster::of_24_bits(rule()), dtype));
        }
    }
    cases.push(Case {
        gradient: F32,
        ..Case::new(MixedPrecision::new(F32, rule()), BF16)
    });
    cases.push(Case {
        gradient: F64,
        ..Case::new(Cautious::new(rule()).unscaled(), F16)
    });
    cases.push(Case::new(StoreAs::new([("m", BF16)], rule()), F32));
    // Several blocks, the last of them short.
    cases.push(Case {
        length: 33_001,
        ..Case::new(MixedPrecision::new(F32, rule()), BF16)
    });
    cases.push(Case {
        length: 16_401,
        ..Case::new(MixedPrecision::new(F32, StoreAs::all(Q8, rule())), BF16)
    });
    assert_all_agree(&cases);
}

#[test]
fn windows_of_gradients_have_a_kernel_that_collects_and_one_that_steps() {
    if !can_run() {
        return;
    }
    let window = Case::new(
        MixedPrecision::new(
            F32,
            OptimiserChain::new((AccumGrad::new(2), Scale::new(0.5), Adam::new(0.1))),
        ),
        BF16,
    );
    let moves: Vec<bool> = steps(&window).iter().map(|step| step.moves).collect();
    assert_eq!(moves, [false, true, false, true]);
    let two = steps(&window);
    assert_eq!(two[0].kernel, two[2].kernel);
    assert_ne!(two[0].kernel.source(), two[1].kernel.source());
    let roles: Vec<&BufferRole> = two[0].kernel.arrays().map(|array| &array.role).collect();
    assert_eq!(
        roles,
        [&BufferRole::Gradient, &BufferRole::Slot("0.acc".to_string())]
    );

    let decayed = OptimiserChain::new((WeightDecay::new(0.1), AccumGrad::new(2), Momentum::new(0.1)));
    assert_all_agree(&[window, Case::new(MixedPrecision::new(F32, decayed), BF16)]);
}

#[test]
fn one_text_is_a_library_by_itself() {
    if !can_run() {
        return;
    }
    // In 8 bits the threads of a block wait for each other.
    let in_8_bits = Case::new(StoreAs::all(Q8, Momentum::new(0.1)), F32);
    for case in [Case::new(Momentum::new(0.1), F32), in_8_bits] {
        let steps = steps(&case);
        let library = compiled(steps[0].kernel.host_source(), "-O2");
        let (mut memory, mut gradient) = (buffers(&case, 0), Buffer::new(&bytes(&case.numbers(1, F32)), 0));
        let words = steps[0].words(case.length, |array| match &array.role {
            BufferRole::Gradient => gradient.address(),
            role => memory
                .get_mut(&format!("{role:?}"))
                .expect("a buffer")
                .0
                .address(),
        });
        launch(&library, "launch\0", steps[0].kernel.blocks(case.length), &words);
        let x = memory.get_mut("Parameter").expect("the parameter").0.tensor(F32);
        assert_eq!(bits(&x), expected(&case)[0]["Parameter"]);
    }
}

#[test]
fn arguments_are_data() -> Tested {
    let mixed = printed(
        MixedPrecision::new(F32, OptimiserChain::new((Scale::new(0.5), Adam::new(0.1)))),
        BF16,
        F16,
    )?;
    let kernel = mixed.kernel();
    assert_eq!(
        (kernel.threads, kernel.elements_per_block, kernel.arithmetic),
        (256, 1024, F32.into())
    );
    assert_eq!(
        [0, 1, 1024, 1025].map(|length| kernel.blocks(length)),
        [0, 1, 1, 2]
    );
    assert_eq!(kernel.arguments[0], KernelArgument::Length);
    let slot = |name: &str| BufferRole::Slot(name.to_string());
    let arrays: Vec<_> = kernel
        .arrays()
        .map(|array| (array.role.clone(), array.format, array.reads, array.writes))
        .collect();
    let expected = [
        (BufferRole::Master, F32, true, true),
        (BufferRole::Gradient, F16, true, false),
        (slot("1.m"), F32, true, true),
        (slot("1.v"), F32, true, true),
        (BufferRole::Parameter, BF16, false, true),
    ];
    assert_eq!(
        arrays,
        expected.map(|(role, dtype, reads, writes)| (role, dtype.into(), reads, writes))
    );
    // Each argument stands in the source in its place, by its name.
    let (_, signature) = kernel
        .source()
        .split_once(&format!("{}(", kernel.entry))
        .expect("a function");
    let (signature, _) = signature.split_once(')').expect("its end");
    let names: Vec<&str> = signature
        .split(", ")
        .map(|declared| declared.rsplit(' ').next().unwrap_or_default())
        .collect();
    let named = kernel.arguments.iter().map(|argument| match argument {
        KernelArgument::Length => "length".to_string(),
        KernelArgument::Array(array) => array.name.clone(),
        KernelArgument::Scalar(index) => kernel.scalars[*index].clone(),
        other => panic!("{other:?}"),
    });
    assert_eq!(names, named.collect::<Vec<_>>());
    assert!(!kernel.source().contains("#include"));

    let starts = |optimiser: Optimiser| -> Vec<_> {
        let printed = printed(optimiser, BF16, BF16).expect("an optimiser");
        printed
            .state()
            .iter()
            .map(|state| (state.role.clone(), state.start, state.bytes(300)))
            .collect()
    };
    let zero = BufferStart::Number(0.0);
    assert_eq!(
        starts(Optimiser::new(SplitMaster::new(Descent::new(0.1)))),
        [(BufferRole::LowBits, zero, 3 * 272)]
    );
    assert_eq!(
        starts(Optimiser::new(SplitMaster::of_24_bits(Descent::new(0.1)))),
        [(BufferRole::LowBits, zero, 300)]
    );
    assert_eq!(
        starts(Optimiser::new(Kahan::new(Momentum::new(0.1)))),
        [
            (BufferRole::Compensation, zero, 600),
            (slot("velocity"), zero, 1200)
        ]
    );
    let averaged = ScheduleFree::new(0.1);
    assert_eq!(
        starts(Optimiser::new(averaged))[0],
        (slot("z"), BufferStart::Parameter, 1200)
    );
    assert_eq!(
        starts(Optimiser::new(StoreAs::all(Q8, Momentum::new(0.1)))),
        [(slot("velocity"), zero, 3 * 132)]
    );
    Ok(())
}

/// The names of the scalars.
fn scalars(optimiser: impl IntoOptimiser) -> Vec<String> {
    printed(optimiser, F32, F32)
        .expect("an optimiser")
        .kernel()
        .scalars
        .clone()
}

#[test]
fn a_scalar_has_the_name_of_what_it_depends_on() -> Tested {
    let names = [
        "k0_beta1",
        "k1_beta1",
        "k2_beta2",
        "k3_beta2",
        "k4_eta_beta1_t",
        "k5_beta2_t",
        "k6_epsilon",
    ];
    assert_eq!(scalars(Adam::new(0.1)), names);
    assert_eq!(
        scalars(MixedPrecision::new(F32, AdamW::new(0.1)))[7..],
        ["k7_eta_lambda"]
    );
    let without = AdamW {
        bias_correction: false,
        ..AdamW::new(0.1)
    };
    assert_eq!(
        scalars(without)[4..6],
        ["k4_eta", "k5"],
        "no scalar is another in each step"
    );
    // The place only where two have one name.
    let two = OptimiserChain::new((Scale::new(2.0), Momentum::new(0.1), Momentum::new(0.1)));
    assert_eq!(
        scalars(two),
        ["k0_alpha", "k1_1_rho", "k2_1_eta", "k3_2_rho", "k4_2_eta"]
    );
    let averaged = scalars(ScheduleFree::new(0.1));
    assert!(averaged.iter().any(|name| name.contains("_t")), "{averaged:?}");
    // Numbers of 0 and infinities hide nothing, and neither does what has settled after some steps.
    let still = AdamW {
        lambda: 0.0,
        epsilon: 0.0,
        ..AdamW::new(0.0)
    };
    assert_eq!(scalars(still), scalars(AdamW::new(0.1)));
    for (low, high) in [(0.0, 1.0), (0.0, f64::INFINITY), (f64::NEG_INFINITY, 0.0)] {
        let names = scalars(Clamp { bounds: (low, high) });
        assert_eq!(names[..2], ["k0_bounds1", "k1_bounds2"], "{low} to {high}");
    }
    // A rule that waits for a start.
    let ema = Ema {
        start: 100,
        ..Ema::new(0.9)
    };
    assert_eq!(scalars(ema), ["k0_delta_t"]);
    for warmup_steps in [2, 5, 100] {
        let rate = scalars(ScheduleFree {
            warmup_steps,
            ..ScheduleFree::new(0.1)
        });
        assert!(
            rate.iter()
                .any(|name| name.contains("_eta") && name.contains("_t")),
            "{rate:?}"
        );
    }
    assert_eq!(
        scalars(Adam {
            beta: (0.0, 0.01),
            ..Adam::new(0.1)
        }),
        names
    );

    for rule in elementwise() {
        let new =
            || printed(OptimiserChain::new((Scale::new(1.0), rule.clone())), F32, F32).expect("a chain");
        // They are the same after a restart.
        let (mut printed, mut resumed) = (new(), new());
        let steps: Vec<PrintedStep> = (0..12).map(|_| printed.step().expect("a step")).collect();
        resumed.resume(&printed.progress())?;
        assert_eq!(resumed.step()?, printed.step()?);
        let (kernel, name) = (printed.kernel(), printed.kernel().scalars.join(" "));
        assert!(
            ["k0_alpha", "k0_0_alpha"].contains(&&*kernel.scalars[0]),
            "{name}"
        );
        for (index, name) in kernel.scalars.iter().enumerate() {
            assert!(
                name.starts_with(&format!("k{index}_")) || *name == format!("k{index}"),
                "{name}"
            );
            assert!(kernel.source().contains(&format!("leaf.{name}")), "{name}");
        }
        assert!(kernel.source().contains("// Scale: dx' = α·dx\n"), "{name}");
        // What differs from step to step has a name that tells of it.
        let PrintedProgress {
            counters, numbers, ..
        } = printed.progress();
        let kept = counters
            .into_iter()
            .map(|(name, _)| name)
            .chain(numbers.into_iter().map(|(name, _)| name));
        let kept: Vec<String> = kept.map(|name| name.replace("1.", "_")).collect();
        for pair in steps
            .windows(2)
            .filter(|pair| Arc::ptr_eq(&pair[0].kernel, &pair[1].kernel))
        {
            let scalars = pair[0]
                .scalars
                .iter()
                .zip(&pair[1].scalars)
                .zip(&pair[0].kernel.scalars);
            for ((a, b), name) in scalars {
                assert!(
                    a == b || kept.iter().any(|kept| name.contains(kept)),
                    "{name}: {a} and {b}, {kept:?}"
                );
            }
        }
    }
    Ok(())
}

/// The functions and types that a text defines above the step.
fn helpers(source: &str) -> Vec<&str> {
    let (above, _) = source.split_once("struct Leaf {").expect("a row");
    let is_head = |line: &&str| {
        line.starts_with("static ") || line.starts_with("struct ") || line.starts_with("template ")
    };
    fn name(line: &str) -> Option<&str> {
        let head = line.split(" {").next()?;
        let head = if head.ends_with(')') {
            head.split_once('(')?.0
        } else {
            head
        };
        // A specialised type ends with its arguments.
        head.rsplit(' ').next().filter(|name| !name.ends_with('>'))
    }
    above.lines().filter(is_head).filter_map(name).collect()
}

#[test]
fn a_text_has_what_it_uses_and_the_recurrence() {
    let (mut most, mut texts) = (0, 0);
    for dtype in [F16, BF16, F32, F64] {
        for rule in elementwise() {
            let stored = [
                Optimiser::new(rule.clone()),
                Optimiser::new(MixedPrecision::new(F32, rule.clone())),
                Optimiser::new(Kahan::new(rule.clone())),
                Optimiser::new(SplitMaster::new(rule.clone())),
                Optimiser::new(SplitMaster::of_24_bits(rule.clone())),
                Optimiser::new(StochasticRounding::new(1, rule.clone())),
                Optimiser::new(StoreAs::all(Q8, rule)),
            ];
            for optimiser in stored {
                // No split master has an upper part in F16. A state tensor that starts as another number than
                // 0 has no code for that.
                let Ok(printed) = printed(optimiser.clone(), dtype, dtype) else {
                    continue;
                };
                let (source, what) = (printed.kernel().source(), optimiser.name());
                (most, texts) = (most.max(source.lines().count()), texts + 1);
                let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
                let code = source.lines().filter(|line| !line.starts_with("//"));
                let words: Vec<&str> = code
                    .flat_map(|line| line.split(|letter| !is_word(letter)))
                    .collect();
                let defined = helpers(source);
                for helper in &defined {
                    let [uses, definitions] =
                        [&words, &defined].map(|all| all.iter().filter(|word| *word == helper).count());
                    assert!(
                        uses > definitions,
                        "{what} of {dtype:?}: {helper} is not used in\n{source}"
                    );
                }
                let types = ["f16", "bf16"].map(|name| source.contains(&format!("struct {name} {{")));
                assert_eq!(types, [dtype == F16, dtype == BF16], "{what} of {dtype:?}");
                let run = "template <int N> static __device__ __forceinline__ void run(";
                let (above, _) = source.split_once(run).expect("a step");
                let comment = above.rsplit("\n\n").next().expect("the last lines");
                assert!(
                    comment.contains(&format!("// A step of {what} for a {dtype:?} parameter")),
                    "{comment}"
                );
                for member in optimiser.rule().name().split(['(', ')', ',', ' ']) {
                    let recurrence = rules::recurrence(member);
                    assert!(
                        recurrence.is_none_or(|recurrence| comment.contains(recurrence)),
                        "{comment}"
                    );
                }
            }
        }
    }
    assert!(most < 300 && texts > 800, "{most} lines, {texts} texts");
}

/// A rule of a program with the name of one of this crate's, whose scalars exist in the range of its field
/// alone.
mod own {
    use optimisers::value::Value;
    use optimisers::{Elementwise, Slot};

    optimisers::hyper_parameters! {
        /// dx' = ratio·dx
        pub struct Lion: Step {
            /// The factor.
            ratio: f64 = 0.9 => |ratio: f64| (!(0.8..1.0).contains(&ratio)).then_some("a number in [0.8, 1)"),
        }
    }

    impl Elementwise for Lion {
        type Scalars = f64;
        type Slots<T> = [T; 0];

        fn slots(&self) -> [Slot; 0] {
            []
        }

        fn scalars(&self, _t: u64) -> f64 {
            assert!((0.8..1.0).contains(&self.ratio), "{}", self.ratio);
            self.ratio
        }

        fn step<V: Value>(ratio: f64, _x: V, dx: V, _slots: &mut [V; 0]) -> V {
            dx * ratio
        }
    }
}

#[test]
fn a_rule_of_a_program_is_asked_within_its_ranges_and_has_no_recurrence_of_another() -> Tested {
    let printed = printed(own::Lion { ratio: 0.8 }, F32, F32)?;
    assert_eq!(printed.kernel().scalars, ["k0_ratio"]);
    assert!(printed.kernel().source().contains("// A step of Lion for"));
    assert!(
        !printed.kernel().source().contains("// Lion: "),
        "{}",
        printed.kernel().source()
    );
    Ok(())
}

/// A rule of a program whose number has a range.
#[derive(Clone, Debug)]
struct Phased;

impl Describe for Phased {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Phased");
    }
}

impl Rule for Phased {
    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn init(&self, _x: Parameter<'_>) -> optimisers::Result<State> {
        let range = |phase: f64| (!(0.0..1.0).contains(&phase)).then_some("a number in [0, 1)");
        Ok(State::empty().with_number("phase", 0.0, range))
    }

    fn apply<'a>(
        &'a self,
        state: &'a mut State,
        _x: Parameter<'a>,
        dx: Gradient<'a>,
    ) -> optimisers::Result<Flow<'a>> {
        let phase = state.number("phase").expect("a number");
        assert!((0.0..1.0).contains(&phase), "{phase}");
        Ok(Flow::Step(dx.scale(1.0 - phase)))
    }
}

#[test]
fn a_rule_of_a_program_is_asked_with_numbers_in_their_range() -> Tested {
    assert_eq!(printed(Phased, F32, F32)?.kernel().scalars, ["k0_phase"]);
    Ok(())
}

#[test]
fn random_bits_have_a_key_of_step_and_path() -> Tested {
    let new = |path: &str| {
        printed(StochasticRounding::new(1, Descent::new(0.1)), BF16, BF16)
            .expect("an optimiser")
            .at_path(path)
    };
    let (mut one, mut other) = (new("a"), new("b"));
    assert!(one.kernel().arguments.contains(&KernelArgument::Key));
    let keys = [&mut one, &mut other].map(|printed| [0; 3].map(|_| printed.step().expect("a step").key));
    let distinct: std::collections::BTreeSet<u64> = keys.concat().into_iter().collect();
    assert_eq!(distinct.len(), 6);
    assert_eq!(new("a").step()?.key, keys[0][0]);
    Ok(())
}

#[test]
fn a_step_has_the_hyper_parameters_of_now_and_a_kernel_of_its_arithmetic() -> Tested {
    let mut radam = printed(RAdam::new(0.1), F32, F32)?;
    let steps: Vec<PrintedStep> = (0..10).map(|_| radam.step().expect("a step")).collect();
    let mut sources: Vec<&str> = steps.iter().map(|step| step.kernel.source()).collect();
    sources.dedup();
    assert_eq!(sources.len(), 2, "without and with the second moment");
    for step in [&steps[0], &steps[9]] {
        let rate = step
            .kernel
            .scalars
            .iter()
            .find(|name| name.contains("_eta"))
            .expect("a rate");
        assert!(rate.ends_with("_t"), "the rate is another in each step: {rate}");
    }

    let mut descent = printed(
        OptimiserChain::new((Scale::new(1.0), Descent::new(0.1))),
        F32,
        F32,
    )?;
    assert_eq!(descent.step()?.scalars, [1.0, 0.1]);
    descent.adjust(0.2)?;
    descent.adjust_field("alpha", 0.125)?;
    let step = descent.step()?;
    assert_eq!(step.scalars, [0.125, 0.2]);
    assert!(Arc::ptr_eq(&step.kernel, &descent.step()?.kernel));
    let words = step.words(7, |_| 64);
    let scalar = |value: f32| u64::from(value.to_bits());
    assert_eq!(words, [7, 64, 64, scalar(0.125), scalar(0.2)]);

    let error = descent
        .adjust_field("rho", FieldValue::Real(0.1))
        .expect_err("no such field");
    is_kind(&error, ErrorKind::UnknownName, &["rho"]);
    assert_eq!(descent.step()?.scalars, [0.125, 0.2]);
    Ok(())
}

#[test]
fn a_field_that_decides_the_buffers_or_asks_for_a_weight_is_not_adjusted() -> Tested {
    let mut rmsprop = printed(RMSProp::new(0.1), F32, F32)?;
    let before = rmsprop.step()?;
    let error = rmsprop.adjust_field("centred", true).expect_err("another buffer");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["RMSProp: centred decides the layout", "print the optimiser anew"],
    );
    assert_eq!(rmsprop.step()?, before);

    let sum = AccumGrad {
        n: 2,
        average: Average::Sum,
    };
    let mut summed = printed(OptimiserChain::new((sum, Adam::new(0.1))), F32, F32)?;
    let error = summed
        .adjust_field("average", Average::Weighted)
        .expect_err("no weight");
    is_kind(
        &error,
        ErrorKind::Unsupported,
        &["the weight of each call", "Scale"],
    );
    summed.adjust_field("average", Average::Mean)?;
    // The first number of a state tensor may depend on a field.
    printed(Rprop::new(0.1), F32, F32)?.adjust_field("first_step_size", 1)?;
    Ok(())
}

#[test]
fn progress_is_resumed() -> Tested {
    let new = || {
        printed(
            OptimiserChain::new((AccumGrad::new(3), ScheduleFree::new(0.1))),
            F32,
            F32,
        )
        .expect("an optimiser")
    };
    let mut whole = new();
    (0..10).for_each(|_| drop(whole.step().expect("a step")));
    let mut resumed = new();
    resumed.resume(&whole.progress())?;
    for _ in 0..5 {
        assert_eq!(resumed.step()?, whole.step()?);
    }
    assert_eq!(resumed.progress(), whole.progress());
    let text = serde_json::to_string(&whole.progress())?;
    assert_eq!(serde_json::from_str::<PrintedProgress>(&text)?, whole.progress());

    let before = resumed.progress();
    let error = resumed
        .resume(&PrintedProgress {
            optimiser: "Adam".to_string(),
            counters: vec![("t".to_string(), 3)],
            ..PrintedProgress::default()
        })
        .expect_err("of Adam");
    is_kind(
        &error,
        ErrorKind::OtherRule,
        &["ScheduleFree", "Printed::progress"],
    );
    assert_eq!(
        error.got(),
        Some("Adam with counters [\"t\"] and numbers []"),
        "{error}"
    );
    assert!(
        error
            .expected()
            .is_some_and(|expected| expected.contains("\"0.calls\"")),
        "{error}"
    );
    // Names alone do not tell two optimisers apart.
    let adam = printed(Adam::new(0.1), F32, F32)?.progress();
    let error = printed(Momentum::new(0.1), F32, F32)?
        .resume(&adam)
        .expect_err("of Adam");
    is_kind(&error, ErrorKind::OtherRule, &["Momentum", "Adam"]);
    // Counts and numbers have the limits and ranges of files.
    let most = u64::MAX / 2;
    let with = |change: &dyn Fn(&mut PrintedProgress)| {
        let mut progress = before.clone();
        change(&mut progress);
        progress
    };
    let refused = [
        (
            with(&|progress| progress.counters[0].1 = most + 1),
            "\"0.calls\" of the progress to resume",
        ),
        (
            with(&|progress| progress.calls = most + 1),
            "\"calls\" of the progress to resume",
        ),
        (
            with(&|progress| progress.numbers[0].1 = -1.0),
            "largest_eta is -1, expected a number in [0, 1e100]",
        ),
        // With an infinite sum of weights, no later step would move the mean.
        (
            with(&|progress| progress.numbers[1].1 = f64::INFINITY),
            "weights is inf, expected a finite number",
        ),
    ];
    for (progress, words) in refused {
        is_kind(
            &resumed.resume(&progress).expect_err("a number"),
            ErrorKind::Argument,
            &[words],
        );
    }
    assert_eq!(resumed.progress(), before);
    resumed.resume(&with(&|progress| progress.calls = most))?;
    resumed.step()?;
    Ok(())
}

#[test]
fn the_start_of_a_buffer_is_that_of_a_parameter_in_the_printed_dtype() {
    let kahan = printed(Kahan::new(Adam::default()), DType::BF16, DType::F32).expect("kernels");
    let error = kahan.state()[0].start_bytes(&[1f32]).expect_err("F32");
    assert_eq!(
        (error.kind(), error.got(), error.expected()),
        (ErrorKind::Tensor, Some("F32"), Some("BF16, as in `printed`"))
    );
}

#[test]
fn what_is_not_elementwise_is_refused_by_name() {
    let refused = |optimiser: Optimiser, expected: &str, words: &[&str]| {
        let error = printed(optimiser, F32, F32).expect_err("no kernel");
        is_kind(&error, ErrorKind::Unsupported, words);
        assert!(
            error.to_string().starts_with(&format!("{expected} needs ")),
            "{error}"
        );
    };
    let clipped = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.1)));
    refused(
        Optimiser::new(MixedPrecision::new(F32, clipped)),
        "ClipGlobalNorm",
        &["whole model", "Scale", "alpha"],
    );
    refused(
        Optimiser::new(OptimiserChain::new((ClipNorm::new(1.0), LAMB::new(0.1)))),
        "ClipNorm, LAMB",
        &["whole parameter", "Scale"],
    );
    refused(
        Optimiser::new(Muon::new(0.1)),
        "Muon",
        &["whole parameter", "`update`"],
    );
    refused(Optimiser::new(Prodigy::default()), "Prodigy", &["whole model"]);
    let weighted = AccumGrad {
        n: 2,
        average: Average::Weighted,
    };
    refused(
        Optimiser::new(OptimiserChain::new((weighted, Adam::new(0.1)))),
        "OptimiserChain(AccumGrad, Adam)",
        &["weight of each call", "Average::Sum"],
    );
    refused(
        Optimiser::new(Muon::new(0.1).with_fallback(AdamW::new(0.1))),
        "Muon",
        &["whole parameter"],
    );
    refused(
        Optimiser::new(Offload::new(AdamW::new(0.1)).everywhere()),
        &Offload::new(AdamW::new(0.1)).everywhere().name(),
        &["Offload", "buffers"],
    );
    let chosen = optimisers::Fallback::new(AdamW::new(0.1), Descent::new(0.1));
    refused(
        Optimiser::new(chosen),
        "Fallback(AdamW, Descent)",
        &["path and shape"],
    );
    for listing in rules::catalogue()
        .into_iter()
        .filter(|listing| listing.rule.kind() != Kind::Elementwise)
    {
        refused(
            Optimiser::new(listing.rule),
            listing.name,
            &["a printed kernel sees one element at a time"],
        );
    }

    let refused = |optimiser: Optimiser, parameter, gradient, kind, got, words| {
        let error = printed(optimiser, parameter, gradient).expect_err("no kernel");
        is_kind(&error, kind, &[words]);
        assert_eq!(error.got(), Some(got), "{error}");
    };
    refused(
        Optimiser::new(Adam::new(0.1)),
        DType::U8,
        F32,
        ErrorKind::Argument,
        "U8",
        "the dtype of the parameter",
    );
    refused(
        Optimiser::new(Adam::new(0.1)),
        F32,
        DType::U32,
        ErrorKind::Argument,
        "U32",
        "the dtype of the gradient",
    );
    refused(
        Optimiser::new(Adam::new(-0.1)),
        F32,
        F32,
        ErrorKind::Argument,
        "-0.1",
        "Adam: eta is",
    );
    let dtype = ErrorKind::Tensor;
    refused(
        Optimiser::new(SplitMaster::new(Adam::new(0.1))),
        F16,
        F32,
        dtype,
        "F16",
        "SplitMaster",
    );
}
