//! A streamed step that is leaked: the state has lost its leaves, and says so.

use std::collections::BTreeMap;
use std::fs;

use candle_core::{DType, Device, Tensor};
use optimisers::config::OptimiserConfig;
use optimisers::torch::TorchState;
use optimisers::{
    AdamW, Checkpoint, CheckpointFile, CheckpointSaver, Descent, Error, ErrorKind, LossScaler,
    ReduceOnPlateau, Result, Sam, Schedule, StateTree, Update, Weights, setup, trainables, update,
};

use support::common::{Vars, constant, is_kind, model};

fn variables() -> Vars {
    model(&[constant(1.0, 2, DType::F32), constant(1.0, 3, DType::F32)])
}

fn gradients(model: &Vars) -> BTreeMap<String, Tensor> {
    model
        .iter()
        .map(|(path, x)| (path.clone(), x.ones_like().expect("ones")))
        .collect()
}

/// Everything that refuses, by name.
type Verb<'v> = (&'static str, Box<dyn FnOnce(&mut StateTree) -> Result<()> + 'v>);

#[test]
fn what_needs_the_leaves_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let [file, torch, weights] =
        ["run.safetensors", "torch.safetensors", "weights.safetensors"].map(|name| folder.path().join(name));
    let (model, grads, mut scaler) = (variables(), gradients(&variables()), LossScaler::dynamic());
    let mut state = setup(AdamW::new(0.1), &model).expect("a state");
    update(&mut state, &model, &grads).expect("an update");
    Checkpoint::new(&state)
        .model(&model)
        .save(&file)
        .expect("a checkpoint");
    state.save_torch(&torch).expect("a file");
    state.save_masters(&model, &weights).expect("a file");
    let good = fs::read(&file).expect("the file");
    let mut saver = CheckpointSaver::new(folder.path().join("saved")).keep_last(1);
    saver
        .save(1, Checkpoint::new(&state))
        .and_then(|_| saver.wait())
        .expect("a save");
    let parameters = trainables(&model).expect("parameters");
    let open = || CheckpointFile::open(&file);

    let step = Update::new(&mut state).begin(&model).expect("a step");
    step.push("0", grads["0"].clone()).expect("a push");
    std::mem::forget(step);

    let verbs: Vec<Verb<'_>> = vec![
        (
            "update",
            Box::new(|state| update(state, &model, &grads).map(drop)),
        ),
        (
            "apply_owned",
            Box::new(|state| Update::new(state).apply_owned(&model, grads.clone()).map(drop)),
        ),
        (
            "functional",
            Box::new(|state| Update::functional(state).apply(&parameters, &grads).map(drop)),
        ),
        (
            "begin",
            Box::new(|state| Update::new(state).begin(&model).map(drop)),
        ),
        (
            "ascend",
            Box::new(|state| Sam::new(0.1).ascend(Update::new(state), &model, &grads).map(drop)),
        ),
        (
            "with a scaler",
            Box::new(|state| {
                scaler.factor()?;
                Update::new(state)
                    .scaler(&mut scaler)
                    .apply(&model, &grads)
                    .map(drop)
            }),
        ),
        ("averages", Box::new(|state| state.averages(&model).map(drop))),
        (
            "with_averages",
            Box::new(|state| state.with_averages(&model, || Ok::<_, Error>(()))),
        ),
        ("masters", Box::new(|state| state.masters(&model).map(drop))),
        (
            "set_masters",
            Box::new(|state| state.set_masters(&model, &grads).map(drop)),
        ),
        (
            "set_masters of a file",
            Box::new(|state| state.set_masters(&model, &Weights::open([&weights])?).map(drop)),
        ),
        ("refresh_masters", Box::new(|state| state.refresh_masters(&model))),
        ("check_masters", Box::new(|state| state.check_masters(&model))),
        (
            "save_masters",
            Box::new(|state| state.save_masters(&model, &file).map(drop)),
        ),
        (
            "save",
            Box::new(|state| Checkpoint::new(state).save(&file).map(drop)),
        ),
        (
            "save of a model",
            Box::new(|state| Checkpoint::new(state).model(&model).save(&file).map(drop)),
        ),
        (
            "saver",
            Box::new(|state| {
                saver
                    .save(2, Checkpoint::new(state))
                    .and_then(|_| saver.wait())
                    .map(drop)
            }),
        ),
        ("save_torch", Box::new(|state| state.save_torch(&file).map(drop))),
        ("restore", Box::new(|state| open()?.restore(state).map(drop))),
        (
            "restore_with_model",
            Box::new(|state| open()?.restore_with_model(state, &model).map(drop)),
        ),
        (
            "restore of torch",
            Box::new(|state| TorchState::open(&torch)?.restore(state).map(drop)),
        ),
        ("adjust", Box::new(|state| state.adjust(0.2))),
        (
            "adjust_fields",
            Box::new(|state| state.all().adjust_fields([("eta", 0.2.into())])),
        ),
        ("all().adjust", Box::new(|state| state.all().adjust(0.2))),
        (
            "all().replace",
            Box::new(|state| state.all().replace(Descent::new(0.1), &model).map(drop)),
        ),
        ("at", Box::new(|state| state.at("0").map(drop))),
        (
            "select_where",
            Box::new(|state| state.select_where(|_| true).map(drop)),
        ),
        (
            "add",
            Box::new(|state| state.add(Descent::new(0.1), &model).map(drop)),
        ),
        (
            "add_with",
            Box::new(|state| state.add_with(&model, |_, _| Some(Descent::new(0.1))).map(drop)),
        ),
        ("remove", Box::new(|state| state.remove("0").map(drop))),
        ("rename", Box::new(|state| state.rename("0", "first"))),
        ("rebind", Box::new(|state| state.rebind(&model))),
        (
            "resize_rows",
            Box::new(|state| state.resize_rows("0", &model, &[None, None]).map(drop)),
        ),
        ("try_clone", Box::new(|state| state.try_clone().map(drop))),
        (
            "of_state",
            Box::new(|state| OptimiserConfig::of_state(state).map(drop)),
        ),
        (
            "schedule",
            Box::new(|state| state.schedule(Schedule::linear(0.1, 0.0, 10))),
        ),
        (
            "plateau",
            Box::new(|state| ReduceOnPlateau::new().observe(1.0, state).map(drop)),
        ),
    ];
    for (verb, run) in verbs {
        let error = run(&mut state).expect_err(verb);
        is_kind(
            &error,
            ErrorKind::Unsupported,
            &[
                "leaked",
                "`StreamedStep`",
                "set up a state, and restore a checkpoint",
            ],
        );
    }
    assert!(fs::read(&file).expect("the file") == good, "the file");
    assert_eq!(saver_files(folder.path()), 1);

    // What has no error to return has no leaves.
    assert_eq!(
        (
            state.len(),
            state.is_empty(),
            state.bytes(),
            state.elements(),
            state.leaves().len()
        ),
        (0, true, 0, 0, 0)
    );
    assert!(state.leaf("0").is_none());
    assert!(state.to_string().contains("leaked"), "{state}");
    assert!(format!("{state:?}").starts_with("StateTree"));
    assert!(state.warnings().is_empty());
    state.require_all();
    state.all().freeze();
    let _ = model["0"].device().same_device(&Device::Cpu);
}

fn saver_files(folder: &std::path::Path) -> usize {
    let names = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with("saved-"))
        .count()
}
