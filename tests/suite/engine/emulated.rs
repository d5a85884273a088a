//! The code for CUDA devices, executed on the CPU.

#![allow(unreachable_pub)]

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::{Device, Tensor};
use optimisers::__private::emulation::{Launched, is_available, take_answered, take_launches};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, Cautious, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Engine,
    IntoOptimiser, Kind, LAMB, LARS, Lookahead, MixedPrecision, Momentum, NonFinite, Optimiser,
    OptimiserChain, Prodigy, Rule, Status, StochasticRounding, Update, WeightDecay, setup,
};

use crate::engine::engines::{small_model, special_values};
use support::common::{
    Grads, assert_close, assert_same, grads, model, muon, optimisers_for, random, trajectory,
};

/// Whether these tests can run. Where they cannot, they fail, unless the environment says that this is known.
pub fn can_run() -> bool {
    let known = std::env::var_os("WITHOUT_CXX").is_some_and(|value| value == "1");
    assert!(
        is_available() || known,
        "no C++ compiler (c++, or what CXX names); WITHOUT_CXX=1 leaves out the tests that need one"
    );
    is_available()
}

/// Asserts that a trajectory is that of the CPU engine: to the bit, but for norms, which are added up in
/// another order.
pub fn assert_agrees(optimiser: impl IntoOptimiser, parameters: &[Tensor], grads: &[Grads]) {
    let optimiser = Optimiser::new(optimiser);
    let what = format!(
        "{} for {:?} with {:?}",
        optimiser.name(),
        parameters[0].dtype(),
        grads[0].values().next().map(Tensor::dtype)
    );
    let expected = trajectory(Engine::Fused, optimiser.clone(), parameters, grads);
    take_launches();
    let got = trajectory(Engine::Emulated, optimiser.clone(), parameters, grads);
    assert!(!take_launches().is_empty(), "{what}");
    match optimiser.rule().kind() {
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
    if !can_run() {
        return;
    }
    assert_all_agree(F16);
}

#[test]
fn every_optimiser_for_bf16() {
    if !can_run() {
        return;
    }
    assert_all_agree(BF16);
}

#[test]
fn every_optimiser_for_f32() {
    if !can_run() {
        return;
    }
    assert_all_agree(F32);
}

#[test]
fn every_optimiser_for_f64() {
    if !can_run() {
        return;
    }
    assert_all_agree(F64);
}

/// Parameters and gradients of different dtypes, the wider of which decides about the arithmetic.
#[test]
fn dtypes_mixed() {
    if !can_run() {
        return;
    }
    for (parameter, gradient) in [
        (BF16, F32),
        (F32, BF16),
        (F16, BF16),
        (F32, F64),
        (F16, F64),
        (F64, BF16),
    ] {
        let (parameters, grads) = small_model(&Device::Cpu, parameter, gradient);
        assert_agrees(AdamW::new(0.1), &parameters, &grads);
        assert_agrees(
            MixedPrecision::new(F32, OptimiserChain::new((AccumGrad::new(2), Momentum::new(0.1)))),
            &parameters,
            &grads,
        );
        assert_agrees(MixedPrecision::new(F64, Adam::new(0.1)), &parameters, &grads);
    }
}

/// NaN, infinities, signed zeros, subnormals and the largest numbers of every dtype, each as parameter with
/// each as gradient.
#[test]
fn special_numbers() {
    if !can_run() {
        return;
    }
    for parameter in [F16, BF16, F32, F64] {
        for gradient in [parameter, F64] {
            let (x, g) = special_values(parameter, gradient);
            let steps = [grads([Some(g.clone())]), grads([Some(g)])];
            let mut optimisers = optimisers_for(parameter);
            optimisers.retain(|optimiser| optimiser.rule().kind() == Kind::Elementwise);
            for mut optimiser in optimisers
                .into_iter()
                .step_by(if gradient == parameter { 1 } else { 7 })
            {
                optimiser
                    .set_field("non_finite", NonFinite::Pass.into())
                    .expect("a NonFinite");
                assert_agrees(optimiser, std::slice::from_ref(&x), &steps);
            }
        }
    }
}

/// Several blocks, the last of them short, and a part of a chain that runs before a matrix rule.
#[test]
fn large_leaves() {
    if !can_run() {
        return;
    }
    for (dtype, shape) in [(F32, [70_001, 1]), (BF16, [16_384, 2]), (F16, [129, 300])] {
        let steps: Vec<Grads> = (0..3)
            .map(|step| grads([Some(random(step, &shape, dtype, &Device::Cpu))]))
            .collect();
        let parameters = [random(9, &shape, dtype, &Device::Cpu)];
        assert_agrees(MixedPrecision::new(F32, AdamW::new(0.1)), &parameters, &steps);
        assert_agrees(
            OptimiserChain::new((ClipGlobalNorm::new(0.1), Momentum::new(0.1))),
            &parameters,
            &steps,
        );
        assert_agrees(
            OptimiserChain::new((Prodigy::default(), Lookahead::default())),
            &parameters,
            &steps,
        );
        assert_agrees(
            OptimiserChain::new((Adam::new(1.0), muon(), WeightDecay::new(0.1))),
            &[parameters[0].narrow(0, 0, 120).expect("rows")],
            &[grads([Some(steps[0]["0"].narrow(0, 0, 120).expect("rows"))])],
        );
    }
}

/// The launches of one update with gradients for all of these.
fn launches(optimiser: impl IntoOptimiser, parameters: &[Tensor]) -> Vec<Launched> {
    let model = model(parameters);
    let mut state = setup(optimiser, &model).expect("a state");
    let step = |seed| {
        grads(
            parameters
                .iter()
                .map(|x| Some(random(seed, x.dims(), x.dtype(), &Device::Cpu))),
        )
    };
    Update::new(&mut state)
        .engine(Engine::Emulated)
        .apply(&model, &step(1))
        .expect("a first update");
    take_launches();
    Update::new(&mut state)
        .engine(Engine::Emulated)
        .apply(&model, &step(2))
        .expect("an update");
    take_launches()
}

#[test]
fn leaves_of_a_kind_are_one_launch() {
    if !can_run() {
        return;
    }
    let leaf = |i: usize| {
        random(
            i as u64,
            &[1 + 37 * i % 1000 + if i % 100 == 7 { 40_000 } else { 0 }],
            if i.is_multiple_of(3) { F32 } else { BF16 },
            &Device::Cpu,
        )
    };
    let leaves: Vec<Tensor> = (0..1000).map(leaf).collect();
    let launched = launches(MixedPrecision::new(F32, AdamW::new(0.1)), &leaves);
    assert_eq!(
        launched
            .iter()
            .map(|launch| launch.leaves)
            .collect::<BTreeSet<_>>(),
        [334, 666].into()
    );
    assert_eq!(launched.len(), 2);
    // A block of 256 threads, each with 4 elements of a leaf.
    let blocks: usize = leaves
        .iter()
        .map(|leaf| leaf.elem_count().div_ceil(1 << 10))
        .sum();
    assert_eq!(
        launched
            .iter()
            .map(|launch| launch.blocks as usize)
            .sum::<usize>(),
        blocks
    );

    let clipped = launches(
        MixedPrecision::new(
            F32,
            OptimiserChain::new((ClipGlobalNorm::new(1e-3), AdamW::new(0.1))),
        ),
        &leaves,
    );
    assert_eq!(clipped.len(), 4, "a norm and a step for each dtype");
}

/// Everything that depends on no other answer is asked at once: a step waits once for each norm that is of
/// what another has scaled.
#[test]
fn a_step_waits_once_for_each_level_of_norms() {
    if !can_run() {
        return;
    }
    let leaves = [(1, 5, F32), (2, 40_000, F32), (3, 7, BF16)]
        .map(|(seed, length, dtype)| random(seed, &[length], dtype, &Device::Cpu));
    let waits = |optimiser: Optimiser, checked: bool| {
        let model = model(&leaves);
        let mut state = setup(optimiser, &model).expect("a state");
        let mut step = |seed| {
            let grads = grads(
                leaves
                    .iter()
                    .map(|x| Some(random(seed, x.dims(), x.dtype(), &Device::Cpu))),
            );
            let update = Update::new(&mut state).engine(Engine::Emulated);
            let update = if checked { update.finite_only() } else { update };
            assert_eq!(
                update.apply(&model, &grads).expect("an update").status,
                Status::Stepped
            );
        };
        step(1);
        take_answered();
        step(2);
        take_answered()
    };
    let mixed = |rule: Box<dyn Rule>| Optimiser::new(MixedPrecision::new(F32, rule));
    let clip = || ClipGlobalNorm::new(1e-3);
    let rules: [(Box<dyn Rule>, usize); 21] = [
        (Box::new(Adam::new(0.1)), 0),
        (Box::new(ClipNorm::new(1.0)), 1),
        (Box::new(ClipGlobalNorm::new(1.0)), 1),
        (Box::new(LAMB::new(0.1)), 1),
        (Box::new(LARS::new(0.1)), 1),
        (Box::new(Prodigy::default()), 1),
        (
            Box::new(OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1)))),
            1,
        ),
        (
            Box::new(OptimiserChain::new((
                AccumGrad::new(1),
                ClipGrad::new(1.0),
                LAMB::new(0.1),
            ))),
            1,
        ),
        // Norms of what follows from others, and from sums.
        (Box::new(OptimiserChain::new((clip(), LAMB::new(0.1)))), 2),
        (
            Box::new(OptimiserChain::new((clip(), Cautious::new(Adam::new(0.1))))),
            2,
        ),
        (
            Box::new(OptimiserChain::new((ClipNorm::new(1e-3), LARS::new(0.1)))),
            2,
        ),
        (
            Box::new(OptimiserChain::new((clip(), ClipNorm::new(1e-4), LAMB::new(0.1)))),
            3,
        ),
        (
            Box::new(OptimiserChain::new((AccumGrad::new(1), clip(), LAMB::new(0.1)))),
            2,
        ),
        (Box::new(OptimiserChain::new((clip(), Prodigy::default()))), 2),
        (Box::new(OptimiserChain::new((Prodigy::default(), clip()))), 2),
        (
            Box::new(OptimiserChain::new((
                clip(),
                Prodigy::default(),
                ClipNorm::new(1e-9),
                LAMB::new(0.1),
            ))),
            4,
        ),
        (
            Box::new(OptimiserChain::new((Prodigy::default(), Prodigy::default()))),
            2,
        ),
        // The powers of a norm are in a unit that the largest element decides.
        (
            Box::new(ClipNorm {
                p: 3.0,
                ..ClipNorm::new(1.0)
            }),
            2,
        ),
        // Functions of the whole tensor.
        (Box::new(muon()), 0),
        (Box::new(OptimiserChain::new((clip(), muon()))), 1),
        (Box::new(OptimiserChain::new((clip(), muon(), LAMB::new(0.1)))), 2),
    ];
    for (rule, expected) in rules {
        let name = rule.name();
        assert_eq!(waits(mixed(rule.clone()), false), expected, "{name}");
        assert_eq!(waits(mixed(rule), true), expected.max(1), "{name} behind a check");
    }
}

#[test]
fn hyper_parameters_and_step_counts_are_not_in_the_code() {
    if !can_run() {
        return;
    }
    let parameters = [random(1, &[5], BF16, &Device::Cpu)];
    let source = |eta, decays| {
        let adam = AdamW {
            beta: decays,
            lambda: eta / 2.0,
            ..AdamW::new(eta)
        };
        launches(MixedPrecision::new(F32, adam), &parameters)
            .remove(0)
            .source
    };
    assert_eq!(source(0.1, (0.9, 0.999)), source(0.7, (0.3, 0.5)));
}

/// The code of the main chains is in `tests/printed`. After a wanted change, run this test with `PRINT=1`.
#[test]
fn the_code_of_the_main_chains() {
    if !can_run() {
        return;
    }
    let single = [random(1, &[5], F32, &Device::Cpu)];
    let brain = [random(1, &[5], BF16, &Device::Cpu)];
    let clipped = OptimiserChain::new((ClipGlobalNorm::new(1e-3), AdamW::new(0.1)));
    let trusted = OptimiserChain::new((ClipGlobalNorm::new(1e-3), LAMB::new(0.1)));
    let printed = [
        ("adamw_f32", launches(AdamW::new(0.1), &single)),
        (
            "chain_f32",
            launches(
                OptimiserChain::new((ClipGrad::new(0.1), WeightDecay::new(0.1), Adam::new(0.1))),
                &single,
            ),
        ),
        (
            "mixed_adamw_bf16",
            launches(MixedPrecision::new(F32, AdamW::new(0.1)), &brain),
        ),
        (
            "mixed_global_norm_bf16",
            launches(MixedPrecision::new(F32, clipped), &brain),
        ),
        (
            "clipped_lamb_bf16",
            launches(MixedPrecision::new(F32, trusted), &brain),
        ),
        (
            "stochastic_bf16",
            launches(StochasticRounding::new(1, Descent::new(0.1)), &brain),
        ),
    ];
    for (name, launched) in printed {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("printed/{name}.cu"));
        // Without helpers and without what is the same in all of them.
        let own = |source: &str| {
            let (head, own) = source.split_once("struct Leaf {").expect("a row");
            let constants = head.lines().filter(|line| line.starts_with("enum :"));
            let (own, _) = own.split_once("// The leaf of a block").expect("a function");
            format!(
                "{}\n\nstruct Leaf {{{own}",
                constants.collect::<Vec<_>>().join("\n")
            )
        };
        let code: Vec<String> = launched.iter().map(|launch| own(&launch.source)).collect();
        let code = code.join("\n");
        if std::env::var_os("PRINT").is_some() {
            std::fs::create_dir_all(file.parent().expect("a folder"))
                .and_then(|()| std::fs::write(&file, &code))
                .expect("a written file");
        }
        let expected = std::fs::read_to_string(&file).expect("the printed code");
        assert!(code == expected, "{name}: the code is now\n{code}");
    }
}
