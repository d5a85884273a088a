use crate::error::{Result, distinct};
use crate::rule::{
    Describe, Describer, EntryTraits, Flow, Gradient, Parameter, Rule, Setting, SlotFormat, State,
    unknown_name_error,
};

/// Keeps state tensors of a rule in other dtypes or in [8 bits](SlotFormat::Q8).
///
/// [`StoreAs::new`] chooses tensors by their names, [`StoreAs::all`] takes all for which the format is
/// precise enough. The arithmetic is still in f32 or f64: a tensor is widened before a step and rounded after
/// it, in the same pass over memory. A moment then takes 1 or 2 bytes instead of 4:
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AccumGrad, AdamW, MixedPrecision, OptimiserChain, Q8, StoreAs, setup};
///
/// let x = Var::zeros(12800, BF16, &Device::Cpu)?;
/// let adam = StoreAs::new([("m", BF16)], AdamW::new(1e-3));
/// assert_eq!(setup(adam.clone(), &x)?.bytes(), 12800 * (2 + 4));
///
/// // Both moments in 8 bits: blocks of 128, each with a scale of 4 bytes.
/// let small = StoreAs::all(Q8, AdamW::new(1e-3));
/// assert_eq!(setup(small.clone(), &x)?.bytes(), 2 * (12800 + 100 * 4));
/// assert_eq!(setup(StoreAs::new([("m", Q8)], AdamW::new(1e-3)), &x)?.bytes(), 12800 * (1 + 4) + 100 * 4);
///
/// // A name reaches into chains: gradients accumulated in the dtype of the model, as in DeepSpeed's `data_types.grad_accum_dtype`.
/// let chain = StoreAs::new([("acc", BF16)], OptimiserChain::new((AccumGrad::new(4), adam)));
/// assert_eq!(setup(MixedPrecision::new(F32, chain), &x)?.bytes(), 12800 * (4 + 2 + 2 + 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is lost
/// - BF16 has the range of F32 and 8 significant bits. With β₂ = 0.999 a second moment changes by a
///   thousandth of itself in a step. BF16 rounds such a change away, so a second moment in BF16 does not
///   work. A first moment with β₁ = 0.9 works.
/// - F16 has 11 significant bits, and numbers below 3e-8 are 0. The squares of gradients are that small, so a
///   second moment in F16 is refused ([`Slot::second_moment`](crate::Slot::second_moment)). Sums of gradients
///   (`acc`) lose the small numbers that a loss scale has saved, and are infinite above 65504, see
///   [`AccumGrad`](crate::AccumGrad).
/// - [`Q8`](SlotFormat::Q8) has 4 significant bits. Means of gradients and of their squares work with it. In
///   a block with a much larger number, small numbers with a sign become 0.
///
/// Some tensors need 32 bits or more, because steps follow from their small differences or changes: the
/// matrices of [`SOAP`](crate::SOAP) and [`Shampoo`](crate::Shampoo), the slow mean of
/// [`AdEMAMix`](crate::AdEMAMix), and the moments of a centred [`RMSProp`](crate::RMSProp). Copies of the
/// parameter (an average, the `z` of [`ScheduleFree`](crate::ScheduleFree)) need 16 bits or more.
/// [`StoreAs::all`] leaves these tensors as they are. In BF16 and F16 [`StoreAs::all`] also leaves copies,
/// second moments and other [non-negative](crate::Slot::non_negative) tensors as they are, because 16 bits
/// round small changes of such a tensor away. If a program names such a tensor, [`StoreAs::new`] stores the
/// tensor in 16 bits; a second moment in F16 is refused.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct StoreAs<R> {
    formats: StoreAsFormat,
    inner: R,
}

/// The formats of tensors: of some by their names, or one format for all.
#[derive(Clone, Debug, PartialEq)]
enum StoreAsFormat {
    Named(Vec<(String, SlotFormat)>),
    All(SlotFormat),
}

impl<R: Rule + Clone> StoreAs<R> {
    /// Stores the tensors of these names in these formats, wherever they are in `inner`.
    ///
    /// A format is a dtype or [`Q8`](SlotFormat::Q8).
    pub fn new<N: Into<String>, F: Into<SlotFormat>>(
        formats: impl IntoIterator<Item = (N, F)>,
        inner: R,
    ) -> Self {
        let named = formats
            .into_iter()
            .map(|(name, format)| (name.into(), format.into()));
        StoreAs {
            formats: StoreAsFormat::Named(named.collect()),
            inner,
        }
    }

    /// Stores every tensor in this format, except those that [need more bits](StoreAs#what-is-lost).
    pub fn all(format: impl Into<SlotFormat>, inner: R) -> Self {
        StoreAs {
            formats: StoreAsFormat::All(format.into()),
            inner,
        }
    }
}

impl<R: Rule + Clone> Describe for StoreAs<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("StoreAs");
        match &self.formats {
            StoreAsFormat::Named(named) => {
                let rows = named
                    .iter()
                    .map(|(name, format)| (name.clone(), format.to_string()));
                rule.setting("slots", Setting::Table(rows.collect()));
            }
            StoreAsFormat::All(format) => rule.setting("slots", Setting::Text(format.to_string())),
        }
        // The tensors are not known before `init`, so only formats that no tensor can have are refused here.
        rule.require(|| match &self.formats {
            StoreAsFormat::Named(named) => named
                .iter()
                .try_for_each(|(slot, format)| EntryTraits::default().check_format(slot, *format)),
            StoreAsFormat::All(format) => EntryTraits::default().check_format("*", *format),
        });
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> Rule for StoreAs<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let mut state = State::empty().with_held(self, x)?;
        let named = match &self.formats {
            StoreAsFormat::Named(named) => &named[..],
            StoreAsFormat::All(format) => {
                state.convert_tensors(None, *format)?;
                &[]
            }
        };
        for (name, format) in named {
            if state.convert_tensors(Some(name), *format)? == 0 {
                // Names reach into chains, so they are listed without the place of a member.
                let tensors = state.tensors();
                let available = distinct(tensors.iter().filter_map(|(name, _)| name.rsplit('.').next()));
                return Err(unknown_name_error(
                    &self.inner.name(),
                    "state tensor",
                    name,
                    &available,
                ));
            }
        }
        Ok(state)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.inner.apply(state.parts().held.inner()?, x, dx)
    }
}
