//! Parameters that no gradient reaches, first of all the running statistics of candle-nn's BatchNorm:
//! variables of a `VarMap` that others move.

#![allow(unreachable_pub)]

use candle_core::{DType, Device, Result as Candle, Tensor};
use candle_nn::{BatchNorm, Linear, Module, ModuleT, VarBuilder, VarMap, batch_norm, linear};
use optimisers::{
    AccumGrad, Adam, Checkpoint, CheckpointFile, Ema, ErrorKind, Kahan, Lookahead, MixedPrecision, Offload,
    Optimiser, OptimiserChain, SplitMaster, StateTree, StochasticRounding, setup, update,
};

use support::common::{Vars, assert_same, bits, grads, is_kind, model, random, snapshot, values};

pub const STATISTICS: [&str; 2] = ["norm.running_mean", "norm.running_var"];

/// A layer, its norm, and a layer; the norm is in f32, as candle's has to be.
pub struct Net {
    pub first: Linear,
    pub norm: BatchNorm,
    last: Linear,
}

impl Net {
    pub fn new(variables: &VarMap, dtype: DType) -> Candle<Net> {
        let builder = |dtype| VarBuilder::from_varmap(variables, dtype, &Device::Cpu);
        let (layers, norm) = (builder(dtype), builder(DType::F32));
        Ok(Net {
            first: linear(3, 5, layers.pp("first"))?,
            norm: batch_norm(5, 1e-5, norm.pp("norm"))?,
            last: linear(5, 1, layers.pp("last"))?,
        })
    }

    pub fn forward(&self, inputs: &Tensor, train: bool) -> Candle<Tensor> {
        let hidden = self.first.forward(inputs)?;
        let normed = self.norm.forward_t(&hidden.to_dtype(DType::F32)?, train)?;
        self.last.forward(&normed.relu()?.to_dtype(inputs.dtype())?)
    }

    fn loss(&self, call: u64) -> Candle<Tensor> {
        (self
            .forward(&batch(call, self.first.weight().dtype()), true)?
            .to_dtype(DType::F32)?
            - 1.0)?
            .sqr()?
            .mean_all()
    }
}

/// Inputs that are not centred, so that the statistics have somewhere to go.
pub fn batch(call: u64, dtype: DType) -> Tensor {
    random(call, &[16, 3], DType::F32, &Device::Cpu)
        .affine(0.7, 2.0)
        .and_then(|x| x.to_dtype(dtype))
        .expect("a batch")
}

/// A network with the same weights in each call, and its variables.
pub fn network(dtype: DType) -> (Vars, Net) {
    let variables = VarMap::new();
    let net = Net::new(&variables, dtype).expect("a network");
    let mut all: Vars = variables
        .data()
        .lock()
        .expect("variables")
        .iter()
        .map(|(path, x)| (path.clone(), x.clone()))
        .collect();
    for (seed, (path, x)) in all.iter_mut().enumerate() {
        if !STATISTICS.contains(&path.as_str()) {
            x.set(&random(seed as u64, x.dims(), x.dtype(), &Device::Cpu))
                .expect("weights");
        }
    }
    (all, net)
}

pub fn train(net: &Net, variables: &Vars, state: &mut StateTree, calls: std::ops::Range<u64>) {
    for call in calls {
        let outcome = update(
            state,
            variables,
            &net.loss(call)
                .and_then(|loss| loss.backward())
                .expect("gradients"),
        )
        .expect("an update");
        assert_eq!((outcome.applied, outcome.without_gradient.len()), (6, 2));
    }
}

pub fn statistics(variables: &Vars) -> Vec<Vec<u64>> {
    STATISTICS.iter().map(|path| bits(&variables[*path])).collect()
}

pub fn averaging() -> OptimiserChain<(Adam, Ema)> {
    OptimiserChain::new((Adam::new(0.05), Ema::new(0.9)))
}

/// Every way to keep parameters, and the dtype of the layers.
fn kept() -> Vec<(Optimiser, DType)> {
    vec![
        (Optimiser::new(averaging()), DType::F32),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, averaging())),
            DType::F32,
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, averaging())),
            DType::BF16,
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, averaging())),
            DType::BF16,
        ),
        (Optimiser::new(SplitMaster::new(averaging())), DType::BF16),
        (Optimiser::new(Kahan::new(averaging())), DType::BF16),
        (
            Optimiser::new(StochasticRounding::new(1, averaging())),
            DType::BF16,
        ),
        (Optimiser::new(Offload::new(averaging()).everywhere()), DType::F32),
        (
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F64, averaging())).everywhere()),
            DType::F32,
        ),
    ]
}

/// Averages come and go; the statistics are those of the training, as nothing else is known of them.
#[test]
fn running_statistics_are_not_exchanged_for_their_initial_values() {
    for (optimiser, dtype) in kept() {
        let (variables, net) = network(dtype);
        let mut state = setup(optimiser.clone(), &variables).expect("a state");
        train(&net, &variables, &mut state, 0..20);
        let before = snapshot(&variables, &state);
        let moved = statistics(&variables);
        assert!(values(&variables[STATISTICS[0]]).iter().all(|mean| *mean != 0.0));
        let averages = state.averages(&variables).expect("averages");
        assert_eq!(averages.len(), 6, "{averages:?}");
        let inside = state
            .with_averages(&variables, || Ok::<_, optimisers::Error>(statistics(&variables)))
            .expect("averages");
        assert_eq!(inside, moved, "{}", optimiser.name());
        assert_same(&[snapshot(&variables, &state)], &[before], optimiser.name());
    }
}

/// The whole way: trained, averaged, evaluated, saved, restored, and trained on. The statistics move before
/// each step, and once more before the file is made.
#[test]
fn a_network_with_batch_norm_is_trained_and_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    for (optimiser, dtype) in kept() {
        let what = (optimiser.name(), dtype);
        let (variables, net) = network(dtype);
        let mut state = setup(optimiser.clone(), &variables).expect("a state");
        net.loss(99).expect("a training pass before the first step");
        train(&net, &variables, &mut state, 0..10);
        net.loss(100).expect("a training pass without a step");
        state
            .check_masters(&variables)
            .expect("statistics are nobody's master");

        let input = batch(5, dtype)
            .to_dtype(DType::F32)
            .expect("f32")
            .to_dtype(dtype)
            .expect("its dtype");
        let output = state
            .with_averages(&variables, || net.forward(&input, true))
            .expect("an output");
        assert!(values(&output).iter().all(|y| y.is_finite()), "{what:?}");

        let masters = state.masters(&variables).expect("masters");
        for path in STATISTICS {
            assert_eq!(
                values(&masters[path]),
                values(&variables[path]),
                "{what:?}, {path}"
            );
        }
        Checkpoint::new(&state)
            .model(&variables)
            .save(&path)
            .expect("a file");

        let (other, other_net) = network(dtype);
        let mut resumed = setup(optimiser, &other).expect("a state");
        CheckpointFile::open(&path)
            .and_then(|file| file.restore_with_model(&mut resumed, &other))
            .expect("a restored run");
        resumed
            .check_masters(&other)
            .expect("statistics are nobody's master");
        assert_eq!(statistics(&other), statistics(&variables), "{what:?}");
        train(&net, &variables, &mut state, 10..15);
        train(&other_net, &other, &mut resumed, 10..15);
        assert_same(
            &[snapshot(&other, &resumed)],
            &[snapshot(&variables, &state)],
            &what,
        );
    }
}

/// In another precision the statistics go along, not the masters that they had at `setup`.
#[test]
fn statistics_survive_a_conversion() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let ways: [(Optimiser, DType); 4] = [
        (Optimiser::new(averaging()), DType::F32),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, averaging())),
            DType::F32,
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, averaging())),
            DType::BF16,
        ),
        (Optimiser::new(Offload::new(averaging()).everywhere()), DType::F32),
    ];
    for (saved, dtype) in &ways {
        let (variables, net) = network(*dtype);
        let mut state = setup(saved.clone(), &variables).expect("a state");
        train(&net, &variables, &mut state, 0..5);
        net.loss(100).expect("a training pass without a step");
        Checkpoint::new(&state)
            .model(&variables)
            .save(&path)
            .expect("a file");
        for (loaded, dtype) in &ways {
            let what = (saved.name(), loaded.name());
            let (other, other_net) = network(*dtype);
            let mut resumed = setup(loaded.clone(), &other).expect("a state");
            let file = CheckpointFile::open(&path).expect("a file").converting();
            file.restore_with_model(&mut resumed, &other)
                .expect("a restored run");
            assert_eq!(statistics(&other), statistics(&variables), "{what:?}");
            for path in STATISTICS {
                assert_eq!(
                    values(&resumed.masters(&other).expect("masters")[path]),
                    values(&other[path]),
                    "{what:?}"
                );
            }
            train(&other_net, &other, &mut resumed, 5..8);
        }
    }
}

fn tensor(seed: u64, dtype: DType) -> Tensor {
    random(seed, &[2000], dtype, &Device::Cpu)
}

/// A parameter that no gradient has reached yet is what its variable says, whoever writes it.
#[test]
fn what_has_never_had_a_gradient_follows_its_variable() {
    let rule = OptimiserChain::new((Adam::new(0.1), Lookahead::new(2)));
    let optimisers: [(Optimiser, DType); 4] = [
        (Optimiser::new(rule.clone()), DType::F32),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
            DType::BF16,
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, rule.clone())),
            DType::F32,
        ),
        (Optimiser::new(Offload::new(rule).everywhere()), DType::BF16),
    ];
    for (optimiser, dtype) in optimisers {
        let x = model(&[tensor(1, dtype), tensor(2, dtype)]);
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        let only_first = grads([Some(tensor(3, dtype)), None]);
        let both = |seed| grads([Some(tensor(3, dtype)), Some(tensor(seed, dtype))]);
        for seed in 20..23 {
            update(&mut state, &x, &only_first).expect("an update");
            x["1"].set(&tensor(seed, dtype)).expect("moved by others");
            state.check_masters(&x).expect("it has no master to be checked");
            assert_eq!(
                values(&state.masters(&x).expect("masters")["1"]),
                values(&x["1"]),
                "{}",
                optimiser.name()
            );
        }
        let y = model(&[tensor(22, dtype)]);
        let mut fresh = setup(optimiser.clone(), &y).expect("a state");
        for seed in 4..8 {
            update(&mut state, &x, &both(seed)).expect("an update");
            update(&mut fresh, &y, &grads([Some(tensor(seed, dtype))])).expect("an update");
            assert_eq!(bits(&x["1"]), bits(&y["0"]), "{}", optimiser.name());
        }
    }
}

/// One that has had gradients has something to lose: nothing is said while it gets none, and its next step is
/// refused.
#[test]
fn what_has_had_a_gradient_keeps_its_master() {
    let optimisers: [(Optimiser, DType); 2] = [
        (
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
            DType::BF16,
        ),
        (
            Optimiser::new(Offload::new(Adam::new(0.1)).everywhere()),
            DType::F32,
        ),
    ];
    for (optimiser, dtype) in optimisers {
        let x = model(&[tensor(1, dtype), tensor(2, dtype)]);
        let mut state = setup(optimiser, &x).expect("a state");
        let both = grads([Some(tensor(3, dtype)), Some(tensor(4, dtype))]);
        update(&mut state, &x, &both).expect("an update");
        let master = bits(&state.masters(&x).expect("masters")["1"]);
        x["1"].set(&tensor(5, dtype)).expect("a change");
        update(&mut state, &x, &grads([Some(tensor(3, dtype)), None])).expect("an update of the other");
        assert_eq!(bits(&state.masters(&x).expect("masters")["1"]), master);
        is_kind(
            &state.check_masters(&x).expect_err("noticed"),
            ErrorKind::Changed,
            &["parameter \"1\"", "of its master"],
        );
        is_kind(
            &update(&mut state, &x, &both).expect_err("noticed"),
            ErrorKind::Changed,
            &["parameter \"1\"", "of its master"],
        );
        state.refresh_masters(&x).expect("masters");
        update(&mut state, &x, &both).expect("an update");
    }
}

/// An accumulated gradient is a gradient, also in a call that brings none.
#[test]
fn a_step_out_of_an_accumulator_is_not_taken_over_a_changed_parameter() {
    let x = model(&[tensor(1, DType::BF16), tensor(2, DType::BF16)]);
    let rule = OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1)));
    let mut state = setup(MixedPrecision::new(DType::F32, rule), &x).expect("a state");
    update(
        &mut state,
        &x,
        &grads([Some(tensor(3, DType::BF16)), Some(tensor(4, DType::BF16))]),
    )
    .expect("the first half");
    x["1"].set(&tensor(5, DType::BF16)).expect("a change");
    let before = snapshot(&x, &state);
    let error = update(&mut state, &x, &grads([Some(tensor(3, DType::BF16)), None])).expect_err("noticed");
    is_kind(&error, ErrorKind::Changed, &["parameter \"1\"", "of its master"]);
    assert_same(&[snapshot(&x, &state)], &[before], &error);
}
