//! Whether multiplications go on while a root and a quotient are computed: the bound of the arithmetic of Adam
//! depends on it.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Elements that stay in the first-level cache.
const LENGTH: usize = 1024;

/// Multiplications beside a root and a quotient. By themselves they take half as long.
const PRODUCTS: usize = 8;

/// `divider root_and_quotient=<x> products=<x> together=<x>`, in cycles for four elements: `together` is the
/// larger of both where they overlap, and their sum where they do not.
pub fn report(gigahertz: f64) -> String {
    let cycles = |pass: fn(&[f32; LENGTH], &mut [f32; LENGTH], f32)| {
        let (input, mut output) = ([1.5; LENGTH], [0.0; LENGTH]);
        let mut measure = || {
            let start = Instant::now();
            for _ in 0..200 {
                pass(black_box(&input), black_box(&mut output), black_box(1.01));
            }
            start.elapsed()
        };
        let least = (0..20).map(|_| measure()).min().unwrap_or(Duration::ZERO);
        least.as_nanos() as f64 * gigahertz * 4.0 / (200 * LENGTH) as f64
    };
    let (divided, multiplied, both) = (cycles(pass::<true, 0>), cycles(pass::<false, PRODUCTS>), cycles(pass::<true, PRODUCTS>));
    format!("divider root_and_quotient={divided:.2} products={multiplied:.2} together={both:.2}")
}

fn pass<const DIVIDED: bool, const PRODUCTS: usize>(input: &[f32; LENGTH], output: &mut [f32; LENGTH], factor: f32) {
    for (output, x) in output.iter_mut().zip(input) {
        let product = (0..PRODUCTS).fold(*x, |product, _| product * factor);
        *output = if DIVIDED { product + factor / x.sqrt() } else { product };
    }
}
