//! What may stand where in a configuration. The names of rules and fields are not looked at here, they are the registry's.

use candle_core::DType;

use super::data::{Data, Entries, NameOrList};
use super::place::Place;
use crate::error::{ConfigurationError, Result};
use crate::rule::SlotFormat;

const MIXED_PRECISION: &str = "MixedPrecision";
const OFFLOAD: &str = "Offload";
const STORE_AS: &str = "StoreAs";
const FALLBACK: &str = "Fallback";
const OTHERWISE: &str = "fallback";
const EXCEPT: &str = "except";
const SLOTS: &str = "slots";
const DTYPE: &str = "dtype";
const INNER: &str = "inner";

pub(super) const BY_PATH: &str = "ByPath";
const PATTERN: &str = "pattern";
const OPTIMISER: &str = "optimiser";
const LEAVE_OUT: &str = "LeaveOut";

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
    MixedPrecision { dtype: DType, inner: RuleForm },
    Offload(Box<OptimiserForm>),
}

/// A rule by its name, a chain of rules, a rule whose state is stored in a way of its own, or one of two.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RuleForm {
    Named(Box<Named>),
    Chain(Vec<RuleForm>),
    StoreAs(Box<StoredForm>),
    Fallback(Box<FallbackForm>),
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
            NameOrList::Named(name, value) if &*name == MIXED_PRECISION => OptimiserForm::read_mixed(value, place.key(MIXED_PRECISION)),
            NameOrList::Named(name, value) if &*name == OFFLOAD => OptimiserForm::read_offloaded(value.part(), place.key(OFFLOAD)),
            part => RuleForm::read(part, place).map(OptimiserForm::Plain),
        }
    }

    fn read_mixed(value: Data, place: Place) -> Result<Self> {
        let [dtype, inner] = value.values([DTYPE, INNER], r#"a table such as {"dtype": "F32", "inner": "Adam"}"#, &place)?;
        let master = MASTERS.into_iter().find(|(name, _)| matches!(&dtype, Data::Text(text) if &**text == *name));
        let (_, dtype) = master.ok_or_else(|| place.key(DTYPE).expected(r#""F32" or "F64""#, &dtype))?;
        Ok(OptimiserForm::MixedPrecision { dtype, inner: RuleForm::read(inner.part(), place.key(INNER))? })
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
            OptimiserForm::MixedPrecision { dtype, inner } => {
                let values = [(DTYPE, Data::Text(format!("{dtype:?}").into())), (INNER, inner.write())];
                Data::table([(MIXED_PRECISION, Data::table(values))])
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
            MIXED_PRECISION => "decides how the parameter is stored and goes around the whole rule or list",
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
            RuleForm::Fallback(form) => {
                let except = Data::List(form.except.iter().cloned().map(Data::Text).collect());
                let values = [(INNER, form.inner.write()), (OTHERWISE, form.fallback.write()), (EXCEPT, except)];
                Data::table([(FALLBACK, Data::table(values))])
            }
        }
    }
}
