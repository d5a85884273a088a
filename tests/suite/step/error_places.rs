//! Errors that name what is wrong, and not what happens to be next to it.

use candle_core::{DType, Tensor};
use optimisers::{
    Accumulator, Arithmetic, Descent, ErrorKind, Flow, Gradient, Parameter, Parts, Resolved, Result, Rule,
    Setup, State, Sums, Update, hyper_parameters, range, setup, value::Value,
};

use support::common::{assert_same, engines, grads, model, snapshot, tensor};
use support::threads::on;

#[test]
fn a_dtype_for_sums_is_not_the_parameters() {
    let model = model(&[tensor(1, &[2], DType::F32)]);
    let error = Accumulator::new(DType::U8, &model).expect_err("no sums of bytes");
    assert_eq!((error.kind(), error.got()), (ErrorKind::Argument, Some("U8")));
    assert_eq!(
        error.to_string(),
        "the dtype for `Accumulator::new` is U8, expected F16, BF16, F32 or F64"
    );
}

#[test]
fn a_dtype_for_the_wire_is_not_the_parameters() {
    let texts = on(2, |world| {
        let model = model(&[tensor(1, &[2], DType::F32)]);
        let error = Setup::over(&world)
            .wire(|_, _| Some(DType::U8))
            .build(Descent::new(0.1), &model)
            .expect_err("no bytes on the wire");
        if error.kind() != ErrorKind::Ranks {
            assert_eq!(
                (error.kind(), error.path(), error.got()),
                (ErrorKind::Argument, Some("0"), Some("U8"))
            );
        }
        error.to_string()
    });
    let expected = "parameter \"0\": the dtype that `Setup::wire` chose for its gradient is U8, expected \
                    F16, BF16, F32 or F64";
    assert!(
        texts
            .iter()
            .all(|text| text.contains(expected) && !text.contains("leave it out")),
        "{texts:?}"
    );
}

hyper_parameters! {
    /// A rule whose function returns what is no gradient.
    pub struct Returns {
        /// Whether it is of another shape, and not of another dtype.
        shape: bool = true => range::any,
        /// Whether it runs while parameters are written.
        late: bool = false => range::any,
    }
}

impl Rule for Returns {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let wrong = |dx: Tensor| {
            if self.shape {
                dx.narrow(0, 0, 1)
            } else {
                dx.to_dtype(DType::U32)
            }
        };
        Ok(Flow::Step(if self.late {
            dx.with_tensors_late(state, move |_, _, dx, _| Ok(wrong(dx)?))
        } else {
            dx.with_tensors(state, move |_, _, dx, _| Ok(wrong(dx)?))
        }))
    }
}

#[test]
fn what_a_rules_function_returns_is_not_the_gradient() {
    for (engine, (shape, late)) in engines()
        .into_iter()
        .flat_map(|engine| [(true, false), (false, false), (true, true)].map(|how| (engine, how)))
    {
        let model = model(&[tensor(1, &[4], DType::F32)]);
        let mut state = setup(Returns { shape, late }, &model).expect("a state");
        let before = snapshot(&model, &state);
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &grads([Some(tensor(2, &[4], DType::F32))]))
            .expect_err("no gradient");
        assert_eq!(
            (error.kind(), error.path()),
            (ErrorKind::Contract, Some("0")),
            "{error}"
        );
        let [got, expected] = [error.got(), error.expected()].map(|fact| fact.expect("a tensor"));
        assert!(
            got.starts_with(if shape {
                "F32 with the shape [1]"
            } else {
                "U32 with the shape [4]"
            }) && expected.contains("with the shape [4]"),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains("the tensor function of the rule returned") && !text.contains("gradient of"),
            "{text}"
        );
        assert_same(&[snapshot(&model, &state)], &[before], engine);
    }
}

hyper_parameters! {
    /// A rule that asks for another number of sums for vectors than for matrices, with one function.
    pub struct Uneven {
        /// η: the learning rate.
        eta: f64 = 0.1 => range::positive,
    }
}

#[derive(Clone, Copy)]
struct Product;

impl Arithmetic for Product {
    type Slots<T> = [T; 0];

    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * x
    }
}

impl Rule for Uneven {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, numbers, .. } = state.parts();
        let one = Sums::new(slots, numbers).sum(Product, 0..0).of_group(self, 0);
        let sums = if x.rank() == 1 {
            one
        } else {
            one.sum(Product, 0..0)
        };
        Ok(Flow::Step(dx.map_with_sums(sums, |_| Resolved::new(Product, []))))
    }
}

#[test]
fn sums_that_do_not_match_are_the_rules_and_no_defect_of_the_library() {
    for engine in engines() {
        let model = model(&[tensor(1, &[4], DType::F32), tensor(2, &[2, 2], DType::F32)]);
        let mut state = setup(Uneven::default(), &model).expect("a state");
        let before = snapshot(&model, &state);
        let dx = grads([
            Some(tensor(3, &[4], DType::F32)),
            Some(tensor(4, &[2, 2], DType::F32)),
        ]);
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &dx)
            .expect_err("another number of sums");
        let facts = (error.kind(), error.path(), error.expected(), error.got());
        assert_eq!(
            facts,
            (ErrorKind::Contract, Some("1"), Some("1"), Some("2")),
            "{engine:?}"
        );
        assert!(!error.to_string().contains("defect"), "{error}");
        assert_same(&[snapshot(&model, &state)], &[before], engine);
    }
}
