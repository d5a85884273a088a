//! What would hurt a run over ranks in silence, because one rank differs from the others; and right programs
//! that were refused.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Accumulator, Checkpoint, CheckpointFile, Communicator, Descent, ErrorKind, LossScaler,
    MixedPrecision, Offload, OptimiserChain, ParameterSlices, Setup, Status, Update, ranks, setup, update,
};

use support::common::{Grads, Vars, is_kind};
use support::threads::on;

/// Two parameters of ones, of which each of two ranks has one.
fn ones() -> Vars {
    let one = |path: &str| {
        let x = Var::ones(40_000, DType::F32, &Device::Cpu).expect("a variable");
        (path.to_string(), x)
    };
    ["a", "b"].map(one).into_iter().collect()
}

/// Gradients of ones for these paths.
fn gradients(paths: &[&str]) -> Grads {
    let one = |path: &&str| {
        let gradient = Tensor::ones(40_000, DType::F32, &Device::Cpu).expect("a gradient");
        (path.to_string(), gradient)
    };
    paths.iter().map(one).collect()
}

/// The first and the last value of a parameter.
fn ends(model: &Vars, path: &str) -> [f32; 2] {
    let values = model[path].to_vec1::<f32>().expect("values");
    [values[0], values[values.len() - 1]]
}

#[test]
fn t62_new_masters_reach_all_of_lent_memory() {
    on(2, |world| {
        for dtype in [DType::F32, DType::F64] {
            let mut x = vec![0f32; 40_000];
            let slices = ParameterSlices::new().with("x", 40_000, &mut x).expect("slices");
            let mut state = Setup::over(&world)
                .build(MixedPrecision::new(dtype, Descent::new(0.1)), &slices)
                .expect("a state");
            let values = Tensor::ones(40_000, DType::F32, &Device::Cpu).expect("values");
            state
                .set_masters(&slices, &BTreeMap::from([("x".to_string(), values)]))
                .expect("new masters");
            drop(slices);
            assert!(x.iter().all(|x| *x == 1.0), "of all ranks, in {dtype:?}");
        }
    });
}

#[test]
fn t63_a_rank_without_gradients_does_not_halve_the_mean() {
    on(2, |world| {
        let (model, is_bad) = (ones(), world.rank() == 1);
        let mut state = Setup::over(&world)
            .build(Descent::new(0.5), &model)
            .expect("a state");
        let own = |bad: &[&str]| gradients(if is_bad { bad } else { &["a", "b"] });
        let error = update(&mut state, &model, &own(&[])).expect_err("no gradient on rank 1");
        is_kind(
            &error,
            ErrorKind::NoGradient,
            &["rank 1", "`Update::weight` to 0"],
        );
        assert_eq!((error.rank(), ends(&model, "a")), (Some(1), [1.0; 2]));

        let weight = u64::from(!is_bad);
        let outcome = Update::new(&mut state)
            .weight(weight)
            .apply(&model, &own(&[]))
            .expect("no weight on rank 1");
        assert_eq!((outcome.applied, ends(&model, "a")), (2, [0.5; 2]));

        Update::new(&mut state)
            .allow_no_gradients()
            .apply(&model, &own(&[]))
            .expect("zeros on rank 1");
        assert_eq!(ends(&model, "a"), [0.25; 2]);

        update(&mut state, &model, &own(&["a"])).expect("zeros for `b` on rank 1");
        assert_eq!((ends(&model, "a"), ends(&model, "b")), ([-0.25; 2], [0.0; 2]));
        state.require_all();
        let error = update(&mut state, &model, &own(&["a"])).expect_err("`b` is required");
        is_kind(
            &error,
            ErrorKind::NoGradient,
            &[
                "\"b\"",
                "rank 1 has no gradient for it",
                "`Selection::allow_missing`",
            ],
        );
        assert_eq!((error.path(), error.rank()), (Some("b"), Some(1)));
        state.at("b").expect("a leaf").allow_missing();
        update(&mut state, &model, &own(&["a"])).expect("`b` may be missing");

        let collecting = OptimiserChain::new((AccumGrad::new(2), Descent::new(0.5)));
        let mut state = Setup::over(&world).build(collecting, &model).expect("a state");
        state.require_all();
        for first in [&["a"][..], &["a", "b"]] {
            let before = ends(&model, "b");
            update(&mut state, &model, &own(first)).expect("the window is open");
            update(&mut state, &model, &own(&["a"])).expect("one rank has `b` in this window");
            assert_ne!(ends(&model, "b"), before);
        }
    });
}

/// A rank whose data have run out goes on with weight 0.
#[test]
fn a_rank_without_data_takes_part() {
    on(2, |world| {
        let (model, has_data) = (ones(), world.rank() == 0);
        let mut state = Setup::over(&world)
            .build(Descent::new(0.5), &model)
            .expect("a state");
        let mut scaler = LossScaler::fixed(4.0);
        let mut mean = Accumulator::new(DType::F32, &model).expect("an accumulator");
        if has_data {
            let loss = model["a"].sum_all().expect("a loss");
            let scaled = scaler
                .scale(&loss)
                .expect("scaled")
                .backward()
                .expect("gradients");
            mean.add(&scaled).expect("a sum");
        }
        let (weight, mean) = (mean.weight(), mean.take().expect("a mean"));
        let outcome = Update::new(&mut state)
            .weight(weight)
            .scaler(&mut scaler)
            .apply(&model, &mean)
            .expect("data on one rank");
        assert_eq!((outcome.status, ends(&model, "a")), (Status::Stepped, [0.5; 2]));

        let outcome = Update::new(&mut state)
            .weight(0)
            .allow_no_gradients()
            .apply(&model, &gradients(&["a"]))
            .expect("no data at all");
        assert_eq!((outcome.applied, ends(&model, "a")), (0, [0.5; 2]));
    });
}

#[test]
fn t64_another_model_has_the_same_values_on_all_ranks() {
    on(2, |world| {
        let (model, other) = (ones(), ones());
        let mut state = Setup::over(&world)
            .build(Descent::new(0.5), &model)
            .expect("a state");
        other["b"]
            .set(&Tensor::full(world.rank() as f32, 40_000, &Device::Cpu).expect("values"))
            .expect("set");
        let error = state.rebind(&other).expect_err("two values");
        is_kind(
            &error,
            ErrorKind::Ranks,
            &["rank 1", "the values of \"b\"", "`broadcast`"],
        );
        optimisers::broadcast(&world, &other).expect("the values of rank 0");
        state.rebind(&other).expect("one model");
        update(&mut state, &other, &gradients(&["a", "b"])).expect("an update");
        assert_eq!((ends(&other, "a"), ends(&other, "b")), ([0.5; 2], [-0.5; 2]));
    });
}

#[test]
fn t65_a_file_has_the_running_statistics_of_one_rank() {
    const STATISTIC: &str = "running_mean";
    let model = || {
        let x = |length| Var::ones(length, DType::F32, &Device::Cpu).expect("a variable");
        // Each rank has a part of the statistic.
        Vars::from([(STATISTIC.to_string(), x(40_000)), ("w".to_string(), x(10))])
    };
    let gradients = || {
        let gradient = Tensor::ones(10, DType::F32, &Device::Cpu).expect("a gradient");
        Grads::from([("w".to_string(), gradient)])
    };
    let folder = tempfile::tempdir().expect("a folder");
    let files = ["before", "after"].map(|name| folder.path().join(name));
    let paths = files.clone();
    on(2, move |world| {
        let (first, second) = (model(), model());
        let mut state = Setup::over(&world)
            .build(Descent::new(0.5), &first)
            .expect("a state");
        assert!(
            !state
                .at(STATISTIC)
                .expect("a leaf")
                .leaves()
                .any(|leaf| leaf.part().is_empty())
        );
        for model in [&first, &second] {
            model[STATISTIC]
                .set(&Tensor::full(world.rank() as f32, 40_000, &Device::Cpu).expect("values"))
                .expect("set");
        }
        Checkpoint::new(&state)
            .model(&first)
            .save(&paths[0])
            .expect("saved");
        state.refresh_masters(&first).expect("statistics may differ");
        update(&mut state, &first, &gradients()).expect("an update");
        Checkpoint::new(&state)
            .model(&first)
            .save(&paths[1])
            .expect("saved");
        state.rebind(&second).expect("statistics may differ");
        assert_eq!(ends(&second, STATISTIC), [world.rank() as f32; 2]);
    });
    for (path, expected) in files.iter().zip([1.0, 0.5]) {
        let model = model();
        let mut state = setup(Descent::new(0.5), &model).expect("a state");
        CheckpointFile::open(path)
            .and_then(|file| file.restore_with_model(&mut state, &model))
            .expect("restored");
        assert_eq!(
            (ends(&model, STATISTIC), ends(&model, "w")),
            ([0.0; 2], [expected; 2])
        );
    }
}

#[test]
fn a_world_of_one_can_be_offloaded() {
    let world = ranks(1).remove(0);
    let model = ones();
    let mut state = Setup::over(&world)
        .build(Offload::new(Descent::new(0.5)).everywhere(), &model)
        .expect("offloaded");
    update(&mut state, &model, &gradients(&["a", "b"])).expect("an update");
    assert_eq!(ends(&model, "a"), [0.5; 2]);
}

#[test]
fn a_frozen_gradient_may_be_too_large_for_the_wire() {
    on(2, |world| {
        let model = ones();
        let mut state = Setup::over(&world)
            .wire(|_, _| Some(DType::F16))
            .build(Descent::new(0.5), &model)
            .expect("a state");
        let mut large = gradients(&["a", "b"]);
        let too_large = (&large["a"] * 1e6).expect("a gradient");
        large.insert("a".to_string(), too_large);
        update(&mut state, &model, &large).expect_err("too large for F16");
        state.at("a").expect("a leaf").freeze();
        update(&mut state, &model, &large).expect("frozen");
        assert_eq!((ends(&model, "a"), ends(&model, "b")), ([1.0; 2], [0.5; 2]));
    });
}
