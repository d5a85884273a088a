//! Micro-batches on any number of ranks: with pairwise sums the same bits.

use candle_core::DType;
use optimisers::{
    AccumGrad, AdamW, ClipGlobalNorm, Communicator, MixedPrecision, OptimiserChain, Setup, Status, Summation,
    Update,
};

use support::common::{bits, model, pairwise};
use support::reports::{gradients, parameters};
use support::threads::on;

/// How many make a step.
const MICRO_BATCHES: u64 = 8;

/// The bits of the parameters on each rank after three steps.
fn trained(size: u64, dtype: DType, collect: fn(u64) -> AccumGrad) -> Vec<Vec<Vec<u64>>> {
    on(size as usize, move |world| {
        let model = model(&parameters(dtype));
        let rule =
            OptimiserChain::new((collect(MICRO_BATCHES / size), ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
        let mut state =
            Setup::over(&world).setup(MixedPrecision::new(DType::F32, rule), &model).expect("a state");
        for step in 0..3 {
            for micro_batch in (world.rank() as u64..MICRO_BATCHES).step_by(size as usize) {
                // Those of even calls have a gradient for every parameter.
                let gradients = gradients(2 * (MICRO_BATCHES * step + micro_batch), 0, DType::F32);
                let outcome =
                    Update::new(&mut state).finite_only().apply(&model, &gradients).expect("an update");
                let is_last = micro_batch + size >= MICRO_BATCHES;
                assert_eq!(outcome.status, if is_last { Status::Stepped } else { Status::Accumulated });
            }
        }
        model.values().map(|x| bits(x)).collect()
    })
}

#[test]
fn pairwise_sums_have_the_same_bits_on_any_power_of_two_of_ranks() {
    for dtype in [DType::F32, DType::BF16] {
        let one = trained(1, dtype, pairwise).remove(0);
        for size in [2, 4, 8] {
            let ranks = trained(size, dtype, pairwise);
            assert!(ranks.iter().all(|rank| rank == &one), "{size} ranks, {dtype:?}");
        }
    }
}

/// In order the test above would fail: the same run on two ranks has other last bits.
#[test]
fn sums_in_order_depend_on_the_ranks() {
    let in_order = |n| AccumGrad { order: Summation::InOrder, ..AccumGrad::new(n) };
    assert_ne!(trained(1, DType::F32, in_order)[0], trained(2, DType::F32, in_order)[0]);
}
