//! What may stand where in a configuration. The names of rules and fields are not looked at here, they are the registry's.

use candle_core::DType;

use super::data::{Data, Entries, NameOrList};
use super::place::Place;
use crate::error::{ConfigurationError, Result};
use crate::field::{FieldValue, Number};
use crate::rule::SlotFormat;

const MIXED_PRECISION: &str = "MixedPrecision";
const KAHAN: &str = "Kahan";
const SPLIT_MASTER: &str = "SplitMaster";
const STOCHASTIC: &str = "StochasticRounding";
const DECAY: &str = "DecoupledDecay";
const OFFLOAD: &str = "Offload";
const STORE_AS: &str = "StoreAs";
const FALLBACK: &str = "Fallback";
const OTHERWISE: &str = "fallback";
const EXCEPT: &str = "except";
const SLOTS: &str = "slots";
const DTYPE: &str = "dtype";
const BITS: &str = "bits";
const SEED: &str = "seed";
const LAMBDA: &str = "lambda";
const CAUTIOUS: &str = "cautious";
const ETA_MAX: &str = "eta_max";
const INNER: &str = "inner";

pub(super) const BY_PATH: &str = "ByPath";
const PATTERN: &str = "pattern";
const OPTIMISER: &str = "optimiser";
const LEAVE_OUT: &str = "LeaveOut";

/// Where a way to store parameters belongs.
const AROUND: &str = "decides how the parameter is stored and goes around the whole rule or list";

/// Where `Offload` belongs.
const ONCE: &str = "decides where the state of a whole optimiser is and goes around it, once";

/// The dtypes of masters by their names.
const MASTERS: [(&str, DType); 2] = [("F32", DType::F32), ("F64", DType::F64)];

/// How state tensors are stored.
const FORMATS: [SlotFormat; 5] = [
    SlotFormat::Dtype(DType::F16),
    SlotFormat::Dtype(DType::BF16),
    SlotFormat::Dtype(DType::F32),
    SlotFormat::Dtype(DType::F64),
    SlotFormat::Q8,
];

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Form {
    Single(OptimiserForm),
    ByPath(Vec<PatternEntry>),
}

/// What the parameters get whose paths match a pattern; `None` leaves them out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PatternEntry {
    /// Of the pattern.
    pub(super) place: Place,
    pub(super) pattern: String,
    pub(super) optimiser: Option<OptimiserForm>,
}

/// A rule, and how the parameter is stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum OptimiserForm {
    Plain(RuleForm),
    Stored { store: StoreForm, inner: RuleForm },
    Offload(Box<OptimiserForm>),
}

/// How the parameter is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum StoreForm {
    MixedPrecision(DType),
    SplitMaster { is_short: bool },
    Kahan,
    StochasticRounding { seed: u64 },
}

/// A rule by its name, a chain of rules, a rule whose state is stored in a way of its own, or one of two.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RuleForm {
    Named(Box<Named>),
    Chain(Vec<RuleForm>),
    StoreAs(Box<StoredForm>),
    Fallback(Box<FallbackForm>),
    DecoupledDecay(Box<DecayForm>),
}

/// A rule with a decay beside its steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DecayForm {
    pub(super) place: Place,
    pub(super) lambda: f64,
    pub(super) eta_max: f64,
    pub(super) is_cautious: bool,
    pub(super) inner: RuleForm,
}

/// A rule for matrices, and one for other parameters and for those that patterns name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FallbackForm {
    pub(super) inner: RuleForm,
    pub(super) fallback: RuleForm,
    pub(super) except: Vec<Box<str>>,
}

/// A rule, and how its state tensors are stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredForm {
    pub(super) formats: SlotFormats,
    pub(super) inner: RuleForm,
}

/// How which state tensors are stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SlotFormats {
    All(SlotFormat),
    Named(Vec<(Box<str>, SlotFormat)>),
}

/// A rule by its name, with the fields that are not to have their defaults.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Named {
    pub(super) place: Place,
    pub(super) name: Box<str>,
    pub(super) fields: Entries,
}

impl Form {
    pub(super) fn read(data: Data) -> Result<Self> {
        let place = Place::default();
        let value = match data.part() {
            NameOrList::Named(name, value) if &*name == BY_PATH => value,
            part => return OptimiserForm::read(part, place).map(Form::Single),
        };
        let place = place.key(BY_PATH);
        let Data::List(choices) = value else {
            return Err(place.expected(r#"a list such as [{"pattern": "*", "optimiser": "Adam"}]"#, &value));
        };
        let choices = choices.into_iter().enumerate();
        choices.map(|(i, choice)| PatternEntry::read(choice, place.index(i))).collect::<Result<_>>().map(Form::ByPath)
    }

    pub(super) fn write(&self) -> Data {
        match self {
            Form::Single(optimiser) => optimiser.write(),
            Form::ByPath(choices) => Data::table([(BY_PATH, Data::List(choices.iter().map(PatternEntry::write).collect()))]),
        }
    }
}

impl PatternEntry {
    fn read(data: Data, place: Place) -> Result<Self> {
        let expected = r#"a table such as {"pattern": "*.bias", "optimiser": "Adam"}"#;
        let [pattern, optimiser] = data.values([PATTERN, OPTIMISER], expected, &place)?;
        let optimiser = match optimiser {
            Data::Nothing => None,
            Data::Text(text) if &*text == LEAVE_OUT => None,
            optimiser => Some(OptimiserForm::read(optimiser.part(), place.key(OPTIMISER))?),
        };
        let place = place.key(PATTERN);
        match pattern {
            Data::Text(pattern) => Ok(PatternEntry { place, pattern: pattern.into(), optimiser }),
            pattern => Err(place.expected("a text in which * stands for anything", &pattern)),
        }
    }

    fn write(&self) -> Data {
        let optimiser = self.optimiser.as_ref().map_or(Data::Text(LEAVE_OUT.into()), OptimiserForm::write);
        Data::table([(PATTERN, Data::Text(self.pattern.as_str().into())), (OPTIMISER, optimiser)])
    }
}

impl OptimiserForm {
    fn read(part: NameOrList, place: Place) -> Result<Self> {
        match part {
            NameOrList::Named(name, value) if matches!(&*name, MIXED_PRECISION | SPLIT_MASTER | KAHAN | STOCHASTIC) => {
                OptimiserForm::read_stored(&name, value, place.key(&name))
            }
            NameOrList::Named(name, value) if &*name == OFFLOAD => OptimiserForm::read_offloaded(value.part(), place.key(OFFLOAD)),
            part => RuleForm::read(part, place).map(OptimiserForm::Plain),
        }
    }

    fn read_stored(name: &str, value: Data, place: Place) -> Result<Self> {
        let (store, inner) = match name {
            SPLIT_MASTER => {
                let [bits, inner] = value.values([BITS, INNER], r#"a table such as {"bits": 32, "inner": "Adam"}"#, &place)?;
                let is_short = match bits {
                    Data::Count(32) => false,
                    Data::Count(24) => true,
                    bits => return Err(place.key(BITS).expected("32 or 24", &bits)),
                };
                (StoreForm::SplitMaster { is_short }, inner)
            }
            KAHAN => {
                let [inner] = value.values([INNER], r#"a table such as {"inner": "Adam"}"#, &place)?;
                (StoreForm::Kahan, inner)
            }
            STOCHASTIC => {
                let [seed, inner] = value.values([SEED, INNER], r#"a table such as {"seed": 0, "inner": "Adam"}"#, &place)?;
                let Data::Count(seed) = seed else { return Err(place.key(SEED).expected("a count", &seed)) };
                (StoreForm::StochasticRounding { seed }, inner)
            }
            _ => {
                let [dtype, inner] = value.values([DTYPE, INNER], r#"a table such as {"dtype": "F32", "inner": "Adam"}"#, &place)?;
                let master = MASTERS.into_iter().find(|(name, _)| matches!(&dtype, Data::Text(text) if &**text == *name));
                let (_, dtype) = master.ok_or_else(|| place.key(DTYPE).expected(r#""F32" or "F64""#, &dtype))?;
                (StoreForm::MixedPrecision(dtype), inner)
            }
        };
        Ok(OptimiserForm::Stored { store, inner: RuleForm::read(inner.part(), place.key(INNER))? })
    }

    /// What stands inside `Offload`: any optimiser but that.
    fn read_offloaded(part: NameOrList, place: Place) -> Result<Self> {
        match part {
            NameOrList::Named(name, _) if &*name == OFFLOAD => {
                Err(place.error(ConfigurationError::Misplaced { name: OFFLOAD.to_string(), remedy: ONCE }))
            }
            part => Ok(OptimiserForm::Offload(Box::new(OptimiserForm::read(part, place)?))),
        }
    }

    pub(super) fn write(&self) -> Data {
        match self {
            OptimiserForm::Plain(rule) => rule.write(),
            OptimiserForm::Offload(inner) => Data::table([(OFFLOAD, inner.write())]),
            OptimiserForm::Stored { store, inner } => {
                let (name, own) = match store {
                    StoreForm::MixedPrecision(dtype) => (MIXED_PRECISION, Some((DTYPE, Data::Text(format!("{dtype:?}").into())))),
                    StoreForm::SplitMaster { is_short } => (SPLIT_MASTER, Some((BITS, Data::Count(if *is_short { 24 } else { 32 })))),
                    StoreForm::Kahan => (KAHAN, None),
                    StoreForm::StochasticRounding { seed } => (STOCHASTIC, Some((SEED, Data::Count(*seed)))),
                };
                Data::table([(name, Data::table(own.into_iter().chain([(INNER, inner.write())])))])
            }
        }
    }
}

impl SlotFormats {
    fn read(data: Data, place: Place) -> Result<Self> {
        match data {
            Data::Table(_) => {
                let entries = data.entries("a table", &place)?.into_iter();
                let named = entries.map(|(name, format)| Ok((name.clone(), read_format(&format, place.key(&name))?)));
                named.collect::<Result<_>>().map(SlotFormats::Named)
            }
            format => read_format(&format, place).map(SlotFormats::All),
        }
    }

    fn write(&self) -> Data {
        let text = |format: &SlotFormat| Data::Text(format.to_string().into());
        match self {
            SlotFormats::All(format) => text(format),
            SlotFormats::Named(named) => Data::table(named.iter().map(|(name, format)| (&**name, text(format)))),
        }
    }
}

fn read_format(data: &Data, place: Place) -> Result<SlotFormat> {
    let known = FORMATS.into_iter().find(|format| matches!(data, Data::Text(text) if **text == format.to_string()));
    known.ok_or_else(|| place.expected(r#""Q8", "F16", "BF16", "F32" or "F64""#, data))
}

impl RuleForm {
    fn read_stored(value: Data, place: Place) -> Result<Self> {
        let [slots, inner] = value.values([SLOTS, INNER], r#"a table such as {"slots": "Q8", "inner": "Adam"}"#, &place)?;
        let formats = SlotFormats::read(slots, place.key(SLOTS))?;
        let inner = RuleForm::read(inner.part(), place.key(INNER))?;
        Ok(RuleForm::StoreAs(Box::new(StoredForm { formats, inner })))
    }

    fn read_decay(value: Data, place: Place) -> Result<Self> {
        let expected = r#"a table such as {"lambda": 0.1, "inner": "Lion", "cautious": true}"#;
        let [lambda, inner, cautious, eta_max] = value.first_values([LAMBDA, INNER, CAUTIOUS, ETA_MAX], 2, expected, &place)?;
        let real = |key: &str, data: &Data| match data.literal().and_then(|literal| literal.read(FieldValue::Real(0.0))) {
            Some(FieldValue::Real(value)) => Ok(value),
            _ => Err(place.key(key).expected("a real number", data)),
        };
        let is_cautious = match cautious {
            Data::Nothing => false,
            Data::Flag(flag) => flag,
            other => return Err(place.key(CAUTIOUS).expected("true or false", &other)),
        };
        let eta_max = if eta_max == Data::Nothing { 0.0 } else { real(ETA_MAX, &eta_max)? };
        let lambda = real(LAMBDA, &lambda)?;
        let inner = RuleForm::read(inner.part(), place.key(INNER))?;
        Ok(RuleForm::DecoupledDecay(Box::new(DecayForm { place, lambda, eta_max, is_cautious, inner })))
    }

    fn read_fallback(value: Data, place: Place) -> Result<Self> {
        let expected = r#"a table such as {"inner": "Muon", "fallback": "AdamW", "except": ["embedding*"]}"#;
        let [inner, fallback, except] = value.first_values([INNER, OTHERWISE, EXCEPT], 2, expected, &place)?;
        let inner = RuleForm::read(inner.part(), place.key(INNER))?;
        let fallback = RuleForm::read(fallback.part(), place.key(OTHERWISE))?;
        let place = place.key(EXCEPT);
        let patterns = match except {
            Data::List(patterns) => patterns,
            Data::Nothing => Box::default(),
            other => return Err(place.expected(r#"a list of patterns such as ["embedding*"]"#, &other)),
        };
        let pattern = |(i, pattern)| match pattern {
            Data::Text(pattern) => Ok(pattern),
            other => Err(place.index(i).expected("a text in which * stands for anything", &other)),
        };
        let except = patterns.into_iter().enumerate().map(pattern).collect::<Result<_>>()?;
        Ok(RuleForm::Fallback(Box::new(FallbackForm { inner, fallback, except })))
    }

    fn read(part: NameOrList, place: Place) -> Result<Self> {
        let (name, value) = match part {
            NameOrList::Named(name, value) => (name, value),
            NameOrList::List(members) => {
                let members = members.into_iter().enumerate().map(|(i, member)| RuleForm::read(member.part(), place.index(i)));
                return members.collect::<Result<_>>().map(RuleForm::Chain);
            }
            NameOrList::Other(data) => {
                return Err(place.expected(r#"a rule such as "Adam" or {"Adam": {"eta": 0.001}}, or a list of rules"#, &data));
            }
        };
        let remedy = match &*name {
            STORE_AS => return RuleForm::read_stored(value, place.key(STORE_AS)),
            FALLBACK => return RuleForm::read_fallback(value, place.key(FALLBACK)),
            DECAY => return RuleForm::read_decay(value, place.key(DECAY)),
            MIXED_PRECISION | SPLIT_MASTER | KAHAN | STOCHASTIC => AROUND,
            OFFLOAD => ONCE,
            BY_PATH => "chooses among optimisers and goes around all of them",
            LEAVE_OUT => "stands in the place of a whole optimiser, in a choice of ByPath",
            _ => {
                let fields = value.entries("a table of fields such as {\"eta\": 0.001}", &place.key(&name))?;
                return Ok(RuleForm::Named(Box::new(Named { place, name, fields })));
            }
        };
        Err(place.error(ConfigurationError::Misplaced { name: name.into(), remedy }))
    }

    fn write(&self) -> Data {
        match self {
            RuleForm::Named(named) if named.fields.is_empty() => Data::Text(named.name.clone()),
            RuleForm::Named(named) => Data::table([(&*named.name, Data::Table(named.fields.clone()))]),
            RuleForm::Chain(members) => Data::List(members.iter().map(RuleForm::write).collect()),
            RuleForm::StoreAs(stored) => {
                Data::table([(STORE_AS, Data::table([(SLOTS, stored.formats.write()), (INNER, stored.inner.write())]))])
            }
            RuleForm::DecoupledDecay(form) => {
                let (lambda, eta_max) = (Data::Real(Number(form.lambda)), Data::Real(Number(form.eta_max)));
                let values = [(LAMBDA, lambda), (INNER, form.inner.write()), (CAUTIOUS, Data::Flag(form.is_cautious)), (ETA_MAX, eta_max)];
                Data::table([(DECAY, Data::table(values))])
            }
            RuleForm::Fallback(form) => {
                let except = Data::List(form.except.iter().cloned().map(Data::Text).collect());
                let values = [(INNER, form.inner.write()), (OTHERWISE, form.fallback.write()), (EXCEPT, except)];
                Data::table([(FALLBACK, Data::table(values))])
            }
        }
    }
}
