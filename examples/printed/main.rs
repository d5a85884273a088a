//! A program with buffers of its own and without candle: ten steps of AdamW on bf16 parameters with f32
//! masters, by the kernel that this crate prints and nothing else of it. The C++ compiler of the system takes
//! the place of CUDA's.
//!
//! ```text
//! cargo run --release --no-default-features --example printed               # its arguments, and ten steps
//! cargo run --release --no-default-features --example printed -- --source   # and the kernel
//! ```
//!
//! At the end parameters and masters are compared with those of `update`, bit by bit.

// It loads and calls what the compiler made of the kernel.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::ffi::c_void;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::Parser;
use half::bf16;
use libloading::{Library, Symbol};
use optimisers::DType::{BF16, F32};
use optimisers::printed::{
    BufferRole, KernelArgument, Printed, PrintedKernel, PrintedStep, StateBuffer, printed,
};
use optimisers::{AdamW, GradientSlices, Lend, MemoryRef, MixedPrecision, ParameterSlices, setup, update};

const ELEMENTS: usize = 100_003;
const STEPS: u32 = 10;

/// Ten steps of AdamW by a printed kernel.
#[derive(Parser)]
struct Args {
    /// Prints the kernel
    #[arg(long)]
    source: bool,
}

type Launch = unsafe extern "C" fn(blocks: u32, values: *const *const c_void);

fn optimiser() -> MixedPrecision<AdamW> {
    MixedPrecision::new(
        F32,
        AdamW {
            lambda: 0.1,
            ..AdamW::new(1e-3)
        },
    )
}

/// Falls from step to step.
fn learning_rate(step: u32) -> f64 {
    1e-3 / f64::from(step)
}

/// The gradient of a step, and with 0 the parameter.
fn numbers(step: u32) -> Vec<bf16> {
    (0..ELEMENTS as u32)
        .map(|i| {
            bf16::from_f32((i.wrapping_mul(2_654_435_761).rotate_left(step) as i32) as f32 * 2f32.powi(-31))
        })
        .collect()
}

/// What a launch on a device would be.
fn compiled(kernel: &PrintedKernel, library: &Path) -> Result<Library, Box<dyn Error>> {
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or("c++".into()))
        .args([
            "-x",
            "c++",
            "-",
            "-std=c++17",
            "-O2",
            "-ffp-contract=off",
            "-fPIC",
            "-shared",
            "-o",
        ])
        .arg(library)
        .stdin(Stdio::piped())
        .spawn()?;
    compiler
        .stdin
        .take()
        .ok_or("no input")?
        .write_all(kernel.host_source().as_bytes())?;
    if !compiler.wait()?.success() {
        return Err("the compiler refuses the kernel".into());
    }
    // SAFETY: the library has no initialisers.
    Ok(unsafe { Library::new(library) }?)
}

/// The memory of a parameter, as a runtime would have it on its device.
struct Parameter {
    x: Vec<bf16>,
    dx: Vec<bf16>,
    /// Master and moments.
    state: HashMap<BufferRole, Vec<f32>>,
}

impl Parameter {
    fn new(x: Vec<bf16>, printed: &Printed) -> optimisers::Result<Self> {
        let start = |buffer: &StateBuffer| -> optimisers::Result<_> {
            let numbers = buffer
                .start_bytes(&x)?
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_ne_bytes(*bytes))
                .collect();
            Ok((buffer.role.clone(), numbers))
        };
        let state = printed.state().iter().map(start).collect::<Result<_, _>>()?;
        Ok(Parameter {
            dx: Vec::new(),
            state,
            x,
        })
    }

    fn step(&mut self, step: &PrintedStep, library: &Library) -> Result<(), Box<dyn Error>> {
        let words = step.words(self.x.len(), |array| match &array.role {
            BufferRole::Parameter => self.x.as_mut_ptr() as u64,
            BufferRole::Gradient => self.dx.as_ptr() as u64,
            role => self
                .state
                .get_mut(role)
                .map_or(0, |state| state.as_mut_ptr() as u64),
        });
        let values: Vec<*const c_void> = words.iter().map(|word| std::ptr::from_ref(word).cast()).collect();
        // SAFETY: the library has a function of this type, and the words are the values of its arguments:
        // addresses of as many elements as they say.
        unsafe {
            let launch: Symbol<'_, Launch> = library.get(b"launch\0")?;
            launch(step.kernel.blocks(self.x.len()), values.as_ptr());
        }
        Ok(())
    }
}

/// Parameter and master after the same steps by `update`.
fn expected() -> Result<(Vec<bf16>, Vec<f32>), Box<dyn Error>> {
    let mut x = numbers(0);
    let mut state = setup(optimiser(), &ParameterSlices::new().with("x", ELEMENTS, &mut x)?)?;
    for step in 1..=STEPS {
        state.adjust(learning_rate(step))?;
        let dx = numbers(step);
        let gradients = GradientSlices::new().with("x", &dx)?;
        update(
            &mut state,
            &ParameterSlices::new().with("x", ELEMENTS, &mut x)?,
            &gradients,
        )?;
    }
    let mut master = Vec::new();
    let lent = state.leaf("x").ok_or("no leaf")?.tensor("master")?;
    lent.read(&mut |view| {
        let Some(MemoryRef::F32(numbers)) = view.in_order() else {
            unreachable!("a master in F32")
        };
        master.extend_from_slice(numbers);
        Ok(())
    })?;
    Ok((x, master))
}

fn main() -> Result<(), Box<dyn Error>> {
    let Args { source } = Args::parse();
    let mut adamw = printed(optimiser(), BF16, BF16)?;
    if source {
        println!("{}\n", adamw.kernel().source());
    }
    println!(
        "AdamW on bf16 parameters with f32 masters as one kernel, {}; its arguments:",
        adamw.kernel().entry
    );
    for argument in &adamw.kernel().arguments {
        match argument {
            KernelArgument::Scalar(index) => println!("{}", adamw.kernel().scalars[*index]),
            argument => println!("{argument:?}"),
        }
    }

    let folder = tempfile::tempdir()?;
    // By source, because a step may have another kernel.
    let mut libraries: HashMap<String, Library> = HashMap::new();
    let mut parameter = Parameter::new(numbers(0), &adamw)?;
    for step in 1..=STEPS {
        adamw.adjust(learning_rate(step))?;
        parameter.dx = numbers(step);
        let printed_step = adamw.step()?;
        let file = folder.path().join(format!("kernel{}.so", libraries.len()));
        let library = match libraries.entry(printed_step.kernel.source().to_string()) {
            Entry::Occupied(library) => library.into_mut(),
            Entry::Vacant(place) => place.insert(compiled(&printed_step.kernel, &file)?),
        };
        parameter.step(&printed_step, library)?;
    }

    let (x, master) = expected()?;
    let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
    assert!(
        parameter.x == x
            && parameter.state[&BufferRole::Master]
                .iter()
                .zip(&master)
                .all(is_same),
        "other bits"
    );
    println!(
        "\n{STEPS} steps of {ELEMENTS} elements: parameters and masters have the bits that `update` gives"
    );
    Ok(())
}
