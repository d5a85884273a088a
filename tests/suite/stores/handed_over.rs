//! Precise values of parameters that change hands: from one store to another, and out of a state and into it
//! again.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use optimisers::{
    AdamW, Descent, ErrorKind, Hyperball, Kahan, Lookahead, MixedPrecision, Momentum, Offload, Optimiser,
    OptimiserChain, Rule, SplitMaster, StateTree, StochasticRounding, setup, update,
};

use support::common::{
    Vars, assert_same, bits, grads, is_kind, model, rounding_to_nearest, snapshot, tensor, values,
};

/// Numbers whose upper halves are those of bf16s, around all places where roundings change sides.
fn near_ties() -> Vec<f32> {
    let upper = [
        0.341_796_88f32,
        0.34375,
        1.0,
        1.007_812_5,
        -3.0,
        -2.984_375,
        2.0,
        1e-3,
        6e-39,
        0.0,
    ];
    let lower = [
        0, 1, 0x7f, 0x80, 0x81, 0x180, 0x7f7f, 0x7f80, 0x7fff, 0x8000, 0x8001, 0x8080, 0xff80, 0xffff,
    ];
    let bits = |upper: f32| u32::from(bf16::from_f32(upper).to_bits()) << 16;
    upper
        .into_iter()
        .flat_map(|upper| lower.map(|lower| f32::from_bits(bits(upper) + lower)))
        .collect()
}

fn stores(dtype: DType) -> Vec<Optimiser> {
    let rule = || Box::new(AdamW::new(1e-4)) as Box<dyn Rule>;
    let mut all = rounding_to_nearest(dtype, rule());
    all.push(Optimiser::new(StochasticRounding::new(7, rule())));
    if dtype != DType::F16 {
        all.push(Optimiser::new(
            Offload::new(SplitMaster::of_24_bits(rule())).everywhere(),
        ));
    }
    all
}

fn masters(state: &StateTree, model: &Vars) -> Tensor {
    state.masters(model).expect("masters")["0"].clone()
}

/// A state whose precise values are [`near_ties`], and that has then taken some steps.
fn prepared(optimiser: Optimiser, dtype: DType, steps: u64) -> (Vars, StateTree) {
    let numbers = near_ties();
    let count = numbers.len();
    let x = model(&[tensor(1, &[count], dtype)]);
    let mut state = setup(optimiser, &x).expect("a state");
    step(&mut state, &x, 0);
    let numbers = Tensor::from_vec(numbers, count, &Device::Cpu).expect("a tensor");
    state
        .set_masters(&x, &BTreeMap::from([("0".to_string(), numbers)]))
        .expect("new values");
    (1..=steps).for_each(|call| step(&mut state, &x, call));
    (x, state)
}

fn step(state: &mut StateTree, x: &Vars, call: u64) {
    update(state, x, &grads([Some(tensor(call, x["0"].dims(), DType::F32))])).expect("an update");
}

fn keeps_precise(optimiser: &Optimiser) -> bool {
    ["MixedPrecision", "SplitMaster", "Kahan"]
        .iter()
        .any(|kind| optimiser.name().contains(kind))
}

/// What may be lost of a precise value beside its parameter, in a store.
fn bound(to: &Optimiser, dtype: DType, value: f64, x: f64) -> f64 {
    let name = to.name();
    let last_place =
        |number: f64, digits: i32| 2f64.powi((number.abs().log2().floor().max(-126.0)) as i32 - digits);
    if name.contains("Kahan") {
        // Half a digit of the distance, or of the smallest number, and the sum is an f32.
        let (digits, least) = if dtype == DType::F16 { (11, 25) } else { (8, 134) };
        ((value - x).abs() * 2f64.powi(-digits)).max(2f64.powi(-least)) + last_place(value, 23)
    } else if name.contains("24 bits") {
        last_place(value, 15)
    } else {
        // The value that is the nearest of those that are rounded to the parameter.
        last_place(value, 23)
    }
}

/// Every ordered pair of stores: if both keep a precise value, it goes on, and the parameter stays.
#[test]
fn precise_values_go_on_in_every_other_store() {
    for dtype in [DType::BF16, DType::F16] {
        for (from, to) in stores(dtype)
            .into_iter()
            .flat_map(|from| stores(dtype).into_iter().map(move |to| (from.clone(), to)))
        {
            for steps in [0, 3] {
                let (x, mut state) = prepared(from.clone(), dtype, steps);
                let what = |i: usize| {
                    format!(
                        "{} to {} of {dtype:?} after {steps} steps, element {i}",
                        from.name(),
                        to.name()
                    )
                };
                let (before, parameter) = (values(&masters(&state, &x)), values(&x["0"]));
                let answer = state
                    .all()
                    .replace(to.clone(), &x)
                    .unwrap_or_else(|error| panic!("{}: {error}", what(0)));
                assert_eq!(
                    bits(&x["0"]),
                    parameter.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                    "{}",
                    what(0)
                );
                let after = values(&masters(&state, &x));
                if !keeps_precise(&from) || !keeps_precise(&to) {
                    assert_eq!(after, parameter, "{}", what(0));
                    continue;
                }
                assert_eq!(
                    (&answer[0].fresh, &answer[0].dropped),
                    (&copies(&to, &from), &copies(&from, &to)),
                    "{}",
                    what(0)
                );
                for (i, ((before, after), x)) in before.iter().zip(&after).zip(&parameter).enumerate() {
                    let lost = (after - before).abs();
                    assert!(
                        lost <= bound(&to, dtype, *before, *x),
                        "{}: {after} for {before} beside {x}",
                        what(i)
                    );
                    let (narrow, is_whole) = (
                        *before as f32,
                        to.name().contains("Mixed") || to.name().contains("SplitMaster(A"),
                    );
                    let is_f32 = is_whole && f64::from(narrow) == *before;
                    // A tie is rounded to the other side where it was one of another store.
                    assert!(
                        lost == 0.0 || !is_f32 || is_tie(narrow, dtype),
                        "{}: {after} for {before} beside {x}",
                        what(i)
                    );
                }
                state
                    .check_masters(&x)
                    .unwrap_or_else(|error| panic!("{}: {error}", what(0)));
                step(&mut state, &x, 9);
            }
        }
    }
}

/// The copy of the parameter that `Offload` alone has besides.
fn copies(of: &Optimiser, other: &Optimiser) -> Vec<String> {
    let has_copy =
        |optimiser: &Optimiser| optimiser.name().contains("Offload") && !optimiser.name().contains("Mixed");
    if has_copy(of) && !has_copy(other) {
        vec!["master".to_string()]
    } else {
        Vec::new()
    }
}

fn is_tie(number: f32, dtype: DType) -> bool {
    let round = |number: f32| {
        let number = Tensor::new(number, &Device::Cpu)
            .and_then(|number| number.to_dtype(dtype))
            .expect("a number");
        values(&number)[0]
    };
    round(number.next_up()) != round(number.next_down())
}

/// Masters that are split and put together again have the bits of those that never were.
#[test]
fn a_run_with_other_masters_in_between_has_the_same_bits() {
    let mixed = || MixedPrecision::new(DType::F32, Momentum::new(1e-3));
    let (x, y) = (
        model(&[tensor(1, &[700], DType::BF16)]),
        model(&[tensor(1, &[700], DType::BF16)]),
    );
    let (mut left, mut replaced) = (
        setup(mixed(), &x).expect("a state"),
        setup(mixed(), &y).expect("a state"),
    );
    for call in 0..12 {
        match call % 4 {
            1 => drop(
                replaced
                    .all()
                    .replace(SplitMaster::new(Momentum::new(1e-3)), &y)
                    .expect("a split master"),
            ),
            3 => drop(replaced.all().replace(mixed(), &y).expect("a master")),
            _ => {}
        }
        step(&mut left, &x, call);
        step(&mut replaced, &y, call);
        assert_eq!(
            (bits(&x["0"]), bits(&masters(&left, &x))),
            (bits(&y["0"]), bits(&masters(&replaced, &y))),
            "call {call}"
        );
    }
}

/// Without a master nothing would show that the parameter is not the one that a copy was taken from.
#[test]
fn a_parameter_that_was_changed_is_refused_where_its_master_goes_and_a_copy_stays() {
    let x = model(&[tensor(1, &[7], DType::BF16)]);
    let rule = || OptimiserChain::new((Momentum::new(0.1), Lookahead::new(6)));
    let stochastic = || StochasticRounding::new(7, rule());
    let mut state = setup(MixedPrecision::new(DType::F32, rule()), &x).expect("a state");
    step(&mut state, &x, 1);
    let unchanged = state.all().replace(stochastic(), &x).expect("no master");
    assert!(unchanged[0].kept.contains(&"1.slow".to_string()));

    let mut state = setup(MixedPrecision::new(DType::F32, rule()), &x).expect("a state");
    step(&mut state, &x, 1);
    x["0"].set(&tensor(5, &[7], DType::BF16)).expect("other numbers");
    let before = snapshot(&x, &state);
    let error = state
        .all()
        .replace(stochastic(), &x)
        .expect_err("another parameter");
    is_kind(&error, ErrorKind::Changed, &["its value is", "`refresh_masters`"]);
    assert_same(&[snapshot(&x, &state)], &[before], "replaced");
    // Without the copy nothing is taken over that follows from the old weights.
    state
        .all()
        .replace(StochasticRounding::new(7, Momentum::new(0.1)), &x)
        .expect("a velocity");

    // A fresh copy has the new weights.
    let mut state = setup(MixedPrecision::new(DType::F32, Momentum::new(0.1)), &x).expect("a state");
    step(&mut state, &x, 1);
    x["0"].set(&tensor(5, &[7], DType::BF16)).expect("other numbers");
    let replaced = state.all().replace(stochastic(), &x).expect("a copy");
    assert!(replaced[0].kept.contains(&"0.velocity".to_string()));
    let slow = state.leaf("0").and_then(|leaf| leaf.tensor("1.slow").ok());
    assert_eq!(slow.map(|slow| values(&slow)), Some(values(&x["0"])));

    // Without masters the next update decides: it refuses what follows from the old weights.
    let nexts: [(Box<dyn Rule>, bool); 2] = [
        (Box::new(Hyperball::new(Momentum::new(0.1))), false),
        (
            Box::new(OptimiserChain::new((Momentum::new(0.1), Lookahead::new(3)))),
            true,
        ),
    ];
    for (next, is_refused) in nexts {
        let x = model(&[tensor(1, &[7], DType::F32)]);
        let mut state = setup(rule(), &x).expect("a state");
        step(&mut state, &x, 1);
        x["0"].set(&tensor(5, &[7], DType::F32)).expect("other numbers");
        let replaced = state.all().replace(next, &x).expect("a rule");
        assert!(replaced[0].kept.iter().any(|name| name.ends_with("velocity")));
        let outcome = update(&mut state, &x, &grads([Some(tensor(2, &[7], DType::F32))]));
        assert_eq!(outcome.is_err(), is_refused, "{outcome:?}");
    }
}

/// A master in another form would hide that the parameter is another.
#[test]
fn a_parameter_that_was_changed_is_refused_where_its_master_is_converted() {
    let x = model(&[tensor(1, &[7], DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.1)), &x).expect("a state");
    let changed = || x["0"].set(&tensor(5, &[7], DType::BF16)).expect("other numbers");
    // Before the first step the parameter decides.
    changed();
    state
        .all()
        .replace(SplitMaster::new(Descent::new(0.1)), &x)
        .expect("a split master");
    assert_eq!(values(&masters(&state, &x)), values(&x["0"]));
    state
        .all()
        .replace(MixedPrecision::new(DType::F32, Descent::new(0.1)), &x)
        .expect("a master");
    step(&mut state, &x, 1);
    changed();
    let before = snapshot(&x, &state);
    let error = state
        .all()
        .replace(SplitMaster::new(Descent::new(0.1)), &x)
        .expect_err("another parameter");
    is_kind(&error, ErrorKind::Changed, &["its value is"]);
    assert_same(&[snapshot(&x, &state)], &[before], "replaced");
}

/// What was read is put back to the bit.
#[test]
fn masters_that_were_read_are_put_back() {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for optimiser in stores(dtype) {
            for steps in [0, 1, 20] {
                let (x, mut state) = prepared(optimiser.clone(), dtype, steps);
                let before = snapshot(&x, &state);
                let read = state.masters(&x).expect("masters");
                state.set_masters(&x, &read).expect("the same values");
                assert_same(
                    &[snapshot(&x, &state)],
                    &[before],
                    (optimiser.name(), dtype, steps),
                );
            }
        }
    }
    // The compensation is rounded up to half a unit, so that the sum lies between two numbers.
    let x = model(&[Tensor::new(&[0.341_796_875f64, -3.0], &Device::Cpu)
        .and_then(|x| x.to_dtype(DType::BF16))
        .expect("a tensor")]);
    let mut state = setup(Kahan::new(Descent::new(1.0)), &x).expect("a state");
    let gradient = Tensor::new(&[-9.764e-4f32, 7.811e-3], &Device::Cpu).expect("a tensor");
    update(&mut state, &x, &grads([Some(gradient)])).expect("an update");
    let before = snapshot(&x, &state);
    assert_eq!(values(&x["0"]), [0.341_796_875, -3.0]);
    let read = state.masters(&x).expect("masters");
    assert_eq!(
        values(&read["0"]),
        [0.341_796_875 + 9.765_625e-4, -3.0 - 7.812_5e-3]
    );
    state.set_masters(&x, &read).expect("the same values");
    assert_same(&[snapshot(&x, &state)], &[before], "between two numbers");
}
