use crate::error::{Error, ErrorKind, Result};
use crate::model::patterns::Patterns;
use crate::rule::{Adjust, Describe, Describer, Flow, Gradient, Parameter, Rule, Setting, State};

/// A rule for matrices and another for all other parameters, as in recipes with [`Muon`](crate::Muon).
///
/// Parameters of two or more dimensions get the first rule, vectors and numbers the second. For kernels of
/// convolutions set the `matrix` of [`Muon`](crate::Muon) to [`MatrixForm::Flat`](crate::MatrixForm::Flat);
/// otherwise `Muon` refuses most kernels. Parameters whose path matches a pattern of
/// [`except`](Fallback::except) also get the second rule: usually the embedding and the last layer. In a
/// pattern `*` stands for any text, dots included, and `?` for one character; the whole path must match.
///
/// [`setup`](crate::setup) chooses for each parameter. Its leaf (the parameter's place in the state) then has
/// the name, hyper-parameters and state of the chosen rule, as if [`setup_with`](crate::setup_with) had
/// chosen it. Before `setup`, a `Fallback` has the hyper-parameters of both rules: `0.eta` is the first
/// rule's and `1.eta` the second's. `eta` sets both, and after `setup` the `eta` of all leaves. Each of the
/// two rules has a learning rate of its own, so use a [relative](crate::Schedule::relative) schedule for all
/// parameters.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AdamW, ClipGlobalNorm, MixedPrecision, Muon, OptimiserChain, Schedule, setup};
/// use std::collections::BTreeMap;
///
/// let variable = |shape: &[usize]| Var::zeros(shape, BF16, &Device::Cpu);
/// let model = BTreeMap::from([
///     ("embedding.weight", variable(&[100, 16])?),
///     ("layer.weight", variable(&[16, 16])?),
///     ("layer.bias", variable(&[16])?),
///     ("head.weight", variable(&[100, 16])?),
/// ]);
/// let rule = Muon::new(0.02).with_fallback(AdamW::new(3e-4)).except(["embedding.*", "*head*"]);
/// let mut state = setup(MixedPrecision::new(F32, OptimiserChain::new((ClipGlobalNorm::new(1.0), rule))), &model)?;
/// let name = |path| state.leaf(path).map(|leaf| leaf.optimiser().name()).unwrap();
/// assert_eq!(name("layer.weight"), "MixedPrecision(F32, OptimiserChain(ClipGlobalNorm, Muon))");
/// assert_eq!(name("layer.bias"), "MixedPrecision(F32, OptimiserChain(ClipGlobalNorm, AdamW))");
///
/// state.schedule(Schedule::linear(0.1, 1.0, 100).relative())?;
/// let rate = |path| state.leaf(path).and_then(|leaf| leaf.learning_rate()).unwrap();
/// assert!((rate("layer.weight") - 2e-3).abs() < 1e-12 && (rate("embedding.weight") - 3e-5).abs() < 1e-12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`setup`](crate::setup) refuses a pattern that matches no parameter. [`add`](crate::StateTree::add) and
/// [`replace`](crate::Selection::replace) accept such a pattern, because they work on a part of a model.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback<R, F>(FallbackChoice<R, F>);

/// Both rules, or the rule that `setup` has chosen for a parameter.
#[derive(Clone, Debug, PartialEq)]
enum FallbackChoice<R, F> {
    Open { rule: R, fallback: F, except: Patterns },
    Rule(R),
    Fallback(F),
}

impl<R: Rule + Clone, F: Rule + Clone> Fallback<R, F> {
    /// Gives matrices to `rule`, and all other parameters to `fallback`.
    pub fn new(rule: R, fallback: F) -> Self {
        Fallback(FallbackChoice::Open {
            rule,
            fallback,
            except: Patterns::new(Vec::new()),
        })
    }

    /// Gives parameters whose paths match one of these patterns to the second rule, even if they are
    /// matrices.
    pub fn except<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        if let FallbackChoice::Open { except, .. } = &mut self.0 {
            *except = Patterns::new(
                except
                    .texts()
                    .iter()
                    .cloned()
                    .chain(patterns.into_iter().map(Into::into))
                    .collect(),
            );
        }
        self
    }

    /// The chosen rule, or the first rule before the choice. No parameter gets the first rule by mistake,
    /// because `init` refuses a `Fallback` without a choice.
    fn chosen_rule(&self) -> &dyn Rule {
        match &self.0 {
            FallbackChoice::Open { rule, .. } | FallbackChoice::Rule(rule) => rule,
            FallbackChoice::Fallback(fallback) => fallback,
        }
    }
}

impl<R: Rule + Clone, F: Rule + Clone> Describe for Fallback<R, F> {
    fn describe(&mut self, description: &mut Describer<'_>) {
        // `add_choice` returns a parameter only while `setup` chooses its rule. Any other description leaves
        // the choice open.
        if let FallbackChoice::Open {
            rule,
            fallback,
            except,
        } = &self.0
            && let Some((paths, x)) = description.add_choice(except.texts())
        {
            let is_matrix = x.rank() >= 2 && except.first_match(paths).is_none();
            self.0 = if is_matrix {
                FallbackChoice::Rule(rule.clone())
            } else {
                FallbackChoice::Fallback(fallback.clone())
            };
        }
        match &mut self.0 {
            FallbackChoice::Open {
                rule,
                fallback,
                except,
            } => {
                description.kind("Fallback");
                description.setting("except", Setting::Texts(except.texts().to_vec()));
                description.alternative(rule);
                description.alternative(fallback);
            }
            FallbackChoice::Rule(rule) => rule.describe(description),
            FallbackChoice::Fallback(fallback) => fallback.describe(description),
        }
    }
}

impl<R: Rule + Clone, F: Rule + Clone> Rule for Fallback<R, F> {
    fn delegate(&self) -> Option<&dyn Rule> {
        Some(self.chosen_rule())
    }

    fn init(&self, x: Parameter<'_>) -> Result<State> {
        match &self.0 {
            FallbackChoice::Open { .. } => {
                // `setup` chooses through descriptions, so it cannot reach a rule that no description names.
                let name = self.name();
                let problem = format!(
                    "the rule around {name} does not describe {name}, so `setup` cannot choose between its two \
                     rules"
                );
                Err(Error::new(ErrorKind::Contract, problem).with_remedy(
                    "in the `describe` of the outer rule, call `Describer::holds` with the inner rule",
                ))
            }
            _ => self.chosen_rule().init(x),
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.chosen_rule().apply(state, x, dx)
    }
}
