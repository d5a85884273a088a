//! Warnings: which a state meets, where they are, and how often they are said.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Accumulator, Adam, Checkpoint, ClipGlobalNorm, Descent, Error, ErrorKind, GradientSlices,
    Kahan, LossScaler, MixedPrecision, Optimiser, OptimiserChain, ParameterSlices, Sam, SplitMaster, Status,
    StochasticRounding, StoreAs, Update, Warning, setup, setup_with, update,
};

use support::common::{Vars, constant, given_up, grads, is_kind, logged, model};
use support::crafted_checkpoints::{file_of, open};

fn tensor(length: usize, dtype: DType) -> Tensor {
    constant(1.0, length, dtype)
}

fn of_dtypes(dtypes: &[DType]) -> Vars {
    model(&dtypes.iter().map(|dtype| tensor(3, *dtype)).collect::<Vec<_>>())
}

fn ones(model: &Vars) -> support::common::Grads {
    grads(model.values().map(|x| x.ones_like().ok()))
}

fn low(bf16: usize, f16: usize, paths: &[&str]) -> Warning {
    Warning::LowPrecision {
        bf16,
        f16,
        paths: paths.iter().map(|path| path.to_string()).collect(),
    }
}

const MIXED: [DType; 4] = [DType::BF16, DType::F32, DType::F16, DType::BF16];

#[test]
fn parameters_of_16_bits_under_a_bare_rule_are_warned_of_from_setup_on_and_said_once() {
    let model = of_dtypes(&MIXED);
    let expected = low(2, 1, &["0", "2", "3"]);
    let (mut state, lines) = logged(|| setup(Adam::new(0.1), &model).expect("a state"));
    assert_eq!(
        (state.warnings(), lines),
        (&[expected.clone()][..], vec![]),
        "a program can still say that it is meant"
    );
    let text = expected.to_string();
    let remedies = [
        "`MixedPrecision::new(F32, ..)`",
        "`Kahan`",
        "`StochasticRounding`",
        "`Selection::allow_low_precision`",
    ];
    for words in [
        "2 BF16 parameters lose every step below 2⁻⁹",
        "1 F16 parameter loses every step below 2⁻¹²",
        ": 0, 2, 3.",
    ]
    .iter()
    .chain(&remedies)
    {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let (outcomes, lines) =
        logged(|| [(); 3].map(|()| update(&mut state, &model, &ones(&model)).expect("an update")));
    assert_eq!(lines, [text]);
    assert_eq!(
        outcomes.map(|outcome| outcome.warnings),
        [vec![expected.clone()], vec![], vec![]]
    );
    assert_eq!(state.warnings(), std::slice::from_ref(&expected));

    let mut copy = state.try_clone().expect("a copy");
    let (outcome, lines) = logged(|| update(&mut copy, &model, &ones(&model)).expect("an update"));
    assert_eq!(
        (outcome.warnings, lines, copy.warnings()),
        (vec![], vec![], &[expected][..])
    );
}

/// The bound: what is below it moves no element, for all significands.
#[test]
fn a_step_below_the_bound_moves_nothing() {
    for (dtype, bound) in [(DType::BF16, 2f64.powi(-9)), (DType::F16, 2f64.powi(-12))] {
        let sizes: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 / 4096.0).collect();
        let x = Tensor::new(&sizes[..], &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .expect("a tensor");
        let model = model(std::slice::from_ref(&x));
        let mut state = setup(Descent::new(0.99 * bound), &model).expect("a state");
        for sign in [1.0, -1.0] {
            let gradient = x.to_dtype(DType::F32).and_then(|x| x.affine(sign, 0.0)).ok();
            update(&mut state, &model, &grads([gradient])).expect("an update");
            assert_eq!(
                support::common::bits(&model["0"]),
                support::common::bits(&x),
                "{dtype:?}"
            );
        }
    }
}

#[test]
fn what_keeps_small_steps_is_not_warned_of() {
    let adam = || Adam::new(0.1);
    let kept: [Optimiser; 4] = [
        Optimiser::new(MixedPrecision::new(DType::F32, adam())),
        Optimiser::new(Kahan::new(adam())),
        Optimiser::new(StochasticRounding::new(0, adam())),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            StoreAs::new([("m", DType::BF16)], adam()),
        )),
    ];
    for optimiser in kept {
        let name = optimiser.name();
        let state = setup(optimiser, &of_dtypes(&MIXED)).expect("a state");
        assert_eq!(state.warnings(), [], "{name}");
    }
    assert_eq!(
        setup(SplitMaster::new(adam()), &of_dtypes(&[DType::BF16]))
            .expect("a state")
            .warnings(),
        []
    );
    assert_eq!(
        setup(adam(), &of_dtypes(&[DType::F32, DType::F64]))
            .expect("a state")
            .warnings(),
        []
    );

    // Sums in 16 bits were asked for, and an ascent is no training.
    let model = of_dtypes(&[DType::BF16]);
    let mut state = setup(MixedPrecision::new(DType::F32, adam()), &model).expect("a state");
    let ((), lines) = logged(|| {
        let mut accumulator = Accumulator::new(DType::BF16, &model).expect("an accumulator");
        accumulator.add(&ones(&model)).expect("gradients");
        Sam::new(0.1)
            .ascend(Update::new(&mut state), &model, &ones(&model))
            .and_then(|climbed| climbed.restore())
            .expect("an ascent");
    });
    assert_eq!((lines, state.warnings()), (vec![], &[][..]));
}

#[test]
fn every_way_to_give_a_leaf_an_optimiser_is_looked_at() {
    let model = of_dtypes(&[DType::BF16, DType::F32]);
    let mut state = setup_with(&model, |path, _| (path == "1").then(|| Adam::new(0.1))).expect("a state");
    assert_eq!(state.warnings(), []);
    state
        .add_with(&model, |_, _| Some(Adam::new(0.1)))
        .expect("another leaf");
    assert_eq!(state.warnings(), [low(1, 0, &["0"])]);
    state
        .all()
        .replace(MixedPrecision::new(DType::F32, Adam::new(0.1)), &model)
        .expect("another optimiser");
    assert_eq!(state.warnings(), []);
    state
        .all()
        .replace(Adam::new(0.2), &model)
        .expect("another optimiser");
    assert_eq!(state.warnings(), [low(1, 0, &["0"])]);

    let more = of_dtypes(&[DType::BF16, DType::F32, DType::F16]);
    let mut state = setup(Adam::new(0.1), &of_dtypes(&[DType::F32])).expect("a state");
    state.rebind(&model_with("0", &more["1"])).expect("the same");
    state.rename("", "a").expect("a name");
    state
        .add(Adam::new(0.1), &model_with("f16", &more["2"]))
        .expect("a leaf");
    assert_eq!(state.warnings(), [low(0, 1, &["f16"])]);

    let mut weights = [half::bf16::ONE; 4];
    let slices = ParameterSlices::new()
        .with("w", 4, &mut weights[..])
        .expect("slices");
    let mut state = setup(Adam::new(0.1), &slices).expect("a state");
    let outcome = update(
        &mut state,
        &slices,
        &GradientSlices::new().with("w", &[1f32; 4][..]).expect("slices"),
    )
    .expect("an update");
    assert_eq!(outcome.warnings, [low(1, 0, &["w"])]);
}

fn model_with(path: &str, x: &candle_core::Var) -> Vars {
    Vars::from([(path.to_string(), x.clone())])
}

#[test]
fn what_is_meant_is_not_said() {
    let model = of_dtypes(&MIXED);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    state.at("0").expect("a leaf").allow_low_precision();
    assert_eq!(state.warnings(), [low(1, 1, &["2", "3"])]);
    // Frozen ones lose nothing.
    state.at("2").expect("a leaf").freeze();
    assert_eq!(state.warnings(), [low(1, 0, &["3"])]);
    // A file says what is frozen.
    let mut frozen = setup(Adam::new(0.1), &model).expect("a state");
    assert_eq!(frozen.warnings().len(), 1);
    let mut saved = frozen.try_clone().expect("a copy");
    saved.all().freeze();
    open(&file_of(Checkpoint::new(&saved)))
        .and_then(|file| file.restore(&mut frozen))
        .expect("the state");
    assert!(
        !frozen
            .warnings()
            .iter()
            .any(|warning| matches!(warning, Warning::LowPrecision { .. }))
    );
    let mut all = state.try_clone().expect("a copy");
    all.all().allow_low_precision();
    let (outcome, lines) = logged(|| update(&mut all, &model, &ones(&model)).expect("an update"));
    assert_eq!(
        (all.warnings(), outcome.warnings, lines),
        (&[][..], vec![], vec![])
    );
    let outcome = update(&mut state, &model, &ones(&model)).expect("an update");
    assert_eq!(outcome.warnings, [low(1, 0, &["3"])]);
}

fn not_finite(path: &str, index: usize) -> Warning {
    Warning::ParameterNotFinite {
        path: path.to_string(),
        index,
    }
}

#[test]
fn a_number_that_is_not_finite_is_named_by_the_update_that_has_written_it() {
    for (number, dtype) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .into_iter()
        .flat_map(|n| [DType::F32, DType::BF16, DType::F64].map(|d| (n, d)))
    {
        let model = model(&[tensor(64, dtype), tensor(64, dtype)]);
        let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.1)), &model).expect("a state");
        let mut numbers = vec![0f32; 64];
        numbers[37] = number;
        let bad = Tensor::new(&numbers[..], &Device::Cpu).ok();
        let zeros = || Some(constant(0.0, 64, DType::F32));
        let calm = grads(vec![Some(tensor(64, DType::F32)); 2]);
        assert_eq!(update(&mut state, &model, &calm).expect("an update").warnings, []);
        let skipped = Update::new(&mut state)
            .finite_only()
            .apply(&model, &grads([zeros(), bad.clone()]))
            .expect("an outcome");
        assert_eq!(
            (skipped.status, skipped.warnings),
            (support::common::not_finite("1"), vec![])
        );
        let (outcome, lines) =
            logged(|| update(&mut state, &model, &grads([zeros(), bad])).expect("an update"));
        assert_eq!(outcome.warnings, [not_finite("1", 37)], "{number} in {dtype:?}");
        assert!(
            lines[0].contains("element 37 of \"1\"")
                && lines[0].contains("`Update::finite_only`")
                && lines.len() == 1,
            "{lines:?}"
        );
        assert_eq!(
            update(&mut state, &model, &calm).expect("an update").warnings,
            [],
            "once"
        );
    }
}

/// A loss of NaN has such gradients everywhere: seen in the same call. In one leaf of many it is seen when
/// its turn comes.
#[test]
fn a_loss_that_is_not_a_number_is_seen_at_once_and_one_bad_parameter_in_turn() {
    const LEAVES: usize = 40;
    let large = || model(&vec![tensor(1000, DType::F32); LEAVES]);
    let (nan, zero) = (
        constant(f64::NAN, 1000, DType::F32),
        constant(0.0, 1000, DType::F32),
    );
    let model = large();
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let outcome = update(&mut state, &model, &grads(vec![Some(nan.clone()); LEAVES])).expect("an update");
    assert_eq!(outcome.warnings, [not_finite("0", 0)]);

    let model = large();
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let calls: Vec<usize> = (0..4)
        .map(|_| {
            let one = (0..LEAVES).map(|leaf| {
                Some(if leaf == LEAVES - 1 {
                    nan.clone()
                } else {
                    zero.clone()
                })
            });
            update(&mut state, &model, &grads(one))
                .expect("an update")
                .warnings
                .len()
        })
        .collect();
    assert_eq!(calls.iter().sum::<usize>(), 1, "{calls:?}");
    assert!(
        calls[3] == 0,
        "of 40 parameters all have been looked at in three calls: {calls:?}"
    );

    // A clipping rule refuses it before anything is written.
    let model = large();
    let mut state = setup(
        OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1))),
        &model,
    )
    .expect("a state");
    let refused =
        update(&mut state, &model, &grads(vec![Some(nan); LEAVES])).expect_err("a norm that is not finite");
    is_kind(&refused, ErrorKind::NotFinite, &["norm of its gradient is NaN"]);
    assert_eq!(state.warnings(), []);
}

#[test]
fn each_kind_is_met_by_itself() {
    let model = of_dtypes(&[DType::BF16, DType::BF16]);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let bad = grads([Some(constant(f64::NAN, 3, DType::F32)), None]);
    let (outcome, lines) = logged(|| update(&mut state, &model, &bad).expect("an update"));
    let [without, others @ ..] = &outcome.warnings[..] else {
        panic!("warnings")
    };
    assert!(
        matches!(without, Warning::WithoutGradient { missing: 1, parameters: 2, paths, remedy }
            if *paths == ["1"] && remedy.contains("`audit(&model, &loss)` shows"))
    );
    assert_eq!(others, [low(2, 0, &["0", "1"]), not_finite("0", 0)]);
    assert_eq!(
        lines,
        outcome
            .warnings
            .iter()
            .map(Warning::to_string)
            .collect::<Vec<_>>()
    );
    assert_eq!(state.warnings(), outcome.warnings);
    let (again, lines) = logged(|| update(&mut state, &model, &bad).expect("an update"));
    assert_eq!((again.warnings, lines), (vec![], vec![]));
}

#[test]
fn windows_that_are_given_up_are_named_once() {
    let model = of_dtypes(&[DType::F32]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(2), Descent::new(0.1))),
        &model,
    )
    .expect("a state");
    let large = grads([Some(constant(3e38, 3, DType::F32))]);
    let mut calls = || {
        Update::new(&mut state)
            .finite_only()
            .apply(&model, &large)
            .expect("an outcome")
    };
    let (outcomes, lines) = logged(|| [(); 4].map(|()| calls()));
    let accumulated = || Status::Accumulated;
    let statuses = [accumulated(), given_up("0"), accumulated(), given_up("0")];
    assert_eq!(
        outcomes.each_ref().map(|outcome| outcome.status.clone()),
        statuses
    );
    let expected = Warning::WindowsGivenUp {
        path: "0".to_string(),
    };
    assert_eq!(
        outcomes.map(|outcome| outcome.warnings),
        [vec![], vec![expected.clone()], vec![], vec![]]
    );
    assert_eq!(lines, [expected.to_string()]);
}

/// `{:?}` is what a `main` prints that returns an error.
#[test]
fn debug_of_an_error_is_its_text_and_the_alternate_form_its_facts() {
    let model = of_dtypes(&[DType::F32]);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let wrong = update(&mut state, &model, &grads([Some(tensor(2, DType::F32))])).expect_err("another shape");
    assert_eq!(format!("{wrong:?}"), wrong.to_string());
    let facts = |error: &Error, known: &[&str]| {
        let listed = format!("{error:#?}").split_whitespace().collect::<String>();
        known
            .iter()
            .for_each(|fact| assert!(listed.contains(fact), "no {fact} in {listed}"));
    };
    facts(
        &wrong,
        &[
            "kind:Tensor,",
            "got:Some(\"[2]\",),",
            "expected:Some(\"[3]\",),",
            "path:Some(\"0\",),",
        ],
    );
    let inner =
        setup(MixedPrecision::new(DType::BF16, Adam::new(0.1)), &model).expect_err("a master in BF16");
    assert_eq!(format!("{inner:?}"), inner.to_string());
    facts(
        &inner,
        &[
            "kind:Argument,",
            "got:Some(\"BF16\",),",
            "expected:Some(\"F32orF64\",),",
            "element:None,",
        ],
    );
    let gradients = grads([Some(tensor(3, DType::F32))]);
    let unscaled = Update::new(&mut state)
        .scaler(&mut LossScaler::dynamic())
        .apply(&model, &gradients)
        .expect_err("a loss that was not scaled");
    facts(&unscaled, &["kind:LossScale,", "path:None,"]);
    assert!(format!("{unscaled:?}").starts_with("the gradients are of a loss that was not scaled"));
}
