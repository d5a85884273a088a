//! Against burn's own AdamW, and what an optimiser must not get wrong.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::grad_clipping::GradientClipping;
use burn::optim::{self, AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_optimisers::{Error, ModuleOptimizer};
use optimisers::{AdamW, ClipGlobalNorm, ClipNorm, Lend, MixedPrecision, OptimiserChain, Outcome, View};

#[derive(Module, Debug)]
struct Network {
    hidden: Linear,
    outputs: Vec<Linear>,
}

impl Network {
    fn new() -> Self {
        let device = device();
        let outputs = vec![
            LinearConfig::new(5, 3).init(&device),
            LinearConfig::new(5, 2).with_bias(false).init(&device),
        ];
        Network {
            hidden: LinearConfig::new(4, 5).init(&device),
            outputs,
        }
        .materialize()
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let hidden = self
            .hidden
            .forward(x.cast(self.hidden.weight.val().dtype()))
            .tanh();
        let outputs = self
            .outputs
            .iter()
            .map(|output| output.forward(hidden.clone()).cast(FloatDType::F32));
        let targets = [1.0, -1.0];
        outputs
            .zip(targets)
            .map(|(y, target)| (y - target).square().mean())
            .reduce(|a, b| a + b)
            .expect("two outputs")
    }

    fn gradients(&self, x: &Tensor<2>) -> GradientsParams {
        GradientsParams::from_grads(self.loss(x.clone()).backward(), self)
    }

    fn cast(self, dtype: DType) -> Self {
        struct Cast(DType);
        impl ModuleMapper for Cast {
            fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
                parameter.map(|tensor| tensor.inner().cast(self.0).autodiff().require_grad())
            }
        }
        self.map(&mut Cast(dtype))
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn batches(count: usize) -> Vec<Tensor<2>> {
    (0..count)
        .map(|_| Tensor::random([6, 4], Distribution::Default, &device()))
        .collect()
}

/// All numbers of a module, in f32, and what else a step must keep.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    numbers: Vec<f32>,
    others: Vec<(String, Vec<usize>, DType, bool, bool)>,
}

impl ModuleVisitor for Seen {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let tensor = parameter.val();
        let (shape, dtype) = (tensor.dims().to_vec(), tensor.dtype());
        self.others.push((
            parameter.id.to_string(),
            shape,
            dtype,
            tensor.is_require_grad(),
            tensor.is_autodiff(),
        ));
        self.numbers.extend(tensor.into_data().iter::<f32>());
    }
}

fn seen<M: Module>(module: &M) -> Seen {
    let mut seen = Seen::default();
    module.visit(&mut seen);
    seen
}

fn step(optimizer: &mut ModuleOptimizer, network: &mut Network, x: &Tensor<2>) -> Outcome {
    let gradients = network.gradients(x);
    optimizer.step(network, gradients).expect("a step")
}

/// Burn keeps its numbers in f32.
fn adamw(eta: f64) -> AdamW {
    AdamW {
        beta: (0.9f32.into(), 0.999f32.into()),
        lambda: 1e-4f32.into(),
        epsilon: 1e-5f32.into(),
        ..AdamW::new(eta)
    }
}

/// The largest difference from burn's, in parts of how far training has gone.
fn difference(mut burn: optim::ModuleOptimizer, mut ours: ModuleOptimizer, network: Network) -> f32 {
    let start = seen(&network).numbers;
    let (mut theirs, mut here) = (network.clone(), network);
    for x in batches(20) {
        let gradients = theirs.gradients(&x);
        theirs = burn.step(0.01, theirs, gradients);
        step(&mut ours, &mut here, &x);
    }
    let (theirs, here) = (seen(&theirs).numbers, seen(&here).numbers);
    let largest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    largest(&theirs, &here) / largest(&theirs, &start)
}

#[test]
fn adamw_goes_where_burns_goes() {
    let network = Network::new();
    let ours = ModuleOptimizer::new(adamw(0.01), &network).unwrap();
    let difference = difference(AdamWConfig::new().init(), ours, network);
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn clipping_each_norm_is_that_of_burn() {
    let network = Network::new();
    let burn = AdamWConfig::new()
        .init()
        .with_grad_clipping(GradientClipping::Norm(0.05));
    let ours =
        ModuleOptimizer::new(OptimiserChain::new((ClipNorm::new(0.05), adamw(0.01))), &network).unwrap();
    let difference = difference(burn, ours, network);
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn the_global_norm_is_that_of_all_parameters() {
    let mut network = Network::new();
    let [x] = batches(1).try_into().unwrap();
    let mut optimizer = ModuleOptimizer::new(
        OptimiserChain::new((ClipGlobalNorm::new(1e-3), adamw(0.01))),
        &network,
    )
    .unwrap();
    let mut gradients = network.gradients(&x);
    let mut squares = 0.0;
    for linear in [&network.hidden, &network.outputs[0], &network.outputs[1]] {
        let of_bias = linear
            .bias
            .as_ref()
            .and_then(|bias| gradients.remove::<1>(bias.id));
        let of_weight = gradients.remove::<2>(linear.weight.id).unwrap().flatten(0, 1);
        squares += [Some(of_weight), of_bias]
            .into_iter()
            .flatten()
            .map(|g| g.square().sum().into_scalar::<f32>())
            .sum::<f32>();
    }
    let norm = step(&mut optimizer, &mut network, &x).global_norm.unwrap();
    assert!(
        (norm / f64::from(squares.sqrt()) - 1.0).abs() < 1e-5,
        "{norm} {squares}"
    );
}

#[test]
fn bf16_parameters_are_their_masters_rounded() {
    let mut network = Network::new().cast(DType::BF16);
    let mut optimizer =
        ModuleOptimizer::new(MixedPrecision::new(optimisers::DType::F32, adamw(0.01)), &network).unwrap();
    let before = seen(&network);
    let xs = batches(50);
    for x in &xs {
        step(&mut optimizer, &mut network, x);
    }
    let after = seen(&network);
    assert_eq!(before.others, after.others);
    assert!(
        after
            .others
            .iter()
            .all(|(_, _, dtype, requires_gradient, _)| *dtype == DType::BF16 && *requires_gradient)
    );
    let master = optimizer
        .state()
        .leaf("hidden.weight")
        .unwrap()
        .tensor("master")
        .unwrap();
    assert_eq!(master.lent_dtype(), optimisers::DType::F32);
    let mut numbers = Vec::new();
    let read = &mut |view: View<'_>| {
        numbers = view.numbers();
        Ok(())
    };
    master.read(read).unwrap();
    let master: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
    let rounded: Vec<f32> = Tensor::<1>::from_floats(master.as_slice(), &device())
        .cast(FloatDType::BF16)
        .into_data()
        .iter()
        .collect();
    assert_eq!(rounded, after.numbers[..20]);
    assert_ne!(before.numbers, after.numbers);
}

#[test]
fn a_run_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("checkpoint");
    let rule = || {
        MixedPrecision::new(
            optimisers::DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(1.0), adamw(0.01))),
        )
    };
    let mut network = Network::new().cast(DType::BF16);
    let mut optimizer = ModuleOptimizer::new(rule(), &network).unwrap();
    let xs = batches(6);
    xs[..3]
        .iter()
        .for_each(|x| drop(step(&mut optimizer, &mut network, x)));
    optimizer.save(&network, &file).unwrap();
    xs[3..]
        .iter()
        .for_each(|x| drop(step(&mut optimizer, &mut network, x)));

    let mut resumed = Network::new().cast(DType::BF16);
    let mut other = ModuleOptimizer::new(rule(), &resumed).unwrap();
    other.load(&mut resumed, &file).unwrap();
    xs[3..]
        .iter()
        .for_each(|x| drop(step(&mut other, &mut resumed, x)));
    assert_eq!(seen(&network).numbers, seen(&resumed).numbers);

    let mut plain = ModuleOptimizer::new(adamw(0.01), &resumed).unwrap();
    let before = seen(&resumed);
    plain.load(&mut resumed, &file).unwrap_err();
    assert_eq!(before, seen(&resumed));
}

#[test]
fn a_clone_of_the_module_stays_as_it_was() {
    let mut network = Network::new();
    let mut optimizer = ModuleOptimizer::new(adamw(0.01), &network).unwrap();
    let clone = network.clone();
    let before = seen(&clone);
    step(&mut optimizer, &mut network, &batches(1)[0]);
    assert_eq!(before, seen(&clone));
    assert_ne!(before.numbers, seen(&network).numbers);
}

#[test]
fn frozen_parameters_stay_and_new_ones_are_not_forgotten() {
    let [x] = batches(1).try_into().unwrap();
    let group = |network: &Network| ParamGroup::ids_from_module(network.hidden.clone());
    let mut network = Network::new();
    let mut optimizer = ModuleOptimizer::new(adamw(0.01), &network).unwrap();
    network = network.clone().set_require_grad_group(group(&network), false);
    let before = seen(&network);
    step(&mut optimizer, &mut network, &x);
    let after = seen(&network);
    assert_eq!(before.others, after.others);
    assert_eq!(before.numbers[..25], after.numbers[..25]);
    assert_ne!(before.numbers[25..], after.numbers[25..]);

    let mut optimizer = ModuleOptimizer::new(adamw(0.01), &network).unwrap();
    assert_eq!(optimizer.state().len(), 3);
    step(&mut optimizer, &mut network, &x);
    network = network.clone().set_require_grad_group(group(&network), true);
    let (gradients, before) = (network.gradients(&x), seen(&network));
    let error = optimizer.step(&mut network, gradients).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("parameter \"hidden.weight\": it is not in this state"),
        "{error}"
    );
    assert_eq!(before, seen(&network));
}

#[test]
fn another_module_is_refused_and_kept() {
    let network = Network::new();
    let mut optimizer = ModuleOptimizer::new(adamw(0.01), &network).unwrap();
    let mut other: Linear = LinearConfig::new(4, 5).init(&device());
    let before = seen(&other);
    let loss = other.forward(batches(1).remove(0)).square().mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &other);
    let error = optimizer.step(&mut other, gradients).unwrap_err();
    assert!(matches!(error, Error::Optimiser(_)), "{error:?}");
    assert!(matches!(
        ModuleOptimizer::new(adamw(0.01), &other.valid()),
        Err(Error::NothingToTrain)
    ));
    assert_eq!(before, seen(&other));
}

#[test]
fn running_statistics_are_left_to_the_module() {
    let mut norm = BatchNormConfig::new(4).init(&device());
    let mut optimizer = ModuleOptimizer::new(adamw(0.01), &norm).unwrap();
    let paths: Vec<&str> = optimizer.state().leaves().map(|leaf| leaf.path()).collect();
    assert_eq!(paths, ["beta", "gamma"]);
    let loss = norm.forward(batches(1).remove(0)).powi_scalar(3).mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &norm);
    optimizer.step(&mut norm, gradients).unwrap();
    let folder = tempfile::tempdir().unwrap();
    optimizer.save(&norm, folder.path().join("checkpoint")).unwrap();
    let saved = norm.gamma.val().into_data();
    norm.forward(batches(1).remove(0) + 1.0);
    let running = norm.running_mean.value().into_data();
    optimizer
        .load(&mut norm, folder.path().join("checkpoint"))
        .unwrap();
    assert_eq!(
        (saved, running),
        (
            norm.gamma.val().into_data(),
            norm.running_mean.value().into_data()
        )
    );
}
