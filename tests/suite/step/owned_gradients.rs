//! Updates that take their gradients.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, AdamW, Average, Descent, ErrorKind, GradientSlices, LocalRank, LossScaler, OptimiserChain,
    Outcome, Result, Setup, SkipReason, Status, Update, ranks, setup, update,
};

use support::common::{assert_same, bits, grads, is_kind, model, optimisers_for, snapshot, tensor, var};

fn tensors(seed: u64, dtype: DType) -> [Tensor; 4] {
    let shapes: [&[usize]; 4] = [&[3, 5], &[], &[3, 0], &[7]];
    shapes.map(|shape| tensor(seed, shape, dtype))
}

#[test]
fn they_give_the_bits_of_update() {
    const STEPS: u64 = 200;
    for dtype in [DType::BF16, DType::F32] {
        for optimiser in optimisers_for(dtype) {
            let [lent, owned] = [0; 2].map(|seed| model(&tensors(seed, dtype)));
            let [mut of_lent, mut of_owned] =
                [&lent, &owned].map(|model| setup(optimiser.clone(), model).expect("a state"));
            for call in 1..=STEPS {
                // A leaf without a gradient in every fifth call.
                let of_call = |seed| {
                    grads(
                        tensors(seed, DType::F32)
                            .into_iter()
                            .enumerate()
                            .map(|(i, x)| (call % 5 > 0 || i > 0).then_some(x)),
                    )
                };
                let expected = update(&mut of_lent, &lent, &of_call(call)).expect("an update");
                let outcome = Update::new(&mut of_owned)
                    .apply_owned(&owned, of_call(call))
                    .expect("an update");
                assert_eq!(outcome, expected, "{}", optimiser.name());
            }
            assert_same(
                &[snapshot(&owned, &of_owned)],
                &[snapshot(&lent, &of_lent)],
                optimiser.name(),
            );
        }
    }
}

#[test]
fn any_collection_is_taken() {
    let gradient = || Tensor::new(&[2f32, 4.0], &Device::Cpu).expect("a tensor");
    let x = Var::new(&[1f32, 2.0], &Device::Cpu).expect("a variable");
    let mut state = setup(Descent::new(0.5), &x).expect("a state");
    let mut step = 0.0;
    let mut moved = |outcome: Result<Outcome>| {
        step += 1.0;
        assert_eq!(outcome.expect("an update").applied, 1);
        assert_eq!(
            x.to_vec1::<f32>().expect("numbers"),
            [1.0 - step, 2.0 - 2.0 * step]
        );
    };
    let store = (x.as_tensor() * &gradient())
        .and_then(|product| product.sum_all()?.backward())
        .expect("gradients");
    moved(Update::new(&mut state).apply_owned(&x, store));
    moved(Update::new(&mut state).apply_owned(&x, HashMap::from([("", gradient())])));
    moved(Update::new(&mut state).apply_owned(&x, BTreeMap::from([("", &gradient())])));
    moved(Update::new(&mut state).apply_owned(&x, vec![(String::new(), gradient())]));
    moved(Update::new(&mut state).apply_owned(&x, [("", gradient())]));
    // Memory that is only lent has nothing to free.
    moved(Update::new(&mut state).apply_owned(
        &x,
        GradientSlices::new().with("", &[2f32, 4.0]).expect("a gradient"),
    ));
}

#[test]
fn bad_gradients_are_refused_as_in_update() {
    let x = [
        var(&tensor(1, &[3], DType::F32)),
        var(&tensor(2, &[2], DType::F32)),
    ];
    let mut state = setup(AdamW::new(0.1), &x).expect("a state");
    let before = x.each_ref().map(|x| bits(x));
    let good = || tensor(3, &[3], DType::F32);
    for (gradients, kind, word) in [
        (vec![("0", good()), ("1", good())], ErrorKind::Tensor, "1"),
        (vec![("0", good()), ("2", good())], ErrorKind::UnknownName, "2"),
        (vec![("0", good()), ("0", good())], ErrorKind::Contract, "0"),
        (Vec::new(), ErrorKind::NoGradient, "no gradient"),
    ] {
        is_kind(
            &Update::new(&mut state).apply_owned(&x, gradients).unwrap_err(),
            kind,
            &[word],
        );
    }
    let infinite = [("0", (good() * f64::INFINITY).expect("a tensor"))];
    let outcome = Update::new(&mut state)
        .finite_only()
        .apply_owned(&x, infinite)
        .expect("an update");
    assert_eq!(
        outcome.status,
        Status::Skipped(SkipReason::NotFinite {
            path: "0".to_string()
        })
    );
    assert_eq!(x.each_ref().map(|x| bits(x)), before);
    assert!(state.leaves().all(|leaf| leaf.steps() == 0));
}

#[test]
fn a_scaler_and_windows_that_are_given_up_see_them() {
    let x = var(&tensor(1, &[2], DType::F32));
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1))), &x).expect("a state");
    let mut scaler = LossScaler::fixed(2.0);
    let large = || [("", Tensor::new(&[4e18f32, 1.0], &Device::Cpu).expect("a tensor"))];
    let mut call = || {
        let _ = scaler.factor().expect("a factor");
        Update::new(&mut state)
            .scaler(&mut scaler)
            .apply_owned(&x, [("", (&large()[0].1 * 2.0).expect("a tensor"))])
            .expect("an update")
    };
    assert_eq!(call().status, Status::Accumulated);
    assert_eq!(call().status, Status::Stepped);
    let mut state = setup(
        OptimiserChain::new((
            AccumGrad {
                average: Average::Sum,
                ..AccumGrad::new(2)
            },
            AdamW::new(0.1),
        )),
        &x,
    )
    .expect("a state");
    let mut call = || {
        Update::new(&mut state)
            .finite_only()
            .apply_owned(&x, large())
            .expect("an update")
            .status
    };
    assert_eq!(call(), Status::Accumulated);
    assert_eq!(
        call(),
        Status::Skipped(SkipReason::WindowsGivenUp { path: String::new() })
    );
}

#[test]
fn ranks_take_them_too() {
    let train = |world: Option<LocalRank>| {
        let x = model(&tensors(1, DType::F32));
        let setup = world.as_ref().map_or_else(Setup::default, Setup::over);
        let mut state = setup.build(AdamW::new(0.1), &x).expect("a state");
        for call in 0..3 {
            Update::new(&mut state)
                .apply_owned(&x, grads(tensors(call, DType::F32).map(Some)))
                .expect("an update");
        }
        x.values().map(|x| bits(x)).collect::<Vec<_>>()
    };
    let alone = train(None);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(2)
            .into_iter()
            .map(|world| scope.spawn(|| train(Some(world))))
            .collect();
        threads
            .into_iter()
            .for_each(|thread| assert_eq!(thread.join().expect("a rank"), alone));
    });
}
