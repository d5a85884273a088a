//! The code for CUDA devices, executed on the CPU.

use std::collections::BTreeSet;

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::{Device, Tensor, Var};
use optimisers::engine::emulation::take_launches;
use optimisers::{
    AccumGrad, Adam, AdamW, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Engine, Kahan, Kind, MixedPrecision, Momentum, NonFinite,
    Optimiser, OptimiserChain, Rule, SplitMaster, StochasticRounding, WeightDecay, setup, update_on,
};

use crate::common::{Grads, assert_close, assert_same, grads, model, optimisers_for, random, trajectory};
use crate::engines::small_model;

/// Asserts that a trajectory is that of the CPU engine: to the bit, but for norms, which are added up in another order.
fn assert_agrees(optimiser: impl Optimiser + Clone, parameters: &[Tensor], grads: &[Grads]) {
    let what = format!("{} for {:?} with {:?}", optimiser.name(), parameters[0].dtype(), grads[0].values().next().map(Tensor::dtype));
    let expected = trajectory(Engine::Fused, optimiser.clone(), parameters, grads);
    take_launches();
    let got = trajectory(Engine::Emulated, optimiser.clone(), parameters, grads);
    assert!(!take_launches().is_empty(), "{what}");
    match optimiser.rule_kind() {
        Kind::Elementwise => assert_same(&got, &expected, what),
        _ => assert_close(&got, &expected, 1e-11, what),
    }
}

fn assert_all_agree(parameter: DType) {
    let (parameters, grads) = small_model(&Device::Cpu, parameter, parameter);
    for optimiser in optimisers_for(parameter) {
        assert_agrees(optimiser, &parameters, &grads);
    }
}

#[test]
fn every_optimiser_for_f16() {
    assert_all_agree(F16);
}

#[test]
fn every_optimiser_for_bf16() {
    assert_all_agree(BF16);
}

#[test]
fn every_optimiser_for_f32() {
    assert_all_agree(F32);
}

#[test]
fn every_optimiser_for_f64() {
    assert_all_agree(F64);
}
