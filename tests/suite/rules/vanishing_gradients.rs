//! Gradients that vanish for so long that all means of them do, that are hardly above zero, and that come
//! back: no quotient of norms or sums makes infinities of them.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    Adjust, ClipGlobalNorm, ClipNorm, Descent, Hyperball, Kahan, Kind, LAMB, LARS, LossScaler,
    MixedPrecision, Optimiser, OptimiserChain, Parameter, Q8, Rule, Sam, SplitMaster, StoreAs, Update, setup,
    setup_with, update,
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
    let stores = [
        ("bare", single),
        ("master", brain),
        ("split", brain),
        ("split in 24", brain),
        ("kahan", brain),
    ];
    let matrix = |dtype: DType| constant(3.0, 6, dtype).reshape((2, 3)).expect("a matrix");
    // Functions of whole tensors take their time, and so does arithmetic on thousands of denormal numbers.
    let kept = if rule.is_divisible() { stores.len() } else { 2 };
    let mut parameters: Vec<(&str, Tensor)> = stores
        .into_iter()
        .take(kept)
        .map(|(path, dtype)| (path, matrix(dtype)))
        .collect();
    let has_norms = rule.is_divisible() && rule.kind() != Kind::Elementwise;
    parameters.extend(has_norms.then(|| ("8 bits", constant(3.0, CODED, DType::F32))));
    let x: Vars = parameters
        .iter()
        .map(|(path, values)| (path.to_string(), var(values)))
        .collect();
    let mut state = setup_with(&x, |path, _: Parameter<'_>| Some(stored(rule, path))).expect("a state");
    let mut call = 0;
    for (count, size) in PHASES {
        let of_size = |size: f64| -> Grads {
            let gradient = |x: &Tensor| {
                x.ones_like()
                    .and_then(|ones| ones.to_dtype(DType::F32)? * size)
                    .expect("a gradient")
            };
            parameters
                .iter()
                .map(|(path, x)| (path.to_string(), gradient(x)))
                .collect()
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
    let bad: Vec<String> = rules_and_chains()
        .iter()
        .filter_map(|rule| first_that_is_not_finite(&**rule))
        .collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

/// As in the arithmetic of F32 everywhere, where the sum of squares of such numbers is 0. In F64 it is not.
#[test]
fn a_norm_whose_square_is_zero_counts_as_zero() {
    let rules: [(&str, Box<dyn Rule>); 2] = [
        (
            "LAMB",
            Box::new(LAMB {
                epsilon: 1.0,
                ..LAMB::new(0.5)
            }),
        ),
        (
            "LARS",
            Box::new(LARS {
                trust: 1.0,
                ..LARS::new(0.5)
            }),
        ),
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
    for rule in [
        Box::new(LAMB::default()) as Box<dyn Rule>,
        Box::new(LARS::default()),
    ] {
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
            Ok(Flow::Step(dx.scale_by_norm(Norm::new(2.0), move |norms| {
                size / norms.gradient
            })))
        }
    }

    for engine in engines() {
        for (dtype, gradient, step) in [
            (DType::F32, 0.0, 0.0),
            (DType::F32, 1e-42, 3.4e-4),
            (DType::F32, -1e-42, -3.4e-4),
            (DType::F64, 1e-42, 1.0),
            (DType::F64, 1e-153, 1.0),
            (DType::F64, 0.0, 0.0),
            // The squares of these are subnormal, or 0.
            (DType::F64, 1e-155, 0.0),
            (DType::F64, -1e-200, 0.0),
            (DType::F64, 5e-324, 0.0),
        ] {
            let x = model(&[constant(0.0, 1, dtype)]);
            let mut state = setup(OptimiserChain::new((Normalise::default(),)), &x).expect("a state");
            let gradient = grads([Some(constant(gradient, 1, dtype))]);
            Update::new(&mut state)
                .engine(engine)
                .apply(&x, &gradient)
                .expect("an update");
            let moved = values(&x["0"])[0];
            assert!(
                (moved + step).abs() <= 0.01 * step.abs(),
                "{engine:?} {dtype:?}: {moved} for {}",
                -step
            );

            let climbed = Sam::new(0.5)
                .ascend(Update::new(&mut state).engine(engine), &x, &gradient)
                .expect("an ascent");
            let (here, up) = (
                values(&x["0"])[0],
                step.signum() * 0.5 * f64::from(u8::from(step != 0.0)),
            );
            assert!(
                (here - moved).abs() <= 0.5,
                "{engine:?} {dtype:?}: {here} for {moved}"
            );
            assert!(
                dtype == DType::F32 || (here - moved - up).abs() < 1e-12,
                "{engine:?} {dtype:?}: {here} for {moved} and {up}"
            );
            climbed.restore().expect("the parameter");
        }
    }
}

/// In F64 the squares of numbers below 1.5e-154 lose digits, and a quotient by the root of their sum could be
/// as long as it likes.
#[test]
fn a_norm_of_vanishing_squares_makes_no_long_step() {
    let rules: [(&str, Box<dyn Rule>); 4] = [
        (
            "LAMB",
            Box::new(LAMB {
                epsilon: 1.0,
                lambda: 0.0,
                ..LAMB::new(0.5)
            }),
        ),
        (
            "LARS",
            Box::new(LARS {
                trust: 1.0,
                lambda: 0.0,
                ..LARS::new(0.5)
            }),
        ),
        ("Hyperball", Box::new(Hyperball::new(Descent::new(0.5)))),
        (
            "ClipNorm",
            Box::new(OptimiserChain::new((ClipNorm::new(1.0), Descent::new(0.5)))),
        ),
    ];
    let mut numbers = vec![1.5e-162; 1 << 16];
    numbers[7] = 1e-161;
    let mixed = Tensor::from_vec(numbers, 1 << 16, &Device::Cpu).expect("a tensor");
    for gradient in [
        mixed,
        constant(1e-155, 8, DType::F64),
        constant(1e-200, 8, DType::F64),
    ] {
        let first = constant(4.0, gradient.elem_count(), DType::F64);
        for engine in engines() {
            let gradients = grads([Some(gradient.clone())]);
            for (name, rule) in &rules {
                let x = model(std::slice::from_ref(&first));
                let mut state = setup(rule.clone(), &x).expect("a state");
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&x, &gradients)
                    .expect("an update");
                let moved = values(&x["0"])
                    .into_iter()
                    .map(|x| (x - 4.0).abs())
                    .fold(0.0, f64::max);
                assert!(moved < 1e-15, "{name} {engine:?}: {moved:e}");
            }
            let x = model(std::slice::from_ref(&first));
            let mut state = setup(Descent::new(0.1), &x).expect("a state");
            for sam in [Sam::new(0.5), Sam::new(0.0), Sam::new(0.5).adaptive()] {
                let update = Update::new(&mut state).engine(engine);
                let climbed = sam.ascend(update, &x, &gradients).expect("an ascent");
                assert_eq!(
                    (climbed.norm(), values(&x["0"])),
                    (Some(0.0), values(&first)),
                    "{sam:?} {engine:?}"
                );
                climbed.restore().expect("the parameter");
            }
        }
    }
}

/// What has a direction in F64 has none in F32, whose squares end at 2.6e-23.
#[test]
fn a_sphere_has_the_directions_of_its_arithmetic() {
    for (dtype, size, moves) in [
        (DType::F32, 1e-22, true),
        (DType::F32, 1e-24, false),
        (DType::F64, 1e-24, true),
        (DType::F64, 1e-150, true),
    ] {
        for engine in engines() {
            let x = model(&[constant(4.0, 2, dtype)]);
            let mut state = setup(Hyperball::new(Descent::new(0.5)), &x).expect("a state");
            let gradient = Tensor::new(&[size, 0.0], &Device::Cpu).and_then(|size| size.to_dtype(dtype));
            let gradients = grads([Some(gradient.expect("a gradient"))]);
            Update::new(&mut state)
                .engine(engine)
                .apply(&x, &gradients)
                .expect("an update");
            let moved = values(&x["0"])[0] != 4.0;
            assert_eq!(moved, moves, "{engine:?} {dtype:?} {size:e}");
        }
    }
}

/// A scale and a clip together are one factor only where F32 has all digits of it.
#[test]
fn a_factor_is_not_merged_into_a_subnormal_number() {
    for (limit, engine) in [2.5e-8, 2.5e-7, 1.25e-5, 0.5]
        .into_iter()
        .flat_map(|limit| engines().into_iter().map(move |engine| (limit, engine)))
    {
        let scale = 2f64.powi(127);
        let x = model(&[constant(0.0, 1, DType::F32)]);
        let mut scaler = LossScaler::fixed(scale);
        let rule = OptimiserChain::new((ClipGlobalNorm::new(limit), Descent::new(1.0)));
        let mut state = setup(rule, &x).expect("a state");
        let gradients = grads([Some(constant(0.75 * scale, 1, DType::F32))]);
        let _ = scaler.factor().expect("a scale");
        let update = Update::new(&mut state).engine(engine).scaler(&mut scaler);
        update.apply(&x, &gradients).expect("an update");
        let moved = values(&x["0"])[0];
        assert!(
            (moved / -limit - 1.0).abs() < 1e-6,
            "{engine:?}: {moved:e} for {limit:e}"
        );
    }
}
