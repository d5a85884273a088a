//! Variables with several paths: what counts once, and who is asked.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    Adam, AdamW, Descent, ErrorKind, Fallback, GradientSlices, Lion, Model, Optimiser, OptimiserChain,
    PrecisionPolicy, Rule, SplitMaster, StoreAs, Update, Visitor, setup, setup_with, trainables, update,
};

use crate::model::models::of;
use support::common::{Grads, Vars, bits, is_kind, values, var};

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn tied(dtype: DType) -> Vars {
    let shared = var(&of(&[0.0], dtype));
    [
        ("embedding", shared.clone()),
        ("head", shared),
        ("norm", var(&of(&[0.0], dtype))),
    ]
    .map(|(path, x)| (path.to_string(), x))
    .into()
}

/// `Σ embedding + 2·Σ head`, so that both uses of a tied variable have a part of its gradient.
fn loss(model: &Vars) -> Tensor {
    let sum = |path: &str| model[path].sum_all().expect("a sum");
    ((sum("embedding") + (sum("head") * 2.0).expect("twice")).expect("both") + sum("norm")).expect("a loss")
}

/// A map that is made by visiting the model.
fn visited(model: &Vars, gradient: impl Fn(&Tensor) -> Tensor) -> Grads {
    let mut grads = Grads::new();
    model.visit(&mut Visitor::new(&mut |path, x| {
        _ = grads.insert(path.to_string(), gradient(x))
    }));
    grads
}

#[test]
fn a_gradient_under_both_names_of_a_variable_counts_once() {
    for dtype in DTYPES {
        let (model, other) = (tied(dtype), tied(dtype));
        let mut state = setup(Descent::new(1.0), &model).expect("a state");
        let store = loss(&model).backward().expect("gradients");
        let grads = visited(&model, |x| store.get(x).expect("a gradient").clone());
        let (_, next, _) = Update::functional(&state)
            .apply(&trainables(&model).expect("parameters"), &grads)
            .expect("an update");
        assert_eq!(values(&next["embedding"]), [-3.0]);
        update(&mut state, &model, &grads).expect("an update");
        assert_eq!(
            (values(&model["head"]), values(&model["norm"])),
            (vec![-3.0], vec![-1.0]),
            "{dtype:?}"
        );

        let mut state = setup(Descent::new(1.0), &other).expect("a state");
        update(&mut state, &other, &loss(&other).backward().expect("gradients")).expect("an update");
        assert_eq!(
            bits(&other["head"]),
            bits(&model["head"]),
            "as with the store itself"
        );
    }
}

/// As the same tensor does; two slices of the same numbers are two parts.
#[test]
fn a_slice_under_both_names_of_a_variable_counts_once() {
    let (shared, copy, norm) = ([2f32], vec![2f32], [1f32]);
    for (head, expected) in [(&shared[..], -2.0), (&copy[..], -4.0)] {
        let model = tied(DType::F32);
        let mut state = setup(Descent::new(1.0), &model).expect("a state");
        let grads = GradientSlices::new()
            .with("embedding", &shared)
            .and_then(|grads| grads.with("head", head)?.with("norm", &norm));
        let grads = grads.expect("gradients");
        let (_, next, _) = Update::functional(&state)
            .apply(&trainables(&model).expect("parameters"), &grads)
            .expect("an update");
        assert_eq!(
            (values(&next["embedding"]), values(&next["norm"])),
            (vec![expected], vec![-1.0]),
            "a functional update"
        );
        update(&mut state, &model, &grads).expect("an update");
        assert_eq!(
            (values(&model["embedding"]), values(&model["norm"])),
            (vec![expected], vec![-1.0])
        );
    }
}

/// One slice as the gradient of two parameters, which need not have one shape.
#[test]
fn a_slice_may_be_the_gradient_of_several_parameters() {
    let same = [1f32, 2.0, 3.0, 4.0];
    let model = [("a", [4].as_slice()), ("b", &[2, 2])];
    let model: Vars = model
        .map(|(path, shape)| {
            (
                path.to_string(),
                var(&Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros")),
            )
        })
        .into();
    let mut state = setup(Descent::new(1.0), &model).expect("a state");
    let grads = GradientSlices::new()
        .with("a", &same)
        .and_then(|grads| grads.with("b", &same))
        .expect("gradients");
    let (_, next, _) = Update::functional(&state)
        .apply(&trainables(&model).expect("parameters"), &grads)
        .expect("an update");
    update(&mut state, &model, &grads).expect("an update");
    let expected = [-1.0, -2.0, -3.0, -4.0];
    assert!(
        ["a", "b"]
            .iter()
            .all(|path| values(&model[*path]) == expected && values(&next[*path]) == expected)
    );
}

/// The same numbers in two tensors are two parts; two views of the same numbers are one.
#[test]
fn parts_of_a_gradient_are_added_up() {
    let grads = |gradient: &dyn Fn() -> Tensor| visited(&tied(DType::F32), |_| gradient());
    let two = of(&[2.0], DType::F32);
    let both = Tensor::new(&[2f32, 2.0], &Device::Cpu).expect("a tensor");
    let view = || both.narrow(0, 0, 1).expect("a view");
    let mut apart = grads(&view);
    apart.insert("head".to_string(), both.narrow(0, 1, 1).expect("the other half"));
    let cases = [
        (grads(&|| two.copy().expect("a copy")), -4.0),
        (grads(&|| two.clone()), -2.0),
        (grads(&view), -2.0),
        (apart, -4.0),
    ];
    for (case, (grads, expected)) in cases.into_iter().enumerate() {
        let model = tied(DType::F32);
        let mut state = setup(Descent::new(1.0), &model).expect("a state");
        update(&mut state, &model, &grads).expect("an update");
        assert_eq!(
            (values(&model["embedding"]), values(&model["norm"])),
            (vec![expected], vec![-2.0]),
            "case {case}"
        );
    }
}

/// The gradients under both names are the variable itself, which the update writes.
#[test]
fn a_variable_can_be_its_own_gradient_under_both_names() {
    let model = tied(DType::F32);
    model["embedding"].set(&of(&[1.0], DType::F32)).expect("a one");
    let mut state = setup(Descent::new(0.25), &model).expect("a state");
    update(&mut state, &model, &visited(&model, Tensor::clone)).expect("an update");
    assert_eq!(values(&model["head"]), [0.75]);
}

#[test]
fn every_path_is_asked() {
    let model = tied(DType::F32);
    let mut asked = Vec::new();
    let state = setup_with(&model, |path, _| {
        asked.push(path.to_string());
        Some(Descent::new(0.5))
    })
    .expect("a state");
    assert_eq!(
        (asked, state.len()),
        (["embedding", "head", "norm"].map(str::to_string).to_vec(), 2)
    );
}

type Answer = fn(&str) -> Option<Optimiser>;

#[test]
fn different_choices_for_one_variable_are_refused() {
    let cases: [(Answer, [&str; 2]); 5] = [
        (
            |path| {
                Some(if path == "head" {
                    Optimiser::new(Adam::new(0.1))
                } else {
                    Optimiser::new(AdamW::new(0.1))
                })
            },
            ["AdamW { eta: 0.1", "Adam { eta: 0.1"],
        ),
        (
            |path| {
                Some(Optimiser::new(Descent::new(if path == "head" {
                    0.1
                } else {
                    0.2
                })))
            },
            ["Descent { eta: 0.2 }", "Descent { eta: 0.1 }"],
        ),
        (
            |path| (path == "head").then(|| Optimiser::new(Descent::new(0.1))),
            ["no optimiser", "Descent { eta: 0.1 }"],
        ),
        (
            |path| {
                let slot = if path == "head" { DType::BF16 } else { DType::F64 };
                Some(Optimiser::new(SplitMaster::new(OptimiserChain::new((
                    StoreAs::new([("m", slot)], Adam::new(0.1)),
                )))))
            },
            ["StoreAs(m: F64, Adam)", "StoreAs(m: BF16, Adam)"],
        ),
        // What the names do not say.
        (
            |path| {
                let except = if path == "head" {
                    vec!["norm"]
                } else {
                    vec!["head"]
                };
                Some(Optimiser::new(
                    Fallback::new(Lion::new(0.1), Lion::new(0.1)).except(except),
                ))
            },
            ["[\"head\"]", "[\"norm\"]"],
        ),
    ];
    for (choose, words) in cases {
        let model = tied(DType::F32);
        let error = setup_with(&model, |path, _| choose(path)).expect_err("two answers");
        is_kind(
            &error,
            ErrorKind::Model,
            &[&words[..], &["\"embedding\" and \"head\" are one tied parameter"]].concat(),
        );
        assert_eq!(error.path(), Some("embedding"), "{error}");

        let part = Vars::from([("norm".to_string(), model["norm"].clone())]);
        let mut state = setup(Descent::new(1.0), &part).expect("a state");
        let error = state
            .add_with(&model, |path, _| choose(path))
            .expect_err("two answers");
        is_kind(
            &error,
            ErrorKind::Model,
            &["\"embedding\" and \"head\" are one tied parameter"],
        );
        assert_eq!(
            state.leaves().map(|leaf| leaf.path()).collect::<Vec<_>>(),
            ["norm"]
        );
        state.add_with(&model, |_, _| choose("head")).expect("one answer");
        assert_eq!(state.len(), 2);
    }
    let boxed = |path: &str| {
        if path == "head" {
            Box::new(Adam::new(0.1)) as Box<dyn Rule>
        } else {
            Box::new(Some(Adam::new(0.1)))
        }
    };
    assert_eq!(
        setup_with(&tied(DType::F32), |path, _| Some(boxed(path)))
            .expect("the same rule")
            .len(),
        2
    );
}

/// Choices of dtypes for a variable that is `embedding` and `head`, beside `head.bias` in BF16.
#[test]
fn patterns_that_contradict_each_other_are_refused() {
    use DType::{BF16, F32};
    let mut model = tied(F32);
    model.insert("head.bias".to_string(), var(&of(&[0.0], BF16)));
    let check = |choices: &[(&str, DType)]| PrecisionPolicy::new(choices.iter().copied())?.check(&model);
    check(&[("embedding", F32), ("head", F32), ("head.*", BF16), ("*", F32)])
        .expect("the same choice by two patterns");
    check(&[("head", F32), ("norm", F32), ("*", BF16)])
        .expect("a choice for one name stands before one for all");
    check(&[("head", F32), ("head.bias", BF16), ("norm", F32)]).expect("one name is enough");
    let error = check(&[("embedding", F32), ("head*", BF16), ("norm", F32)]).expect_err("two choices");
    let words = "\"embedding\" and \"head\" are one tied parameter, but the pattern \"embedding\" chooses \
                 for \"embedding\", and \"head*\" for \"head\"";
    is_kind(&error, ErrorKind::Argument, &[words]);
    assert_eq!(error.path(), Some("embedding"), "{error}");
}

#[test]
fn configured_choices_that_contradict_each_other_are_refused() {
    use optimisers::config::OptimiserConfig;
    use serde_json::{Value, json};

    let model = tied(DType::F32);
    let set_up = |head: Value| {
        let choices = [
            ("embedding", json!({"Adam": {"eta": 0.5}})),
            ("head", head),
            ("*", json!("Descent")),
        ];
        let choices = choices.map(|(pattern, optimiser)| json!({"pattern": pattern, "optimiser": optimiser}));
        serde_json::from_value::<OptimiserConfig>(json!({ "ByPath": choices }))
            .expect("a configuration")
            .setup(&model)
    };
    let state = set_up(json!({"Adam": {"eta": 0.5}})).expect("one choice");
    assert_eq!(
        state.leaf("head").and_then(|leaf| leaf.learning_rate()),
        Some(0.5)
    );
    for head in [
        json!({"Adam": {"eta": 0.25}}),
        json!("Momentum"),
        json!("LeaveOut"),
    ] {
        let error = set_up(head).expect_err("two choices");
        is_kind(
            &error,
            ErrorKind::Argument,
            &[
                "at ByPath[1].pattern",
                "\"embedding\" and \"head\" are one tied parameter, but the pattern",
            ],
        );
        assert_eq!(
            (error.place(), error.path()),
            (Some("ByPath[1].pattern"), Some("embedding")),
            "{error}"
        );
    }
}
