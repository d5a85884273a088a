//! Training loops written for candle-nn's `Optimizer` trait.

use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, SGD, VarMap, loss::mse};
use optimisers::config::OptimiserConfig;
use optimisers::torch::TorchState;
use optimisers::{
    Adam, AdamW, CandleOptimizer, Checkpoint, CheckpointFile, CheckpointSaver, ClipGrad, ClipNorm, Descent,
    Error, ErrorKind, FieldValue, MixedPrecision, Momentum, OptimiserChain, SkipReason, StateTree, Status,
    Warning, model, setup, update,
};

use crate::model::models::{CPU, integers, of, plain, squares, var_map};
use support::common::{Vars, bits, is_kind, random, snapshot, values, var};

/// A loop as it stands in candle programs: an MLP on made-up data with a learning rate that decays. All
/// losses, and the variables at last.
fn train<Opt: Optimizer>(
    dtype: DType,
    steps: usize,
    optimizer: impl FnOnce(Vec<Var>) -> candle_core::Result<Opt>,
) -> (Vec<f64>, Vec<Var>) {
    let tensor = |seed, shape: &[usize]| random(seed, shape, dtype, CPU);
    let vars: Vec<Var> = (0..)
        .zip([&[3, 16][..], &[16], &[16, 1], &[1]])
        .map(|(seed, shape)| var(&tensor(seed, shape)))
        .collect();
    let (inputs, targets) = (tensor(10, &[32, 3]), tensor(11, &[32, 1]));
    let run = || {
        let mut optimizer = optimizer(vars.clone())?;
        let mut losses = Vec::new();
        for _ in 0..steps {
            let hidden = inputs.matmul(&vars[0])?.broadcast_add(&vars[1])?.tanh()?;
            let loss = mse(&hidden.matmul(&vars[2])?.broadcast_add(&vars[3])?, &targets)?;
            optimizer.backward_step(&loss)?;
            losses.push(loss.to_dtype(DType::F64)?.to_scalar()?);
            optimizer.set_learning_rate(optimizer.learning_rate() * 0.99);
        }
        candle_core::Result::Ok(losses)
    };
    let losses = run().expect("a training");
    assert!(losses[steps - 1] < 0.5 * losses[0], "{losses:?}");
    (losses, vars)
}

/// Both compute AdamW with roundings in other places, because candle-nn scales both moments before it
/// divides, and shrinks the parameter before it subtracts.
#[test]
fn adamw_has_the_losses_of_candle_nn() {
    let lr = 0.02;
    for (dtype, of_losses, of_parameters) in [(DType::F32, 1e-5, 1e-5), (DType::F64, 1e-13, 1e-13)] {
        let (expected, theirs) = train(dtype, 100, |vars| candle_nn::AdamW::new_lr(vars, lr));
        let (losses, ours) = train(dtype, 100, |vars| CandleOptimizer::new(vars, AdamW::new(lr)));
        let worst = losses
            .iter()
            .zip(&expected)
            .map(|(a, b)| (a / b - 1.0).abs())
            .fold(0.0, f64::max);
        assert!(worst < of_losses, "{dtype:?}: {worst:e}");
        for (a, b) in ours.iter().zip(&theirs) {
            let difference = values(a)
                .into_iter()
                .zip(values(b))
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            assert!(difference < of_parameters, "{dtype:?}: {difference:e}");
        }
    }
}

#[test]
fn descent_is_candle_nns_sgd_bit_for_bit() {
    let (expected, theirs) = train(DType::F32, 50, |vars| SGD::new(vars, 0.05));
    let (losses, ours) = train(DType::F32, 50, |vars| {
        CandleOptimizer::new(vars, Descent::new(0.05))
    });
    assert_eq!(losses, expected);
    assert_eq!(
        ours.iter().map(|x| bits(x)).collect::<Vec<_>>(),
        theirs.iter().map(|x| bits(x)).collect::<Vec<_>>()
    );
}

/// An error's message without the backtrace that candle adds where backtraces are on.
fn message(error: &candle_core::Error) -> String {
    error.to_string().lines().next().expect("a message").to_string()
}

fn paths<O: optimisers::IntoOptimiser>(optimizer: &CandleOptimizer<O>) -> Vec<String> {
    optimizer
        .state()
        .leaves()
        .map(|leaf| leaf.path().to_string())
        .collect()
}

#[test]
fn lists_of_variables_as_candle_nn_takes_them() {
    let (a, b) = (var(&plain(&[2])), var(&plain(&[3])));
    let listed = [&a, &integers(), &b, &a];
    let mut optimizer = CandleOptimizer::from_slice(&listed, Descent::new(0.25)).unwrap();
    assert_eq!(
        paths(&optimizer),
        ["0", "2"],
        "integers are passed over, a variable that is listed twice is one leaf"
    );
    let (old_a, old_b) = (a.copy().unwrap(), b.copy().unwrap());
    optimizer.step(&squares([&a, &b])).unwrap();
    assert_eq!(
        (bits(&a), bits(&b)),
        (bits(&(old_a * 0.5).unwrap()), bits(&(old_b * 0.5).unwrap()))
    );
    assert_eq!(
        optimizer
            .outcome()
            .map(|outcome| (&outcome.status, outcome.applied)),
        Some((&Status::Stepped, 2))
    );

    for mut optimizer in [
        CandleOptimizer::empty(Adam::new(0.1)).unwrap(),
        CandleOptimizer::new(vec![integers()], Adam::new(0.1)).unwrap(),
    ] {
        assert!(optimizer.learning_rate().is_nan() && optimizer.state().is_empty());
        optimizer.set_learning_rate(0.5);
        optimizer.step(&squares([&a])).unwrap();
        let nothing = Status::Skipped(SkipReason::NothingToMove);
        assert_eq!(
            optimizer
                .outcome()
                .map(|outcome| (&outcome.status, outcome.applied)),
            Some((&nothing, 0))
        );
    }
    let refused = |vars, config| message(&CandleOptimizer::<ClipNorm>::new(vars, config).unwrap_err());
    assert_eq!(
        refused(Vec::new(), ClipNorm::new(-1.0)),
        "ClipNorm: omega is -1, expected a number above 0"
    );
    let eight = Var::zeros(2, DType::F8E4M3, CPU).unwrap();
    assert!(refused(vec![a, eight], ClipNorm::new(1.0)).starts_with("parameter \"1\": it is F8E4M3"));
}

#[test]
fn an_invalid_learning_rate_comes_out_of_the_next_step() {
    let x = var(&of(&[1.0, -2.0], DType::F32));
    let mut optimizer = CandleOptimizer::new(vec![x.clone()], Descent::new(0.25)).unwrap();
    optimizer.step(&squares([&x])).unwrap();
    for (bad, after) in [
        (f64::NAN, None),
        (-0.5, None),
        (f64::INFINITY, Some(0.125)),
        (-1.0, Some(f64::NAN)),
    ] {
        let before = bits(&x);
        let rate = optimizer.learning_rate();
        optimizer.set_learning_rate(bad);
        assert_eq!(optimizer.learning_rate(), rate, "as it was");
        after
            .into_iter()
            .for_each(|next| optimizer.set_learning_rate(next));
        let error = message(&optimizer.step(&squares([&x])).unwrap_err());
        let first = FieldValue::from(bad);
        assert_eq!(
            error,
            format!("parameter \"0\": Descent: eta is {first}, expected a finite number of 0 or more")
        );
        assert_eq!((bits(&x), optimizer.outcome()), (before, None));
        optimizer.step(&squares([&x])).unwrap();
        assert_eq!(optimizer.outcome().map(|outcome| outcome.applied), Some(1));
    }
    assert_eq!(optimizer.learning_rate(), 0.125, "the last that was valid");
    assert_eq!(
        values(&x),
        [
            0.5 * 0.5 * 0.5 * 0.75 * 0.75,
            -2.0 * 0.5 * 0.5 * 0.5 * 0.75 * 0.75
        ]
    );

    let mut optimizer = CandleOptimizer::new(vec![x.clone()], ClipGrad::new(1.0)).unwrap();
    assert!(optimizer.learning_rate().is_nan());
    optimizer.set_learning_rate(0.1);
    let error = message(&optimizer.step(&squares([&x])).unwrap_err());
    assert!(
        error.ends_with("has no field \"eta\", expected one of: delta"),
        "{error}"
    );

    // No rate of the last member makes up for one of 0.
    let velocity = OptimiserChain::new((Momentum::new(0.0), Descent::new(0.1)));
    let mut optimizer = CandleOptimizer::new(vec![x.clone()], velocity).unwrap();
    optimizer.set_learning_rate(0.01);
    let before = bits(&x);
    let error = message(&optimizer.step(&squares([&x])).unwrap_err());
    assert!(
        error.contains("0.eta = 0, 1.eta = 0.1")
            && error.contains("no value of 1.eta makes the product 0.01"),
        "{error}"
    );
    assert_eq!((bits(&x), optimizer.learning_rate()), (before, 0.0));
    optimizer.state_mut().all().adjust_field("0.eta", 0.5).unwrap();
    optimizer.set_learning_rate(0.01);
    optimizer.step(&squares([&x])).unwrap();
    assert_eq!(optimizer.learning_rate(), 0.01);
}

#[test]
fn a_step_without_gradients_is_an_error() {
    let (x, other) = (var(&plain(&[2])), var(&plain(&[2])));
    let mut optimizer = CandleOptimizer::new(vec![x.clone()], Adam::new(0.1)).unwrap();
    optimizer.step(&squares([&x, &other])).unwrap();
    let before = bits(&x);
    let error = optimizer.step(&squares([&other])).unwrap_err();
    let same = update(&mut setup(Adam::new(0.1), &x).unwrap(), &x, &squares([&other])).unwrap_err();
    assert_eq!(
        (same.kind(), message(&error)),
        (ErrorKind::NoGradient, same.to_string())
    );
    assert_eq!((bits(&x), optimizer.outcome()), (before, None));
    assert_eq!(optimizer.state().leaf("0").map(|leaf| leaf.steps()), Some(1));
}

#[test]
fn candles_own_errors_come_out_as_they_were() {
    let error = plain(&[2]).matmul(&plain(&[3])).unwrap_err();
    let text = error.to_string();
    let back = candle_core::Error::from(Error::from(error));
    assert_eq!(back.to_string(), text);
    assert!(!matches!(back, candle_core::Error::Wrapped(_)));
}

struct Tied {
    embedding: Tensor,
    head: Tensor,
    bias: Var,
}
model!(Tied {
    embedding,
    head,
    bias
});

/// The same bits as `setup` and `update`, under the model's paths, and the state goes on without the trait.
#[test]
fn for_model_keeps_the_paths() {
    let rule = || {
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGrad::new(0.5), Adam::new(0.01))),
        )
    };
    let model = || {
        let weight = var(&random(1, &[4, 2], DType::BF16, CPU)).as_tensor().clone();
        Tied {
            head: weight.clone(),
            embedding: weight,
            bias: var(&plain(&[2])),
        }
    };
    let grads =
        |model: &Tied| -> GradStore { squares([&Var::from_tensor(&model.head).unwrap(), &model.bias]) };
    let (ours, other) = (model(), model());
    let mut optimizer = CandleOptimizer::for_model(&ours, rule()).unwrap();
    assert_eq!(paths(&optimizer), ["bias", "embedding"]);
    assert_eq!(
        optimizer.state().leaf("head").map(|leaf| leaf.paths().count()),
        Some(2)
    );
    assert_eq!((optimizer.learning_rate(), optimizer.outcome()), (0.01, None));
    optimizer.state_mut().at("head").unwrap().adjust(0.02).unwrap();
    for _ in 0..3 {
        optimizer.step(&grads(&ours)).unwrap();
    }
    let mut state = optimizer.into_state();
    update(&mut state, &ours, &grads(&ours)).unwrap();

    let mut expected = setup(rule(), &other).unwrap();
    expected.at("head").unwrap().adjust(0.02).unwrap();
    for _ in 0..4 {
        update(&mut expected, &other, &grads(&other)).unwrap();
    }
    assert_eq!(
        (bits(&ours.head), bits(&ours.bias)),
        (bits(&other.head), bits(&other.bias))
    );
    assert_eq!(
        state.leaf("bias").map(|leaf| leaf.counters()),
        expected.leaf("bias").map(|leaf| leaf.counters())
    );

    let variables = var_map([
        ("z".to_string(), ours.bias.clone()),
        ("a".to_string(), other.bias.clone()),
    ]);
    assert_eq!(
        paths(&CandleOptimizer::for_model(&variables, rule()).unwrap()),
        ["a", "z"]
    );
    assert_eq!(
        paths(&CandleOptimizer::new(variables.all_vars(), rule()).unwrap()),
        ["0", "1"]
    );
    let error = CandleOptimizer::for_model(&VarMap::new(), rule()).unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &["no trainable floating-point variable"],
    );
}

/// A call that goes by the names of leaves: with a state, its model, a copy of the model, and a file.
type ByName = fn(&mut StateTree, &[Var], &[Var], &Path) -> optimisers::Result<()>;

/// `VarMap::all_vars` has another order in each process, and of equal shapes nothing shows it.
#[test]
fn a_state_whose_paths_are_places_in_a_list_is_not_saved_restored_or_bound_to_another() {
    let calls: [(&str, ByName); 9] = [
        ("save", |state, model, _, path| {
            Checkpoint::new(state).model(model).save(path).map(drop)
        }),
        ("a saver", |state, _, _, path| {
            CheckpointSaver::new(path)
                .save(1, Checkpoint::new(state))
                .map(drop)
        }),
        ("Checkpoint::save", |state, _, _, path| {
            Checkpoint::new(state).save(path).map(drop)
        }),
        ("save_masters", |state, model, _, path| {
            state.save_masters(model, path).map(drop)
        }),
        ("save_torch", |state, _, _, path| state.save_torch(path).map(drop)),
        ("restore", |state, _, _, path| {
            CheckpointFile::open(path)?.restore(state).map(drop)
        }),
        ("restore_with_model", |state, model, _, path| {
            CheckpointFile::open(path)?
                .restore_with_model(state, model)
                .map(drop)
        }),
        ("torch's restore", |state, _, _, path| {
            TorchState::open(path)?.restore(state).map(drop)
        }),
        ("rebind", |state, _, copy, _| state.rebind(copy)),
    ];
    for (name, call) in calls {
        let vars: Vec<Var> = (0..3)
            .map(|seed| var(&random(seed, &[2, 2], DType::F32, CPU)))
            .collect();
        let copy: Vec<Var> = vars.iter().map(|x| var(x)).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        // A list that always has the same order has names.
        let mut named = CandleOptimizer::for_model(&vars, AdamW::new(0.1)).expect("an optimiser");
        named.step(&squares(&vars)).expect("a step");
        if name.contains("restore") {
            let saved = Checkpoint::new(named.state()).model(&vars).save(&path);
            if name.starts_with("torch") {
                named.state().save_torch(&path)
            } else {
                saved
            }
            .expect("a file");
        }
        let file = std::fs::read(&path).ok();

        let permuted: Vec<Var> = [2, 0, 1].map(|place: usize| vars[place].clone()).into();
        let mut optimizer = CandleOptimizer::new(permuted.clone(), AdamW::new(0.1)).expect("an optimiser");
        optimizer.step(&squares(&vars)).expect("a step");
        let model: Vars = (0..)
            .map(|i: usize| i.to_string())
            .zip(permuted.clone())
            .collect();
        let before = snapshot(&model, optimizer.state());
        let mut clone = optimizer.state().try_clone().expect("a copy");
        for state in [optimizer.state_mut(), &mut clone] {
            let error = call(state, &permuted, &copy, &path).expect_err(name);
            let words = [
                "parameter \"0\"",
                "`VarMap::all_vars`",
                "`CandleOptimizer::for_model(&variables, rule)`",
            ];
            is_kind(&error, ErrorKind::Unsupported, &words);
        }
        assert_eq!(
            (snapshot(&model, optimizer.state()), std::fs::read(&path).ok()),
            (before, file),
            "{name}"
        );
        call(named.state_mut(), &vars, &copy, &path).unwrap_or_else(|error| panic!("{name}: {error}"));

        // A place that was renamed is a name.
        let mut state = optimizer.into_state();
        for place in ["0", "1", "2"] {
            assert!(Checkpoint::new(&state).save(folder.path().join("named")).is_err());
            state.rename(place, &format!("x{place}")).expect("a name");
        }
        Checkpoint::new(&state)
            .save(folder.path().join("named"))
            .expect("a file");
    }
}

/// The program says that its list always has one order. Only shapes can show that it has not.
#[test]
fn a_list_in_another_order_is_refused_by_its_shapes_or_warned_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    let restored = |shapes: [&[usize]; 3], order: [usize; 3]| {
        let vars: Vec<Var> = shapes
            .iter()
            .zip(0..)
            .map(|(shape, seed)| var(&random(seed, shape, DType::F32, CPU)))
            .collect();
        let mut saved = CandleOptimizer::for_model(&vars, AdamW::new(0.1)).expect("an optimiser");
        saved.step(&squares(&vars)).expect("a step");
        Checkpoint::new(saved.state())
            .model(&vars)
            .save(&path)
            .expect("a file");
        let other: Vec<Var> = order.map(|place| var(&vars[place])).into();
        let mut state = setup(AdamW::new(0.1), &other).expect("a state");
        let outcome =
            CheckpointFile::open(&path).and_then(|file| file.restore_with_model(&mut state, &other));
        outcome.map(|_| state.warnings().to_vec())
    };
    let error = restored([&[2, 3], &[3], &[2, 3]], [1, 0, 2]).expect_err("other shapes");
    is_kind(&error, ErrorKind::Tensor, &["[3]", "[2, 3]"]);
    assert_eq!(
        restored([&[2, 3], &[3], &[2]], [0, 1, 2]).expect("the same order"),
        []
    );
    let unseen = |parameters, shape: &[usize]| Warning::OrderUnseen {
        parameters,
        shape: shape.to_vec(),
    };
    assert_eq!(
        restored([&[2, 2]; 3], [2, 0, 1]).expect("equal shapes"),
        [unseen(3, &[2, 2])]
    );
    assert_eq!(
        restored([&[3], &[4], &[3]], [2, 1, 0]).expect("two equal shapes"),
        [unseen(2, &[3])]
    );
}

#[test]
fn an_optimiser_by_place_is_not_written_as_one_by_path() {
    let vars: Vec<Var> = (0..3)
        .map(|seed| var(&random(seed, &[2], DType::F32, CPU)))
        .collect();
    let mut optimizer = CandleOptimizer::new(vars, AdamW::new(0.1)).expect("an optimiser");
    assert!(
        OptimiserConfig::of_state(optimizer.state()).is_ok(),
        "all have the same"
    );
    optimizer
        .state_mut()
        .at("1")
        .expect("a leaf")
        .adjust(0.2)
        .expect("a rate");
    let error = OptimiserConfig::of_state(optimizer.state()).expect_err("another process has another order");
    is_kind(&error, ErrorKind::Unsupported, &["for_model"]);
}

#[test]
fn warnings_and_errors_name_the_shape_of_a_place_in_a_list() {
    let tensors = [
        random(1, &[64, 10], DType::BF16, CPU),
        random(2, &[3], DType::F32, CPU),
        random(3, &[2], DType::F32, CPU),
    ];
    let vars = tensors.map(|x| var(&x));
    let mut optimizer = CandleOptimizer::new(vars.to_vec(), AdamW::new(0.1)).expect("an optimiser");
    optimizer.step(&squares([&vars[1]])).expect("a step");
    let [without, low] = optimizer.state().warnings() else {
        panic!("two warnings")
    };
    let paths = |paths: &[&str]| paths.iter().map(|path| path.to_string()).collect::<Vec<_>>();
    let missing = paths(&["0 [64, 10]", "2 [2]"]);
    assert!(
        matches!(without, Warning::WithoutGradient { missing: 2, parameters: 3, paths, remedy }
            if *paths == missing && remedy.contains("`audit(&model, &loss)` shows"))
    );
    assert_eq!(
        *low,
        Warning::LowPrecision {
            bf16: 1,
            f16: 0,
            paths: paths(&["0 [64, 10]"])
        }
    );
    optimizer.state_mut().require_all();
    let error = optimizer
        .step(&squares([&vars[1]]))
        .expect_err("missing gradients");
    assert!(
        message(&error).starts_with(
            "2 of 3 parameters have no gradient, and the state requires all: 0 [64, 10], 2 [2]; "
        ),
        "{error}"
    );
}

#[test]
fn defaults_that_differ_from_candle_nn() {
    let (theirs, ours) = (ParamsAdamW::default(), AdamW::default());
    assert_eq!(
        (
            theirs.lr,
            theirs.beta1,
            theirs.beta2,
            theirs.eps,
            theirs.weight_decay
        ),
        (ours.eta, ours.beta.0, ours.beta.1, ours.epsilon, ours.lambda)
    );
}
