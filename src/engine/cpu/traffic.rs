//! Counts the bytes that passes read and write, for a test of speed without a clock.
//!
//! Memory limits a step, so the time of a step follows the bytes that it moves. Times differ from run to run,
//! bytes do not. So a test can fail if a step makes one pass or copy too many. `tests/allocation.rs` finds
//! copies outside of passes.
//!
//! Each thread has counts of its own, because other tests run meanwhile. The parameters of the tests are so
//! small that a step stays on its caller's thread.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Traffic {
    /// Elements that passes went over.
    elements: usize,
    /// Bytes of gradients, parameters and state.
    bytes_read: usize,
    bytes_written: usize,
}

thread_local! {
    static TRAFFIC: Cell<Traffic> = const { Cell::new(Traffic { elements: 0, bytes_read: 0, bytes_written: 0 }) };
}

/// Counts numbers that are read and written.
pub(super) fn count_numbers<T>(read: usize, written: usize) {
    TRAFFIC.with(|traffic| {
        let mut counts = traffic.get();
        counts.bytes_read += read * size_of::<T>();
        counts.bytes_written += written * size_of::<T>();
        traffic.set(counts);
    });
}

/// Counts elements that a pass goes over.
pub(super) fn count_pass(elements: usize) {
    TRAFFIC.with(|traffic| {
        let mut counts = traffic.get();
        counts.elements += elements;
        traffic.set(counts);
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::numbers::DType::{self, BF16, F32};
    use crate::{
        AdamW, ClipGlobalNorm, ClipGrad, Ema, GradientSlices, Kahan, MemoryMut, MemoryRef, MixedPrecision,
        Optimiser, OptimiserChain, ParameterSlices, Q8, SplitMaster, StochasticRounding, StoreAs,
        WeightDecay, setup, update,
    };

    /// Enough elements for state in 8 bits, too few for other threads.
    const LENGTH: usize = 8192;

    /// The traffic of the second step on a parameter of this dtype, and the bytes of the state.
    fn step_traffic<T: Copy>(optimiser: Optimiser, one: T) -> (Traffic, usize)
    where
        for<'a> &'a mut Vec<T>: Into<MemoryMut<'a>>,
        for<'a> &'a Vec<T>: Into<MemoryRef<'a>>,
    {
        let (mut x, gradient) = (vec![one; LENGTH], vec![one; LENGTH]);
        let parameters = ParameterSlices::new()
            .with("x", LENGTH, &mut x)
            .expect("a parameter");
        let gradients = GradientSlices::new().with("x", &gradient).expect("a gradient");
        let mut state = setup(optimiser, &parameters).expect("a state");
        update(&mut state, &parameters, &gradients).expect("the first step");
        TRAFFIC.set(Traffic::default());
        update(&mut state, &parameters, &gradients).expect("the second step");
        (TRAFFIC.get(), state.bytes())
    }

    /// The first table of the page `memory`, and chains: a step goes once over the elements, reads the
    /// gradient, and reads and writes parameter and state. A parameter that has a master is only written.
    #[test]
    fn a_step_moves_each_byte_once() {
        let adamw = || AdamW::new(1e-3);
        let q8 = || StoreAs::all(Q8, AdamW::new(1e-3));
        let chain =
            || OptimiserChain::new((ClipGrad::new(1.0), WeightDecay::new(0.1), adamw(), Ema::new(0.99)));
        let clipped = || OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
        let cases: Vec<(DType, Optimiser, f64, usize)> = vec![
            (F32, Optimiser::new(adamw()), 12.0, 1),
            (BF16, Optimiser::new(MixedPrecision::new(F32, adamw())), 14.0, 1),
            (BF16, Optimiser::new(MixedPrecision::new(F32, q8())), 8.0625, 1),
            (BF16, Optimiser::new(SplitMaster::new(adamw())), 12.125, 1),
            (BF16, Optimiser::new(SplitMaster::of_24_bits(q8())), 5.0625, 1),
            (BF16, Optimiser::new(Kahan::new(adamw())), 12.0, 1),
            (BF16, Optimiser::new(StochasticRounding::new(0, adamw())), 10.0, 1),
            (F32, Optimiser::new(chain()), 16.0, 1),
            // Two passes, because the norm needs all gradients before the first step.
            (F32, Optimiser::new(clipped()), 12.0, 2),
            (BF16, Optimiser::new(MixedPrecision::new(F32, clipped())), 14.0, 2),
        ];
        for (dtype, optimiser, element_bytes, passes) in cases {
            let name = optimiser.name();
            let is_mixed = name.starts_with("MixedPrecision");
            let (traffic, state_bytes) = match dtype {
                F32 => step_traffic(optimiser, 1f32),
                _ => step_traffic(optimiser, bf16::ONE),
            };
            let x_bytes = dtype.size_in_bytes() * LENGTH;
            assert_eq!(
                state_bytes + x_bytes,
                (element_bytes * LENGTH as f64) as usize,
                "{name}: the page `memory` has other bytes"
            );
            let bytes_read = passes * x_bytes + state_bytes + if is_mixed { 0 } else { x_bytes };
            let bytes_written = state_bytes + x_bytes;
            assert_eq!(
                traffic,
                Traffic {
                    elements: passes * LENGTH,
                    bytes_read,
                    bytes_written
                },
                "{name}"
            );
        }
    }
}
