//! Running statistics that are estimated anew, for weights that were not trained with them.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, ModuleT, VarBuilder, VarMap, batch_norm};
use optimisers::{Error, MixedPrecision, RunningStatistics, StatisticsError, setup};

use crate::batch_norm::{Net, STATISTICS, averaging, batch, network, statistics, train};
use crate::common::{Vars, assert_same, says, snapshot, values};

/// The mean over batches of the batches' means and unbiased variances, by their definitions.
fn by_hand(net: &Net, batches: &[Tensor]) -> [Vec<f64>; 2] {
    let [mut means, mut variances] = [vec![0.0; 5], vec![0.0; 5]];
    for batch in batches {
        let hidden = values(&net.first.forward(batch).expect("an output"));
        let rows = hidden.len() / 5;
        for (feature, (mean_of_all, variance_of_all)) in means.iter_mut().zip(&mut variances).enumerate() {
            let column: Vec<f64> = hidden.iter().skip(feature).step_by(5).copied().collect();
            let mean = column.iter().sum::<f64>() / rows as f64;
            let variance = column.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (rows - 1) as f64;
            *mean_of_all += mean / batches.len() as f64;
            *variance_of_all += variance / batches.len() as f64;
        }
    }
    [means, variances]
}

fn assert_near(variables: &Vars, expected: &[Vec<f64>; 2]) {
    for (path, expected) in STATISTICS.iter().zip(expected) {
        let near = |(got, expected): (f64, &f64)| (got - expected).abs() <= 1e-5 * (1.0 + expected.abs());
        assert!(values(&variables[*path]).into_iter().zip(expected).all(near), "{path}: {:?} for {expected:?}", values(&variables[*path]));
    }
}

fn batches() -> Vec<Tensor> {
    // The last one is smaller, and counts the same.
    let mut batches: Vec<Tensor> = (50..54).map(|seed| batch(seed, DType::F32)).collect();
    batches.push(batch(54, DType::F32).narrow(0, 0, 7).expect("a part"));
    batches
}

#[test]
fn statistics_are_those_of_the_averages_and_then_of_the_training_again() {
    for optimiser in [Box::new(averaging()) as Box<dyn optimisers::Optimiser>, Box::new(MixedPrecision::new(DType::F64, averaging()))] {
        let (variables, net) = network(DType::F32);
        let mut state = setup(optimiser, &variables).expect("a state");
        train(&net, &variables, &mut state, 0..20);
        let before = snapshot(&variables, &state);
        for by_layer in [true, false] {
            let mut statistics = match by_layer {
                true => RunningStatistics::of_layers([&net.norm, &net.norm]).expect("a layer"),
                false => RunningStatistics::of_variables(&variables, 0.1).expect("a layer"),
            };
            let evaluate = || {
                let expected = by_hand(&net, &batches());
                for _ in 0..2 {
                    assert_eq!(statistics.estimate(&batches(), |batch| net.forward(batch, true)).expect("an estimate"), 5);
                    assert_near(&variables, &expected);
                }
                net.forward(&batch(60, DType::F32), false)
            };
            let output = state.with_averages(&variables, evaluate).expect("an output");
            assert!(values(&output).iter().all(|y| y.is_finite()));
            statistics.put_back().expect("the statistics of the training");
            assert_same(&[snapshot(&variables, &state)], std::slice::from_ref(&before), by_layer);
            statistics.put_back().expect("nothing left to put back");
        }
        train(&net, &variables, &mut state, 20..22);
    }
}

/// The averages' own statistics make an evaluation what a training pass over the same batch is.
#[test]
fn an_estimate_from_one_batch_evaluates_as_that_batch_was_trained() {
    let (variables, net) = network(DType::F32);
    let one = batch(3, DType::F32);
    let mut estimate = RunningStatistics::of_variables(&variables, net.norm.momentum()).expect("a layer");
    let trained = net.forward(&one, true).expect("an output");
    estimate.estimate([&one], |batch| net.forward(batch, true)).expect("an estimate");
    let evaluated = net.forward(&one, false).expect("an output");
    // They differ in the variance's n - 1.
    let near = |(a, b): (f64, f64)| (a - b).abs() < 0.05 * (1.0 + b.abs());
    assert!(values(&evaluated).into_iter().zip(values(&trained)).all(near));
}

#[test]
fn every_momentum_has_the_same_estimate() {
    for momentum in [1e-3, 0.1, 0.5, 1.0] {
        let variables = VarMap::new();
        let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let norm = batch_norm(3, BatchNormConfig { momentum, ..BatchNormConfig::default() }, builder).expect("a layer");
        let mut statistics = RunningStatistics::of_layers([&norm]).expect("a layer");
        // The last feature does not vary at all.
        let constant = Tensor::new(&[1f32, 1.0, 0.0], &Device::Cpu).expect("a mask");
        let inputs = batch(1, DType::F32).broadcast_mul(&constant).expect("a batch");
        statistics.estimate([&inputs], |batch| norm.forward_t(batch, true)).expect("an estimate");
        let mean = values(&inputs.mean(0).expect("a mean"));
        let variance = values(&inputs.var(0).expect("a variance"));
        let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
        assert!(values(norm.running_mean()).into_iter().zip(mean).all(near), "{momentum}");
        assert!(values(norm.running_var()).into_iter().zip(variance).all(near), "{momentum}");
    }
}

#[test]
fn an_estimate_that_fails_leaves_the_statistics() {
    let (variables, net) = network(DType::F32);
    net.forward(&batch(1, DType::F32), true).expect("a training pass");
    let before = statistics(&variables);
    let mut estimate = RunningStatistics::of_layers([&net.norm]).expect("a layer");
    let refused = |error: candle_core::Error, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(statistics(&variables), before, "{text}");
    };
    refused(estimate.estimate(&batches(), |batch| net.forward(batch, false)).expect_err("evaluated"), &["training mode", "batch 1"]);
    let mut calls = 0;
    let error = estimate.estimate(&batches(), |batch| {
        calls += 1;
        if calls == 3 { candle_core::bail!("no third batch") } else { net.forward(batch, true) }
    });
    refused(error.expect_err("failed"), &["no third batch"]);
    refused(estimate.estimate([(); 0], |()| net.forward(&batch(1, DType::F32), true)).expect_err("no batch"), &["no batches"]);
    let single = batch(1, DType::F32).narrow(0, 0, 1).expect("a part");
    refused(estimate.estimate([&single], |batch| net.forward(batch, true)).expect_err("one row"), &["not finite", "two numbers"]);
    estimate.put_back().expect("nothing was put aside");
    assert_eq!(statistics(&variables), before);
}

#[test]
fn what_is_not_there_is_refused() {
    let none = RunningStatistics::of_layers(std::iter::empty::<&BatchNorm>()).expect_err("no layer");
    assert!(matches!(none, Error::Statistics(StatisticsError::NoLayers { .. })), "{none}");
    let (mut variables, _) = network(DType::F32);
    let momentum = RunningStatistics::of_variables(&variables, 0.0).expect_err("no momentum");
    says(&momentum, &["\"norm\"", "momentum 0", "above 0"]);
    let variance = variables.remove(STATISTICS[1]).expect("a variance");
    says(&RunningStatistics::of_variables(&variables, 0.1).expect_err("no variance"), &["\"norm.running_var\""]);
    variables.remove(STATISTICS[0]);
    variables.insert("notrunning_mean".to_string(), variance);
    says(&RunningStatistics::of_variables(&variables, 0.1).expect_err("no mean"), &["NoLayers", "first.weight"]);
}
