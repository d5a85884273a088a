//! What an update leaves whose parameter or gradient is lent by an owner that fails: the parameter with all
//! of its state as it was, or moved as a whole, and then the error names it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_core::DType::{self, BF16, F32};
use optimisers::{
    AccumGrad, AdamW, ClipNorm, Elementwise, Engine, Error, ErrorKind, Gradients, Kahan, Lend, MemoryMut,
    MixedPrecision, Model, Muon, Optimiser, OptimiserChain, Result, Slot, SplitMaster, StateTree, Status,
    StochasticRounding, Update, View, Visitor, hyper_parameters, range, setup, value::Value,
};
use optimisers_plain::Vector;

use crate::model::slices::vector;
use support::common::{Snapshot, engines, is_kind, snapshot, tensor};

/// How an owner fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    ErrsBefore,
    ErrsAfter,
    PanicsBefore,
    PanicsAfter,
    RunsTwice,
    LendsLess,
    /// In each loan, so not among [`FAILURES`].
    CatchesPanics,
}

const FAILURES: [Failure; 6] = [
    Failure::ErrsBefore,
    Failure::ErrsAfter,
    Failure::PanicsBefore,
    Failure::PanicsAfter,
    Failure::RunsTwice,
    Failure::LendsLess,
];

/// A matrix whose owner fails once.
struct Owner {
    dtype: DType,
    values: Mutex<Vector>,
    failure: Failure,
    /// How often it lends before that; negative once it has failed.
    left: AtomicIsize,
}

const SHAPE: [usize; 2] = [4, 6];

impl Owner {
    fn new(seed: u64, dtype: DType) -> Self {
        let values = Mutex::new(vector(&tensor(seed, &SHAPE, dtype)));
        Owner {
            dtype,
            values,
            failure: Failure::ErrsBefore,
            left: AtomicIsize::new(-1),
        }
    }

    fn failing(self, failure: Failure, after: isize) -> Self {
        Owner {
            failure,
            left: AtomicIsize::new(after),
            ..self
        }
    }

    fn has_failed(&self) -> bool {
        self.left.load(Ordering::Relaxed) < 0
    }

    fn numbers(&self) -> Vec<f64> {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .numbers()
    }

    /// Lends so many elements to a function.
    fn lend(&self, run: &mut dyn FnMut(&mut Vector, usize) -> Result<()>) -> Result<()> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let all = values.numbers().len();
        if self.failure == Failure::CatchesPanics {
            return catch_unwind(AssertUnwindSafe(|| run(&mut values, all))).unwrap_or(Ok(()));
        }
        if self.left.fetch_sub(1, Ordering::Relaxed) != 0 {
            return run(&mut values, all);
        }
        match self.failure {
            Failure::ErrsBefore => Err(Error::other("on purpose")),
            Failure::ErrsAfter => run(&mut values, all).and(Err(Error::other("on purpose"))),
            Failure::PanicsBefore => panic!("on purpose"),
            Failure::PanicsAfter => {
                run(&mut values, all)?;
                panic!("on purpose")
            }
            Failure::RunsTwice => run(&mut values, all).and_then(|()| run(&mut values, all)),
            Failure::LendsLess => run(&mut values, all - 1),
            // As above.
            Failure::CatchesPanics => run(&mut values, all),
        }
    }
}

impl Lend for Owner {
    fn lent_shape(&self) -> &[usize] {
        &SHAPE
    }

    fn lent_dtype(&self) -> optimisers::DType {
        self.dtype.into()
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&self.values).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.lend(&mut |values, length| run(View::new(values.show_part(0..length))))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.lend(&mut |values, length| run(values.lend_part(0..length)))
    }
}

impl Model for Owner {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.below("x", |visitor| visitor.lend(self));
    }
}

/// The ways to take a step.
#[derive(Clone, Copy, Debug)]
enum Way {
    Update,
    ApplyOwned,
    Streamed,
}

/// A handle of what an owner lends.
struct Lent<'o>(&'o Owner);

impl Lend for Lent<'_> {
    fn lent_shape(&self) -> &[usize] {
        self.0.lent_shape()
    }

    fn lent_dtype(&self) -> optimisers::DType {
        self.0.lent_dtype()
    }

    fn memory(&self) -> Option<usize> {
        self.0.memory()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.0.read(run)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.0.write(run)
    }
}

impl Gradients for Lent<'_> {
    fn gradient(&self, path: &str, _: &dyn Lend) -> Option<&dyn Lend> {
        (path == "x").then_some(self)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        ["x"].into_iter()
    }

    fn by_path(&self) -> bool {
        true
    }
}

type Make = fn() -> Optimiser;

/// All there is of parameter and state.
type Whole = (Vec<f64>, Snapshot);

/// A training, and the step in which an owner fails.
#[derive(Clone, Copy, Debug)]
struct Case {
    make: Make,
    dtype: DType,
    /// The calls before the step.
    calls: u64,
    engine: Engine,
    way: Way,
    failure: Failure,
    is_gradient: bool,
}

impl Case {
    /// The parameter, its state, and the gradient of the step.
    fn started(&self) -> (Owner, StateTree, Owner) {
        let x = Owner::new(1, self.dtype);
        let mut state = setup((self.make)(), &x).expect("a state");
        for call in 0..self.calls {
            Update::new(&mut state)
                .engine(self.engine)
                .apply(&x, &Lent(&Owner::new(10 + call, self.dtype)))
                .expect("an update");
        }
        (x, state, Owner::new(2, self.dtype))
    }

    /// What the step makes of both if no owner fails, and its outcome.
    fn expected(&self) -> [(Whole, Option<(Status, usize)>); 2] {
        let (x, mut state, gradient) = self.started();
        let before = whole(&x, &state);
        let outcome = Update::new(&mut state)
            .engine(self.engine)
            .apply(&x, &Lent(&gradient))
            .expect("an update");
        [
            (before, None),
            (whole(&x, &state), Some((outcome.status, outcome.applied))),
        ]
    }

    /// Takes the step with an owner that fails after it has lent so many times. Returns whether it came so
    /// far.
    fn has_failed(
        &self,
        lends: isize,
        [(before, _), (after, outcome)]: &[(Whole, Option<(Status, usize)>); 2],
    ) -> bool {
        let (x, mut state, gradient) = self.started();
        let [x, gradient] = match self.is_gradient {
            true => [x, gradient.failing(self.failure, lends)],
            false => [x.failing(self.failure, lends), gradient],
        };
        let owner = if self.is_gradient { &gradient } else { &x };
        let (update, what) = (
            Update::new(&mut state).engine(self.engine),
            format!("{self:?} after {lends}"),
        );
        let is_whole = |done: std::thread::Result<Result<()>>, has_moved: bool| match done {
            Ok(Ok(())) => assert!(has_moved, "{what}"),
            Ok(Err(error)) => assert_eq!(
                error.to_string().contains("had already moved: x; restore model"),
                has_moved,
                "{what}: {error}"
            ),
            Err(_) => {}
        };
        match self.way {
            Way::Update | Way::ApplyOwned => {
                let applied = catch_unwind(AssertUnwindSafe(|| match self.way {
                    Way::Update => update.apply(&x, &Lent(&gradient)).map(drop),
                    _ => update.apply_owned(&x, Lent(&gradient)).map(drop),
                }));
                if !owner.has_failed() {
                    return false;
                }
                let left = whole(&x, &state);
                assert!(left == *before || left == *after, "{what}: {left:?}");
                is_whole(applied, left == *after);
            }
            Way::Streamed => {
                let step = update.begin(&x).expect("a step");
                let pushed = catch_unwind(AssertUnwindSafe(|| step.push("x", Lent(&gradient))));
                if !owner.has_failed() {
                    return false;
                }
                // What has moved is not pushed again, and what has not can be.
                let again = step.push("x", Lent(&gradient));
                is_whole(pushed, again.is_err());
                let ended = step.finish().expect("an outcome");
                assert_eq!(Some((ended.status, ended.applied)), *outcome, "{what}");
                assert!(whole(&x, &state) == *after, "{what}: {:?}", whole(&x, &state));
            }
        }
        true
    }
}

fn whole(x: &Owner, state: &StateTree) -> Whole {
    (x.numbers(), snapshot(&Default::default(), state))
}

#[test]
fn an_owner_that_fails_leaves_its_parameter_whole() {
    let rules: [(Make, DType, u64); 9] = [
        (|| Optimiser::new(AdamW::new(0.1)), F32, 0),
        (|| Optimiser::new(Muon::new(0.1)), F32, 1),
        (
            || Optimiser::new(OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1)))),
            F32,
            0,
        ),
        (
            || Optimiser::new(OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1)))),
            F32,
            1,
        ),
        (
            || Optimiser::new(MixedPrecision::new(DType::F64, AdamW::new(0.1))),
            F32,
            0,
        ),
        (
            || {
                Optimiser::new(MixedPrecision::new(
                    F32,
                    OptimiserChain::new((AccumGrad::new(2), Muon::new(0.1))),
                ))
            },
            BF16,
            1,
        ),
        (
            || {
                Optimiser::new(Kahan::new(OptimiserChain::new((
                    ClipNorm::new(0.5),
                    AdamW::new(0.1),
                ))))
            },
            BF16,
            1,
        ),
        (|| Optimiser::new(SplitMaster::new(AdamW::new(0.1))), BF16, 1),
        (
            || Optimiser::new(StochasticRounding::new(1, Muon::new(0.1))),
            BF16,
            0,
        ),
    ];
    for ((make, dtype, calls), engine) in rules
        .into_iter()
        .flat_map(|rule| engines().into_iter().map(move |engine| (rule, engine)))
    {
        let case = |way, failure, is_gradient| Case {
            make,
            dtype,
            calls,
            engine,
            way,
            failure,
            is_gradient,
        };
        let expected = case(Way::Update, Failure::ErrsBefore, false).expected();
        for (way, failure) in [Way::Update, Way::ApplyOwned, Way::Streamed]
            .into_iter()
            .flat_map(|way| FAILURES.map(|failure| (way, failure)))
        {
            for is_gradient in [false, true] {
                let case = case(way, failure, is_gradient);
                assert!(
                    (0..)
                        .take_while(|lends| case.has_failed(*lends, &expected))
                        .count()
                        > 0,
                    "{case:?}"
                );
            }
        }
    }
}

hyper_parameters! {
    /// Arithmetic that panics.
    pub struct Panicking {
        /// η: the learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Panicking {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(_: f64, _x: V, _dx: V, _: &mut [V; 0]) -> V {
        panic!("on purpose")
    }
}

/// As an owner in another language, which cannot pass a panic on.
#[test]
fn a_panic_that_an_owner_catches_is_no_success() {
    let (x, gradient) = (
        Owner::new(1, F32).failing(Failure::CatchesPanics, 0),
        Owner::new(2, F32),
    );
    let mut state = setup(Panicking::new(0.1), &x).expect("a state");
    let error = Update::new(&mut state)
        .apply(&x, &Lent(&gradient))
        .expect_err("a panic");
    is_kind(
        &error,
        ErrorKind::Memory,
        &["\"x\"", "has panicked", "pass a panic of that function on"],
    );
    assert_eq!(state.steps(), 0);
}
