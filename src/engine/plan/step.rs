//! The steps of a lazy gradient: what a rule appends in the plan, and the engine runs.
//!
//! ```text
//! Check   → Identity              once the gradient is found finite (reduce stage)
//! Reduce  → Map or Identity       once the numbers are there (reduce stage)
//! Tensor  → Output                once the function has run (reduce stage or commit)
//! ```

use std::any::TypeId;
use std::ops::Range;

use smallvec::SmallVec;

use crate::engine::kernel::{ErasedKernel, Kernel, Reducer, erased};
use crate::engine::memory::Buffer;
use crate::error::Result;
use crate::model::lent::Lent;
use crate::numbers::value::Arithmetic;
use crate::numbers::{DType, compute_dtype};
use crate::tensors::Tensor;

/// The state tensors of one step, in the order in which its rule named them.
pub(crate) type StepSlots<'a> = &'a mut [(&'static str, Buffer)];

/// The steps of a lazy gradient. A single step is inline and more are on the heap. Jobs must be small,
/// because a call has thousands of jobs, which leave the cache before they run.
pub(crate) type Steps<'a> = SmallVec<[Step<'a>; 1]>;

/// A step of a lazy gradient. A pending step is replaced in place once its arithmetic is known, so that
/// indices of steps stay valid.
pub(crate) enum Step<'a> {
    /// Elementwise arithmetic with its scalars bound.
    Map {
        kernel: ErasedKernel,
        /// The state that the arithmetic reads and writes.
        slots: StepSlots<'a>,
    },
    /// A check. If an element of the gradient at this place is infinite, NaN, or too large for its square in
    /// a later step, the whole call is skipped.
    Check,
    /// Arithmetic that depends on sums or norms of elements.
    Reduce(Box<Reduction<'a>>),
    /// A function of the whole tensor.
    #[cfg_attr(
        not(feature = "candle"),
        expect(dead_code, reason = "functions are made of candle's operations")
    )]
    Tensor(Box<TensorStep<'a>>),
    /// The result of a function of the whole tensor.
    Output(Box<FunctionOutput<'a>>),
    /// No arithmetic. Such a step replaces a check that has passed, or a factor of 1.
    Identity,
}

impl Step<'_> {
    pub(in crate::engine) fn link(&self) -> Option<Link<'_>> {
        if let Step::Map { kernel, slots } = self {
            Some(Link {
                kernel: &**kernel,
                slots,
            })
        } else {
            None
        }
    }

    /// The narrowest dtype, F32 or F64, in which the state has squares of gradients. `None` if the state has
    /// no squares.
    pub(in crate::engine) fn dtype_of_squares(&self) -> Option<DType> {
        let slots: &[(&'static str, Buffer)] = match self {
            Step::Map { slots, .. } => slots,
            Step::Reduce(reduction) => reduction.slots,
            Step::Tensor(function) => function.slots,
            Step::Check | Step::Output(_) | Step::Identity => &[],
        };
        let mut squares = slots
            .iter()
            .filter(|(_, slot)| slot.is_of_squares())
            .map(|(_, slot)| compute_dtype(slot.dtype()));
        let first = squares.next()?;
        Some(squares.fold(
            first,
            |narrowest, dtype| if dtype == DType::F64 { narrowest } else { dtype },
        ))
    }

    /// The state that elementwise arithmetic writes in the commit.
    pub(crate) fn slots(&self) -> &[(&'static str, Buffer)] {
        self.link().map_or(&[], |link| link.slots)
    }
}

/// Elementwise arithmetic and its state.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Link<'j> {
    pub(in crate::engine) kernel: &'j dyn Kernel,
    pub(in crate::engine) slots: &'j [(&'static str, Buffer)],
}

/// Sums or norms, taken before anything is written, and the arithmetic that follows from them.
pub(crate) struct Reduction<'a> {
    /// The leaves that share the numbers. `None` if each leaf has its own numbers. The norm of a parameter is
    /// never shared.
    pub(crate) group: Option<Group>,
    pub(crate) terms: SmallVec<[Term; 2]>,
    /// Whether the leaf has a gradient that counts. A leaf without such a gradient adds nothing and makes no
    /// step. If another leaf of the group has a gradient, the rule of this leaf gets the sums all the same.
    pub(crate) contributes: bool,
    /// The state that terms read and the arithmetic works on.
    pub(crate) slots: StepSlots<'a>,
    /// Whether the first number, a norm, also replaces a [`Step::Check`].
    pub(crate) replaces_check: bool,
    /// How far the norm of a group may be above the norms of earlier calls.
    pub(crate) limit: Option<NormLimit>,
    pub(crate) then: Then<'a>,
}

/// How far a norm may be above the norms of earlier calls. The state tree has the earlier norms and decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormLimit {
    /// How many standard deviations above the mean of earlier norms the norm may be.
    pub(crate) sigma: f64,
    /// The number of earlier norms that count.
    pub(crate) window: usize,
    /// Whether the norm is that of a gradient collected in several calls.
    pub(crate) is_collected: bool,
}

impl Reduction<'_> {
    /// The exponent of the first term's norm.
    pub(in crate::engine) fn exponent(&self) -> f64 {
        self.terms.first().map_or(1.0, |term| term.reducer.p)
    }

    /// Whether the leaves of the group share the number of this term.
    pub(in crate::engine) fn shares(&self, term: &Term) -> bool {
        self.group.is_some() && !matches!(term.of, TermOf::Parameter)
    }
}

/// Which leaves share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Group {
    /// Leaves with a norm of this group.
    Norm(u64),
    /// Leaves with a limited norm of this group.
    Limit(u64),
    /// Leaves with sums of this group, of rules of this type.
    Sums {
        /// Keeps apart rules of different types that have the same group.
        rule: TypeId,
        group: u64,
    },
}

/// One number to which the elements of a leaf, or of a group of leaves, are reduced.
pub(crate) struct Term {
    pub(crate) of: TermOf,
    pub(crate) reducer: Reducer,
}

/// The elements that a term reduces.
pub(crate) enum TermOf {
    /// The gradient at this place of the chain.
    Gradient,
    /// What the arithmetic calls x.
    Parameter,
    /// The result of arithmetic on x, the gradient and some slots of the reduction. The slots are only read.
    Probe {
        kernel: ErasedKernel,
        slots: Range<usize>,
    },
}

/// What follows from the numbers of a [`Reduction`].
pub(crate) enum Then<'a> {
    /// The gradient is multiplied by a factor of its norm.
    Scale {
        non_finite: OnNonFinite,
        /// Returns the factor for these norms.
        factor: Box<dyn FnOnce(Norms) -> f64 + Send + Sync>,
    },
    /// Arithmetic on some slots of the reduction, and numbers that the state remembers.
    Map {
        /// Returns the arithmetic and the numbers for these sums.
        resolve: Resolver,
        slots: Range<usize>,
        numbers: &'a mut [(&'static str, f64)],
    },
}

/// A rule's function from sums to arithmetic and numbers. Its error refuses the call.
pub(crate) type Resolver = Box<dyn FnOnce(&[f64]) -> Result<Resolved> + Send + Sync>;

/// What follows from sums: arithmetic, and numbers that the state remembers.
pub struct Resolved {
    pub(in crate::engine) kernel: ErasedKernel,
    pub(in crate::engine) numbers: SmallVec<[f64; 2]>,
}

impl Resolved {
    /// The arithmetic of the step, and the next values of the state's numbers, in their order.
    pub fn new(step: impl Arithmetic, numbers: impl IntoIterator<Item = f64>) -> Self {
        Resolved {
            kernel: erased(step),
            numbers: numbers.into_iter().collect(),
        }
    }
}

impl std::fmt::Debug for Resolved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolved")
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

/// The consequence of a gradient's norm that is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnNonFinite {
    /// The factor is computed from this norm as from any other.
    Compute,
    /// The call returns an error.
    Refuse,
    /// The call is skipped.
    Skip,
}

/// The norms from which a factor is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Norms {
    /// The norm of the gradient, or of all gradients of the group.
    pub gradient: f64,
    /// The norm of the parameter (or of its master); 0 if the rule requested none.
    pub parameter: f64,
    /// How many elements the parameter has.
    pub elements: usize,
    /// The dtype of the arithmetic.
    pub(crate) compute: DType,
}

/// A function of x, the gradient (both in the compute dtype) and the slots' values. It may replace the
/// values.
type TensorFunction<'a> = dyn FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a;

/// A function from the gradient to the gradient, with candle's tensor operations.
pub(crate) struct TensorStep<'a> {
    pub(crate) function: Box<TensorFunction<'a>>,
    /// The state that the function reads and replaces.
    pub(crate) slots: StepSlots<'a>,
    /// Whether the function may refuse the call. Such a function runs before anything is written, and its
    /// result is kept until the commit.
    pub(crate) may_refuse: bool,
}

/// The result of a [`TensorStep`].
pub(crate) struct FunctionOutput<'a> {
    pub(in crate::engine) gradient: Lent<'a>,
    pub(in crate::engine) slots: StepSlots<'a>,
    /// The next values of the slots.
    pub(in crate::engine) next: Vec<Tensor>,
}
