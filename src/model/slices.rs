//! Parameters and gradients in memory that the caller owns, for programs without candle's tensors.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::gradients::{Gradients, duplicate_gradient};
use super::lent::{Lend, MemoryMut, MemoryRef, View, read_only_error};
use super::{Model, Visitor, duplicate_path_error};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, Shape, UNCOUNTED};

/// Parameters in memory that the caller owns, as a [`Model`].
///
/// For programs and frameworks with tensors of their own: slices `&mut [f32]`, `&mut [f64]`, `&mut [f16]` and
/// `&mut [bf16]`.
///
/// [`setup`](crate::setup), [`update`](crate::update), [`Update`](crate::Update) and
/// [`LossScaler`](crate::LossScaler) take slices like any model, with every rule and optimiser. An update
/// writes the slices in place, with the engine, the speed and the bits of an update of candle variables. A
/// `ParameterSlices` borrows its slices mutably, so nothing can alias them. A program makes a new
/// `ParameterSlices` for each step, after it has computed its gradients.
///
/// ```
/// use half::bf16;
/// use optimisers::{AdamW, DType::F32, GradientSlices, MixedPrecision, ParameterSlices, setup, update};
///
/// let mut weight = vec![bf16::ONE; 6];
/// let mut bias = [0f32; 2];
///
/// let parameters = ParameterSlices::new().with("weight", (2, 3), &mut weight)?.with("bias", 2, &mut bias)?;
/// let mut state = setup(MixedPrecision::new(F32, AdamW::new(0.1)), &parameters)?;
/// drop(parameters);
///
/// for _ in 0..3 {
///     // The program's own forward and backward pass.
///     let (of_weight, of_bias) = (weight.clone(), [1f32; 2]);
///     let parameters = ParameterSlices::new().with("weight", (2, 3), &mut weight)?.with("bias", 2, &mut bias)?;
///     let gradients = GradientSlices::new().with("weight", &of_weight)?.with("bias", &of_bias)?;
///     update(&mut state, &parameters, &gradients)?;
/// }
/// assert!((bias[0] + 0.3).abs() < 1e-3 && weight[0] < bf16::from_f32(0.75));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is different
/// - The state finds its parameters by path, so each step may pass other slices. Shape and dtype must be
///   those that `setup` found.
/// - If a parameter is missing, the call returns an error, as with every model. A parameter without a
///   gradient stays as it is.
/// - If a rule keeps a copy of the parameter, `setup`, `add`, `replace` and `resize_rows` copy one parameter
///   at a time. Rules of whole tensors work on copies of one gradient and one parameter at a time.
/// - `ParameterSlices` can be a part of another model (a tuple, a `Vec`, a struct).
///
/// # Cost
/// A step takes about a microsecond for each parameter, mostly to make `ParameterSlices` and
/// [`GradientSlices`]. A candle variable takes half of that time. There is no cost for each element.
#[must_use]
#[derive(Debug, Default)]
pub struct ParameterSlices<'a> {
    slices: Vec<ParameterSlice<'a>>,
    by_path: HashMap<&'a str, usize>,
}

#[derive(Debug)]
struct ParameterSlice<'a> {
    path: &'a str,
    shape: Shape,
    dtype: DType,
    // `Lend::write` gets `&self`, and threads share the model, so a lock has to give out the `&mut` slice.
    memory: Mutex<MemoryMut<'a>>,
}

impl<'a> ParameterSlices<'a> {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter: its path, its shape and its elements in row-major order.
    ///
    /// # Errors
    /// If the slice has another number of elements than the shape, or the path is already in use.
    pub fn with(
        mut self,
        path: &'a str,
        shape: impl Into<Shape>,
        values: impl Into<MemoryMut<'a>>,
    ) -> Result<Self> {
        let (shape, values) = (shape.into(), values.into());
        check_length(&shape, values.len()).map_err(|error| error.at(path))?;
        if self.by_path.insert(path, self.slices.len()).is_some() {
            return Err(duplicate_path_error(path));
        }
        self.slices.push(ParameterSlice {
            path,
            shape,
            dtype: values.dtype(),
            memory: Mutex::new(values),
        });
        Ok(self)
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }
}

impl Model for ParameterSlices<'_> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for slice in &self.slices {
            visitor.below(slice.path, |visitor| visitor.lend(slice));
        }
    }
}

impl Lend for ParameterSlice<'_> {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> DType {
        self.dtype
    }

    /// `None`, because nobody else can access a `&mut` slice.
    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(
            self.memory
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_memory_ref(),
        ))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run(self
            .memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .reborrow())
    }
}

/// Gradients in memory that the caller owns, of any float dtype, by path.
///
/// These gradients go with [`ParameterSlices`] or any other model. An update reads the slices in place. Each
/// slice has the elements of its parameter in row-major order, without a shape. If a program gives one slice
/// under several paths of a tied parameter, the slice counts once.
#[must_use]
#[derive(Debug, Default)]
pub struct GradientSlices<'a> {
    by_path: HashMap<&'a str, GradientSlice<'a>>,
}

/// A gradient in a slice: a vector, whatever the shape of its parameter.
type GradientSlice<'a> = TensorSlice<'a, [usize; 1]>;

impl<'a> GradientSlice<'a> {
    pub(crate) fn vector(values: MemoryRef<'a>) -> Self {
        TensorSlice {
            shape: [values.len()],
            values,
        }
    }
}

impl<'a> GradientSlices<'a> {
    /// No gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a gradient.
    ///
    /// # Errors
    /// If the path already has a gradient.
    pub fn with(mut self, path: &'a str, values: impl Into<MemoryRef<'a>>) -> Result<Self> {
        if self
            .by_path
            .insert(path, GradientSlice::vector(values.into()))
            .is_some()
        {
            return Err(duplicate_gradient(path));
        }
        Ok(self)
    }
}

/// A tensor in a slice that is only read, such as a value for
/// [`StateTree::set_entries`](crate::StateTree::set_entries).
///
/// ```
/// use optimisers::{DType, Lend, TensorSlice};
///
/// let tensor = TensorSlice::new((2, 3), &[1f32; 6])?;
/// assert_eq!((tensor.lent_shape(), tensor.lent_dtype()), (&[2, 3][..], DType::F32));
/// # Ok::<(), optimisers::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorSlice<'a, S = Shape> {
    shape: S,
    values: MemoryRef<'a>,
}

impl<'a> TensorSlice<'a> {
    /// A tensor of this shape, whose elements are `values` in row-major order.
    ///
    /// # Errors
    /// If the slice has another number of elements than the shape.
    pub fn new(shape: impl Into<Shape>, values: impl Into<MemoryRef<'a>>) -> Result<Self> {
        let (shape, values) = (shape.into(), values.into());
        check_length(&shape, values.len())?;
        Ok(TensorSlice { shape, values })
    }
}

/// Refuses a slice that has another number of elements than its shape.
fn check_length(shape: &Shape, got: usize) -> Result<()> {
    let expected = shape.elem_count();
    if expected == got {
        return Ok(());
    }
    let error = Error::new(
        ErrorKind::Memory,
        format!("its shape is {shape:?}, and the length of its slice"),
    );
    let error = error
        .with_got(got)
        .with_remedy("pass its shape and all its elements");
    Err(match expected {
        UNCOUNTED => error.with_expected("more than can be counted"),
        expected => error.with_expected(expected),
    })
}

impl<S: AsRef<[usize]> + Send + Sync> Lend for TensorSlice<'_, S> {
    fn lent_shape(&self) -> &[usize] {
        self.shape.as_ref()
    }

    fn lent_dtype(&self) -> DType {
        self.values.dtype()
    }

    /// `None`, because nobody can write a slice that is borrowed here.
    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(self.values))
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(read_only_error())
    }
}

impl Gradients for GradientSlices<'_> {
    fn gradient(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        self.by_path.get(path).map(|slice| slice as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.by_path.keys().copied()
    }

    fn by_path(&self) -> bool {
        true
    }
}
