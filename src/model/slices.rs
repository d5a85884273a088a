//! Parameters and gradients in memory that the caller owns.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::gradients::{Gradients, duplicate_gradient};
use super::lent::{Lend, MemoryMut, MemoryRef, View, read_only};
use super::{Model, Visitor, duplicate_path};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, Shape, UNCOUNTED};

/// Parameters in memory that the caller owns, as a [`Model`].
///
/// For programs and frameworks with tensors of their own: slices `&mut [f32]`, `&mut [f64]`, `&mut [f16]` and
/// `&mut [bf16]`.
///
/// [`setup`](crate::setup), [`update`](crate::update), [`Update`](crate::Update) and
/// [`LossScaler`](crate::LossScaler) take it like any model, with every rule and optimiser. An update works
/// on the slices where they lie, without a copy. It has the engine, the speed and the bits of the same update
/// of candle variables. Slices are borrowed for as long as this lives, so nothing can alias. A program makes
/// one for each step, after it has computed its gradients.
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
/// - The state finds its parameters by path, in whatever slice they lie: shape and dtype have to be those
///   that `setup` saw.
/// - A parameter that is not there is an error, as with every model; a gradient that is not there leaves its
///   parameter as it was.
/// - `setup`, `add`, `replace` and `resize_rows` copy one parameter at a time where a rule keeps a copy of
///   it. Rules of whole tensors work on copies of one gradient and parameter at a time.
/// - It stands inside another model (a tuple, a `Vec`, a struct) as any model does.
///
/// # Cost
/// About a microsecond for each parameter and step, most of it to make this and [`GradientSlices`]; half of
/// that for a variable. Nothing for each element.
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
    memory: Mutex<MemoryMut<'a>>,
}

impl<'a> ParameterSlices<'a> {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one more parameter: its path, its shape and its elements in row-major order.
    ///
    /// # Errors
    /// If the slice has another number of elements than the shape, or the path is there already.
    pub fn with(
        mut self,
        path: &'a str,
        shape: impl Into<Shape>,
        values: impl Into<MemoryMut<'a>>,
    ) -> Result<Self> {
        let (shape, values) = (shape.into(), values.into());
        check_length(&shape, values.len()).map_err(|error| error.at(path))?;
        if self.by_path.insert(path, self.slices.len()).is_some() {
            return Err(duplicate_path(path));
        }
        self.slices.push(ParameterSlice { path, shape, dtype: values.dtype(), memory: Mutex::new(values) });
        Ok(self)
    }

    /// Whether there is none.
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

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(self.memory.lock().unwrap_or_else(PoisonError::into_inner).to_read()))
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        run(self.memory.lock().unwrap_or_else(PoisonError::into_inner).lent())
    }
}

/// Gradients in memory that the caller owns, of any float dtype, by path.
///
/// They go with [`ParameterSlices`] or any other model. An update reads them where they lie. They have as
/// many elements as their parameters, in row-major order. One slice under several paths of a tied parameter
/// is one gradient, and counts once.
#[must_use]
#[derive(Debug, Default)]
pub struct GradientSlices<'a> {
    by_path: HashMap<&'a str, GradientSlice<'a>>,
}

/// A gradient in a slice: a vector, of whatever shape the parameter is.
pub(crate) type GradientSlice<'a> = TensorSlice<'a, [usize; 1]>;

impl<'a> GradientSlice<'a> {
    pub(crate) fn of(values: MemoryRef<'a>) -> Self {
        TensorSlice { shape: [values.len()], values }
    }
}

impl<'a> GradientSlices<'a> {
    /// No gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one more gradient.
    ///
    /// # Errors
    /// If there is one at this path already.
    pub fn with(mut self, path: &'a str, values: impl Into<MemoryRef<'a>>) -> Result<Self> {
        if self.by_path.insert(path, GradientSlice::of(values.into())).is_some() {
            return Err(duplicate_gradient(path));
        }
        Ok(self)
    }
}

/// A tensor in a slice that is only read, such as the value of an entry that
/// [`StateTree::set_entries`](crate::StateTree::set_entries) sets.
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
    /// The tensor of this shape whose elements these are, in row-major order.
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
    let error = Error::new(ErrorKind::Memory, format!("its shape is {shape:?}, and the length of its slice"));
    let error = error.with_got(got).with_remedy("pass its shape and all its elements");
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

    /// Nobody writes it meanwhile.
    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::new(self.values))
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(read_only("tensor"))
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
