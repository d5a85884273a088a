//! The state of torch's optimisers: files that torch wrote, and what is refused. Whole runs with a live torch
//! are in `tests/torch.rs`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::torch::TorchState;
use optimisers::{
    AccumGrad, AdaGrad, Adam, AdamW, DecoupledDecay, Descent, Ema, Error, ErrorKind, FieldValue, GradNoise,
    Kahan, MixedPrecision, Momentum, Muon, Nesterov, Offload, Optimiser, OptimiserChain, Q8, RMSProp,
    Schedule, StateTree, StoreAs, Warning, WeightDecay, setup,
};
use serde_json::{Value, json};

use support::common::{Snapshot, Vars, bits, constant, is_kind, says, snapshot, values, var};
use support::tested::Tested;
use support::torch_runs::{
    GROUP_RATES, ScheduledRun, assert_close, assert_exact, json as read, model, model_in, optimisers,
    parameters, read_parameters, scheduled, start, steps,
};

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden/torch_state")
        .join(name)
}

/// A model of one parameter with two numbers.
pub fn lone() -> Vars {
    Vars::from([("x".to_string(), var(&constant(1.0, 2, DType::F32)))])
}

pub fn group(changes: Value) -> Value {
    let mut group = json!({
        "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": false, "maximize": false, "foreach": null,
        "decoupled_weight_decay": false, "initial_lr": 0.01, "params": ["x"],
    });
    for (key, value) in changes.as_object().expect("changes") {
        match value {
            Value::String(text) if text == "removed" => {
                drop(group.as_object_mut().expect("a group").remove(key))
            }
            value => group[key] = value.clone(),
        }
    }
    group
}

/// A safetensors file of one group.
pub fn bytes(entries: &[(&str, Tensor)], group: &Value) -> Vec<u8> {
    let tensors: HashMap<String, &Tensor> = entries
        .iter()
        .map(|(name, tensor)| (name.to_string(), tensor))
        .collect();
    let metadata = HashMap::from([("param_groups".to_string(), json!([group]).to_string())]);
    safetensors::serialize(tensors, Some(metadata)).expect("a file")
}

pub fn floats(numbers: &[f32]) -> Tensor {
    Tensor::new(numbers, &Device::Cpu).expect("a tensor")
}

pub fn count(number: f32) -> Tensor {
    Tensor::new(number, &Device::Cpu).expect("a number")
}

/// The state of Adam for the lone parameter.
pub fn moments() -> Vec<(&'static str, Tensor)> {
    vec![
        ("x/exp_avg", floats(&[0.5, -0.5])),
        ("x/exp_avg_sq", floats(&[0.25, 4.0])),
        ("x/step", count(7.0)),
    ]
}

pub fn file(entries: &[(&str, Tensor)], changes: Value) -> TorchState {
    TorchState::from_bytes("state", bytes(entries, &group(changes))).expect("a file")
}

/// The error of a restore, which changes nothing.
pub fn refused(file: &TorchState, model: &Vars, state: &mut StateTree) -> Error {
    let before = snapshot(model, state);
    let error = file.restore(state).expect_err("an error");
    assert_eq!(snapshot(model, state), before, "{error}");
    error
}

/// An error that names the file.
pub fn torch_error(error: Error) -> Error {
    assert_eq!(error.file(), Some(Path::new("state")), "{error}");
    error
}

#[test]
fn runs_go_on_from_files_that_torch_wrote() -> Tested {
    let expected = read(&golden("expected.json"));
    for (name, optimiser) in optimisers() {
        let [after_20, after_40] =
            ["after_20", "after_40"].map(|half| read_parameters(&expected[name][half]));
        let path = golden(&format!("{name}.safetensors"));
        let model = model(&after_20);
        let mut state = setup(optimiser, &model)?;
        let file = TorchState::open(path)?;
        assert!(file.restore(&mut state)?.is_empty());
        steps(&mut state, &model, 20);
        assert_close(&parameters(&model), &after_40, name);
    }
    Ok(())
}

/// Two groups under one scheduler of torch's go on at its rates, to 15 digits.
#[test]
fn a_schedule_goes_on_from_files_that_torch_wrote() -> Tested {
    let expected = read(&golden("scheduled.json"));
    for ScheduledRun {
        name,
        optimiser,
        schedule,
    } in scheduled()
    {
        let [after_20, after_40] =
            ["after_20", "after_40"].map(|half| read_parameters(&expected[name][half]));
        let path = golden(&format!("{name}.safetensors"));
        let model = model_in(DType::F64, &after_20);
        let mut state = setup(optimiser.clone(), &model)?;
        let file = || TorchState::open(&path).expect("a file").taking_over_fields();
        state.schedule(schedule.clone())?;
        let last_epoch = expected[name]["last_epoch"].as_u64().expect("a count");
        state.set_steps(last_epoch - 1)?;
        let error = file().restore(&mut state).expect_err("another step");
        let words = [
            "torch's lr in the file is",
            "as the schedule gives in step",
            "`last_epoch`",
        ];
        says(&error, &words);
        state.set_steps(last_epoch)?;
        file().restore(&mut state)?;
        assert_eq!(state.warnings(), []);
        let field = if name.starts_with("momentum") {
            "1.eta"
        } else {
            "eta"
        };
        let own: Vec<_> = state.leaves().map(|leaf| leaf.field(field)).collect();
        let [fc, others] = GROUP_RATES.map(|rate| Some(rate.into()));
        assert_eq!(own, [others, fc, fc], "{name}");
        steps(&mut state, &model, 20);
        assert_exact(&parameters(&model), &after_40, name);
    }
    Ok(())
}

/// Without a schedule of torch's groups the rates stay as they are, and are nobody's but the leaf's.
#[test]
fn a_file_of_a_schedule_that_the_state_lacks_is_warned_of() -> Tested {
    let model = start_of_scheduled();
    let mut state = setup(
        AdamW {
            lambda: 0.1,
            ..AdamW::new(0.01)
        },
        &model,
    )?;
    let file = || {
        TorchState::open(golden("adamw_cosine.safetensors"))
            .expect("a file")
            .taking_over_fields()
    };
    file().restore(&mut state)?;
    let [fc, others] = GROUP_RATES.map(|rate| Schedule::cosine(rate, 0.0, 50));
    let rates = |state: &StateTree| {
        state
            .leaves()
            .filter_map(|leaf| leaf.learning_rate())
            .collect::<Vec<_>>()
    };
    let near = |got: &[f64]| {
        let expected = [others.at(20), fc.at(20), fc.at(20)];
        got.iter()
            .zip(expected)
            .all(|(got, expected)| (got - expected).abs() < 1e-16)
    };
    assert!(near(&rates(&state)), "{state}");
    let [
        Warning::ScheduleDiffers {
            path,
            program,
            file: of_file,
            ..
        },
    ] = state.warnings()
    else {
        panic!("{:?}", state.warnings())
    };
    assert_eq!(
        (
            &**path,
            program.is_none(),
            of_file.contains("(from 0.005 to 0.003")
        ),
        ("conv", true, true)
    );

    // One that is not relative, for each group.
    let mut state = setup(
        AdamW {
            lambda: 0.1,
            ..AdamW::new(0.01)
        },
        &model,
    )?;
    state
        .at("fc")
        .and_then(|mut leaves| leaves.schedule(fc.clone()))?;
    state
        .at("conv")
        .and_then(|mut leaf| leaf.schedule(others.clone()))?;
    state.set_steps(20)?;
    file().restore(&mut state)?;
    assert!(near(&rates(&state)) && state.warnings().is_empty(), "{state}");
    assert!(
        state.leaves().all(|leaf| leaf.field("eta") == Some(0.01.into())),
        "the own rates have no effect"
    );
    Ok(())
}

fn start_of_scheduled() -> support::torch_runs::Model {
    support::torch_runs::start_in(DType::F64)
}

/// Each leaf's own rate is in the file beside that of the moment, and comes back.
#[test]
fn initial_rates_are_written_and_read() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let groups = || -> Value {
        let file = std::fs::read(&path).expect("a file");
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&file).expect("a header");
        let metadata = metadata.metadata().clone().expect("metadata");
        let groups: Value = serde_json::from_str(&metadata["param_groups"]).expect("groups");
        let told = |group: &Value| {
            (
                group["params"].clone(),
                group["lr"].clone(),
                group.get("initial_lr").cloned(),
            )
        };
        groups
            .as_array()
            .expect("a list")
            .iter()
            .map(told)
            .map(|told| json!(told))
            .collect()
    };
    let model = start();
    let mut state = setup(OptimiserChain::new((Adam::new(0.5), Descent::new(0.5))), &model)?;
    state.save_torch(&path)?;
    assert_eq!(
        groups(),
        json!([[["conv", "fc.bias", "fc.weight"], 0.25, null]]),
        "no schedule"
    );
    state
        .at("fc")
        .and_then(|mut leaves| leaves.adjust_field("1.eta", 0.25))?;
    let schedule = || Schedule::linear(1.0, 0.0, 4).relative().field("1.eta");
    state.schedule(schedule())?;
    state.set_steps(1)?;
    state.save_torch(&path)?;
    assert_eq!(
        groups(),
        json!([
            [["conv"], 0.1875, 0.25],
            [["fc.bias", "fc.weight"], 0.09375, 0.125]
        ])
    );

    let rule = || OptimiserChain::new((Adam::new(0.5), Descent::new(1.0)));
    let mut restored = setup(rule(), &model)?;
    restored.schedule(schedule())?;
    restored.set_steps(1)?;
    let file = || TorchState::open(&path).expect("a file");
    says(
        &file().restore(&mut restored).expect_err("another rate"),
        &["torch's initial_lr", "0.25"],
    );
    file().taking_over_fields().restore(&mut restored)?;
    let told = |state: &StateTree| {
        state
            .leaves()
            .map(|leaf| (leaf.field("1.eta"), leaf.learning_rate()))
            .collect::<Vec<_>>()
    };
    assert_eq!(told(&restored), told(&state));
    // Without a schedule the rates of the moment are the leaves' own.
    let mut plain = setup(rule(), &model)?;
    file().taking_over_fields().restore(&mut plain)?;
    assert_eq!(
        told(&plain),
        told(&state)
            .into_iter()
            .map(|(_, rate)| (rate.map(|rate| (rate / 0.5).into()), rate))
            .collect::<Vec<_>>()
    );
    assert_eq!(plain.warnings().len(), 1);

    // A file without a scheduler is compared by the rate of the step.
    plain.save_torch(&path)?;
    assert_eq!(
        groups(),
        json!([
            [["conv"], 0.1875, null],
            [["fc.bias", "fc.weight"], 0.09375, null]
        ])
    );
    file().restore(&mut restored)?;
    restored.set_steps(2)?;
    says(
        &file().restore(&mut restored).expect_err("another step"),
        &["as the schedule gives in step 2"],
    );
    Ok(())
}

#[test]
fn an_initial_rate_that_is_none_is_refused() -> Tested {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model)?;
    for value in [json!(-0.5), json!("large"), json!(null)] {
        let shown = value.to_string();
        let error = torch_error(refused(
            &file(&moments(), json!({ "initial_lr": value })),
            &model,
            &mut state,
        ));
        is_kind(&error, ErrorKind::File, &["the file's initial_lr is "]);
        assert_eq!(error.got(), Some(&*shown), "{error}");
    }
    Ok(())
}

#[test]
fn a_state_comes_back_from_its_own_file() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    for (name, optimiser) in optimisers() {
        let model = start();
        let mut state = setup(optimiser.clone(), &model)?;
        steps(&mut state, &model, 5);
        state.save_torch(&path)?;
        let saved = parameters(&model);
        let copy = support::torch_runs::model(&saved);
        let mut restored = setup(optimiser, &copy)?;
        assert_eq!(
            TorchState::open(&path).and_then(|file| file.restore(&mut restored))?,
            [""; 0]
        );
        steps(&mut state, &model, 5);
        steps(&mut restored, &copy, 5);
        assert_close(&parameters(&copy), &parameters(&model), name);
    }
    Ok(())
}

/// In f64 what is written is read again to the bit, through wrappers and ways to store parameters.
#[test]
fn every_bit_of_moments_and_counters_comes_back() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let tensors = |state: &StateTree| -> Vec<Snapshot> {
        let of = |leaf: &optimisers::Leaf| {
            let named = leaf
                .tensor_names()
                .into_iter()
                .filter(|name| name.ends_with('m') || name.ends_with('v'));
            let mut all: Snapshot = named
                .map(|name| (name.clone(), bits(&leaf.tensor(&name).expect("a copy"))))
                .collect();
            all.extend(
                leaf.counters()
                    .into_iter()
                    .filter(|(name, _)| name.ends_with('t'))
                    .map(|(name, count)| (name, vec![count])),
            );
            all
        };
        state.leaves().map(of).collect()
    };
    let adamw = AdamW::new(0.01);
    let all: Vec<Optimiser> = vec![
        Optimiser::new(adamw.clone()),
        Optimiser::new(MixedPrecision::new(DType::F32, adamw.clone())),
        Optimiser::new(Kahan::new(adamw.clone())),
        Optimiser::new(Offload::new(MixedPrecision::new(DType::F64, adamw.clone())).everywhere()),
        Optimiser::new(StoreAs::new([("m", DType::BF16)], adamw.clone())),
        Optimiser::new(StoreAs::all(Q8, adamw.clone())),
        Optimiser::new(Muon::new(0.1).with_fallback(adamw)),
    ];
    for optimiser in all {
        for dtype in [DType::BF16, DType::F32, DType::F64] {
            let name = format!("{optimiser:?} on {dtype:?}");
            let fresh = || Vars::from([("x".to_string(), var(&constant(0.5, 5000, dtype)))]);
            let model = fresh();
            let mut state = setup(optimiser.clone(), &model)?;
            let gradient = support::common::tensor(1, &[5000], dtype);
            for _ in 0..3 {
                optimisers::update(&mut state, &model, &[("x", gradient.clone())])?;
            }
            state.save_torch(&path)?;
            let other = fresh();
            let mut restored = setup(optimiser.clone(), &other)?;
            TorchState::open(&path)
                .and_then(|file| file.restore(&mut restored))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(restored.leaf("x").map(|leaf| leaf.steps()), Some(3), "{name}");
            assert_eq!(tensors(&restored), tensors(&state), "{name}");
        }
    }
    Ok(())
}

/// A decay of 0 makes a moment the last gradient, or one that nobody reads.
#[test]
fn states_with_decays_of_0_come_back() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let momentum = || Momentum {
        rho: 0.0,
        ..Momentum::new(0.5)
    };
    let rules: Vec<Optimiser> = vec![
        Optimiser::new(Adam {
            beta: (0.0, 0.9),
            ..Adam::new(0.1)
        }),
        Optimiser::new(AdamW {
            beta: (0.0, 0.9),
            ..AdamW::new(0.1)
        }),
        Optimiser::new(optimisers::AMSGradW {
            beta: (0.0, 0.9),
            ..optimisers::AMSGradW::new(0.1)
        }),
        Optimiser::new(optimisers::Lion {
            beta: (0.0, 0.9),
            ..optimisers::Lion::new(0.1)
        }),
        Optimiser::new(optimisers::Lion {
            beta: (0.9, 0.0),
            ..optimisers::Lion::new(0.1)
        }),
        Optimiser::new(momentum()),
        Optimiser::new(Momentum {
            rho: 0.0,
            ..Momentum::new(0.0)
        }),
        Optimiser::new(optimisers::Nesterov {
            rho: 0.0,
            ..optimisers::Nesterov::new(0.5)
        }),
        Optimiser::new(OptimiserChain::new((
            optimisers::RMSProp::new(1.0),
            momentum(),
            Descent::new(0.5),
        ))),
    ];
    for rule in rules {
        let model = lone();
        let mut state = setup(rule.clone(), &model)?;
        let step = |state: &mut StateTree, model: &Vars, numbers: [f32; 2]| {
            optimisers::update(state, model, &[("x", floats(&numbers))]).expect("an update");
        };
        step(&mut state, &model, [1.0, -2.0]);
        state
            .save_torch(&path)
            .unwrap_or_else(|error| panic!("{rule:?}: {error}"));
        let copy = Vars::from([("x".to_string(), var(&model["x"].copy()?))]);
        let mut restored = setup(rule.clone(), &copy)?;
        TorchState::open(&path)
            .and_then(|file| file.restore(&mut restored))
            .unwrap_or_else(|error| panic!("{rule:?}: {error}"));
        step(&mut state, &model, [0.5, 3.0]);
        step(&mut restored, &copy, [0.5, 3.0]);
        assert_eq!(values(&copy["x"]), values(&model["x"]), "{rule:?}");
    }
    Ok(())
}

/// torch's `step` is that of all members that make the step, and a velocity that the next step does not read
/// comes back, too.
#[test]
fn chains_come_back_with_counts_and_velocities() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let momentum = |eta, rho| Momentum {
        rho,
        ..Momentum::new(eta)
    };
    let mean = |eta| RMSProp {
        centred: eta < 1.0,
        ..RMSProp::new(eta)
    };
    let rules: Vec<Optimiser> = vec![
        Optimiser::new(OptimiserChain::new((mean(0.5), momentum(1.0, 0.9)))),
        Optimiser::new(OptimiserChain::new((
            mean(1.0),
            momentum(1.0, 0.9),
            Descent::new(0.1),
        ))),
        Optimiser::new(OptimiserChain::new((
            mean(1.0),
            momentum(1.0, 0.0),
            Descent::new(0.1),
        ))),
        Optimiser::new(OptimiserChain::new((mean(0.5), momentum(0.5, 0.0)))),
        Optimiser::new(OptimiserChain::new((
            mean(1.0),
            momentum(1.0, 0.9),
            Descent::new(0.0),
        ))),
        Optimiser::new(OptimiserChain::new((
            WeightDecay::new(0.1),
            Adam::new(0.5),
            Descent::new(0.5),
        ))),
    ];
    for rule in rules {
        let model = lone();
        let mut state = setup(rule.clone(), &model)?;
        for numbers in [[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]] {
            optimisers::update(&mut state, &model, &[("x", floats(&numbers))])?;
        }
        state.save_torch(&path)?;
        let mut restored = setup(rule.clone(), &model)?;
        TorchState::open(&path)?.restore(&mut restored)?;
        assert_eq!(snapshot(&model, &restored), snapshot(&model, &state), "{rule:?}");
    }
    // Without a count torch cannot tell it; the velocities of SGD come back all the same.
    for rule in [
        Optimiser::new(momentum(0.5, 0.0)),
        Optimiser::new(Nesterov {
            rho: 0.0,
            ..Nesterov::new(0.5)
        }),
    ] {
        let model = lone();
        let mut state = setup(rule.clone(), &model)?;
        optimisers::update(&mut state, &model, &[("x", floats(&[1.0, -2.0]))])?;
        state.save_torch(&path)?;
        let mut restored = setup(rule.clone(), &model)?;
        assert!(TorchState::open(&path)?.restore(&mut restored)?.is_empty());
        let tensor = |state: &StateTree| {
            let leaf = state.leaf("x").expect("the leaf");
            leaf.tensor(&leaf.tensor_names()[0]).map(|tensor| values(&tensor))
        };
        assert_eq!(
            (tensor(&restored)?, tensor(&state)?[0] != 0.0),
            (tensor(&state)?, true),
            "{rule:?}"
        );
    }
    // An average counts for itself, and torch has none.
    let model = lone();
    let mut averaged = setup(OptimiserChain::new((Adam::new(0.5), Ema::new(0.5))), &model)?;
    averaged.save_torch(&path)?;
    optimisers::update(&mut averaged, &model, &[("x", floats(&[1.0, -2.0]))])?;
    let before = averaged.leaf("x").map(|leaf| leaf.counters()[1..].to_vec());
    TorchState::open(&path)?.restore(&mut averaged)?;
    let after = averaged.leaf("x").map(|leaf| leaf.counters());
    assert_eq!(
        after.as_ref().map(|all| (all[0].1, all[1..].to_vec())),
        before.map(|others| (0, others))
    );
    // What stands before an accumulator counts calls, and not steps.
    let noisy = OptimiserChain::new((
        GradNoise::new(0.1),
        AccumGrad::new(2),
        Adam::new(0.5),
        Descent::new(0.5),
    ));
    let mut state = setup(noisy, &model)?;
    for _ in 0..4 {
        optimisers::update(&mut state, &model, &[("x", floats(&[1.0, -2.0]))])?;
    }
    state.save_torch(&path)?;
    let before = snapshot(&model, &state);
    TorchState::open(&path)?.restore(&mut state)?;
    assert_eq!(snapshot(&model, &state), before);
    assert_eq!(state.leaf("x").map(|leaf| leaf.counters()[0].1), Some(4));
    // A count that no restore takes.
    let mut state = setup(Adam::new(0.5), &model)?;
    for (count, is_saved) in [
        (1 << 24, true),
        ((1 << 53) - 1, false),
        (1 << 53, false),
        (u64::MAX / 2, false),
    ] {
        state.set_entries([("x", "t", optimisers::StateValue::Counter(count))])?;
        match state.save_torch(&path) {
            Ok(_) if is_saved => drop(TorchState::open(&path)?.restore(&mut state)?),
            Ok(_) => panic!("a count of {count}"),
            Err(error) => is_kind(&error, ErrorKind::Unsupported, &["a count of 2⁵³ steps or more"]),
        }
    }
    Ok(())
}

#[test]
fn what_torch_has_not_moved_yet_starts_from_zeros() -> Tested {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model)?;
    optimisers::update(&mut state, &model, &[("x", floats(&[1.0, 2.0]))])?;
    assert_eq!(file(&[], json!({})).restore(&mut state)?, ["x"]);
    let leaf = state.leaf("x").expect("the leaf");
    assert_eq!((leaf.steps(), leaf.counters()), (0, vec![("t".to_string(), 0)]));
    assert_eq!(values(&leaf.tensor("v")?), [0.0, 0.0]);
    // Adagrad's state is there from the start in torch.
    let changes = json!({ "amsgrad": "removed", "betas": "removed", "lr_decay": 0 });
    let mut sums = setup(AdaGrad::new(1e-3), &model)?;
    let error = torch_error(refused(&file(&[], changes), &model, &mut sums));
    is_kind(&error, ErrorKind::Tensor, &["the file lacks \"sum\""]);
    Ok(())
}

#[test]
fn hyper_parameters_are_compared_or_taken_over() -> Tested {
    let model = lone();
    let chain = OptimiserChain::new((WeightDecay::new(0.0), Adam::new(1e-3)));
    let changes = json!({ "lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.25 });
    let mut state = setup(chain, &model)?;
    let found = file(&moments(), changes);
    let error = refused(&found, &model, &mut state);
    let words = "torch state state: parameter \"x\": torch's lr in the file is 0.5, expected 0.001";
    is_kind(&error, ErrorKind::OtherRule, &[words, "taking_over_fields"]);
    found.taking_over_fields().restore(&mut state)?;
    let fields = |names: [&str; 4]| names.map(|name| state.leaf("x").and_then(|leaf| leaf.field(name)));
    let expected: [FieldValue; 4] = [0.25.into(), 0.5.into(), (0.8, 0.9).into(), 1e-6.into()];
    assert_eq!(
        fields(["0.lambda", "1.eta", "1.beta", "1.epsilon"]),
        expected.map(Some)
    );
    // A learning rate that torch has as a tensor is an f32.
    let rounded = f64::from(1e-3f32);
    file(&moments(), json!({ "lr": rounded })).restore(&mut setup(Adam::new(1e-3), &model)?)?;
    Ok(())
}

#[test]
fn the_learning_rate_is_that_of_the_last_factor() -> Tested {
    let model = lone();
    let entries = [("x/momentum_buffer", floats(&[1.0, -2.0]))];
    let changes = json!({
        "lr": 0.25, "betas": "removed", "amsgrad": "removed", "momentum": 0.5, "dampening": 0, "nesterov": false, "eps": "removed",
    });
    let momentum = |eta| Momentum {
        rho: 0.5,
        ..Momentum::new(eta)
    };
    let mut inside = setup(momentum(0.125), &model)?;
    file(&entries, changes.clone())
        .taking_over_fields()
        .restore(&mut inside)?;
    let mut outside = setup(OptimiserChain::new((momentum(1.0), Descent::new(0.125))), &model)?;
    file(&entries, changes)
        .taking_over_fields()
        .restore(&mut outside)?;
    let told = |state: &StateTree, slot: &str, eta: &str| {
        let leaf = state.leaf("x").expect("the leaf");
        (values(&leaf.tensor(slot).expect("a copy")), leaf.field(eta))
    };
    assert_eq!(
        told(&inside, "velocity", "eta"),
        (vec![0.25, -0.5], Some(0.25.into()))
    );
    assert_eq!(
        told(&outside, "0.velocity", "1.eta"),
        (vec![1.0, -2.0], Some(0.25.into()))
    );
    Ok(())
}

#[test]
fn names_are_those_of_the_file_or_translated() -> Tested {
    let model = lone();
    let wrapped = file(
        &[
            ("module.x/exp_avg", floats(&[1.0, 2.0])),
            ("module.x/exp_avg_sq", floats(&[1.0, 4.0])),
            ("module.x/step", count(3.0)),
        ],
        json!({ "params": ["module.x"] }),
    );
    let mut state = setup(Adam::new(1e-3), &model)?;
    refused(&wrapped, &model, &mut state);
    wrapped
        .renamed(|name| name.replace("module.", ""))
        .restore(&mut state)?;
    assert_eq!(state.leaf("x").map(|leaf| leaf.steps()), Some(3));
    Ok(())
}

/// Each rank takes and writes its part.
#[test]
fn ranks_read_and_write_one_file() -> Tested {
    let folder = tempfile::tempdir()?;
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let optimiser = || OptimiserChain::new((optimisers::ClipGlobalNorm::new(1.0), AdamW::new(0.01)));
    let fresh = || {
        Vars::from(
            [("a", 40_000), ("b", 3)]
                .map(|(name, count)| (name.to_string(), var(&constant(0.5, count, DType::F32)))),
        )
    };
    let model = fresh();
    let mut state = setup(optimiser(), &model)?;
    let gradients = [("a", 40_000usize), ("b", 3)]
        .map(|(name, count)| (name, support::common::tensor(2, &[count], DType::F32)));
    optimisers::update(&mut state, &model, &gradients)?;
    state.save_torch(&whole)?;
    std::thread::scope(|scope| {
        for rank in optimisers::ranks(2) {
            let (whole, parts) = (&whole, &parts);
            scope.spawn(move || {
                let model = fresh();
                let mut state = optimisers::Setup::over(&rank)
                    .build(optimiser(), &model)
                    .expect("a state");
                TorchState::open(whole)
                    .and_then(|file| file.restore(&mut state))
                    .expect("torch's state");
                assert!(
                    state
                        .leaves()
                        .any(|leaf| leaf.part().len() < leaf.shape().iter().product())
                );
                state.save_torch(parts).expect("a save");
            });
        }
    });
    assert!(std::fs::read(&whole)? == std::fs::read(&parts)?);
    Ok(())
}

#[test]
fn masters_have_their_moments() -> Tested {
    let model = Vars::from([("x".to_string(), Var::from_tensor(&constant(1.0, 2, DType::BF16))?)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(1e-3)), &model)?;
    file(&moments(), json!({})).restore(&mut state)?;
    let leaf = state.leaf("x").expect("the leaf");
    assert_eq!(values(&leaf.tensor("m")?), [0.5, -0.5]);
    optimisers::update(&mut state, &model, &[("x", constant(1.0, 2, DType::BF16))])?;
    assert_eq!(
        state.leaf("x").map(|leaf| leaf.counters()),
        Some(vec![("t".to_string(), 8)])
    );
    Ok(())
}

/// Otherwise the warm-up of a schedule begins again in the middle of the run.
#[test]
fn t70_a_restore_goes_on_in_the_step_of_the_file() -> Tested {
    let warmed = || Schedule::linear(0.0, 1e-3, 10);
    let set_up = |schedule: Schedule| {
        let mut state = setup(
            AdamW {
                lambda: 0.0,
                ..AdamW::new(1e-3)
            },
            &lone(),
        )
        .expect("a state");
        state.schedule(schedule).expect("a schedule");
        state
    };
    let changes = json!({"lr": 7e-4, "initial_lr": "removed", "decoupled_weight_decay": true});
    let file = file(&moments(), changes);
    let mut state = set_up(warmed());
    file.restore(&mut state)?;
    assert_eq!(state.steps(), 7);
    // Nor does the count stay at that of another file.
    let mut later = moments();
    later[2].1 = count(9.0);
    let changes = json!({"lr": 9e-4, "initial_lr": "removed", "decoupled_weight_decay": true});
    self::file(&later, changes).restore(&mut state)?;
    assert_eq!(state.steps(), 9);

    // A count that the program has set stays.
    let mut state = set_up(warmed());
    state.set_steps(3)?;
    says(
        &file.restore(&mut state).expect_err("another rate"),
        &["in step 3"],
    );
    assert_eq!(state.steps(), 3);
    let mut state = set_up(Schedule::linear(7e-4, 1e-3, 10));
    state.set_steps(0)?;
    file.restore(&mut state)?;
    assert_eq!(state.steps(), 0);

    // After an error the state is in the step in which it was.
    let (model, mut state) = (lone(), set_up(Schedule::constant(1e-2)));
    says(&refused(&file, &model, &mut state), &["in step 7"]);
    assert_eq!(state.steps(), 0);
    Ok(())
}

/// torch multiplies `initial_lr` by the factor of a scheduler. Under a schedule of rates the leaf's own rate
/// has no effect.
#[test]
fn an_own_rate_without_effect_is_not_written() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    for is_relative in [false, true] {
        let mut state = setup(AdamW::new(1e-3), &lone())?;
        let schedule = Schedule::cosine(0.5, 0.0, 10);
        state.schedule(if is_relative {
            schedule.relative()
        } else {
            schedule
        })?;
        state.save_torch(&path)?;
        let bytes = std::fs::read(&path)?;
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)?;
        let groups = metadata.metadata().clone().expect("metadata")["param_groups"].clone();
        assert_eq!(groups.contains("initial_lr"), is_relative, "{groups}");
    }
    Ok(())
}

/// The decay of pytorch_optimizer's `SGDW` is outside of the gradient.
#[test]
fn a_decay_that_is_decoupled_is_not_put_into_the_gradient() -> Tested {
    let sgdw = json!([{
        "lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.5, "weight_decouple": true,
        "nesterov": false, "params": ["x"],
    }]);
    let tensors = HashMap::from([("x/momentum_buffer", floats(&[1.0, 2.0]))]);
    let metadata = HashMap::from([("param_groups".to_string(), sgdw.to_string())]);
    let file = TorchState::from_bytes("state", safetensors::serialize(tensors, Some(metadata))?)?;
    let in_gradient = OptimiserChain::new((WeightDecay::new(0.5), Momentum::new(0.1)));
    let (model, mut state) = (lone(), setup(in_gradient, &lone())?);
    says(
        &refused(&file, &model, &mut state),
        &["weight_decay (in the gradient)"],
    );
    let mut state = setup(DecoupledDecay::new(0.5, Momentum::new(0.1)), &model)?;
    file.restore(&mut state)?;
    Ok(())
}
