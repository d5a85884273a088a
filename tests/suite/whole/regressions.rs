//! Defects that were reported once, a short test for each. Only what older versions have, too, is used, so
//! that the file can be run against them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::DType::{BF16, F16, F32};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use optimisers::{
    AccumGrad, Adam, AdamW, Average, ClipGlobalNorm, ClipNorm, Descent, Ema, Flow, Gradient, Kahan,
    Lookahead, MixedPrecision, NonFinite, OptimiserChain, Parameter, Result, Rule, Sam, Schedule,
    ScheduleFree, State, StateTree, Status, StoreAs, Update, config, setup, setup_with, update,
};

const CPU: &Device = &Device::Cpu;
fn var(values: &[f32]) -> Var {
    Var::new(values, CPU).unwrap()
}
fn of(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}
fn grads<const N: usize>(values: [(&str, &Tensor); N]) -> BTreeMap<String, Tensor> {
    values
        .into_iter()
        .map(|(path, dx)| (path.to_string(), dx.clone()))
        .collect()
}
fn one(dx: &[f32]) -> BTreeMap<String, Tensor> {
    grads([("0", &Tensor::new(dx, CPU).unwrap())])
}
fn model(x: &Var) -> Vec<Var> {
    vec![x.clone()]
}

#[derive(Clone, Debug)]
struct Smaller(Adam);
impl optimisers::Describe for Smaller {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Smaller");
    }
}
impl Rule for Smaller {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        Rule::init(
            &self.0,
            Parameter::from(&Tensor::zeros(16, x.dtype().into(), x.device())?),
        )
    }
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.0.apply(state, x, dx)
    }
}

#[test]
fn slots_of_another_size_are_refused() {
    let x = Var::zeros(64, F32, CPU).unwrap();
    let mut state = setup(Smaller(Adam::new(0.1)), &model(&x)).unwrap();
    assert!(update(&mut state, &model(&x), &one(&[1.0; 64])).is_err());
}

#[test]
fn set_masters_reaches_what_rules_keep_of_the_parameter() {
    let rules: Vec<Box<dyn Rule>> = vec![
        Box::new(ScheduleFree::new(0.1)),
        Box::new(OptimiserChain::new((Descent::new(0.1), Lookahead::new(1)))),
    ];
    for rule in rules {
        let x = var(&[0.0]);
        let mut state = setup(rule, &model(&x)).unwrap();
        state.set_masters(&model(&x), &one(&[10.0])).unwrap();
        update(&mut state, &model(&x), &one(&[1.0])).unwrap();
        assert!(of(&x)[0] > 9.0, "{:?}", of(&x));
    }
}

#[test]
fn weights_that_arrive_after_setup_are_not_overwritten() {
    let x = var(&[0.0]);
    let mut state = setup(ScheduleFree::new(0.1), &model(&x)).unwrap();
    x.set(&Tensor::new(&[10f32], CPU).unwrap()).unwrap();
    let refused = update(&mut state, &model(&x), &one(&[1.0])).is_err();
    assert!(refused || of(&x)[0] > 9.0, "{:?}", of(&x));
}

#[test]
fn running_statistics_stay_where_averages_come() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, F32, CPU);
    let norm = candle_nn::batch_norm(2, 1e-5, builder).unwrap();
    let mut state = setup(OptimiserChain::new((Adam::new(0.01), Ema::new(0.9))), &variables).unwrap();
    let batch = (Tensor::randn(5f32, 2f32, (32, 2), CPU).unwrap()).detach();
    for _ in 0..20 {
        let loss = norm
            .forward_t(&batch, true)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap();
        update(&mut state, &variables, &loss.backward().unwrap()).unwrap();
    }
    let before = of(norm.running_mean());
    let inside = state
        .with_averages(&variables, || Ok::<_, optimisers::Error>(of(norm.running_mean())))
        .unwrap();
    assert_eq!(inside, before);
}

#[test]
fn masters_do_not_refuse_statistics_that_move() {
    let variables = VarMap::new();
    let norm = candle_nn::batch_norm(2, 1e-5, VarBuilder::from_varmap(&variables, F32, CPU)).unwrap();
    let mut state = setup(MixedPrecision::new(DType::F64, Adam::new(0.01)), &variables).unwrap();
    for step in 0..3 {
        let batch = Tensor::randn(5f32, 2f32, (32, 2), CPU).unwrap();
        let loss = norm
            .forward_t(&batch, true)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap();
        update(&mut state, &variables, &loss.backward().unwrap())
            .unwrap_or_else(|error| panic!("{step}: {error}"));
    }
}

#[test]
fn a_window_that_is_shortened_divides_by_what_it_counted() {
    let x = var(&[0.0]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(8), Descent::new(1.0))),
        &model(&x),
    )
    .unwrap();
    for _ in 0..5 {
        update(&mut state, &model(&x), &one(&[1.0])).unwrap();
    }
    state.all().adjust_field("n", 2).unwrap();
    for _ in 0..3 {
        update(&mut state, &model(&x), &one(&[1.0])).unwrap();
    }
    assert!(
        of(&x)[0] >= -1.000001 * 3.0 && (of(&x)[0] + of(&x)[0].abs().round()).abs() < 1e-6,
        "{:?}",
        of(&x)
    );
}

#[test]
fn a_leaf_that_was_frozen_in_a_window_steps_with_the_others() {
    let (x, y) = (var(&[0.0]), var(&[0.0]));
    let both = vec![x, y];
    let dx = grads([
        ("0", &Tensor::new(&[3f32], CPU).unwrap()),
        ("1", &Tensor::new(&[4f32], CPU).unwrap()),
    ]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(1e9), Descent::new(1.0))),
        &both,
    )
    .unwrap();
    state.at("1").unwrap().freeze();
    update(&mut state, &both, &dx).unwrap();
    state.at("1").unwrap().thaw();
    for _ in 0..7 {
        let outcome = update(&mut state, &both, &dx).unwrap();
        assert!(
            outcome.global_norm.is_none_or(|norm| norm != 4.0),
            "the leaves step apart: {outcome:?}"
        );
    }
}

fn weighted() -> OptimiserChain<(AccumGrad, AdamW)> {
    OptimiserChain::new((
        AccumGrad {
            average: Average::Weighted,
            ..AccumGrad::new(2)
        },
        AdamW {
            lambda: 0.5,
            ..AdamW::new(0.1)
        },
    ))
}

#[test]
fn a_gradient_of_weight_0_is_not_read() {
    let x = var(&[1.0]);
    let mut state = setup(weighted(), &model(&x)).unwrap();
    Update::new(&mut state)
        .weight(0)
        .apply(&model(&x), &one(&[f32::NAN]))
        .unwrap();
    Update::new(&mut state)
        .weight(1)
        .apply(&model(&x), &one(&[1.0]))
        .unwrap();
    assert!(of(&x)[0].is_finite());
}

#[test]
fn a_window_of_weight_0_makes_no_step() {
    let x = var(&[1.0]);
    let mut state = setup(weighted(), &model(&x)).unwrap();
    for _ in 0..2 {
        Update::new(&mut state)
            .weight(0)
            .apply(&model(&x), &one(&[1.0]))
            .unwrap();
    }
    assert_eq!(of(&x), [1.0]);
}

#[test]
fn an_accumulator_that_overflows_does_not_skip_for_ever() {
    let x = Var::zeros(1, F16, CPU).unwrap();
    let chain = StoreAs::new(
        [("acc", F16)],
        OptimiserChain::new((
            AccumGrad {
                average: Average::Weighted,
                ..AccumGrad::new(2)
            },
            ClipGlobalNorm::new(1.0),
            Descent::new(0.1),
        )),
    );
    let mut state = setup(chain, &model(&x)).unwrap();
    let mut stepped = false;
    for weight in [4096, 4096, 1, 1, 1, 1] {
        let outcome = Update::new(&mut state)
            .finite_only()
            .weight(weight)
            .apply(&model(&x), &one(&[20.0]))
            .unwrap();
        stepped |= outcome.status == Status::Stepped;
    }
    assert!(stepped);
}

#[test]
fn one_gradient_under_both_names_counts_once() {
    let x = var(&[0.0]);
    let tied = BTreeMap::from([
        ("embedding".to_string(), x.clone()),
        ("head".to_string(), x.clone()),
    ]);
    let mut state = setup(Descent::new(1.0), &tied).unwrap();
    let dx = Tensor::new(&[3f32], CPU).unwrap();
    update(&mut state, &tied, &grads([("embedding", &dx), ("head", &dx)])).unwrap();
    assert_eq!(of(&x), [-3.0]);
}

/// A state whose parameters are not in the model.
fn moved_away() -> (Vec<Var>, StateTree) {
    let x = vec![Var::ones(1, BF16, CPU).unwrap()];
    let mut state = setup(
        MixedPrecision::new(F32, OptimiserChain::new((Descent::new(0.1), Ema::new(0.5)))),
        &x,
    )
    .unwrap();
    for _ in 0..3 {
        update(
            &mut state,
            &x,
            &grads([("0", &Tensor::ones(1, BF16, CPU).unwrap())]),
        )
        .unwrap();
    }
    std::mem::forget(
        Sam::new(3.0)
            .ascend(
                Update::new(&mut state),
                &x,
                &grads([("0", &Tensor::ones(1, BF16, CPU).unwrap())]),
            )
            .unwrap(),
    );
    (x, state)
}

#[test]
fn masters_are_not_refreshed_or_set_while_other_weights_are_in_the_model() {
    let (x, mut state) = moved_away();
    assert!(state.refresh_masters(&x).is_err() && state.set_masters(&x, &one(&[7.0])).is_err());
}

#[test]
fn leaves_are_not_replaced_while_other_weights_are_in_the_model() {
    let (x, mut state) = moved_away();
    assert!(state.all().replace(Descent::new(0.1), &x).is_err());
}

#[test]
fn adjust_is_linear() {
    let time = |leaves: usize| {
        let model: Vec<Var> = (0..leaves).map(|_| var(&[0.0])).collect();
        let mut state = setup_with(&model, |_, _| Some(Adam::new(0.1))).unwrap();
        (0..5)
            .map(|step| {
                let start = Instant::now();
                state.adjust(0.1 + f64::from(step)).unwrap();
                start.elapsed()
            })
            .min()
            .unwrap()
    };
    let (short, long) = (time(1000), time(8000));
    assert!(long < short * 24, "{short:?} for 1000, {long:?} for 8000");
}

#[test]
fn skipped_windows_do_not_move() {
    let (x, y) = (var(&[0.0]), var(&[0.0]));
    let both = vec![x, y];
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::new(1.0))), &both).unwrap();
    state.at("0").unwrap().freeze();
    let before = state.leaf("1").unwrap().counters();
    let outcome = update(&mut state, &both, &one(&[1.0])).unwrap();
    assert!(outcome.skipped().is_none() || state.leaf("1").unwrap().counters() == before);
}

#[test]
fn a_stable_phase_that_never_ends() {
    let schedule = Schedule::warmup_stable_decay(1.0, 0.0, 100, u64::MAX, 1000);
    assert_eq!(schedule.at(5000), 1.0);
}

#[test]
fn large_exponents_do_not_overflow() {
    let x = var(&[0.0]);
    let mut state = setup(
        OptimiserChain::new((
            ClipNorm {
                p: 64.0,
                ..ClipNorm::new(1.0)
            },
            Descent::new(1.0),
        )),
        &model(&x),
    )
    .unwrap();
    update(&mut state, &model(&x), &one(&[1e5])).unwrap();
    assert!((of(&x)[0] + 1.0).abs() < 1e-5);
}

#[test]
fn masters_beyond_f16_are_refused() {
    let x = vec![Var::zeros(1, F16, CPU).unwrap()];
    let mut state = setup(MixedPrecision::new(F32, Descent::new(0.1)), &x).unwrap();
    assert!(state.set_masters(&x, &one(&[1e6])).is_err());
}

#[test]
fn kahan_keeps_an_infinity() {
    let x = vec![Var::from_tensor(&Tensor::new(&[60000f32], CPU).unwrap().to_dtype(F16).unwrap()).unwrap()];
    let mut state = setup(Kahan::new(Descent::new(1.0)), &x).unwrap();
    for dx in [-60000f32, 0.0] {
        update(&mut state, &x, &one(&[dx])).unwrap();
    }
    assert_eq!(of(&x[0]), [f64::INFINITY]);
}

#[test]
fn a_tied_leaf_is_not_rebound_to_two_variables() {
    let x = var(&[0.0]);
    let mut state = setup(
        Descent::new(1.0),
        &BTreeMap::from([("a".to_string(), x.clone()), ("b".to_string(), x)]),
    )
    .unwrap();
    assert!(
        state
            .rebind(&BTreeMap::from([
                ("a".to_string(), var(&[0.0])),
                ("b".to_string(), var(&[0.0]))
            ]))
            .is_err()
    );
}

#[test]
fn configurations_with_many_keys_take_linear_time() {
    let text = format!(
        "{{\"Adam\":{{{}}}}}",
        (0..20_000)
            .map(|key| format!("\"k{key}\":1"))
            .collect::<Vec<_>>()
            .join(",")
    );
    let start = Instant::now();
    let _ = serde_json::from_str::<config::OptimiserConfig>(&text);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn schedule_free_stays_on_zero_gradients() {
    let x = var(&[0.1, 1.7, -3.3]);
    let mut state = setup(ScheduleFree::new(0.1), &model(&x)).unwrap();
    let start = of(&x);
    for _ in 0..3000 {
        update(&mut state, &model(&x), &one(&[0.0; 3])).unwrap();
    }
    assert_eq!(of(&x), start);
}

#[test]
fn pass_multiplies_by_zero_as_the_peers_do() {
    let x = var(&[0.0, 0.0]);
    let clip = ClipNorm {
        non_finite: NonFinite::Pass,
        ..ClipNorm::new(1.0)
    };
    let mut state = setup(OptimiserChain::new((clip, Descent::new(1.0))), &model(&x)).unwrap();
    update(&mut state, &model(&x), &one(&[5.0, f32::INFINITY])).unwrap();
    assert_eq!(of(&x)[0], 0.0);
}

#[test]
fn second_moments_are_not_stored_in_f16() {
    assert!(setup(StoreAs::new([("v", F16)], Adam::new(0.1)), &model(&var(&[0.0]))).is_err());
}

#[test]
fn choices_for_both_names_of_a_tied_weight_are_asked_for() {
    let x = var(&[0.0]);
    let tied = BTreeMap::from([("a".to_string(), x.clone()), ("b".to_string(), x)]);
    let asked = std::sync::Mutex::new(Vec::new());
    let _ = setup_with(&tied, |path: &str, _: Parameter<'_>| {
        asked.lock().unwrap().push(path.to_string());
        Some(Descent::new(0.1))
    });
    assert_eq!(asked.into_inner().unwrap().len(), 2);
}
