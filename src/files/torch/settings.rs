//! The comparison of a torch group with a leaf here: kind of optimiser, hyper-parameters, weight decay.
//!
//! A value that differs is an error, or becomes the new value of a field if the user asks to take over
//! fields. A value that follows a schedule is only compared, because the schedule decides it.

use serde_json::{Map, Value};

use super::counterpart::{Counterpart, DrivenRate, INITIAL_RATE, TorchSetting, is_same};
use crate::error::warning::TORCH_SCHEDULE_REMEDY;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;
use crate::tree::schedule::saturating;

/// The fields of a leaf's optimiser to set, by place.
pub(super) type NewFields = Vec<(String, FieldValue)>;

/// Hyper-parameters that are ignored: either torch's way to compute, or already in Adagrad's sum.
const IGNORED: &[&str] = &[
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_accumulator_value",
];

/// The keys that `OneCycleLR` and `CyclicLR` write into a group whose momentum or β₁ they move.
const CYCLED_KEYS: [&str; 2] = ["max_momentum", "base_momentum"];

/// The kind of optimiser of a group. torch does not save the kind, so the names of hyper-parameters decide.
fn torch_kind(group: &Map<String, Value>) -> Result<&'static str> {
    let has = |key: &str| group.contains_key(key);
    if has("amsgrad") && has("betas") && has("eps") {
        Ok("Adam")
    } else if has("dampening") && has("momentum") {
        Ok("SGD")
    } else if has("alpha") && has("centered") {
        Ok("RMSprop")
    } else if has("lr_decay") && has("eps") {
        Ok("Adagrad")
    } else if has("betas") && !has("eps") {
        Ok("Lion")
    } else {
        Err(Error::new(
            ErrorKind::Unsupported,
            "no rule of this crate continues an optimiser with the hyper-parameters",
        )
        .with_got(group.keys().map(String::as_str).collect::<Vec<_>>().join(", "))
        .with_expected("those of Adam, AdamW, SGD, RMSprop, Adagrad or Lion"))
    }
}

/// The error that a hyper-parameter is missing or has another type.
fn type_error(group: &Map<String, Value>, key: &str, expected: &'static str) -> Error {
    let got = group
        .get(key)
        .map_or_else(|| "missing".to_string(), Value::to_string);
    Error::new(ErrorKind::File, format!("the file's {key} is"))
        .with_got(got)
        .with_expected(expected)
}

/// The number with this key; `default` if the group lacks the key.
fn real(group: &Map<String, Value>, key: &str, default: Option<f64>) -> Result<f64> {
    let number = |value: &Value| {
        value
            .as_f64()
            .or_else(|| value.as_bool().map(|flag| f64::from(u8::from(flag))))
    };
    group
        .get(key)
        .map_or(default, number)
        .ok_or_else(|| type_error(group, key, "a number"))
}

fn flag(group: &Map<String, Value>, key: &str) -> Result<bool> {
    match group.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        // A number counts as a bool, as in Python.
        Some(Value::Number(number)) => Ok(number.as_f64() != Some(0.0)),
        Some(_) => Err(type_error(group, key, "True or False")),
    }
}

fn pair(group: &Map<String, Value>, key: &str) -> Result<(f64, f64)> {
    let numbers = group
        .get(key)
        .and_then(Value::as_array)
        .map(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
    match numbers.flatten().as_deref() {
        Some(&[first, second]) => Ok((first, second)),
        _ => Err(type_error(group, key, "two numbers")),
    }
}

/// The group's value for a setting, in the type of the setting's value here. A key that older versions of
/// torch do not write counts as 0 or false.
fn group_value(
    group: &Map<String, Value>,
    TorchSetting { key, value, .. }: &TorchSetting,
) -> Result<FieldValue> {
    Ok(match value {
        FieldValue::Flag(_) => flag(group, key)?.into(),
        FieldValue::Pair(..) => pair(group, key)?.into(),
        _ => real(
            group,
            key,
            ["momentum", "dampening", "lr_decay"].contains(key).then_some(0.0),
        )?
        .into(),
    })
}

/// Whether values of schedules are equal up to 1e-6.
///
/// torch computes these values in another order.
fn is_nearly_equal(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()) + 1e-12
}

/// The comparison of a file's group with the counterpart of a leaf.
pub(super) struct GroupComparison<'c> {
    /// The name of the leaf's optimiser, for errors.
    pub(super) rule: String,
    pub(super) group: &'c Map<String, Value>,
    pub(super) counterpart: &'c Counterpart,
    /// Whether values that differ are taken over.
    pub(super) takes_over: bool,
    /// The step at which schedules are evaluated.
    pub(super) steps: u64,
}

impl GroupComparison<'_> {
    /// Compares everything. Returns the fields to set, and the value that the adjusted field then has.
    pub(super) fn check(&self) -> Result<(NewFields, f64)> {
        let GroupComparison {
            group, counterpart, ..
        } = *self;
        self.check_kind()?;
        let mut new_fields = NewFields::new();
        let torch_rate = real(group, "lr", None)?;
        match &counterpart.driven_rate {
            Some(driven_rate) => self.compare_driven(torch_rate, driven_rate, &mut new_fields)?,
            None => {
                let rule_rate = counterpart.learning_rate().into();
                let field = self.rate_field(torch_rate);
                self.compare("lr", torch_rate.into(), rule_rate, field, &mut new_fields)?;
            }
        }
        for setting in &counterpart.settings {
            let torch = group_value(group, setting)?;
            let field = setting.place.clone().map(|place| (place, torch));
            match setting.is_driven {
                true => self.compare_acting(setting.key, torch, setting.value)?,
                false => self.compare(setting.key, torch, setting.value, field, &mut new_fields)?,
            }
        }
        self.check_decay(&mut new_fields)?;
        self.check_others()?;
        let adjusted = counterpart
            .field_for(torch_rate)
            .filter(|(_, value)| value.is_finite());
        Ok((
            new_fields,
            adjusted.map_or_else(|| counterpart.adjusted_value(), |(_, value)| value),
        ))
    }

    /// The field to set for a learning rate of torch's.
    fn rate_field(&self, torch_rate: f64) -> Option<(String, FieldValue)> {
        let field = self
            .counterpart
            .field_for(torch_rate)
            .filter(|(_, value)| value.is_finite());
        field.map(|(place, value)| (place.to_string(), value.into()))
    }

    /// Compares a learning rate that follows a schedule.
    ///
    /// Under a relative schedule the leaf's own rate is first compared with `initial_lr`, the rate with which
    /// torch's scheduler began. In any case `lr` is then compared with the rate of the current step.
    fn compare_driven(
        &self,
        torch_rate: f64,
        driven_rate: &DrivenRate,
        new_fields: &mut NewFields,
    ) -> Result<()> {
        let mut expected = self.counterpart.learning_rate();
        if let (true, Some(initial)) = (driven_rate.schedule.is_relative, self.initial_rate()?) {
            let (leaf_rate, field) = (driven_rate.leaf_rate.into(), self.rate_field(initial));
            self.compare(INITIAL_RATE, initial.into(), leaf_rate, field, new_fields)?;
            // The base is `initial`, because a rate that is taken over is not in the acting rate yet.
            expected = saturating(initial, driven_rate.schedule.at(self.steps));
        }
        self.compare_acting("lr", torch_rate.into(), expected.into())
    }

    /// Compares a hyper-parameter that follows a schedule with the value of this step.
    fn compare_acting(&self, key: &str, torch: FieldValue, acting: FieldValue) -> Result<()> {
        if torch.is_equal(acting, is_nearly_equal) {
            return Ok(());
        }
        let error = Error::new(ErrorKind::OtherRule, format!("torch's {key} in the file is"));
        let expected = format!("{acting}, as the schedule gives in step {}", self.steps);
        Err(error
            .with_got(torch)
            .with_expected(expected)
            .with_remedy(TORCH_SCHEDULE_REMEDY))
    }

    /// The rate with which the group began, if a torch scheduler has written it.
    pub(super) fn initial_rate(&self) -> Result<Option<f64>> {
        if !self.group.contains_key(INITIAL_RATE) {
            return Ok(None);
        }
        let initial = real(self.group, INITIAL_RATE, None)?;
        match initial.is_finite() && initial >= 0.0 {
            true => Ok(Some(initial)),
            false => Err(type_error(
                self.group,
                INITIAL_RATE,
                "a finite number of 0 or more",
            )),
        }
    }

    /// Refuses a group of another kind of optimiser, or with other switches.
    fn check_kind(&self) -> Result<()> {
        let GroupComparison {
            rule,
            group,
            counterpart,
            ..
        } = self;
        let torch = torch_kind(group)?;
        let torch_is_on = |key| flag(group, key);
        let has_momentum = real(group, "momentum", Some(0.0))? != 0.0;
        let is_on_here = |key: &str| counterpart.is_on(key);
        let (remedy, has_same_options) = match torch {
            "Adam" if torch_is_on("amsgrad")? => ("`AMSGradW`", is_on_here("amsgrad")),
            "Adam" => ("`AdamW` or `Adam`", !is_on_here("amsgrad")),
            "SGD" if !has_momentum => ("`Descent`", !counterpart.has_velocity()),
            "SGD" if torch_is_on("nesterov")? => ("`Nesterov`", is_on_here("nesterov")),
            "SGD" => (
                "`Momentum`",
                !is_on_here("nesterov") && counterpart.has_velocity(),
            ),
            "RMSprop" => {
                let remedy = match (has_momentum, torch_is_on("centered")?) {
                    (false, false) => "`RMSProp`",
                    (false, true) => "`RMSProp` with `centred`",
                    (true, _) => {
                        "a chain of `RMSProp` (with `centred` as torch has it), `Momentum` with η = 1, and \
                         `Descent`"
                    }
                };
                (
                    remedy,
                    counterpart.has_velocity() == has_momentum
                        && is_on_here("centered") == torch_is_on("centered")?,
                )
            }
            "Adagrad" => ("`AdaGrad`", true),
            _ => ("`Lion`", true),
        };
        if torch == counterpart.kind && has_same_options {
            return Ok(());
        }
        let with_options = |kind: &str, is_on: &dyn Fn(&str) -> bool, has_momentum: bool| {
            let options = ["amsgrad", "nesterov", "centered"]
                .into_iter()
                .filter(|key| is_on(key));
            let options: Vec<&str> = options.chain(has_momentum.then_some("momentum")).collect();
            if options.is_empty() {
                kind.to_string()
            } else {
                format!("{kind}({})", options.join(", "))
            }
        };
        let expected = with_options(counterpart.kind, &is_on_here, counterpart.has_velocity());
        Err(
            Error::new(ErrorKind::OtherRule, "the optimiser of the file is torch's")
                .with_got(with_options(
                    torch,
                    &|key| group.get(key) == Some(&Value::Bool(true)),
                    has_momentum,
                ))
                .with_expected(format_args!("torch's {expected}, which {rule} continues"))
                .with_remedy(format!("set up {remedy}")),
        )
    }

    /// Compares a hyper-parameter. If the values differ and fields are taken over, adds the new value of the
    /// field to `new_fields`.
    fn compare(
        &self,
        key: &str,
        torch: FieldValue,
        rule_value: FieldValue,
        field: Option<(String, FieldValue)>,
        new_fields: &mut NewFields,
    ) -> Result<()> {
        if torch.is_equal(rule_value, is_same) {
            return Ok(());
        }
        let remedy = match field {
            Some(field) if self.takes_over => {
                new_fields.push(field);
                return Ok(());
            }
            Some(_) => {
                "set up the rule with the value of the file, or take that value over with \
                 `TorchState::taking_over_fields`"
            }
            None => {
                "no field of this optimiser sets the value: choose the rules by the table in the \
                 documentation of `optimisers::torch`"
            }
        };
        Err(
            Error::new(ErrorKind::OtherRule, format!("torch's {key} in the file is"))
                .with_got(torch)
                .with_expected(rule_value)
                .with_remedy(remedy),
        )
    }

    /// Compares both kinds of weight decay. A group of torch's has a decay of one kind, so the other kind has
    /// to be 0 here.
    fn check_decay(&self, new_fields: &mut NewFields) -> Result<()> {
        let GroupComparison {
            group, counterpart, ..
        } = self;
        let lambda = real(group, "weight_decay", Some(0.0))?;
        let decouples = match counterpart.kind {
            _ if group.contains_key("weight_decouple") => flag(group, "weight_decouple")?,
            "Lion" => true,
            "Adam" if group.contains_key("decoupled_weight_decay") => flag(group, "decoupled_weight_decay")?,
            // Files of torch before 2.7 do not distinguish Adam and AdamW, so the rule here decides.
            "Adam" => counterpart.decays[1].place.is_some() && counterpart.decays[0].lambda == 0.0,
            _ => false,
        };
        let names = ["weight_decay (in the gradient)", "weight_decay (decoupled)"];
        let expected = if decouples { [0.0, lambda] } else { [lambda, 0.0] };
        for ((name, decay), torch) in names.iter().zip(&counterpart.decays).zip(expected) {
            let field = decay.place.clone().map(|place| (place, torch.into()));
            match decay.is_driven {
                true => self.compare_acting(name, torch.into(), decay.lambda.into())?,
                false => self.compare(name, torch.into(), decay.lambda.into(), field, new_fields)?,
            }
        }
        Ok(())
    }

    /// Refuses options that are switched on in torch and unknown here. Also refuses a momentum or β₁ that a
    /// torch scheduler moves, unless a schedule here drives this number: otherwise the number would stop
    /// moving.
    fn check_others(&self) -> Result<()> {
        let is_cycled =
            |setting: &TorchSetting| ["betas", "momentum"].contains(&setting.key) && setting.is_driven;
        if let Some(key) = CYCLED_KEYS.into_iter().find(|key| self.group.contains_key(*key))
            && !self.counterpart.settings.iter().any(is_cycled)
        {
            let problem = format!(
                "the file has {key}, so torch's scheduler changes the momentum, or β₁, of this group in each \
                 step, but the state has no schedule that does"
            );
            return Err(Error::new(ErrorKind::Unsupported, problem).with_remedy(
                "before the restore, give the state a schedule with `Schedule::field(\"beta1\")` or \
                 `field(\"rho\")`; or, to keep the momentum of the file, remove `max_momentum` and \
                 `base_momentum` from the groups of `optimizer.param_groups` in torch, and save again",
            ));
        }
        let is_known = |key: &str| {
            IGNORED.contains(&key)
                || ["weight_decouple", "amsgrad", "nesterov", "centered", "maximize"].contains(&key)
                || key.starts_with("decoupled_")
        };
        match self
            .group
            .iter()
            .find(|(key, value)| **value == Value::Bool(true) && !is_known(key))
        {
            Some((key, _)) => self.compare(key, true.into(), false.into(), None, &mut NewFields::new()),
            None => Ok(()),
        }
    }
}
