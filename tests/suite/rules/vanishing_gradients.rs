//! Gradients that vanish for so long that all means of them do, that are hardly above zero, and that come
//! back: no quotient of norms or sums makes infinities of them.

use candle_core::{DType, Tensor};
use optimisers::{
    Adjust, Kahan, Kind, LAMB, LARS, MixedPrecision, Optimiser, OptimiserChain, Parameter, Q8, Rule, Sam,
    SplitMaster, StoreAs, Update, setup, setup_with, update,
};

use support::common::{
    Grads, Vars, constant, engines, grads, model, rules_and_chains, snapshot, values, var,
};

/// Elements that are enough for a state in 8 bits.
const CODED: usize = 4096;

/// Ones; none, while means decay to the smallest numbers and beyond; the smallest numbers, after these and at
/// once.
const PHASES: [(usize, f64); 9] = [
    (5, 1.0),
    (1100, 0.0),
    (100, 1e-42),
    (5, 1.0),
    (100, 1e-44),
    (5, 1.0),
    (200, 1e-38),
    (385, 0.0),
    (100, 1.0),
];

/// The rule in each way to store a parameter, which the path names.
fn stored(rule: &dyn Rule, path: &str) -> Optimiser {
    let rule = dyn_clone::clone_box(rule);
    match path {
        "bare" => Optimiser::new(rule),
        "master" => Optimiser::new(MixedPrecision::new(DType::F32, rule)),
        "split" => Optimiser::new(SplitMaster::new(rule)),
        "split in 24" => Optimiser::new(SplitMaster::of_24_bits(rule)),
        "kahan" => Optimiser::new(Kahan::new(rule)),
        _ => Optimiser::new(StoreAs::all(Q8, rule)),
    }
}

/// The number that is not finite after so many calls, if there is one.
fn first_that_is_not_finite(rule: &dyn Rule) -> Option<String> {
    let [brain, single] = [DType::BF16, DType::F32];
    let stores =
        [("bare", single), ("master", brain), ("split", brain), ("split in 24", brain), ("kahan", brain)];
    let matrix = |dtype: DType| constant(3.0, 6, dtype).reshape((2, 3)).expect("a matrix");
    // Functions of whole tensors take their time, and so does arithmetic on thousands of denormal numbers.
    let kept = if rule.is_divisible() { stores.len() } else { 2 };
    let mut parameters: Vec<(&str, Tensor)> =
        stores.into_iter().take(kept).map(|(path, dtype)| (path, matrix(dtype))).collect();
    let has_norms = rule.is_divisible() && rule.kind() != Kind::Elementwise;
    parameters.extend(has_norms.then(|| ("8 bits", constant(3.0, CODED, DType::F32))));
    let x: Vars = parameters.iter().map(|(path, values)| (path.to_string(), var(values))).collect();
    let mut state = setup_with(&x, |path, _: Parameter<'_>| Some(stored(rule, path))).expect("a state");
    let mut call = 0;
    for (count, size) in PHASES {
        let of_size = |size: f64| -> Grads {
            let gradient = |x: &Tensor| {
                x.ones_like().and_then(|ones| ones.to_dtype(DType::F32)? * size).expect("a gradient")
            };
            parameters.iter().map(|(path, x)| (path.to_string(), gradient(x))).collect()
        };
        let signs = [of_size(size), of_size(-size)];
        for step in 0..count {
            update(&mut state, &x, &signs[step % 3 / 2]).expect("an update");
        }
        call += count;
        let mut all = snapshot(&x, &state).into_iter();
        let found = all.find(|(_, numbers)| numbers.iter().any(|&bits| !f64::from_bits(bits).is_finite()));
        if let Some((name, _)) = found {
            return Some(format!("{name} of {} after {call} calls", rule.name()));
        }
    }
    None
}

#[test]
fn no_rule_makes_infinities_of_gradients_that_vanish() {
    let bad: Vec<String> =
        rules_and_chains().iter().filter_map(|rule| first_that_is_not_finite(&**rule)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

/// As in the arithmetic of F32 everywhere, where the sum of squares of such numbers is 0. In F64 it is not.
#[test]
fn a_norm_whose_square_is_zero_counts_as_zero() {
    let rules: [(&str, Box<dyn Rule>); 2] = [
        ("LAMB", Box::new(LAMB { epsilon: 1.0, ..LAMB::new(0.5) })),
        ("LARS", Box::new(LARS { trust: 1.0, ..LARS::new(0.5) })),
    ];
    for (name, rule) in rules {
        for engine in engines() {
            for (dtype, gradient, parameter) in [
                (DType::F32, 1e-25, 4.0),
                (DType::F32, 1e-44, 4.0),
                (DType::F32, 1e-15, 2.0),
                (DType::F64, 1e-25, 2.0),
            ] {
                let x = model(&[constant(4.0, 3, dtype)]);
                let mut state = setup(rule.clone(), &x).expect("a state");
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&x, &grads([Some(constant(gradient, 3, dtype))]))
                    .expect("an update");
                let moved = values(&x["0"])[0];
                assert!(
                    (moved - parameter).abs() < 1e-5,
                    "{name} {engine:?} {dtype:?} {gradient:e}: {moved}"
                );
            }
        }
    }
}

/// Zeros for as long as a training lasts: a mean that rounding holds at a few of the smallest numbers is
/// none.
#[test]
fn a_parameter_without_gradients_comes_to_rest() {
    for rule in [Box::new(LAMB::default()) as Box<dyn Rule>, Box::new(LARS::default())] {
        let x = model(&[constant(3.0, 4, DType::F32)]);
        let mut state = setup(rule.clone(), &x).expect("a state");
        let mut calls = |count: usize, size: f64| {
            let gradient = grads([Some(constant(size, 4, DType::F32))]);
            (0..count).for_each(|_| drop(update(&mut state, &x, &gradient).expect("an update")));
            values(&x["0"])
        };
        calls(5, 1.0);
        let rested = calls(2000, 0.0);
        assert_eq!(calls(60_000, 0.0), rested, "{}", rule.name());
    }
}

/// A factor that F32 has no number for is its largest, in rules of users and in the ascent of `Sam`.
#[test]
fn a_factor_beyond_all_numbers_is_the_largest() {
    use optimisers::{Flow, Gradient, Norm, Result, State, hyper_parameters, range};

    hyper_parameters! {
        /// Gives each gradient this norm.
        pub struct Normalise {
            /// The norm.
            size: f64 = 1.0 => range::positive,
        }
    }

    impl Rule for Normalise {
        fn apply<'a>(
            &'a self,
            _state: &'a mut State,
            _x: Parameter<'a>,
            dx: Gradient<'a>,
        ) -> Result<Flow<'a>> {
            let size = self.size;
            Ok(Flow::Step(dx.scale_by_norm(Norm::new(2.0), move |norms| size / norms.gradient)))
        }
    }

    for engine in engines() {
        for (dtype, gradient, step) in [
            (DType::F32, 0.0, 0.0),
            (DType::F32, 1e-42, 3.4e-4),
            (DType::F32, -1e-42, -3.4e-4),
            (DType::F64, 1e-42, 1.0),
            (DType::F64, 0.0, 0.0),
        ] {
            let x = model(&[constant(0.0, 1, dtype)]);
            let mut state = setup(OptimiserChain::new((Normalise::default(),)), &x).expect("a state");
            let gradient = grads([Some(constant(gradient, 1, dtype))]);
            Update::new(&mut state).engine(engine).apply(&x, &gradient).expect("an update");
            let moved = values(&x["0"])[0];
            assert!((moved + step).abs() <= 0.01 * step.abs(), "{engine:?} {dtype:?}: {moved} for {}", -step);

            let climbed = Sam::new(0.5)
                .ascend(Update::new(&mut state).engine(engine), &x, &gradient)
                .expect("an ascent");
            let here = values(&x["0"])[0];
            assert!(here.is_finite(), "{engine:?} {dtype:?}: {here}");
            climbed.restore().expect("the parameter");
        }
    }
}
