//! Micro-batches that ranks share.

use candle_core::DType;
use optimisers::{
    AccumGrad, AdamW, ClipGlobalNorm, Communicator, MixedPrecision, OptimiserChain, Setup, Status, Update,
};

use support::common::{bits, model};
use support::reports::{gradients, parameters};
use support::threads::on;

/// The bits of the parameters of each rank after three steps.
fn trained(size: u64, micro_batches: u64, dtype: DType) -> Vec<Vec<Vec<u64>>> {
    on(size as usize, move |world| {
        let model = model(&parameters(dtype));
        let collect = AccumGrad::new(micro_batches / size);
        let rule = OptimiserChain::new((collect, ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
        let mut state = Setup::over(&world)
            .build(MixedPrecision::new(DType::F32, rule), &model)
            .expect("a state");
        for step in 0..3 {
            for micro_batch in (world.rank() as u64..micro_batches).step_by(size as usize) {
                // Those of even calls have a gradient for every parameter.
                let gradients = gradients(2 * (micro_batches * step + micro_batch), 0, DType::F32);
                let outcome = Update::new(&mut state)
                    .finite_only()
                    .apply(&model, &gradients)
                    .expect("an update");
                let is_last = micro_batch + size >= micro_batches;
                assert_eq!(
                    outcome.status,
                    if is_last {
                        Status::Stepped
                    } else {
                        Status::Accumulated
                    }
                );
            }
        }
        model.values().map(|x| bits(x)).collect()
    })
}

/// Two micro-batches have one sum, whoever has them. Of more, a rank adds its own in the order of its calls.
#[test]
fn the_last_bits_depend_on_how_many_micro_batches_a_rank_has() {
    for dtype in [DType::F32, DType::BF16] {
        let one = trained(1, 2, dtype).remove(0);
        assert!(trained(2, 2, dtype).iter().all(|rank| rank == &one), "{dtype:?}");
    }
    assert_ne!(trained(1, 8, DType::F32)[0], trained(2, 8, DType::F32)[0]);
}
