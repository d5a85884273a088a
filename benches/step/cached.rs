//! Arithmetic by itself: steps over leaves that stay in the second-level cache, on one thread.
//!
//! Per case `cached <case> isa=<name> ns_per_element=<x> cycles_per_element=<x>`. A small leaf and a large
//! one are measured in turns, and the difference of their times is divided by the difference of their
//! lengths: so what an update costs once, whatever the size, is not in it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::cases::Case;
use crate::instructions::IsaName;

/// The lengths of both leaves. The large one holds half a MiB in f64, with gradient and two moments.
const LENGTHS: [usize; 2] = [1 << 12, 1 << 14];

/// Measures these cases, each by itself. Before them one line has the cycles of root and quotient, of
/// multiplications, and of both in one step: the larger of these where they overlap.
pub fn measure(
    bounds: [Case; 3],
    cases: impl Iterator<Item = Case>,
    isa: IsaName,
    rounds: u32,
) -> Result<()> {
    println!(
        "cycles are of a clock of {:.2} GHz, as a chain of additions says",
        gigahertz()
    );
    let cycles = bounds
        .map(|case| Ok(slope(&case, rounds)? * gigahertz()))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    println!(
        "divider isa={isa} root_and_quotient={:.2} products={:.2} together={:.2}",
        cycles[0], cycles[1], cycles[2]
    );
    // Several models take turns so that they find their data in memory, which is not wanted here.
    for case in cases.filter(|case| !case.name.starts_with("growth") && !case.name.starts_with("small")) {
        let nanoseconds = slope(&case, rounds)?;
        let cycles = nanoseconds * gigahertz();
        println!(
            "cached {} isa={isa} ns_per_element={nanoseconds:.3} cycles_per_element={cycles:.2}",
            case.name
        );
    }
    Ok(())
}

/// The nanoseconds that an element more takes: the smallest of all rounds at each length, as whatever
/// disturbs a round makes it longer.
fn slope(case: &Case, rounds: u32) -> Result<f64> {
    let [small, large] = LENGTHS.map(|length| case.of_length(length).ours());
    let mut steps = [small?, large?];
    let mut least = [f64::INFINITY; 2];
    for _ in 0..=rounds {
        for ((step, length), least) in steps.iter_mut().zip(LENGTHS).zip(&mut least) {
            *least = least.min(step.nanoseconds()? * length as f64);
        }
    }
    Ok((least[1] - least[0]) / (LENGTHS[1] - LENGTHS[0]) as f64)
}

/// Cycles per nanosecond, from a chain of operations of which each takes one cycle and waits for the one
/// before.
fn gigahertz() -> f64 {
    const PAIRS: u32 = 1_000_000;
    let measure = || {
        let (mut value, other) = (black_box(1u64), black_box(0x9e37_79b9_7f4a_7c15));
        let start = Instant::now();
        for _ in 0..PAIRS {
            // No compiler makes one operation of these two.
            value = (value ^ other).wrapping_add(other);
        }
        black_box(value);
        start.elapsed()
    };
    let least = (0..5).map(|_| measure()).min().unwrap_or(Duration::ZERO);
    f64::from(2 * PAIRS) / least.as_nanos() as f64
}
