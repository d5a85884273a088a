//! `SplitMaster`: a master in two halves, of which the parameter is one.

use candle_core::{DType, Tensor};
use optimisers::{
    Adam, ClipGlobalNorm, Descent, ErrorKind, MixedPrecision, Optimiser, OptimiserChain, SplitMaster,
    StateTree, WeightDecay, setup, update,
};

use support::common::{bits, bits16, constant, grads, is_kind, model, rules_and_chains, tensor, values};

/// The master that a parameter and its rest stand for.
fn joined(x: &Tensor, state: &StateTree) -> Vec<u64> {
    let rest = state
        .leaf("0")
        .and_then(|leaf| leaf.tensor("rest").ok())
        .expect("a rest");
    let rest: Vec<f32> = rest
        .flatten_all()
        .and_then(|rest| rest.to_vec1())
        .expect("distances");
    let join =
        |(high, rest): (u16, f32)| f32::from_bits((u32::from(high) << 16).wrapping_add_signed(rest as i32));
    bits16(x)
        .into_iter()
        .zip(rest)
        .map(|pair| f64::from(join(pair)).to_bits())
        .collect()
}

/// T33: the master comes back exactly, over a thousand steps, and the parameter is that of mixed precision.
#[test]
fn t33_split_masters_are_the_masters_of_mixed_precision() {
    let rule = || OptimiserChain::new((ClipGlobalNorm::new(2.0), WeightDecay::new(1e-3), Adam::new(1e-3)));
    let start = [tensor(1, &[203], DType::BF16)];
    let (split, mixed) = (model(&start), model(&start));
    let mut split_state = setup(SplitMaster::new(rule()), &split).expect("a state");
    let mut mixed_state = setup(MixedPrecision::new(DType::F32, rule()), &mixed).expect("a state");
    for step in 0..1000 {
        let gradient = grads([Some(tensor(2 + step, &[203], DType::BF16))]);
        update(&mut split_state, &split, &gradient).expect("an update");
        update(&mut mixed_state, &mixed, &gradient).expect("an update");
        let master = mixed_state
            .leaf("0")
            .and_then(|leaf| leaf.tensor("master").ok())
            .expect("a master");
        assert_eq!(joined(&split["0"], &split_state), bits(&master), "step {step}");
        assert_eq!(bits16(&split["0"]), bits16(&mixed["0"]), "step {step}");
    }
    // Two records, where mixed precision has an f32 for each number.
    assert_eq!(split_state.bytes() - 2 * 272, mixed_state.bytes() - 4 * 203);
}

/// Masters half-way between two bf16s, below and above the even one, and their neighbours: the next step
/// starts from the very number.
#[test]
fn ties_are_those_of_mixed_precision_and_come_back() {
    let masters: Vec<f32> = [
        0x3f80_8000u32,
        0x3f81_8000,
        0x3f7f_8000,
        0x3f80_8001,
        0x3f80_7fff,
        0x0000_8000,
        0x0001_8000,
        0x7f7f_7fff,
    ]
    .iter()
    .flat_map(|bits| [f32::from_bits(*bits), -f32::from_bits(*bits)])
    .cycle()
    .take(700)
    .collect();
    let tensor = |values: &[f32]| Tensor::new(values, &candle_core::Device::Cpu).expect("a tensor");
    // Some ties come and others go in the second step.
    let steps = [
        masters.iter().map(|master| -master).collect::<Vec<f32>>(),
        vec![2f32.powi(-9); 700],
    ];
    let run = |optimiser: Optimiser, steps: &[Vec<f32>]| {
        let x = model(&[constant(0.0, 700, DType::BF16)]);
        let mut state = setup(optimiser, &x).expect("a state");
        for step in steps {
            update(&mut state, &x, &grads([Some(tensor(step))])).expect("an update");
        }
        (bits16(&x["0"]), bits(&state.masters(&x).expect("masters")["0"]))
    };
    for steps in [
        &steps[..1],
        &steps,
        &[
            steps[0].clone(),
            steps[1].clone(),
            steps[1].iter().map(|step| -step).collect(),
        ],
    ] {
        let mixed = run(
            Optimiser::new(MixedPrecision::new(DType::F32, Descent::new(1.0))),
            steps,
        );
        assert_eq!(
            run(Optimiser::new(SplitMaster::new(Descent::new(1.0))), steps),
            mixed
        );
    }
}

#[test]
fn ties_of_24_bits_go_away_from_zero() {
    let tie = constant(-(1.0 + 2f64.powi(-8)), 1, DType::F32);
    let x = model(&[constant(0.0, 1, DType::BF16)]);
    let mut state = setup(SplitMaster::of_24_bits(Descent::new(1.0)), &x).expect("a state");
    update(&mut state, &x, &grads([Some(tie)])).expect("an update");
    assert_eq!(values(&x["0"]), [1.0 + 2f64.powi(-7)]);
}

/// The largest error is half a unit of 24 bits, and over a thousand steps the mean of what is lost is 0.
#[test]
fn a_master_of_24_bits_loses_half_a_unit_in_a_step() {
    let start = [tensor(1, &[4001], DType::BF16)];
    let (short, exact) = (model(&start), model(&start));
    let mut short_state = setup(SplitMaster::of_24_bits(Adam::new(1e-3)), &short).expect("a state");
    let mut exact_state = setup(SplitMaster::new(Adam::new(1e-3)), &exact).expect("a state");
    let masters = |state: &StateTree, x| values(&state.masters(x).expect("masters")["0"]);
    let mut step = |seed| {
        let gradient = grads([Some(tensor(seed, &[4001], DType::BF16))]);
        update(&mut short_state, &short, &gradient).expect("an update");
        update(&mut exact_state, &exact, &gradient).expect("an update");
        (masters(&short_state, &short), masters(&exact_state, &exact))
    };
    // In units of the last of 24 bits.
    let errors = |(short, exact): &(Vec<f64>, Vec<f64>)| -> Vec<f64> {
        let unit = |x: f64| x.abs().log2().floor().exp2() * 2f64.powi(-15);
        short
            .iter()
            .zip(exact)
            .map(|(short, exact)| (short - exact) / unit(*short))
            .collect()
    };
    let first = errors(&step(2));
    let largest = first.iter().fold(0f64, |largest, error| largest.max(error.abs()));
    assert!((0.4..=0.5).contains(&largest), "{largest}");
    let mut last = Default::default();
    for seed in 3..1002 {
        last = step(seed);
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let distances: Vec<f64> = last
        .0
        .iter()
        .zip(&last.1)
        .map(|(short, exact)| short - exact)
        .collect();
    let walked: Vec<f64> = last
        .1
        .iter()
        .zip(values(&start[0]))
        .map(|(exact, start)| exact - start)
        .collect();
    let size = |values: &[f64]| mean(&values.iter().map(|value| value * value).collect::<Vec<_>>()).sqrt();
    let (lost, bias, way) = (size(&distances), mean(&distances).abs(), size(&walked));
    assert!(
        lost < 0.02 * way && bias < 0.1 * lost,
        "{lost:e} lost of {way:e}, {bias:e} in the mean"
    );
    // 32 records of 272 bytes, and a byte for each.
    assert_eq!(exact_state.bytes() - short_state.bytes(), 32 * 272 - 4001);
}

#[test]
fn split_masters_agree_for_every_rule() {
    for rule in rules_and_chains() {
        let start = [tensor(1, &[37], DType::BF16)];
        let (split, mixed) = (model(&start), model(&start));
        let mut split_state = setup(SplitMaster::new(rule.clone()), &split).expect("a state");
        let mut mixed_state = setup(MixedPrecision::new(DType::F32, rule.clone()), &mixed).expect("a state");
        for step in 0..6 {
            let gradient = grads([Some(tensor(2 + step, &[37], DType::F32))]);
            update(&mut split_state, &split, &gradient).expect("an update");
            update(&mut mixed_state, &mixed, &gradient).expect("an update");
            let master = mixed_state
                .leaf("0")
                .and_then(|leaf| leaf.tensor("master").ok())
                .expect("a master");
            assert_eq!(
                joined(&split["0"], &split_state),
                bits(&master),
                "{}",
                rule.name()
            );
            assert_eq!(bits16(&split["0"]), bits16(&mixed["0"]), "{}", rule.name());
        }
    }
}

#[test]
fn a_half_precision_parameter_cannot_be_split() {
    let error = setup(
        SplitMaster::new(Adam::default()),
        &model(&[tensor(1, &[3], DType::F16)]),
    )
    .expect_err("refused");
    is_kind(&error, ErrorKind::Tensor, &["SplitMaster"]);
    assert_eq!((error.path(), error.got()), (Some("0"), Some("F16")), "{error}");
    assert!(
        error
            .expected()
            .is_some_and(|expected| expected.starts_with("BF16")),
        "{error}"
    );
}
