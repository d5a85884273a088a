//! Layers that compute in low precision with parameters in F32.

mod builders;
mod layer;

use std::any::{TypeId, type_name};

use candle_core::{DType, Module};
use candle_nn::{Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Linear, VarBuilder};

pub use layer::AutocastLayer;

use crate::error::{Error, ErrorKind, Result};

/// Keeps all parameters in F32 and lets the layers of listed types compute in BF16 or F16.
///
/// The list has linear and convolution layers (`Linear`, `Conv1d`, `Conv2d`, `ConvTranspose1d`,
/// `ConvTranspose2d`), which take most of the time and tolerate low precision best.
/// [`with`](Autocast::with) and [`without`](Autocast::without) change the list. Make every layer by
/// [`layer`](Autocast::layer). A layer of a listed type converts its input and its
/// parameters, computes, and converts its output back. Other layers compute in F32. The conversions are part
/// of the graph, so gradients arrive in F32, and the optimiser needs no masters.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, layer_norm_no_bias, linear};
/// use optimisers::{AdamW, Autocast, setup, update};
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, F32, &Device::Cpu);
/// let autocast = Autocast::new(BF16)?;
/// let hidden = autocast.layer(builder.pp("hidden"), |builder| linear(4, 8, builder))?; // in BF16
/// // In F32. candle's LayerNorm with a bias has no backward pass: the guide's page `cuts` has a way.
/// let norm = autocast.layer(builder.pp("norm"), |builder| layer_norm_no_bias(8, 1e-5, builder))?;
/// let output = autocast.layer(builder.pp("output"), |builder| linear(8, 1, builder))?; // in BF16
///
/// let mut state = setup(AdamW::new(1e-3), &variables)?;
/// let input = Tensor::ones((2, 4), F32, &Device::Cpu)?;
/// for _ in 0..20 {
///     let loss = output.forward(&norm.forward(&hidden.forward(&input)?)?)?.sqr()?.mean_all()?;
///     let gradients = loss.backward()?;
///     assert!(variables.all_vars().iter().all(|x| gradients.get(x).is_some_and(|gradient| gradient.dtype() == F32)));
///     update(&mut state, &variables, &gradients)?;
/// }
/// assert_eq!(state.steps(), 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// F16 also needs a [`LossScaler`](crate::LossScaler).
///
/// # Costs
/// Each forward pass copies all parameters of listed layers to 16 bits, and each backward pass converts their
/// gradients. The graph holds the copies until the backward pass. If parameters should take 2 bytes, use
/// [`MixedPrecision`](crate::MixedPrecision) with a [`PrecisionPolicy`](crate::PrecisionPolicy). On the CPU
/// candle widens BF16 matrices to F32 to multiply them, so the CPU computes the numbers of another device,
/// but not faster.
///
/// # Over ranks
/// [`Setup::wire_as_computed`](crate::Setup::wire_as_computed) lets gradients travel in the dtypes of the
/// layers.
///
/// # Departures
/// torch decides by operation, and passes low-precision outputs to the next operation. Here a layer converts
/// its output back, so operations between layers compute in F32. The list of types is that of DeepSpeed's
/// `torch_autocast`, where the list decides only in which dtype gradients travel.
#[must_use]
#[derive(Clone, Debug)]
pub struct Autocast {
    dtype: DType,
    listed_types: Vec<(TypeId, &'static str)>,
}

impl Autocast {
    /// Lets linear and convolution layers compute in `dtype`: BF16 or F16.
    ///
    /// With F32, for comparison, every layer computes in F32.
    ///
    /// # Errors
    /// If `dtype` is not BF16, F16 or F32.
    pub fn new(dtype: impl Into<DType>) -> Result<Self> {
        let dtype = dtype.into();
        if !matches!(dtype, DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::new(ErrorKind::Argument, "the dtype of Autocast is")
                .with_got(format_args!("{dtype:?}"))
                .with_expected("BF16, F16 or F32"));
        }
        let autocast = Autocast {
            dtype,
            listed_types: Vec::new(),
        };
        Ok(autocast
            .with::<Linear>()
            .with::<Conv1d>()
            .with::<Conv2d>()
            .with::<ConvTranspose1d>()
            .with::<ConvTranspose2d>())
    }

    /// Adds a type of layer to those that compute in low precision.
    ///
    /// ```
    /// use candle_core::DType::BF16;
    /// use candle_nn::{ConvTranspose1d, Embedding};
    /// use optimisers::Autocast;
    ///
    /// let autocast = Autocast::new(BF16)?.with::<Embedding>().without::<ConvTranspose1d>();
    /// # let _ = autocast;
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn with<L: Module + 'static>(self) -> Self {
        let mut autocast = self.without::<L>();
        autocast.listed_types.push((TypeId::of::<L>(), type_name::<L>()));
        autocast
    }

    /// Removes a type of layer from those that compute in low precision.
    pub fn without<L: Module + 'static>(mut self) -> Self {
        self.listed_types.retain(|(id, _)| *id != TypeId::of::<L>());
        self
    }

    /// The dtype of the listed layers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Makes a layer, which computes in low precision if its type is listed.
    ///
    /// `layer` calls `constructor`, which makes its variables as usual, in F32 whatever the builder's dtype.
    /// If the type is listed, each forward pass calls the constructor again, with a builder that returns the
    /// same variables in low precision. So the constructor must do nothing but request tensors, the same in
    /// each call. A layer that keeps values between calls does not belong in the list.
    ///
    /// # Errors
    /// If the constructor fails, or a variable exists already in another dtype than F32. Also if a layer of a
    /// listed type has running statistics, recognised by their names (`running_*`, `num_batches_tracked`).
    pub fn layer<L, F>(&self, builder: VarBuilder<'_>, constructor: F) -> Result<AutocastLayer>
    where
        L: Module + Send + Sync + 'static,
        F: Fn(VarBuilder<'_>) -> candle_core::Result<L> + Send + Sync + 'static,
    {
        let is_listed = self.listed_types.iter().any(|(id, _)| *id == TypeId::of::<L>());
        AutocastLayer::new(
            if is_listed { self.dtype } else { DType::F32 },
            builder,
            constructor,
        )
    }
}
