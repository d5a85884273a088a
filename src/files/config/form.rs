//! The grammar of a configuration. The registry checks the names of rules and fields.

use super::data::{Data, Entries, NameOrList, are_same};
use super::place::Place;
use crate::error::{Error, Result};

/// The key of the rule inside of another.
pub(super) const INNER: &str = "inner";
/// The key of the rule that another falls back to.
pub(super) const FALLBACK: &str = "fallback";
/// The key of a list of rules.
pub(super) const MEMBERS: &str = "members";

/// The optimiser whose table is the optimiser inside.
pub(super) const OFFLOAD: &str = "Offload";

pub(super) const BY_PATH: &str = "ByPath";
pub(super) const PATTERN: &str = "pattern";
pub(super) const OPTIMISER: &str = "optimiser";
pub(super) const LEAVE_OUT: &str = "LeaveOut";

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Form {
    Single(OptimiserForm),
    ByPath(Vec<PatternEntry>),
}

/// A pattern, and the optimiser of the parameters that match; `None` leaves them out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PatternEntry {
    /// The place of the pattern.
    pub(super) place: Place,
    pub(super) pattern: String,
    pub(super) optimiser: Option<OptimiserForm>,
}

/// An optimiser by its name, or a chain of rules.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum OptimiserForm {
    Named(Box<Named>),
    Chain(Vec<OptimiserForm>),
}

/// An optimiser by its name, with the values that are given.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) place: Place,
    pub(super) name: Box<str>,
    /// The rules that it holds, by key.
    pub(super) parts: Vec<(&'static str, PartForm)>,
    /// Its settings and fields.
    pub(super) values: Entries,
}

/// The order of keys does not count.
impl PartialEq for Named {
    fn eq(&self, other: &Self) -> bool {
        let same = self.place == other.place && self.name == other.name;
        same && are_same(&self.values, &other.values) && are_same(&self.parts, &other.parts)
    }
}

/// A rule that another holds, or several.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PartForm {
    One(OptimiserForm),
    Several(Vec<OptimiserForm>),
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
        choices
            .map(|(i, choice)| PatternEntry::read(choice, place.index(i)))
            .collect::<Result<_>>()
            .map(Form::ByPath)
    }

    pub(super) fn write(&self) -> Data {
        match self {
            Form::Single(optimiser) => optimiser.write(),
            Form::ByPath(choices) => {
                Data::table([(BY_PATH, Data::List(choices.iter().map(PatternEntry::write).collect()))])
            }
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
        let (name, value) = match part {
            NameOrList::Named(name, value) => (name, value),
            NameOrList::List(members) => {
                return OptimiserForm::read_list(members, &place).map(OptimiserForm::Chain);
            }
            NameOrList::Other(data) => {
                return Err(place.expected(
                    r#"a rule such as "Adam" or {"Adam": {"eta": 0.001}}, or a list of rules"#,
                    &data,
                ));
            }
        };
        let belongs = match &*name {
            BY_PATH => "chooses among optimisers and goes around all of them",
            LEAVE_OUT => "stands in the place of a whole optimiser, in a choice of ByPath",
            _ => return Named::read(name, value, place).map(|named| OptimiserForm::Named(Box::new(named))),
        };
        Err(place.misplaced(&name, belongs))
    }

    fn read_list(members: Box<[Data]>, place: &Place) -> Result<Vec<Self>> {
        let members = members.into_iter().enumerate();
        members.map(|(i, member)| OptimiserForm::read(member.part(), place.index(i))).collect()
    }

    pub(super) fn write(&self) -> Data {
        match self {
            OptimiserForm::Named(named) => named.write(),
            OptimiserForm::Chain(members) => Data::List(members.iter().map(OptimiserForm::write).collect()),
        }
    }
}

impl PartForm {
    pub(super) fn write(&self) -> Data {
        match self {
            PartForm::One(one) => one.write(),
            PartForm::Several(members) => Data::List(members.iter().map(OptimiserForm::write).collect()),
        }
    }
}

impl Named {
    fn read(name: Box<str>, value: Data, place: Place) -> Result<Self> {
        let own = place.key(&name);
        if &*name == OFFLOAD {
            let inner = OptimiserForm::read(value.part(), own)?;
            return Ok(Named {
                place,
                name,
                parts: vec![(INNER, PartForm::One(inner))],
                values: Entries::default(),
            });
        }
        let entries = value.entries(r#"a table such as {"eta": 0.001} or {"inner": "Adam"}"#, &own)?;
        let (mut parts, mut values) = (Vec::new(), Vec::new());
        for (key, value) in entries {
            let place = own.key(&key);
            match &*key {
                INNER => parts.push((INNER, PartForm::One(OptimiserForm::read(value.part(), place)?))),
                FALLBACK => parts.push((FALLBACK, PartForm::One(OptimiserForm::read(value.part(), place)?))),
                MEMBERS => match value {
                    Data::List(members) => {
                        parts.push((MEMBERS, PartForm::Several(OptimiserForm::read_list(members, &place)?)))
                    }
                    other => return Err(place.expected("a list of rules", &other)),
                },
                _ => values.push((key, value)),
            }
        }
        Ok(Named { place, name, parts, values: values.into() })
    }

    fn write(&self) -> Data {
        if let (OFFLOAD, [(_, PartForm::One(inner))]) = (&*self.name, &self.parts[..]) {
            return Data::table([(OFFLOAD, inner.write())]);
        }
        let table = self.table();
        if table.is_empty() {
            Data::Text(self.name.clone())
        } else {
            Data::table([(&*self.name, Data::Table(table))])
        }
    }

    /// The table under its name.
    pub(super) fn table(&self) -> Entries {
        let parts = self.parts.iter().map(|(key, part)| ((*key).into(), part.write()));
        self.values.iter().cloned().chain(parts).collect()
    }

    /// The place of its table.
    pub(super) fn inside(&self) -> Place {
        self.place.key(&self.name)
    }

    /// The value of a setting or a field, if it is there.
    pub(super) fn value(&self, key: &str) -> Option<&Data> {
        self.values.iter().find(|(known, _)| **known == *key).map(|(_, value)| value)
    }

    pub(super) fn part(&self, key: &str) -> Option<&PartForm> {
        self.parts.iter().find(|(known, _)| *known == key).map(|(_, part)| part)
    }

    /// Refuses other keys in its table.
    pub(super) fn check_keys(&self, available: Vec<String>) -> Result<()> {
        let mut keys =
            self.values.iter().map(|(key, _)| &**key).chain(self.parts.iter().map(|(key, _)| *key));
        match keys.find(|key| !available.iter().any(|known| known == key)) {
            None => Ok(()),
            Some(key) => Err(self.inside().error(Error::unknown("key", key, &available))),
        }
    }

    /// This, the rule inside, the rule inside of that, and so on, as long as each holds a single named rule.
    pub(super) fn spine(&self) -> Vec<&Named> {
        let mut spine = vec![self];
        let mut named = self;
        while let Some(PartForm::One(OptimiserForm::Named(inner))) = named.part(INNER) {
            named = inner;
            spine.push(named);
        }
        spine
    }
}
