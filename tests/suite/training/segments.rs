//! Steps in segments against `backward` and `update`.

use std::cell::{Cell, RefCell};

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::{D, Device, Module, Result, Tensor, Var};
use candle_nn::{LayerNorm, loss::cross_entropy, ops::softmax};
use optimisers::{
    AccumGrad, AdamW, Average, Checkpoint, ClipGlobalNorm, ClipNorm, Descent, DynamicScale, Ema, ErrorKind,
    Lookahead, LossScaler, MixedPrecision, Muon, Optimiser, OptimiserChain, Outcome, Segments, Setup,
    SplitMaster, StateTree, Update, Warning, ranks, setup, update,
};

use crate::step::streamed_steps::says_of;
use support::common::{Vars, bits, is_kind, number_bits, numbers, snapshot, tensor, values, var};

const CPU: &Device = &Device::Cpu;
const TOKENS: usize = 7;
const WIDTH: usize = 6;

/// A transformer with one head, whose table is also its output layer, and whose blocks share a bias.
struct Net {
    parameters: Vars,
    blocks: Vec<usize>,
}

impl Net {
    fn new(dtype: DType) -> Self {
        let of_block = |i: usize| ["q", "k", "v", "o", "expand"].map(|name| (format!("{i}.{name}"), WIDTH));
        let mut parameters: Vars = (0..3)
            .flat_map(of_block)
            .chain([("table".to_string(), TOKENS)])
            .zip(1..)
            .map(|((path, rows), seed)| (path, var(&tensor(seed, &[rows, WIDTH], dtype))))
            .collect();
        parameters.insert("bias".to_string(), var(&tensor(99, &[WIDTH], dtype)));
        Net {
            parameters,
            blocks: vec![0, 1, 2],
        }
    }

    fn of(&self, path: &str) -> &Tensor {
        &self.parameters[path]
    }

    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        self.of("table").embedding(tokens)
    }

    fn block(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        let layer = |name: &str, x: &Tensor| x.matmul(&self.of(&format!("{i}.{name}")).t()?);
        let scores = (layer("q", x)?.matmul(&layer("k", x)?.t()?)? * 0.4)?;
        let seen = softmax(&scores, D::Minus1)?.matmul(&layer("v", x)?)?;
        let x = (x + layer("o", &seen)?)?;
        &x + layer("expand", &x)?.broadcast_add(self.of("bias"))?.relu()?
    }

    fn predict(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.of("table").t()?)
    }

    fn segments(&self, tokens: &Tensor) -> Segments<'_, Tensor> {
        Segments::new(tokens)
            .then(|tokens| self.embed(tokens))
            .each(&self.blocks, |&i, x| self.block(i, x))
            .then(|x| self.predict(x))
    }

    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.predict(
            &self
                .blocks
                .iter()
                .try_fold(self.embed(tokens)?, |x, &i| self.block(i, &x))?,
        )
    }
}

/// Tokens of a call, and the loss of what a network predicts.
fn call(call: u64) -> (Tensor, impl Fn(&Tensor) -> Result<Tensor>) {
    let tokens = numbers(call, 5)
        .into_iter()
        .map(|x| ((x.abs() * 100.0) as u32) % TOKENS as u32);
    let tokens = Tensor::from_iter(tokens, CPU).expect("tokens");
    let targets = tokens.clone();
    let loss = move |logits: &Tensor| {
        let is_wide = logits.dtype() == F64;
        cross_entropy(
            &if is_wide {
                logits.clone()
            } else {
                logits.to_dtype(F32)?
            },
            &targets,
        )
    };
    (tokens, loss)
}

/// All that training has left, to the bit.
fn left(net: &Net, state: &StateTree) -> Vec<u8> {
    Checkpoint::new(state)
        .model(&net.parameters)
        .to_bytes()
        .expect("bytes")
        .0
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Whole,
    Gradients,
    Train,
}

fn scaler(dtype: DType) -> LossScaler {
    let dynamic = DynamicScale {
        initial: 4.0,
        growth_interval: 20,
        ..DynamicScale::default()
    };
    LossScaler::with(dynamic).enabled(dtype == F16)
}

/// Losses, outcomes, and what is left after this number of calls.
fn trained(way: Way, dtype: DType, optimiser: &Optimiser, calls: u64) -> (Vec<u64>, Vec<Outcome>, Vec<u8>) {
    let net = Net::new(dtype);
    let model = &net.parameters;
    let mut state = setup(optimiser.clone(), model).expect("a state");
    state.require_all();
    let mut scaler = scaler(dtype);
    let (mut losses, mut outcomes) = (Vec::new(), Vec::new());
    for i in 0..calls {
        let (tokens, loss) = call(i);
        let update = Update::new(&mut state).weight(i % 3 + 1);
        let (loss, outcome) = match way {
            Way::Whole => {
                let loss = loss(&net.forward(&tokens).expect("a pass")).expect("a loss");
                let grads = scaler
                    .scale(&loss)
                    .expect("a loss")
                    .backward()
                    .expect("gradients");
                (loss, update.scaler(&mut scaler).apply(model, &grads))
            }
            Way::Gradients => {
                let factor = scaler.factor().expect("a scale");
                let scaled = |x: &_| loss(x)? * factor;
                let (loss, grads) = net.segments(&tokens).gradients(scaled).expect("gradients");
                (
                    (loss / factor).expect("a loss"),
                    update.scaler(&mut scaler).apply_owned(model, grads),
                )
            }
            Way::Train => {
                let trained = net
                    .segments(&tokens)
                    .train(update.scaler(&mut scaler), model, &loss);
                let (loss, outcome) = trained.expect("a step");
                (loss, Ok(outcome))
            }
        };
        losses.extend(bits(&loss));
        outcomes.push(outcome.expect("a step"));
    }
    (losses, outcomes, left(&net, &state))
}

#[test]
fn they_have_the_bits_of_backward_and_update() {
    let adamw = || AdamW::new(1e-2);
    let mixed: [(&str, Optimiser); 4] = [
        ("masters", Optimiser::new(MixedPrecision::new(F32, adamw()))),
        ("no masters", Optimiser::new(adamw())),
        ("a window", {
            let chain = OptimiserChain::new((
                AccumGrad {
                    average: Average::Weighted,
                    ..AccumGrad::new(3)
                },
                ClipNorm::new(0.5),
                adamw(),
                Ema::new(0.9),
            ));
            Optimiser::new(MixedPrecision::new(F32, chain))
        }),
        (
            "Muon",
            Optimiser::new(MixedPrecision::new(F32, Muon::new(1e-2).with_fallback(adamw()))),
        ),
    ];
    let split = ("split masters", Optimiser::new(SplitMaster::new(adamw())));
    for dtype in [F32, BF16, F16, F64] {
        let split = [&split].into_iter().filter(|_| dtype == BF16);
        for (name, optimiser) in mixed.iter().chain(split) {
            let whole = trained(Way::Whole, dtype, optimiser, 50);
            for way in [Way::Gradients, Way::Train] {
                assert!(
                    trained(way, dtype, optimiser, 50) == whole,
                    "{way:?}, {name}, {dtype:?}"
                );
            }
        }
    }
}

/// A state that clips by the norm of all gradients takes them from `gradients`, and is refused by `train`
/// before anything runs.
#[test]
fn rules_of_the_whole_model_take_gradients() {
    let optimiser = Optimiser::new(OptimiserChain::new((ClipGlobalNorm::new(0.1), AdamW::new(1e-2))));
    let whole = trained(Way::Whole, F32, &optimiser, 10);
    assert!(trained(Way::Gradients, F32, &optimiser, 10) == whole);

    let runs = Cell::new(0);
    let net = Net::new(F32);
    let mut state = setup(optimiser, &net.parameters).expect("a state");
    let (tokens, loss) = call(0);
    let counted = Segments::new(&tokens).then(|x| {
        runs.set(runs.get() + 1);
        net.forward(x)
    });
    let error = counted
        .train(Update::new(&mut state), &net.parameters, loss)
        .expect_err("a norm");
    is_kind(
        &error,
        ErrorKind::Unsupported,
        &["over the gradients of all parameters", "Update::apply_owned"],
    );
    assert_eq!(runs.get(), 0);
}

#[test]
fn states_over_ranks_take_gradients() {
    let threads = ranks(2).into_iter().map(|rank| {
        std::thread::spawn(move || {
            let net = Net::new(F32);
            let mut state = Setup::over(&rank)
                .build(AdamW::new(1e-2), &net.parameters)
                .expect("a state");
            let (tokens, loss) = call(0);
            let refused = net
                .segments(&tokens)
                .train(Update::new(&mut state), &net.parameters, &loss);
            is_kind(&refused.expect_err("ranks"), ErrorKind::Unsupported, &["ranks"]);
            let (_, grads) = net.segments(&tokens).gradients(&loss).expect("gradients");
            Update::new(&mut state)
                .apply_owned(&net.parameters, grads)
                .expect("a step");
            net.parameters.values().map(|x| bits(x)).collect::<Vec<_>>()
        })
    });
    let moved: Vec<_> = threads
        .collect::<Vec<_>>()
        .into_iter()
        .map(|rank| rank.join().expect("a rank"))
        .collect();
    let optimiser = Optimiser::new(AdamW::new(1e-2));
    let net = Net::new(F32);
    let mut state = setup(optimiser, &net.parameters).expect("a state");
    let (tokens, loss) = call(0);
    net.segments(&tokens)
        .train(Update::new(&mut state), &net.parameters, loss)
        .expect("a step");
    let alone: Vec<_> = net.parameters.values().map(|x| bits(x)).collect();
    assert_eq!(moved, [alone.clone(), alone]);
}

/// What a segment of a random network does with one or two tensors and a variable.
fn random_segment(w: &Tensor, choice: u64, x: &[Tensor]) -> Result<Vec<Tensor>> {
    let [first, last] = [&x[0], &x[x.len() - 1]];
    let one = match choice % 5 {
        0 => first.matmul(w)?,
        1 => (first * 0.5)?.broadcast_mul(&w.sum_keepdim(0)?)?.tanh()?,
        2 => {
            (first.embedding(&Tensor::new(&[1u32, 2, 1], CPU)?)?
                + w.embedding(&Tensor::new(&[0u32, 0, 0], CPU)?)?)?
        }
        3 => (softmax(&first.matmul(&w.t()?)?, 1)? + first)?,
        _ => (first.sqr()?.matmul(w)?.t()?.matmul(last)? + w.relu()?)?,
    };
    let one = if x.len() > 1 { (one + (last * 0.1)?)? } else { one };
    Ok(match (x.len(), choice % 7) {
        (1, _) => vec![one],
        // A variable itself, its input, and tensors that no later segment may need, or that have no gradient.
        (_, 0) => vec![one, w.clone()],
        (_, 1) => vec![first.clone(), one],
        (_, 2) => vec![one, last.detach()],
        (_, 3) => vec![one, (last * 0.5)?],
        _ => vec![(&one + last)?, one],
    })
}

/// The bits are those of `backward` where one tensor goes between segments, however many share a variable.
/// Sums of more than two come in another order where several do.
#[test]
fn random_networks_have_the_gradients_of_backward() {
    let mut compared = 0;
    for seed in 0..600 {
        let draws: Vec<u64> = numbers(seed, 20)
            .into_iter()
            .map(|x| (x.abs() * 1e6) as u64)
            .collect();
        let is_single = draws[0].is_multiple_of(2);
        let dtype = if is_single {
            [F64, F32, BF16, F16][draws[1] as usize % 4]
        } else {
            F64
        };
        let model: Vec<Var> = (0..4).map(|i| var(&tensor(seed + i, &[3, 3], dtype))).collect();
        let input = vec![tensor(seed, &[3, 3], dtype); if is_single { 1 } else { 2 }];
        let segments = draws[4..6 + draws[2] as usize % 5].iter().zip(&draws[12..]);
        let segments: Vec<_> = segments
            .map(|(choice, place)| (*choice, &model[*place as usize % 4]))
            .collect();
        let run = |(choice, w): &(u64, &Var), x: &Vec<Tensor>| random_segment(w, *choice, x);
        let loss = |x: &Vec<Tensor>| x[0].sqr()?.mean_all()? + x[x.len() - 1].mean_all()?;

        let whole = segments
            .iter()
            .try_fold(input.clone(), |x, segment| run(segment, &x))
            .expect("a pass");
        let whole = loss(&whole).expect("a loss");
        let expected = whole.backward().expect("gradients");
        let got = Segments::new(&input).each(&segments, run).gradients(loss);
        let (got_loss, got) = got.unwrap_or_else(|error| panic!("{seed}: {error}"));
        assert_eq!(bits(&got_loss), bits(&whole), "{seed}");
        for (i, x) in model.iter().enumerate() {
            let [got, expected] = [&got, &expected].map(|grads| grads.get(x).map(values));
            let what = format!("{i} of {seed}: {got:?}, {expected:?}");
            assert_eq!(got.is_some(), expected.is_some(), "{what}");
            for (got, expected) in got.into_iter().flatten().zip(expected.into_iter().flatten()) {
                let tolerance = if is_single {
                    0.0
                } else {
                    1e-10 * expected.abs().max(1.0)
                };
                let is_same = number_bits(got) == number_bits(expected);
                assert!(is_same || (got - expected).abs() <= tolerance, "{what}");
                compared += 1;
            }
        }
    }
    assert!(compared > 5000, "{compared}");
}

/// A segment with dropout is refused: before anything is written if the state has no step, and else when the
/// segment runs again.
#[test]
fn a_segment_that_draws_numbers_is_refused() {
    let net = &Net::new(F32);
    let (tokens, loss) = call(0);
    let with_dropout = |drops: bool| {
        let drop = move |x: &Tensor| {
            if drops {
                candle_nn::ops::dropout(x, 0.5)
            } else {
                Ok(x.clone())
            }
        };
        Segments::new(&tokens)
            .then(|tokens| net.embed(tokens))
            .then(move |x| net.block(0, &drop(x)?))
            .each(&net.blocks, |&i, x| net.block(i, x))
            .then(|x| net.predict(x))
    };
    let model = &net.parameters;
    let words = ["segment 2 of 6 returns other numbers", "dropout"];
    let mut state = setup(AdamW::new(1e-2), model).expect("a state");
    let before = snapshot(model, &state);
    let error = with_dropout(true)
        .train(Update::new(&mut state), model, &loss)
        .expect_err("dropout");
    is_kind(&error, ErrorKind::Contract, &words);
    assert_eq!(snapshot(model, &state), before);
    assert!(state.warnings().is_empty());

    let error = with_dropout(true).gradients(&loss).expect_err("dropout");
    is_kind(&error, ErrorKind::Contract, &words);

    with_dropout(false)
        .train(Update::new(&mut state), model, &loss)
        .expect("a step");
    let error = with_dropout(true)
        .train(Update::new(&mut state), model, &loss)
        .expect_err("dropout");
    is_kind(&error, ErrorKind::Contract, &words);
    assert!(
        state
            .warnings()
            .iter()
            .any(|warning| matches!(warning, Warning::StepDropped { .. }))
    );
    with_dropout(false)
        .train(Update::new(&mut state), model, &loss)
        .expect("a step");
}

/// A segment that reads on its second run what another segment has left in a cell: a variable whose gradient
/// is complete by then, or that no segment has read before.
#[test]
fn a_segment_that_reads_another_graph_on_its_second_run_is_refused() {
    let input = Tensor::new(&[2f32], CPU).expect("an input");
    let [w, other] = [3f32, 6.0].map(|x| Var::new(&[x], CPU).expect("a variable"));
    let cell = RefCell::new(input.clone());
    let stored = |y: Tensor| {
        cell.replace(y.clone());
        Ok(y)
    };
    // Each runs with equal numbers twice: 6 in the cell, whatever its graph.
    let later = || {
        Segments::new(&input)
            .then(|x| stored((x * w.as_tensor())?))
            .then(|x| x + &*cell.borrow())
            .then(|x| stored((x * 0.5)?))
    };
    let never = || {
        Segments::new(&input)
            .then(|x| stored((x * w.as_tensor())?))
            .then(|x| x + &*cell.borrow())
            .then(|x| {
                cell.replace(other.as_tensor().clone());
                x * 1.0
            })
    };
    let detached = || {
        Segments::new(&input)
            .then(|x| stored((x * w.as_tensor())?))
            .then(|x| x + &*cell.borrow())
            .then(|x| {
                let y = (x * 0.5)?;
                cell.replace(y.detach());
                Ok(y)
            })
    };
    let model = Vars::from([("w".to_string(), w.clone())]);
    let mut state = setup(Descent::new(0.1), &model).expect("a state");
    let before = snapshot(&model, &state);
    let words = [
        "segment 2 of 3 reads other variables when it runs again",
        "into a cell",
    ];
    for error in [
        later()
            .gradients(|y| y.sum_all())
            .expect_err("a gradient that would be lost"),
        detached()
            .gradients(|y| y.sum_all())
            .expect_err("a gradient that would lack a part"),
        never()
            .gradients(|y| y.sum_all())
            .expect_err("a gradient of nobody"),
        later()
            .train(Update::new(&mut state), &model, |y| y.sum_all())
            .map(drop)
            .expect_err("a lost gradient"),
    ] {
        is_kind(&error, ErrorKind::Contract, &words);
    }
    assert_eq!(snapshot(&model, &state), before);
    // What an earlier segment has left in a cell for a later one is read as before.
    let earlier = Segments::new(&input)
        .then(|x| stored((x * w.as_tensor())?))
        .then(|x| x.sqr())
        .then(|x| x + &*cell.borrow());
    let (_, gradients) = earlier.gradients(|y| y.sum_all()).expect("gradients");
    assert_eq!(
        values(gradients.get(&w).expect("a gradient")),
        [2.0 * 6.0 * 2.0 + 2.0]
    );
}

/// A segment that forgets its input is refused; one that forgets some of its parameters is as in an update.
#[test]
fn an_operation_that_cuts_the_graph_is_named() {
    let net = Net::new(F32);
    let (tokens, loss) = call(0);
    let model = &net.parameters;
    let ones = Tensor::ones(WIDTH, F32, CPU).expect("ones");
    let norm = LayerNorm::new(ones.clone(), ones, 1e-5);
    let mut state = setup(AdamW::new(1e-2), model).expect("a state");
    let before = snapshot(model, &state);
    let cut = Segments::new(&tokens)
        .then(|tokens| net.embed(tokens))
        .then(|x| norm.forward(x))
        .then(|x| net.predict(x));
    let error = cut
        .train(Update::new(&mut state), model, &loss)
        .expect_err("a cut");
    is_kind(
        &error,
        ErrorKind::NoGradient,
        &["segment 2 of 3", "LayerNorm::forward", "layer_norm_slow"],
    );
    assert_eq!(snapshot(model, &state), before);

    let partly = || {
        Segments::new(&tokens)
            .then(|tokens| net.embed(tokens))
            .then(|x| x + norm.forward(&x.matmul(net.of("0.q"))?)?)
            .each([1, 2], |i, x| net.block(i, x))
            .then(|x| net.predict(x))
    };
    let (_, outcome) = partly()
        .train(Update::new(&mut state), model, &loss)
        .expect("a step");
    let unreached = ["0.expand", "0.k", "0.o", "0.q", "0.v"];
    assert_eq!(outcome.without_gradient.iter().collect::<Vec<_>>(), unreached);
    says_of(&outcome.warnings[0], &["0.q", "LayerNorm::forward"]);
    state.require_all();
    let before = snapshot(model, &state);
    let error = partly()
        .train(Update::new(&mut state), model, &loss)
        .expect_err("all are required");
    is_kind(
        &error,
        ErrorKind::NoGradient,
        &["5 of 17", "0.q", "LayerNorm::forward", "nothing was changed"],
    );
    assert_eq!(snapshot(model, &state), before);
}

/// The product of 1e-10 and these: its gradients are 1e40, which is infinite, 1e10 and 1e10.
fn explosive() -> ([Var; 3], Tensor) {
    let variable = |x: f64| Var::new(&[x as f32], CPU).expect("a variable");
    (
        [1e-5, 1e25, 1e25].map(variable),
        Tensor::new(&[1e-10f32], CPU).expect("an input"),
    )
}

fn explosive_scaler() -> LossScaler {
    LossScaler::with(DynamicScale {
        initial: 4.0,
        ..DynamicScale::default()
    })
}

/// A gradient that is not finite is an error, after later segments have moved. With a dynamic scaler its
/// parameter stays, which the scale shows.
#[test]
fn gradients_that_are_not_finite() {
    let scalers = [
        explosive_scaler(),
        explosive_scaler().enabled(false),
        LossScaler::fixed(4.0),
    ];
    for mut scaler in scalers {
        let (is_dynamic, before) = (scaler == explosive_scaler(), scaler.current());
        for requires_all in [false, true] {
            let (model, input) = explosive();
            let mut state = setup(Descent::new(1e15), &model).expect("a state");
            if requires_all {
                state.require_all();
            }
            let segments = Segments::new(&input).each(&model, |w, x| x * w.as_tensor());
            let update = Update::new(&mut state).scaler(&mut scaler);
            match segments.train(update, &model, |y| y.sum_all()) {
                Err(error) => {
                    assert!(!is_dynamic && error.path() == Some("0"), "{error}");
                    is_kind(
                        &error,
                        ErrorKind::NotFinite,
                        &["Segments::gradients", "dynamic `LossScaler`"],
                    );
                }
                Ok((loss, outcome)) => {
                    assert!(is_dynamic && outcome.applied == 2 && values(&loss)[0] < 1e36);
                    assert_eq!(outcome.without_gradient.iter().collect::<Vec<_>>(), ["0"]);
                    assert!(outcome.warnings.is_empty(), "{:?}", outcome.warnings);
                }
            }
            let [first, others @ ..] = model.each_ref().map(|x| values(x)[0]);
            assert!(
                first > 0.0 && others.iter().all(|other| *other < 1e24),
                "{first}, {others:?}"
            );
        }
        assert_eq!(scaler.current(), if is_dynamic { before / 4.0 } else { before });
    }
}

/// A parameter that is missing is missed in a step with an overflow, too.
#[test]
fn an_overflow_excuses_no_other_parameter() {
    let (model, input) = explosive();
    let model = [model, explosive().0].concat();
    let mut state = setup(Descent::new(1e15), &model).expect("a state");
    state.require_all();
    let mut scaler = explosive_scaler();
    let update = Update::new(&mut state).scaler(&mut scaler);
    let segments = Segments::new(&input).each(&model[..3], |w, x| x * w.as_tensor());
    let error = segments
        .train(update, &model, |y| y.sum_all())
        .expect_err("three are missing");
    is_kind(&error, ErrorKind::NoGradient, &["3 of 6", "nothing was changed"]);
    assert_eq!(values(&model[2]), values(&explosive().0[2]));
    // The scaled loss is not used up by another.
    let grads = model[1]
        .sqr()
        .and_then(|y| y.sum_all()?.backward())
        .expect("gradients");
    let error = Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&model, &grads)
        .expect_err("not scaled");
    is_kind(&error, ErrorKind::LossScale, &["was not scaled"]);
}

/// A gradient that is not finite in the last call of a window leaves its parameter the sum of the others.
#[test]
fn an_overflow_ends_a_window_without_its_gradient() {
    let chain = || {
        let window = AccumGrad {
            average: Average::Sum,
            ..AccumGrad::new(3)
        };
        OptimiserChain::new((window, Descent::new(1e-17)))
    };
    let ([model, expected], input) = ([(); 2].map(|()| explosive().0), explosive().1);
    let [mut state, mut whole] = [&model, &expected].map(|model| setup(chain(), model).expect("a state"));
    let mut scaler = explosive_scaler();
    let product = |w: &Var, x: &Tensor| x * w.as_tensor();
    for (call, factor) in [1e-20, 1e-20, 1.0, 1e-20, 1e-20, 1e-20].into_iter().enumerate() {
        let segments = Segments::new(&input).each(&model, product);
        let update = Update::new(&mut state).scaler(&mut scaler);
        let loss = |y: &Tensor| y.sum_all()? * factor;
        let (_, outcome) = segments.train(update, &model, loss).expect("a call");

        let y = expected.iter().try_fold(input.clone(), |x, w| product(w, &x));
        let loss = y.and_then(|y| loss(&y)?.backward());
        let mut grads = loss.expect("gradients");
        if call == 2 {
            grads.remove(&expected[0]);
        }
        let whole = Update::new(&mut whole).apply(&expected, &grads).expect("a call");
        assert_eq!(
            (outcome.applied, outcome.open_calls),
            (whole.applied, whole.open_calls),
            "{call}"
        );
        let [got, expected] = [&model, &expected].map(|model| model.each_ref().map(|x| bits(x)));
        assert_eq!(got, expected, "{call}");
    }
    assert_ne!(bits(&model[0]), bits(&explosive().0[0]));
}

/// A window whose sum is not finite is given up with an error, with a dynamic scaler, too.
#[test]
fn a_window_that_is_given_up_is_an_error() {
    let x = Var::new(&[1f32], CPU).expect("a variable");
    let window = AccumGrad {
        average: Average::Sum,
        ..AccumGrad::new(2)
    };
    let mut state = setup(OptimiserChain::new((window, Descent::new(1.0))), &x).expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 1.0,
        ..DynamicScale::default()
    });
    let large = Tensor::new(&[3e38f32], CPU).expect("an input");
    let mut call = || {
        let segments = Segments::new(&large).then(|large| large * x.as_tensor());
        segments.train(Update::new(&mut state).scaler(&mut scaler), &x, |y| y.sum_all())
    };
    call().expect("the first of two");
    is_kind(
        &call().expect_err("a sum of 6e38"),
        ErrorKind::NotFinite,
        &["the window of this parameter was given up"],
    );
    assert_eq!(values(&x), [1.0]);
}

/// A model is known by its variables, whatever their order and paths.
#[test]
fn gradients_go_to_their_variables() {
    let variables: Vec<Var> = (1..4).map(|seed| var(&tensor(seed, &[2, 2], F32))).collect();
    let input = tensor(9, &[2, 2], F32);
    let trained = |order: [usize; 3], renamed: bool| {
        let model: Vec<Var> = variables.iter().map(|x| var(x)).collect();
        let mut state = setup(AdamW::new(0.1), &model).expect("a state");
        if renamed {
            state.rename("0", "first").expect("another name");
        }
        let segments = Segments::new(&input).each(&model, |w, x| x.matmul(w));
        let shown: Vec<&Var> = order.iter().map(|&i| &model[i]).collect();
        segments
            .train(Update::new(&mut state), &shown, |y| y.sqr()?.sum_all())
            .expect("a step");
        model.iter().map(|x| bits(x)).collect::<Vec<_>>()
    };
    let expected = trained([0, 1, 2], false);
    assert_eq!(trained([2, 0, 1], false), expected);
    assert_eq!(trained([0, 2, 1], true), expected);
}

/// Outputs that no loss depends on take their variables out of the step, and nothing else.
#[test]
fn a_way_that_ends_leaves_its_parameters_without_a_gradient() {
    let model: Vec<Var> = (1..4).map(|seed| var(&tensor(seed, &[2, 2], F32))).collect();
    let input = tensor(9, &[2, 2], F32);
    let [first, shared, last] = [0, 1, 2].map(|i| model[i].as_tensor());
    let (_, grads) = Segments::new(&input)
        .then(|x| Ok((x.matmul(first)?, x.matmul(shared)?)))
        .then(|(x, y)| Ok((last.matmul(shared)?, (x + y)?)))
        .then(|(x, _)| Ok(x.clone()))
        .gradients(|x| x.sum_all())
        .expect("gradients");
    assert!(grads.get(first).is_none());
    let whole = last
        .matmul(shared)
        .and_then(|x| x.sum_all()?.backward())
        .expect("gradients");
    for x in [shared, last] {
        assert_eq!(grads.get(x).map(bits), whole.get(x).map(bits));
    }
}

/// Several tensors, one of them without a gradient; and what closures capture, with and without a graph.
#[test]
fn several_tensors_and_captured_ones() {
    let net = &Net::new(F64);
    let (tokens, loss) = call(0);
    let mask = (tensor(5, &[5, WIDTH], F64).ge(0.0))
        .and_then(|mask| mask.to_dtype(F64))
        .expect("a mask");
    let gain = || net.of("bias").exp();
    type Parts = (Tensor, Tensor, Tensor);
    let embed = |(tokens, mask): &(Tensor, Tensor)| {
        Ok((net.embed(tokens)?, net.of("bias").sqr()?.sum_all()?, mask.clone()))
    };
    let block = |gain: &Tensor, i: usize, (x, sum, mask): &Parts| {
        let y = (net.block(i, x)? * mask)?.broadcast_mul(gain)?;
        Ok((y.clone(), (sum + y.sqr()?.mean_all()?)?, mask.clone()))
    };
    let predict = |(x, sum, mask): &Parts| Ok((net.predict(&(x * mask)?)?, sum.clone()));
    let loss = |(logits, sum): &(Tensor, Tensor)| loss(logits)? + sum;

    let input = (tokens, mask);
    let captured = gain().expect("a tensor");
    let in_segments = Segments::new(&input)
        .then(embed)
        .each(&net.blocks, |&i, x| block(&captured, i, x))
        .then(predict)
        .gradients(loss);
    let (seen, got) = in_segments.expect("gradients");
    let captured = gain().expect("a tensor");
    let hidden = net
        .blocks
        .iter()
        .try_fold(embed(&input).expect("x"), |x, &i| block(&captured, i, &x));
    let whole = hidden.and_then(|x| loss(&predict(&x)?)).expect("a loss");
    let expected = whole.backward().expect("gradients");
    assert_eq!(bits(&seen), bits(&whole));
    for (path, x) in &net.parameters {
        let [got, expected] = [&got, &expected].map(|grads| values(grads.get(x).expect("a gradient")));
        for (got, expected) in got.into_iter().zip(expected) {
            assert!(
                (got - expected).abs() <= 1e-12 * expected.abs().max(1.0),
                "{path}: {got} {expected}"
            );
        }
    }
}

#[test]
fn an_input_with_a_gradient_is_refused() {
    let net = Net::new(F32);
    let (tokens, loss) = call(0);
    let embedded = net.embed(&tokens).expect("x");
    let rest = || Segments::new(&embedded).then(|x| net.predict(x));
    let error = rest().gradients(&loss).expect_err("a graph");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["depends on a variable", "compute it in a segment"],
    );
    let table = net.of("table").clone();
    is_kind(
        &Segments::new(&table).gradients(&loss).expect_err("a variable"),
        ErrorKind::Argument,
        &[],
    );
    let no_segments = Segments::new(&tokens).gradients(|x| loss(&net.forward(x)?));
    let (_, grads) = no_segments.expect("gradients");
    assert!(net.parameters.values().all(|x| grads.get(x).is_some()));
}

/// Segments before the first variable run once in a step.
#[test]
fn what_is_frozen_runs_once() {
    let net = Net::new(F32);
    let (tokens, loss) = call(0);
    let runs = [0; 3].map(Cell::new);
    let count = |place: usize| runs[place].set(runs[place].get() + 1);
    let table = net.of("table").detach();
    let (_, grads) = Segments::new(&tokens)
        .then(|tokens| {
            count(0);
            table.embedding(tokens)
        })
        .then(|x| {
            count(1);
            net.block(1, x)
        })
        .then(|x| {
            count(2);
            x.matmul(&table.t()?)
        })
        .gradients(loss)
        .expect("gradients");
    let found = net
        .parameters
        .iter()
        .filter(|(_, x)| grads.get(x).is_some())
        .map(|(path, _)| path.as_str());
    assert_eq!(
        found.collect::<Vec<_>>(),
        ["1.expand", "1.k", "1.o", "1.q", "1.v", "bias"]
    );
    assert_eq!(runs.map(|runs| runs.get()), [1, 2, 1]);
}

/// A tensor that is returned twice, one without elements, and NaN, which is no other number than before.
#[test]
fn unusual_outputs() {
    let input = tensor(1, &[2, 2], F32);
    for weight in [
        tensor(2, &[2, 2], F32),
        Tensor::full(f32::NAN, (2, 2), CPU).expect("a tensor"),
    ] {
        let is_finite = !values(&weight)[0].is_nan();
        let x = var(&weight);
        let segments = || {
            let twice = |y: Tensor| Ok((y.clone(), y.narrow(0, 0, 0)?, y));
            let last = x.as_tensor();
            let first = Segments::new(&input).then(move |input| twice(input.matmul(last)?));
            first.then(|(a, empty, b)| Ok((a.relu()?, empty.clone(), b.clone())))
        };
        let loss = |(a, empty, b): &(Tensor, Tensor, Tensor)| a.mul(b)?.sum_all()? + empty.sum_all()?;
        let y = input.matmul(&x).expect("a product");
        let whole = y.relu().and_then(|a| loss(&(a, y.narrow(0, 0, 0)?, y.clone())));
        let expected = whole.expect("a loss").backward().expect("gradients");
        let (_, got) = segments().gradients(loss).expect("gradients");
        assert_eq!(got.get(&x).map(bits), expected.get(&x).map(bits));

        let mut state = setup(Descent::new(0.1), &x).expect("a state");
        match segments().train(Update::new(&mut state), &x, loss) {
            Ok((_, outcome)) => assert!(is_finite && outcome.applied == 1),
            Err(error) => {
                assert!(!is_finite);
                is_kind(&error, ErrorKind::NotFinite, &["Update::finite_only"]);
            }
        }
    }
}

/// A step that is refused before anything is written leaves the comparison with the last step as it was.
#[test]
fn a_refused_step_still_notices_a_changed_parameter() {
    let model = Vars::from(["x", "y", "z"].map(|path| (path.to_string(), var(&tensor(1, &[4], F32)))));
    let rule = OptimiserChain::new((AccumGrad::new(2), Descent::new(0.1), Lookahead::new(6)));
    let mut state = setup(rule, &model).expect("a state");
    let ones = |paths: &[&str]| {
        let gradient = |path: &&str| (path.to_string(), tensor(2, &[4], F32));
        paths.iter().map(gradient).collect::<Vec<_>>()
    };
    let all = ones(&["x", "y", "z"]);
    for gradients in [&all, &all, &ones(&["x", "y"])] {
        update(&mut state, &model, gradients).expect("a call");
    }
    // The next call ends the window of y without a gradient, and z has none in the whole window.
    state.require_all();
    let refused = Segments::new(&tensor(3, &[4], F32))
        .then(|input| input * model["x"].as_tensor())
        .then(|input| input.tanh())
        .train(Update::new(&mut state), &model, |y| y.sum_all());
    let error = refused.map(drop).expect_err("z has no gradient");
    is_kind(
        &error,
        ErrorKind::NoGradient,
        &["1 of 3 parameters have no gradient", ": z;"],
    );

    model["y"].set(&tensor(9, &[4], F32)).expect("other numbers");
    let error = update(&mut state, &model, &all).expect_err("another parameter");
    is_kind(
        &error,
        ErrorKind::Changed,
        &["\"y\"", "it was changed outside of `update`"],
    );
}
