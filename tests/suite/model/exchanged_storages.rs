//! A tensor whose storage something has put another in place of: an error that says so, and nothing is read
//! or written behind it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use candle_core::DType::{BF16, F32, F64};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Shape, Storage, Tensor};
use optimisers::{
    AccumGrad, Adam, Descent, Engine, Error, ErrorKind, Flow, Gradient, IntoOptimiser, Kahan, MixedPrecision,
    Optimiser, OptimiserChain, Parameter, Result, Rule, Setup, SplitMaster, State, StateTree, Update,
    hyper_parameters, range, setup, setup_with, update,
};

use support::common::{Grads, Vars, bits, constant, engines, is_kind, tensor, values, var};
use support::tested::Tested;

const LENGTH: usize = 1000;

/// Puts another storage into a tensor: candle lets every in-place operation do so.
struct Exchange(CpuStorage);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        *storage = self.0.clone();
        Ok(())
    }
}

fn exchange(x: &Tensor, storage: CpuStorage) {
    x.inplace_op1(&Exchange(storage)).expect("an exchange");
}

fn storage(dtype: DType, length: usize) -> CpuStorage {
    let values = constant(7.0, length, dtype);
    let (storage, _) = values.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("a storage on the CPU")
    };
    storage.clone()
}

/// What cannot hold the elements of a tensor of this dtype.
fn others(dtype: DType) -> [(DType, usize); 4] {
    let other = if dtype == F32 { F64 } else { F32 };
    [(dtype, 4), (dtype, 0), (dtype, LENGTH - 1), (other, LENGTH)]
}

fn assert_exchanged(
    error: &Error,
    path: &str,
    name: &str,
    expected: (DType, usize),
    got: (DType, usize),
    moved: &[&str],
) {
    is_kind(error, ErrorKind::Memory, &[&format!("{name}: the storage holds")]);
    let (expected, got) = (
        format!("{} of {:?}", expected.1, expected.0),
        format!("{} elements of {:?}", got.1, got.0),
    );
    assert_eq!(
        (error.path(), error.got(), error.expected()),
        (Some(path), Some(&*got), Some(&*expected)),
        "{error}"
    );
    let text = error.to_string();
    let before = text
        .split_once("these parameters had already moved: ")
        .and_then(|(_, text)| text.split_once("; restore model"));
    assert_eq!(
        before.map(|(before, _)| before),
        (!moved.is_empty()).then_some(&*moved.join(", ")),
        "{error}"
    );
}

fn model(dtype: DType) -> Vars {
    [("a", 1), ("b", 2)]
        .map(|(path, seed)| (path.to_string(), var(&tensor(seed, &[LENGTH], dtype))))
        .into()
}

fn gradients(dtype: DType) -> Grads {
    [("a", 3), ("b", 4)]
        .map(|(path, seed)| (path.to_string(), tensor(seed, &[LENGTH], dtype)))
        .into()
}

/// Makes one step, exchanges a storage, and takes another step on each engine: an error, with nothing changed
/// of `a` and of all state.
fn assert_refused<O: IntoOptimiser + Clone>(
    optimiser: O,
    dtype: DType,
    name: &str,
    change: impl Fn(&Vars, &mut Grads, CpuStorage),
) {
    for engine in engines() {
        for is_first in [true, false] {
            for got in others(dtype) {
                let (model, mut grads) = (model(dtype), gradients(dtype));
                let mut state = setup(optimiser.clone(), &model).expect("a state");
                if !is_first {
                    Update::new(&mut state)
                        .engine(engine)
                        .apply(&model, &grads)
                        .expect("an update");
                }
                let all = |state: &optimisers::StateTree| {
                    let leaf = |path: &str| state.leaf(path).map(|leaf| (leaf.steps(), leaf.counters()));
                    let tensors = |path: &str| {
                        let leaf = state.leaf(path).expect("a leaf");
                        leaf.tensor_names()
                            .into_iter()
                            .map(|name| bits(&leaf.tensor(&name).unwrap()))
                            .collect::<Vec<_>>()
                    };
                    (leaf("a"), leaf("b"), tensors("a"), tensors("b"))
                };
                let before = (bits(&model["a"]), all(&state));
                change(&model, &mut grads, storage(got.0, got.1));
                let error = Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &grads)
                    .expect_err("a refusal");
                assert_exchanged(&error, "b", name, (dtype, LENGTH), got, &[]);
                assert!(
                    (bits(&model["a"]), all(&state)) == before,
                    "{engine:?}, {}",
                    optimiser.name()
                );
            }
        }
    }
}

fn with_parameter(model: &Vars, _: &mut Grads, storage: CpuStorage) {
    exchange(&model["b"], storage);
}

fn with_gradient(_: &Vars, grads: &mut Grads, storage: CpuStorage) {
    exchange(&grads["b"], storage);
}

#[test]
fn a_parameter_whose_storage_was_exchanged_is_refused() {
    assert_refused(Descent::new(0.1), F32, "parameter", with_parameter);
    assert_refused(Adam::new(0.1), F64, "parameter", with_parameter);
    assert_refused(
        MixedPrecision::new(F32, Adam::new(0.1)),
        BF16,
        "parameter",
        with_parameter,
    );
    assert_refused(
        SplitMaster::new(Adam::new(0.1)),
        BF16,
        "parameter",
        with_parameter,
    );
    assert_refused(Kahan::new(Descent::new(0.1)), BF16, "parameter", with_parameter);
}

#[test]
fn a_gradient_whose_storage_was_exchanged_is_refused() {
    assert_refused(Descent::new(0.1), F32, "gradient", with_gradient);
    assert_refused(
        MixedPrecision::new(F32, Adam::new(0.1)),
        BF16,
        "gradient",
        with_gradient,
    );
    assert_refused(
        OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1))),
        F32,
        "gradient",
        with_gradient,
    );
}

/// A storage says nothing about shapes when a tensor is made of it.
#[test]
fn a_gradient_that_was_made_of_too_short_a_storage_is_refused() -> Tested {
    let made = |length: usize, shape: &[usize]| {
        Tensor::from_storage(
            Storage::Cpu(storage(F32, length)),
            Shape::from(shape),
            BackpropOp::none(),
            false,
        )
    };
    let transposed = made(4, &[25, 40]).t()?;
    // The last element of this is the 967th.
    let strided = made(996, &[25, 40])
        .narrow(1, 3, 4)
        .and_then(|part| part.narrow(0, 0, 25))?;
    for engine in engines() {
        for (gradient, needed, has) in [
            (made(4, &[40, 25]), 1000, 4),
            (transposed.clone(), 1000, 4),
            (strided.clone(), 967, 996),
        ] {
            let x = var(&tensor(1, gradient.dims(), F32));
            let mut state = setup(Descent::new(0.1), &x)?;
            let before = bits(&x);
            let outcome = Update::new(&mut state)
                .engine(engine)
                .apply(&x, &[("", &gradient)]);
            if needed <= has {
                outcome?;
                continue;
            }
            assert_exchanged(
                &outcome.expect_err("a refusal"),
                "",
                "gradient",
                (F32, needed),
                (F32, has),
                &[],
            );
            assert!(bits(&x) == before);
        }
    }
    Ok(())
}

hyper_parameters! {
    /// Descent by a function of the whole tensor that shows its x to others.
    struct Shown {
        /// Rules have one.
        unused: bool = false => range::any,
    }
}

/// What functions of the rules of this file see, by thread.
static SEEN: Mutex<Vec<Tensor>> = Mutex::new(Vec::new());

impl Rule for Shown {
    fn init(&self, _x: Parameter<'_>) -> Result<State> {
        Ok(State::empty().with_counter("t"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, x, dx, _| {
            SEEN.lock().expect("no panic").push(x.clone());
            Ok(dx)
        })))
    }
}

/// A function of a rule gets a copy of the master, so that nothing it does with that reaches the state.
#[test]
fn a_master_cannot_be_exchanged() -> Tested {
    let x = var(&tensor(1, &[LENGTH], BF16));
    let gradients = [("", tensor(2, &[LENGTH], BF16))];
    let mut state = setup(MixedPrecision::new(F32, Shown::default()), &x)?;
    update(&mut state, &x, &gradients)?;
    let master = |state: &StateTree| {
        values(
            &state
                .leaf("")
                .and_then(|leaf| leaf.tensor("master").ok())
                .expect("a master"),
        )
    };
    let before = master(&state);
    let seen = SEEN.lock()?.pop().expect("a master");
    exchange(&seen, storage(F32, 4));
    assert_eq!(master(&state), before);
    for engine in engines() {
        Update::new(&mut state).engine(engine).apply(&x, &gradients)?;
    }
    assert_eq!(
        state.leaf("").expect("a leaf").steps(),
        1 + engines().len() as u64
    );
    Ok(())
}

/// Exchanges the storage of a tensor in the middle of a commit.
#[derive(Clone, Debug)]
struct Exchanges(Arc<Tensor>);

impl optimisers::Describe for Exchanges {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Exchanges");
    }
}

impl Rule for Exchanges {
    fn init(&self, _x: Parameter<'_>) -> Result<State> {
        Ok(State::empty().with_counter("t"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors_late(state, |_, _, dx, _| {
            exchange(&self.0, storage(F32, 4));
            Ok(dx)
        })))
    }
}

/// Other leaves may have been written by then: the error names them.
#[test]
fn a_storage_that_is_exchanged_during_the_commit_is_an_error_that_names_what_has_moved() -> Tested {
    for engine in engines() {
        for of_gradient in [false, true] {
            let (model, grads) = (model(F32), gradients(F32));
            let victim = Arc::new(if of_gradient {
                grads["b"].clone()
            } else {
                model["b"].as_tensor().clone()
            });
            let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
                Some(if path == "a" {
                    Optimiser::new(Descent::new(1.0))
                } else {
                    Optimiser::new(Exchanges(victim.clone()))
                })
            };
            let mut state = setup_with(&model, choose)?;
            let expected: Vec<f64> = values(&(model["a"].as_tensor() - &grads["a"])?);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                Update::new(&mut state).engine(engine).apply(&model, &grads)
            }));
            let steps = |path: &str| state.leaf(path).expect("a leaf").steps();
            assert_eq!(
                (values(&model["a"]), steps("a"), steps("b")),
                (expected, 1, 0),
                "{engine:?}"
            );
            match outcome {
                // candle's own operations find it.
                Err(_) if engine == Engine::Tensors => {}
                outcome => {
                    let error = outcome.expect("no panic").expect_err("an error");
                    let name = match (engine, of_gradient) {
                        (Engine::Fused, false) => "parameter",
                        (_, true) => "result of a function",
                        _ => "tensor",
                    };
                    if engine == Engine::Fused {
                        assert_exchanged(&error, "b", name, (F32, LENGTH), (F32, 4), &["a"]);
                        assert!(
                            error.to_string().contains("had already moved: a; restore"),
                            "{error}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// An error on one rank is one on all.
#[test]
fn an_exchanged_storage_on_one_rank_is_an_error_on_all() {
    for (of_gradient, optimiser) in [(true, 0), (false, 0), (true, 1), (false, 1)] {
        let train = |rank: usize, world: optimisers::LocalRank| {
            let (model, grads) = (model(F32), gradients(F32));
            let mut state = match optimiser {
                0 => Setup::over(&world).build(Adam::new(0.1), &model),
                _ => Setup::over(&world).build(
                    OptimiserChain::new((optimisers::ClipGlobalNorm::new(1.0), Adam::new(0.1))),
                    &model,
                ),
            }
            .expect("a state");
            let before = bits(&model["a"]);
            if rank == 1 {
                exchange(
                    if of_gradient { &grads["b"] } else { &model["b"] },
                    storage(F32, 4),
                );
            }
            let error = update(&mut state, &model, &grads).expect_err("an error");
            assert!(bits(&model["a"]) == before && state.leaves().all(|leaf| leaf.steps() == 0));
            error.to_string()
        };
        let errors: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = optimisers::ranks(3)
                .into_iter()
                .enumerate()
                .map(|(rank, world)| scope.spawn(move || train(rank, world)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        assert!(
            errors
                .iter()
                .all(|error| error.contains("holds 4 elements of F32")),
            "{errors:?}"
        );
        assert!(
            errors[1].starts_with("parameter \"b\"") && errors[0].contains("rank 1"),
            "{errors:?}"
        );
    }
}

/// All variables are asked before the first gets its values.
#[test]
fn destructured_values_are_refused_before_the_first_is_written() {
    let model = model(F32);
    let (flat, structure) = optimisers::destructure(&model).expect("a vector");
    exchange(&model["b"], storage(F32, LENGTH - 1));
    let before = bits(&model["a"]);
    let flat = (flat * 3.0).expect("other values");
    let error = structure.assign(&flat, &model).expect_err("another storage");
    assert_exchanged(&error, "b", "variable", (F32, LENGTH), (F32, LENGTH - 1), &[]);
    assert_eq!(bits(&model["a"]), before);
}
