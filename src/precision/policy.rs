use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};

use super::builder::{VariablesByPolicy, locked};
use super::expect_supported;
use crate::error::{Error, PrecisionError, Result};
use crate::model::Model;
use crate::patterns::Patterns;
use crate::setup::variables;
use crate::weights::Weights;

/// Which dtype each parameter has, by its path: that of the first pattern that matches.
///
/// In a pattern `*` stands for any text, dots included, and `?` for one character; everything else is literal, and the whole path must match.
/// A path that no pattern matches is an error, so the last pattern is usually `"*"`.
///
/// This is how some layers of a low-precision model are kept in F32. The policy makes the `VarBuilder` that the model is built from, and an
/// [`InDtype`](crate::InDtype) around each such layer converts at its borders. [`MixedPrecision`](crate::MixedPrecision) then keeps masters of
/// the parameters that need one, and none of the others:
///
/// ```
/// use candle_core::{DType::{F16, F32}, Device, Module, Tensor};
/// use candle_nn::{VarMap, layer_norm_no_bias, linear};
/// use optimisers::{AdamW, InDtype, LossScaler, MixedPrecision, PrecisionPolicy, setup};
///
/// let policy = PrecisionPolicy::new([("*norm.*", F32), ("*", F16)])?;
/// let variables = VarMap::new();
/// let builder = policy.builder(&variables, &Device::Cpu);
/// let hidden = linear(4, 8, builder.pp("hidden"))?;
/// let norm = InDtype::new(F32, layer_norm_no_bias(8, 1e-5, builder.pp("norm"))?)?;
/// let output = linear(8, 1, builder.pp("output"))?;
/// policy.check(&variables)?;
///
/// let mut state = setup(MixedPrecision::new(F32, AdamW::new(1e-3)), &variables)?;
/// let has_master = |path| state.leaf(path).is_some_and(|leaf| leaf.tensor_names().contains(&"master".to_string()));
/// assert!(has_master("hidden.weight") && !has_master("norm.weight"));
///
/// let mut scaler = LossScaler::dynamic();
/// let input = Tensor::ones((2, 4), F16, &Device::Cpu)?;
/// for _ in 0..20 {
///     let loss = output.forward(&norm.forward(&hidden.forward(&input)?)?)?.to_dtype(F32)?.sqr()?.mean_all()?;
///     let gradients = scaler.scale(&loss)?.backward()?;
///     let outcome = scaler.update(&mut state, &variables, &gradients)?;
///     assert_eq!(outcome.without_gradient, 0);
/// }
/// assert!(state.leaf("hidden.weight").is_some_and(|leaf| leaf.steps() > 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The other way round, F32 parameters in a model of which some layers compute in low precision, is [`Autocast`](crate::Autocast).
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionPolicy {
    patterns: Patterns,
    dtypes: Vec<DType>,
}

impl PrecisionPolicy {
    /// A policy of patterns and their dtypes, in this order.
    ///
    /// # Errors
    /// If a dtype is none of F16, BF16, F32 and F64.
    pub fn new<P: Into<String>>(choices: impl IntoIterator<Item = (P, DType)>) -> Result<Self> {
        let (patterns, dtypes): (Vec<String>, Vec<DType>) = choices.into_iter().map(|(pattern, dtype)| (pattern.into(), dtype)).unzip();
        for (pattern, dtype) in patterns.iter().zip(&dtypes) {
            expect_supported(format!("the pattern {pattern:?}"), *dtype)?;
        }
        Ok(PrecisionPolicy { patterns: Patterns::new(patterns), dtypes })
    }

    /// The dtype of the parameter with this path.
    ///
    /// # Errors
    /// If no pattern matches.
    ///
    /// ```
    /// use candle_core::DType::{BF16, F32};
    /// use optimisers::PrecisionPolicy;
    ///
    /// let policy = PrecisionPolicy::new([("*.norm.*", F32), ("*.weight", BF16)])?;
    /// assert_eq!(policy.dtype("0.norm.weight")?, F32);
    /// assert_eq!(policy.dtype("0.fc.weight")?, BF16);
    /// assert_eq!(
    ///     policy.dtype("0.fc.bias").unwrap_err().to_string(),
    ///     r#"no pattern matches the parameter "0.fc.bias"; a last pattern "*" would. There are: *.norm.*, *.weight"#,
    /// );
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn dtype(&self, path: &str) -> Result<DType> {
        let pattern = self.patterns.first(&[path]).ok_or_else(|| self.patterns.uncovered(path))?;
        Ok(self.dtypes[pattern])
    }

    /// A builder that makes each variable in `variables` with its dtype, for any candle-nn model.
    ///
    /// Initial values are drawn in F32 and rounded. The policy decides whatever float dtype the model asks for; integers are not its concern.
    /// The builder's own dtype, which models use for their constants, is that of the last pattern. A variable that `variables` has already is
    /// taken as it is, and must have the dtype of the policy.
    ///
    /// Errors come out of the model's constructor. Call [`check`](PrecisionPolicy::check) when the model is built.
    pub fn builder(&self, variables: &VarMap, device: &Device) -> VarBuilder<'static> {
        self.builder_with(variables, None, device)
    }

    /// Builds a model whose variables take their values from files: converted to the dtype of the policy, rounded once, and never drawn at random.
    ///
    /// The variables go into `variables` when all has succeeded, the [`check`](PrecisionPolicy::check) included, and otherwise none does.
    /// Masters start from the rounded values; [`Weights::load_masters`] gives them those of the files.
    ///
    /// # Errors
    /// What `build` returns: if a tensor is missing or does not fit, as [`Weights::load_into`]. Also as [`check`](PrecisionPolicy::check), and if
    /// `variables` has one of the paths already.
    ///
    /// ```
    /// use candle_core::{DType::{BF16, F32}, Device};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use optimisers::{PrecisionPolicy, Weights};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// let saved = VarMap::new();
    /// linear(4, 2, VarBuilder::from_varmap(&saved, F32, &Device::Cpu).pp("fc"))?;
    /// saved.save(&path)?;
    ///
    /// let policy = PrecisionPolicy::new([("*.bias", F32), ("*", BF16)])?;
    /// let variables = VarMap::new();
    /// let model = policy.build_from(&Weights::open([&path])?, &variables, &Device::Cpu, |builder| linear(4, 2, builder.pp("fc")))?;
    /// assert_eq!(model.weight().dtype(), BF16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn build_from<M, E: From<Error>>(
        &self,
        weights: &Weights,
        variables: &VarMap,
        device: &Device,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> std::result::Result<M, E> {
        let built = VarMap::new();
        let model = build(self.builder_with(&built, Some(weights.clone()), device))?;
        self.check(&built)?;
        move_all(&built, variables)?;
        Ok(model)
    }

    /// Whether a model is as the policy says: every pattern decides for a parameter, and every parameter has a pattern and its dtype.
    ///
    /// # Errors
    /// If it is not; a pattern that decides for nothing is most likely mistyped.
    ///
    /// ```
    /// use candle_core::{DType::{BF16, F32}, Device};
    /// use candle_nn::{VarMap, linear};
    /// use optimisers::PrecisionPolicy;
    ///
    /// let policy = PrecisionPolicy::new([("*.nrom.*", F32), ("*", BF16)])?;
    /// let variables = VarMap::new();
    /// linear(4, 2, policy.builder(&variables, &Device::Cpu).pp("fc"))?;
    /// let error = policy.check(&variables).unwrap_err();
    /// assert_eq!(error.to_string(), r#"the pattern "*.nrom.*" matches no parameter; there are: fc.bias, fc.weight"#);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check<M: Model + ?Sized>(&self, model: &M) -> Result<()> {
        let variables = variables(model)?;
        let chosen = self.patterns.choose(&variables, |_, error| error)?;
        for (variable, pattern) in variables.iter().zip(chosen) {
            let (shape, dtype) = (variable.tensor.shape(), variable.tensor.dtype());
            if dtype != self.dtypes[pattern] {
                let (expected, got) = ((shape.clone(), self.dtypes[pattern]), (shape.clone(), dtype));
                return Err(Error::OtherParameter { path: variable.path().to_string(), expected, got });
            }
        }
        Ok(())
    }

    fn builder_with(&self, variables: &VarMap, weights: Option<Weights>, device: &Device) -> VarBuilder<'static> {
        let dtype = self.dtypes.last().copied().unwrap_or(DType::F32);
        let backend = VariablesByPolicy { policy: self.clone(), variables: variables.clone(), weights };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }
}

/// Moves the variables of one map into another, all or none.
fn move_all(from: &VarMap, to: &VarMap) -> Result<()> {
    let (mut from, mut to) = (locked(from), locked(to));
    if let Some(path) = from.keys().filter(|path| to.contains_key(*path)).min() {
        return Err(PrecisionError::VariableExists { path: path.clone() }.into());
    }
    to.extend(from.drain());
    Ok(())
}
