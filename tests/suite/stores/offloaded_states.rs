//! What a state around `Offload` goes through: replaced, saved, averaged, copied.

use candle_core::DType;
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Ema, ErrorKind, MixedPrecision,
    Offload, Optimiser, OptimiserChain, SplitMaster, Update, setup, update,
};

use crate::stores::offload::{kept, numbers, offloaded};
use support::common::{assert_same, bits, grads, is_kind, model, tensor};

/// A wrapper around a running optimiser, and off again: nothing is lost in either direction.
#[test]
fn a_running_optimiser_is_offloaded_and_brought_back() {
    for dtype in [DType::BF16, DType::F32] {
        for inner in kept(
            Box::new(OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1)))),
            dtype,
        ) {
            let gradient = |call: u64| grads([Some(tensor(call, &[4, 5], dtype))]);
            let (x, y) = (
                model(&[tensor(1, &[4, 5], dtype)]),
                model(&[tensor(1, &[4, 5], dtype)]),
            );
            let mut replaced = setup(inner.clone(), &x).expect("a state");
            let mut left = setup(inner.clone(), &y).expect("a state");
            for call in 0..12 {
                if call % 3 == 2 {
                    let next = if call % 2 == 0 {
                        offloaded(inner.clone())
                    } else {
                        inner.clone()
                    };
                    let answer = replaced.all().replace(next, &x).expect("another optimiser");
                    assert!(answer[0].fresh.iter().all(|name| name == "master"), "{answer:?}");
                    assert!(
                        answer[0].dropped.iter().all(|name| name == "master"),
                        "{answer:?}"
                    );
                }
                update(&mut replaced, &x, &gradient(call)).expect("an update");
                update(&mut left, &y, &gradient(call)).expect("an update");
                assert_same(
                    &[numbers(&x, &replaced)],
                    &[numbers(&y, &left)],
                    (inner.name(), call),
                );
            }
        }
    }
}

/// A file is the same for every device; with and without the wrapper it is a conversion.
#[test]
fn checkpoints_go_from_device_to_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let rule = || OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.1)));
    for dtype in [DType::BF16, DType::F32] {
        for inner in kept(Box::new(rule()), dtype) {
            let ways: [Optimiser; 3] = [
                offloaded(inner.clone()),
                Optimiser::new(Offload::new(inner.clone())),
                inner.clone(),
            ];
            for saved in &ways {
                let x = model(&[tensor(1, &[4, 5], dtype)]);
                let mut state = setup(saved.clone(), &x).expect("a state");
                update(&mut state, &x, &grads([Some(tensor(2, &[4, 5], dtype))])).expect("an update");
                Checkpoint::new(&state).model(&x).save(&path).expect("a file");
                for loaded in &ways {
                    let y = model(&[tensor(3, &[4, 5], dtype)]);
                    let mut resumed = setup(loaded.clone(), &y).expect("a state");
                    let file = CheckpointFile::open(&path).expect("a file");
                    let what = || format!("{} from {}", loaded.name(), saved.name());
                    if saved.name() != loaded.name() {
                        let before = numbers(&y, &resumed);
                        let error = file
                            .restore_with_model(&mut resumed, &y)
                            .expect_err("another optimiser");
                        is_kind(
                            &error,
                            ErrorKind::OtherRule,
                            &["the file is of another rule", &saved.name(), &loaded.name()],
                        );
                        assert_eq!(numbers(&y, &resumed), before, "{}", what());
                        if !inner.name().starts_with("Mixed") && inner.name() != inner.rule().name() {
                            continue;
                        }
                        file.converting()
                            .restore_with_model(&mut resumed, &y)
                            .expect("a conversion");
                    } else {
                        file.restore_with_model(&mut resumed, &y).expect("a restored run");
                    }
                    assert_same(&[numbers(&y, &resumed)], &[numbers(&x, &state)], what());
                    let mut original = state.try_clone().expect("a copy");
                    let next = grads([Some(tensor(4, &[4, 5], dtype))]);
                    let z = model(&[x["0"].as_tensor().clone()]);
                    original.rebind(&z).expect("a copy of the model");
                    update(&mut original, &z, &next).expect("an update");
                    update(&mut resumed, &y, &next).expect("an update");
                    assert_same(&[numbers(&y, &resumed)], &[numbers(&z, &original)], what());
                }
            }
        }
    }
}

/// A state alone, without the model, as long as the file says what the copies are.
#[test]
fn a_state_is_saved_without_its_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    for inner in kept(Box::new(Adam::new(0.1)), DType::BF16) {
        let x = model(&[tensor(1, &[4], DType::BF16)]);
        let mut state = setup(offloaded(inner.clone()), &x).expect("a state");
        update(&mut state, &x, &grads([Some(tensor(2, &[4], DType::BF16))])).expect("an update");
        let saved = numbers(&x, &state);
        let weights = x["0"].copy().expect("a copy");
        Checkpoint::new(&state).save(&path).expect("a file");
        update(&mut state, &x, &grads([Some(tensor(3, &[4], DType::BF16))])).expect("an update");
        CheckpointFile::open(&path)
            .and_then(|file| file.restore(&mut state))
            .expect("a restored state");
        let error = state.check_masters(&x).expect_err("stale");
        assert!(
            error.to_string().contains("its master"),
            "{}: {error}",
            inner.name()
        );
        assert_eq!(error.kind(), ErrorKind::Changed, "{}: {error}", inner.name());
        x["0"].set(&weights).expect("the weights of that time");
        state.check_masters(&x).expect("what belongs together");
        assert_eq!(numbers(&x, &state), saved, "{}", inner.name());
    }
}

#[test]
fn averages_go_up_and_down() {
    for dtype in [DType::BF16, DType::F32] {
        for inner in kept(
            Box::new(OptimiserChain::new((AdamW::new(0.1), Ema::default()))),
            dtype,
        ) {
            let [expected, got] = [inner.clone(), offloaded(inner)].map(|optimiser| {
                let x = model(&[tensor(1, &[4], dtype)]);
                let mut state = setup(optimiser, &x).expect("a state");
                let mut seen = Vec::new();
                for call in 0..3 {
                    update(&mut state, &x, &grads([Some(tensor(2 + call, &[4], dtype))])).expect("an update");
                    seen.push(
                        state
                            .with_averages(&x, || Ok::<_, optimisers::Error>(bits(&x["0"])))
                            .expect("averages"),
                    );
                    seen.push(bits(&x["0"]));
                }
                (
                    seen,
                    bits(&state.averages(&x).expect("averages")["0"]),
                    numbers(&x, &state),
                )
            });
            assert_eq!(got, expected);
        }
    }
}

#[test]
fn the_functional_form_has_the_same_bits() {
    for inner in kept(Box::new(AdamW::new(0.1)), DType::BF16) {
        let x = model(&[tensor(1, &[4], DType::BF16)]);
        let state = setup(offloaded(inner), &x).expect("a state");
        let before = numbers(&x, &state);
        let gradient = grads([Some(tensor(2, &[4], DType::BF16))]);
        let start = optimisers::trainables(&x).expect("parameters");
        let (next_state, next, _) = Update::functional(&state)
            .apply(&start, &gradient)
            .expect("an update");
        assert_eq!(numbers(&x, &state), before);
        let (mut state, masters) = (state, next_state.masters(&next).expect("masters"));
        update(&mut state, &x, &gradient).expect("an update");
        assert_eq!(bits(&next["0"]), bits(&x["0"]));
        assert_eq!(
            bits(&masters["0"]),
            bits(&state.masters(&x).expect("masters")["0"])
        );
    }
}

#[test]
fn bytes_are_those_of_the_documentation() {
    let bytes = |optimiser: Optimiser, dtype: DType| {
        setup(optimiser, &model(&[tensor(1, &[128], dtype)]))
            .expect("a state")
            .bytes() as f64
            / 128.0
    };
    assert_eq!(
        bytes(
            offloaded(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
            DType::BF16
        ),
        12.0
    );
    assert_eq!(
        bytes(offloaded(SplitMaster::new(AdamW::new(0.1))), DType::BF16),
        2.0 + 10.125
    );
    assert_eq!(bytes(offloaded(AdamW::new(0.1)), DType::BF16), 2.0 + 8.0);
    assert_eq!(
        bytes(
            offloaded(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
            DType::F32
        ),
        4.0 + 8.0
    );
}
