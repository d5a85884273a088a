//! Schedules as data: the name of the constructor, with the names of the arguments.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::data::{Data, Entries, NameOrList};
use super::place::Place;
use crate::error::{Error, Result};
use crate::rule::field::{FieldValue, Number, range};
use crate::tree::schedule::{Curve, Easing, Schedule};

const RELATIVE: &str = "relative";
const FIELD: &str = "field";

/// Keys that every schedule can have.
const COMMON: [&str; 2] = [RELATIVE, FIELD];

/// A kind of schedule.
struct ScheduleKind {
    name: &'static str,
    arguments: &'static [&'static str],
    make: fn(&mut Arguments) -> Result<Schedule>,
}

impl ScheduleKind {
    const fn new(
        name: &'static str,
        arguments: &'static [&'static str],
        make: fn(&mut Arguments) -> Result<Schedule>,
    ) -> Self {
        ScheduleKind { name, arguments, make }
    }
}

const KINDS: [ScheduleKind; 12] = [
    ScheduleKind::new("Constant", &["eta"], |given| Ok(Schedule::constant(given.finite("eta")?))),
    ScheduleKind::new("Linear", &["start", "end", "steps"], |given| given.between(Schedule::linear)),
    ScheduleKind::new("Polynomial", &["start", "end", "steps", "power"], |given| {
        let power = given.finite("power")?;
        given.between(|start, end, steps| Schedule::polynomial(start, end, steps, power))
    }),
    ScheduleKind::new("Cosine", &["start", "end", "steps"], |given| given.between(Schedule::cosine)),
    ScheduleKind::new("OneMinusSquareRoot", &["start", "end", "steps"], |given| {
        given.between(Schedule::one_minus_square_root)
    }),
    ScheduleKind::new("CosineRestarts", &["high", "low", "steps", "factor"], |given| {
        let (high, low) = (given.finite("high")?, given.finite("low")?);
        Ok(Schedule::cosine_restarts(high, low, given.count("steps")?, given.real("factor", at_least_one)?))
    }),
    ScheduleKind::new("OneCycle", &["peak", "steps"], |given| {
        Ok(Schedule::one_cycle(given.finite("peak")?, given.count("steps")?))
    }),
    ScheduleKind::new("Exponential", &["start", "rate", "steps"], |given| {
        given.falling(Schedule::exponential)
    }),
    ScheduleKind::new("Step", &["start", "rate", "steps"], |given| given.falling(Schedule::step)),
    ScheduleKind::new("InverseSquareRoot", &["peak", "warmup"], |given| {
        Ok(Schedule::inverse_square_root(given.finite("peak")?, given.count("warmup")?))
    }),
    ScheduleKind::new("WarmupStableThen", &["peak", "warmup", "stable", "decay"], |given| {
        let (warmup, stable) = (given.count("warmup")?, given.count("stable")?);
        Ok(Schedule::warmup_stable_then(given.finite("peak")?, warmup, stable, given.schedule("decay")?))
    }),
    ScheduleKind::new("Then", &["first", "steps", "next"], |given| {
        Ok(given.schedule("first")?.then(given.count("steps")?, given.schedule("next")?))
    }),
];

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        read(Data::deserialize(deserializer)?, &Place::default()).map_err(de::Error::custom)
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let relative = self.is_relative.then_some((RELATIVE, Data::Flag(true)));
        let field = self.field.as_ref().map(|field| (FIELD, Data::Text(field.as_str().into())));
        let (kind, arguments) = written(&self.curve);
        let data = table(kind, arguments.into_iter().chain(relative).chain(field));
        data.check_shallow().map_err(ser::Error::custom)?;
        data.serialize(serializer)
    }
}

fn table(kind: &str, arguments: impl IntoIterator<Item = (&'static str, Data)>) -> Data {
    Data::table([(kind, Data::table(arguments))])
}

/// The kind of a curve, and its arguments.
fn written(curve: &Curve) -> (&'static str, Vec<(&'static str, Data)>) {
    let real = |value: f64| Data::from(Number(value));
    // Each part counts from its begin.
    let joined = |parts: &[(u64, Curve)]| {
        let from_begin = |(begin, part): &(u64, Curve)| (begin - parts[0].0, part.clone());
        let (kind, arguments) = match parts {
            [(_, part)] => written(part),
            _ => written(&Curve::Joined(parts.iter().map(from_begin).collect())),
        };
        table(kind, arguments)
    };
    match *curve {
        Curve::Constant(eta) => ("Constant", vec![("eta", real(eta))]),
        Curve::Between { start, end, steps, easing } => {
            let mut arguments =
                vec![("start", real(start)), ("end", real(end)), ("steps", Data::Count(steps))];
            let kind = match easing {
                Easing::Cosine => "Cosine",
                Easing::OneMinusSquareRoot => "OneMinusSquareRoot",
                Easing::Power(1.0) => "Linear",
                Easing::Power(power) => {
                    arguments.push(("power", real(power)));
                    "Polynomial"
                }
            };
            (kind, arguments)
        }
        Curve::Joined(ref parts) => match warm_up(parts) {
            Some(WarmUp { peak, warmup, stable, decay }) => {
                let counts = [("warmup", Data::Count(warmup)), ("stable", Data::Count(stable))];
                let peak = [("peak", real(peak))].into_iter();
                ("WarmupStableThen", peak.chain(counts).chain([("decay", joined(decay))]).collect())
            }
            None => {
                let steps = parts[1].0;
                let arguments = [
                    ("first", joined(&parts[..1])),
                    ("steps", Data::Count(steps)),
                    ("next", joined(&parts[1..])),
                ];
                ("Then", arguments.into())
            }
        },
        Curve::OneCycle { peak, steps } => {
            ("OneCycle", vec![("peak", real(peak)), ("steps", Data::Count(steps))])
        }
        Curve::Restarts { high, low, steps, factor } => {
            let counts = [("steps", Data::Count(steps)), ("factor", real(factor))];
            ("CosineRestarts", [("high", real(high)), ("low", real(low))].into_iter().chain(counts).collect())
        }
        Curve::Exponential { start, rate, steps, staircase } => {
            let arguments = vec![("start", real(start)), ("rate", real(rate)), ("steps", Data::Count(steps))];
            (if staircase { "Step" } else { "Exponential" }, arguments)
        }
        Curve::InverseSquareRoot { peak, warmup } => {
            ("InverseSquareRoot", vec![("peak", real(peak)), ("warmup", Data::Count(warmup))])
        }
    }
}

/// A warm-up that then stays at its peak, before other parts.
struct WarmUp<'c> {
    peak: f64,
    warmup: u64,
    stable: u64,
    decay: &'c [(u64, Curve)],
}

fn warm_up(parts: &[(u64, Curve)]) -> Option<WarmUp<'_>> {
    let [(0, rise), (warmup, Curve::Constant(peak)), decay @ ..] = parts else { return None };
    let (peak, warmup, stable) = (*peak, *warmup, decay.first()?.0 - warmup);
    (*rise == Curve::warm_up(peak, warmup)).then_some(WarmUp { peak, warmup, stable, decay })
}

fn read(data: Data, place: &Place) -> Result<Schedule> {
    let expected = |got: Data| {
        Err(place
            .expected(r#"a schedule such as {"Cosine": {"start": 0.001, "end": 0.0, "steps": 1000}}"#, &got))
    };
    let (name, value) = match data.part() {
        NameOrList::Named(name, value) => (name, value),
        NameOrList::List(members) => return expected(Data::List(members)),
        NameOrList::Other(other) => return expected(other),
    };
    let Some(kind) = KINDS.iter().find(|kind| *kind.name == *name) else {
        return Err(place.error(Error::unknown("schedule", &name, &KINDS.map(|kind| kind.name.to_string()))));
    };
    let place = place.key(kind.name);
    let with_all = format!("a table with {}", kind.arguments.join(", "));
    let entries = value.entries(&with_all, &place)?;
    let known = || kind.arguments.iter().chain(&COMMON);
    if let Some((key, _)) = entries.iter().find(|(key, _)| !known().any(|known| *known == &**key)) {
        let available: Vec<String> = known().map(|known| known.to_string()).collect();
        return Err(place.error(Error::unknown("key", key, &available)));
    }
    if !kind.arguments.iter().all(|argument| entries.iter().any(|(key, _)| **key == **argument)) {
        return Err(place.expected(with_all, &Data::Table(entries)));
    }
    let mut given = Arguments { place, entries };
    let mut schedule = (kind.make)(&mut given)?;
    if given.common(RELATIVE, "true or false", Data::flag)? == Some(true) {
        schedule = schedule.relative();
    }
    if let Some(field) = given.common(FIELD, "the name of a hyper-parameter", Data::text)? {
        schedule = schedule.field(field);
    }
    Ok(schedule)
}

/// The range of the factor by which periods get longer.
fn at_least_one(value: f64) -> Option<&'static str> {
    (!(value >= 1.0 && value.is_finite())).then_some("a finite number of 1 or more")
}

/// The arguments of a schedule that is to be made; all are there.
struct Arguments {
    place: Place,
    entries: Entries,
}

impl Arguments {
    fn value(&self, key: &str) -> Option<&Data> {
        self.entries.iter().find(|(known, _)| **known == *key).map(|(_, value)| value)
    }

    /// The value of a key that every schedule can have.
    fn common<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: fn(&'a Data) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(data) = self.value(key) else { return Ok(None) };
        read(data).map(Some).ok_or_else(|| self.place.key(key).expected(expected, data))
    }

    fn argument<T>(
        &self,
        key: &str,
        read: impl Fn(&Data) -> std::result::Result<T, &'static str>,
    ) -> Result<T> {
        let data = self.value(key).unwrap_or(&Data::Nothing);
        read(data).map_err(|expected| self.place.key(key).expected(expected, data))
    }

    fn real(&self, key: &str, range: fn(f64) -> Option<&'static str>) -> Result<f64> {
        self.argument(key, |data| {
            match data.literal().and_then(|literal| literal.read(FieldValue::Real(0.0))) {
                Some(FieldValue::Real(value)) => range(value).map_or(Ok(value), Err),
                _ => Err("a real number"),
            }
        })
    }

    fn finite(&self, key: &str) -> Result<f64> {
        self.real(key, range::finite)
    }

    fn count(&self, key: &str) -> Result<u64> {
        self.argument(key, |data| if let Data::Count(count) = data { Ok(*count) } else { Err("a count") })
    }

    /// Takes the nested schedule of a key.
    fn schedule(&mut self, key: &str) -> Result<Schedule> {
        let value = self.entries.iter_mut().find(|(known, _)| **known == *key);
        let data = value.map_or(Data::Nothing, |(_, value)| std::mem::replace(value, Data::Nothing));
        read(data, &self.place.key(key))
    }

    fn between(&self, make: impl Fn(f64, f64, u64) -> Schedule) -> Result<Schedule> {
        Ok(make(self.finite("start")?, self.finite("end")?, self.count("steps")?))
    }

    fn falling(&self, make: impl Fn(f64, f64, u64) -> Schedule) -> Result<Schedule> {
        Ok(make(self.finite("start")?, self.finite("rate")?, self.count("steps")?))
    }
}
