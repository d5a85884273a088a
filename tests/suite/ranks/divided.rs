//! State divided among ranks: the same bits as in one process, one outcome everywhere, and nobody waits for
//! ever.

use candle_core::{DType, Tensor, Var};
use optimisers::{
    AccumGrad, AdamW, Average, Cautious, Centralise, ClipGlobalNorm, ClipNorm, Communicator, Descent, Engine,
    ErrorKind, LAMB, LARS, Lion, LossScaler, MixedPrecision, Momentum, Optimiser, OptimiserChain, Prodigy,
    Setup, SplitMaster, Status, Update, setup, update,
};

use crate::model::models::CPU;
use support::common::{
    Grads, assert_same, bits, grads, is_kind, model, muon, not_finite, optimisers_for, snapshot, tensor,
};
use support::reports::{Said, assert_part, gradients, parameters, said, steps};
use support::threads::on;

/// What each rank says after each call.
fn run(size: usize, engine: Engine, optimiser: &Optimiser, dtypes: [DType; 2], calls: u64) -> Vec<Vec<Said>> {
    let optimiser = optimiser.clone();
    on(size, move |world| {
        steps(Setup::over(&world), engine, optimiser.clone(), dtypes, calls)
    })
}

/// Every rank has the parameters of one process, and its part of that process's state.
fn assert_divided(ranks: &[Vec<Said>], whole: &[Said], what: &str) {
    for (rank, said) in ranks.iter().enumerate() {
        assert_part(said, whole, &format!("{what}, rank {rank}"));
    }
    for (call, expected) in whole.iter().enumerate() {
        for (leaf, (all, ..)) in expected.leaves.iter().enumerate() {
            let elements: usize = ranks.iter().map(|said| said[call].leaves[leaf].0.len()).sum();
            assert_eq!(
                elements,
                all.len(),
                "{what}, call {call}: each element of leaf {leaf} is on one rank"
            );
        }
    }
}

fn in_one_process(engine: Engine, optimiser: &Optimiser, dtypes: [DType; 2], calls: u64) -> Vec<Said> {
    steps(Setup::default(), engine, optimiser.clone(), dtypes, calls)
}

/// Asserts that so many ranks have the bits of one process, with gradients whose sum is exact.
pub fn assert_divides(optimiser: &Optimiser, dtype: DType, sizes: &[usize]) {
    let whole = in_one_process(Engine::Fused, optimiser, [dtype, dtype], 3);
    for &size in sizes {
        let ranks = run(size, Engine::Fused, optimiser, [dtype, dtype], 3);
        assert_divided(
            &ranks,
            &whole,
            &format!("{} in {dtype:?} on {size}", optimiser.name()),
        );
    }
}

/// All that a state of ranks can be made of.
fn divisible(dtype: DType) -> Vec<Optimiser> {
    let mut all = optimisers_for(dtype);
    all.retain(|optimiser| !optimiser.name().starts_with("Offload"));
    // A norm behind a function, which runs on one rank.
    all.push(Optimiser::new(OptimiserChain::new((
        Centralise::default(),
        ClipGlobalNorm::new(0.5),
        AdamW::new(0.1),
    ))));
    all
}

/// Three equal gradients of 16 bits have an exact sum in f32, as have powers of two of any. `ALL_RANKS` set,
/// every optimiser runs on every number of ranks.
#[test]
fn equal_gradients_give_the_bits_of_one_process() {
    let is_whole = std::env::var_os("ALL_RANKS").is_some();
    for (dtype, sizes) in [(DType::F32, &[1, 2, 4, 8][..]), (DType::BF16, &[3])] {
        for (index, optimiser) in divisible(dtype).into_iter().enumerate() {
            assert_divides(
                &optimiser,
                dtype,
                if is_whole {
                    sizes
                } else {
                    &sizes[index % sizes.len()..][..1]
                },
            );
        }
    }
}

/// What a leaf makes of its elements is asked on all engines; norms are of all parts together.
#[test]
fn every_engine_divides() {
    let rules: [Optimiser; 3] = [
        Optimiser::new(SplitMaster::new(OptimiserChain::new((
            ClipNorm::new(0.3),
            LAMB::new(0.1),
        )))),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), Cautious::new(Lion::new(0.1)))),
        )),
        Optimiser::new(OptimiserChain::new((Prodigy::new(1.0), muon(), LARS::new(0.1)))),
    ];
    for engine in [Engine::Tensors, Engine::Emulated] {
        for optimiser in &rules {
            let whole = in_one_process(engine, optimiser, [DType::BF16, DType::F32], 2);
            assert_divided(
                &run(2, engine, optimiser, [DType::BF16, DType::F32], 2),
                &whole,
                &format!("{} on {engine:?}", optimiser.name()),
            );
        }
    }
}

/// The mean is Σ w·g / Σ w with neighbours added first: with one process that gets this mean the bits are the
/// same.
#[test]
fn different_gradients_have_a_weighted_mean() {
    let optimiser = Optimiser::new(MixedPrecision::new(
        DType::F32,
        OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
    ));
    let weights = [3u64, 1, 0, 2];
    let rule = optimiser.clone();
    let divided = on(weights.len(), move |world| {
        let model = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world).build(rule.clone(), &model).expect("a state");
        let step = |call| {
            let update = Update::new(&mut state).weight(weights[world.rank()]);
            let outcome = update
                .apply(&model, &gradients(call, world.rank() as u64, DType::F32))
                .expect("an update");
            said(outcome, &model, &state)
        };
        (0..3).map(step).collect::<Vec<_>>()
    });
    let model = model(&parameters(DType::BF16));
    let mut state = setup(optimiser, &model).expect("a state");
    // The third rank counts nothing, and so is not there.
    let mean = |call| -> Grads {
        let of = |rank: usize| gradients(call, rank as u64, DType::F32);
        let of_path = |(path, first): (&String, &Tensor)| {
            let flat = |rank: usize| {
                of(rank)[path]
                    .flatten_all()
                    .and_then(|x| x.to_vec1::<f32>())
                    .expect("values")
            };
            let (a, b, d) = (flat(0), flat(1), flat(3));
            let values: Vec<f32> = (0..a.len())
                .map(|i| ((a[i] * 3.0 + b[i]) + d[i] * 2.0) / 6.0)
                .collect();
            (
                path.clone(),
                Tensor::from_vec(values, first.shape(), CPU).expect("a tensor"),
            )
        };
        of(0).iter().map(of_path).collect()
    };
    let step = |call| {
        let outcome = Update::new(&mut state)
            .weight(6)
            .apply(&model, &mean(call))
            .expect("an update");
        said(outcome, &model, &state)
    };
    assert_divided(&divided, &(0..3).map(step).collect::<Vec<_>>(), "weights");
}

/// A window of four calls on one rank, of two on each of two, of one on each of four: one step.
#[test]
fn ranks_and_windows_are_exchangeable() {
    let train = |size: usize| {
        on(size, move |world| {
            let model = model(&parameters(DType::F32));
            let rule = OptimiserChain::new((
                AccumGrad::new(4 / size as u64),
                ClipGlobalNorm::new(0.5),
                AdamW::new(0.1),
            ));
            let mut state = Setup::over(&world).build(rule, &model).expect("a state");
            for micro_batch in (0..8).filter(|batch| batch % size as u64 == world.rank() as u64) {
                update(&mut state, &model, &gradients(2 * micro_batch, 0, DType::BF16)).expect("an update");
            }
            model.values().map(|x| bits(x)).collect::<Vec<_>>()
        })
    };
    let [one, two, four] = [1, 2, 4].map(train);
    // Sums of four bf16 of about the same size are exact in f32 for most elements, and the last bit apart for
    // the others.
    let apart = |a: &[Vec<u64>], b: &[Vec<u64>]| -> f64 {
        let pairs = a.iter().flatten().zip(b.iter().flatten());
        pairs
            .map(|(a, b)| (f64::from_bits(*a) - f64::from_bits(*b)).abs())
            .fold(0.0, f64::max)
    };
    assert!(two.iter().all(|rank| rank == &two[0]) && four.iter().all(|rank| rank == &four[0]));
    assert!(apart(&one[0], &two[0]) < 1e-5 && apart(&one[0], &four[0]) < 1e-5);
}

#[test]
fn a_gradient_on_some_ranks_only_counts_as_zeros_on_the_others() {
    let moved = on(3, |world| {
        let model = model(&[
            tensor(1, &[4], DType::F32),
            tensor(2, &[4], DType::F32),
            tensor(3, &[4], DType::F32),
        ]);
        let before: Vec<_> = model.values().map(|x| bits(x)).collect();
        let mut state = Setup::over(&world)
            .build(Momentum::new(1.0), &model)
            .expect("a state");
        let three = Tensor::new(&[3f32; 4], CPU).expect("a tensor");
        let all = grads([Some(three.clone()), (world.rank() == 1).then_some(three), None]);
        // The last rank has no data at all, and still takes part.
        let outcome = match world.rank() {
            2 => Update::new(&mut state).weight(0).apply(&model, &Grads::new()),
            _ => update(&mut state, &model, &all),
        };
        let outcome = outcome.expect("an update");
        assert_eq!((outcome.applied, outcome.without_gradient.len()), (2, 1));
        let moved = model.values().zip(before).map(|(x, before)| {
            bits(x)
                .iter()
                .zip(before)
                .map(|(x, b)| f64::from_bits(*x) - f64::from_bits(b))
                .sum::<f64>()
        });
        (
            moved.map(|by| (by * 1e4).round() / 1e4).collect::<Vec<_>>(),
            state.leaf("2").expect("a leaf").steps(),
        )
    });
    assert_eq!(moved, vec![(vec![-12.0, -6.0, 0.0], 0); 3]);
    let weightless = on(2, |world| {
        let model = model(&[tensor(1, &[4], DType::F32)]);
        let mut state = Setup::over(&world)
            .build(Descent::new(0.1), &model)
            .expect("a state");
        Update::new(&mut state)
            .weight(0)
            .apply(&model, &grads([Some(tensor(2, &[4], DType::F32))]))
            .expect_err("no weight")
            .to_string()
    });
    assert!(
        weightless
            .iter()
            .all(|error| error.contains("weights of all 2 ranks are 0")),
        "{weightless:?}"
    );
}

#[test]
fn an_overflow_on_one_rank_is_one_on_all() {
    let scales = on(3, |world| {
        let model = model(&parameters(DType::F16));
        let rule = MixedPrecision::new(DType::F32, AdamW::new(0.1));
        let mut state = Setup::over(&world).build(rule, &model).expect("a state");
        let mut scaler = LossScaler::dynamic();
        // The gradients stand for those of this loss.
        let _ = scaler
            .scale(&Tensor::new(1f32, CPU).expect("a loss"))
            .expect("a scaled loss");
        let before = snapshot(&model, &state);
        let mut bad = gradients(0, 0, DType::F32);
        if world.rank() == 2 {
            let infinite = (&bad["2"] * f64::INFINITY).expect("a product");
            bad.insert("2".to_string(), infinite);
        }
        let skipped = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &bad)
            .expect("an update");
        assert_eq!(skipped.status, not_finite("2"));
        assert_same(&[snapshot(&model, &state)], &[before], "nothing moves");
        let _ = scaler
            .scale(&Tensor::new(1f32, CPU).expect("a loss"))
            .expect("a scaled loss");
        let stepped = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &gradients(2, 0, DType::F32))
            .expect("an update");
        assert_eq!(stepped.status, Status::Stepped);
        scaler.current()
    });
    assert!(scales.iter().all(|scale| *scale == scales[0]), "{scales:?}");
}

#[test]
fn each_rank_has_its_share() {
    let shapes: [&[usize]; 3] = [&[1 << 20], &[300, 1000], &[1 << 19]];
    let bytes = on(4, move |world| {
        let model = model(&shapes.map(|shape| tensor(1, shape, DType::BF16)));
        let state = Setup::over(&world)
            .build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)
            .expect("a state");
        assert_eq!(state.world().map(|world| world.size()), Some(4));
        state.bytes()
    });
    let elements: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
    assert_eq!(bytes.iter().sum::<usize>(), 12 * elements);
    assert!(
        bytes
            .iter()
            .all(|bytes| bytes.abs_diff(3 * elements) <= 12 * (1 << 14)),
        "{bytes:?}"
    );
    // Weighted windows go on with the weight of all ranks.
    let weighted = on(2, |world| {
        let x = Var::new(&[1f32], CPU).expect("a variable");
        let rule = OptimiserChain::new((
            AccumGrad {
                average: Average::Weighted,
                ..AccumGrad::new(2)
            },
            Descent::new(1.0),
        ));
        let mut state = Setup::over(&world).build(rule, &x).expect("a state");
        for (call, tokens) in [(0, [1, 3]), (1, [2, 2])] {
            let gradient = [[8f32, 0.0], [4.0, 0.0]][call][world.rank()];
            let grads = [("", Tensor::new(&[gradient], CPU).expect("a tensor"))];
            Update::new(&mut state)
                .weight(tokens[world.rank()])
                .apply(&x, &grads)
                .expect("an update");
        }
        x.to_vec1::<f32>().expect("values")
    });
    assert_eq!(weighted, [[-1.0], [-1.0]], "1 - (8·1 + 4·2) / 8");
}

/// A window that ends early on all ranks steps as in one process; a rank alone cannot end it.
#[test]
fn windows_are_released_on_all_ranks() {
    let run = |setup: Setup, rank: u64, ranks: u64| {
        let x = model(&[tensor(1, &[40], DType::F32), tensor(2, &[3], DType::F32)]);
        let rule = OptimiserChain::new((AccumGrad::new(8), ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
        let mut state = setup.build(rule, &x).expect("a state");
        for call in 0..3 {
            // Equal gradients, so that their mean is exact.
            let gradient = |seed: u64, length| Some(tensor(10 + seed + call, &[length], DType::F32));
            update(&mut state, &x, &grads([gradient(0, 40), gradient(9, 3)])).expect("an update");
        }
        if ranks > 1 {
            let call = Update::new(&mut state).allow_no_gradients();
            let error = match rank {
                0 => call.release_windows(&x),
                _ => call.apply(&x, &Grads::new()),
            };
            is_kind(
                &error.expect_err("refused"),
                ErrorKind::Ranks,
                &["release_windows"],
            );
        }
        let outcome = Update::new(&mut state).release_windows(&x).expect("a release");
        assert_eq!((outcome.status, outcome.open_calls), (Status::Stepped, 0));
        x.values().map(|x| bits(x)).collect::<Vec<_>>()
    };
    let alone = run(Setup::default(), 0, 1);
    let all = on(2, move |world| run(Setup::over(&world), world.rank() as u64, 2));
    assert_eq!(all, [alone.clone(), alone]);
}
