//! The code for CUDA devices, compiled by NVRTC. It needs no GPU.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::Device;
use optimisers::__private::cuda::ptx;
use optimisers::__private::emulation::printed;
use optimisers::{
    AccumGrad, Adam, AdamW, Cautious, ClipGlobalNorm, ClipGrad, ClipNorm, Engine, IntoOptimiser, Kahan, LAMB,
    LARS, MixedPrecision, Muon, Optimiser, OptimiserChain, Prodigy, Q8, Rule, SplitMaster,
    StochasticRounding, StoreAs, Update, rules, setup,
};

use support::common::{grads, model, random};

/// The sources of three updates.
fn sources(optimiser: impl IntoOptimiser, parameter: DType, gradient: DType) -> Vec<Arc<str>> {
    // As few elements as are stored in 8 bits.
    let tensor = |seed, dtype| random(seed, &[64, 64], dtype, &Device::Cpu);
    let model = model(&[tensor(1, parameter)]);
    let mut state = setup(optimiser, &model).expect("a state");
    let launches = printed(|| {
        for step in 2..5 {
            Update::new(&mut state)
                .engine(Engine::Emulated)
                .apply(&model, &grads([Some(tensor(step, gradient))]))
                .expect("an update");
        }
    });
    launches.into_iter().map(|launch| launch.source).collect()
}

/// Every rule, alone and where most code comes together, in every dtype.
fn all_sources() -> Vec<Arc<str>> {
    let mut all = BTreeSet::new();
    for parameter in [F16, BF16, F32, F64] {
        let mut add = |optimiser: Optimiser| all.extend(sources(optimiser, parameter, parameter));
        for listing in rules::catalogue() {
            let rule = || listing.rule.clone();
            add(Optimiser::new(rule()));
            add(Optimiser::new(MixedPrecision::new(
                F32,
                OptimiserChain::new((AccumGrad::new(2), ClipGrad::new(1.0), rule())),
            )));
            add(Optimiser::new(Kahan::new(rule())));
            add(Optimiser::new(StochasticRounding::new(1, rule())));
            add(Optimiser::new(MixedPrecision::new(F32, StoreAs::all(Q8, rule()))));
            if parameter != F16 {
                add(Optimiser::new(SplitMaster::new(rule())));
                add(Optimiser::new(SplitMaster::of_24_bits(StoreAs::all(Q8, rule()))));
            }
        }
        let folds = |p| {
            OptimiserChain::new((
                ClipNorm {
                    p,
                    ..ClipNorm::new(1.0)
                },
                AdamW::new(0.1),
            ))
        };
        let clipped = [folds(1.0), folds(2.0), folds(3.0), folds(f64::INFINITY)];
        let mut rules: Vec<Box<dyn Rule>> = clipped
            .into_iter()
            .map(|rule| Box::new(rule) as Box<dyn Rule>)
            .collect();
        rules.push(Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            ClipGlobalNorm::new(1.0),
            Prodigy::default(),
            LAMB::new(0.1),
        ))));
        rules.push(Box::new(OptimiserChain::new((
            ClipGlobalNorm::new(1.0),
            Muon::new(0.1),
            LAMB::new(0.1),
        ))));
        // Each kind of norm, before others.
        rules.extend([0.5, 1.0, 2.0, f64::INFINITY].map(|p| {
            let clip = ClipNorm {
                p,
                ..ClipNorm::new(1.0)
            };
            Box::new(OptimiserChain::new((
                clip,
                ClipGlobalNorm::new(1.0),
                LAMB::new(0.1),
                Cautious::new(Adam::new(0.1)),
                LARS::new(0.1),
            ))) as _
        }));
        for rule in rules {
            add(Optimiser::new(rule.clone()));
            add(Optimiser::new(MixedPrecision::new(F32, rule.clone())));
            if parameter != F16 {
                add(Optimiser::new(SplitMaster::new(rule)));
            }
        }
        for gradient in [F16, BF16, F32, F64] {
            all.extend(sources(
                MixedPrecision::new(F32, AdamW::new(0.1)),
                parameter,
                gradient,
            ));
        }
    }
    all.into_iter().collect()
}

#[test]
fn every_source_compiles_for_every_device() {
    let sources = all_sources();
    let tasks: Vec<_> = sources
        .iter()
        .flat_map(|source| [(7, 5), (8, 0), (9, 0)].map(|capability| (source, capability)))
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((source, capability)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = ptx(source, *capability) {
                panic!("{error}\nfor {capability:?}:\n{source}");
            }
        }
    };
    std::thread::scope(|scope| {
        (0..std::thread::available_parallelism().map_or(2, usize::from)).for_each(|_| {
            scope.spawn(work);
        });
    });
    assert!(sources.len() > 300, "{}", sources.len());
}

/// The elements of a thread are moved by as few accesses as there can be, and nothing is kept outside of
/// registers.
#[test]
fn accesses_are_vectors() {
    let code = |optimiser: Optimiser, dtype| {
        let source = sources(optimiser, dtype, dtype).pop().expect("a source");
        ptx(&source, (9, 0)).expect("PTX")
    };
    let count = |code: &str, access: &str| code.matches(access).count();
    for dtype in [BF16, F16] {
        let mixed = code(Optimiser::new(MixedPrecision::new(F32, AdamW::new(0.1))), dtype);
        // Master, momentum and variance; the gradient. Then the same three, and the parameter.
        assert_eq!(
            [
                count(&mixed, "ld.global.v4.f32"),
                count(&mixed, "ld.global.v4.u16")
            ],
            [3, 1],
            "{mixed}"
        );
        assert_eq!(
            [
                count(&mixed, "st.global.v4.f32"),
                count(&mixed, "st.global.v4.u16")
            ],
            [3, 1],
            "{mixed}"
        );
        assert_eq!(count(&mixed, ".local"), 0, "{mixed}");
    }
    // The compiler may unroll the loop.
    let double = code(Optimiser::new(AdamW::new(0.1)), F64);
    let [loads, stores] = ["ld.global.v2.f64", "st.global.v2.f64"].map(|access| count(&double, access));
    assert!(
        stores >= 3 && loads * 3 == stores * 4,
        "{loads} loads, {stores} stores: {double}"
    );
}

/// The kernels with plain arguments, as others compile them.
#[test]
fn printed_kernels_compile() {
    let compiles = |optimiser: Optimiser, dtype| {
        let printed = optimisers::printed(optimiser, dtype, dtype).expect("an elementwise rule");
        let source = printed.kernel().source();
        // At the front are those of the intrinsics that it needs; `ptx` adds all.
        let (front, own) = source.split_at(source.find("typedef ").expect("a type"));
        for name in [
            "half_to_float(",
            "float_to_half(",
            "warp_largest(",
            "in_global_memory(",
        ] {
            assert_eq!(front.contains(name), own.contains(name), "{name} in\n{source}");
        }
        if let Err(error) = ptx(own, (8, 0)) {
            panic!("{error}\n{source}");
        }
    };
    for dtype in [F16, BF16, F32, F64] {
        compiles(Optimiser::new(MixedPrecision::new(F32, AdamW::new(0.1))), dtype);
        compiles(Optimiser::new(Kahan::new(AdamW::new(0.1))), dtype);
        compiles(Optimiser::new(StochasticRounding::new(1, AdamW::new(0.1))), dtype);
        compiles(Optimiser::new(StoreAs::all(Q8, AdamW::new(0.1))), dtype);
    }
}
