//! Tensors of another framework as parameters and gradients: with locks of their own, and owners that do not
//! keep what they promise.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::DType::{BF16, F16, F32, F64};
use candle_core::{DType, Device, Shape, Tensor, Var};
use optimisers::{
    Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Communicator, Descent, Engine, Error, ErrorKind,
    Gradients, Lend, MemoryMut, MixedPrecision, Model, Optimiser, OptimiserChain, ParameterSlices, Result,
    Setup, StochasticRounding, Update, View, Visitor, Weights, broadcast, setup, update,
};
use optimisers_plain::Vector;

use crate::engine::engines::small_model;
use crate::model::locks::{side_by_side, watched};
use crate::model::slices::{in_shape, vector};
use support::common::{
    Grads, Vars, assert_same, engines, is_kind, model, optimisers_for, says, snapshot, tensor, trajectory,
    values,
};
use support::tested::Tested;
use support::threads::on;

/// A tensor behind a lock.
pub struct Locked {
    shape: Shape,
    dtype: DType,
    values: RwLock<Vector>,
}

impl Locked {
    fn new(tensor: &Tensor) -> Self {
        Locked {
            shape: tensor.shape().clone(),
            dtype: tensor.dtype(),
            values: RwLock::new(vector(tensor)),
        }
    }

    fn tensor(&self) -> Tensor {
        in_shape(self.values.read().expect("no panic").clone(), self.shape.dims())
    }

    fn numbers(&self) -> Vec<f64> {
        values(&self.tensor())
    }
}

impl Lend for Locked {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> optimisers::DType {
        self.dtype.into()
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&self.values).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(
            self.values.read().unwrap_or_else(PoisonError::into_inner).show(),
        ))
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
    vars.iter()
        .map(|(path, x)| (path.clone(), Locked::new(x)))
        .collect()
}

fn locked_gradients(grads: &Grads) -> ByPath<Locked> {
    ByPath(
        grads
            .iter()
            .map(|(path, gradient)| (path.clone(), Locked::new(gradient)))
            .collect(),
    )
}

/// The numbers of a model behind locks, as variables.
fn shown(locked: &HashMap<String, Locked>) -> Vars {
    let variable =
        |(path, x): (&String, &Locked)| (path.clone(), Var::from_tensor(&x.tensor()).expect("a variable"));
    locked.iter().map(variable).collect()
}

#[test]
fn every_optimiser_has_the_bits_of_variables() -> Tested {
    for (parameter, gradient) in [F16, BF16, F32, F64]
        .into_iter()
        .flat_map(|parameter| [(parameter, parameter), (parameter, F32)])
    {
        let (parameters, all_grads) = small_model(&Device::Cpu, parameter, gradient);
        for optimiser in optimisers_for(parameter) {
            let expected = trajectory(Engine::Fused, optimiser.clone(), &parameters, &all_grads);
            let model = locked(&model(&parameters));
            let mut state = setup(optimiser.clone(), &model)?;
            let step = |grads: &Grads| {
                update(&mut state, &model, &locked_gradients(grads)).expect("an update");
                snapshot(&shown(&model), &state)
            };
            let got: Vec<_> = all_grads.iter().map(step).collect();
            assert_same(
                &got,
                &expected,
                format!("{} of {parameter:?}, {gradient:?}", optimiser.name()),
            );
        }
    }
    Ok(())
}

/// Variables, slices and tensors behind locks stand in one model, with gradients of the other kinds.
#[test]
fn kinds_of_memory_stand_side_by_side() -> Tested {
    let rule = || {
        MixedPrecision::new(
            F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
        )
    };
    for engine in engines() {
        let start = tensor(1, &[3, 40], BF16);
        let (variable, locked, mut slice) = (Var::from_tensor(&start)?, Locked::new(&start), vector(&start));
        let slices = ParameterSlices::new().with("slice", (3, 40), slice.lend())?;
        let model = ((&variable, &locked), &slices);
        let mut state = setup(rule(), &model)?;
        let gradient = |seed| tensor(seed, &[3, 40], F32);
        for seed in 2..5 {
            let grads = Grads::from(["0.0", "0.1", "1.slice"].map(|path| (path.to_string(), gradient(seed))));
            Update::new(&mut state).engine(engine).apply(&model, &grads)?;
        }
        let masters = state.masters(&model)?;
        assert!(
            ["0.1", "1.slice"]
                .iter()
                .all(|path| values(&masters[*path]) == values(&masters["0.0"])),
            "{engine:?}"
        );
        assert_eq!(values(&variable), locked.numbers(), "{engine:?}");
    }
    Ok(())
}

/// Nobody waits for anybody: each training has the other's parameter for a gradient, and two threads read
/// both at once, in one order. In two orders they would wait for each other by themselves, where a lock lets
/// no reader pass a writer who waits.
#[test]
fn trainings_with_each_others_parameters_as_gradients() {
    watched(|| {
        let [x, y] =
            [1, 2].map(|seed| HashMap::from([("x".to_string(), Locked::new(&tensor(seed, &[5000], F32)))]));
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
            &mut || both(&x, &y),
        ]);
    });
}

/// A gradient by columns, and one that begins in the middle.
#[test]
fn gradients_have_strides() -> Tested {
    struct Columns(Vec<f32>, Shape);
    impl Lend for Columns {
        fn lent_shape(&self) -> &[usize] {
            self.1.dims()
        }
        fn lent_dtype(&self) -> optimisers::DType {
            F32.into()
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
        let parameters = ParameterSlices::new().with("x", (2, 3), &mut x)?;
        let gradients = ByPath(HashMap::from([(
            "x".to_string(),
            Columns((0..7).map(|i| i as f32).collect(), (2, 3).into()),
        )]));
        let mut state = setup(Descent::new(1.0), &parameters)?;
        Update::new(&mut state)
            .engine(engine)
            .apply(&parameters, &gradients)?;
        drop(parameters);
        assert_eq!(x, [-1.0, -3.0, -5.0, -2.0, -4.0, -6.0], "{engine:?}");
    }
    Ok(())
}

/// What an owner does that does not keep its promise.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Shorter,
    Longer,
    OtherDtype,
    NotRun,
    RunTwice,
    Refuses,
    DropsError,
    OtherOrder,
    RefusesToWrite,
}

struct Faulty {
    shape: Shape,
    fault: RwLock<Fault>,
    /// How often it lends as it should before that. Of what is refused to be written only that counts.
    before: AtomicUsize,
    values: RwLock<Vec<f32>>,
}

impl Faulty {
    fn new() -> Self {
        Faulty {
            shape: 10.into(),
            fault: RwLock::new(Fault::None),
            before: AtomicUsize::new(0),
            values: RwLock::new(vec![1.0; 10]),
        }
    }

    /// From now on, but for so many times.
    fn begin(&self, fault: Fault, before: usize) {
        *self.fault.write().unwrap() = fault;
        self.before.store(before, Ordering::Relaxed);
    }

    fn fault(&self, is_write: bool) -> Fault {
        let fault = *self.fault.read().unwrap();
        let is_asked = is_write || fault != Fault::RefusesToWrite;
        let is_before = is_asked
            && self
                .before
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .is_ok();
        if is_asked && !is_before {
            fault
        } else {
            Fault::None
        }
    }
}

impl Lend for Faulty {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> optimisers::DType {
        F32.into()
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        let values = self.values.read().unwrap();
        match self.fault(false) {
            Fault::None | Fault::RefusesToWrite => run(View::new(&values[..])),
            Fault::Shorter => run(View::new(&values[1..])),
            Fault::Longer => run(View::new(&[&values[..], &[0.0]].concat()[..])),
            Fault::OtherDtype => run(View::new(&[0f64; 10])),
            Fault::NotRun => Ok(()),
            Fault::RunTwice => run(View::new(&values[..])).and_then(|()| run(View::new(&values[..]))),
            Fault::Refuses => Err(Error::other("no average")),
            Fault::DropsError => run(View::new(&values[1..])).or(Ok(())),
            Fault::OtherOrder => run(View::strided(&[1f32; 20], &[10], &[2])?),
        }
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        let mut values = self.values.write().unwrap();
        match self.fault(true) {
            Fault::None | Fault::OtherOrder => run((&mut values[..]).into()),
            Fault::Shorter => run((&mut values[1..]).into()),
            Fault::Longer => run((&mut [0f32; 11][..]).into()),
            Fault::OtherDtype => run((&mut [0f64; 10]).into()),
            Fault::NotRun => Ok(()),
            Fault::RunTwice => run((&mut values[..]).into()).and_then(|()| run((&mut values[..]).into())),
            Fault::Refuses | Fault::RefusesToWrite => Err(Error::other("no average")),
            Fault::DropsError => run((&mut values[1..]).into()).or(Ok(())),
        }
    }
}

impl Model for Faulty {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.below("x", |visitor| visitor.lend(self));
    }
}

#[test]
fn owners_that_do_not_keep_their_promise_are_refused() -> Tested {
    use Fault::{DropsError, Longer, NotRun, OtherDtype, Refuses, RunTwice, Shorter};
    for (fault, words) in [
        (Shorter, ["9 elements of F32", "expected 10 of F32"]),
        (Longer, ["11 elements of F32", "expected 10 of F32"]),
        (OtherDtype, ["10 elements of F64", "expected 10 of F32"]),
        (
            NotRun,
            [
                "the function that it was given 0 times, expected once",
                "10 elements of F32",
            ],
        ),
        (
            RunTwice,
            [
                "the function that it was given 2 times, expected once",
                "10 elements of F32",
            ],
        ),
        (Refuses, ["the owner does not lend the memory", "average"]),
        (DropsError, ["9 elements of F32", "expected 10 of F32"]),
    ] {
        for (engine, is_gradient) in engines()
            .into_iter()
            .flat_map(|engine| [(engine, false), (engine, true)])
        {
            let (x, gradient) = (Faulty::new(), Faulty::new());
            let mut state = setup(Adam::new(0.1), &x)?;
            if is_gradient { &gradient } else { &x }.begin(fault, 0);
            let gradients = ByPath(HashMap::from([("x".to_string(), gradient)]));
            let error = Update::new(&mut state)
                .engine(engine)
                .apply(&x, &gradients)
                .expect_err("a refusal");
            says(&error, &words);
            assert_eq!(state.leaf("x").expect("a leaf").steps(), 0, "{fault:?}");
            assert_eq!(*x.values.read().unwrap(), [1.0; 10], "{fault:?} {engine:?}");
        }
    }
    let x = Faulty::new();
    x.begin(Shorter, 0);
    let state = setup(MixedPrecision::new(F64, Adam::new(0.1)), &x);
    let error = state.expect_err("a refusal");
    is_kind(
        &error,
        ErrorKind::Memory,
        &["the lent memory has 9 elements of F32, expected 10"],
    );
    assert_eq!(error.path(), Some("x"), "{error}");
    Ok(())
}

#[test]
fn checkpoints_hold_what_is_behind_locks() -> Tested {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("checkpoint");
    let rule = || MixedPrecision::new(F32, AdamW::new(0.1));
    let of = |seed| HashMap::from([("x".to_string(), Locked::new(&tensor(seed, &[4, 6], BF16)))]);
    let step = |state: &mut _, model: &_, seed| {
        update(
            state,
            model,
            &locked_gradients(&Grads::from([("x".to_string(), tensor(seed, &[4, 6], F32))])),
        )
        .expect("an update");
    };
    let (x, y) = (of(1), of(2));
    let mut state = setup(rule(), &x)?;
    step(&mut state, &x, 3);
    Checkpoint::new(&state).model(&x).save(&file)?;
    let mut other = setup(rule(), &y)?;
    CheckpointFile::open(&file).and_then(|file| file.restore_with_model(&mut other, &y))?;
    step(&mut state, &x, 4);
    step(&mut other, &y, 4);
    assert_eq!(x["x"].numbers(), y["x"].numbers());
    Ok(())
}

/// A gradient whose owner runs the function again in the commit is not applied twice.
#[test]
fn a_gradient_that_is_lent_twice_is_one_step() -> Tested {
    for (engine, before) in engines()
        .into_iter()
        .flat_map(|engine| (0..6).map(move |before| (engine, before)))
    {
        let (x, gradient) = (Faulty::new(), Faulty::new());
        let mut state = setup(Descent::new(1.0), &x)?;
        gradient.begin(Fault::RunTwice, before);
        let done = Update::new(&mut state)
            .engine(engine)
            .apply(&x, &ByPath(HashMap::from([("x".to_string(), gradient)])));
        let is_moved = x.values.read().unwrap()[0] == 0.0;
        assert_eq!(
            *x.values.read().unwrap(),
            [if is_moved { 0.0 } else { 1.0 }; 10],
            "{engine:?} {before}"
        );
        assert!(is_moved || done.is_err(), "{engine:?} {before}");
    }
    Ok(())
}

/// What an owner refuses to have written, or lends in another order than it has written, is found before
/// anything moves; what it refuses later says what has.
#[test]
fn owners_that_do_not_lend_to_write_are_refused_in_the_plan() {
    let model = || {
        (
            Locked::new(&Tensor::ones(10, F32, &Device::Cpu).expect("ones")),
            Faulty::new(),
        )
    };
    let gradient = || tensor(1, &[10], F32);
    let apply = |fault, before, engine| {
        let (first, second) = model();
        let mut state = setup(Adam::new(0.1), &(&first, &second)).expect("a state");
        second.begin(fault, before);
        let grads = Grads::from(["0", "1.x"].map(|path| (path.to_string(), gradient())));
        let done = Update::new(&mut state)
            .engine(engine)
            .apply(&(&first, &second), &grads);
        (done.expect_err("a refusal"), first.numbers() != [1.0; 10])
    };
    for engine in engines() {
        for (fault, words) in [
            (Fault::RefusesToWrite, "average"),
            (Fault::OtherOrder, "row-major order"),
        ] {
            let (error, has_moved) = apply(fault, 0, engine);
            says(&error, &["\"1.x\"", "parameter", words]);
            assert!(!has_moved, "{fault:?} {engine:?}");
        }
        let (error, has_moved) = apply(Fault::RefusesToWrite, 1, engine);
        says(&error, &["\"1.x\"", "average", "had already moved: 0;"]);
        assert!(has_moved, "{engine:?}");
    }
}

/// So are the weights of a checkpoint or of a map, before state or model has any of them.
#[test]
fn new_weights_for_owners_that_do_not_lend_to_write_are_refused() -> Tested {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("checkpoint");
    let model = (Locked::new(&Tensor::ones(10, F32, &Device::Cpu)?), Faulty::new());
    let mut state = setup(MixedPrecision::new(F64, Adam::new(0.1)), &(&model.0, &model.1))?;
    Checkpoint::new(&state).model(&(&model.0, &model.1)).save(&file)?;
    let grads = Grads::from(["0", "1.x"].map(|path| (path.to_string(), tensor(1, &[10], F32))));
    update(&mut state, &(&model.0, &model.1), &grads)?;
    let all = |state: &_| {
        (
            model.0.numbers(),
            model.1.values.read().unwrap().clone(),
            snapshot(&Vars::new(), state),
        )
    };
    let before = all(&state);
    model.1.begin(Fault::RefusesToWrite, 0);
    let masters = state
        .masters(&(&model.0, &model.1))?
        .into_keys()
        .map(|path| (path, tensor(2, &[10], F64)));
    let masters: Grads = masters.collect();
    let restored = CheckpointFile::open(&file).and_then(|file| {
        file.restore_with_model(&mut state, &(&model.0, &model.1))
            .map(drop)
    });
    let set = state.set_masters(&(&model.0, &model.1), &masters).map(drop);
    let refreshed = state.refresh_masters(&(&model.0, &model.1));
    let loaded = Weights::open([&file])
        .and_then(|weights| weights.load_into(&(&model.0, &model.1)))
        .map(drop);
    for refused in [restored, set, refreshed, loaded] {
        is_kind(
            &refused.expect_err("a refusal"),
            ErrorKind::Memory,
            &["\"1.x\"", "does not lend the memory", "average"],
        );
    }
    assert!(all(&state) == before);
    Ok(())
}

/// A rank whose owner lends no memory to write is known before any rank has other values. Rank 0 only reads.
#[test]
fn a_broadcast_to_owners_that_do_not_lend_to_write_is_refused() {
    let outcomes = |refuses: usize| {
        on(2, move |world| {
            let model = (
                Locked::new(&tensor(1 + world.rank() as u64, &[10], F32)),
                Faulty::new(),
            );
            if world.rank() == refuses {
                model.1.begin(Fault::RefusesToWrite, 0);
            }
            let before = model.0.numbers();
            let outcome = broadcast(&world, &(&model.0, &model.1));
            (outcome, model.0.numbers() == before)
        })
    };
    for (rank, (outcome, is_unchanged)) in outcomes(0).into_iter().enumerate() {
        outcome.expect("rank 0 lends to read");
        assert_eq!(is_unchanged, rank == 0);
    }
    for (outcome, is_unchanged) in outcomes(1) {
        says(&outcome.expect_err("a refusal"), &["1.x"]);
        assert!(is_unchanged);
    }
}

/// Something of which the owner says and lends something else from some question on.
struct Changing {
    shapes: [Shape; 2],
    dtypes: [DType; 2],
    /// What it lends lies between other numbers.
    values: RwLock<[Vector; 2]>,
    /// Whether it lends what it says.
    lends_other: bool,
    questions: AtomicUsize,
    from: AtomicUsize,
}

/// How many numbers lie before and behind what is lent.
const AROUND: usize = 500;

impl Changing {
    fn new([before, after]: [(usize, DType); 2], lends_other: bool) -> Self {
        let owned = |(length, dtype): (usize, DType)| {
            vector(&Tensor::ones(length + 2 * AROUND, dtype, &Device::Cpu).expect("ones"))
        };
        Changing {
            shapes: [before.0.into(), after.0.into()],
            dtypes: [before.1, after.1],
            values: RwLock::new([owned(before), owned(after)]),
            lends_other,
            questions: AtomicUsize::new(0),
            from: AtomicUsize::new(usize::MAX),
        }
    }

    fn change_at(&self, question: usize) {
        self.questions.store(0, Ordering::Relaxed);
        self.from.store(question, Ordering::Relaxed);
    }

    fn is_changed(&self) -> usize {
        usize::from(self.questions.fetch_add(1, Ordering::Relaxed) >= self.from.load(Ordering::Relaxed))
    }

    /// Which one is lent, and what of it.
    fn lent(&self) -> (usize, Range<usize>) {
        let place = if self.lends_other { self.is_changed() } else { 0 };
        (place, AROUND..AROUND + self.shapes[place].elem_count())
    }

    /// The numbers that are lent at first, if those around them are what they were.
    fn numbers(&self) -> Vec<f64> {
        for (values, shape) in self.values.read().unwrap().clone().into_iter().zip(&self.shapes) {
            let all = values.numbers();
            let end = AROUND + shape.elem_count();
            assert!(
                all[..AROUND].iter().chain(&all[end..]).all(|x| *x == 1.0),
                "a write outside"
            );
        }
        let [first, _] = self.values.read().unwrap().clone();
        first.numbers()[AROUND..AROUND + self.shapes[0].elem_count()].to_vec()
    }
}

impl Lend for Changing {
    fn lent_shape(&self) -> &[usize] {
        self.shapes[self.is_changed()].dims()
    }

    fn lent_dtype(&self) -> optimisers::DType {
        self.dtypes[self.is_changed()].into()
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        let (place, range) = self.lent();
        run(View::new(self.values.read().unwrap()[place].show_part(range)))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        let (place, range) = self.lent();
        run(self.values.write().unwrap()[place].lend_part(range))
    }
}

impl Model for Changing {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.below("x", |visitor| visitor.lend(self));
    }
}

/// An owner that says something else in the middle of a call gets an error, or the step of what it said
/// first.
#[test]
fn owners_that_change_their_minds_make_no_write_outside() {
    type Make = fn() -> Optimiser;
    let rules: [(DType, Make); 4] = [
        (F32, || Optimiser::new(Adam::new(0.1))),
        (BF16, || Optimiser::new(Adam::new(0.1))),
        (BF16, || {
            Optimiser::new(MixedPrecision::new(
                F32,
                OptimiserChain::new((ClipGlobalNorm::new(0.5), Adam::new(0.1))),
            ))
        }),
        (BF16, || {
            Optimiser::new(StochasticRounding::new(1, Adam::new(0.1)))
        }),
    ];
    for (dtype, rule) in rules {
        let other = if dtype == F32 { BF16 } else { F32 };
        for (after, lends_other) in [(4, dtype), (400, dtype), (40, other), (20, other), (40, F64)]
            .into_iter()
            .flat_map(|after| [(after, false), (after, true)])
        {
            for (engine, is_gradient) in engines()
                .into_iter()
                .flat_map(|engine| [(engine, false), (engine, true)])
            {
                let apply = |question| {
                    let (x, gradient) = (
                        Changing::new([(40, dtype), after], lends_other),
                        Changing::new([(40, dtype), after], lends_other),
                    );
                    let mut state = setup(rule(), &x).expect("a state");
                    if is_gradient { &gradient } else { &x }.change_at(question);
                    let gradients = ByPath(HashMap::from([("x".to_string(), gradient)]));
                    let done = Update::new(&mut state).engine(engine).apply(&x, &gradients);
                    gradients.0["x"].numbers();
                    (done.is_ok(), x.numbers())
                };
                let (_, expected) = apply(usize::MAX);
                assert!(expected[0] < 1.0);
                for question in 0..60 {
                    let (is_ok, got) = apply(question);
                    assert!(
                        !is_ok || got == expected,
                        "{} of {dtype:?}, {after:?} at {question}, {engine:?}",
                        rule().name()
                    );
                }
            }
        }
    }
}

/// A vector of one number is one whatever its strides are, and so is what has the strides of its order.
#[test]
fn what_lies_in_order_is_in_order_with_strides_too() -> Tested {
    struct Strided<'s>(Shape, &'s [usize], RwLock<Vec<f32>>);
    impl Lend for Strided<'_> {
        fn lent_shape(&self) -> &[usize] {
            self.0.dims()
        }
        fn lent_dtype(&self) -> optimisers::DType {
            F32.into()
        }
        fn memory(&self) -> Option<usize> {
            None
        }
        fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
            run(View::strided(&*self.2.read().unwrap(), self.0.dims(), self.1)?)
        }
        fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
            run((&mut self.2.write().unwrap()[..self.0.elem_count()]).into())
        }
    }
    impl Model for Strided<'_> {
        fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
            visitor.lend(self);
        }
    }
    let cases: [(&[usize], &[usize]); 4] = [
        (&[], &[]),
        (&[2, 3], &[3, 1]),
        (&[2, 1, 3], &[3, 7, 1]),
        (&[3, 0], &[9, 9]),
    ];
    for (engine, (dims, strides)) in engines()
        .into_iter()
        .flat_map(|engine| cases.map(|case| (engine, case)))
    {
        let lent = |start: f32| {
            Strided(
                dims.into(),
                strides,
                RwLock::new((0..9).map(|i| start + i as f32).collect()),
            )
        };
        let x = lent(0.0);
        let mut state = setup(MixedPrecision::new(F64, Descent::new(1.0)), &x)?;
        let gradients = ByPath(HashMap::from([(String::new(), lent(0.5))]));
        Update::new(&mut state).engine(engine).apply(&x, &gradients)?;
        let moved = x.0.elem_count();
        assert!(
            x.2.read().unwrap()[..moved].iter().all(|x| *x == -0.5),
            "{dims:?} {engine:?}"
        );
        assert_eq!(x.2.read().unwrap()[moved], moved as f32, "{dims:?} {engine:?}");
    }
    Ok(())
}

/// A handle of a part of shared memory.
#[derive(Clone)]
struct Handle {
    shape: Shape,
    range: Range<usize>,
    says_offset: bool,
    values: Arc<RwLock<Vec<f32>>>,
}

impl Handle {
    fn new(values: &Arc<RwLock<Vec<f32>>>, range: Range<usize>, says_offset: bool) -> Self {
        Handle {
            shape: range.len().into(),
            range,
            says_offset,
            values: values.clone(),
        }
    }
}

impl Lend for Handle {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> optimisers::DType {
        F32.into()
    }

    fn memory(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.values).addr())
    }

    fn offset(&self) -> Option<usize> {
        self.says_offset.then_some(self.range.start)
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(&self.values.read().unwrap()[self.range.clone()]))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run((&mut self.values.write().unwrap()[self.range.clone()]).into())
    }
}

impl Model for Handle {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.lend(self);
    }
}

/// Handles of one tensor are one parameter, and have one gradient; neighbours in one memory are several.
/// Where the owner does not say which it is, nothing is guessed.
#[test]
fn handles_are_told_from_neighbours() -> Tested {
    let memory = |length: usize| Arc::new(RwLock::new(vec![1f32; length]));
    for engine in engines() {
        let values = memory(4);
        let tied = [0; 2].map(|_| Handle::new(&values, 0..4, true));
        let of_both = memory(4);
        let gradients = ByPath(
            ["0", "1"]
                .map(|path| (path.to_string(), Handle::new(&of_both, 0..4, true)))
                .into(),
        );
        let mut state = setup(Descent::new(1.0), &tied)?;
        assert_eq!(state.len(), 1);
        Update::new(&mut state).engine(engine).apply(&tied, &gradients)?;
        assert_eq!(*values.read().unwrap(), [0.0; 4], "{engine:?}");

        let arena = memory(4);
        let neighbours = [0..2, 2..4].map(|range| Handle::new(&arena, range, true));
        let gradients = ByPath(
            ["0", "1"]
                .map(|path| (path.to_string(), Handle::new(&memory(2), 0..2, true)))
                .into(),
        );
        let mut state = setup(Descent::new(1.0), &neighbours)?;
        assert_eq!(state.len(), 2);
        Update::new(&mut state)
            .engine(engine)
            .apply(&neighbours, &gradients)?;
        assert_eq!(*arena.read().unwrap(), [0.0; 4], "{engine:?}");
    }
    let values = memory(4);
    for (ranges, says_offset) in [([0..4, 0..4], false), ([0..2, 2..4], false), ([0..4, 0..2], true)] {
        let model = ranges.map(|range| Handle::new(&values, range, says_offset));
        says(
            &setup(Descent::new(1.0), &model).expect_err("a refusal"),
            &["parameter \"0\"", "it shares memory with \"1\"", "`Lend::offset`"],
        );
    }
    // One object under two paths needs to say nothing.
    let one = Handle::new(&values, 0..4, false);
    assert_eq!(setup(Descent::new(1.0), &(&one, &one))?.len(), 1);
    Ok(())
}

/// Of two gradients under the paths of a tied parameter both count; of one under both paths one, whatever its
/// strides are.
#[test]
fn gradients_of_a_tied_parameter_are_told_by_where_they_lie() {
    /// Numbers that are converted for each reader.
    struct Converted(Shape, f64);
    impl Lend for Converted {
        fn lent_shape(&self) -> &[usize] {
            self.0.dims()
        }
        fn lent_dtype(&self) -> optimisers::DType {
            F32.into()
        }
        fn memory(&self) -> Option<usize> {
            None
        }
        fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
            run(View::new(&vec![self.1 as f32; 4]))
        }
        fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
            unreachable!("gradients are read")
        }
    }
    /// One object, or slices of one memory, by columns.
    struct Columns<'c>(Shape, &'c [f32]);
    impl Lend for Columns<'_> {
        fn lent_shape(&self) -> &[usize] {
            self.0.dims()
        }
        fn lent_dtype(&self) -> optimisers::DType {
            F32.into()
        }
        fn memory(&self) -> Option<usize> {
            None
        }
        fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
            run(View::strided(self.1, &[2, 2], &[1, 2])?)
        }
        fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
            unreachable!("gradients are read")
        }
    }
    fn stepped<T: Lend>(gradients: [T; 2]) -> Vec<f64> {
        let x = Locked::new(&Tensor::zeros((2, 2), F32, &Device::Cpu).expect("zeros"));
        let mut state = setup(Descent::new(1.0), &(&x, &x)).expect("a state");
        let [first, second] = gradients;
        update(
            &mut state,
            &(&x, &x),
            &ByPath(HashMap::from([
                ("0".to_string(), first),
                ("1".to_string(), second),
            ])),
        )
        .expect("an update");
        x.numbers()
    }
    let converted = |number| Converted((2, 2).into(), number);
    assert_eq!(stepped([converted(1.0), converted(4.0)]), [-5.0; 4]);
    let numbers = [1f32, 2.0, 3.0, 4.0];
    assert_eq!(
        stepped([0; 2].map(|_| Columns((2, 2).into(), &numbers))),
        [-1.0, -3.0, -2.0, -4.0]
    );
}

/// A state that was made for variables, with other memory in their places: the gradient of one is the other
/// before the step.
#[test]
fn memory_in_the_place_of_variables_is_known_to_be_written() -> Tested {
    struct Given<'g>(HashMap<&'g str, &'g dyn Lend>);
    impl Gradients for Given<'_> {
        fn gradient(&self, path: &str, _: &dyn Lend) -> Option<&dyn Lend> {
            self.0.get(path).copied()
        }
        fn paths(&self) -> impl Iterator<Item = &str> {
            self.0.keys().copied()
        }
        fn by_path(&self) -> bool {
            true
        }
    }
    for engine in engines() {
        let start: Vars = ["a", "b"]
            .map(|path| {
                (
                    path.to_string(),
                    Var::ones(3, F32, &Device::Cpu).expect("a variable"),
                )
            })
            .into();
        let mut state = setup(Descent::new(1.0), &start)?;
        let model = locked(&start);
        let five = Tensor::full(5f32, 3, &Device::Cpu)?;
        let gradients = Given(HashMap::from([("a", &five as &dyn Lend), ("b", &model["a"])]));
        Update::new(&mut state).engine(engine).apply(&model, &gradients)?;
        assert_eq!(
            (model["a"].numbers(), model["b"].numbers()),
            (vec![-4.0; 3], vec![0.0; 3]),
            "{engine:?}"
        );
    }
    Ok(())
}

#[test]
fn several_ranks_have_the_bits_of_one() {
    let shapes: [(&str, &[usize]); 3] = [("b", &[7]), ("large", &[300, 100]), ("w", &[6, 4])];
    let train = move |world: Option<&optimisers::LocalRank>| {
        let start = (1..)
            .zip(shapes)
            .map(|(seed, (path, shape))| (path.to_string(), Locked::new(&tensor(seed, shape, BF16))));
        let model: HashMap<String, Locked> = start.collect();
        let rule = MixedPrecision::new(
            F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
        );
        let mut state = world
            .map_or_else(Setup::default, Setup::over)
            .build(rule, &model)
            .expect("a state");
        for call in 0..3 {
            let grads: Grads = shapes
                .iter()
                .map(|(path, shape)| (path.to_string(), tensor(100 + call, shape, F32)))
                .collect();
            update(&mut state, &model, &locked_gradients(&grads)).expect("an update");
        }
        shapes.map(|(path, _)| model[path].numbers())
    };
    let expected = train(None);
    assert!(
        on(2, move |world| train(Some(&world)))
            .into_iter()
            .all(|got| got == expected)
    );
}
