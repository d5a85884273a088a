//! Tensors of another framework as parameters and gradients: with locks of their own, and owners that do not keep
//! what they promise.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use candle_core::DType::{BF16, F16, F32, F64};
use candle_core::{DType, Device, Shape, Tensor, Var};
use optimisers::{
    Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Descent, Engine, Error, ErrorKind, Gradients, Lend, MemoryMut, MixedPrecision,
    Model, OptimiserChain, ParameterSlices, Result, Update, View, Visitor, setup, update,
};

use crate::common::{Grads, Vars, assert_same, engines, is_kind, model, optimisers_for, says, snapshot, tensor, trajectory, values};
use crate::engines::small_model;
use crate::locks::{side_by_side, watched};
use crate::slices::Owned;

/// A tensor behind a lock.
pub struct Locked {
    shape: Shape,
    dtype: DType,
    values: RwLock<Owned>,
}

impl Locked {
    fn new(tensor: &Tensor) -> Self {
        Locked { shape: tensor.shape().clone(), dtype: tensor.dtype(), values: RwLock::new(Owned::new(tensor)) }
    }

    fn tensor(&self) -> Tensor {
        self.values.read().expect("no panic").clone().tensor(self.shape.dims())
    }

    fn numbers(&self) -> Vec<f64> {
        values(&self.tensor())
    }
}

impl Lend for Locked {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&self.values).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(self.values.read().unwrap_or_else(PoisonError::into_inner).show()))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run(self.values.write().unwrap_or_else(PoisonError::into_inner).lend())
    }
}

impl Model for Locked {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.lend(self);
    }
}

/// Gradients of any kind by path.
struct ByPath<T>(HashMap<String, T>);

impl<T: Lend> Gradients for ByPath<T> {
    fn gradient(&self, path: &str, _: &dyn Lend) -> Option<&dyn Lend> {
        self.0.get(path).map(|gradient| gradient as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn by_path(&self) -> bool {
        true
    }
}

fn locked(vars: &Vars) -> HashMap<String, Locked> {
    vars.iter().map(|(path, x)| (path.clone(), Locked::new(x))).collect()
}

fn locked_gradients(grads: &Grads) -> ByPath<Locked> {
    ByPath(grads.iter().map(|(path, gradient)| (path.clone(), Locked::new(gradient))).collect())
}

/// The numbers of a model behind locks, as variables.
fn shown(locked: &HashMap<String, Locked>) -> Vars {
    let variable = |(path, x): (&String, &Locked)| (path.clone(), Var::from_tensor(&x.tensor()).expect("a variable"));
    locked.iter().map(variable).collect()
}

#[test]
fn every_optimiser_has_the_bits_of_variables() {
    for (parameter, gradient) in [F16, BF16, F32, F64].into_iter().flat_map(|parameter| [(parameter, parameter), (parameter, F32)]) {
        let (parameters, all_grads) = small_model(&Device::Cpu, parameter, gradient);
        for optimiser in optimisers_for(parameter) {
            let expected = trajectory(Engine::Fused, optimiser.clone(), &parameters, &all_grads);
            let model = locked(&model(&parameters));
            let mut state = setup(optimiser.clone(), &model).expect("a state");
            let step = |grads: &Grads| {
                update(&mut state, &model, &locked_gradients(grads)).expect("an update");
                snapshot(&shown(&model), &state)
            };
            let got: Vec<_> = all_grads.iter().map(step).collect();
            assert_same(&got, &expected, format!("{} of {parameter:?}, {gradient:?}", optimiser.name()));
        }
    }
}

/// Variables, slices and tensors behind locks stand in one model, with gradients of the other kinds.
#[test]
fn kinds_of_memory_stand_side_by_side() {
    let rule = || MixedPrecision::new(F32, OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))));
    for engine in engines() {
        let start = tensor(1, &[3, 40], BF16);
        let (variable, locked, mut slice) = (Var::from_tensor(&start).expect("a variable"), Locked::new(&start), Owned::new(&start));
        let slices = ParameterSlices::new().with("slice", (3, 40), slice.lend()).expect("slices");
        let model = ((&variable, &locked), &slices);
        let mut state = setup(rule(), &model).expect("a state");
        let gradient = |seed| tensor(seed, &[3, 40], F32);
        for seed in 2..5 {
            let grads = Grads::from(["0.0", "0.1", "1.slice"].map(|path| (path.to_string(), gradient(seed))));
            Update::new(&mut state).engine(engine).apply(&model, &grads).expect("an update");
        }
        let masters = state.masters(&model).expect("masters");
        assert!(["0.1", "1.slice"].iter().all(|path| values(&masters[*path]) == values(&masters["0.0"])), "{engine:?}");
        assert_eq!(values(&variable), locked.numbers(), "{engine:?}");
    }
}

/// Nobody waits for anybody: each training has the other's parameter for a gradient, and two threads read both at once.
#[test]
fn trainings_with_each_others_parameters_as_gradients() {
    watched(|| {
        let [x, y] = [1, 2].map(|seed| HashMap::from([("x".to_string(), Locked::new(&tensor(seed, &[5000], F32)))]));
        let mut states = [&x, &y].map(|model| setup(Descent::new(1e-3), model).expect("a state"));
        /// Gradients that are another model's parameters.
        struct Of<'o>(&'o Locked);
        impl Gradients for Of<'_> {
            fn gradient(&self, _: &str, _: &dyn Lend) -> Option<&dyn Lend> {
                Some(self.0)
            }
            fn paths(&self) -> impl Iterator<Item = &str> {
                std::iter::empty()
            }
            fn by_path(&self) -> bool {
                true
            }
        }
        let [of_x, of_y] = &mut states;
        let both = |first: &HashMap<String, Locked>, second: &HashMap<String, Locked>| {
            let (first, second) = (&first["x"], &second["x"]);
            first.read(&mut |_| second.read(&mut |_| Ok(()))).expect("both");
        };
        side_by_side([
            &mut || drop(update(of_x, &x, &Of(&y["x"])).expect("an update")),
            &mut || drop(update(of_y, &y, &Of(&x["x"])).expect("an update")),
            &mut || both(&x, &y),
        ]);
    });
}

/// A gradient by columns, and one that begins in the middle.
#[test]
fn gradients_have_strides() {
    struct Columns(Vec<f32>, Shape);
    impl Lend for Columns {
        fn shape(&self) -> &Shape {
            &self.1
        }
        fn dtype(&self) -> DType {
            F32
        }
        fn memory(&self) -> Option<usize> {
            None
        }
        fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
            run(View::strided(&self.0[1..], &[2, 3], &[1, 2])?)
        }
        fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
            unreachable!("gradients are read")
        }
    }
    for engine in engines() {
        let mut x = vec![0f32; 6];
        let parameters = ParameterSlices::new().with("x", (2, 3), &mut x).expect("slices");
        let gradients = ByPath(HashMap::from([("x".to_string(), Columns((0..7).map(|i| i as f32).collect(), (2, 3).into()))]));
        let mut state = setup(Descent::new(1.0), &parameters).expect("a state");
        Update::new(&mut state).engine(engine).apply(&parameters, &gradients).expect("an update");
        drop(parameters);
        assert_eq!(x, [-1.0, -3.0, -5.0, -2.0, -4.0, -6.0], "{engine:?}");
    }
}

/// What an owner does that does not keep its promise.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    Shorter,
    Longer,
    OtherDtype,
    NotRun,
    RunTwice,
    Refuses,
}

struct Faulty {
    shape: Shape,
    fault: RwLock<Fault>,
    values: RwLock<Vec<f32>>,
}

impl Lend for Faulty {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn dtype(&self) -> DType {
        F32
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        let values = self.values.read().unwrap();
        match *self.fault.read().unwrap() {
            Fault::None => run(View::new(&values[..])),
            Fault::Shorter => run(View::new(&values[1..])),
            Fault::Longer => run(View::new(&[&values[..], &[0.0]].concat()[..])),
            Fault::OtherDtype => run(View::new(&[0f64; 10])),
            Fault::NotRun => Ok(()),
            Fault::RunTwice => run(View::new(&values[..])).and_then(|()| run(View::new(&values[..]))),
            Fault::Refuses => Err(Error::other("no average")),
        }
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        let mut values = self.values.write().unwrap();
        match *self.fault.read().unwrap() {
            Fault::None => run((&mut values[..]).into()),
            Fault::Shorter => run((&mut values[1..]).into()),
            Fault::Longer => run((&mut [0f32; 11][..]).into()),
            Fault::OtherDtype => run((&mut [0f64; 10]).into()),
            Fault::NotRun => Ok(()),
            Fault::RunTwice => run((&mut values[..]).into()).and_then(|()| run((&mut values[..]).into())),
            Fault::Refuses => Err(Error::other("no average")),
        }
    }
}

impl Model for Faulty {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.below("x", |visitor| visitor.lend(self));
    }
}

#[test]
fn owners_that_do_not_keep_their_promise_are_refused() {
    use Fault::{Longer, NotRun, OtherDtype, Refuses, RunTwice, Shorter};
    let faulty = || Faulty { shape: 10.into(), fault: RwLock::new(Fault::None), values: RwLock::new(vec![1.0; 10]) };
    for (fault, words) in [
        (Shorter, ["9 elements of F32", "expected 10 of F32"]),
        (Longer, ["11 elements of F32", "expected 10 of F32"]),
        (OtherDtype, ["10 elements of F64", "expected 10 of F32"]),
        (NotRun, ["the function that it was given 0 times, expected once", "10 elements of F32"]),
        (RunTwice, ["the function that it was given 2 times, expected once", "10 elements of F32"]),
        (Refuses, ["\"x\"", "average"]),
    ] {
        for (engine, is_gradient) in engines().into_iter().flat_map(|engine| [(engine, false), (engine, true)]) {
            let (x, gradient) = (faulty(), faulty());
            let mut state = setup(Adam::new(0.1), &x).expect("a state");
            *if is_gradient { &gradient } else { &x }.fault.write().unwrap() = fault;
            let gradients = ByPath(HashMap::from([("x".to_string(), gradient)]));
            let error = Update::new(&mut state).engine(engine).apply(&x, &gradients).expect_err("a refusal");
            says(&error, &words);
            assert_eq!(state.leaf("x").expect("a leaf").steps(), 0, "{fault:?}");
            assert_eq!(*x.values.read().unwrap(), [1.0; 10], "{fault:?} {engine:?}");
        }
    }
    let x = faulty();
    *x.fault.write().unwrap() = Shorter;
    let state = setup(MixedPrecision::new(F64, Adam::new(0.1)), &x);
    let error = state.expect_err("a refusal");
    is_kind(&error, ErrorKind::Memory, &["the memory lent for the parameter has", "9 elements of F32"]);
    assert_eq!(error.path(), Some("x"), "{error}");
}

#[test]
fn checkpoints_hold_what_is_behind_locks() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("checkpoint");
    let rule = || MixedPrecision::new(F32, AdamW::new(0.1));
    let of = |seed| HashMap::from([("x".to_string(), Locked::new(&tensor(seed, &[4, 6], BF16)))]);
    let step = |state: &mut _, model: &_, seed| {
        update(state, model, &locked_gradients(&Grads::from([("x".to_string(), tensor(seed, &[4, 6], F32))]))).expect("an update");
    };
    let (x, y) = (of(1), of(2));
    let mut state = setup(rule(), &x).expect("a state");
    step(&mut state, &x, 3);
    Checkpoint::new(&state).model(&x).save(&file).expect("a save");
    let mut other = setup(rule(), &y).expect("a state");
    CheckpointFile::open(&file).and_then(|file| file.restore_with_model(&mut other, &y)).expect("a restore");
    step(&mut state, &x, 4);
    step(&mut other, &y, 4);
    assert_eq!(x["x"].numbers(), y["x"].numbers());
}
