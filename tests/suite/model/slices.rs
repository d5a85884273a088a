//! Parameters and gradients in memory that the program owns.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use candle_core::DType::{BF16, F16, F32, F64, U32};
use candle_core::{Device, Tensor};
use half::bf16;
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Communicator, Descent, Ema, Engine,
    ErrorKind, Flow, Gradient, GradientSlices, MemoryMut, MemoryRef, MixedPrecision, Muon, Optimiser,
    OptimiserChain, Parameter, ParameterSlices, Result, Rule, Setup, State, StateTree, Update,
    hyper_parameters, range, setup, trainables, update,
};
use optimisers_plain::Vector;

use crate::engine::engines::small_model;
use support::common::{
    Grads, Vars, assert_same, is_kind, optimisers_for, says, snapshot, tensor, trajectory, values, var,
};
use support::threads::on;

const CPU: &Device = &Device::Cpu;

/// The numbers of a tensor in a vector.
pub fn vector(tensor: &Tensor) -> Vector {
    let flat = tensor.flatten_all().expect("a vector");
    match tensor.dtype() {
        F16 => Vector::F16(flat.to_vec1().expect("numbers")),
        BF16 => Vector::BF16(flat.to_vec1().expect("numbers")),
        F32 => Vector::F32(flat.to_vec1().expect("numbers")),
        F64 => Vector::F64(flat.to_vec1().expect("numbers")),
        other => panic!("no slices of {other:?}"),
    }
}

/// A tensor of these numbers.
pub fn in_shape(vector: Vector, shape: &[usize]) -> Tensor {
    let made = match vector {
        Vector::F16(values) => Tensor::from_vec(values, shape, CPU),
        Vector::BF16(values) => Tensor::from_vec(values, shape, CPU),
        Vector::F32(values) => Tensor::from_vec(values, shape, CPU),
        Vector::F64(values) => Tensor::from_vec(values, shape, CPU),
    };
    made.expect("a tensor")
}

/// Runs a function on the values of a model in vectors, and gives them back to the model.
pub fn in_slices<T>(model: &Vars, run: impl FnOnce(&ParameterSlices<'_>) -> Result<T>) -> Result<T> {
    let mut vectors: Vec<Vector> = model.values().map(|x| vector(x)).collect();
    let mut parameters = ParameterSlices::new();
    for ((path, x), values) in model.iter().zip(&mut vectors) {
        parameters = parameters.with(path, x.shape(), values.lend())?;
    }
    let done = run(&parameters);
    drop(parameters);
    for (x, values) in model.values().zip(vectors) {
        x.set(&in_shape(values, x.dims())).expect("the same shape");
    }
    done
}

/// The same with gradients in vectors.
pub fn apply_in_slices<T>(
    model: &Vars,
    grads: &Grads,
    run: impl FnOnce(&ParameterSlices<'_>, &GradientSlices<'_>) -> Result<T>,
) -> Result<T> {
    let vectors: Vec<(&String, Vector)> = grads
        .iter()
        .map(|(path, gradient)| (path, vector(gradient)))
        .collect();
    let mut gradients = GradientSlices::new();
    for (path, values) in &vectors {
        gradients = gradients.with(path, values.show())?;
    }
    in_slices(model, |parameters| run(parameters, &gradients))
}

#[test]
fn every_optimiser_has_the_bits_of_variables() {
    for (parameter, gradient) in [F16, BF16, F32, F64]
        .into_iter()
        .flat_map(|parameter| [(parameter, parameter), (parameter, F32)])
    {
        let (parameters, all_grads) = small_model(&Device::Cpu, parameter, gradient);
        for optimiser in optimisers_for(parameter) {
            let expected = trajectory(Engine::Fused, optimiser.clone(), &parameters, &all_grads);
            let model = support::common::model(&parameters);
            let mut state =
                in_slices(&model, |parameters| setup(optimiser.clone(), parameters)).expect("a state");
            let step = |grads| {
                apply_in_slices(&model, grads, |parameters, grads| {
                    update(&mut state, parameters, grads)
                })
                .expect("an update");
                snapshot(&model, &state)
            };
            let got: Vec<_> = all_grads.iter().map(step).collect();
            assert_same(
                &got,
                &expected,
                format!("{} of {parameter:?}, {gradient:?}", optimiser.name()),
            );
        }
    }
}

/// Slices and tensors can be mixed: parameters in the one, gradients in the other.
#[test]
fn parameters_and_gradients_need_not_both_be_slices() {
    let model = Vars::from([("x".to_string(), var(&Tensor::new(&[1f32, 2.0], CPU).unwrap()))]);
    let mut state = setup(Descent::new(0.5), &model).unwrap();
    update(
        &mut state,
        &model,
        &GradientSlices::new().with("x", &[1f32, 1.0]).unwrap(),
    )
    .unwrap();
    assert_eq!(values(&model["x"]), [0.5, 1.5]);

    let mut x = [1f32, 2.0];
    let parameters = ParameterSlices::new().with("x", 2, &mut x).unwrap();
    let mut state = setup(Descent::new(0.5), &parameters).unwrap();
    update(
        &mut state,
        &parameters,
        &[("x", Tensor::new(&[1f32, 1.0], CPU).unwrap())],
    )
    .unwrap();
    drop(parameters);
    assert_eq!(x, [0.5, 1.5]);
}

#[test]
fn bad_input_is_refused_with_facts_and_changes_nothing() {
    let (mut x, mut y) = (vec![1f32; 6], [2f64; 2]);
    let error = ParameterSlices::new().with("x", (2, 4), &mut x).unwrap_err();
    is_kind(
        &error,
        ErrorKind::Memory,
        &["\"x\"", "its shape is [2, 4]", "the length of its slice"],
    );
    assert_eq!(
        (error.path(), error.got(), error.expected()),
        (Some("x"), Some("6"), Some("8")),
        "{error}"
    );
    let mut other = x.clone();
    let error = ParameterSlices::new()
        .with("x", 6, &mut x)
        .unwrap()
        .with("x", 6, &mut other)
        .unwrap_err();
    says(&error, &["two variables", "\"x\""]);
    let error = GradientSlices::new()
        .with("x", &x)
        .unwrap()
        .with("x", &other)
        .unwrap_err();
    says(&error, &["two gradients", "\"x\""]);
    says(
        &setup(Descent::new(0.1), &ParameterSlices::new()).unwrap_err(),
        &["no trainable"],
    );

    let whole = ParameterSlices::new()
        .with("x", (2, 3), &mut x)
        .unwrap()
        .with("y", 2, &mut y)
        .unwrap();
    let mut state = setup(Adam::new(0.1), &whole).unwrap();
    assert_eq!(state.len(), 2);
    let refused = |state: &mut StateTree,
                   whole: &ParameterSlices<'_>,
                   gradients: &GradientSlices<'_>,
                   words: &[&str]| {
        says(&update(state, whole, gradients).unwrap_err(), words);
        assert!(state.leaves().all(|leaf| leaf.steps() == 0));
        let now = state.masters(whole).unwrap();
        assert_eq!(
            (values(&now["x"]), values(&now["y"])),
            (vec![1.0; 6], vec![2.0; 2])
        );
    };
    refused(
        &mut state,
        &whole,
        &GradientSlices::new(),
        &["no gradient for any", "2 parameters"],
    );
    refused(
        &mut state,
        &whole,
        &GradientSlices::new().with("z", &[1f32]).unwrap(),
        &["\"z\"", "x, y"],
    );
    let short = GradientSlices::new()
        .with("x", &[1f32; 6])
        .unwrap()
        .with("y", &[1f32; 3])
        .unwrap();
    refused(&mut state, &whole, &short, &["\"y\"", "[3]", "[2]"]);
    drop(whole);

    let one = GradientSlices::new().with("x", &[1f32; 6]).unwrap();
    let missing = ParameterSlices::new().with("x", (2, 3), &mut x).unwrap();
    says(
        &update(&mut state, &missing, &one).unwrap_err(),
        &["\"y\"", "but the model does not"],
    );
    drop(missing);
    let mut z = [0f32];
    let more = ParameterSlices::new()
        .with("x", (2, 3), &mut x)
        .unwrap()
        .with("y", 2, &mut y)
        .unwrap()
        .with("z", 1, &mut z)
        .unwrap();
    says(
        &update(&mut state, &more, &one).unwrap_err(),
        &["\"z\"", "not in this state"],
    );
    drop(more);
    let reshaped = ParameterSlices::new()
        .with("x", (3, 2), &mut x)
        .unwrap()
        .with("y", 2, &mut y)
        .unwrap();
    says(
        &update(&mut state, &reshaped, &one).unwrap_err(),
        &["\"x\"", "[3, 2]", "[2, 3]"],
    );
    drop(reshaped);
    let mut narrow = [1f32; 2];
    let narrowed = ParameterSlices::new()
        .with("x", (2, 3), &mut x)
        .unwrap()
        .with("y", 2, &mut narrow)
        .unwrap();
    says(
        &update(&mut state, &narrowed, &one).unwrap_err(),
        &["\"y\"", "F32", "F64"],
    );
}

#[test]
fn bytes_are_lent_as_numbers_of_a_dtype() {
    let mut x = [1f32, 2.0, 3.0];
    let numbers: &mut [u8] = bytemuck::cast_slice_mut(&mut x);
    assert_eq!(
        format!("{:?}", MemoryRef::from_bytes(numbers, F32).unwrap()),
        "F32([1.0, 2.0, 3.0])"
    );
    assert_eq!(
        format!("{:?}", MemoryRef::from_bytes(numbers, BF16).unwrap()),
        "BF16([0.0, 1.0, 0.0, 2.0, 0.0, 3.0])"
    );
    assert_eq!(
        format!("{:?}", MemoryMut::from_bytes(&mut [], F64).unwrap()),
        "F64([])"
    );

    let refused =
        |bytes: &[u8], dtype, words: &[&str]| says(&MemoryRef::from_bytes(bytes, dtype).unwrap_err(), words);
    refused(&numbers[..6], F32, &["bytes is 6", "F32", "a multiple of 4"]);
    refused(&numbers[1..9], F32, &["F32", "multiple of 4"]);
    refused(numbers, U32, &["U32", "F16, BF16, F32 or F64"]);
    says(
        &MemoryMut::from_bytes(&mut numbers[..3], F16).unwrap_err(),
        &["bytes is 3", "F16", "a multiple of 2"],
    );

    let memory = MemoryMut::from_bytes(numbers, F32).unwrap();
    let parameters = ParameterSlices::new().with("x", 3, memory).unwrap();
    let mut state = setup(Descent::new(0.5), &parameters).unwrap();
    update(
        &mut state,
        &parameters,
        &GradientSlices::new().with("x", &[2f32; 3]).unwrap(),
    )
    .unwrap();
    drop(parameters);
    assert_eq!(x, [0.0, 1.0, 2.0]);
}

hyper_parameters! {
    /// Keeps and overwrites whatever it gets.
    struct Grabs {
        /// Whether it panics then.
        panics: bool = false => range::any,
    }
}

static GRABBED: Mutex<Vec<Tensor>> = Mutex::new(Vec::new());

fn spoil(tensor: &Tensor) {
    GRABBED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(tensor.clone());
    let _ = tensor.detach().zero_set();
}

impl Rule for Grabs {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        assert_eq!((x.shape(), x.dtype()), (&[2, 2][..], F32.into()));
        Ok(State::empty())
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        assert_eq!((x.shape(), x.dtype()), (&[2, 2][..], F32.into()));
        Ok(Flow::Step(dx.with_tensors(state, |_, x, dx, _| {
            let next = (x + &dx)?;
            spoil(x);
            spoil(&dx);
            assert!(!self.panics, "on purpose");
            Ok(next)
        })))
    }
}

/// What a rule does with tensors that it gets has no effect on memory that was lent, neither at once nor
/// later.
#[test]
fn memory_does_not_leak_into_rules() {
    let (mut x, gradient) = (vec![3f32; 4], vec![1f32; 4]);
    for engine in [Engine::Fused, Engine::Tensors] {
        x.fill(3.0);
        let parameters = ParameterSlices::new().with("x", (2, 2), &mut x).unwrap();
        let mut state = setup(Grabs::new(false), &parameters).unwrap();
        let gradients = GradientSlices::new().with("x", &gradient).unwrap();
        Update::new(&mut state)
            .engine(engine)
            .apply(&parameters, &gradients)
            .unwrap();
        drop((parameters, gradients));
        let grabbed = std::mem::take(&mut *GRABBED.lock().unwrap_or_else(PoisonError::into_inner));
        assert!(grabbed.len() >= 2);
        for tensor in grabbed.iter().filter(|tensor| tensor.is_contiguous()) {
            tensor.zero_set().unwrap();
        }
        assert_eq!((&x, &gradient), (&vec![-1.0; 4], &vec![1.0; 4]), "{engine:?}");
    }
}

/// Panics, and values that are never dropped, leave the memory to its owner.
#[test]
fn memory_comes_back_whatever_happens() {
    let (mut x, gradient) = (vec![3f32; 4], vec![1f32; 4]);
    let mut run = |rule: Grabs, forgets: bool| {
        let parameters = ParameterSlices::new().with("x", (2, 2), &mut x).unwrap();
        let gradients = GradientSlices::new().with("x", &gradient).unwrap();
        let mut state = setup(rule, &parameters).unwrap();
        let done = catch_unwind(AssertUnwindSafe(|| update(&mut state, &parameters, &gradients)));
        if forgets {
            std::mem::forget((parameters, gradients));
        }
        done.is_ok()
    };
    assert_eq!(
        [
            run(Grabs::new(true), false),
            run(Grabs::new(true), true),
            run(Grabs::new(false), true)
        ],
        [false, false, true]
    );
    x.extend([5.0; 1000]);
    assert_eq!(
        (&x[..5], gradient),
        (&[-1.0, -1.0, -1.0, -1.0, 5.0][..], vec![1.0; 4])
    );
}

#[test]
fn a_checkpoint_holds_what_is_in_slices() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("checkpoint");
    let rule = || {
        MixedPrecision::new(
            F32,
            OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.1))),
        )
    };
    let (mut x, gradient) = (vec![bf16::ONE; 6], vec![bf16::from_f32(0.25); 6]);
    let mut state = setup(rule(), &ParameterSlices::new().with("x", (2, 3), &mut x).unwrap()).unwrap();
    let step = |state: &mut StateTree, x: &mut Vec<bf16>| {
        let gradients = GradientSlices::new().with("x", &gradient).unwrap();
        update(
            state,
            &ParameterSlices::new().with("x", (2, 3), x).unwrap(),
            &gradients,
        )
        .unwrap();
    };
    step(&mut state, &mut x);
    let parameters = ParameterSlices::new().with("x", (2, 3), &mut x).unwrap();
    Checkpoint::new(&state).model(&parameters).save(&file).unwrap();
    drop(parameters);
    step(&mut state, &mut x);

    let mut resumed = vec![bf16::ZERO; 6];
    let parameters = ParameterSlices::new().with("x", (2, 3), &mut resumed).unwrap();
    let mut other = setup(rule(), &parameters).unwrap();
    CheckpointFile::open(&file)
        .unwrap()
        .restore_with_model(&mut other, &parameters)
        .unwrap();
    drop(parameters);
    step(&mut other, &mut resumed);
    assert_eq!(resumed, x);
}

/// Rows of a parameter that is another vector now, as when points are split and pruned.
#[test]
fn rows_can_be_kept_by_index() {
    let (mut x, gradient) = (vec![1f32; 6], [1f32, 1.0, 2.0, 2.0, 3.0, 3.0]);
    let parameters = ParameterSlices::new().with("x", (3, 2), &mut x).unwrap();
    let mut state = setup(Adam::new(0.1), &parameters).unwrap();
    update(
        &mut state,
        &parameters,
        &GradientSlices::new().with("x", &gradient).unwrap(),
    )
    .unwrap();
    drop(parameters);
    let rows = [Some(2), None, Some(0), Some(2)];
    let mut x: Vec<f32> = rows
        .iter()
        .flat_map(|row| row.map_or([0.0; 2], |row| [x[2 * row], x[2 * row + 1]]))
        .collect();
    let parameters = ParameterSlices::new().with("x", (4, 2), &mut x).unwrap();
    state.resize_rows("x", &parameters, &rows).unwrap();
    let m = state.leaf("x").unwrap().tensor("m").unwrap();
    let expected = [3.0, 3.0, 0.0, 0.0, 1.0, 1.0, 3.0, 3.0].map(|dx: f32| f64::from(dx * 0.1));
    assert!(
        values(&m)
            .iter()
            .zip(expected)
            .all(|(got, expected)| (got - expected).abs() < 1e-6),
        "{m}"
    );
    update(
        &mut state,
        &parameters,
        &GradientSlices::new().with("x", &[0.5f32; 8]).unwrap(),
    )
    .unwrap();
}

/// A new parameter beside the others, whole tensors and windows.
#[test]
fn states_grow_and_rules_of_whole_tensors_work() {
    let (mut w, mut b) = (vec![0f32; 12], vec![0f32; 3]);
    let rule = || OptimiserChain::new((AccumGrad::new(2), Muon::new(0.1).with_fallback(Adam::new(0.1))));
    let mut state = setup(rule(), &ParameterSlices::new().with("w", (3, 4), &mut w).unwrap()).unwrap();
    let parameters = ParameterSlices::new()
        .with("w", (3, 4), &mut w)
        .unwrap()
        .with("b", 3, &mut b)
        .unwrap();
    assert_eq!(state.add(rule(), &parameters).unwrap(), ["b"]);
    let gradient: Vec<f32> = (0..12).map(|i| (i * i % 7) as f32 - 3.0).collect();
    for _ in 0..2 {
        let gradients = GradientSlices::new()
            .with("w", &gradient)
            .unwrap()
            .with("b", &gradient[..3])
            .unwrap();
        update(&mut state, &parameters, &gradients).unwrap();
    }
    drop(parameters);
    let variables = Vars::from([("w".to_string(), var(&Tensor::zeros((3, 4), F32, CPU).unwrap()))]);
    let mut expected = setup(rule(), &variables).unwrap();
    let of_w = Tensor::from_vec(gradient, (3, 4), CPU).unwrap();
    for _ in 0..2 {
        update(&mut expected, &variables, &[("w", &of_w)]).unwrap();
    }
    assert_eq!(
        w.iter().map(|w| f64::from(*w)).collect::<Vec<_>>(),
        values(&variables["w"])
    );
    assert!((b[0] - 0.1).abs() < 1e-6 && w.iter().any(|w| *w != 0.0), "{b:?}");
}

#[test]
fn what_needs_variables_says_so() {
    let mut x = vec![0f32; 4];
    let parameters = ParameterSlices::new().with("x", 4, &mut x).unwrap();
    let mut state = setup(
        OptimiserChain::new((Descent::new(0.5), Ema::new(0.5))),
        &parameters,
    )
    .unwrap();
    update(
        &mut state,
        &parameters,
        &GradientSlices::new().with("x", &[2f32; 4]).unwrap(),
    )
    .unwrap();
    says(
        &trainables(&parameters).unwrap_err(),
        &["candle variables", "\"x\""],
    );
    assert_eq!(values(&state.averages(&parameters).unwrap()["x"]), [-0.5; 4]);
    state
        .with_averages(&parameters, || Ok::<_, optimisers::Error>(()))
        .unwrap();
    update(
        &mut state,
        &parameters,
        &GradientSlices::new().with("x", &[2f32; 4]).unwrap(),
    )
    .unwrap();
    drop(parameters);
    assert_eq!(x, [-2.0; 4]);
}

/// Each rank works on its part of every slice, and has all of it afterwards, with the bits of variables.
#[test]
fn several_ranks_have_the_bits_of_variables() {
    let rules: [fn() -> Optimiser; 3] = [
        || {
            Optimiser::new(MixedPrecision::new(
                F32,
                OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
            ))
        },
        || {
            Optimiser::new(OptimiserChain::new((
                AccumGrad::new(2),
                Adam::new(0.1),
                Ema::new(0.5),
            )))
        },
        || Optimiser::new(Muon::new(0.1).with_fallback(Adam::new(0.1))),
    ];
    for (rule, dtype) in rules.into_iter().flat_map(|rule| [(rule, BF16), (rule, F32)]) {
        let shapes: [(&str, &[usize]); 3] = [("b", &[7]), ("large", &[300, 100]), ("w", &[6, 4])];
        let train = move |rank: usize, world: Option<&optimisers::LocalRank>, in_memory: bool| {
            let start = |(i, (path, shape)): (u64, &(&str, &[usize]))| {
                (path.to_string(), var(&tensor(i, shape, dtype)))
            };
            let model: Vars = (1..).zip(&shapes).map(start).collect();
            let new = || world.map_or_else(Setup::default, Setup::over);
            let mut state = match in_memory {
                true => in_slices(&model, |model| new().build(rule(), model)),
                false => new().build(rule(), &model),
            }
            .expect("a state");
            for call in 0..4 {
                let seed = 10 * call + rank as u64;
                let grads: Grads = shapes
                    .iter()
                    .map(|(path, shape)| (path.to_string(), tensor(100 + seed, shape, dtype)))
                    .collect();
                match in_memory {
                    true => apply_in_slices(&model, &grads, |model, grads| update(&mut state, model, grads)),
                    false => update(&mut state, &model, &grads),
                }
                .expect("an update");
            }
            let masters = match in_memory {
                true => in_slices(&model, |model| state.masters(model)),
                false => state.masters(&model),
            };
            let masters: Vec<_> = masters.expect("masters").values().map(values).collect();
            (model.values().map(|x| values(x)).collect::<Vec<_>>(), masters)
        };
        let on_ranks = move |in_memory| on(3, move |world| train(world.rank(), Some(&world), in_memory));
        let (expected, got) = (on_ranks(false), on_ranks(true));
        assert!(
            expected == got && expected[0].0 == expected[2].0,
            "{} of {dtype:?}",
            rule().name()
        );
    }
}
