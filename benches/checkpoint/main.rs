//! How fast a state is saved: against the same number of bytes written from memory in one go and flushed as
//! well, interleaved in one run.
//!
//! Two lines, medians over rounds in seconds; the peaks are those of resident memory while saving or loading,
//! the state counted in, as multiples of the state's size (Linux only, else nan):
//! `bench save seconds=<x> plain_seconds=<x> ratio=<x> peak=<x>`
//! `bench load seconds=<x> plain_seconds=<x> ratio=<x> peak=<x>`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use clap::Parser;
use optimisers::{Adam, Result, StateTree, setup, update};

/// Measures saving and loading against plain files.
#[derive(Parser)]
struct Options {
    /// The size of the state in millions of bytes.
    #[arg(long, default_value_t = 1000)]
    megabytes: usize,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where to write; else the folder for temporary files.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Elements of a leaf; its two moments take 32 MB.
const LEAF: usize = 4_000_000;

/// A state whose memory is all in use.
fn state(megabytes: usize) -> Result<StateTree> {
    let leaves = (megabytes * 1_000_000).div_ceil(8 * LEAF);
    let model: Vec<Var> = (0..leaves).map(|_| Var::zeros(LEAF, DType::F32, &Device::Cpu)).collect::<candle_core::Result<_>>()?;
    let mut state = setup(Adam::new(1e-3), &model)?;
    let gradient = Tensor::randn(0f32, 1.0, LEAF, &Device::Cpu)?;
    update(&mut state, &model, &(0..leaves).map(|i| (i.to_string(), gradient.clone())).collect::<BTreeMap<_, _>>())?;
    Ok(state)
}

/// What a save does for the file system, without making anything of a state.
fn write_plain(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("plain");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(path.parent().unwrap_or(path))?.sync_all()
}

/// Bytes of resident memory, now or at the peak since [`forget_peak`].
fn resident(field: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kilobytes.map_or(f64::NAN, |kilobytes| 1024.0 * kilobytes)
}

fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Samples of one of two ways.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    /// More resident memory than before, in bytes.
    memory: Vec<f64>,
}

impl Samples {
    fn take<T, E>(&mut self, work: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
        forget_peak();
        let before = resident("VmRSS");
        let start = Instant::now();
        let result = work();
        self.seconds.push(start.elapsed().as_secs_f64());
        self.memory.push(resident("VmHWM") - before);
        result
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut samples = samples.to_vec();
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn report(name: &str, ours: &Samples, plain: &Samples, state: usize) {
    let (seconds, plain_seconds) = (median(&ours.seconds), median(&plain.seconds));
    let peak = ours.memory.iter().copied().fold(f64::NAN, f64::max) / state as f64 + 1.0;
    println!("bench {name} seconds={seconds:.3} plain_seconds={plain_seconds:.3} ratio={:.2} peak={peak:.3}", seconds / plain_seconds);
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let folder = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let (path, plain_path) = (folder.path().join("run"), folder.path().join("plain"));
    let mut state = state(options.megabytes)?;
    state.save(&path)?;
    let bytes = fs::read(&path)?;
    println!("state_bytes={} file_bytes={} rounds={}", state.bytes(), bytes.len(), options.rounds);

    let (mut save, mut plain) = (Samples::default(), Samples::default());
    for round in 0..options.rounds {
        // By turns who goes first: the disk may still be busy with what came before.
        if round % 2 == 0 {
            save.take(|| state.save(&path))?;
        }
        plain.take(|| write_plain(&plain_path, &bytes))?;
        if round % 2 == 1 {
            save.take(|| state.save(&path))?;
        }
    }
    drop(bytes);
    report("save", &save, &plain, state.bytes());

    let (mut load, mut plain) = (Samples::default(), Samples::default());
    for _ in 0..options.rounds {
        load.take(|| state.load(&path))?;
        drop(plain.take(|| fs::read(&path))?);
    }
    report("load", &load, &plain, state.bytes());
    Ok(())
}
