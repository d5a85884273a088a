//! Gradients from stores and maps, tied variables, what leaves and outcomes tell, and whole models in
//! training.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Module, ModuleT, Tensor, Var};
use candle_nn::{BatchNormConfig, Conv2dConfig, Embedding, Init, Linear, VarBuilder, VarMap};
use optimisers::{
    AccumGrad, Adam, ClipGlobalNorm, ClipGrad, Descent, ErrorKind, FieldValue, Kahan, MixedPrecision,
    Momentum, NonFinite, Optimiser, OptimiserChain, Parameter, Schedule, Setup, SkipReason, StateTree,
    Status, WeightDecay, model, setup, setup_with, update,
};

use crate::model::models::{CPU, integers, of, plain, squares, trained, var_map};
use support::common::{Grads, Vars, bits, is_kind, not_finite, random, values, var};
use support::threads::on;

#[test]
fn gradients_from_anywhere() {
    let run = |step: &dyn Fn(&mut StateTree, &Vars) -> optimisers::Result<optimisers::Outcome>| {
        let model: Vars = [("a", 3), ("b", 4)]
            .map(|(name, size)| (name.to_string(), var(&plain(&[size]))))
            .into();
        let mut state = setup(
            OptimiserChain::new((ClipGlobalNorm::new(0.5), Adam::new(0.1))),
            &model,
        )
        .unwrap();
        let norms = [(); 3].map(|()| step(&mut state, &model).unwrap().global_norm.map(f64::to_bits));
        (norms, model.values().map(|x| bits(x)).collect::<Vec<_>>())
    };
    let twice = |x: &Var| (x.as_detached_tensor() * 2.0).unwrap();
    let expected = run(&|state, model| update(state, model, &squares(model.values())));
    let own = |model: &Vars| {
        model
            .iter()
            .map(|(path, x)| (path.clone(), twice(x)))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        run(&|state, model| update(state, model, &own(model).into_iter().collect::<BTreeMap<_, _>>())),
        expected
    );
    assert_eq!(
        run(&|state, model| update(state, model, &own(model).into_iter().collect::<HashMap<_, _>>())),
        expected
    );
    let lent = |model: &Vars| [("b", twice(&model["b"])), ("a", twice(&model["a"]))];
    assert_eq!(
        run(&|state, model| update(state, model, &BTreeMap::from(lent(model)))),
        expected
    );
    assert_eq!(
        run(&|state, model| update(state, model, &HashMap::from(lent(model)))),
        expected
    );
    let with_others = |state: &mut StateTree, model: &Vars| {
        let mut grads = squares(model.values());
        for other in [
            plain(&[3]),
            trained(&[4]),
            integers().as_tensor().clone(),
            of(&[f64::INFINITY], DType::F32),
        ] {
            grads.insert(&other, other.clone());
        }
        update(state, model, &grads)
    };
    assert_eq!(
        run(&with_others),
        expected,
        "what else is in a store does not count"
    );
}

struct LanguageModel {
    head: Linear,
    embedding: Embedding,
}
model!(LanguageModel { head, embedding });

#[test]
fn a_tied_weight_is_one_leaf() {
    let weight = trained(&[5, 3]);
    let model = LanguageModel {
        head: Linear::new(weight.clone(), Some(trained(&[5]))),
        embedding: Embedding::new(weight.clone(), 3),
    };
    let mut asked = Vec::new();
    let choose = |path: &str, _: Parameter<'_>| {
        asked.push(path.to_string());
        Some(OptimiserChain::new((
            ClipGlobalNorm::new(1e9),
            Momentum::new(0.5),
        )))
    };
    let mut state = setup_with(&model, choose).unwrap();
    assert_eq!(asked, ["embedding.weight", "head.weight", "head.bias"]);
    assert_eq!((state.len(), state.bytes()), (2, 4 * (15 + 5)));
    let tied = ["embedding.weight", "head.weight"];
    for path in tied {
        let leaf = state.leaf(path).unwrap();
        assert_eq!(
            (leaf.path(), leaf.paths().collect::<Vec<_>>()),
            (tied[0], tied.to_vec())
        );
    }

    let tokens = Tensor::new(&[0u32, 4, 4], CPU).unwrap();
    let grads = model
        .head
        .forward(&model.embedding.forward(&tokens).unwrap())
        .unwrap()
        .sqr()
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let (old, summed) = (weight.copy().unwrap(), grads.get(&weight).unwrap().clone());
    let norm = [&summed, grads.get(model.head.bias().unwrap()).unwrap()]
        .iter()
        .flat_map(|x| values(x))
        .map(|x| x * x)
        .sum::<f64>()
        .sqrt();
    let outcome = update(&mut state, &model, &grads).unwrap();
    assert!((outcome.global_norm.unwrap() / norm - 1.0).abs() < 1e-12);
    assert_eq!((outcome.applied, state.leaf(tied[1]).unwrap().steps()), (2, 1));
    assert_eq!(bits(&weight), bits(&(old - (summed * 0.5).unwrap()).unwrap()));

    state.at("head").unwrap().freeze();
    assert!(
        state.leaf(tied[0]).unwrap().is_frozen(),
        "selected by its other name"
    );
}

/// The rows: dtype, parameter, gradients under the two names, learning rate, result. The sum is not a number
/// of the dtype.
#[test]
fn gradients_of_both_names_are_added_in_the_compute_type() {
    let (first, second) = ("embed", "head");
    for (dtype, x, grads, eta, expected) in [
        (
            DType::F16,
            2048.0,
            vec![(first, 2048.0), (second, 1.0)],
            1.0,
            -1.0,
        ),
        (
            DType::F16,
            0.0,
            vec![(first, 60000.0), (second, 60000.0)],
            0.25,
            -30000.0,
        ),
        (
            DType::F16,
            0.0,
            vec![(first, 60000.0), (second, -60000.0)],
            1.0,
            0.0,
        ),
        (DType::BF16, 256.0, vec![(second, 1.0), (first, 256.0)], 1.0, -1.0),
        (DType::F32, 1.0, vec![(first, 2.0), (second, 3.0)], 1.0, -4.0),
        (
            DType::F64,
            0.0,
            vec![(first, 1.0), (second, 2f64.powi(-40))],
            1.0,
            -1.0 - 2f64.powi(-40),
        ),
        (DType::F16, 1.0, vec![(second, 4.0)], 1.0, -3.0),
        (DType::F16, 1.0, vec![(first, 4.0)], 1.0, -3.0),
    ] {
        for rule in [
            Optimiser::new(Descent::new(eta)),
            Optimiser::new(MixedPrecision::new(DType::F32, Descent::new(eta))),
        ] {
            let shared = var(&of(&[x; 3], dtype));
            let map = var_map([second, first].map(|name| (name.to_string(), shared.clone())));
            let mut state = setup(rule, &map).unwrap();
            let by_path: HashMap<&str, Tensor> = grads
                .iter()
                .map(|&(name, gradient)| (name, of(&[gradient; 3], dtype)))
                .collect();
            assert_eq!(update(&mut state, &map, &by_path).unwrap().applied, 1);
            assert_eq!(values(&shared), [expected; 3], "{dtype:?}, {grads:?}");
            assert_eq!(state.leaf(first).unwrap().steps(), 1);
        }
    }
}

#[test]
fn a_leaf_tells_what_it_holds() {
    let long = OptimiserChain::new((
        AccumGrad::new(2),
        ClipGlobalNorm::new(1.0),
        OptimiserChain::new((Momentum::new(0.2), WeightDecay::new(0.1))),
    ));
    let adam = || OptimiserChain::new((ClipGrad::new(0.5), Adam::new(0.1)));
    type Row = (
        Optimiser,
        DType,
        &'static [&'static str],
        &'static [(&'static str, u64)],
        (u64, usize),
        Option<f64>,
    );
    // After three calls: optimiser, dtype, tensors, counters, steps and bytes, learning rate.
    let rows: [Row; 7] = [
        (
            Optimiser::new(Adam::new(0.1)),
            DType::F16,
            &["m", "v"],
            &[("t", 3)],
            (3, 48),
            Some(0.1),
        ),
        (
            Optimiser::new(Adam::new(0.1)),
            DType::F64,
            &["m", "v"],
            &[("t", 3)],
            (3, 96),
            Some(0.1),
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
            DType::BF16,
            &["master", "m", "v"],
            &[("t", 3)],
            (3, 72),
            Some(0.1),
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, adam())),
            DType::F32,
            &["master", "1.m", "1.v"],
            &[("0.t", 3), ("1.t", 3)],
            (3, 144),
            Some(0.1),
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, adam())),
            DType::F32,
            &["1.m", "1.v"],
            &[("0.t", 3), ("1.t", 3)],
            (3, 48),
            Some(0.1),
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, long)),
            DType::F16,
            &["master", "0.acc", "2.0.velocity"],
            &[
                ("0.calls", 1),
                ("0.received", 1),
                ("0.weight", 1),
                ("2.0.t", 1),
                ("2.1.t", 1),
            ],
            (1, 72),
            Some(0.2),
        ),
        (
            Optimiser::new(ClipGlobalNorm::new(1.0)),
            DType::F32,
            &[],
            &[],
            (3, 0),
            None,
        ),
    ];
    for (rule, dtype, tensors, counters, (steps, bytes), eta) in rows {
        let model = Vars::from([("a.b".to_string(), var(&random(1, &[2, 3], dtype, CPU)))]);
        let mut state = setup(rule.clone(), &model).unwrap();
        for _ in 0..3 {
            update(&mut state, &model, &squares(model.values())).unwrap();
        }
        let leaf = state.leaf("a.b").unwrap();
        assert_eq!(
            (leaf.path(), leaf.paths().count(), leaf.shape(), leaf.dtype()),
            ("a.b", 1, &[2, 3][..], dtype.into()),
            "{rule:?}"
        );
        assert_eq!(leaf.tensor_names(), tensors, "{rule:?}");
        assert_eq!(
            leaf.counters(),
            counters
                .iter()
                .map(|&(name, count)| (name.to_string(), count))
                .collect::<Vec<_>>(),
            "{rule:?}"
        );
        assert_eq!(
            (leaf.steps(), leaf.bytes(), state.bytes()),
            (steps, bytes, bytes),
            "{rule:?}"
        );
        assert_eq!(
            (leaf.learning_rate(), leaf.field("eta")),
            (eta, eta.map(FieldValue::Real)),
            "{rule:?}"
        );
        assert_eq!(
            (leaf.field("rho").is_some(), leaf.field("nonsense")),
            (tensors.contains(&"2.0.velocity"), None),
            "{rule:?}"
        );
        let wide = if tensors.contains(&"master") || dtype == DType::F64 {
            leaf.bytes() / 6 / tensors.len()
        } else {
            4
        };
        for name in tensors {
            let tensor = leaf.tensor(name).unwrap();
            assert_eq!(
                (tensor.dims(), tensor.dtype().size_in_bytes()),
                (&[2, 3][..], wide),
                "{rule:?} {name}"
            );
        }
        let shown = format!("{state:?}");
        let of_state: Vec<&str> = shown
            .lines()
            .nth(2)
            .expect("two lines")
            .split_inclusive(' ')
            .collect();
        assert_eq!(shown.lines().count(), 1 + 2 * state.len(), "{shown}");
        assert!(
            leaf.tensor_names()
                .iter()
                .all(|name| of_state.contains(&&*format!("{name} "))),
            "{shown}"
        );
        assert!(
            shown.contains(&format!("{:?}", leaf.acting())) && !shown.contains("0x"),
            "{shown}"
        );
        let unknown = leaf.tensor("nonsense").unwrap_err();
        is_kind(
            &unknown,
            ErrorKind::UnknownName,
            &[leaf.path(), "nonsense", &leaf.tensor_names().join(", ")],
        );
    }
}

/// What an outcome says in every call, as the number of leaves that moved, accumulated, are frozen, and had
/// no gradient.
#[test]
fn outcomes_count_the_leaves() {
    use Became::{Accumulated, NotFinite, NothingToMove, Stepped};

    #[derive(Clone, Copy, PartialEq)]
    enum Became {
        Stepped,
        Accumulated,
        NothingToMove,
        /// For the first gradient.
        NotFinite,
    }

    impl Became {
        fn status(self) -> Status {
            match self {
                Stepped => Status::Stepped,
                Accumulated => Status::Accumulated,
                NothingToMove => Status::Skipped(SkipReason::NothingToMove),
                NotFinite => not_finite("0"),
            }
        }
    }

    let rule = |n| {
        OptimiserChain::new((
            AccumGrad::new(n),
            ClipGlobalNorm {
                non_finite: NonFinite::Skip,
                ..ClipGlobalNorm::new(0.1)
            },
            Descent::new(0.1),
        ))
    };
    type Row = (
        u64,
        &'static [usize],
        &'static [usize],
        f64,
        &'static [(Became, [usize; 4])],
    );
    // Window, frozen leaves, leaves with gradients, the gradients' factor, and what each call says.
    let rows: [Row; 9] = [
        (
            1,
            &[],
            &[0, 1, 2, 3],
            1.0,
            &[(Stepped, [4, 0, 0, 0]), (Stepped, [4, 0, 0, 0])],
        ),
        (1, &[], &[1], 1.0, &[(Stepped, [1, 0, 0, 3])]),
        (1, &[0, 1], &[1, 2], 1.0, &[(Stepped, [1, 0, 2, 1])]),
        (1, &[0, 1], &[0, 1], 1.0, &[(NothingToMove, [0, 0, 2, 2])]),
        (1, &[0, 1, 2, 3], &[0, 3], 1.0, &[(NothingToMove, [0, 0, 4, 0])]),
        (
            2,
            &[],
            &[0, 1, 2, 3],
            1.0,
            &[
                (Accumulated, [0, 4, 0, 0]),
                (Stepped, [4, 0, 0, 0]),
                (Accumulated, [0, 4, 0, 0]),
            ],
        ),
        (
            2,
            &[3],
            &[0, 3],
            1.0,
            &[(Accumulated, [0, 1, 1, 2]), (Stepped, [1, 0, 1, 2])],
        ),
        (1, &[3], &[0, 1], f64::INFINITY, &[(NotFinite, [0, 0, 1, 1])]),
        (
            2,
            &[3],
            &[0, 1],
            f64::NAN,
            &[(Accumulated, [0, 2, 1, 1]), (NotFinite, [0, 0, 1, 1])],
        ),
    ];
    let dtypes = [DType::F16, DType::BF16, DType::F32, DType::F64];
    for (row, (n, frozen, given, factor, calls)) in rows.into_iter().enumerate() {
        let model: Vars = (0..4)
            .map(|i| {
                (
                    i.to_string(),
                    var(&random(i as u64, &[1 + 30 * i], dtypes[i], CPU)),
                )
            })
            .collect();
        let mut state = setup(rule(n), &model).unwrap();
        frozen
            .iter()
            .for_each(|i| state.at(&i.to_string()).unwrap().freeze());
        let gradient =
            |i: &usize| (random(9 + *i as u64, &[1 + 30 * i], dtypes[*i], CPU) * factor).expect("a gradient");
        let grads: Grads = given.iter().map(|i| (i.to_string(), gradient(i))).collect();
        let moving: Vec<usize> = given.iter().copied().filter(|i| !frozen.contains(i)).collect();
        let norm = moving
            .iter()
            .flat_map(|i| values(&grads[&i.to_string()]))
            .map(|x| x * x)
            .sum::<f64>()
            .sqrt();
        let mut steps = 0;
        for (call, &(became, counts)) in calls.iter().enumerate() {
            let before: Vec<_> = model.values().map(|x| bits(x)).collect();
            let outcome = update(&mut state, &model, &grads).unwrap();
            let got = [
                outcome.applied,
                outcome.accumulated,
                outcome.frozen,
                outcome.without_gradient.len(),
            ];
            assert_eq!(
                (outcome.status, got),
                (became.status(), counts),
                "row {row}, call {call}"
            );
            match outcome.global_norm {
                Some(got) if norm.is_finite() => {
                    assert!((got / norm - 1.0).abs() < 1e-12, "row {row}: {got} for {norm}")
                }
                Some(got) => assert!(!got.is_finite(), "row {row}"),
                None => assert!(became == Accumulated || moving.is_empty(), "row {row}"),
            }
            steps += u64::from(became == Stepped);
            for (i, (x, before)) in model.values().zip(before).enumerate() {
                let moves = became == Stepped && moving.contains(&i);
                assert_eq!(
                    (bits(x) != before, state.leaf(&i.to_string()).unwrap().steps()),
                    (moves, steps * u64::from(moving.contains(&i)))
                );
            }
        }
    }
}

/// A `HashMap` of variables has no order of its own, so neither the order in which they were made nor its
/// seed may count.
#[test]
fn the_order_of_insertion_does_not_count() {
    let run = |order: &[usize], from_store: bool| {
        let map = var_map(order.iter().map(|&i| {
            (
                format!("layer.{i}"),
                var(&random(i as u64, &[1 + i % 7], DType::F32, CPU)),
            )
        }));
        let mut state = setup(
            OptimiserChain::new((ClipGlobalNorm::new(0.5), Adam::new(0.05))),
            &map,
        )
        .unwrap();
        let variables: BTreeMap<String, Var> = map
            .data()
            .lock()
            .unwrap()
            .iter()
            .map(|(path, x)| (path.clone(), x.clone()))
            .collect();
        let mut norms = Vec::new();
        for _ in 0..4 {
            let outcome = if from_store {
                let in_this_order: Vec<&Var> =
                    order.iter().map(|i| &variables[&format!("layer.{i}")]).collect();
                update(&mut state, &map, &squares(in_this_order))
            } else {
                let gradient = |i: &usize| {
                    (
                        format!("layer.{i}"),
                        (variables[&format!("layer.{i}")].as_detached_tensor() * 2.0).unwrap(),
                    )
                };
                update(
                    &mut state,
                    &map,
                    &order.iter().map(gradient).collect::<HashMap<_, _>>(),
                )
            };
            norms.push(outcome.unwrap().global_norm.map(f64::to_bits));
        }
        assert_eq!(
            state.leaves().map(|leaf| leaf.path()).collect::<Vec<_>>(),
            variables.keys().collect::<Vec<_>>()
        );
        (norms, variables.values().map(|x| bits(x)).collect::<Vec<_>>())
    };
    let ascending: Vec<usize> = (0..300).collect();
    let shuffled: Vec<usize> = (0..300).map(|i| (i * 77 + 5) % 300).collect();
    let expected = run(&ascending, true);
    for (order, from_store) in [(&shuffled, true), (&ascending, false), (&shuffled, false)] {
        assert!(run(order, from_store) == expected, "from a store: {from_store}");
    }
}

/// A convolutional network of candle-nn, once with the running statistics left out and once with all that the
/// map holds. The tree remembers the order in which a model shows its variables, but does not rely on it.
#[test]
fn a_model_may_show_its_variables_in_another_order_each_time() {
    let x = [1, 2, 3, 4].map(|size| var(&plain(&[size])));
    let shown = |order: &[usize]| order.iter().map(|&i| x[i].clone()).collect::<Vec<_>>();
    let mut state = setup(Descent::new(0.5), &shown(&[2, 0, 1, 3])).unwrap();
    for order in [[2, 0, 1, 3], [0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 1, 3]] {
        let before = x.each_ref().map(|x| values(x));
        assert_eq!(
            update(&mut state, &shown(&order), &squares(&x)).unwrap().applied,
            4
        );
        for (x, before) in x.iter().zip(before) {
            // The gradient of the squares is twice the parameter.
            assert_eq!(
                values(x),
                before.iter().map(|x| x - 0.5 * 2.0 * x).collect::<Vec<_>>()
            );
            x.set(&plain(x.dims())).unwrap();
        }
    }
    let error = update(&mut state, &shown(&[2, 0, 1]), &squares(&x)).unwrap_err();
    assert!(error.to_string().contains('3'), "{error}");
    let other = var(&plain(&[1]));
    let error = update(
        &mut state,
        &[shown(&[2, 0, 1, 3]), vec![other]].concat(),
        &squares(&x),
    )
    .unwrap_err();
    assert!(error.to_string().contains('4'), "{error}");
}

#[test]
fn a_network_trains_through_its_var_map() {
    for leave_out in [true, false] {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, CPU);
        let conv = candle_nn::conv2d(
            1,
            4,
            3,
            Conv2dConfig {
                padding: 1,
                ..Default::default()
            },
            vb.pp("conv"),
        )
        .unwrap();
        let norm = candle_nn::batch_norm(4, BatchNormConfig::default(), vb.pp("norm")).unwrap();
        let head = candle_nn::linear(4 * 5 * 5, 2, vb.pp("head")).unwrap();
        vb.get_with_hints(2, "scale", Init::Const(1.0)).unwrap();
        let mut state = setup_with(&map, |path, _| {
            (!leave_out || !path.contains("running_")).then(|| Adam::new(0.01))
        })
        .unwrap();
        let x = random(3, &[16, 1, 5, 5], DType::F32, CPU);
        let labels = x
            .mean((1, 2, 3))
            .unwrap()
            .gt(0.0)
            .unwrap()
            .to_dtype(DType::U32)
            .unwrap();
        let statistics = || [bits(norm.running_mean()), bits(norm.running_var())];
        let mut losses = Vec::new();
        for _ in 0..25 {
            let before = statistics();
            let hidden = norm
                .forward_t(&conv.forward(&x).unwrap(), true)
                .unwrap()
                .relu()
                .unwrap();
            let loss = candle_nn::loss::cross_entropy(
                &head.forward(&hidden.flatten_from(1).unwrap()).unwrap(),
                &labels,
            )
            .unwrap();
            let moved = statistics();
            assert!(moved != before, "candle moves the statistics");
            let outcome = update(&mut state, &map, &loss.backward().unwrap()).unwrap();
            let idle = if leave_out { 1 } else { 3 };
            assert_eq!(
                (outcome.status, outcome.applied, outcome.without_gradient.len()),
                (Status::Stepped, 6, idle)
            );
            assert_eq!(statistics(), moved, "and nobody else");
            losses.push(values(&loss)[0]);
        }
        let (first, last) = (losses[0], losses[24]);
        assert!(last < 0.5 * first, "the loss went from {first} to {last}");
    }
}

/// What is not in the table of a state: ties, schedules, what is frozen, parts of ranks and what they send.
#[test]
fn a_state_in_words() {
    let words = on(2, |world| {
        let x = var(&plain(&[40_000]));
        let model = BTreeMap::from([("a", x.clone()), ("b", x), ("c", var(&plain(&[1])))]);
        let setup = Setup::over(&world).wire(|_, _| Some(DType::BF16));
        let mut state = setup.build(Kahan::new(Momentum::new(0.5)), &model).unwrap();
        state.schedule(Schedule::linear(0.25, 0.0, 4)).unwrap();
        state.at("c").unwrap().freeze();
        update(&mut state, &model, &squares(model.values())).unwrap();
        format!("{state:?}")
    });
    assert_eq!(
        words[0],
        r#"StateTree after 1 steps: 2 parameters of 40001 elements, 65536 bytes of state
"a" = "b" [40000] F32, elements 0..16384, gradient sent in BF16, eta 0.1875 by a schedule, steps 1: Kahan(compensated, Momentum { eta: 0.5, rho: 0.9 })
    velocity F32 [16384], t 1
"c" [1] F32, elements 0..0, gradient sent in BF16, eta 0.1875 by a schedule, steps 0, frozen: Kahan(compensated, Momentum { eta: 0.5, rho: 0.9 })
    velocity F32 [0], t 0"#
    );
}
