//! What a call leaves that code of the program ends in its middle: an owner of memory, a rule or a closure
//! that fails or panics.
//!
//! The places where such code runs are counted in a call that succeeds. Then the call is made once for each
//! place and way to fail. After a panic that is caught, everything has to be as after an error at the same
//! place. Code that cannot return an error, such as a description, has to leave all as before or as after the
//! call.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    Accumulator, Checkpoint, CheckpointFile, CheckpointSaver, Describe, Describer, Ema, Error, Flow,
    Gradient, Hyperball, Lend, LossScaler, MemoryMut, MemoryRef, MixedPrecision, Model, Momentum,
    OptimiserChain, Parameter, Parts, ReduceOnPlateau, Result, Rule, Sam, Schedule, Segments, State,
    StateTree, StateValue, Update, View, Visitor, setup, update,
};
use support::common::logged;

/// What happens at a place.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Passes,
    Errs,
    Panics,
}

/// The places that were reached, the one that fails, and how.
#[derive(Clone, Copy)]
struct Trap {
    reached: usize,
    place: usize,
    way: Way,
    /// Whether an error was returned at the place.
    has_erred: bool,
}

impl Trap {
    const fn at(place: usize, way: Way) -> Self {
        Trap {
            reached: 0,
            place,
            way,
            has_erred: false,
        }
    }
}

thread_local! {
    static TRAP: Cell<Trap> = const { Cell::new(Trap::at(0, Way::Passes)) };
}

fn set(place: usize, way: Way) {
    TRAP.set(Trap::at(place, way));
}

/// A place in code of the program, which may return an error or not.
fn reach(can_err: bool) -> Result<()> {
    let mut trap = TRAP.get();
    trap.reached += 1;
    let fails = trap.reached == trap.place;
    trap.has_erred |= fails && can_err && trap.way == Way::Errs;
    TRAP.set(trap);
    match trap.way {
        Way::Panics if fails => panic!("on purpose"),
        Way::Errs if fails && can_err => Err(Error::other("on purpose")),
        _ => Ok(()),
    }
}

/// [`reach`] in code that cannot return an error.
fn pass() {
    let _ = reach(false);
}

const SHAPE: [usize; 2] = [2, 3];

/// A matrix in memory of the program.
struct Owner(Mutex<Vec<f32>>);

impl Owner {
    fn new(first: f32) -> Self {
        Owner(Mutex::new((0..6).map(|i| first + i as f32).collect()))
    }

    fn lend(&self, run: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<()> {
        reach(true)?;
        run(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
        reach(true)
    }
}

impl Lend for Owner {
    fn lent_shape(&self) -> &[usize] {
        &SHAPE
    }

    fn lent_dtype(&self) -> optimisers::DType {
        optimisers::DType::F32
    }

    fn memory(&self) -> Option<usize> {
        pass();
        Some(std::ptr::from_ref(&self.0).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.lend(|numbers| run(View::new(MemoryRef::from(&numbers[..]))))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.lend(|numbers| run(MemoryMut::from(numbers)))
    }
}

struct Pair([Owner; 2]);

impl Model for Pair {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (name, owner) in ["a", "b"].into_iter().zip(&self.0) {
            pass();
            visitor.below(name, |visitor| visitor.lend(owner));
        }
    }
}

/// A rule of the program around another.
#[derive(Clone, Debug)]
struct Wary<R>(R);

impl<R: Rule + Clone> Describe for Wary<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        pass();
        rule.kind("Wary");
        rule.holds(&mut self.0);
    }
}

impl<R: Rule + Clone> Rule for Wary<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        reach(true)?;
        State::empty().with_held(self, x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        reach(true)?;
        let Parts { held, .. } = state.parts();
        self.0.apply(held.inner()?, x, dx)
    }
}

fn rule(eta: f64) -> impl Rule + Clone {
    OptimiserChain::new((Wary(Hyperball::new(Momentum::new(eta))), Ema::new(0.5)))
}

fn gradient(seed: usize) -> Tensor {
    Tensor::from_vec(
        (0..6).map(|i| ((i * 7 + seed * 5) % 11) as f32 - 4.0).collect(),
        &SHAPE,
        &Device::Cpu,
    )
    .expect("a tensor")
}

fn gradients(seed: usize) -> [(&'static str, Tensor); 2] {
    [("a", gradient(seed)), ("b", gradient(seed + 1))]
}

/// Two matrices of owners with their state, a variable of candle with its state, and what goes around them.
struct World {
    model: Pair,
    state: StateTree,
    weight: Var,
    graph: StateTree,
    /// The state's. It has scaled a loss.
    scaler: LossScaler,
    /// The graph's. It has not.
    fresh: LossScaler,
    accumulator: Accumulator,
    plateau: ReduceOnPlateau,
    saver: Option<(tempfile::TempDir, CheckpointSaver)>,
}

impl World {
    /// After a step, so that schedules are at a value that soon changes and rules have state.
    fn new() -> Self {
        set(0, Way::Passes);
        let model = Pair([Owner::new(1.0), Owner::new(2.0)]);
        let mut state = setup(rule(0.5), &model).expect("a state");
        state
            .schedule(Schedule::constant(0.5).then(2, Schedule::constant(0.25)))
            .expect("a schedule");
        update(&mut state, &model, &gradients(1)).expect("an update");
        let weight = Var::new(&[1f32, 2.0], &Device::Cpu).expect("a variable");
        let graph = setup(Momentum::new(0.5), &weight).expect("a state");
        let accumulator = Accumulator::new(optimisers::DType::F32, &model).expect("an accumulator");
        let plateau = ReduceOnPlateau::new().patience(0).field("rho");
        let (mut scaler, fresh) = (LossScaler::fixed(4.0), LossScaler::fixed(4.0));
        let _ = scaler.factor().expect("a scale");
        World {
            model,
            state,
            weight,
            graph,
            scaler,
            fresh,
            accumulator,
            plateau,
            saver: None,
        }
    }

    /// All that remains, and how it goes on.
    fn rest(mut self) -> Vec<String> {
        set(0, Way::Passes);
        let mut rest = self.numbers();
        rest.push(match self.state.entries() {
            Ok(entries) => entries
                .iter()
                .map(|(path, name, value)| entry(path, name, value))
                .collect(),
            Err(error) => format!("{:?}", error.kind()),
        });
        for leaf in self.state.leaves() {
            rest.push(format!("{:?}", leaf.optimiser().fields()));
        }
        // Gradients of a loss that was not scaled.
        let unscaled = Update::new(&mut self.state)
            .scaler(&mut self.scaler)
            .apply(&self.model, &gradients(4));
        rest.push(format!(
            "{:?}",
            unscaled
                .map(|outcome| outcome.status)
                .map_err(|error| error.kind())
        ));
        let loss = self
            .weight
            .sqr()
            .and_then(|squares| squares.sum_all())
            .expect("a loss");
        let trained = Update::new(&mut self.graph)
            .scaler(&mut self.fresh)
            .apply(&self.weight, &loss.backward().expect("gradients"));
        rest.push(format!(
            "{:?}",
            trained
                .map(|outcome| outcome.status)
                .map_err(|error| error.kind())
        ));
        rest.push(format!("{:?} {}", self.plateau, self.graph.steps()));
        rest.push(format!(
            "{} {:?}",
            self.accumulator.weight(),
            self.accumulator.take().map(|sums| numbers(sums.inner()))
        ));
        if let Some((folder, mut saver)) = self.saver.take() {
            let checkpoint = Checkpoint::new(&self.state).model(&self.model);
            let saved = saver.save(9, checkpoint).and_then(|_| saver.wait());
            let newest = saver.newest().expect("files").found.map(|(step, _)| step);
            let files = std::fs::read_dir(folder.path()).expect("a folder").count();
            rest.push(format!(
                "{:?} {newest:?} {files}",
                saved.map_err(|error| error.kind())
            ));
        }
        for seed in [2, 3] {
            let outcome = update(&mut self.state, &self.model, &gradients(seed));
            rest.push(match outcome {
                Ok(outcome) => format!("{:?} {:?}", outcome.status, outcome.learning_rate),
                Err(error) => format!("{:?}", error.kind()),
            });
            rest.extend(self.numbers());
        }
        rest
    }

    fn numbers(&self) -> Vec<String> {
        let owners = self
            .model
            .0
            .iter()
            .map(|owner| format!("{:?}", owner.0.lock().unwrap_or_else(PoisonError::into_inner)));
        let weight = self.weight.to_vec1::<f32>().expect("numbers");
        owners.chain([format!("{weight:?}")]).collect()
    }
}

fn numbers(tensors: &std::collections::BTreeMap<String, Tensor>) -> Vec<Vec<f32>> {
    tensors
        .values()
        .map(|tensor| {
            tensor
                .flatten_all()
                .and_then(|all| all.to_vec1())
                .expect("numbers")
        })
        .collect()
}

fn entry(path: &str, name: &str, value: &StateValue<'_>) -> String {
    let mut text = format!("{path:?} {name}: {value:?}; ");
    if let StateValue::Tensor(tensor) = value {
        tensor
            .read(&mut |view| {
                text += &format!("{:?}; ", view.numbers());
                Ok(())
            })
            .expect("numbers");
    }
    text
}

/// A name; what is done before, if anything; and the call.
type Verb = (
    &'static str,
    fn(&mut World) -> Result<()>,
    fn(&mut World) -> Result<()>,
);

fn nothing(_: &mut World) -> Result<()> {
    Ok(())
}

/// Runs code in which nothing fails, and whose places do not count.
fn safely<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    let trap = TRAP.get();
    set(0, Way::Passes);
    let done = run();
    TRAP.set(trap);
    done
}

/// Verbs that call code of the program and then write.
const VERBS: [Verb; 25] = [
    ("update", nothing, |world| {
        let scaled = gradients(2).map(|(path, gradient)| (path, (gradient * 4.0).expect("a tensor")));
        let update = Update::new(&mut world.state).scaler(&mut world.scaler);
        update.apply(&world.model, &scaled).map(drop)
    }),
    ("apply_owned", nothing, |world| {
        let update = Update::new(&mut world.state).scaler(&mut world.scaler);
        update.apply_owned(&world.model, gradients(2)).map(drop)
    }),
    ("a push", nothing, |world| {
        let update = Update::new(&mut world.state).scaler(&mut world.scaler);
        let step = safely(|| update.begin(&world.model))?;
        step.push("a", gradient(2))
    }),
    ("the end of a streamed step", pushed, |world| {
        let update = Update::new(&mut world.state).scaler(&mut world.scaler);
        let step = safely(|| {
            let step = update.begin(&world.model)?;
            step.push("a", gradient(2)).map(|()| step)
        })?;
        step.finish().map(drop)
    }),
    ("set_entries", nothing, |world| {
        let (first, second) = (Owner::new(0.5), Owner::new(0.25));
        world
            .state
            .set_entries([
                ("", "state.steps", StateValue::Counter(500)),
                ("a", "0.velocity", StateValue::Tensor(&first)),
                ("a", "0.radius", StateValue::Number(3.0)),
                ("b", "0.velocity", StateValue::Tensor(&second)),
            ])
            .map(drop)
    }),
    ("set_masters", nothing, |world| {
        let values = gradients(5).map(|(path, value)| (path.to_string(), value));
        world.state.set_masters(
            &world.model,
            &values.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        )?;
        Ok(())
    }),
    ("refresh_masters", nothing, |world| {
        world.state.refresh_masters(&world.model)
    }),
    ("restore", nothing, |world| {
        file().restore(&mut world.state).map(drop)
    }),
    ("restore_with_model", nothing, |world| {
        file()
            .restore_with_model(&mut world.state, &world.model)
            .map(drop)
    }),
    ("schedule", nothing, |world| {
        world.state.schedule(Schedule::constant(0.125))
    }),
    ("set_steps", nothing, |world| world.state.set_steps(700)),
    ("adjust", nothing, |world| {
        world.state.all().adjust_field("rho", 0.25)
    }),
    ("replace", nothing, |world| {
        world.state.all().replace(rule(0.5), &world.model).map(drop)
    }),
    ("replace for a master", nothing, |world| {
        let rule = MixedPrecision::new(optimisers::DType::F64, rule(0.5));
        world.state.all().replace(rule, &world.model).map(drop)
    }),
    ("observe", seen, |world| {
        safely(|| seen(world))?;
        world.plateau.observe(2.0, &mut world.state).map(drop)
    }),
    ("rebind", nothing, |world| {
        let other = Pair([Owner::new(1.0), Owner::new(2.0)]);
        world.state.rebind(&other)?;
        world.model = other;
        Ok(())
    }),
    ("resize_rows", nothing, |world| {
        world
            .state
            .resize_rows("a", &world.model, &[Some(1), None])
            .map(drop)
    }),
    ("add", removed, |world| {
        safely(|| removed(world))?;
        world.state.add(rule(0.5), &world.model).map(drop)
    }),
    ("with_averages", nothing, |world| {
        world.state.with_averages(&world.model, || reach(true))
    }),
    ("Sam", nothing, |world| {
        let climbed = Sam::new(0.5).ascend(Update::new(&mut world.state), &world.model, &gradients(3))?;
        reach(true)?;
        climbed.restore()
    }),
    ("an accumulator", nothing, |world| {
        let (first, second) = (Owner::new(0.5), Owner::new(0.25));
        world.accumulator.add(&Lent([&first, &second]))
    }),
    ("Segments", nothing, |world| {
        let place = |x: &Tensor| match reach(true) {
            Ok(()) => Ok(x.clone()),
            Err(error) => Err(candle_core::Error::Msg(error.to_string())),
        };
        let weight = &world.weight;
        Segments::new(&Tensor::ones(2, DType::F32, &Device::Cpu).expect("a tensor"))
            .then(|x: &Tensor| place(x)?.mul(weight.as_tensor()))
            .then(|x: &Tensor| place(&x.sqr()?))
            .train(
                Update::new(&mut world.graph).scaler(&mut world.fresh),
                weight,
                |y| place(&y.sum_all()?),
            )
            .map(drop)
    }),
    ("iteration", abandoned, |world| {
        let World {
            scaler, state, model, ..
        } = world;
        scaler.iteration(|scaler| {
            reach(true)?;
            Update::new(state)
                .scaler(scaler)
                .apply(model, &gradients(2))
                .map(drop)
        })
    }),
    ("a saver", with_saver, |world| {
        safely(|| with_saver(world))?;
        let Some((_, saver)) = &mut world.saver else {
            return Ok(());
        };
        saver.save(1, Checkpoint::new(&world.state).model(&world.model))?;
        saver.wait().map(drop)
    }),
    ("to_bytes", nothing, |world| {
        Checkpoint::new(&world.state)
            .model(&world.model)
            .to_bytes()
            .map(drop)
    }),
];

fn pushed(world: &mut World) -> Result<()> {
    let update = Update::new(&mut world.state).scaler(&mut world.scaler);
    update.begin(&world.model)?.push("a", gradient(2))
}

/// The scaled loss goes to the iteration, which fails.
fn abandoned(world: &mut World) -> Result<()> {
    let failed = world
        .scaler
        .iteration(|_| Err::<(), _>(Error::other("on purpose")));
    assert!(failed.is_err());
    Ok(())
}

fn with_saver(world: &mut World) -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let saver = CheckpointSaver::new(folder.path().join("run"));
    world.saver = Some((folder, saver));
    Ok(())
}

fn seen(world: &mut World) -> Result<()> {
    world.plateau.observe(1.0, &mut world.state).map(drop)
}

fn removed(world: &mut World) -> Result<()> {
    world.state.remove("b").map(drop)
}

/// Gradients of owners.
struct Lent<'o>([&'o Owner; 2]);

impl optimisers::Gradients for Lent<'_> {
    fn gradient(&self, path: &str, _: &dyn Lend) -> Option<&dyn Lend> {
        pass();
        ["a", "b"]
            .iter()
            .position(|known| *known == path)
            .map(|place| self.0[place] as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        ["a", "b"].into_iter()
    }

    fn by_path(&self) -> bool {
        true
    }
}

/// A checkpoint of another count of steps.
fn file() -> CheckpointFile {
    let bytes = safely(|| {
        let World { model, mut state, .. } = World::new();
        update(&mut state, &model, &gradients(7))?;
        state.set_steps(900)?;
        Checkpoint::new(&state).model(&model).to_bytes()
    });
    CheckpointFile::from_bytes("run", bytes.expect("a checkpoint").0).expect("a checkpoint")
}

/// What a call leaves that fails at a place, and whether it returned the error of that place.
fn failed(verb: fn(&mut World) -> Result<()>, place: usize, way: Way) -> (Vec<String>, bool) {
    let mut world = World::new();
    set(place, way);
    let done = catch_unwind(AssertUnwindSafe(|| verb(&mut world)));
    let has_erred = TRAP.get().has_erred && matches!(done, Ok(Err(_)));
    (world.rest(), has_erred)
}

/// The places of a verb at which a panic leaves something else, with the difference.
fn wrong_places((name, prepare, verb): Verb) -> Vec<String> {
    let mut world = World::new();
    prepare(&mut world).expect("a preparation");
    let before = world.rest();
    let mut world = World::new();
    verb(&mut world).unwrap_or_else(|error| panic!("{name}: {error}"));
    let places = TRAP.get().reached;
    let after = world.rest();
    assert!(places > 0, "{name} calls no code of the program");
    let wrong = |place| {
        let (rest, _) = failed(verb, place, Way::Panics);
        let (expected, has_erred) = failed(verb, place, Way::Errs);
        let is_right = if has_erred {
            rest == expected
        } else {
            rest == before || rest == after
        };
        let expected = if has_erred { expected } else { after.clone() };
        let differs = || {
            rest.iter()
                .zip(&expected)
                .filter(|(rest, expected)| rest != expected)
                .collect::<Vec<_>>()
        };
        (!is_right).then(|| format!("{name}, place {place} of {places}: {:#?}", differs()))
    };
    (1..=places).filter_map(wrong).collect()
}

#[test]
fn a_panic_that_is_caught_leaves_what_an_error_leaves() {
    let (wrong, _) = logged(|| VERBS.into_iter().flat_map(wrong_places).collect::<Vec<_>>());
    assert!(wrong.is_empty(), "{} wrong: {}", wrong.len(), wrong.join("\n"));
}
