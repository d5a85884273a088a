//! Schedules as data: a table whose only key is the name of the constructor. The value of this key is a table
//! of the arguments by their names.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::form::{NamedTable, Place, check_depth, check_keys_known, check_repeats, make_table};
use crate::error::{Error, Result};
use crate::rule::field::{Data, FieldValue, range};
use crate::tree::schedule::{Curve, Easing, Schedule};

/// The keys that the table of every schedule may have.
const RELATIVE: &str = "relative";
const FIELD: &str = "field";

/// Declares how schedules are read: their names, arguments and constructors.
macro_rules! schedules {
    ($($Kind:ident { $($argument:ident: $T:ty),+ } => $make:path;)+) => {
        /// Calls the constructor that a table names.
        fn construct(named: &NamedTable<'_>) -> Result<Schedule> {
            match named.name {
                $(stringify!($Kind) => {
                    let available = [$(stringify!($argument),)+ RELATIVE, FIELD];
                    check_keys_known(named.table, &available, &named.place)?;
                    Ok($make($(<$T>::read_key(named, stringify!($argument))?),+))
                })+
                other => Err(Error::unknown("schedule", other, &[$(stringify!($Kind)),+])),
            }
        }
    };
}

schedules! {
    Constant { eta: f64 } => Schedule::constant;
    Linear { start: f64, end: f64, steps: u64 } => Schedule::linear;
    Polynomial { start: f64, end: f64, steps: u64, power: f64 } => Schedule::polynomial;
    Cosine { start: f64, end: f64, steps: u64 } => Schedule::cosine;
    OneMinusSquareRoot { start: f64, end: f64, steps: u64 } => Schedule::one_minus_square_root;
    CosineRestarts { high: f64, low: f64, steps: u64, factor: f64 } => Schedule::cosine_restarts;
    OneCycle { peak: f64, steps: u64 } => Schedule::one_cycle;
    Exponential { start: f64, rate: f64, steps: u64 } => Schedule::exponential;
    Step { start: f64, rate: f64, steps: u64 } => Schedule::step;
    InverseSquareRoot { peak: f64, warmup: u64 } => Schedule::inverse_square_root;
    WarmupStableThen { peak: f64, warmup: u64, stable: u64, decay: Schedule } => Schedule::warmup_stable_then;
    Then { first: Schedule, steps: u64, next: Schedule } => Schedule::then;
}

/// An argument of a constructor.
trait Argument: Sized {
    /// Reads the argument from the data at a place.
    fn read(data: &Data, place: &Place) -> Result<Self>;

    /// The argument with this key in the table of a schedule.
    fn read_key(named: &NamedTable<'_>, key: &str) -> Result<Self> {
        let missing = || {
            named
                .place
                .mismatch_error(format!("a table with {key:?}"), &Data::Table(named.table.into()))
        };
        Self::read(named.value(key).ok_or_else(missing)?, &named.place.key(key))
    }
}

/// Reads the data at a place as a value of the type of `example`.
fn read<T>(example: T, data: &Data, place: &Place) -> Result<T>
where
    T: Into<FieldValue> + TryFrom<FieldValue>,
{
    let example: FieldValue = example.into();
    let value = example.read(data).and_then(|value| value.try_into().ok());
    value.ok_or_else(|| place.mismatch_error(example.expected(), data))
}

impl Argument for f64 {
    fn read(data: &Data, place: &Place) -> Result<Self> {
        let number = read(0.0, data, place)?;
        range::finite(number).map_or(Ok(number), |expected| Err(place.mismatch_error(expected, data)))
    }
}

impl Argument for u64 {
    fn read(data: &Data, place: &Place) -> Result<Self> {
        read(0, data, place)
    }
}

impl Argument for Schedule {
    fn read(data: &Data, place: &Place) -> Result<Self> {
        let entries = if let Data::Table(entries) = data {
            &entries[..]
        } else {
            &[]
        };
        let [(name, Data::Table(table))] = entries else {
            return Err(place.mismatch_error(r#"a schedule such as {"Constant": {"eta": 0.001}}"#, data));
        };
        let named = NamedTable {
            name,
            table,
            place: place.key(name),
        };
        let schedule = construct(&named).map_err(|error| place.error(error))?;
        schedule.check().map_err(|error| named.place.error(error))?;
        let is_relative = match named.value(RELATIVE) {
            Some(data) => read(false, data, &named.place.key(RELATIVE))?,
            None => false,
        };
        let schedule = if is_relative {
            schedule.relative()
        } else {
            schedule
        };
        match named.value(FIELD) {
            None => Ok(schedule),
            Some(Data::Text(field)) => Ok(schedule.field(&**field)),
            Some(other) => Err(named
                .place
                .key(FIELD)
                .mismatch_error("the name of a field", other)),
        }
    }
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let data = Data::read_whole(deserializer)?;
        check_repeats(&data, &Place::Whole)
            .and_then(|()| Schedule::read(&data, &Place::Whole))
            .map_err(de::Error::custom)
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.check().map_err(ser::Error::custom)?;
        let data = schedule_data(self);
        // Without this check a program could write a schedule that is nested too deep to be read again.
        check_depth(&data).map_err(ser::Error::custom)?;
        data.serialize(serializer)
    }
}

/// The name of a schedule's constructor, and the arguments by name.
type ScheduleCall = (&'static str, Vec<(&'static str, Data)>);

/// A schedule as data.
fn schedule_data(schedule: &Schedule) -> Data {
    let (real, count) = (Data::Real, Data::Count);
    let (kind, mut arguments) = match schedule.curve {
        Curve::Constant(eta) => ("Constant", vec![("eta", real(eta))]),
        Curve::Between {
            start,
            end,
            steps,
            easing,
        } => {
            let (kind, power) = match easing {
                Easing::Cosine => ("Cosine", None),
                Easing::OneMinusSquareRoot => ("OneMinusSquareRoot", None),
                Easing::Power(1.0) => ("Linear", None),
                Easing::Power(power) => ("Polynomial", Some(("power", real(power)))),
            };
            let between = [
                ("start", real(start)),
                ("end", real(end)),
                ("steps", count(steps)),
            ];
            (kind, between.into_iter().chain(power).collect())
        }
        Curve::Joined(ref parts) => joined_call(parts),
        Curve::OneCycle { peak, steps } => ("OneCycle", vec![("peak", real(peak)), ("steps", count(steps))]),
        Curve::Restarts {
            high,
            low,
            steps,
            factor,
        } => {
            let [high, low] = [("high", real(high)), ("low", real(low))];
            (
                "CosineRestarts",
                vec![high, low, ("steps", count(steps)), ("factor", real(factor))],
            )
        }
        Curve::Exponential {
            start,
            rate,
            steps,
            staircase,
        } => {
            let arguments = vec![
                ("start", real(start)),
                ("rate", real(rate)),
                ("steps", count(steps)),
            ];
            (if staircase { "Step" } else { "Exponential" }, arguments)
        }
        Curve::InverseSquareRoot { peak, warmup } => (
            "InverseSquareRoot",
            vec![("peak", real(peak)), ("warmup", count(warmup))],
        ),
    };
    arguments.extend(schedule.is_relative.then_some(("relative", Data::Flag(true))));
    arguments.extend(
        schedule
            .field
            .as_deref()
            .map(|field| ("field", Data::text(field))),
    );
    make_table([(kind, make_table(arguments))])
}

/// The constructor of a curve of several parts.
///
/// A curve of `warmup_stable_then` gets that name, although nested `Then` would mean the same curve.
fn joined_call(parts: &[(u64, Curve)]) -> ScheduleCall {
    match parts {
        [(0, rise), (warmup, Curve::Constant(peak)), (decay_start, _), ..]
            if *rise == Curve::warm_up(*peak, *warmup) =>
        {
            let stable = Data::Count(decay_start - warmup);
            let arguments = vec![
                ("peak", Data::Real(*peak)),
                ("warmup", Data::Count(*warmup)),
                ("stable", stable),
                ("decay", parts_data(&parts[2..])),
            ];
            ("WarmupStableThen", arguments)
        }
        _ => {
            let steps = Data::Count(parts[1].0);
            let (first, next) = (parts_data(&parts[..1]), parts_data(&parts[1..]));
            ("Then", vec![("first", first), ("steps", steps), ("next", next)])
        }
    }
}

/// The parts as a separate schedule, whose first part begins at 0.
fn parts_data(parts: &[(u64, Curve)]) -> Data {
    let from_start = |(start, part): &(u64, Curve)| (start - parts[0].0, part.clone());
    let curve = match parts {
        [(_, part)] => part.clone(),
        _ => Curve::Joined(parts.iter().map(from_start).collect()),
    };
    schedule_data(&Schedule {
        curve,
        field: None,
        is_relative: false,
    })
}
