//! Tensors without candle: numbers of one dtype in a shape, under a lock.
//!
//! The file has the part of candle that other modules use, with candle's names. Each function must return the
//! bits that candle's returns: `.ci/run plain` compares the two builds. Arithmetic on tensors is here only
//! for sums of tied gradients, for means, and for the compensations of parameters.
//!
//! ```text
//! Tensor ─┐                          a handle; clones are one tensor
//! Tensor ─┴─> Inner ──> Layout       shape, strides and start in the storage
//!               └─────> Storage      the numbers, under a lock; a tensor and its views share them
//! ```
//!
//! A view is a new `Inner` with the same storage. A thread that has locked a storage for writing must not
//! read another tensor: that tensor may be a view of the same storage, and the thread would wait for itself.
//!
//! Programs cannot name these types, and have only the methods of the crate's own traits for them. So no
//! program can depend on whether a build has these tensors or candle's.
#![allow(unreachable_pub, reason = "signatures that are public with candle name them")]

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use half::{bf16, f16};

use crate::error::{self, Error, ErrorKind};
pub(crate) use crate::numbers::Shape;
use crate::numbers::{DType, element_offset, round_to_odd};

/// The device of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Device {
    /// The only device without candle.
    Cpu,
}

impl Device {
    pub(crate) fn is_cpu(&self) -> bool {
        true
    }

    pub(crate) fn same_device(&self, _other: &Device) -> bool {
        true
    }

    /// The device as errors print it.
    pub(crate) fn location(&self) -> &Device {
        self
    }

    /// Does nothing, because the CPU has no work in flight.
    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

/// The error of an operation on tensors.
#[derive(Debug)]
pub(crate) struct TensorError(Error);

pub(crate) type Result<T> = std::result::Result<T, TensorError>;

impl From<TensorError> for Error {
    fn from(TensorError(error): TensorError) -> Self {
        error
    }
}

impl From<Error> for TensorError {
    fn from(error: Error) -> Self {
        TensorError(error)
    }
}

impl std::fmt::Display for TensorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for TensorError {}

/// Makes types and functions with a case for each dtype.
macro_rules! dtypes {
    ($($Variant:ident: $T:ty),*) => {
        /// Numbers of one dtype.
        #[derive(Clone)]
        pub(crate) enum CpuStorage {
            $($Variant(Vec<$T>),)*
        }

        pub(crate) fn dtype_of_numbers(numbers: &CpuStorage) -> DType {
            match numbers { $(CpuStorage::$Variant(_) => DType::$Variant,)* }
        }

        fn zero_numbers(length: usize, dtype: DType) -> CpuStorage {
            match dtype {
                $(DType::$Variant => CpuStorage::$Variant(vec![<$T>::default(); length]),)*
            }
        }

        /// Writes the elements of a layout to `to`, in row-major order from `start` on.
        pub(crate) fn copy_elements(from: &CpuStorage, layout: &Layout, to: &mut CpuStorage, start: usize) -> Result<()> {
            match (from, to) {
                $((CpuStorage::$Variant(from), CpuStorage::$Variant(to)) => copy(from, layout, to.get_mut(start..)),)*
                _ => Err(failure("numbers are copied to those of another dtype")),
            }
        }

        $(impl WithDType for $T {
            fn storage(numbers: Vec<Self>) -> CpuStorage {
                CpuStorage::$Variant(numbers)
            }

            fn numbers(storage: CpuStorage) -> Result<Vec<Self>> {
                if let CpuStorage::$Variant(numbers) = storage { Ok(numbers) } else { Err(failure("numbers of another dtype")) }
            }
        })*
    };
}

dtypes! { U8: u8, U32: u32, I16: i16, I32: i32, I64: i64, BF16: bf16, F16: f16, F32: f32, F64: f64 }

pub(crate) trait WithDType: Copy {
    fn storage(numbers: Vec<Self>) -> CpuStorage;

    fn numbers(storage: CpuStorage) -> Result<Vec<Self>>;
}

/// Copies the elements of a layout, in row-major order.
fn copy<T: Copy>(from: &[T], layout: &Layout, to: Option<&mut [T]>) -> Result<()> {
    let length_error = || failure("the numbers are fewer than the elements");
    let to = to
        .and_then(|numbers| numbers.get_mut(..layout.elem_count()))
        .ok_or_else(length_error)?;
    if let Some((start, end)) = layout.contiguous_offsets() {
        to.copy_from_slice(from.get(start..end).ok_or_else(length_error)?);
        return Ok(());
    }
    for (element, number) in to.iter_mut().enumerate() {
        *number = *from
            .get(layout.start + element_offset(element, layout.dims(), layout.stride()))
            .ok_or_else(length_error)?;
    }
    Ok(())
}

pub(crate) fn failure(text: impl Into<String>) -> TensorError {
    TensorError(Error::new(ErrorKind::Other, text.into()))
}

/// A tensor of these numbers, which are in row-major order.
pub(crate) fn tensor_of(numbers: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::with_layout(
        Arc::new(RwLock::new(Storage(numbers))),
        Layout::row_major(shape.into()),
    )
}

pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, _device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    Ok(tensor_of(zero_numbers(shape.elem_count(), dtype), shape))
}

/// A tensor of these bytes, in the processor's order.
pub(crate) fn from_bytes(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let shape = Shape::from(shape);
    let mut numbers = zero_numbers(shape.elem_count(), dtype);
    let number_bytes = super::bytes_mut(&mut numbers)?;
    if number_bytes.len() != bytes.len() {
        return Err(failure(format!(
            "{} bytes are no tensor of {dtype:?} and shape {shape:?}",
            bytes.len()
        )));
    }
    number_bytes.copy_from_slice(bytes);
    Ok(tensor_of(numbers, shape))
}

pub(crate) fn dtype_of(tensor: &Tensor) -> DType {
    tensor.dtype()
}

pub(crate) fn zero_storage(shape: &Shape, dtype: DType) -> Result<CpuStorage> {
    Ok(zero_numbers(shape.elem_count(), dtype))
}

/// The numbers of a locked tensor.
pub(crate) fn cpu_numbers(storage: &Storage) -> Option<&CpuStorage> {
    Some(&storage.0)
}

/// The dtype of a locked storage, and its size in bytes.
pub(crate) fn storage_extent(storage: &Storage, _tensor: &Tensor) -> (DType, usize) {
    super::cpu_extent(&storage.0)
}

/// The contents of the lock of a tensor.
pub(crate) struct Storage(CpuStorage);

/// The places of a tensor's elements in its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    shape: Shape,
    stride: Vec<usize>,
    start: usize,
}

impl Layout {
    /// The layout of row-major order from the first number on.
    fn row_major(shape: Shape) -> Self {
        Layout {
            stride: row_major_strides(shape.dims()),
            shape,
            start: 0,
        }
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    pub(crate) fn stride(&self) -> &[usize] {
        &self.stride
    }

    pub(crate) fn start_offset(&self) -> usize {
        self.start
    }

    fn elem_count(&self) -> usize {
        self.shape.elem_count()
    }

    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims().iter().zip(&self.stride).rev().all(|(dim, stride)| {
            // The stride of a dimension of size 1 is never used, so it may be any number.
            let is_right = *dim == 1 || *stride == expected;
            expected *= dim;
            is_right
        })
    }

    /// The range of the elements in the storage, if they are in row-major order without gaps.
    pub(crate) fn contiguous_offsets(&self) -> Option<(usize, usize)> {
        self.is_contiguous()
            .then(|| (self.start, self.start + self.elem_count()))
    }
}

fn row_major_strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for dim in (1..dims.len()).rev() {
        strides[dim - 1] = strides[dim] * dims[dim];
    }
    strides
}

/// Identifies a tensor. A view has an id of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorId(u64);

/// A handle of numbers in a shape. Clones are one tensor.
#[derive(Clone, Debug)]
pub struct Tensor(Arc<Inner>);

/// The same type as [`Tensor`], because every tensor can be written through its lock.
pub(crate) type Var = Tensor;

/// The contents of a tensor, which all its handles share.
pub struct Inner {
    id: TensorId,
    storage: Arc<RwLock<Storage>>,
    layout: Layout,
    /// The dtype of the storage, so that [`Tensor::dtype`] takes no lock.
    dtype: DType,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {:?}", self.dtype, self.layout.dims())
    }
}

impl Deref for Tensor {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// Lends the numbers of a tensor to `run`, while no other code can read or write them.
pub(crate) fn with_numbers_mut(
    tensor: &Tensor,
    run: &mut dyn FnMut(&mut CpuStorage, &Layout) -> error::Result<()>,
) -> error::Result<()> {
    run(
        &mut tensor.0.storage.write().unwrap_or_else(PoisonError::into_inner).0,
        tensor.layout(),
    )
}

impl Tensor {
    fn with_layout(storage: Arc<RwLock<Storage>>, layout: Layout) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = TensorId(NEXT.fetch_add(1, Ordering::Relaxed));
        let dtype = dtype_of_numbers(&storage.read().unwrap_or_else(PoisonError::into_inner).0);
        Tensor(Arc::new(Inner {
            id,
            storage,
            layout,
            dtype,
        }))
    }

    /// The same numbers in another layout.
    fn view(&self, shape: Shape, stride: Vec<usize>, start: usize) -> Self {
        Tensor::with_layout(self.0.storage.clone(), Layout { shape, stride, start })
    }

    pub(crate) fn from_vec<T: WithDType>(
        numbers: Vec<T>,
        shape: impl Into<Shape>,
        _device: &Device,
    ) -> Result<Self> {
        let (shape, length) = (shape.into(), numbers.len());
        if length == shape.elem_count() {
            Ok(tensor_of(T::storage(numbers), shape))
        } else {
            Err(failure("other numbers than the shape has"))
        }
    }

    /// Joins vectors to one.
    pub(crate) fn cat(vectors: &[Tensor], _dim: usize) -> Result<Self> {
        let first = vectors.first().ok_or_else(|| failure("no vectors to join"))?;
        let length: usize = vectors.iter().map(Tensor::elem_count).sum();
        let joined = zeros(length, first.dtype(), &Device::Cpu)?;
        let mut start = 0;
        for vector in vectors {
            joined.slice_set(vector, 0, start)?;
            start += vector.elem_count();
        }
        Ok(joined)
    }

    pub(crate) fn id(&self) -> TensorId {
        self.0.id
    }

    /// Always `false`: no program can name a tensor, so no tensor is a parameter.
    pub(crate) fn is_variable(&self) -> bool {
        false
    }

    /// A tensor with a copy of the numbers.
    pub(crate) fn from_tensor(tensor: &Tensor) -> Result<Self> {
        tensor.force_contiguous()
    }

    pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        zeros(shape, dtype, device)
    }

    pub(crate) fn as_tensor(&self) -> &Tensor {
        self
    }

    pub(crate) fn detach(&self) -> Tensor {
        self.clone()
    }

    /// Overwrites the numbers with those of a tensor of the same shape and dtype.
    pub(crate) fn set(&self, next: &Tensor) -> Result<()> {
        let (expected, shape) = (self.shape(), next.shape());
        if shape != expected {
            return Err(failure(format!(
                "a variable of shape {expected:?} cannot take values of shape {shape:?}"
            )));
        }
        self.overwrite(0, next)
    }

    /// Overwrites numbers from `start` on. This tensor is contiguous.
    fn overwrite(&self, start: usize, next: &Tensor) -> Result<()> {
        // The numbers are copied before the lock is taken, because `next` may be in the same storage.
        let (numbers, layout) = (next.numbers()?, Layout::row_major(next.shape().clone()));
        let mut storage = self.0.storage.write().unwrap_or_else(PoisonError::into_inner);
        copy_elements(&numbers, &layout, &mut storage.0, self.layout().start + start)
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.0.layout.dims()
    }

    pub(crate) fn rank(&self) -> usize {
        self.dims().len()
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.0.layout.shape
    }

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub(crate) fn device(&self) -> &Device {
        &Device::Cpu
    }

    pub(crate) fn elem_count(&self) -> usize {
        self.0.layout.elem_count()
    }

    pub(crate) fn stride(&self) -> &[usize] {
        self.0.layout.stride()
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.0.layout
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.0.layout.is_contiguous()
    }

    pub(crate) fn storage_and_layout(&self) -> (RwLockReadGuard<'_, Storage>, &Layout) {
        (
            self.0.storage.read().unwrap_or_else(PoisonError::into_inner),
            &self.0.layout,
        )
    }

    pub(crate) fn to_device(&self, _device: &Device) -> Result<Self> {
        Ok(self.clone())
    }

    /// A copy of the elements, in row-major order.
    fn numbers(&self) -> Result<CpuStorage> {
        let (storage, layout) = self.storage_and_layout();
        // If the elements are the whole storage, a clone avoids the zeros that are overwritten below.
        if layout.contiguous_offsets()
            == Some((0, super::bytes(&storage.0)?.len() / self.dtype().size_in_bytes()))
        {
            return Ok(storage.0.clone());
        }
        let mut numbers = zero_numbers(layout.elem_count(), self.dtype());
        copy_elements(&storage.0, layout, &mut numbers, 0)?;
        Ok(numbers)
    }

    pub(crate) fn copy(&self) -> Result<Self> {
        self.force_contiguous()
    }

    pub(crate) fn force_contiguous(&self) -> Result<Self> {
        Ok(tensor_of(self.numbers()?, self.shape().clone()))
    }

    pub(crate) fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() {
            Ok(self.clone())
        } else {
            self.force_contiguous()
        }
    }

    pub(crate) fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elem_count() != self.elem_count() {
            return Err(failure(format!(
                "a tensor of shape {:?} cannot have the shape {shape:?}",
                self.shape()
            )));
        }
        let contiguous = self.contiguous()?;
        Ok(contiguous.view(
            shape.clone(),
            row_major_strides(shape.dims()),
            contiguous.layout().start,
        ))
    }

    pub(crate) fn flatten_all(&self) -> Result<Self> {
        self.reshape(self.elem_count())
    }

    /// A view of a range of a dimension.
    pub(crate) fn narrow(&self, dim: usize, start: usize, length: usize) -> Result<Self> {
        let (mut dims, layout) = (self.dims().to_vec(), self.layout());
        if dims.get(dim).is_none_or(|dim| start + length > *dim) {
            return Err(failure(format!(
                "there is no range of {length} from {start} on in dimension {dim} of {:?}",
                self.shape()
            )));
        }
        dims[dim] = length;
        Ok(self.view(
            dims.into(),
            layout.stride.clone(),
            layout.start + start * layout.stride[dim],
        ))
    }

    /// A view of a larger shape, in which the elements repeat by strides of 0.
    pub(crate) fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self> {
        let (shape, layout) = (shape.into(), self.layout());
        let broadcast_strides = |dims: &[usize]| {
            let added = dims.len().checked_sub(self.rank())?;
            let fits = self
                .dims()
                .iter()
                .zip(&dims[added..])
                .all(|(own, dim)| own == dim || *own == 1);
            let dims_and_strides = self.dims().iter().zip(&layout.stride);
            let strides = dims_and_strides.map(|(own, stride)| if *own == 1 { 0 } else { *stride });
            fits.then(|| vec![0; added].into_iter().chain(strides).collect::<Vec<_>>())
        };
        let stride = broadcast_strides(shape.dims())
            .ok_or_else(|| failure(format!("{:?} cannot be broadcast to {shape:?}", self.shape())))?;
        Ok(self.view(shape, stride, layout.start))
    }

    /// Overwrites rows from `start` on. This tensor is contiguous.
    pub(crate) fn slice_set(&self, rows: &Tensor, dim: usize, start: usize) -> Result<()> {
        let (count, available) = (
            rows.dims().first().unwrap_or(&0),
            self.dims().first().unwrap_or(&0),
        );
        if dim != 0 || start + count > *available {
            return Err(failure("rows are set within dimension 0"));
        }
        self.overwrite(start * self.stride().first().unwrap_or(&1), rows)
    }

    pub(crate) fn to_vec1<T: WithDType>(&self) -> Result<Vec<T>> {
        T::numbers(self.numbers()?)
    }
}

/// The numbers in another floating-point dtype, each rounded once, to nearest even.
pub(crate) fn in_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if dtype == tensor.dtype() {
        return Ok(tensor.clone());
    }
    Ok(tensor_of(
        convert(tensor.numbers()?, dtype)?,
        tensor.shape().clone(),
    ))
}

pub(crate) fn rows_of(tensor: &Tensor, rows: Vec<usize>) -> Result<Tensor> {
    let mut dims = tensor.dims().to_vec();
    *dims.first_mut().ok_or_else(|| failure("a number has no rows"))? = rows.len();
    let selected = zeros(dims, tensor.dtype(), &Device::Cpu)?;
    for (place, row) in rows.into_iter().enumerate() {
        selected.slice_set(&tensor.narrow(0, row, 1)?, 0, place)?;
    }
    Ok(selected)
}

/// Makes functions of two tensors of the same dtype. The second has the shape of the first, or one element.
macro_rules! operations {
    ($($name:ident $sign:tt)*) => {$(
        pub(crate) fn $name(a: &Tensor, b: &Tensor) -> Result<Tensor> {
            combine(a, b, |a, b| a $sign b, |a, b| a $sign b)
        }
    )*};
}

operations! { sum + difference - product * quotient / }

/// Applies a function to pairs of elements. Numbers of 16 bits are computed in f32 and rounded again, as
/// candle does.
fn combine(
    a: &Tensor,
    b: &Tensor,
    f32_function: fn(f32, f32) -> f32,
    f64_function: fn(f64, f64) -> f64,
) -> Result<Tensor> {
    fn apply_to_pairs<T: Copy>(mut a: Vec<T>, b: Vec<T>, function: fn(T, T) -> T) -> Vec<T> {
        a.iter_mut().zip(b).for_each(|(a, b)| *a = function(*a, b));
        a
    }
    if a.dtype() != b.dtype() {
        return Err(failure(format!(
            "{:?} does not go with {:?}",
            a.dtype(),
            b.dtype()
        )));
    }
    let numbers = match (a.numbers()?, b.broadcast_as(a.shape())?.numbers()?) {
        (CpuStorage::F64(a), CpuStorage::F64(b)) => CpuStorage::F64(apply_to_pairs(a, b, f64_function)),
        (a_numbers, b_numbers) => {
            let widen = |numbers| f32::numbers(convert(numbers, DType::F32)?);
            convert(
                CpuStorage::F32(apply_to_pairs(widen(a_numbers)?, widen(b_numbers)?, f32_function)),
                a.dtype(),
            )?
        }
    };
    Ok(tensor_of(numbers, a.shape().clone()))
}

fn convert(numbers: CpuStorage, dtype: DType) -> Result<CpuStorage> {
    let narrow = |numbers: Vec<f32>| {
        Ok(match dtype {
            DType::F16 => CpuStorage::F16(numbers.into_iter().map(f16::from_f32).collect()),
            DType::BF16 => CpuStorage::BF16(numbers.into_iter().map(bf16::from_f32).collect()),
            DType::F32 => CpuStorage::F32(numbers),
            DType::F64 => CpuStorage::F64(numbers.into_iter().map(f64::from).collect()),
            _ => return Err(failure(format!("floats are not converted to {dtype:?}"))),
        })
    };
    match numbers {
        CpuStorage::F16(numbers) => narrow(numbers.into_iter().map(f16::to_f32).collect()),
        CpuStorage::BF16(numbers) => narrow(numbers.into_iter().map(bf16::to_f32).collect()),
        CpuStorage::F32(numbers) => narrow(numbers),
        CpuStorage::F64(numbers) if dtype == DType::F32 => {
            narrow(numbers.into_iter().map(|number| number as f32).collect())
        }
        // `dtype` has 16 bits here. Without `round_to_odd`, the way from f64 by f32 to 16 bits would round
        // twice.
        CpuStorage::F64(numbers) => narrow(numbers.into_iter().map(round_to_odd).collect()),
        numbers => Err(failure(format!(
            "{:?} is not converted to {dtype:?}",
            dtype_of_numbers(&numbers)
        ))),
    }
}
