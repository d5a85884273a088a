//! Every engine, instruction set, number of threads and gradient layout gives the same bits.

use candle_core::{DType, Device, Tensor};
use optimisers::value::Value;
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Elementwise, Engine,
    IntoOptimiser, Kind, LAMB, MixedPrecision, Momentum, NonFinite, Optimiser, OptimiserChain, RMSProp, Rule,
    Scale, Slot, Update, WeightDecay, hyper_parameters, range, rules, setup,
};
use proptest::prelude::*;

use support::common::{
    Grads, Snapshot, Vars, assert_close, assert_same, engines, first_gpu, for_any_shape, grads,
    instruction_sets, model, optimisers_for, random, rules_and_chains, snapshot, trajectory, var,
};

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// The fused CPU engine as it is chosen, and with each instruction set.
fn fused() -> Vec<Engine> {
    [vec![Engine::Fused], instruction_sets()].concat()
}

/// Asserts that the fused engines do what tensor operations do.
fn assert_engines_agree(
    fused: &[Engine],
    optimiser: impl IntoOptimiser + Clone,
    parameters: &[Tensor],
    grads: &[Grads],
) {
    let expected = trajectory(Engine::Tensors, optimiser.clone(), parameters, grads);
    for &engine in fused {
        let what = || {
            format!(
                "{} on {engine:?}, {:?}",
                optimiser.name(),
                (parameters[0].dtype(), grads[0]["0"].dtype())
            )
        };
        assert_same(
            &trajectory(engine, optimiser.clone(), parameters, grads),
            &expected,
            what(),
        );
    }
}

/// Parameters of several shapes, none a multiple of a vector width, and gradients of which each call misses
/// some.
pub fn small_model(device: &Device, parameter: DType, gradient: DType) -> (Vec<Tensor>, Vec<Grads>) {
    let shapes: [&[usize]; 6] = [&[3], &[1], &[257], &[5, 67], &[], &[3, 0]];
    let tensors = |seed: u64, dtype| {
        shapes
            .iter()
            .enumerate()
            .map(move |(i, shape)| random(seed + i as u64, shape, dtype, device))
    };
    let at = |step: usize| {
        let misses = |i: usize| step > 0 && (step + i).is_multiple_of(4);
        grads(
            tensors(100 * (1 + step as u64), gradient)
                .enumerate()
                .map(|(i, tensor)| (!misses(i)).then_some(tensor)),
        )
    };
    (tensors(0, parameter).collect(), (0..4).map(at).collect())
}

/// Asserts that what `optimisers` gives for a dtype has the same bits on all engines, with gradients of every
/// dtype.
pub fn assert_bits_on_engines(optimisers: impl Fn(DType) -> Vec<Optimiser>) {
    for (parameter, gradient) in pairs_of_dtypes() {
        let (parameters, grads) = small_model(&Device::Cpu, parameter, gradient);
        for optimiser in optimisers(parameter) {
            assert_engines_agree(&fused(), optimiser, &parameters, &grads);
        }
    }
}

fn pairs_of_dtypes() -> impl Iterator<Item = (DType, DType)> {
    DTYPES
        .into_iter()
        .flat_map(|parameter| DTYPES.map(|gradient| (parameter, gradient)))
}

#[test]
fn every_optimiser_in_every_pair_of_dtypes() {
    assert_bits_on_engines(optimisers_for);
}

/// On a GPU each elementwise optimiser has the bits of the CPU, and a clipped one numbers next to them. Each is
/// tried with one pair of dtypes, because the compiler takes a tenth of a second for a kernel.
#[test]
fn every_optimiser_on_a_device() {
    let Some(device) = &first_gpu() else { return };
    for (place, (parameter, gradient)) in pairs_of_dtypes().enumerate() {
        let [here, there] = [&Device::Cpu, device].map(|device| {
            let (parameters, grads) = small_model(device, parameter, gradient);
            move |optimiser: &Optimiser| trajectory(Engine::Fused, optimiser.clone(), &parameters, &grads)
        });
        for (index, optimiser) in optimisers_for(parameter).into_iter().enumerate() {
            let is_elementwise = optimiser.rule().kind() == Kind::Elementwise;
            if is_elementwise && index % 16 == place {
                let what = (optimiser.name(), parameter, gradient);
                assert_same(&there(&optimiser), &here(&optimiser), what);
            }
        }
        let clipped = Optimiser::new(OptimiserChain::new((ClipGlobalNorm::new(0.1), LAMB::new(0.1))));
        assert_close(&there(&clipped), &here(&clipped), 1e-11, (parameter, gradient));
    }
}

/// NaN, infinities, signed zeros, subnormals and the largest numbers of every dtype, each as parameter with
/// each as gradient.
pub fn special_values(parameter: DType, gradient: DType) -> (Tensor, Tensor) {
    let special = [
        f64::NAN,
        f64::INFINITY,
        0.0,
        1.0,
        0.3,
        6e-8,
        6e-5,
        65504.0,
        1e-40,
        1e-38,
        1e-30,
        1e-20,
        1e20,
        3.4e38,
        5e-324,
        2e-308,
        1e-200,
        1e200,
        f64::MAX,
    ];
    let signed: Vec<f64> = special.iter().flat_map(|&value| [value, -value]).collect();
    let table = |dtype, of: fn((f64, f64)) -> f64| {
        let pairs = signed
            .iter()
            .flat_map(|&x| signed.iter().map(move |&g| of((x, g))));
        Tensor::from_iter(pairs, &Device::Cpu)
            .and_then(|tensor| tensor.to_dtype(dtype))
            .expect("a tensor")
    };
    (table(parameter, |(x, _)| x), table(gradient, |(_, g)| g))
}

#[test]
fn every_optimiser_on_special_values() {
    for parameter in DTYPES {
        for gradient in [parameter, DType::F32, DType::F64] {
            let (x, g) = special_values(parameter, gradient);
            let grads = grads([Some(g)]);
            for mut optimiser in optimisers_for(parameter) {
                optimiser
                    .set_field("non_finite", NonFinite::Pass.into())
                    .expect("a NonFinite");
                assert_engines_agree(
                    &fused(),
                    optimiser,
                    std::slice::from_ref(&x),
                    &[grads.clone(), grads.clone(), grads.clone()],
                );
            }
        }
    }
}

/// Steps that the loop of a rule behind them does besides, in every order, also one of a kind twice. Signed
/// zeros show a step that is left out or done too often.
#[test]
fn every_order_of_plain_steps_before_a_rule() {
    let plain: [Box<dyn Rule>; 4] = [
        Box::new(Scale::new(0.3)),
        Box::new(Scale::new(-2.0)),
        Box::new(ClipGrad::new(0.5)),
        Box::new(WeightDecay::new(0.1)),
    ];
    let longer = |chain: &Vec<Box<dyn Rule>>| {
        plain
            .iter()
            .map(|step| [chain.clone(), vec![step.clone()]].concat())
            .collect::<Vec<_>>()
    };
    let mut chains = vec![Vec::new()];
    let mut start = 0;
    for _ in 0..3 {
        let next: Vec<_> = chains[start..].iter().flat_map(longer).collect();
        start = chains.len();
        chains.extend(next);
    }
    let rules: [Box<dyn Rule>; 4] = [
        Box::new(Adam::new(0.01)),
        Box::new(Descent::new(0.1)),
        Box::new(RMSProp::new(0.01)),
        Box::new(WeightDecay::new(0.3)),
    ];
    for dtype in [DType::F32, DType::F64] {
        let (x, g) = special_values(dtype, dtype);
        let grads = grads([Some(g)]);
        for (chain, rule) in chains
            .iter()
            .flat_map(|chain| rules.iter().map(move |rule| (chain, rule)))
        {
            let chain = OptimiserChain::new([chain.clone(), vec![rule.clone()]].concat());
            assert_engines_agree(
                &instruction_sets(),
                chain,
                std::slice::from_ref(&x),
                &[grads.clone(), grads.clone()],
            );
        }
    }
}

/// Long enough for parallel chunks. f16 with f64 masters meets ties of the narrower type.
#[test]
fn every_optimiser_on_a_large_leaf() {
    let shape = [70_001];
    for (parameter, gradient, master) in [
        (DType::F32, DType::F32, None),
        (DType::BF16, DType::BF16, Some(DType::F32)),
        (DType::F16, DType::F32, Some(DType::F64)),
    ] {
        let grads: Vec<Grads> = (0..3)
            .map(|step| grads([Some(random(step, &shape, gradient, &Device::Cpu))]))
            .collect();
        let parameters = [random(9, &shape, parameter, &Device::Cpu)];
        for rule in rules_and_chains() {
            match master {
                None => assert_engines_agree(&[Engine::Fused], rule, &parameters, &grads),
                Some(dtype) => assert_engines_agree(
                    &[Engine::Fused],
                    MixedPrecision::new(dtype, rule),
                    &parameters,
                    &grads,
                ),
            }
        }
    }
}

#[test]
fn any_number_of_threads() {
    let shapes: [&[usize]; 4] = [&[300_000], &[70_001], &[1000], &[5]];
    let tensors = |seed: u64, dtype| {
        shapes
            .iter()
            .map(move |shape| random(seed, shape, dtype, &Device::Cpu))
    };
    let chain = OptimiserChain::new((
        ClipGlobalNorm::new(0.1),
        AdamW {
            lambda: 0.1,
            ..AdamW::new(0.01)
        },
        ClipNorm {
            p: 1.0,
            ..ClipNorm::new(0.1)
        },
    ));
    let with_threads = |threads: usize, optimiser: Optimiser, dtype| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        let parameters: Vec<Tensor> = tensors(1, dtype).collect();
        let grads: Vec<Grads> = (2..4).map(|seed| grads(tensors(seed, dtype).map(Some))).collect();
        pool.install(|| trajectory(Engine::Fused, optimiser, &parameters, &grads))
    };
    let rows: [(Optimiser, DType); 2] = [
        (Optimiser::new(chain.clone()), DType::F32),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, chain)),
            DType::BF16,
        ),
    ];
    for (optimiser, dtype) in rows {
        let expected = with_threads(1, optimiser.clone(), dtype);
        for threads in [2, 3, 16] {
            assert_same(
                &with_threads(threads, optimiser.clone(), dtype),
                &expected,
                (threads, dtype),
            );
        }
    }
}

/// Tensors of a shape in the layouts that candle makes without copying.
fn layouts(seed: u64, shape: &[usize], dtype: DType) -> Vec<(&'static str, Tensor)> {
    let random = |shape: &[usize]| random(seed, shape, dtype, &Device::Cpu);
    let resized = |dim: usize, size: usize| {
        let mut shape = shape.to_vec();
        shape[dim] = size;
        random(&shape)
    };
    let mut layouts = vec![
        ("contiguous", Ok(random(shape))),
        ("one number", random(&[]).broadcast_as(shape)),
    ];
    if let Some(last) = shape.len().checked_sub(1) {
        let reversed: Vec<usize> = shape.iter().rev().copied().collect();
        layouts.extend([
            (
                "transposed",
                random(&reversed).permute((0..=last).rev().collect::<Vec<_>>()),
            ),
            ("each reversed", {
                let order: Vec<usize> = std::iter::once(0).chain((1..=last).rev()).collect();
                random(&order.iter().map(|dim| shape[*dim]).collect::<Vec<_>>()).permute(order)
            }),
            ("every matrix transposed", {
                let mut by_columns = shape.to_vec();
                by_columns.swap(last, last.saturating_sub(1));
                random(&by_columns).transpose(last, last.saturating_sub(1))
            }),
            ("broadcast rows", resized(0, 1).broadcast_as(shape)),
            ("broadcast columns", resized(last, 1).broadcast_as(shape)),
            ("narrowed rows", resized(0, shape[0] + 3).narrow(0, 2, shape[0])),
            (
                "narrowed columns",
                resized(last, shape[last] + 3).narrow(last, 1, shape[last]),
            ),
        ]);
    }
    layouts
        .into_iter()
        .map(|(name, tensor)| (name, tensor.expect(name)))
        .collect()
}

/// What strided gradients are tried with: norms read them in one pass, the step in another.
fn reading_chain() -> impl Rule + Clone {
    OptimiserChain::new((
        ClipGlobalNorm::new(0.3),
        ClipNorm {
            p: 1.0,
            ..ClipNorm::new(0.2)
        },
        WeightDecay::new(0.1),
        Momentum::new(0.1),
    ))
}

#[test]
fn any_layout_of_the_gradient() {
    let all = engines();
    // The last are read in bands of rows, which begin and end within rows, and are of several matrices.
    let fused = [Engine::Fused];
    let rows: [(&[usize], &[Engine]); 9] = [
        (&[7], &all),
        (&[6, 5], &all),
        (&[3, 4, 50], &all),
        (&[301, 250], &fused),
        (&[70, 4099], &fused),
        (&[3, 1, 37, 2003], &fused),
        (&[500, 7, 9, 3], &fused),
        (&[2, 90, 11, 31], &fused),
        (&[19, 260, 130], &fused),
    ];
    for (shape, engines) in rows {
        for (parameter, gradient) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::F16),
            (DType::F32, DType::F64),
        ] {
            let parameters = [random(1, shape, parameter, &Device::Cpu)];
            for (name, strided) in layouts(2, shape, gradient) {
                let steps =
                    |gradient: &Tensor| [grads([Some(gradient.clone())]), grads([Some(gradient.clone())])];
                let copied = strided.force_contiguous().expect("a contiguous copy");
                for &engine in engines {
                    let run = |gradient| {
                        trajectory(
                            engine,
                            MixedPrecision::new(DType::F32, reading_chain()),
                            &parameters,
                            &steps(gradient),
                        )
                    };
                    assert_same(&run(&strided), &run(&copied), (name, shape, gradient, engine));
                }
            }
        }
    }
}

/// A gradient may be the parameter, a view of it, or another parameter: it is what it was before the call.
#[test]
fn gradients_that_are_views_of_parameters() {
    type View = fn(&[Tensor]) -> candle_core::Result<[Tensor; 2]>;
    let views: [(&str, View); 6] = [
        ("itself", |p| Ok([p[0].clone(), p[1].clone()])),
        ("detached", |p| Ok([p[0].detach(), p[1].detach()])),
        ("transposed", |p| Ok([p[0].t()?, p[1].t()?])),
        ("each other", |p| Ok([p[1].clone(), p[0].clone()])),
        ("reshaped", |p| {
            Ok([p[1].flatten_all()?.reshape(p[0].shape())?, p[0].t()?])
        }),
        ("part of a larger one", |p| {
            Ok([
                p[2].narrow(0, 1, p[0].dim(0)?)?,
                p[2].narrow(0, 2, p[0].dim(0)?)?.t()?,
            ])
        }),
    ];
    for (side, dtype) in [(4, DType::F32), (4, DType::BF16), (260, DType::F32)] {
        let tensors = [(1, side), (2, side), (3, side + 2)]
            .map(|(seed, rows)| random(seed, &[rows, side], dtype, &Device::Cpu));
        for (name, view) in views {
            let run = |engine, copied: bool| -> Vec<Snapshot> {
                let model = model(&tensors);
                let mut state =
                    setup(MixedPrecision::new(DType::F32, reading_chain()), &model).expect("a state");
                let parameters: Vec<Tensor> = model.values().map(|var| var.as_tensor().clone()).collect();
                let step = |_| {
                    let views = view(&parameters).expect("views");
                    let views = views.map(|view| {
                        if copied {
                            view.force_contiguous().expect("a copy")
                        } else {
                            view
                        }
                    });
                    Update::new(&mut state)
                        .engine(engine)
                        .apply(&model, &grads(views.map(Some)))
                        .expect("an update");
                    snapshot(&model, &state)
                };
                (0..2).map(step).collect()
            };
            let expected = run(Engine::Tensors, true);
            for engine in engines() {
                assert_same(&run(engine, false), &expected, (name, side, dtype, engine));
            }
        }
    }
}

/// The gradients of a tied variable's names are added up, each in its own dtype and layout.
#[test]
fn gradients_of_a_tied_variable() {
    for gradients in [
        [DType::F32, DType::F32],
        [DType::F16, DType::BF16],
        [DType::F32, DType::F64],
    ] {
        let run = |engine| {
            let x = var(&random(1, &[5, 67], DType::BF16, &Device::Cpu));
            let model = Vars::from([("0".to_string(), x.clone()), ("1".to_string(), x)]);
            let mut state = setup(MixedPrecision::new(DType::F32, reading_chain()), &model).expect("a state");
            let tied = gradients.map(|dtype| random(2, &[67, 5], dtype, &Device::Cpu).t().ok());
            Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads(tied))
                .expect("an update");
            vec![snapshot(&model, &state)]
        };
        for engine in fused().into_iter().chain(engines()) {
            assert_same(&run(engine), &run(Engine::Tensors), (engine, gradients));
        }
    }
}

hyper_parameters! {
    /// A rule that does what no rule of the crate does: it swaps slots, keeps one, stores one narrower,
    /// ignores its gradient in another, returns an old slot, and uses every operation of `Value`.
    struct Unusual {
        /// A scalar.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Unusual {
    type Scalars = f64;
    type Slots<T> = [T; 5];

    fn slots(&self) -> [Slot; 5] {
        [
            Slot::full("a", 0.5),
            Slot::zeros("b"),
            Slot::full("kept", 3.0),
            Slot::full("narrow", 0.1).stored_as(DType::BF16),
            Slot::zeros("x"),
        ]
    }

    fn scalars(&self, t: u64) -> f64 {
        self.eta / t as f64
    }

    fn step<V: Value>(eta: f64, x: V, dx: V, [a, b, kept, narrow, last]: &mut [V; 5]) -> V {
        let old = *a;
        (*a, *b) = (*b, *a);
        *b = V::select(b.ge(*kept), -*b, *b + dx.abs().sqrt());
        *narrow = narrow.max(x).min(*kept) * 1.01 - V::select(x.equal(dx), x, dx.sign() / *kept);
        *last = V::select(x.le(*last), x.constant(2.0), x);
        V::select(dx.gt(x), old, old.clamp(-eta, eta))
    }
}

hyper_parameters! {
    /// A rule whose gradient is a number.
    struct Constant {
        /// The number.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Constant {
    type Scalars = f64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("number")]
    }

    fn scalars(&self, t: u64) -> f64 {
        self.eta * t as f64
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, [number]: &mut [V; 1]) -> V {
        *number = dx.constant(2.0 * eta);
        dx.constant(eta)
    }
}

#[test]
fn rules_of_the_user() {
    for parameter in DTYPES {
        for gradient in DTYPES {
            let (parameters, grads) = small_model(&Device::Cpu, parameter, gradient);
            for dtype in [DType::F32, DType::F64] {
                let rule = OptimiserChain::new((
                    Unusual::new(0.3),
                    AccumGrad::new(2),
                    Constant::new(0.1),
                    Unusual::new(0.1),
                ));
                assert_engines_agree(&fused(), MixedPrecision::new(dtype, rule), &parameters, &grads);
                assert_engines_agree(&fused(), Unusual::default(), &parameters, &grads);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn any_chain_on_any_gradient(
        // Muon refuses kernels.
        shape in prop::collection::vec(0usize..9, 0..=4).prop_filter("a kernel", |shape| !matches!(shape[..], [a, b, c, d] if a * b > c * d)),
        (parameter, gradient) in (prop::sample::select(DTYPES.to_vec()), prop::sample::select(DTYPES.to_vec())),
        master in prop::option::of(prop::sample::select(vec![DType::F32, DType::F64])),
        members in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        layout in any::<prop::sample::Index>(),
        seed in any::<u32>(),
    ) {
        let listed = rules::catalogue();
        let chain = OptimiserChain::new(members.iter().map(|member| for_any_shape(member.get(&listed).rule.clone())).collect::<Vec<_>>());
        let parameters = [random(seed.into(), &shape, parameter, &Device::Cpu)];
        let at = |step: u64| grads([Some(layout.get(&layouts(u64::from(seed) + step, &shape, gradient)).1.clone())]);
        let steps = [at(1), at(2), at(3)];
        match master {
            None => assert_engines_agree(&[Engine::Fused], chain, &parameters, &steps),
            Some(dtype) => assert_engines_agree(&[Engine::Fused], MixedPrecision::new(dtype, chain), &parameters, &steps),
        }
    }
}
