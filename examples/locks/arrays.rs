//! What a framework writes to have every rule, masters and checkpoints: `Lend` for its array, and `Model` and
//! `Gradients` for what has arrays.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use optimisers::{DType, Gradients, Lend, MemoryMut, Model, View, Visitor};

/// The framework's array.
pub struct Array {
    shape: Vec<usize>,
    values: RwLock<Vec<f32>>,
}

impl Array {
    pub fn new(shape: &[usize], values: Vec<f32>) -> Self {
        Array {
            shape: shape.to_vec(),
            values: RwLock::new(values),
        }
    }

    pub fn values(&self) -> Vec<f32> {
        self.values.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Lend for Array {
    fn lent_shape(&self) -> &[usize] {
        &self.shape
    }

    fn lent_dtype(&self) -> DType {
        DType::F32
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&self.values).addr())
    }

    fn offset(&self) -> Option<usize> {
        Some(0)
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> optimisers::Result<()>) -> optimisers::Result<()> {
        run(View::new(
            &*self.values.read().unwrap_or_else(PoisonError::into_inner),
        ))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> optimisers::Result<()>) -> optimisers::Result<()> {
        run((&mut *self.values.write().unwrap_or_else(PoisonError::into_inner)).into())
    }
}

/// Arrays by name: a model, or the gradients of one.
pub struct Arrays(pub BTreeMap<String, Array>);

impl Model for Arrays {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (name, array) in &self.0 {
            visitor.below(name, |visitor| visitor.lend(array));
        }
    }
}

impl Gradients for Arrays {
    fn gradient(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        self.0.get(path).map(|array| array as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn by_path(&self) -> bool {
        true
    }
}
