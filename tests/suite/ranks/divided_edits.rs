//! What is done to a divided state between updates: averages, masters, other rules, other variables, as in
//! one process.

use candle_core::{DType, Tensor};
use optimisers::{
    AMSGrad, Adam, AdamW, Communicator, Ema, Error, ErrorKind, Kahan, MixedPrecision, Momentum, Optimiser,
    OptimiserChain, ScheduleFree, Setup, SplitMaster, StateTree, UniformAverage, update,
};

use support::common::{Vars, bits, is_kind, model, muon, says};
use support::reports::{gradients, parameters};
use support::threads::on;

/// What is seen of all parameters, by path.
type Seen = Vec<(String, Vec<u64>)>;

fn seen<'t>(tensors: impl IntoIterator<Item = (&'t String, &'t Tensor)>) -> Seen {
    tensors
        .into_iter()
        .map(|(path, tensor)| (path.clone(), bits(tensor)))
        .collect()
}

fn of_model(model: &Vars) -> Seen {
    seen(model.iter().map(|(path, x)| (path, x.as_tensor())))
}

/// Runs the same on one process and on several ranks, of which each has to see the same.
fn alike(
    sizes: &[usize],
    dtype: DType,
    run: impl Fn(Setup, &Vars) -> Vec<Seen> + Copy + Send + Sync + 'static,
) {
    let whole = run(Setup::default(), &model(&parameters(dtype)));
    for &size in sizes {
        let ranks = on(size, move |world| {
            run(Setup::over(&world), &model(&parameters(dtype)))
        });
        for (rank, own) in ranks.into_iter().enumerate() {
            for (place, (own, whole)) in own.iter().zip(&whole).enumerate() {
                assert!(own == whole, "rank {rank} of {size}, {dtype:?}, at {place}");
            }
        }
    }
}

fn step(state: &mut StateTree, model: &Vars, call: u64) {
    update(state, model, &gradients(call, 0, model["0"].dtype())).expect("an update");
}

#[test]
fn averages_and_masters_are_those_of_one_process() {
    fn run(optimiser: &Optimiser, setup: Setup, model: &Vars) -> Vec<Seen> {
        let mut state = setup.build(optimiser.clone(), model).expect("a state");
        let first = of_model(model);
        assert_eq!(
            state
                .with_averages(model, || Ok::<_, Error>(of_model(model)))
                .expect("no step yet"),
            first
        );
        (0..3).for_each(|call| step(&mut state, model, call));
        let averages = state.averages(model).expect("averages");
        let masters = state.masters(model).expect("masters");
        assert!(
            masters
                .values()
                .chain(averages.values())
                .all(|x| x.is_contiguous())
        );
        let before = of_model(model);
        let inside = state
            .with_averages(model, || Ok::<_, Error>(of_model(model)))
            .expect("averages");
        assert_eq!(
            inside
                .iter()
                .zip(&before)
                .filter(|(inside, before)| inside != before)
                .count(),
            averages.len() - 1,
            "one is empty"
        );
        assert_eq!(of_model(model), before);
        step(&mut state, model, 4);
        vec![seen(&averages), seen(&masters), before, inside, of_model(model)]
    }
    for dtype in [DType::F32, DType::BF16] {
        alike(&[2, 4], dtype, |setup, model| {
            let average = OptimiserChain::new((AdamW::new(0.1), Ema::new(0.9)));
            run(
                &Optimiser::new(MixedPrecision::new(DType::F32, average)),
                setup,
                model,
            )
        });
        alike(&[4, 8], dtype, |setup, model| {
            run(
                &Optimiser::new(MixedPrecision::new(DType::F32, ScheduleFree::new(0.1))),
                setup,
                model,
            )
        });
        // Of whole parameters, each on one rank.
        alike(&[2], dtype, |setup, model| {
            run(
                &Optimiser::new(OptimiserChain::new((muon(), UniformAverage::default()))),
                setup,
                model,
            )
        });
    }
    alike(&[4], DType::BF16, |setup, model| {
        run(
            &Optimiser::new(SplitMaster::new(OptimiserChain::new((
                Momentum::new(0.1),
                Ema::new(0.5),
            )))),
            setup,
            model,
        )
    });
}

#[test]
fn another_rule_and_other_variables() {
    alike(&[2, 4], DType::BF16, |setup, first| {
        let mut state = setup.build(Adam::new(0.1), first).expect("a state");
        step(&mut state, first, 0);
        let replaced = state
            .all()
            .replace(MixedPrecision::new(DType::F32, AdamW::new(0.1)), first)
            .expect("another rule");
        assert_eq!(replaced[0].kept, ["m", "v", "t"]);
        step(&mut state, first, 1);
        let stores: [(Optimiser, &str); 4] = [
            (Optimiser::new(SplitMaster::new(AdamW::new(0.1))), "rest"),
            (Optimiser::new(SplitMaster::of_24_bits(AdamW::new(0.1))), "rest"),
            (Optimiser::new(Kahan::new(AdamW::new(0.1))), "compensation"),
            (
                Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
                "master",
            ),
        ];
        for (call, (store, own)) in (5..).zip(stores) {
            let replaced = state.all().replace(store, first).expect("another store");
            assert_eq!(
                (&*replaced[0].kept, replaced[0].dropped.len()),
                (&[own, "m", "v", "t"].map(str::to_string)[..], 0)
            );
            (0..20).for_each(|_| step(&mut state, first, call));
            // Each rank sets the parts of the others as these do, though it lacks what they keep beside them.
            let (before, read) = (of_model(first), state.masters(first).expect("masters"));
            state.set_masters(first, &read).expect("the same");
            assert!(of_model(first) == before, "{own}");
        }
        let second = model(&first.values().map(|x| x.as_tensor().clone()).collect::<Vec<_>>());
        state.rebind(&second).expect("other variables");
        step(&mut state, &second, 2);
        says(
            &update(&mut state, first, &gradients(3, 0, DType::BF16))
                .expect_err("not its variables any more"),
            &["\"0\""],
        );
        step(&mut state, &second, 4);
        vec![
            of_model(first),
            of_model(&second),
            seen(&state.masters(&second).expect("masters")),
        ]
    });
}

#[test]
fn another_rule_on_one_rank_is_refused_on_all() {
    on(2, |world| {
        let model = model(&parameters(DType::F32));
        let mut state = Setup::over(&world)
            .build(Adam::new(0.1), &model)
            .expect("a state");
        step(&mut state, &model, 0);
        let error = state.all().replace(muon(), &model).expect_err("cut parameters");
        assert_eq!(error.path(), Some("0"), "{error}");
        is_kind(
            &error,
            ErrorKind::Unsupported,
            &["divided among ranks", "Adafactor", "restore"],
        );
        // The rules have the same fields with the same values.
        let all = state.all();
        let error = match world.rank() {
            0 => all.replace(Adam::new(0.1), &model),
            _ => all.replace(AMSGrad::new(0.1), &model),
        };
        let error = error.expect_err("two rules");
        says(&error, &["rank 1", "\"0\"", "Adam on rank 0; AMSGrad on rank 1"]);
        // Alone this call would start the state of one part anew.
        let error = match world.rank() {
            0 => update(&mut state, &model, &gradients(1, 0, DType::F32)).expect_err("alone"),
            _ => state
                .all()
                .replace(Momentum::new(0.1), &model)
                .expect_err("alone"),
        };
        says(&error, &["rank 1 called `replace`, and rank 0 update"]);
        step(&mut state, &model, 2);
    });
}
