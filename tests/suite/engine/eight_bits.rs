//! State in 8 bits: the same bits on every engine, and everything that can be done with a state.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, AdEMAMix, AdaGrad, Adam, AdamW, Adjust, Checkpoint, CheckpointFile, Ema, Engine, Error,
    ErrorKind, IntoOptimiser, Kind, Lion, Lookahead, MixedPrecision, Optimiser, OptimiserChain, Parameter,
    Q8, RMSProp, Rprop, Rule, SOAP, Schedule, ScheduleFree, Shampoo, Slot, SlotFormat, State, StateTree,
    StochasticRounding, StoreAs, Update, rules, setup, update,
};

use crate::engine::engines::special_values;
use support::common::{
    Grads, Vars, assert_close, assert_same, bits, constant, engines, first_gpu, for_any_shape, grads,
    instruction_sets, is_kind, model, random, rounding_to_nearest, rules_and_chains, says, snapshot, tensor,
    trajectory, values,
};

/// Two leaves with blocks that are not full, one of them of several dimensions, and one that is too small.
const SHAPES: [&[usize]; 3] = [&[4096 + 77], &[50, 100], &[100]];

fn tensors(seed: u64, dtype: DType) -> Vec<Tensor> {
    SHAPES
        .iter()
        .enumerate()
        .map(|(i, shape)| random(seed + i as u64, shape, dtype, &Device::Cpu))
        .collect()
}

fn steps(dtype: DType, seeds: std::ops::Range<u64>) -> Vec<Grads> {
    seeds
        .map(|seed| grads(tensors(10 * seed, dtype).into_iter().map(Some)))
        .collect()
}

fn adamw() -> StoreAs<AdamW> {
    StoreAs::all(
        Q8,
        AdamW {
            lambda: 0.1,
            ..AdamW::new(0.01)
        },
    )
}

fn train(state: &mut StateTree, model: &Vars, seeds: std::ops::Range<u64>) {
    for grads in steps(DType::F32, seeds) {
        update(state, model, &grads).expect("an update");
    }
}

fn trained(optimiser: impl IntoOptimiser) -> (Vars, StateTree) {
    let model = model(&tensors(1, DType::F32));
    let mut state = setup(optimiser, &model).expect("a state");
    train(&mut state, &model, 1..4);
    (model, state)
}

/// Every rule of the catalogue with all of its state in 8 bits that can be.
#[test]
fn every_rule_has_the_same_bits_on_every_engine() {
    for (dtype, gradient) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::F64),
    ] {
        let (parameters, grads) = (tensors(1, dtype), steps(gradient, 1..4));
        for rule in rules_and_chains() {
            let rule = Optimiser::new(MixedPrecision::new(DType::F32, StoreAs::all(Q8, rule)));
            let expected = trajectory(Engine::Tensors, rule.clone(), &parameters, &grads);
            // A device adds norms up in another order, and a code follows from the last digit.
            let is_exact =
                |engine: &Engine| *engine != Engine::Emulated || rule.rule().kind() == Kind::Elementwise;
            for engine in engines().into_iter().chain(instruction_sets()).filter(is_exact) {
                let what = format!("{} on {engine:?} in {dtype:?}, {gradient:?}", rule.name());
                assert_same(
                    &trajectory(engine, rule.clone(), &parameters, &grads),
                    &expected,
                    what,
                );
            }
        }
    }
}

/// Norms and sums of what arithmetic makes of state in 8 bits, which they only read. In the first step no
/// code follows from a norm.
#[test]
fn every_rule_with_norms_makes_its_first_step_on_every_engine() {
    for dtype in [DType::F32, DType::F64] {
        let (parameters, grads) = (tensors(1, dtype), steps(dtype, 1..2));
        for rule in rules_and_chains()
            .into_iter()
            .filter(|rule| rule.kind() != Kind::Elementwise)
        {
            let rule = Optimiser::new(StoreAs::all(Q8, rule));
            let expected = trajectory(Engine::Tensors, rule.clone(), &parameters, &grads);
            for engine in engines() {
                let what = format!("{} on {engine:?} in {dtype:?}", rule.name());
                assert_close(
                    &trajectory(engine, rule.clone(), &parameters, &grads),
                    &expected,
                    1e-6,
                    what,
                );
            }
        }
    }
}

#[test]
fn special_numbers_have_the_same_bits_on_every_engine() {
    for (dtype, gradient) in [(DType::F32, DType::F32), (DType::F32, DType::F64)] {
        let (x, g) = special_values(dtype, gradient);
        let [x, g] = [x, g]
            .map(|values| Tensor::cat(&[&values, &values, &values], 0).expect("as many as are worth it"));
        let grads = vec![grads([Some(g)]); 3];
        for rule in [
            Optimiser::new(adamw()),
            Optimiser::new(StoreAs::all(Q8, Rprop::new(0.01))),
        ] {
            let expected = trajectory(Engine::Tensors, rule.clone(), std::slice::from_ref(&x), &grads);
            for engine in engines() {
                assert_same(
                    &trajectory(engine, rule.clone(), std::slice::from_ref(&x), &grads),
                    &expected,
                    (engine, rule.name()),
                );
            }
            if let Some(device) = &first_gpu() {
                let there = |tensor: &Tensor| tensor.to_device(device).expect("a copy");
                let grads: Vec<Grads> = grads
                    .iter()
                    .map(|all| all.iter().map(|(path, g)| (path.clone(), there(g))).collect())
                    .collect();
                let got = trajectory(Engine::Fused, rule.clone(), &[there(&x)], &grads);
                assert_same(&got, &expected, (device.location(), rule.name()));
            }
        }
    }
}

#[test]
fn any_number_of_threads_and_any_layout() {
    let shape = [601, 500];
    let (x, g) = (
        random(1, &shape, DType::F32, &Device::Cpu),
        random(2, &shape, DType::F32, &Device::Cpu),
    );
    let run = |threads: usize, gradient: &Tensor| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        let grads = vec![grads([Some(gradient.clone())]); 2];
        pool.install(|| trajectory(Engine::Fused, adamw(), std::slice::from_ref(&x), &grads))
    };
    let expected = run(1, &g);
    for threads in [2, 3, 16] {
        assert_same(&run(threads, &g), &expected, threads);
    }
    let transposed = g
        .t()
        .and_then(|g| g.contiguous())
        .and_then(|g| g.t())
        .expect("by columns");
    assert_same(&run(2, &transposed), &expected, "by columns");
}

/// Whether a tensor is in 8 bits depends on the whole tensor, the rest is up to its name.
#[test]
fn what_is_small_or_a_copy_stays_as_it_is() {
    let (_, state) = trained(adamw());
    let bytes: Vec<usize> = state.leaves().map(|leaf| leaf.bytes()).collect();
    assert_eq!(bytes, [2 * 33 * 132, 2 * 40 * 132, 2 * 4 * 100]);
    let (_, state) = trained(StoreAs::new([("v", Q8)], AdamW::new(0.01)));
    assert_eq!(
        state.leaves().next().map(|leaf| leaf.bytes()),
        Some(4 * 4173 + 33 * 132)
    );
    // z starts as the parameter.
    let (_, state) = trained(StoreAs::all(Q8, ScheduleFree::new(0.01)));
    assert_eq!(
        state.leaves().next().map(|leaf| leaf.bytes()),
        Some(4 * 4173 + 33 * 132)
    );
    let least = |elements| {
        setup(adamw(), &model(&[tensor(1, &[elements], DType::F32)]))
            .expect("a state")
            .bytes()
    };
    assert_eq!([4095, 4096].map(least), [4095 * 8, 32 * 132 * 2]);

    let x = model(&tensors(1, DType::F32));
    let refused = setup(StoreAs::new([("z", Q8)], ScheduleFree::new(0.01)), &x).expect_err("a copy");
    says(
        &refused,
        &[
            "state tensor \"z\" is to be stored as Q8",
            "copy of the parameter",
        ],
    );
    let refused = setup(StoreAs::all(DType::U8, Adam::default()), &x).expect_err("no such dtype");
    says(&refused, &["U8", "F16, BF16, F32, F64 or Q8"]);
    let refused = setup(StoreAs::new([("n", Q8)], Adam::default()), &x).expect_err("no such tensor");
    says(
        &refused,
        &["Adam has no state tensor \"n\", expected one of: m, v"],
    );
    let by_rule = State::for_slots(Parameter::from(&x["0"]), &[Slot::parameter("w").stored_as(Q8)])
        .expect_err("a copy");
    says(&by_rule, &["\"w\"", "copy of the parameter"]);
}

/// The largest of each block, here the first, is exact, and the others are near.
#[test]
fn a_moment_is_what_it_would_be_in_f32() {
    let (_, small) = trained(adamw());
    let (_, wide) = trained(AdamW {
        lambda: 0.1,
        ..AdamW::new(0.01)
    });
    for (name, most) in [("m", 0.2), ("v", 0.35)] {
        let get = |state: &StateTree| values(&state.leaf("0").expect("a leaf").tensor(name).expect("a copy"));
        let (small, wide) = (get(&small), get(&wide));
        let largest = |values: &[f64]| {
            values
                .iter()
                .fold(0f64, |largest, value| largest.max(value.abs()))
        };
        for (small, wide) in small.chunks(128).zip(wide.chunks(128)) {
            let of_block = largest(wide);
            assert!(
                small
                    .iter()
                    .zip(wide)
                    .all(|(small, wide)| (small - wide).abs() <= most * wide.abs() + of_block * 0.05),
                "{name}"
            );
        }
    }
}

/// A mean of squares that is 0 where the mean of gradients is not would be divided by: a linear code does
/// that, and the parameter is NaN.
#[test]
fn t50_small_gradients_beside_large_ones_move_by_no_more_than_they_should() {
    let sizes: Vec<f32> = (0..8192).map(|i| 10f32.powi(-(i % 16))).collect();
    let x = model(&[Tensor::zeros(8192, DType::F32, &Device::Cpu).expect("zeros")]);
    let mut state = setup(adamw(), &x).expect("a state");
    let g = Tensor::new(sizes, &Device::Cpu).expect("a gradient");
    for _ in 0..200 {
        update(&mut state, &x, &grads([Some(g.clone())])).expect("an update");
    }
    // 200 steps of 0.01, by a factor that the codes decide on. What is below the first moment's range does
    // not move.
    assert!(
        values(&x["0"]).iter().all(|x| (-4.0..=0.0).contains(x)),
        "{:?}",
        &values(&x["0"])[..32]
    );
    assert!(
        values(&x["0"])
            .iter()
            .enumerate()
            .all(|(i, x)| i % 16 > 3 || (-2.6..=-1.2).contains(x)),
        "{:?}",
        &values(&x["0"])[..32]
    );
}

/// The largest move of an element in each step.
fn largest_moves(rule: impl Rule + Clone, steps: &[Tensor]) -> Vec<f64> {
    let x = model(&[tensor(9, &[64, 128], DType::F32)]);
    let mut state = setup(rule, &x).expect("a state");
    let mut before = values(&x["0"]);
    let mut step = |gradient: &Tensor| {
        update(&mut state, &x, &grads([Some(gradient.clone())])).expect("an update");
        let after = values(&x["0"]);
        let moves = after
            .iter()
            .zip(&before)
            .map(|(after, before)| (after - before).abs());
        let largest = moves.fold(0.0, f64::max);
        before = after;
        largest
    };
    steps.iter().map(&mut step).collect()
}

/// A divisor that 8 bits make 0 in a block with a much larger number leaves ε alone to divide by.
#[test]
fn t67_no_rule_makes_much_longer_steps_in_8_bits() {
    let small = |seed| (tensor(seed, &[64, 128], DType::F32) * 1e-5).expect("small numbers");
    let spike = Tensor::from_iter(
        (0..64 * 128).map(|i| f32::from(u8::from(i % 128 == 5))),
        &Device::Cpu,
    )
    .and_then(|spike| spike.reshape((64, 128))? + small(1))
    .expect("a spike in each block");
    let steps: Vec<Tensor> = std::iter::once(spike).chain((2..40).map(small)).collect();
    for rule in rules::catalogue()
        .into_iter()
        .map(|listing| for_any_shape(listing.rule))
    {
        let name = rule.name();
        let longest = largest_moves(rule.clone(), &steps)
            .into_iter()
            .fold(0.0, f64::max);
        let coded = largest_moves(StoreAs::all(Q8, rule), &steps);
        assert!(
            coded.iter().all(|length| *length <= 3.0 * longest),
            "{name}: {coded:?}, and {longest} in f32"
        );
    }
}

/// The mean loss of noisy steps with a falling rate towards the minimum of a parabola.
fn last_loss(rule: impl Rule + Clone, eta: f64) -> f64 {
    let (size, calls) = (4096, 1500);
    let (x, target) = (
        model(&[constant(0.0, size, DType::F32)]),
        tensor(1, &[size], DType::F32),
    );
    let mut state = setup(rule, &x).expect("a state");
    state.schedule(Schedule::cosine(eta, 0.0, calls)).expect("a rate");
    let distance = || (x["0"].as_tensor() - &target).expect("a difference");
    for call in 0..calls {
        let noise = (tensor(2 + call, &[size], DType::F32) * 0.1).expect("noise");
        let gradient = (distance() + noise).expect("a gradient");
        update(&mut state, &x, &grads([Some(gradient)])).expect("an update");
    }
    let loss = distance()
        .sqr()
        .and_then(|squares| squares.mean_all()?.to_scalar::<f32>());
    loss.expect("a loss").into()
}

/// A mean that moves by less than half a code in a step stands still if it is rounded to the nearest code.
#[test]
fn t68_slow_means_in_8_bits_do_not_stand_still() {
    fn follows(rule: impl Rule + Clone, eta: f64) {
        let name = rule.name();
        let [plain, coded] = [
            last_loss(rule.clone(), eta),
            last_loss(StoreAs::all(Q8, rule), eta),
        ];
        assert!(coded < 1.5 * plain + 1e-5, "{name}: {coded}, and {plain} in f32");
    }
    follows(Lion::new(2e-3), 2e-3);
    for beta in [(0.98, 0.99), (0.99, 0.999)] {
        follows(
            AdamW {
                beta,
                lambda: 0.0,
                ..AdamW::new(5e-3)
            },
            5e-3,
        );
    }
    follows(AdEMAMix::new(2e-3), 2e-3);
}

/// The steps of some rules follow from differences that small formats round away, and copies of the parameter
/// lose steps as a parameter in 16 bits does.
#[test]
fn all_leaves_what_its_format_is_too_coarse_for() {
    let formats = |format: SlotFormat, rule: Box<dyn Rule>| {
        let x = tensor(1, &[64, 64], DType::F32);
        let state = Rule::init(&StoreAs::all(format, rule), Parameter::from(&x));
        format!("{:?}", state.expect("a state"))
            .replace(" [64, 64]", "")
            .replace(" [1, 64, 64]", "")
    };
    let bf16 = SlotFormat::from(DType::BF16);
    let averaged = || {
        Box::new(OptimiserChain::new((
            Lion::default(),
            Ema::default(),
            Lookahead::default(),
        )))
    };
    let centred = || {
        Box::new(RMSProp {
            centred: true,
            ..RMSProp::default()
        })
    };
    for (format, rule, expected) in [
        (bf16, Box::new(AdamW::default()) as Box<dyn Rule>, "m BF16, v F32"),
        (Q8, Box::new(AdamW::default()), "m Q8, v Q8"),
        (bf16, averaged(), "0.m BF16, 1.average F32, 2.slow F32"),
        (Q8, averaged(), "0.m Q8, 1.average F32, 2.slow F32"),
        (Q8, Box::new(AdEMAMix::default()), "m Q8, v Q8, slow F32"),
        (Q8, centred(), "v F32, m F32"),
        (
            bf16,
            Box::new(Shampoo::default()),
            "m BF16, v F32, left F32, left_root F32, right F32, right_root F32",
        ),
    ] {
        let formats = formats(format, rule);
        assert!(formats.starts_with(&format!("{expected}, ")), "{formats}");
    }
    let x = model(&[tensor(1, &[64, 64], DType::F32)]);
    for format in [bf16, Q8] {
        let error = setup(StoreAs::new([("left", format)], SOAP::default()), &x).expect_err("too coarse");
        is_kind(
            &error,
            ErrorKind::Argument,
            &["\"left\"", "F32 or F64", "small differences"],
        );
    }
    let named = StoreAs::new([("average", DType::BF16)], Ema::default());
    assert!(setup(named, &x).is_ok(), "a name is a decision");
}

#[test]
fn a_file_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    for optimiser in [
        Optimiser::new(adamw()),
        Optimiser::new(MixedPrecision::new(DType::F64, adamw())),
        Optimiser::new(StoreAs::all(
            Q8,
            OptimiserChain::new((AccumGrad::new(2), Adam::new(0.01))),
        )),
    ] {
        let (model, mut state) = trained(optimiser.clone());
        Checkpoint::new(&state).save(&path).expect("a save");
        let copy = support::common::model(
            &model
                .values()
                .map(|var| var.as_tensor().clone())
                .collect::<Vec<_>>(),
        );
        let mut restored = setup(optimiser, &copy).expect("a state");
        CheckpointFile::open(&path)
            .and_then(|file| file.restore(&mut restored))
            .expect("a load");
        assert_eq!(snapshot(&copy, &restored), snapshot(&model, &state));
        train(&mut state, &model, 4..7);
        train(&mut restored, &copy, 4..7);
        assert_eq!(snapshot(&copy, &restored), snapshot(&model, &state));
    }
}

/// The file of a state in 8 bits, with the place of the codes of v in it.
fn file() -> (Vec<u8>, usize) {
    let (_, state) = trained(adamw());
    let folder = tempfile::tempdir().expect("a folder");
    Checkpoint::new(&state)
        .save(folder.path().join("state"))
        .expect("a save");
    let file = std::fs::read(folder.path().join("state")).expect("the file");
    let header = u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let text: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).expect("a header");
    assert_eq!(
        (&text["0/v"]["dtype"], &text["0/v"]["shape"]),
        (&"U8".into(), &serde_json::json!([33, 132]))
    );
    let start = text["0/v"]["data_offsets"][0].as_u64().expect("a place") as usize;
    (file, 8 + header + start)
}

fn load(file: &[u8], accepting: bool) -> optimisers::Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    std::fs::write(&path, support::crafted_checkpoints::with_checksum(file.to_vec())).expect("a file");
    let model = model(&tensors(1, DType::F32));
    let mut state = setup(adamw(), &model).expect("a state");
    let before = snapshot(&model, &state);
    let file = CheckpointFile::open(&path)?;
    let file = if accepting {
        file.accepting_non_finite()
    } else {
        file
    };
    let result = file.restore(&mut state).map(drop);
    assert_eq!(
        result.is_err(),
        snapshot(&model, &state) == before,
        "an error changes nothing"
    );
    result
}

#[test]
fn codes_are_nearly_any_bytes_and_scales_are_numbers() {
    let (file, v) = file();
    load(&file, false).expect("a load");
    let with = |place: usize, bytes: &[u8]| {
        let mut file = file.clone();
        file[place..place + bytes.len()].copy_from_slice(bytes);
        file
    };
    load(&with(v + 4, &[0xfd; 128]), false).expect("any codes");
    // Those of infinity and NaN.
    for (code, number) in [(0xff, "inf"), (0xfe, "NaN")] {
        let error = load(&with(v + 132 + 4 + 3, &[code]), false).expect_err("a number that is not finite");
        says(&error, &["0/v", number, "at element 131"]);
        load(&with(v + 132 + 4 + 3, &[code]), true).expect("what is accepted");
    }
    let second = v + 132;
    let negative = load(&with(second, &(-1f32).to_le_bytes()), true).expect_err("a negative scale");
    says(&negative, &["0/v", "the scale of block 1 is -1"]);
    for bad in [f32::NAN, f32::INFINITY] {
        let error = load(&with(second, &bad.to_le_bytes()), false).expect_err("a scale that is not finite");
        says(&error, &["0/v", "at element 128"]);
        load(&with(second, &bad.to_le_bytes()), true).expect("what is accepted");
    }
}

/// Blocks of another length, and codes of another dtype.
#[test]
fn records_have_one_shape() {
    let (file, _) = file();
    let with = |old: &str, new: &str| {
        assert_eq!(old.len(), new.len());
        let place = file
            .windows(old.len())
            .position(|bytes| bytes == old.as_bytes())
            .expect("a text of the header");
        let mut file = file.clone();
        file[place..place + old.len()].copy_from_slice(new.as_bytes());
        load(&file, true).expect_err("another shape")
    };
    says(&with("[33,132]", "[66,66] "), &["0/m", "[66, 66]", "[33, 132]"]);
    says(&with("[33,132]", "[4356]  "), &["0/m", "[4356]", "[33, 132]"]);
    says(
        &with(
            r#""dtype":"U8","shape":[33,132]"#,
            r#""dtype":"I8","shape":[33,132]"#,
        ),
        &["0/m", "I8"],
    );
}

/// A file of another format is for `replace`, which converts.
#[test]
fn formats_are_not_mixed_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    let (x, wide) = trained(AdamW {
        lambda: 0.1,
        ..AdamW::new(0.01)
    });
    Checkpoint::new(&wide).save(&path).expect("a save");
    let mut state = setup(adamw(), &x).expect("a state");
    let error = CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut state))
        .expect_err("another format");
    says(&error, &["StoreAs(Q8, AdamW)"]);

    let mut state = wide;
    let v = |state: &StateTree| state.leaf("0").expect("a leaf").tensor("v").expect("a copy");
    let exact = v(&state);
    let replaced = state.all().replace(adamw(), &x).expect("a replacement");
    assert!(
        replaced[0].fresh.is_empty() && replaced[0].kept == ["m", "v", "t"],
        "{replaced:?}"
    );
    let coded = v(&state);
    assert_eq!(state.leaf("0").map(|leaf| leaf.bytes()), Some(2 * 33 * 132));
    assert!(
        values(&coded)
            .iter()
            .zip(values(&exact))
            .all(|(coded, exact)| (coded - exact).abs() <= 0.13 * exact)
    );
    // Back again nothing more is lost.
    state
        .all()
        .replace(
            AdamW {
                lambda: 0.1,
                ..AdamW::new(0.01)
            },
            &x,
        )
        .expect("a replacement");
    assert_eq!(bits(&v(&state)), bits(&coded));
    assert_eq!(v(&state).dtype(), DType::F32);
}

#[test]
fn copies_updates_and_windows_are_as_with_any_state() {
    let (x, mut state) = trained(adamw());
    let copy = state.try_clone().expect("a copy");
    assert_eq!(snapshot(&x, &copy), snapshot(&x, &state));
    let gradients = &steps(DType::F32, 5..6)[0];
    let parameters = x
        .iter()
        .map(|(path, var)| (path.clone(), var.as_tensor().copy().expect("a copy")))
        .collect();
    let (next, moved, _) = Update::functional(&state)
        .apply(&parameters, gradients)
        .expect("another state");
    assert_eq!(
        snapshot(&x, &copy),
        snapshot(&x, &state),
        "the old one is as it was"
    );
    update(&mut state, &x, gradients).expect("an update");
    assert!(x.iter().all(|(path, var)| bits(&moved[path]) == bits(var)));
    for (own, next) in state.leaves().zip(next.leaves()) {
        assert_eq!(bits(&own.tensor("v").unwrap()), bits(&next.tensor("v").unwrap()));
    }

    // What is frozen stays, and goes on from there.
    state.at("0").expect("a leaf").freeze();
    let before = snapshot(&x, &state);
    train(&mut state, &x, 6..7);
    let frozen = |snapshot: &support::common::Snapshot| {
        snapshot
            .iter()
            .filter(|(name, _)| name.starts_with('0'))
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(frozen(&before), frozen(&snapshot(&x, &state)));
    state.at("0").expect("a leaf").thaw();

    // A learning rate reaches through.
    state.adjust(0.5).expect("a learning rate");
    assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), Some(0.5));
}

/// Beside every way to store the parameter, with the bits that tensor operations have.
#[test]
fn every_store_has_its_state_in_8_bits() {
    let mut optimisers = rounding_to_nearest(DType::BF16, Box::new(adamw()));
    optimisers.push(Optimiser::new(StochasticRounding::new(7, adamw())));
    for optimiser in optimisers {
        let (parameters, grads) = (tensors(1, DType::BF16), steps(DType::BF16, 1..4));
        let expected = trajectory(Engine::Tensors, optimiser.clone(), &parameters, &grads);
        for engine in engines() {
            assert_same(
                &trajectory(engine, optimiser.clone(), &parameters, &grads),
                &expected,
                (engine, optimiser.name()),
            );
        }
    }
}

/// What grows by numbers far below it goes on growing, as it is rounded at random.
#[test]
fn a_sum_of_squares_grows() {
    let x = model(&[Tensor::zeros(4096, DType::F32, &Device::Cpu).expect("zeros")]);
    let rule = StoreAs::all(Q8, AdaGrad::new(0.01));
    let mut state = setup(rule, &x).expect("a state");
    for seed in 0..2000 {
        Update::new(&mut state)
            .engine(Engine::Fused)
            .apply(
                &x,
                &grads([Some(random(seed, &[4096], DType::F32, &Device::Cpu))]),
            )
            .expect("an update");
    }
    let sums = values(&state.leaf("0").unwrap().tensor("sum_of_squares").unwrap());
    let mean = sums.iter().sum::<f64>() / 4096.0;
    // `numbers` have variance 1/2.
    assert!((mean / 1000.0 - 1.0).abs() < 0.1, "{mean}");
}

/// A rule of the user's with a slot in 8 bits.
#[test]
fn a_slot_can_ask_for_it() {
    let x = tensor(1, &[4096], DType::F32);
    let slots = [
        Slot::zeros("m").stored_as(SlotFormat::Q8),
        Slot::full("size", 0.5).non_negative().stored_as(Q8),
    ];
    let state = State::for_slots(Parameter::from(&x), &slots).expect("a state");
    assert_eq!(format!("{state:?}"), "m Q8 [4096], size Q8 [4096], t 0");
    assert!(format!("{:?}", slots[1]).contains("NonNegative"));
    let error: Error = State::for_slots(
        Parameter::from(&x),
        &[Slot::zeros("v").second_moment().stored_as(DType::F16)],
    )
    .expect_err("F16");
    says(&error, &["F32 or F64, because the tensor is a second moment"]);
    let rule: Box<dyn Rule> = Box::new(Adam::default());
    assert_eq!(StoreAs::all(Q8, rule).name(), "StoreAs(Q8, Adam)");
}
