//! Parameters and gradients in memory that the caller owns.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use candle_core::{DType, Shape, Tensor, Var};

use crate::engine::set_tensor;
use crate::error::{Error, Result, SliceError};
use crate::gradients::Gradients;
use crate::lent::{Inside, LentParameters, LentTensor, MemoryMut, MemoryRef};
use crate::model::{Model, Visitor};

/// Parameters in memory that the caller owns: a [`Model`] of `&mut [f32]`, `&mut [f64]`, `&mut [f16]` and `&mut [bf16]`, for programs and frameworks with tensors of
/// their own.
///
/// [`setup`](crate::setup), [`update`](crate::update), [`Update`](crate::Update) and [`LossScaler`](crate::LossScaler) take it like any model, with every rule and
/// optimiser. An update works on the slices where they lie, without a copy, with the engine, the speed and the bits of the same update of candle variables. Slices are
/// borrowed for as long as this lives, so nothing can alias; a program makes one for each step, after it has computed its gradients.
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
/// - The state finds its parameters by path, in whatever slice they lie: shape and dtype have to be those that `setup` saw.
/// - A parameter that is not there is an error, as with every model; a gradient that is not there leaves its parameter as it was.
/// - `setup` copies all parameters for as long as it runs, and so do `add`, `replace` and `resize_rows`. So do
///   functions that show or change a model in other ways (checkpoints with a model, averages, masters): they take
///   what [`ParameterSlices::with_variables`] gives. Rules of whole tensors work on copies of one gradient and
///   parameter at a time.
/// - As a part of another model (in a tuple, a `Vec`, a struct) it is refused: all parameters go into one
///   `ParameterSlices`. In references, boxes and `Option` it is itself.
/// - Over several ranks it is refused.
///
/// # Cost
/// About a microsecond for each parameter and step, for making and dropping both; nothing for each element.
#[must_use]
#[derive(Debug, Default)]
pub struct ParameterSlices<'a>(LentParameters<'a>);

impl<'a> ParameterSlices<'a> {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one more parameter: its path, its shape and its elements in row-major order.
    ///
    /// # Errors
    /// If the slice has another number of elements than the shape, or the path is there already.
    pub fn with(mut self, path: &'a str, shape: impl Into<Shape>, values: impl Into<MemoryMut<'a>>) -> Result<Self> {
        let (shape, values) = (shape.into(), values.into());
        let (expected, got) = (shape.elem_count(), values.len());
        if expected != got {
            return Err(SliceError::Length { path: path.to_string(), shape, expected, got }.into());
        }
        if self.0.contains(path) {
            return Err(Error::DuplicatePath { path: path.to_string() });
        }
        self.0.insert(path, LentTensor::to_write(values, shape));
        Ok(self)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Runs a function on candle variables with the values of the parameters, and writes what they are then to the slices, unless it fails: for everything that
    /// needs a model and is no update.
    ///
    /// ```
    /// use optimisers::{Checkpoint, CheckpointFile, Descent, GradientSlices, ParameterSlices, setup, update};
    ///
    /// let mut x = vec![1f32; 3];
    /// let mut parameters = ParameterSlices::new().with("x", 3, &mut x)?;
    /// let mut state = setup(Descent::new(0.5), &parameters)?;
    /// # let folder = tempfile::tempdir()?;
    /// # let file = folder.path().join("checkpoint");
    /// parameters.with_variables(|model| Checkpoint::new(&state).model(model).save(&file))?;
    /// update(&mut state, &parameters, &GradientSlices::new().with("x", &[2f32; 3])?)?;
    /// parameters.with_variables(|model| CheckpointFile::open(&file)?.restore_with_model(&mut state, model))?;
    /// drop(parameters);
    /// assert_eq!(x, [1.0; 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of the function.
    pub fn with_variables<T>(&mut self, run: impl FnOnce(&BTreeMap<String, Var>) -> Result<T>) -> Result<T> {
        let variable = |(path, copy): (&str, Tensor)| Ok((path.to_string(), Var::from_tensor(&copy)?));
        let variables = self.0.copies()?.into_iter().map(variable).collect::<Result<BTreeMap<_, _>>>()?;
        let done = run(&variables)?;
        for path in self.0.paths() {
            if let (Some(lent), Some(variable)) = (self.0.tensor(path), variables.get(path)) {
                set_tensor(lent, variable)?;
            }
        }
        Ok(done)
    }
}

/// It shows nothing of itself: what it lends is for updates alone.
impl Model for ParameterSlices<'_> {
    fn visit(&self, visitor: &mut Visitor<'_>) {
        visitor.slices();
    }

    fn lent(&self, _: &Inside) -> Option<&LentParameters<'_>> {
        Some(&self.0)
    }
}

/// Gradients in memory that the caller owns, of any float dtype, by path; for [`ParameterSlices`] or any other model.
///
/// An update reads them where they lie. They have as many elements as their parameters, in row-major order.
/// One slice under several paths of a tied parameter is one gradient, and counts once.
#[must_use]
#[derive(Debug, Default)]
pub struct GradientSlices<'a> {
    /// Each once.
    slices: Vec<GradientSlice<'a>>,
    by_place: HashMap<(usize, usize, DType), usize>,
    by_path: HashMap<&'a str, GradientOfPath>,
}

#[derive(Debug)]
struct GradientSlice<'a> {
    lent: LentTensor<'a>,
    /// For those who are not to have it.
    copy: OnceLock<Tensor>,
}

#[derive(Debug)]
struct GradientOfPath {
    slice: usize,
    /// The slice's copy in the parameter's shape.
    copy: OnceLock<Tensor>,
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
        if self.by_path.contains_key(path) {
            return Err(Error::DuplicateGradient { path: path.to_string() });
        }
        let values = values.into();
        let slice = *self.by_place.entry(values.place()).or_insert_with(|| {
            self.slices.push(GradientSlice { lent: LentTensor::to_read(values), copy: OnceLock::new() });
            self.slices.len() - 1
        });
        self.by_path.insert(path, GradientOfPath { slice, copy: OnceLock::new() });
        Ok(self)
    }
}

impl GradientSlice<'_> {
    fn copy(&self) -> Option<&Tensor> {
        if self.copy.get().is_none() {
            let _ = self.copy.set(self.lent.tensor().copy().ok()?);
        }
        self.copy.get()
    }
}

/// The elements in the shape of a parameter, if they are as many; else as they are, which an update refuses.
fn shaped(gradient: &Tensor, x: &Tensor) -> Option<Tensor> {
    let is_shaped = gradient.shape() == x.shape() || gradient.elem_count() != x.elem_count();
    if is_shaped { Some(gradient.clone()) } else { gradient.reshape(x.shape()).ok() }
}

impl Gradients for GradientSlices<'_> {
    fn gradient(&self, path: &str, x: &Tensor) -> Option<&Tensor> {
        let GradientOfPath { slice, copy } = self.by_path.get(path)?;
        if copy.get().is_none() {
            let _ = copy.set(shaped(self.slices[*slice].copy()?, x)?);
        }
        copy.get()
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.by_path.keys().copied()
    }

    fn by_path(&self) -> bool {
        true
    }

    fn lent(&self, path: &str, x: &Tensor, _: &Inside) -> Option<Tensor> {
        shaped(self.slices[self.by_path.get(path)?.slice].lent.tensor(), x)
    }

    fn lends(&self, _: &Inside) -> bool {
        true
    }
}
