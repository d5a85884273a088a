//! Memory with locks of its own, as a framework has it: a model of `RwLock`s that lends.

use std::collections::BTreeMap;
use std::sync::RwLock;

use optimisers::{
    AdamW, ClipGlobalNorm, DType, GradientMap, Gradients, Lend, MemoryMut, MixedPrecision, Model, OptimiserChain, Result, View, Visitor,
    setup, update,
};
use optimisers_plain::{Plain, Vector, numbers};

struct Locked {
    shape: Vec<usize>,
    values: RwLock<Vec<f32>>,
}

impl Lend for Locked {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&self.values).addr())
    }

    fn offset(&self) -> Option<usize> {
        Some(0)
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(&*self.values.read().expect("a lock")))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run((&mut *self.values.write().expect("a lock")).into())
    }
}

struct Framework(BTreeMap<String, Locked>);

impl Model for Framework {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (path, locked) in &self.0 {
            visitor.below(path, |visitor| visitor.lend(locked));
        }
    }
}

impl Gradients for Framework {
    fn gradient(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        self.0.get(path).map(|locked| locked as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn by_path(&self) -> bool {
        true
    }

    fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
        Ok(None)
    }
}

/// Locked memory has the bits of slices, also where a gradient is what another model trains.
#[test]
fn locks_have_the_bits_of_slices() {
    let optimiser = || MixedPrecision::new(DType::F64, OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.01))));
    let of = |seed: u64, plain: &Plain| {
        let lock = |(index, named): (usize, &optimisers_plain::Named)| {
            let values = numbers(seed + index as u64, named.shape.iter().product()).iter().map(|&x| x as f32).collect();
            (named.path.clone(), Locked { shape: named.shape.clone(), values: RwLock::new(values) })
        };
        Framework(plain.0.iter().enumerate().map(lock).collect())
    };
    let mut plain = Plain::new(1, DType::F32);
    plain.0.retain(|named| named.dtype == DType::F32);
    let (x, gradients) = (of(1, &plain), of(50, &plain));
    let mut beside = setup(optimiser(), &gradients).expect("a state");
    let (mut state, mut of_slices) = (setup(optimiser(), &x).expect("a state"), setup(optimiser(), &plain.lend()).expect("a state"));
    for _ in 0..3 {
        let mut shown = plain.clone();
        for named in &mut shown.0 {
            named.values = Vector::F32(gradients.0[&named.path].values.read().expect("a lock").clone());
        }
        update(&mut state, &x, &gradients).expect("an update");
        update(&mut of_slices, &plain.lend(), &shown.show()).expect("an update");
        update(&mut beside, &gradients, &shown.show()).expect("an update");
    }
    for named in &plain.0 {
        assert!(Vector::F32(x.0[&named.path].values.read().expect("a lock").clone()) == named.values, "{}", named.path);
    }
}
