//! Numbers of the whole parameter, or of the whole model, that a step depends on: norms and sums.
//!
//! A rule plans before these numbers are known. The rule therefore appends a [`Step::Reduce`] with a function
//! from the numbers to the arithmetic. The reduce stage computes the numbers before anything is written,
//! calls the function and replaces the step (`engine/reduce/resolve.rs`).
//!
//! Norms that the caller of `update` has requested are reductions, too, so the engine needs no code for
//! requests. Requested norms change no bit of a step, because their factor is 1, and a factor of 1 is no
//! step.

use std::any::TypeId;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{LeafNorms, NormRequest};
use crate::engine::{
    Group, NormLimit, Norms, OnNonFinite, Reducer, Reduction, Resolved, Step, Term, TermOf, Then, erased,
};
use crate::error::Result;
use crate::numbers::value::Arithmetic;
use crate::rule::{Gradient, NonFinite, Numbers, Rule, Slots};

/// A norm of a gradient: its exponent and its group, and the treatment of a norm that is not finite.
///
/// See [`Gradient::scale_by_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    p: f64,
    group: Option<u64>,
    non_finite: NonFinite,
    with_parameter: bool,
    limit: Option<NormLimit>,
}

impl Norm {
    /// The p-norm of one parameter's gradient.
    ///
    /// p is 1, 2, infinity or any positive number; 0 counts the elements other than 0. A norm that is
    /// infinite or NaN is [passed on](NonFinite::Pass).
    pub fn new(p: f64) -> Self {
        Norm {
            p,
            group: None,
            non_finite: NonFinite::Pass,
            with_parameter: false,
            limit: None,
        }
    }

    /// Takes one norm of the gradients of all parameters whose norms have this group and p.
    pub fn of_group(self, group: u64) -> Self {
        Norm {
            group: Some(group),
            ..self
        }
    }

    /// Sets what happens if the norm of the gradient is infinite or NaN.
    pub fn on_non_finite(self, non_finite: NonFinite) -> Self {
        Norm { non_finite, ..self }
    }

    /// Takes the p-norm of the parameter (or its master), too. This norm is of one parameter, even in a
    /// group.
    pub fn with_parameter(self) -> Self {
        Norm {
            with_parameter: true,
            ..self
        }
    }

    /// Skips the call if the norm of the group is too large. The factor of [`Gradient::scale_by_norm`] has
    /// to be 1.
    ///
    /// The limit is `sigma` standard deviations above the mean of the last `window` norms.
    pub(crate) fn limited(self, sigma: f64, window: usize) -> Self {
        Norm {
            limit: Some(NormLimit {
                sigma,
                window,
                is_collected: false,
            }),
            ..self
        }
    }
}

/// Sums over one parameter or [all of a group](Sums::of_group), and the slots of the step after the sums.
///
/// See [`Gradient::map_with_sums`].
pub struct Sums<'a> {
    terms: SmallVec<[Term; 2]>,
    slots: Slots<'a>,
    step_slots: Range<usize>,
    numbers: Numbers<'a>,
    group: Option<Group>,
}

impl std::fmt::Debug for Sums<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sums")
            .field("terms", &self.terms.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Sums<'a> {
    /// No sum yet. The step after the sums works on all `slots`, and sets all `numbers`.
    pub fn new(slots: Slots<'a>, numbers: Numbers<'a>) -> Self {
        let step_slots = 0..slots.len();
        Sums {
            terms: SmallVec::new(),
            slots,
            step_slots,
            numbers,
            group: None,
        }
    }

    /// Adds the sum, in f64, of the result of `arithmetic` for each element.
    ///
    /// `arithmetic` reads the gradient, the parameter and the slots with these indices, and writes nothing.
    pub fn sum(self, arithmetic: impl Arithmetic, slots: Range<usize>) -> Self {
        self.with_term(arithmetic, slots, Reducer::sum())
    }

    /// [`Sums::sum`] of absolute values.
    pub fn sum_of_absolutes(self, arithmetic: impl Arithmetic, slots: Range<usize>) -> Self {
        self.with_term(arithmetic, slots, Reducer::abs_sum())
    }

    /// Lets the step after the sums work on the slots with these indices only.
    pub fn step_on(self, slots: Range<usize>) -> Self {
        Sums {
            step_slots: slots,
            ..self
        }
    }

    /// Adds up over all parameters whose rules have this type and take sums of this group.
    ///
    /// Hyper-parameters of these rules may differ, but all rules have to add up the same quantities. The
    /// [`kind`](crate::Rule::kind) of such a rule is [`WholeModel`](crate::Kind::WholeModel).
    pub fn of_group<R: Rule>(self, _rule: &R, group: u64) -> Self {
        Sums {
            group: Some(Group::Sums {
                rule: TypeId::of::<R>(),
                group,
            }),
            ..self
        }
    }

    /// Adds the 2-norms of the parameter (or its master) and of the gradient.
    pub(crate) fn norms(mut self) -> Self {
        let operands = [TermOf::Parameter, TermOf::Gradient];
        self.terms.extend(operands.map(|of| Term {
            of,
            reducer: Reducer::norm(2.0),
        }));
        self
    }

    fn with_term(mut self, arithmetic: impl Arithmetic, slots: Range<usize>, reducer: Reducer) -> Self {
        self.terms.push(Term {
            of: TermOf::Probe {
                kernel: erased(arithmetic),
                slots,
            },
            reducer,
        });
        self
    }
}

impl<'a> Gradient<'a> {
    /// Multiplies the gradient by a factor that follows from its norm.
    ///
    /// The norm of the gradient after the steps of earlier rules is computed in f64, before anything is
    /// written. The norm costs one more read of the gradient and of the state of earlier rules. A factor of
    /// exactly 1 is no step. A 2-norm below 1.5e-154, whose square is subnormal, is 0. An infinite factor
    /// becomes 0, so that 1 / norm leaves a gradient of zeros as it is. A factor that is infinite only in the
    /// dtype of the arithmetic becomes the largest number of that dtype.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, Flow, Gradient, Norm, OptimiserChain, Parameter, Result, Rule, State};
    /// use optimisers::{hyper_parameters, range, setup, update};
    ///
    /// hyper_parameters! {
    ///     /// Gives each gradient the norm 1.
    ///     pub struct Normalise {
    ///         /// p: the exponent of the norm.
    ///         p: f64 = 2.0 => range::positive,
    ///     }
    /// }
    ///
    /// impl Rule for Normalise {
    ///     fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
    ///         Ok(Flow::Step(dx.scale_by_norm(Norm::new(self.p), |norms| 1.0 / norms.gradient)))
    ///     }
    /// }
    ///
    /// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Normalise::default(), Descent::new(5.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[4.8f32, -6.4], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [-3.0, 4.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scale_by_norm(
        mut self,
        norm: Norm,
        factor: impl FnOnce(Norms) -> f64 + Send + Sync + 'static,
    ) -> Self {
        if self.missing {
            return self;
        }
        let Norm {
            p,
            group,
            non_finite,
            with_parameter,
            limit,
        } = norm;
        // Limits have groups of their own: group 0 of `SkipOutliers` is not group 0 of `ClipGlobalNorm`.
        let group = group.map(if limit.is_some() {
            Group::Limit
        } else {
            Group::Norm
        });
        // If an outlier is a sum that windows have collected, the windows have to be given up.
        let limit = limit.map(|limit| NormLimit {
            is_collected: self.windows.released,
            ..limit
        });
        let non_finite = match non_finite {
            NonFinite::Error => OnNonFinite::Refuse,
            NonFinite::Pass => OnNonFinite::Compute,
            NonFinite::Skip => OnNonFinite::Skip,
        };
        let mut terms = smallvec![Term {
            of: TermOf::Gradient,
            reducer: Reducer::norm(p)
        }];
        terms.extend(with_parameter.then(|| Term {
            of: TermOf::Parameter,
            reducer: Reducer::norm(p),
        }));
        let then = Then::Scale {
            non_finite,
            factor: Box::new(factor),
        };
        let reduction = Reduction {
            group,
            terms,
            contributes: true,
            slots: &mut [],
            replaces_check: false,
            limit,
            then,
        };
        self.steps.push(Step::Reduce(Box::new(reduction)));
        self
    }

    /// Appends arithmetic that depends on sums over elements, taken before anything is written.
    ///
    /// The sums are taken over one parameter, or over [all of a group](Sums::of_group). `follow` gets the
    /// sums in the order in which they were added. It returns the arithmetic of the step and the next numbers
    /// of the state, and runs once for each parameter.
    ///
    /// A missing gradient adds nothing and makes no step. If other parameters of the group have gradients,
    /// the state of the missing gradient gets the next numbers, too.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Arithmetic, Flow, Gradient, Kind, Parameter, Parts, Resolved, Result, Rule, State, Sums};
    /// use optimisers::{hyper_parameters, range, setup, update, value::Value};
    ///
    /// hyper_parameters! {
    ///     /// Polyak's step for a linear loss: the step that makes the loss 0, at most η.
    ///     pub struct Polyak {
    ///         /// η: the longest step.
    ///         eta: f64 = 1.0 => range::non_negative,
    ///     }
    /// }
    ///
    /// /// dx·x, the loss of a linear model.
    /// #[derive(Clone, Copy)]
    /// struct Product;
    ///
    /// impl Arithmetic for Product {
    ///     type Slots<T> = [T; 0];
    ///
    ///     fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
    ///         dx * x
    ///     }
    /// }
    ///
    /// /// dx².
    /// #[derive(Clone, Copy)]
    /// struct Square;
    ///
    /// impl Arithmetic for Square {
    ///     type Slots<T> = [T; 0];
    ///
    ///     fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
    ///         dx * dx
    ///     }
    /// }
    ///
    /// /// dx' = η·dx.
    /// #[derive(Clone, Copy)]
    /// struct Times(f64);
    ///
    /// impl Arithmetic for Times {
    ///     type Slots<T> = [T; 0];
    ///
    ///     fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
    ///         dx * self.0
    ///     }
    /// }
    ///
    /// impl Rule for Polyak {
    ///     fn init(&self, _x: Parameter<'_>) -> Result<State> {
    ///         Ok(State::empty().with_number("step", 0.0, range::non_negative))
    ///     }
    ///
    ///     fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
    ///         let (Parts { slots, numbers, .. }, longest) = (state.parts(), self.eta);
    ///         let sums = Sums::new(slots, numbers).sum(Product, 0..0).sum(Square, 0..0).of_group(self, 0);
    ///         Ok(Flow::Step(dx.map_with_sums(sums, move |sums| {
    ///             let step = (sums[0] / sums[1]).clamp(0.0, longest);
    ///             Resolved::new(Times(step), [step])
    ///         })))
    ///     }
    ///
    ///     fn kind(&self) -> Kind {
    ///         Kind::WholeModel
    ///     }
    /// }
    ///
    /// let model = [Var::new(&[1f32], &Device::Cpu)?, Var::new(&[2f32], &Device::Cpu)?];
    /// let mut state = setup(Polyak::default(), &model)?;
    /// let gradient = Tensor::new(&[3f32], &Device::Cpu)?;
    /// update(&mut state, &model, &[("0", gradient.copy()?), ("1", gradient)])?; // (3·1 + 3·2) / (9 + 9) = 0.5
    /// assert_eq!([model[0].to_vec1::<f32>()?, model[1].to_vec1::<f32>()?], [[-0.5], [0.5]]);
    /// assert_eq!(state.leaf("0").expect("a leaf").numbers(), [("step".to_string(), 0.5)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn map_with_sums(
        self,
        sums: Sums<'a>,
        follow: impl FnOnce(&[f64]) -> Resolved + Send + Sync + 'static,
    ) -> Self {
        self.try_map_with_sums(sums, |sums| Ok(follow(sums)))
    }

    /// [`Gradient::map_with_sums`] with a function `follow` that may refuse the call.
    pub(crate) fn try_map_with_sums(
        mut self,
        sums: Sums<'a>,
        follow: impl FnOnce(&[f64]) -> Result<Resolved> + Send + Sync + 'static,
    ) -> Self {
        let Sums {
            terms,
            slots: Slots(slots),
            step_slots,
            numbers: Numbers(numbers),
            group,
        } = sums;
        // In a group the step is appended in any case, because the state has to get the group's numbers.
        if self.missing && group.is_none() {
            return self;
        }
        let then = Then::Map {
            resolve: Box::new(follow),
            slots: step_slots,
            numbers,
        };
        let reduction = Reduction {
            group,
            terms,
            contributes: !self.missing,
            slots,
            replaces_check: false,
            limit: None,
            then,
        };
        self.steps.push(Step::Reduce(Box::new(reduction)));
        self
    }
}

impl Gradient<'_> {
    /// Requests the norm of the gradient at this place of the chain, and the norms of step and parameter at
    /// the end of the chain.
    pub(crate) fn request_norms(mut self, norms: &LeafNorms) -> Self {
        self.norm_request = Some(NormRequest {
            norms: norms.clone(),
            step: None,
        });
        self.measure_gradient()
    }

    /// Takes the norm of the gradient after `release`, which ends a window, instead of before the chain.
    pub(crate) fn measure_after(self, release: impl FnOnce(Self) -> Self) -> Self {
        release(self.without_norm()).measure_gradient()
    }

    /// Takes the norms of the finished step and of the parameter, if norms are requested.
    pub(super) fn measure_step(self) -> Self {
        let Some(NormRequest { norms, .. }) = &self.norm_request else {
            return self;
        };
        let norms = norms.clone();
        self.scale_by_norm(Norm::new(2.0).with_parameter(), move |step_norms| {
            norms.set_step(step_norms);
            1.0
        })
    }

    /// Removes the step that takes the norm of the gradient.
    pub(super) fn without_norm(mut self) -> Self {
        if let Some(step) = self.norm_request.as_mut().and_then(|request| request.step.take()) {
            self.steps.remove(step);
        }
        self
    }

    /// Takes the norm of the gradient at this place of the chain, if norms are requested.
    fn measure_gradient(mut self) -> Self {
        let Some(NormRequest { norms, .. }) = self.norm_request.as_ref().filter(|_| !self.missing) else {
            return self;
        };
        let norms = norms.clone();
        // The norm goes before a trailing `Check`, so that `merge_check` can fold the check into a later
        // norm.
        let check = matches!(self.steps.last(), Some(Step::Check))
            .then(|| self.steps.pop())
            .flatten();
        let step = self.steps.len();
        self = self.scale_by_norm(Norm::new(2.0), move |gradient_norms| {
            norms.set_gradient(gradient_norms.gradient);
            1.0
        });
        self.steps.extend(check);
        self.norm_request = self.norm_request.map(|request| NormRequest {
            step: Some(step),
            ..request
        });
        self
    }
}
