//! Schedules as data: a table whose only key is the name of the constructor, with a table of the arguments by
//! their names.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::data::Data;
use super::place::Place;
use crate::error::Result;
use crate::rule::field::Number;
use crate::tree::schedule::{Curve, Easing, Schedule};

/// Declares how schedules are written: their names, constructors and arguments.
macro_rules! schedule_forms {
    ($($Kind:ident = $make:path { $($(#[$reader:meta])? $argument:ident: $T:ty),+ };)+) => {
        /// A schedule in a text.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        enum ScheduleForm {
            $($Kind {
                $($(#[$reader])? $argument: $T,)+
                #[serde(default)]
                relative: bool,
                #[serde(default, deserialize_with = "some_text")]
                field: Option<String>,
            },)+
        }

        impl From<Box<ScheduleForm>> for Schedule {
            fn from(form: Box<ScheduleForm>) -> Self {
                let (schedule, relative, driven) = match *form {
                    $(ScheduleForm::$Kind { $($argument,)+ relative, field } => {
                        ($make($($argument.into()),+), relative, field)
                    })+
                };
                let schedule = if relative { schedule.relative() } else { schedule };
                if let Some(field) = driven { schedule.field(field) } else { schedule }
            }
        }
    };
}

schedule_forms! {
    Constant = Schedule::constant { eta: f64 };
    Linear = Schedule::linear { start: f64, end: f64, steps: u64 };
    Polynomial = Schedule::polynomial { start: f64, end: f64, steps: u64, power: f64 };
    Cosine = Schedule::cosine { start: f64, end: f64, steps: u64 };
    OneMinusSquareRoot = Schedule::one_minus_square_root { start: f64, end: f64, steps: u64 };
    CosineRestarts = Schedule::cosine_restarts {
        high: f64, low: f64, steps: u64, #[serde(deserialize_with = "at_least_one")] factor: f64
    };
    OneCycle = Schedule::one_cycle { peak: f64, steps: u64 };
    Exponential = Schedule::exponential { start: f64, rate: f64, steps: u64 };
    Step = Schedule::step { start: f64, rate: f64, steps: u64 };
    InverseSquareRoot = Schedule::inverse_square_root { peak: f64, warmup: u64 };
    WarmupStableThen = Schedule::warmup_stable_then {
        peak: f64, warmup: u64, stable: u64, decay: Box<ScheduleForm>
    };
    Then = Schedule::then { first: Box<ScheduleForm>, steps: u64, next: Box<ScheduleForm> };
}

/// Reads the text of `field`, and refuses null. If a schedule has no field, its table has no such key.
fn some_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    String::deserialize(deserializer).map(Some)
}

/// Reads the factor by which periods get longer. Refuses a factor below 1, because the schedule would use 1
/// instead.
fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let factor = f64::deserialize(deserializer)?;
    let other = de::Unexpected::Float(factor);
    if factor >= 1.0 { Ok(factor) } else { Err(de::Error::invalid_value(other, &"a number of 1 or more")) }
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Read as `Data` first, because it is the same for every format. Then as JSON, which has infinity
        // only as a text, so that it is refused as a number.
        let data = Data::deserialize(deserializer)?;
        data.check_keys(&Place::Whole).map_err(de::Error::custom)?;
        let form = serde_json::to_value(data).and_then(Box::<ScheduleForm>::deserialize);
        form.map(Schedule::from)
            .map_err(|error| de::Error::custom(format_args!("configuration: this is no schedule: {error}")))
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let data = written(self);
        // Otherwise a schedule could be written that is nested too deep to be read again.
        data.check_shallow().map_err(ser::Error::custom)?;
        data.serialize(serializer)
    }
}

fn written(schedule: &Schedule) -> Data {
    let (real, count) = (|value| Data::Real(Number(value)), Data::Count);
    // The parts as a schedule of their own, whose first part begins at 0.
    let joined = |parts: &[(u64, Curve)]| {
        let from_begin = |(begin, part): &(u64, Curve)| (begin - parts[0].0, part.clone());
        let curve = match parts {
            [(_, part)] => part.clone(),
            _ => Curve::Joined(parts.iter().map(from_begin).collect()),
        };
        written(&Schedule { curve, field: None, is_relative: false })
    };
    let (kind, mut arguments) = match schedule.curve {
        Curve::Constant(eta) => ("Constant", vec![("eta", real(eta))]),
        Curve::Between { start, end, steps, easing } => {
            let (kind, power) = match easing {
                Easing::Cosine => ("Cosine", None),
                Easing::OneMinusSquareRoot => ("OneMinusSquareRoot", None),
                Easing::Power(1.0) => ("Linear", None),
                Easing::Power(power) => ("Polynomial", Some(("power", real(power)))),
            };
            let between = [("start", real(start)), ("end", real(end)), ("steps", count(steps))];
            (kind, between.into_iter().chain(power).collect())
        }
        // A curve of `warmup_stable_then` is written under that name, although nested `Then` would mean the
        // same.
        Curve::Joined(ref parts) => match &parts[..] {
            [(0, rise), (warmup, Curve::Constant(peak)), (then, _), ..]
                if *rise == Curve::warm_up(*peak, *warmup) =>
            {
                let [warmup, stable] = [("warmup", count(*warmup)), ("stable", count(then - warmup))];
                let decay = ("decay", joined(&parts[2..]));
                ("WarmupStableThen", vec![("peak", real(*peak)), warmup, stable, decay])
            }
            _ => {
                let (first, next) = (joined(&parts[..1]), joined(&parts[1..]));
                ("Then", vec![("first", first), ("steps", count(parts[1].0)), ("next", next)])
            }
        },
        Curve::OneCycle { peak, steps } => ("OneCycle", vec![("peak", real(peak)), ("steps", count(steps))]),
        Curve::Restarts { high, low, steps, factor } => {
            let [high, low] = [("high", real(high)), ("low", real(low))];
            ("CosineRestarts", vec![high, low, ("steps", count(steps)), ("factor", real(factor))])
        }
        Curve::Exponential { start, rate, steps, staircase } => {
            let arguments = vec![("start", real(start)), ("rate", real(rate)), ("steps", count(steps))];
            (if staircase { "Step" } else { "Exponential" }, arguments)
        }
        Curve::InverseSquareRoot { peak, warmup } => {
            ("InverseSquareRoot", vec![("peak", real(peak)), ("warmup", count(warmup))])
        }
    };
    arguments.extend(schedule.is_relative.then_some(("relative", Data::Flag(true))));
    arguments.extend(schedule.field.as_deref().map(|field| ("field", Data::text(field))));
    Data::table([(kind, Data::table(arguments))])
}
