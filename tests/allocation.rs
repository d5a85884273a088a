//! Once warm, an update allocates a little for its plan, and nothing that grows with the model.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType::{self, BF16, F32};
use candle_core::{Device, Tensor, Var};
use optimisers::{
    AccumGrad, AdamW, Checkpoint, ClipGlobalNorm, Descent, Kahan, MixedPrecision, Optimiser, OptimiserChain,
    ParameterSlices, Q8, Result, Schedule, SplitMaster, StochasticRounding, StoreAs, setup, update,
};

/// Bytes asked for so far, by all threads.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// How often.
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The bytes that four warm updates of a variable of `length` elements allocate.
fn bytes(length: usize, dtype: DType, optimiser: Optimiser) -> Result<usize> {
    let x = Var::ones(length, dtype, &Device::Cpu)?;
    let grads = BTreeMap::from([("", Tensor::ones(length, dtype, &Device::Cpu)?)]);
    let mut state = setup(optimiser, &x)?;
    for _ in 0..4 {
        update(&mut state, &x, &grads)?;
    }
    let before = ALLOCATED.load(Ordering::Relaxed);
    for _ in 0..4 {
        update(&mut state, &x, &grads)?;
    }
    let allocated = ALLOCATED.load(Ordering::Relaxed) - before;
    let leaf = state.leaf("").expect("the leaf");
    assert!(leaf.steps() >= 4, "updates that did nothing");
    Ok(allocated)
}

/// How often an update of many leaves allocates, of which only some have gradients: the first, and a later
/// one.
fn allocations(leaves: usize, with_gradient: usize, schedule: Option<Schedule>) -> Result<[usize; 2]> {
    let variable = |i: usize| Ok((i.to_string(), Var::ones(8, F32, &Device::Cpu)?));
    let model: BTreeMap<String, Var> = (0..leaves).map(variable).collect::<Result<_>>()?;
    let gradient = Tensor::ones(8, F32, &Device::Cpu)?;
    let grads: BTreeMap<String, Tensor> = (0..with_gradient)
        .map(|i| (i.to_string(), gradient.clone()))
        .collect();
    let mut state = setup(AdamW::new(1e-3), &model)?;
    schedule.map_or(Ok(()), |schedule| state.schedule(schedule))?;
    let mut step = || -> Result<usize> {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let outcome = update(&mut state, &model, &grads)?;
        assert_eq!(
            (outcome.applied, outcome.without_gradient.len()),
            (with_gradient, leaves - with_gradient)
        );
        Ok(ALLOCATIONS.load(Ordering::Relaxed) - before)
    };
    let first = step()?;
    step()?;
    Ok([first, step()?])
}

/// The bytes that saving a parameter of `length` elements in a slice allocates.
fn bytes_of_checkpoint(length: usize) -> Result<usize> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("checkpoint");
    let mut values = vec![1f32; length];
    let model = ParameterSlices::new().with("x", length, &mut values)?;
    let state = setup(Descent::new(0.1), &model)?;
    let before = ALLOCATED.load(Ordering::Relaxed);
    Checkpoint::new(&state).model(&model).save(&file)?;
    Ok(ALLOCATED.load(Ordering::Relaxed) - before)
}

/// Held by each test, because what is counted is that of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
// T31: gradients are not widened all at once, and not one by one either.
fn an_update_allocates_nothing_that_grows_with_the_model() -> Result<()> {
    let _alone = ALONE.lock().expect("no test has panicked");
    let optimisers: [fn() -> Optimiser; 7] = [
        || Optimiser::new(AdamW::new(1e-3)),
        || Optimiser::new(SplitMaster::new(AdamW::new(1e-3))),
        || Optimiser::new(SplitMaster::of_24_bits(StoreAs::all(Q8, AdamW::new(1e-3)))),
        || Optimiser::new(MixedPrecision::new(F32, StoreAs::all(Q8, AdamW::new(1e-3)))),
        || Optimiser::new(Kahan::new(AdamW::new(1e-3))),
        || Optimiser::new(StochasticRounding::new(0, AdamW::new(1e-3))),
        || {
            let chain = OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(0.1), AdamW::new(1e-3)));
            Optimiser::new(MixedPrecision::new(F32, chain))
        },
    ];
    for dtype in [F32, BF16] {
        for optimiser in optimisers {
            for length in [100_000, 1_000_000] {
                let allocated = bytes(length, dtype, optimiser())?;
                assert!(
                    allocated < 64 << 10,
                    "{}: {allocated} bytes for {length} elements of {dtype:?}",
                    optimiser().name()
                );
            }
        }
    }
    // One for the plan of each gradient, and none to keep count of it, not in the first update either; none
    // for a leaf that has none and is named.
    let cosine = Schedule::cosine(1.0, 0.1, 10).relative();
    for (with_gradient, schedule) in [
        (2000, None),
        (200, None),
        (2000, Some(cosine.clone())),
        (200, Some(cosine)),
    ] {
        let [first, later] = allocations(2000, with_gradient, schedule)?;
        assert!(
            later < with_gradient + 110,
            "{later} allocations with {with_gradient} gradients"
        );
        assert!(
            first < later + 100 || with_gradient < 2000,
            "{first} allocations in the first update"
        );
    }
    // Parameters are saved where they lie.
    let length = 4_000_000;
    let saved = bytes_of_checkpoint(length)?;
    assert!(saved < length, "{saved} bytes to save {length} numbers");
    // The count works: a copy of the leaf would have shown.
    let before = ALLOCATED.load(Ordering::Relaxed);
    drop(Tensor::ones(100_000, BF16, &Device::Cpu)?.copy()?);
    assert!(ALLOCATED.load(Ordering::Relaxed) - before > 64 << 10);
    Ok(())
}

/// The most memory that the process has had, in bytes.
#[cfg(target_os = "linux")]
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the status of the process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .expect("the peak");
    1024 * line
        .trim_end_matches("kB")
        .trim()
        .parse::<usize>()
        .expect("a number of kB")
}

/// Moments of f32 would take four times as much on the way, and the model would not fit.
#[test]
#[cfg(target_os = "linux")]
fn the_setup_of_a_state_in_8_bits_takes_little_more_than_the_state() -> Result<()> {
    let _alone = ALONE.lock().expect("no test has panicked");
    let mut numbers = vec![half::bf16::ONE; 1 << 26];
    let model = ParameterSlices::new().with("x", numbers.len(), &mut numbers[..])?;
    let before = peak();
    let state = setup(StoreAs::all(Q8, AdamW::new(1e-3)), &model)?;
    // Other tests of this program run meanwhile.
    let taken = peak() - before;
    assert!(taken < 2 * state.bytes(), "{taken} bytes for {}", state.bytes());
    Ok(())
}
