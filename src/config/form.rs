//! What may stand where in a configuration. The names of rules and fields are not looked at here, they are the registry's.

use candle_core::DType;

use super::data::Data;
use super::place::Place;
use crate::error::{ConfigurationError, Result};

const MIXED_PRECISION: &str = "MixedPrecision";
const OFFLOAD: &str = "Offload";
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

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Form {
    Single(OptimiserForm),
    ByPath(Vec<Choice>),
}

/// What the parameters get whose paths match a pattern; `None` leaves them out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
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

/// A rule by its name, or a chain of rules.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RuleForm {
    Named(Named),
    Chain(Vec<RuleForm>),
}

/// A rule by its name, with the fields that are not to have their defaults.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Named {
    pub(super) place: Place,
    pub(super) name: String,
    pub(super) fields: Vec<(String, Data)>,
}

impl Form {
    pub(super) fn read(data: &Data) -> Result<Self> {
        let place = Place::default();
        let Some((BY_PATH, value)) = data.named() else {
            return OptimiserForm::read(data, place).map(Form::Single);
        };
        let place = place.key(BY_PATH);
        let Data::List(choices) = value else {
            return Err(place.expected(r#"a list such as [{"pattern": "*", "optimiser": "Adam"}]"#, value));
        };
        choices.iter().enumerate().map(|(i, choice)| Choice::read(choice, place.index(i))).collect::<Result<_>>().map(Form::ByPath)
    }

    pub(super) fn write(&self) -> Data {
        match self {
            Form::Single(optimiser) => optimiser.write(),
            Form::ByPath(choices) => Data::table([(BY_PATH, Data::List(choices.iter().map(Choice::write).collect()))]),
        }
    }
}

impl Choice {
    fn read(data: &Data, place: Place) -> Result<Self> {
        let expected = r#"a table such as {"pattern": "*.bias", "optimiser": "Adam"}"#;
        let [pattern, optimiser] = data.values([PATTERN, OPTIMISER], expected, &place)?;
        let optimiser = match optimiser {
            Data::Nothing => None,
            Data::Text(text) if text == LEAVE_OUT => None,
            optimiser => Some(OptimiserForm::read(optimiser, place.key(OPTIMISER))?),
        };
        let place = place.key(PATTERN);
        match pattern {
            Data::Text(pattern) => Ok(Choice { place, pattern: pattern.clone(), optimiser }),
            pattern => Err(place.expected("a text in which * stands for anything", pattern)),
        }
    }

    fn write(&self) -> Data {
        let optimiser = self.optimiser.as_ref().map_or(Data::Text(LEAVE_OUT.to_string()), OptimiserForm::write);
        Data::table([(PATTERN, Data::Text(self.pattern.clone())), (OPTIMISER, optimiser)])
    }
}

impl OptimiserForm {
    fn read(data: &Data, place: Place) -> Result<Self> {
        let (name, value) = match data.named() {
            Some((name @ (MIXED_PRECISION | OFFLOAD), value)) => (name, value),
            _ => return RuleForm::read(data, place).map(OptimiserForm::Plain),
        };
        let place = place.key(name);
        if name == OFFLOAD {
            return OptimiserForm::read_offloaded(value, place);
        }
        let [dtype, inner] = value.values([DTYPE, INNER], r#"a table such as {"dtype": "F32", "inner": "Adam"}"#, &place)?;
        let master = MASTERS.into_iter().find(|(name, _)| matches!(dtype, Data::Text(text) if text == name));
        let (_, dtype) = master.ok_or_else(|| place.key(DTYPE).expected(r#""F32" or "F64""#, dtype))?;
        Ok(OptimiserForm::MixedPrecision { dtype, inner: RuleForm::read(inner, place.key(INNER))? })
    }

    /// What stands inside `Offload`: any optimiser but that.
    fn read_offloaded(data: &Data, place: Place) -> Result<Self> {
        match data.named() {
            Some((OFFLOAD, _)) => Err(place.error(ConfigurationError::Misplaced { name: OFFLOAD.to_string(), remedy: ONCE })),
            _ => Ok(OptimiserForm::Offload(Box::new(OptimiserForm::read(data, place)?))),
        }
    }

    pub(super) fn write(&self) -> Data {
        match self {
            OptimiserForm::Plain(rule) => rule.write(),
            OptimiserForm::Offload(inner) => Data::table([(OFFLOAD, inner.write())]),
            OptimiserForm::MixedPrecision { dtype, inner } => {
                let values = [(DTYPE, Data::Text(format!("{dtype:?}"))), (INNER, inner.write())];
                Data::table([(MIXED_PRECISION, Data::table(values))])
            }
        }
    }
}

impl RuleForm {
    fn read(data: &Data, place: Place) -> Result<Self> {
        if let Data::List(members) = data {
            let members = members.iter().enumerate().map(|(i, member)| RuleForm::read(member, place.index(i)));
            return members.collect::<Result<_>>().map(RuleForm::Chain);
        }
        let Some((name, value)) = data.named() else {
            return Err(place.expected(r#"a rule such as "Adam" or {"Adam": {"eta": 0.001}}, or a list of rules"#, data));
        };
        let remedy = match name {
            MIXED_PRECISION => "decides how the parameter is stored and goes around the whole rule or list",
            OFFLOAD => ONCE,
            BY_PATH => "chooses among optimisers and goes around all of them",
            LEAVE_OUT => "stands in the place of a whole optimiser, in a choice of ByPath",
            _ => {
                let fields = value.entries("a table of fields such as {\"eta\": 0.001}", &place.key(name))?;
                return Ok(RuleForm::Named(Named { place, name: name.to_string(), fields: fields.to_vec() }));
            }
        };
        Err(place.error(ConfigurationError::Misplaced { name: name.to_string(), remedy }))
    }

    fn write(&self) -> Data {
        match self {
            RuleForm::Named(Named { name, fields, .. }) if fields.is_empty() => Data::Text(name.clone()),
            RuleForm::Named(Named { name, fields, .. }) => {
                Data::table([(name.as_str(), Data::table(fields.iter().map(|(key, value)| (key.as_str(), value.clone()))))])
            }
            RuleForm::Chain(members) => Data::List(members.iter().map(RuleForm::write).collect()),
        }
    }
}
