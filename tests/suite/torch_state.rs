//! The state of torch's optimisers: files that torch wrote, and what is refused. Whole runs with a live torch are in `tests/torch.rs`.

#[path = "../support/torch_runs.rs"]
mod torch_runs;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::torch::TorchState;
use optimisers::{
    AMSGrad, AccumGrad, AdaGrad, Adam, AdamW, DecoupledDecay, Descent, Error, FieldValue, Kahan, MixedPrecision, Momentum, Muon, Offload,
    OptimiserChain, Q8, RMSProp, StateTree, StoreAs, TorchError, WeightDecay, maximise, setup,
};
use serde_json::{Value, json};

use crate::common::{Snapshot, Vars, bits, constant, says, snapshot, values, var};
use torch_runs::{assert_close, json as read, model, optimisers, parameters, read_parameters, start, steps};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/torch_state").join(name)
}

/// A model of one parameter with two numbers.
fn lone() -> Vars {
    Vars::from([("x".to_string(), var(&constant(1.0, 2, DType::F32)))])
}

fn group(changes: Value) -> Value {
    let mut group = json!({
        "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": false, "maximize": false, "foreach": null,
        "decoupled_weight_decay": false, "initial_lr": 0.01, "params": ["x"],
    });
    for (key, value) in changes.as_object().expect("changes") {
        match value {
            Value::String(text) if text == "removed" => drop(group.as_object_mut().expect("a group").remove(key)),
            value => group[key] = value.clone(),
        }
    }
    group
}

/// A safetensors file of one group.
fn bytes(entries: &[(&str, Tensor)], group: &Value) -> Vec<u8> {
    let tensors: HashMap<String, &Tensor> = entries.iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
    let metadata = HashMap::from([("param_groups".to_string(), json!([group]).to_string())]);
    safetensors::serialize(tensors, Some(metadata)).expect("a file")
}

fn floats(numbers: &[f32]) -> Tensor {
    Tensor::new(numbers, &Device::Cpu).expect("a tensor")
}

fn count(number: f32) -> Tensor {
    Tensor::new(number, &Device::Cpu).expect("a number")
}

/// The state of Adam for the lone parameter.
fn moments() -> Vec<(&'static str, Tensor)> {
    vec![("x/exp_avg", floats(&[0.5, -0.5])), ("x/exp_avg_sq", floats(&[0.25, 4.0])), ("x/step", count(7.0))]
}

fn file(entries: &[(&str, Tensor)], changes: Value) -> TorchState {
    TorchState::from_bytes("state", bytes(entries, &group(changes))).expect("a file")
}

/// The error of a restore, which changes nothing.
fn refused(file: &TorchState, model: &Vars, state: &mut StateTree) -> Error {
    let before = snapshot(model, state);
    let error = file.restore(state).expect_err("an error");
    assert_eq!(snapshot(model, state), before, "{error}");
    error
}

fn torch_error(error: Error) -> TorchError {
    match error {
        Error::Torch(file, error) => {
            assert_eq!(file, PathBuf::from("state"));
            *error
        }
        other => panic!("{other}"),
    }
}

#[test]
fn runs_go_on_from_files_that_torch_wrote() {
    let expected = read(&golden("expected.json"));
    let mut formats = BTreeMap::new();
    for (name, optimiser) in optimisers() {
        let [after_20, after_40] = ["after_20", "after_40"].map(|half| read_parameters(&expected[name][half]));
        for format in ["pt", "safetensors"] {
            let path = golden(&format!("{name}.{format}"));
            if !path.exists() {
                continue;
            }
            *formats.entry(format).or_insert(0) += 1;
            let model = model(&after_20);
            let mut state = setup(optimiser.clone(), &model).expect("a state");
            assert!(TorchState::open(&path).and_then(|file| file.restore(&mut state)).expect("torch's state").is_empty());
            steps(&mut state, &model, 20);
            assert_close(&parameters(&model), &after_40, name);
        }
    }
    assert_eq!(formats, BTreeMap::from([("pt", 4), ("safetensors", 11)]));
}

#[test]
fn a_state_comes_back_from_its_own_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    for (name, optimiser) in optimisers() {
        let model = start();
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        steps(&mut state, &model, 5);
        state.save_torch(&path).expect("a save");
        let saved = parameters(&model);
        let copy = torch_runs::model(&saved);
        let mut restored = setup(optimiser, &copy).expect("a state");
        assert_eq!(TorchState::open(&path).and_then(|file| file.restore(&mut restored)).expect("a file"), [""; 0]);
        steps(&mut state, &model, 5);
        steps(&mut restored, &copy, 5);
        assert_close(&parameters(&copy), &parameters(&model), name);
    }
}

/// In f64 what is written is read again to the bit, through wrappers and ways to store parameters.
#[test]
fn every_bit_of_moments_and_counters_comes_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    let tensors = |state: &StateTree| -> Vec<Snapshot> {
        let of = |leaf: &optimisers::Leaf| {
            let named = leaf.tensor_names().into_iter().filter(|name| name.ends_with('m') || name.ends_with('v'));
            let mut all: Snapshot =
                named.map(|name| (name.clone(), bits(&leaf.tensor(&name).expect("a copy").expect("a tensor")))).collect();
            all.extend(leaf.counters().into_iter().filter(|(name, _)| name.ends_with('t')).map(|(name, count)| (name, vec![count])));
            all
        };
        state.leaves().map(of).collect()
    };
    let adamw = AdamW::new(0.01);
    let all: Vec<Box<dyn optimisers::Optimiser>> = vec![
        Box::new(adamw.clone()),
        Box::new(MixedPrecision::new(DType::F32, adamw.clone())),
        Box::new(Kahan::new(adamw.clone())),
        Box::new(Offload::new(MixedPrecision::new(DType::F64, adamw.clone())).everywhere()),
        Box::new(StoreAs::new([("m", DType::BF16)], adamw.clone())),
        Box::new(StoreAs::all(Q8, adamw.clone())),
        Box::new(Muon::new(0.1).with_fallback(adamw)),
    ];
    for optimiser in all {
        for dtype in [DType::BF16, DType::F32, DType::F64] {
            let name = format!("{optimiser:?} on {dtype:?}");
            let fresh = || Vars::from([("x".to_string(), var(&constant(0.5, 5000, dtype)))]);
            let model = fresh();
            let mut state = setup(optimiser.clone(), &model).expect("a state");
            let gradient = crate::common::tensor(1, &[5000], dtype);
            for _ in 0..3 {
                optimisers::update(&mut state, &model, &[("x", gradient.clone())]).expect("an update");
            }
            state.save_torch(&path).expect("a save");
            let other = fresh();
            let mut restored = setup(optimiser.clone(), &other).expect("a state");
            TorchState::open(&path).and_then(|file| file.restore(&mut restored)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(restored.leaf("x").map(|leaf| leaf.steps()), Some(3), "{name}");
            assert_eq!(tensors(&restored), tensors(&state), "{name}");
        }
    }
}

#[test]
fn what_torch_has_not_moved_yet_starts_from_zeros() {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model).expect("a state");
    optimisers::update(&mut state, &model, &[("x", floats(&[1.0, 2.0]))]).expect("an update");
    assert_eq!(file(&[], json!({})).restore(&mut state).expect("torch's state"), ["x"]);
    let leaf = state.leaf("x").expect("the leaf");
    assert_eq!((leaf.steps(), leaf.counters()), (0, vec![("t".to_string(), 0)]));
    assert_eq!(values(&leaf.tensor("v").expect("a copy").expect("v")), [0.0, 0.0]);
    // Adagrad's state is there from the start in torch.
    let changes = json!({ "amsgrad": "removed", "betas": "removed", "lr_decay": 0 });
    let mut sums = setup(AdaGrad::new(1e-3), &model).expect("a state");
    let error = torch_error(refused(&file(&[], changes), &model, &mut sums));
    assert!(matches!(&error, TorchError::Entry { key, problem: "lacks", .. } if key == "sum"), "{error}");
}

#[test]
fn hyper_parameters_are_compared_or_taken_over() {
    let model = lone();
    let chain = OptimiserChain::new((WeightDecay::new(0.0), Adam::new(1e-3)));
    let changes = json!({ "lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.25 });
    let mut state = setup(chain, &model).expect("a state");
    let found = file(&moments(), changes);
    let error = refused(&found, &model, &mut state);
    says(&error, &["torch state state: parameter \"x\": torch's lr is 0.5 in the file and 0.001 here", "taking_over_fields"]);
    found.taking_over_fields().restore(&mut state).expect("torch's state");
    let fields = |names: [&str; 4]| names.map(|name| state.leaf("x").and_then(|leaf| leaf.field(name)));
    let expected: [FieldValue; 4] = [0.25.into(), 0.5.into(), (0.8, 0.9).into(), 1e-6.into()];
    assert_eq!(fields(["0.lambda", "1.eta", "1.beta", "1.epsilon"]), expected.map(Some));
    // A learning rate that torch has as a tensor is an f32.
    let rounded = f64::from(1e-3f32);
    file(&moments(), json!({ "lr": rounded })).restore(&mut setup(Adam::new(1e-3), &model).expect("a state")).expect("the same rate");
}

#[test]
fn the_learning_rate_is_that_of_the_last_factor() {
    let model = lone();
    let entries = [("x/momentum_buffer", floats(&[1.0, -2.0]))];
    let changes = json!({
        "lr": 0.25, "betas": "removed", "amsgrad": "removed", "momentum": 0.5, "dampening": 0, "nesterov": false, "eps": "removed",
    });
    let momentum = |eta| Momentum { rho: 0.5, ..Momentum::new(eta) };
    let mut inside = setup(momentum(0.125), &model).expect("a state");
    file(&entries, changes.clone()).taking_over_fields().restore(&mut inside).expect("torch's state");
    let mut outside = setup(OptimiserChain::new((momentum(1.0), Descent::new(0.125))), &model).expect("a state");
    file(&entries, changes).taking_over_fields().restore(&mut outside).expect("torch's state");
    let told = |state: &StateTree, slot: &str, eta: &str| {
        let leaf = state.leaf("x").expect("the leaf");
        (values(&leaf.tensor(slot).expect("a copy").expect("a velocity")), leaf.field(eta))
    };
    assert_eq!(told(&inside, "velocity", "eta"), (vec![0.25, -0.5], Some(0.25.into())));
    assert_eq!(told(&outside, "0.velocity", "1.eta"), (vec![1.0, -2.0], Some(0.25.into())));
}

#[test]
fn definitions_that_differ_are_refused() {
    let model = lone();
    let adam = || setup(Adam::new(1e-3), &model).expect("a state");
    let adamw = || setup(AdamW::new(1e-3), &model).expect("a state");
    let sgd = json!({ "betas": "removed", "amsgrad": "removed", "eps": "removed", "momentum": 0.9, "dampening": 0, "nesterov": false });
    let with = |base: &Value, key: &str, value: Value| {
        let mut changes = base.clone();
        changes[key] = value;
        changes
    };
    let none = json!({});
    let differs = [
        (adam(), with(&none, "maximize", json!(true)), "maximize"),
        (setup(maximise(Adam::new(1e-3)), &model).expect("a state"), none.clone(), "maximize"),
        (adam(), with(&none, "weight_decay", json!(0.1)), "weight_decay (in the gradient)"),
        (adam(), json!({ "weight_decay": 0.1, "decoupled_weight_decay": true }), "weight_decay (beside the step)"),
        (adamw(), json!({ "weight_decay": 0.1, "decoupled_weight_decay": false }), "weight_decay (in the gradient)"),
        (adam(), with(&none, "grad_averaging", json!(true)), "grad_averaging"),
        (setup(Momentum::new(1e-3), &model).expect("a state"), with(&sgd, "dampening", json!(0.5)), "dampening"),
        (
            setup(AdaGrad::new(1e-3), &model).expect("a state"),
            json!({ "betas": "removed", "amsgrad": "removed", "lr_decay": 0.1 }),
            "lr_decay",
        ),
    ];
    for (mut state, changes, key) in differs {
        // Nothing here could take it over.
        let error = torch_error(refused(&file(&moments(), changes).taking_over_fields(), &model, &mut state));
        assert!(matches!(&error, TorchError::Differs { path, key: found, .. } if path == "x" && found == key), "{key}: {error}");
    }
    let others = [
        (adam(), with(&none, "amsgrad", json!(true)), "`AMSGradW`"),
        (adam(), sgd.clone(), "`Momentum`"),
        (setup(Momentum::new(1e-3), &model).expect("a state"), with(&sgd, "nesterov", json!(true)), "`Nesterov`"),
        (setup(Momentum::new(1e-3), &model).expect("a state"), with(&sgd, "momentum", json!(0)), "`Descent`"),
        (
            setup(RMSProp::new(1e-3), &model).expect("a state"),
            json!({ "betas": "removed", "amsgrad": "removed", "alpha": 0.9, "centered": true }),
            "`RMSProp` with `centred`",
        ),
    ];
    for (mut state, changes, expected) in others {
        let error = torch_error(refused(&file(&moments(), changes), &model, &mut state));
        assert!(matches!(&error, TorchError::OtherRule { remedy, .. } if remedy == expected), "{expected}: {error}");
    }
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model).expect("a state");
    let with = |name: &'static str, tensor: Option<Tensor>| {
        let mut entries: Vec<_> = moments().into_iter().filter(|(own, _)| *own != name).collect();
        entries.extend(tensor.map(|tensor| (name, tensor)));
        file(&entries, json!({}))
    };
    let mut error = |file: &TorchState| torch_error(refused(file, &model, &mut state)).to_string();
    let whole = |numbers: &[u32]| Tensor::new(numbers, &Device::Cpu).expect("a tensor");
    let cases = [
        (with("x/exp_avg", None), "the file lacks \"exp_avg\"; it has: exp_avg_sq, step"),
        (with("x/step", None), "the file lacks \"step\""),
        (with("x/exp_inf", Some(floats(&[1.0, 1.0]))), "has an entry that no rule here takes, \"exp_inf\""),
        (with("x/exp_avg", Some(floats(&[1.0]))), "exp_avg has shape [1] in the file, expected [2]"),
        (with("x/exp_avg", Some(whole(&[1, 2]))), "exp_avg is a tensor of U32, expected a tensor of F16"),
        (with("x/exp_avg", Some(floats(&[1.0, f32::NAN]))), "exp_avg has NaN at element 1"),
        (with("x/exp_avg_sq", Some(floats(&[1.0, -1.0]))), "exp_avg_sq has -1 at element 1, expected a finite number that is not negative"),
        (with("x/step", Some(count(1.5))), "step is 1.5, expected a count of steps"),
        (with("x/step", Some(count(-1.0))), "step is -1, expected a count of steps"),
        (with("x/step", Some(floats(&[1.0, 2.0]))), "step is a tensor of shape [2]"),
    ];
    for (file, words) in cases {
        let error = error(&file);
        assert!(error.starts_with("parameter \"x\": ") && error.contains(words), "{words}: {error}");
    }
    let cases = [
        (file(&[], json!({ "params": ["y"] })), "the file has a parameter \"y\" that the state lacks; it has: x."),
        (file(&[], json!({ "params": [] })), "no parameter \"x\" in the file"),
        (file(&moments(), json!({ "params": ["x", "x"] })), "two parameters of the file are \"x\""),
        (file(&moments(), json!({})).named(["x", "y"]), "2 names for the 1 parameters"),
        (file(&moments(), json!({ "lr": "fast" })), "the file's lr is \"fast\", expected a number"),
        (file(&moments(), json!({ "betas": [0.9] })), "the file's betas is [0.9], expected two numbers"),
        (file(&moments(), json!({ "amsgrad": "removed" })), "no rule here continues an optimiser with the hyper-parameters betas"),
    ];
    for (file, words) in cases {
        let error = error(&file);
        assert!(error.contains(words), "{words}: {error}");
    }
    let invalid = file(&moments(), json!({ "betas": [0.9, 1.5] })).taking_over_fields();
    says(&refused(&invalid, &model, &mut state), &["beta is (0.9, 1.5)"]);
    with("x/exp_avg", Some(floats(&[1.0, f32::NAN]))).accepting_non_finite().restore(&mut state).expect("torch's state");
}

#[test]
fn files_of_other_formats_are_refused() {
    let pickled = std::fs::read(golden("momentum.pt")).expect("a file");
    let flat = bytes(&moments(), &group(json!({})));
    let plain = safetensors::serialize(HashMap::from([("x", floats(&[1.0]))]), None).expect("a file");
    let stray = bytes(&[("y/exp_avg", floats(&[1.0]))], &group(json!({})));
    let unnamed = bytes(&[("exp_avg", floats(&[1.0]))], &group(json!({})));
    let cases: [(Vec<u8>, &str); 7] = [
        (Vec::new(), "neither a whole safetensors file"),
        (b"\x80\x02}q\x00.".to_vec(), "neither a whole safetensors file"),
        (flat[..flat.len() - 1].to_vec(), "neither a whole safetensors file"),
        (pickled[..pickled.len() - 30].to_vec(), "neither a whole safetensors file"),
        (plain, "its metadata has no \"param_groups\""),
        (stray, "it has the state of a parameter \"y\" that no group has"),
        (unnamed, "is not named <parameter>/<entry>"),
    ];
    for (bytes, words) in cases {
        let error = torch_error(TorchState::from_bytes("state", bytes).expect_err("an error")).to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    let missing = TorchState::open("no/such/file").expect_err("an error");
    says(&missing, &["torch state no/such/file: cannot read the file", "Io"]);
}

/// Wherever a bit of a file of torch's is another, it is refused, or it was in a place that nobody reads; nothing panics.
#[test]
fn damaged_files_are_refused() {
    let whole = std::fs::read(golden("momentum.pt")).expect("a file");
    let expected = read(&golden("expected.json"));
    let model = model(&read_parameters(&expected["momentum"]["after_20"]));
    let (_, optimiser) = optimisers().into_iter().find(|(name, _)| *name == "momentum").expect("the run");
    let restored = |bytes: Vec<u8>| {
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        TorchState::from_bytes("state", bytes)?.restore(&mut state)?;
        let velocity = |leaf: &optimisers::Leaf| bits(&leaf.tensor("1.velocity").expect("a copy").expect("a tensor"));
        Ok::<_, Error>(state.leaves().map(velocity).collect::<Vec<_>>())
    };
    let (sound, mut refusals) = (restored(whole.clone()).expect("a whole file"), 0);
    for place in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[place] ^= 1 << (place % 8);
        match restored(bytes) {
            Ok(state) => assert!(state == sound, "byte {place}"),
            Err(_) => refusals += 1,
        }
        assert!(restored(whole[..place].to_vec()).is_err(), "{place} bytes");
    }
    assert!(refusals > 900, "{refusals} of {}", whole.len());
}

#[test]
fn names_come_from_the_caller_where_the_file_has_numbers() {
    let path = golden("several.pt");
    let places = TorchState::open(&path).expect_err("two optimisers").to_string();
    assert!(places.contains("the file has optimiser states at optimizers.0, optimizers.1"), "{places}");
    let model = start();
    let mut adam = setup(Adam::new(0.5), &model).expect("a state");
    let named = TorchState::open_at(&path, "optimizers.0").expect("a file");
    assert_eq!(named.names(), Some(&["conv", "fc.bias", "fc.weight"].map(str::to_string)[..]));
    named.restore(&mut adam).expect("torch's state");
    assert_eq!(adam.leaf("conv").map(|leaf| leaf.steps()), Some(2));

    let mut sgd = setup(Momentum::new(0.1), &model).expect("a state");
    let numbered = || TorchState::open_at(&path, "optimizers.1").expect("a file");
    says(&numbered().restore(&mut sgd).expect_err("no names"), &["numbers its 3 parameters", "TorchState::named"]);
    says(&numbered().renamed(str::to_string).expect_err("no names"), &["NoNames"]);
    let swapped = numbered().named(["fc.weight", "fc.bias", "conv"]).restore(&mut sgd).expect_err("other shapes");
    says(&swapped, &["momentum_buffer has shape"]);
    let wrapped = numbered().named(["module.conv", "module.fc.bias", "module.fc.weight"]);
    wrapped.renamed(|name| name.replace("module.", "")).and_then(|file| file.restore(&mut sgd)).expect("torch's state");
}

#[test]
fn what_torch_does_not_know_is_not_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    let model = lone();
    let refused = |state: &StateTree, words: &[&str]| {
        says(&state.save_torch(&path).expect_err("an error"), words);
        assert!(!path.exists());
    };
    let state = |optimiser: Box<dyn optimisers::Optimiser>| setup(optimiser, &model).expect("a state");
    let decayed = |couple, eta_max| AdamW { lambda: 0.1, couple, eta_max, ..AdamW::new(0.1) };
    refused(&state(Box::new(AMSGrad::new(0.1))), &["AMSGrad has none; torch's counterparts are Adam"]);
    refused(&state(Box::new(OptimiserChain::new((Adam::new(0.1), Momentum::new(1.0))))), &["has Adam and Momentum"]);
    refused(&state(Box::new(decayed(false, 0.0))), &["not in proportion to the learning rate"]);
    refused(&state(Box::new(decayed(true, 1.0))), &["not in proportion to the learning rate"]);
    refused(&state(Box::new(OptimiserChain::new((Adam::new(0.1), WeightDecay::new(0.1))))), &["a WeightDecay behind the rule"]);
    refused(&state(Box::new(OptimiserChain::new((WeightDecay::new(0.1), decayed(true, 0.0))))), &["one beside it"]);
    refused(&state(Box::new(DecoupledDecay::new(0.1, Momentum::new(0.1)))), &["this weight decay in SGD"]);
    refused(&state(Box::new(DecoupledDecay::new(0.1, Adam::new(0.1)).cautious())), &["a cautious weight decay"]);
    refused(&state(Box::new(Momentum::new(0.0))), &["a learning rate of 0 inside"]);
    let mixed = Vars::from([("a", &model["x"]), ("b", &var(&constant(1.0, 2, DType::F32)))].map(|(name, x)| (name.to_string(), x.clone())));
    let choose = |path: &str, _: &Tensor| -> Option<Box<dyn optimisers::Optimiser>> {
        Some(if path == "a" { Box::new(Adam::new(0.1)) } else { Box::new(Momentum::new(0.1)) })
    };
    let mixed = optimisers::setup_with(&mixed, choose).expect("a state");
    refused(&mixed, &["\"a\" is trained as by torch's Adam, \"b\" as by its SGD"]);
    state(Box::new(OptimiserChain::new((AccumGrad::new(2), DecoupledDecay::new(0.1, Adam::new(0.1)))))).save_torch(&path).expect("a save");
}

/// Each rank takes and writes its part.
#[test]
fn ranks_read_and_write_one_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let optimiser = || OptimiserChain::new((optimisers::ClipGlobalNorm::new(1.0), AdamW::new(0.01)));
    let fresh = || Vars::from([("a", 40_000), ("b", 3)].map(|(name, count)| (name.to_string(), var(&constant(0.5, count, DType::F32)))));
    let model = fresh();
    let mut state = setup(optimiser(), &model).expect("a state");
    let gradients = [("a", 40_000usize), ("b", 3)].map(|(name, count)| (name, crate::common::tensor(2, &[count], DType::F32)));
    optimisers::update(&mut state, &model, &gradients).expect("an update");
    state.save_torch(&whole).expect("a save");
    std::thread::scope(|scope| {
        for rank in optimisers::ranks(2) {
            let (whole, parts) = (&whole, &parts);
            scope.spawn(move || {
                let model = fresh();
                let mut state = optimisers::Setup::over(&rank).setup(optimiser(), &model).expect("a state");
                TorchState::open(whole).and_then(|file| file.restore(&mut state)).expect("torch's state");
                assert!(state.leaves().any(|leaf| leaf.part().len() < leaf.shape().elem_count()));
                state.save_torch(parts).expect("a save");
            });
        }
    });
    assert!(std::fs::read(&whole).expect("a file") == std::fs::read(&parts).expect("a file"));
}

#[test]
fn masters_have_their_moments() {
    let model = Vars::from([("x".to_string(), Var::from_tensor(&constant(1.0, 2, DType::BF16)).expect("a variable"))]);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(1e-3)), &model).expect("a state");
    file(&moments(), json!({})).restore(&mut state).expect("torch's state");
    let leaf = state.leaf("x").expect("the leaf");
    assert_eq!(values(&leaf.tensor("m").expect("a copy").expect("m")), [0.5, -0.5]);
    optimisers::update(&mut state, &model, &[("x", constant(1.0, 2, DType::BF16))]).expect("an update");
    assert_eq!(state.leaf("x").map(|leaf| leaf.counters()), Some(vec![("t".to_string(), 8)]));
}
