//! A policy that chooses the dtype of each parameter by its path.

use candle_core::DType;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::patterns::Patterns;
use crate::numbers::check_supported;
use crate::step::setup::variables;

/// The dtype of each parameter, by its path: the dtype of the first pattern that matches.
///
/// In a pattern `*` stands for any text, dots included, and `?` for one character. Everything else is
/// literal, and the whole path must match. A path that no pattern matches is an error, so the last pattern is
/// usually `"*"`.
///
/// Use a policy to keep some layers of a low-precision model in F32. The policy makes the `VarBuilder` for
/// the model, and an [`InDtype`](crate::InDtype) around each such layer converts its input and output.
/// [`MixedPrecision`](crate::MixedPrecision) then keeps masters only of the parameters that need one:
///
/// ```
/// use candle_core::{DType::{F16, F32}, Device, Module, Tensor};
/// use candle_nn::{VarMap, layer_norm_no_bias, linear};
/// use optimisers::{AdamW, InDtype, LossScaler, MixedPrecision, PrecisionPolicy, Update, setup};
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
///     let outcome = Update::new(&mut state).scaler(&mut scaler).apply(&variables, &gradients)?;
///     assert!(outcome.without_gradient.is_empty());
/// }
/// assert!(state.leaf("hidden.weight").is_some_and(|leaf| leaf.steps() > 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// For F32 parameters, and some layers that compute in low precision, use [`Autocast`](crate::Autocast).
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionPolicy {
    patterns: Patterns,
    pub(super) dtypes: Vec<DType>,
}

impl PrecisionPolicy {
    /// A policy of patterns and their dtypes, in this order.
    ///
    /// # Errors
    /// If a dtype is not F16, BF16, F32 or F64.
    pub fn new<P: Into<String>, D: Into<DType>>(choices: impl IntoIterator<Item = (P, D)>) -> Result<Self> {
        let (patterns, dtypes): (Vec<String>, Vec<DType>) = choices
            .into_iter()
            .map(|(pattern, dtype)| (pattern.into(), dtype.into()))
            .unzip();
        for (pattern, dtype) in patterns.iter().zip(&dtypes) {
            check_supported(format_args!("the dtype of the pattern {pattern:?}"), *dtype)?;
        }
        Ok(PrecisionPolicy {
            patterns: Patterns::new(patterns),
            dtypes,
        })
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
    ///     r#"parameter "0.fc.bias": no pattern matches this parameter; the patterns are: *.norm.*, *.weight; add a pattern for it, or a last pattern "*""#,
    /// );
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn dtype(&self, path: &str) -> Result<DType> {
        let pattern = self
            .patterns
            .first_match(&[path])
            .ok_or_else(|| self.patterns.uncovered_error(path))?;
        Ok(self.dtypes[pattern])
    }

    /// Refuses a model that differs from the policy.
    ///
    /// If a parameter has several paths, the first pattern that matches any of them decides its dtype.
    ///
    /// # Errors
    /// - A parameter has another dtype than its pattern, or no pattern matches it.
    /// - A pattern decides for no parameter. Such a pattern is probably mistyped.
    /// - Two patterns with different dtypes match different paths of one parameter.
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
    /// assert!(error.to_string().starts_with(r#"the pattern "*.nrom.*" matches no parameter"#));
    /// assert_eq!(error.expected(), Some("one that matches one of: fc.bias, fc.weight"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check<M: Model + ?Sized>(&self, model: &M) -> Result<()> {
        let variables = variables(model)?;
        let chosen = self.patterns.choose(
            &variables,
            |a, b| self.dtypes[a] == self.dtypes[b],
            |_, error| error,
        )?;
        for (variable, pattern) in variables.iter().zip(chosen) {
            let (got, expected) = (variable.x.dtype(), self.dtypes[pattern]);
            if got != expected {
                let error = Error::dtype("its variable in the model", got, format_args!("{expected:?}"));
                return Err(error
                    .at(variable.path())
                    .with_remedy("make it with `PrecisionPolicy::builder`"));
            }
        }
        Ok(())
    }
}
