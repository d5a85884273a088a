//! Memory with locks of its own, as a framework has it: the arrays of `examples/locks`.

#[path = "../../../examples/locks/arrays.rs"]
mod arrays;

use optimisers::{AdamW, ClipGlobalNorm, DType, MixedPrecision, OptimiserChain, setup, update};
use optimisers_plain::{Named, Plain, Vector, numbers};

use arrays::{Array, Arrays};

/// Locked memory has the bits of slices, also where a gradient is what another model trains.
#[test]
fn locks_have_the_bits_of_slices() {
    let optimiser = || {
        MixedPrecision::new(
            DType::F64,
            OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.01))),
        )
    };
    let of = |seed: u64, plain: &Plain| {
        let lock = |(index, named): (usize, &Named)| {
            let values = numbers(seed + index as u64, named.shape.iter().product())
                .iter()
                .map(|&x| x as f32)
                .collect();
            (named.path.clone(), Array::new(&named.shape, values))
        };
        Arrays(plain.0.iter().enumerate().map(lock).collect())
    };
    let mut plain = Plain::new(1, DType::F32);
    plain.0.retain(|named| named.dtype == DType::F32);
    let (x, gradients) = (of(1, &plain), of(50, &plain));
    let mut beside = setup(optimiser(), &gradients).expect("a state");
    let (mut state, mut of_slices) = (
        setup(optimiser(), &x).expect("a state"),
        setup(optimiser(), &plain.lend()).expect("a state"),
    );
    for _ in 0..3 {
        let mut shown = plain.clone();
        for named in &mut shown.0 {
            named.values = Vector::F32(gradients.0[&named.path].values());
        }
        update(&mut state, &x, &gradients).expect("an update");
        update(&mut of_slices, &plain.lend(), &shown.show()).expect("an update");
        update(&mut beside, &gradients, &shown.show()).expect("an update");
    }
    for named in &plain.0 {
        assert!(
            Vector::F32(x.0[&named.path].values()) == named.values,
            "{}",
            named.path
        );
    }
}
