//! Where gradients are collected, and in which dtype they travel: ZeRO's stages 1 and 2.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, conv2d, layer_norm_no_bias, linear};
use optimisers::{
    AccumGrad, Accumulator, AdamW, Autocast, Average, CommunicationError, Communicator, Descent, Error,
    ErrorKind, LocalRank, LossScaler, MixedPrecision, Optimiser, OptimiserChain, Parameter, Setup, StoreAs,
    Update, Warning, broadcast, setup, trainables, update,
};

use crate::model::models::CPU;

use support::common::{
    Grads, Vars, assert_same, bits, constant, grads, is_kind, model, not_finite, says, snapshot, tensor,
    values,
};
use support::reports::{gradients, parameters};
use support::threads::on;

/// The bits of the parameters on each rank.
fn parameter_bits(model: &Vars) -> Vec<Vec<u64>> {
    model.values().map(|x| bits(x)).collect()
}

#[test]
fn an_accumulator_is_a_window_outside_of_the_state() {
    let weights = [3, 0, 1, 5];
    for (dtype, average) in [
        (DType::F32, Average::Mean),
        (DType::BF16, Average::Mean),
        (DType::F32, Average::Weighted),
    ] {
        let (inside, outside) = (model(&parameters(dtype)), model(&parameters(dtype)));
        let optimiser = || MixedPrecision::new(DType::F32, AdamW::new(0.1));
        let window = AccumGrad {
            average,
            ..AccumGrad::new(4)
        };
        let mut chain = setup(
            MixedPrecision::new(DType::F32, OptimiserChain::new((window, AdamW::new(0.1)))),
            &inside,
        )
        .expect("a state");
        let (mut state, mut collected) = (
            setup(optimiser(), &outside).expect("a state"),
            Accumulator::new(DType::F32, &outside).unwrap(),
        );
        for step in 0..3 {
            for (call, weight) in (0..).zip(weights) {
                // All parameters in each call: with a missing one `AccumGrad` divides by the calls, and this
                // as well.
                let gradients = gradients(2 * (4 * step + call), 0, dtype);
                let weight = if average == Average::Weighted { weight } else { 1 };
                Update::new(&mut chain)
                    .weight(weight)
                    .apply(&inside, &gradients)
                    .expect("an update");
                collected.add_weighted(&gradients, weight).expect("a sum");
            }
            assert_eq!(
                collected.weight(),
                if average == Average::Weighted { 9 } else { 4 }
            );
            update(&mut state, &outside, &collected.take().expect("means")).expect("an update");
            assert_eq!(collected.weight(), 0);
            assert_eq!(
                parameter_bits(&inside),
                parameter_bits(&outside),
                "{dtype:?}, {average:?}, step {step}"
            );
        }
    }
}

#[test]
fn an_accumulator_takes_what_an_update_takes() {
    let x = Var::from_tensor(&constant(1.0, 3, DType::F32)).unwrap();
    let model = BTreeMap::from([
        ("a", x.clone()),
        ("b", Var::from_tensor(&constant(2.0, 2, DType::F32)).unwrap()),
        ("tied", x.clone()),
    ]);
    let mut collected = Accumulator::new(DType::F32, &model).expect("an accumulator");
    assert!(collected.take().expect("nothing").inner().is_empty());
    // candle's store, both parts of a tied gradient, and none for "b".
    collected
        .add(
            &(x.as_tensor() * 2.0)
                .and_then(|y| y.sum_all()?.backward())
                .unwrap(),
        )
        .expect("a store");
    collected
        .add(&[
            ("a", constant(1.0, 3, DType::F32)),
            ("tied", constant(3.0, 3, DType::BF16)),
        ])
        .expect("a list");

    let wrong = |result: Result<(), Error>, words: &[&str]| says(&result.expect_err("an error"), words);
    wrong(
        collected.add(&[
            ("a", constant(9.0, 3, DType::F32)),
            ("b", constant(9.0, 3, DType::F32)),
        ]),
        &["\"b\"", "[2]", "[3]"],
    );
    wrong(collected.add(&[("c", constant(9.0, 3, DType::F32))]), &["\"c\""]);
    wrong(
        collected.add(&[
            ("a", constant(9.0, 3, DType::F32)),
            ("a", constant(8.0, 3, DType::F32)),
        ]),
        &["\"a\""],
    );
    collected
        .add_weighted(&[("a", constant(f64::NAN, 3, DType::F32))], 0)
        .expect("not read");
    let means = collected.take().expect("means").into_inner();
    assert_eq!(means.keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(values(&means["a"]), [3.0; 3]);

    // What was taken is not written any more.
    collected.add(&means).expect("a map");
    assert_eq!(values(&means["a"]), [3.0; 3]);
    drop(collected.take());
    assert_eq!(
        (
            collected.weight(),
            collected.take().expect("nothing").inner().len()
        ),
        (0, 0)
    );
    is_kind(
        &Accumulator::new(DType::F32, &Vars::new()).expect_err("an error"),
        ErrorKind::Model,
        &["no trainable"],
    );
    is_kind(
        &Accumulator::new(DType::U8, &model).expect_err("an error"),
        ErrorKind::Argument,
        &["`Accumulator::new`", "U8"],
    );
}

/// A rank that counts the bytes of gradients that it sends.
#[derive(Clone, Debug)]
struct Counting {
    rank: LocalRank,
    sent: Arc<AtomicUsize>,
}

impl Communicator for Counting {
    fn rank(&self) -> usize {
        self.rank.rank()
    }

    fn size(&self) -> usize {
        self.rank.size()
    }

    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.sent.fetch_add(
            to.iter().flatten().map(|slice| slice.len()).sum(),
            Ordering::Relaxed,
        );
        self.rank.exchange(to, from)
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.rank.gather(own, from)
    }
}

/// DeepSpeed's four cases of what is reduced and what is accumulated, with their bytes: where sums are exact,
/// the same bits.
#[test]
fn four_ways_to_collect_gradients() {
    const CALLS: usize = 4;
    const LENGTH: usize = 1 << 16;
    const RANKS: usize = 2;
    type Rule = fn() -> Optimiser;
    /// The dtypes of accumulators outside of the state and on the wire; the bytes per parameter of
    /// accumulators on each rank and on the wire in a window, both times 2.
    type Case = (&'static str, Rule, Option<DType>, Option<DType>, [usize; 2]);
    let adam: Rule = || Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1)));
    let inside: Rule = || {
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(CALLS as u64), AdamW::new(0.1))),
        ))
    };
    let narrow: Rule = || {
        let collect = StoreAs::new([("acc", DType::BF16)], AccumGrad::new(CALLS as u64));
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((collect, AdamW::new(0.1))),
        ))
    };
    let cases: [Case; 5] = [
        ("stage 1, same dtype", adam, Some(DType::BF16), None, [4, 2]),
        ("stage 1, other dtype", adam, Some(DType::F32), None, [8, 4]),
        (
            "stage 1, other dtype, narrow wire",
            adam,
            Some(DType::F32),
            Some(DType::BF16),
            [8, 2],
        ),
        ("stage 2, same dtype", narrow, None, None, [2, 2 * CALLS]),
        ("stage 2, other dtype", inside, None, None, [4, 2 * CALLS]),
    ];
    let mut first: Option<Vec<Vec<Vec<u64>>>> = None;
    for (what, rule, outside, wire, [held, sent]) in cases {
        let trained = on(RANKS, move |rank| {
            let world = Counting {
                rank,
                sent: Arc::default(),
            };
            let model = model(&[tensor(1, &[LENGTH], DType::BF16)]);
            let mut state = Setup::over(&world)
                .wire(move |_, _| wire)
                .build(rule(), &model)
                .expect("a state");
            let mut collected = outside.map(|dtype| Accumulator::new(dtype, &model).expect("an accumulator"));
            let mut accumulators = state.bytes() - 12 * LENGTH / RANKS;
            for call in 0..CALLS {
                // Small integers, whose sums and means have eight bits.
                let value = |index: usize| ((index * 7 + call * 5 + world.rank() * 3) % 13) as f64 - 6.0;
                let values: Vec<f64> = (0..LENGTH).map(|index| 4.0 * value(index)).collect();
                let gradients = grads([Some(
                    Tensor::new(values, crate::model::models::CPU)
                        .and_then(|g| g.to_dtype(DType::BF16))
                        .unwrap(),
                )]);
                match &mut collected {
                    Some(collected) => collected.add(&gradients).expect("a sum"),
                    None => drop(update(&mut state, &model, &gradients).expect("an update")),
                }
            }
            if let Some(collected) = &mut collected {
                let means = collected.take().expect("means").into_inner();
                accumulators += means
                    .values()
                    .map(|mean| mean.elem_count() * mean.dtype().size_in_bytes())
                    .sum::<usize>();
                update(&mut state, &model, &means).expect("an update");
            }
            assert_eq!(2 * accumulators, held * LENGTH, "{what}: bytes of accumulators");
            assert_eq!(
                2 * world.sent.load(Ordering::Relaxed),
                sent * LENGTH,
                "{what}: bytes on the wire"
            );
            parameter_bits(&model)
        });
        assert_eq!(first.get_or_insert_with(|| trained.clone()), &trained, "{what}");
    }
}

/// The parameters of three ranks after two calls with these gradients, sent in a dtype.
fn sent_in(wire: Option<DType>, of: fn(u64, u64) -> Grads) -> Vec<Vec<Vec<u64>>> {
    on(3, move |world| {
        let model = model(&parameters(DType::F32));
        let mut state = Setup::over(&world)
            .wire(move |_, _| wire)
            .build(AdamW::new(0.1), &model)
            .expect("a state");
        for call in 0..2 {
            update(&mut state, &model, &of(call, world.rank() as u64)).expect("an update");
        }
        parameter_bits(&model)
    })
}

fn rounded(call: u64, rank: u64) -> Grads {
    let round = |g: &Tensor| {
        g.to_dtype(DType::BF16)
            .and_then(|g| g.to_dtype(DType::F32))
            .unwrap()
    };
    gradients(call, rank, DType::F32)
        .iter()
        .map(|(path, g)| (path.clone(), round(g)))
        .collect()
}

#[test]
fn each_value_is_rounded_once_to_the_dtype_of_the_wire() {
    let full = |call, rank| gradients(call, rank, DType::F32);
    let expected = sent_in(None, rounded);
    assert_eq!(
        sent_in(Some(DType::BF16), rounded),
        expected,
        "values of that dtype go as they are"
    );
    assert_eq!(
        sent_in(Some(DType::BF16), full),
        expected,
        "others are rounded, those of the owner too"
    );
    assert_ne!(sent_in(None, full), expected);
    assert_eq!(
        sent_in(Some(DType::F64), full),
        sent_in(None, full),
        "nothing is widened"
    );
}

/// `Autocast` decides for arithmetic and wire alike: half of the bytes, the same bits. A list that differs
/// causes a warning.
#[test]
fn t57_the_layers_of_autocast_decide_the_wire() {
    type Wire = fn(Setup) -> Setup;
    let trained = |wire: Wire| {
        let ranks = on(2, move |rank| {
            let world = Counting {
                rank,
                sent: Arc::default(),
            };
            let (mut variables, autocast) = (VarMap::new(), Autocast::new(DType::BF16).expect("autocast"));
            let root = VarBuilder::from_varmap(&variables, DType::F32, CPU);
            let layer = |name| {
                autocast
                    .layer(root.pp(name), |builder| linear(64, 64, builder))
                    .expect("a layer")
            };
            let layers = ["hidden", "tied", "tied"].map(layer);
            let norm = autocast.layer(root.pp("norm"), |builder| layer_norm_no_bias(64, 1e-5, builder));
            let norm = norm.expect("a layer");
            for (seed, (path, x)) in (0..).zip(trainables(&variables).expect("variables")) {
                variables
                    .set_one(path, tensor(seed, x.dims(), DType::F32))
                    .expect("equal values");
            }
            let mut state = wire(Setup::over(&world))
                .build(AdamW::new(0.1), &variables)
                .expect("a state");
            let input = tensor(world.rank() as u64, &[4, 64], DType::F32);
            let output = layers
                .iter()
                .chain([&norm])
                .try_fold(input, |x, layer| layer.forward(&x));
            let loss = output.and_then(|output| output.sqr()?.sum_all()).expect("a loss");
            let gradients = loss.backward().expect("gradients");
            let outcome = update(&mut state, &variables, &gradients).expect("a step");
            assert_eq!((outcome.applied, &outcome.warnings[..]), (5, state.warnings()));
            let numbers: Vec<_> = trainables(&variables)
                .expect("variables")
                .values()
                .map(bits)
                .collect();
            (world.sent.load(Ordering::Relaxed), outcome.warnings, numbers)
        });
        let sent: usize = ranks.iter().map(|(sent, ..)| sent).sum();
        let [(_, warned, numbers), _] = <[_; 2]>::try_from(ranks).expect("two ranks");
        (sent, warned, numbers)
    };
    let differ = |parameters, path: &str, values: &str, travels: &str, loses_bits| {
        let (path, values, travels) = (path.to_string(), values.to_string(), travels.to_string());
        vec![Warning::WireDiffers {
            parameters,
            path,
            values,
            travels,
            loses_bits,
        }]
    };
    let (whole, warned, numbers) = trained(|setup| setup);
    assert_eq!(
        (whole, warned),
        (
            4 * (2 * 65 * 64 + 64),
            differ(2, "hidden.bias", "BF16", "F32", false)
        )
    );
    let halved = whole - 2 * 65 * 64;
    let ways: [(Wire, usize, Vec<Warning>); 6] = [
        (|setup| setup.wire_as_computed(), halved, vec![]),
        (
            |setup| setup.wire(|path, _| path.starts_with("hidden").then_some(DType::BF16)),
            halved,
            vec![],
        ),
        (|setup| setup.wire(|_, _| Some(DType::F32)), whole, vec![]),
        (
            |setup| setup.wire(|path, _| path.starts_with("hidden").then_some(DType::F16)),
            halved,
            differ(2, "hidden.bias", "BF16", "F16", true),
        ),
        (
            |setup| setup.wire(|_, _| Some(DType::BF16)),
            whole / 2,
            differ(3, "norm.weight", "F32", "BF16", true),
        ),
        (
            |setup| setup.wire(|path, _| path.starts_with("tied").then_some(DType::BF16)),
            halved,
            differ(2, "tied.bias", "F32", "BF16", true),
        ),
    ];
    for (way, (wire, bytes, expected)) in ways.into_iter().enumerate() {
        let (sent, warned, others) = trained(wire);
        assert_eq!((sent, warned), (bytes, expected), "{way}");
        assert_eq!(
            others == numbers,
            way < 4,
            "{way}: tied variables and the norm have gradients of F32"
        );
    }
}

/// A layer that computes in F32 for lack of a kernel.
#[test]
fn a_wire_for_layers_that_compute_in_f32() {
    let warned = on(2, |world| {
        let (variables, autocast) = (VarMap::new(), Autocast::new(DType::BF16).expect("autocast"));
        let root = VarBuilder::from_varmap(&variables, DType::F32, CPU);
        // Layers that are gone have no say.
        let norm = {
            let _gone = autocast
                .layer(root.pp("fc"), |builder| linear(2, 2, builder))
                .expect("a layer");
            autocast
                .layer(root.pp("norm"), |builder| layer_norm_no_bias(2, 1e-5, builder))
                .expect("a layer")
        };
        let conv = |name| {
            autocast
                .layer(root.pp(name), |builder| {
                    conv2d(1, 1, 1, Default::default(), builder)
                })
                .expect("a layer")
        };
        let (early, late) = (conv("early"), conv("late"));
        let input = Tensor::ones((1, 1, 2, 2), DType::F32, CPU).expect("ones");
        early.forward(&input).expect("an output");
        broadcast(&world, &variables).expect("equal values");
        let setup = || Setup::over(&world).wire_as_computed();
        let mut state = setup().build(Descent::new(0.1), &variables).expect("a state");
        assert_eq!(state.warnings(), []);
        let loss = late
            .forward(&early.forward(&input).expect("an output"))
            .and_then(|y| y.sum_all());
        let gradients = loss.and_then(|loss| loss.backward()).expect("gradients");
        let outcome = update(&mut state, &variables, &gradients).expect("a step");
        // What is collected in BF16 is not rounded by the wire.
        let mut collected = Accumulator::new(DType::BF16, &variables).expect("an accumulator");
        collected.add(&gradients).expect("a sum");
        let mut of_sums = setup().build(Descent::new(0.1), &variables).expect("a state");
        update(&mut of_sums, &variables, &collected.take().expect("means")).expect("a step");
        let is_of_wire = |warning: &&Warning| matches!(warning, Warning::WireDiffers { .. });
        assert_eq!(of_sums.warnings().iter().find(is_of_wire), None);
        drop((norm, early, late));
        let error = setup()
            .build(Descent::new(0.1), &variables)
            .expect_err("no layer");
        is_kind(&error, ErrorKind::Model, &["`Autocast`", "wire_as_computed"]);
        outcome.warnings
    });
    for warnings in warned {
        let texts: Vec<String> = warnings.iter().map(Warning::to_string).collect();
        assert!(
            texts
                .iter()
                .any(|text| text
                    .contains("\"late.bias\" has values of F32 from its layers, and travels in BF16")),
            "{texts:?}"
        );
    }
}

#[test]
fn what_overflows_on_the_wire_is_an_error_or_a_skipped_step() {
    on(3, |world| {
        let model = model(&parameters(DType::F32));
        let wire = |path: &str, _: Parameter<'_>| (path == "2").then_some(DType::F16);
        let mut state = Setup::over(&world)
            .wire(wire)
            .build(AdamW::new(0.1), &model)
            .expect("a state");
        let good = |state: &mut _| {
            update(state, &model, &gradients(0, world.rank() as u64, DType::F32)).expect("an update")
        };
        good(&mut state);
        let mut large = gradients(0, world.rank() as u64, DType::F32);
        if world.rank() == 1 {
            large.insert(
                "2".to_string(),
                tensor(3, &[130, 140], DType::F32).affine(0.0, 65_520.0).unwrap(),
            );
        }
        let before = snapshot(&model, &state);
        let error = update(&mut state, &model, &large).expect_err("an overflow");
        says(&error, &["\"2\"", "65520", "F16", "element 0", "finite_only"]);
        let own = (ErrorKind::Tensor, None);
        assert_eq!(
            (error.kind(), error.rank()),
            if world.rank() == 1 {
                own
            } else {
                (ErrorKind::Ranks, Some(1))
            },
            "{error}"
        );
        assert_same(
            &[snapshot(&model, &state)],
            std::slice::from_ref(&before),
            "nothing has moved",
        );

        let outcome = Update::new(&mut state)
            .finite_only()
            .apply(&model, &large)
            .expect("a skipped call");
        assert_eq!(outcome.status, not_finite("2"));
        let mut scaler = LossScaler::dynamic();
        let _ = scaler
            .scale(&constant(1.0, 1, DType::F32))
            .expect("a scaled loss");
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &large)
            .expect("a skipped call");
        assert_eq!((outcome.status, scaler.current()), (not_finite("2"), 32_768.0));
        assert_same(
            &[snapshot(&model, &state)],
            std::slice::from_ref(&before),
            "nothing has moved",
        );
        good(&mut state);
    });
}

#[test]
fn all_ranks_send_in_one_dtype() {
    let errors = on(2, |world| {
        let model = model(&parameters(DType::F32));
        let wire = |dtype| move |path: &str, _: Parameter<'_>| (path == "1").then_some(dtype);
        let setup = |dtype| {
            Setup::over(&world)
                .wire(wire(dtype))
                .build(Descent::new(0.1), &model)
                .expect_err("an error")
                .to_string()
        };
        [
            setup(if world.rank() == 0 {
                DType::BF16
            } else {
                DType::F16
            }),
            setup(DType::U8),
        ]
    });
    for [differ, unsupported] in errors {
        assert!(
            differ.contains("dtype on the wire of \"1\"") && differ.contains("F16"),
            "{differ}"
        );
        assert!(
            unsupported.contains("U8") && unsupported.contains("\"1\""),
            "{unsupported}"
        );
    }
}
