//! Shapes that no memory has: their sizes multiply to more than can be counted, or to more than the owner
//! lends.

use candle_core::DType::F32;
use optimisers::{
    Adafactor, AdamW, ErrorKind, Lend, MemoryMut, Model, Optimiser, ParameterSlices, Result, Setup, View,
    Visitor, setup,
};

use support::common::is_kind;
use support::threads::on;

const HALF: usize = 1 << (usize::BITS - 1);

/// Each with the length of a slice that a product modulo 2⁶⁴ would accept.
const TOO_LARGE: [(&[usize], usize); 5] = [
    (&[HALF | 1, 2], 2),
    (&[HALF, 2], 0),
    (&[1 << 33, 1 << 33, 7], 0),
    (&[usize::MAX, usize::MAX], 1),
    (&[HALF, 2, 0], 0),
];

#[test]
fn slices_of_such_a_shape_are_refused() {
    for (shape, length) in TOO_LARGE {
        let mut values = vec![1f32; length];
        let error = ParameterSlices::new()
            .with("x", shape, &mut values)
            .expect_err("a refusal");
        is_kind(
            &error,
            ErrorKind::Memory,
            &[
                "parameter \"x\"",
                &format!("{shape:?}"),
                "more than can be counted",
                "pass its shape and all its elements",
            ],
        );
    }
    // Without elements the others may be large.
    let _ = ParameterSlices::new()
        .with("x", [1 << 40, 0], &mut [0f32; 0])
        .expect("an empty parameter");
}

#[test]
fn views_of_such_a_shape_are_refused() {
    for (shape, length) in TOO_LARGE {
        let (values, strides) = (vec![1f32; length.max(1)], vec![0; shape.len()]);
        is_kind(
            &View::strided(&values, shape, &strides).expect_err("a refusal"),
            ErrorKind::Memory,
            &[&format!("{shape:?}")],
        );
    }
}

/// An owner that says more than it lends.
struct Boasting(&'static [usize], usize);

impl Lend for Boasting {
    fn lent_shape(&self) -> &[usize] {
        self.0
    }

    fn lent_dtype(&self) -> optimisers::DType {
        F32.into()
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(&vec![1f32; self.1]))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run((&mut vec![1f32; self.1]).into())
    }
}

impl Model for Boasting {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.below("x", |visitor| visitor.lend(self));
    }
}

/// Before there is memory for the state.
#[test]
fn an_owner_of_such_a_shape_is_refused() {
    let rules: [fn() -> Optimiser; 2] = [
        || Optimiser::new(AdamW::new(0.1)),
        || Optimiser::new(Adafactor::new(0.1)),
    ];
    for (shape, length) in TOO_LARGE.into_iter().chain([(&[1 << 20, 1 << 25][..], 2)]) {
        for rule in rules {
            let words = [
                "parameter \"x\"",
                &format!("has {length} elements of F32, expected"),
            ];
            is_kind(
                &setup(rule(), &Boasting(shape, length)).expect_err("a refusal"),
                ErrorKind::Memory,
                &words,
            );
            let mut state = setup(
                rule(),
                &[candle_core::Var::ones(2, F32, &candle_core::Device::Cpu).expect("a variable")],
            )
            .expect("a state");
            is_kind(
                &state
                    .add(rule(), &Boasting(shape, length))
                    .expect_err("a refusal"),
                ErrorKind::Memory,
                &words,
            );
            let refuses = move |world: optimisers::LocalRank| {
                is_kind(
                    &Setup::over(&world)
                        .build(rule(), &Boasting(shape, length))
                        .expect_err("a refusal"),
                    ErrorKind::Memory,
                    &[],
                );
            };
            on(1, refuses);
        }
    }
}
