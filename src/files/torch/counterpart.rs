//! The counterpart of a leaf in torch: the optimiser that one of the leaf's rules corresponds to, and torch's
//! names of state and hyper-parameters.
//!
//! One optimiser of torch's may be several rules here. [`Counterpart::new`] flattens the leaf's optimiser
//! into a list of rules, the members:
//!
//! 1. [`MainRule::new`] finds the only member with a [`Definition`]: the main member. `Descent` counts only
//!    if there is no other, and a `Momentum` after `RMSProp` is the momentum of torch's RMSprop.
//! 2. torch's `lr` is the product of the rates from the main member on. The last `eta` is adjusted.
//! 3. torch's velocity does not contain `lr`. A velocity here contains the rates up to the rate of the member
//!    that has the velocity.
//! 4. The decay of a `WeightDecay` before the main member is in the gradient. The decays of the main member
//!    and of a `DecoupledDecay` are decoupled.

use std::fmt::Display;

use serde_json::{Map, Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::rule::description::MemberDescription;
use crate::rule::field::FieldValue;
use crate::rule::{Average, RATE, Role, Setting};
use crate::tree::Leaf;
use crate::tree::schedule::Schedule;

/// The rules that have a counterpart, for errors.
const RULES: &str =
    "Adam, AdamW, AMSGradW, Descent, Momentum, Nesterov, RMSProp (with Momentum after it), AdaGrad and Lion";

/// The key with the learning rate that a group began with, written by torch's schedulers.
pub(super) const INITIAL_RATE: &str = "initial_lr";

/// A hyper-parameter of torch.
#[derive(Clone, Debug)]
pub(super) struct TorchSetting {
    pub(super) key: &'static str,
    pub(super) value: FieldValue,
    /// The field here with this value. `None` if the rule fixes the value, or no member has such a field.
    pub(super) place: Option<String>,
    /// Whether a schedule here drives a number of the field.
    pub(super) is_driven: bool,
}

impl TorchSetting {
    /// A setting with the value of a field of the leaf.
    fn from_field(leaf: &Leaf, key: &'static str, value: FieldValue, place: String) -> Self {
        let is_driven = schedule_of(leaf, &place).is_some();
        TorchSetting {
            key,
            value,
            place: Some(place),
            is_driven,
        }
    }

    /// A setting that no field here has.
    fn constant(key: &'static str, value: impl Into<FieldValue>) -> Self {
        TorchSetting {
            key,
            value: value.into(),
            place: None,
            is_driven: false,
        }
    }
}

/// A state tensor of torch.
#[derive(Clone, Debug)]
pub(super) struct TorchSlot {
    pub(super) key: &'static str,
    /// The state tensor here.
    pub(super) slot: String,
    /// A velocity here is torch's, times a learning rate and this sign. `None` for a tensor equal to torch's.
    pub(super) velocity_sign: Option<f64>,
    /// Whether torch has no such tensor, because the momentum is 0. A file of this crate can have the tensor
    /// nevertheless, for a later momentum.
    pub(super) is_unused: bool,
}

impl TorchSlot {
    fn new(key: &'static str, slot: String, velocity_sign: Option<f64>) -> Self {
        TorchSlot {
            key,
            slot,
            velocity_sign,
            is_unused: false,
        }
    }

    /// The name of the tensor in errors.
    pub(super) fn in_file(&self) -> String {
        format!("{} in the file", self.key)
    }
}

/// The counterpart of a leaf in torch.
#[derive(Debug)]
pub(super) struct Counterpart {
    pub(super) kind: &'static str,
    pub(super) slots: Vec<TorchSlot>,
    /// The counters here that are torch's `step`, the counter of the main rule first.
    pub(super) counters: Vec<String>,
    /// Whether torch's state has a `step`.
    pub(super) has_step: bool,
    /// All settings but learning rate and weight decay.
    pub(super) settings: Vec<TorchSetting>,
    /// The factors of the learning rate, each with the place of its field.
    rates: Vec<(String, f64)>,
    /// The index of the factor to adjust: the last `eta`.
    adjusted_rate: usize,
    /// The number of factors that a velocity contains, which are the first ones.
    velocity_rates: usize,
    /// The learning rate, if a schedule drives it.
    pub(super) driven_rate: Option<DrivenRate>,
    /// The weight decay in the gradient, and the decoupled one.
    pub(super) decays: [Decay; 2],
    /// Whether torch has both kinds of decay for this optimiser.
    pub(super) decay_has_kinds: bool,
}

/// A learning rate that follows a schedule.
#[derive(Clone, Debug)]
pub(super) struct DrivenRate {
    /// The leaf's own learning rate.
    pub(super) leaf_rate: f64,
    pub(super) schedule: Schedule,
}

/// A weight decay, and the place of its field.
#[derive(Clone, Debug, Default)]
pub(super) struct Decay {
    pub(super) lambda: f64,
    pub(super) place: Option<String>,
    /// Whether a schedule drives the decay.
    pub(super) is_driven: bool,
}

/// What torch has for a rule. torch's name is the first of each pair of names.
struct Definition {
    /// torch's class. `Adam` also means `AdamW`.
    kind: &'static str,
    /// State tensors.
    slots: &'static [(&'static str, &'static str)],
    /// Hyper-parameters that are fields of the rule.
    fields: &'static [(&'static str, &'static str)],
    /// Switches of torch, with the values that the rule corresponds to.
    flags: &'static [(&'static str, bool)],
    /// Hyper-parameters of torch that must be 0, because the rule has nothing like them.
    zeros: &'static [&'static str],
    has_step: bool,
}

const ADAM: Definition = Definition {
    kind: "Adam",
    slots: &[("exp_avg", "m"), ("exp_avg_sq", "v")],
    fields: &[("betas", "beta"), ("eps", "epsilon")],
    flags: &[("amsgrad", false)],
    zeros: &[],
    has_step: true,
};

const SGD: Definition = Definition {
    kind: "SGD",
    slots: &[],
    fields: &[],
    flags: &[],
    zeros: &["dampening"],
    has_step: false,
};

/// The definition of a rule that has a counterpart.
fn definition_of(rule: &str) -> Option<Definition> {
    Some(match rule {
        "Adam" | "AdamW" => ADAM,
        "AMSGradW" => Definition {
            slots: &[
                ("exp_avg", "m"),
                ("exp_avg_sq", "v"),
                ("max_exp_avg_sq", "largest_v"),
            ],
            flags: &[("amsgrad", true)],
            ..ADAM
        },
        "Descent" => Definition {
            flags: &[("nesterov", false)],
            ..SGD
        },
        "Momentum" => Definition {
            slots: &[("momentum_buffer", "velocity")],
            fields: &[("momentum", "rho")],
            flags: &[("nesterov", false)],
            ..SGD
        },
        "Nesterov" => Definition {
            slots: &[("momentum_buffer", "displacement")],
            fields: &[("momentum", "rho")],
            flags: &[("nesterov", true)],
            ..SGD
        },
        "RMSProp" => Definition {
            kind: "RMSprop",
            slots: &[("square_avg", "v")],
            fields: &[("alpha", "rho"), ("eps", "epsilon")],
            flags: &[],
            zeros: &[],
            has_step: true,
        },
        "AdaGrad" => Definition {
            kind: "Adagrad",
            slots: &[("sum", "sum_of_squares")],
            fields: &[("eps", "epsilon")],
            flags: &[],
            zeros: &["lr_decay"],
            has_step: true,
        },
        "Lion" => Definition {
            kind: "Lion",
            slots: &[("exp_avg", "m")],
            fields: &[("betas", "beta")],
            flags: &[],
            zeros: &[],
            has_step: false,
        },
        _ => return None,
    })
}

/// The main member, and for torch's RMSprop the later member with its velocity.
struct MainRule<'m> {
    members: &'m [MemberDescription<'m>],
    main: usize,
    velocity: Option<usize>,
}

impl<'m> MainRule<'m> {
    /// Finds the main member.
    ///
    /// # Errors
    /// If no member, or more than one, could be the main member.
    fn new(leaf: &Leaf, members: &'m [MemberDescription<'m>]) -> Result<Self> {
        let kind = |i: usize| members[i].rule.kind;
        let indices = |name: &str| {
            (0..members.len())
                .filter(|i| kind(*i) == name)
                .collect::<Vec<_>>()
        };
        let is_candidate = |i: &usize| definition_of(kind(*i)).is_some() && kind(*i) != "Descent";
        let mut candidates: Vec<usize> = (0..members.len()).filter(is_candidate).collect();
        let mut velocity = None;
        if let ([rms_prop], [momentum]) = (&indices("RMSProp")[..], &indices("Momentum")[..])
            && rms_prop < momentum
        {
            velocity = Some(*momentum);
            candidates.retain(|i| i != momentum);
        }
        // Next to another rule `Descent` is a factor of the learning rate.
        if candidates.is_empty() {
            candidates = indices("Descent");
        }
        match candidates[..] {
            [main] => Ok(MainRule {
                members,
                main,
                velocity,
            }),
            _ => {
                let names: Vec<&str> = candidates.iter().map(|i| kind(*i)).collect();
                let got = if names.is_empty() {
                    "none".to_string()
                } else {
                    names.join(" and ")
                };
                let problem = format!(
                    "the rules of {} with a counterpart in torch are",
                    leaf.optimiser().name()
                );
                Err(Error::new(ErrorKind::Unsupported, problem)
                    .with_got(got)
                    .with_expected(format_args!("exactly one of {RULES}"))
                    .at(leaf.path()))
            }
        }
    }

    /// The main member.
    fn member(&self) -> &'m MemberDescription<'m> {
        &self.members[self.main]
    }

    /// The member with the velocity of torch's RMSprop, if there is one.
    fn velocity_member(&self) -> Option<&'m MemberDescription<'m>> {
        self.velocity.map(|i| &self.members[i])
    }

    /// What torch has for the main member.
    fn definition(&self, path: &str) -> Result<Definition> {
        let member = self.member();
        let definition =
            definition_of(member.rule.kind).ok_or_else(|| unrepresentable(path, member.rule.kind))?;
        if member.flag("bias_correction") == Some(false) {
            return Err(unrepresentable(path, "moments without bias corrections"));
        }
        Ok(definition)
    }

    /// Returns [`Counterpart::settings`].
    fn settings(&self, leaf: &Leaf, definition: &Definition) -> Vec<TorchSetting> {
        let member = self.member();
        let fields = definition.fields.iter().filter_map(|(key, field)| {
            Some(TorchSetting::from_field(
                leaf,
                key,
                member.value(field)?,
                member.full_name(field),
            ))
        });
        let flags = definition
            .flags
            .iter()
            .map(|(key, flag)| TorchSetting::constant(key, *flag));
        let zeros = definition
            .zeros
            .iter()
            .map(|key| TorchSetting::constant(key, 0.0));
        let mut settings: Vec<TorchSetting> = fields.chain(flags).chain(zeros).collect();
        settings.push(TorchSetting::constant("maximize", self.maximises()));
        if definition.kind == "RMSprop" {
            settings.push(TorchSetting::constant("centered", self.is_centred(leaf)));
        }
        let has_momentum = settings.iter().any(|setting| setting.key == "momentum");
        if !has_momentum && ["SGD", "RMSprop"].contains(&definition.kind) {
            let momentum = self.velocity_member().and_then(|member| {
                Some(TorchSetting::from_field(
                    leaf,
                    "momentum",
                    member.value("rho")?,
                    member.full_name("rho"),
                ))
            });
            settings.push(momentum.unwrap_or_else(|| TorchSetting::constant("momentum", 0.0)));
        }
        settings
    }

    /// Returns [`Counterpart::slots`], all of them as used.
    fn slots(&self, leaf: &Leaf, definition: &Definition) -> Vec<TorchSlot> {
        let member = self.member();
        let velocity_sign = |name: &str| match name {
            "velocity" => Some(1.0),
            "displacement" => Some(-1.0),
            _ => None,
        };
        let slot = |(key, name): &(&'static str, &'static str)| {
            TorchSlot::new(key, member.full_name(name), velocity_sign(name))
        };
        let mut slots: Vec<TorchSlot> = definition.slots.iter().map(slot).collect();
        if definition.kind == "RMSprop" {
            slots.extend(
                self.is_centred(leaf)
                    .then(|| TorchSlot::new("grad_avg", member.full_name("m"), None)),
            );
            slots.extend(self.velocity_member().map(|velocity| {
                TorchSlot::new("momentum_buffer", velocity.full_name("velocity"), Some(1.0))
            }));
        }
        slots
    }

    /// Whether `RMSProp` has a state for the mean of gradients.
    fn is_centred(&self, leaf: &Leaf) -> bool {
        let mean = self.member().full_name("m");
        leaf.state.tensors().iter().any(|(name, _)| *name == mean)
    }

    /// Returns [`Counterpart::rates`], [`Counterpart::adjusted_rate`] and [`Counterpart::velocity_rates`].
    fn rates(&self) -> (Vec<(String, f64)>, usize, usize) {
        let (mut rates, mut adjusted_rate, mut velocity_rates) = (Vec::new(), 0, 0);
        for (i, member) in self.members.iter().enumerate().skip(self.main) {
            let field = match member.rule.kind {
                "Descent" => RATE,
                "Scale" => "alpha",
                _ if i == self.main || Some(i) == self.velocity => RATE,
                _ => continue,
            };
            if field == RATE {
                adjusted_rate = rates.len();
            }
            rates.extend(member.real(field).map(|value| (member.full_name(field), value)));
            if i <= self.velocity.unwrap_or(self.main) {
                velocity_rates = rates.len();
            }
        }
        (rates, adjusted_rate, velocity_rates)
    }

    /// The counters `t` of the main member, and of all members that make their steps together with the main
    /// member: the member with the velocity, and members without tensors, such as `Descent`.
    ///
    /// An average is left out, because torch lacks its tensors. Members before an accumulator are left out,
    /// because they count calls.
    fn counters(&self, leaf: &Leaf) -> Vec<String> {
        let (leaf_counters, tensors) = (leaf.counters(), leaf.tensor_names());
        let mut earlier = self.members[..self.main].iter();
        let last_accumulator = earlier.rposition(|member| member.rule.kind == "AccumGrad");
        let is_in_step = |i: &usize| {
            if last_accumulator.is_some_and(|accumulator| *i < accumulator) {
                return false;
            }
            let prefix = self.members[*i].full_name("");
            Some(*i) == self.velocity || tensors.iter().all(|name| !name.starts_with(&prefix))
        };
        let others = (0..self.members.len())
            .filter(|i| *i != self.main)
            .filter(is_in_step);
        let counters = std::iter::once(self.main)
            .chain(others)
            .map(|i| self.members[i].full_name("t"));
        counters
            .filter(|counter| leaf_counters.iter().any(|(name, _)| name == counter))
            .collect()
    }

    /// Returns [`Counterpart::decays`].
    fn decays(&self, leaf: &Leaf) -> Result<[Decay; 2]> {
        let path = leaf.path();
        let mut decays = [Decay::default(), Decay::default()];
        // torch adds the decay last, to the gradient that the main member gets.
        let changes_gradient = |member: &MemberDescription<'_>| {
            ["Scale", "Centralise", "GradNoise"].contains(&member.rule.kind)
                || member.rule.has_role(Role::Clip)
                || member.value("average") == Some(Average::Sum.into())
        };
        for (i, member) in self.members.iter().enumerate() {
            let (kind, field) = match member.rule.kind {
                "WeightDecay" if i > self.main => {
                    return Err(unrepresentable(path, "a WeightDecay after the rule"));
                }
                "WeightDecay"
                    if member.real("lambda") != Some(0.0)
                        && self.members[i..self.main].iter().any(changes_gradient) =>
                {
                    return Err(unrepresentable(
                        path,
                        "a WeightDecay before a Scale, a clip or another rule that changes the decay too",
                    )
                    .with_remedy("put the WeightDecay right before the rule"));
                }
                "WeightDecay" => (0, "lambda"),
                "DecoupledDecay" => (1, "decay_lambda"),
                _ if i == self.main => (1, "lambda"),
                _ => continue,
            };
            let Some(lambda) = member.real(field) else {
                continue;
            };
            let decay = &mut decays[kind];
            // A field with a decay of 0 gives way to a field with another decay.
            if decay.place.is_some() && lambda != 0.0 && decay.lambda != 0.0 {
                return Err(unrepresentable(path, "two weight decays of one kind"));
            }
            if decay.place.is_none() || lambda != 0.0 {
                let place = member.full_name(field);
                let is_driven = schedule_of(leaf, &place).is_some();
                *decay = Decay {
                    lambda,
                    place: Some(place),
                    is_driven,
                };
            }
            let maximum = member.real("decay_eta_max").unwrap_or(0.0);
            if kind == 1 && lambda != 0.0 && (maximum != 0.0 || member.flag("couple") == Some(false)) {
                return Err(unrepresentable(
                    path,
                    "a weight decay that is not in proportion to the learning rate",
                ));
            }
        }
        Ok(decays)
    }

    /// Whether the main member gets the gradient with the opposite sign, which is torch's `maximize`.
    fn maximises(&self) -> bool {
        let scales = self.members[..self.main]
            .iter()
            .filter(|member| member.rule.kind == "Scale");
        scales.filter_map(|member| member.real("alpha")).product::<f64>() < 0.0
    }
}

impl MemberDescription<'_> {
    fn value(&self, field: &str) -> Option<FieldValue> {
        self.rule
            .fields
            .iter()
            .find_map(|candidate| (candidate.name == field).then_some(candidate.value))
    }

    fn real(&self, field: &str) -> Option<f64> {
        if let Some(FieldValue::Real(value)) = self.value(field) {
            Some(value)
        } else {
            None
        }
    }

    fn flag(&self, field: &str) -> Option<bool> {
        if let Some(FieldValue::Flag(value)) = self.value(field) {
            Some(value)
        } else {
            None
        }
    }
}

/// The error that torch cannot express something.
pub(super) fn unrepresentable(path: &str, problem: impl Display) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("torch has no counterpart of {problem}"),
    )
    .at(path)
}

/// The schedule that drives the field at a place of the leaf's optimiser.
fn schedule_of<'l>(leaf: &'l Leaf, place: &str) -> Option<&'l Schedule> {
    let field = leaf.optimiser().description().fields_named(place).first()?.index;
    leaf.drives
        .as_ref()?
        .assignment_for(field)
        .map(|assignment| &*assignment.schedule)
}

/// The members of the leaf's acting optimiser that have fields. Refuses an optimiser that torch lacks.
fn members(leaf: &Leaf) -> Result<Vec<MemberDescription<'_>>> {
    // These are members of the acting optimiser, because torch's file has the values that schedules give in
    // this step.
    let description = leaf.acting().description();
    if description.has_alternatives() {
        return Err(unrepresentable(
            leaf.path(),
            "alternative rules, one acting at a time",
        ));
    }
    let mut members = description.all();
    let is_cautious_decay = |member: &MemberDescription<'_>| {
        member.rule.kind == "DecoupledDecay"
            && member.rule.settings.contains(&("cautious", Setting::Flag(true)))
    };
    if members.iter().any(is_cautious_decay) {
        return Err(unrepresentable(leaf.path(), "a cautious weight decay"));
    }
    members.retain(|member| !member.rule.fields.is_empty());
    Ok(members)
}

impl Counterpart {
    /// The counterpart of a leaf.
    ///
    /// # Errors
    /// If torch has no counterpart of the leaf's optimiser, or of its settings.
    pub(super) fn new(leaf: &Leaf) -> Result<Self> {
        let members = members(leaf)?;
        let rule = MainRule::new(leaf, &members)?;
        let definition = rule.definition(leaf.path())?;
        let settings = rule.settings(leaf, &definition);
        let mut slots = rule.slots(leaf, &definition);
        let has_no_momentum = settings
            .iter()
            .any(|setting| setting.key == "momentum" && setting.value == FieldValue::Real(0.0));
        slots
            .iter_mut()
            .for_each(|slot| slot.is_unused = has_no_momentum && slot.velocity_sign.is_some());
        check_slots(leaf, &slots)?;
        let (rates, adjusted_rate, velocity_rates) = rule.rates();
        let decays = rule.decays(leaf)?;
        let schedule = rates
            .get(adjusted_rate)
            .and_then(|(place, _)| schedule_of(leaf, place));
        let driven_rate = schedule.map(|schedule| {
            let value = |(place, _): &(String, f64)| -> Option<f64> { leaf.field(place)?.try_into().ok() };
            DrivenRate {
                leaf_rate: rates.iter().filter_map(value).product(),
                schedule: schedule.clone(),
            }
        });
        Ok(Counterpart {
            kind: definition.kind,
            slots,
            counters: rule.counters(leaf),
            has_step: definition.has_step,
            settings,
            rates,
            adjusted_rate,
            velocity_rates,
            driven_rate,
            decays,
            decay_has_kinds: definition.kind == "Adam",
        })
    }

    /// Whether torch's state has a velocity.
    pub(super) fn has_velocity(&self) -> bool {
        self.slots
            .iter()
            .any(|slot| slot.velocity_sign.is_some() && !slot.is_unused)
    }

    /// Whether torch's setting `key` is a switch that is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.settings
            .iter()
            .any(|setting| setting.key == key && setting.value == FieldValue::Flag(true))
    }

    /// torch's learning rate.
    pub(super) fn learning_rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| rate).product()
    }

    /// torch's learning rate if the field to adjust has the value `field`.
    pub(super) fn learning_rate_with(&self, field: f64) -> f64 {
        self.rates_with(field).product()
    }

    fn rates_with(&self, field: f64) -> impl Iterator<Item = f64> {
        let rates = self.rates.iter().enumerate();
        rates.map(move |(i, (_, rate))| if i == self.adjusted_rate { field } else { *rate })
    }

    /// The place of the field to adjust, and the value with which torch's rate is `learning_rate`.
    pub(super) fn field_for(&self, learning_rate: f64) -> Option<(&str, f64)> {
        let (place, value) = self.rates.get(self.adjusted_rate)?;
        let others: f64 = self
            .rates
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != self.adjusted_rate)
            .map(|(_, (_, rate))| rate)
            .product();
        // An equal rate keeps the field's value, so that neither f32 nor the division rounds the value. Under
        // a schedule `value` is the schedule's, and not the field's.
        let keeps_value = self.driven_rate.is_none() && is_same(learning_rate, self.learning_rate());
        Some((
            place,
            if keeps_value {
                *value
            } else {
                learning_rate / others
            },
        ))
    }

    /// The ratio of a velocity here to torch's, if the field to adjust has the value `field`.
    pub(super) fn velocity_scale(&self, field: f64) -> f64 {
        self.rates_with(field).take(self.velocity_rates).product()
    }

    /// The current value of the field to adjust.
    pub(super) fn adjusted_value(&self) -> f64 {
        self.rates.get(self.adjusted_rate).map_or(0.0, |(_, rate)| *rate)
    }

    /// The hyper-parameters as a group of torch's.
    ///
    /// # Errors
    /// If torch cannot express the hyper-parameters.
    pub(super) fn group(&self, path: &str) -> Result<Map<String, Value>> {
        let [coupled, decoupled] = self.decays.each_ref().map(|decay| decay.lambda);
        if coupled != 0.0 && decoupled != 0.0 {
            return Err(unrepresentable(
                path,
                "a decay in the gradient together with a decoupled decay",
            ));
        }
        let has_decay = match self.kind {
            "Adam" => true,
            "Lion" => coupled == 0.0,
            _ => decoupled == 0.0,
        };
        if !has_decay {
            return Err(unrepresentable(
                path,
                format!("this weight decay in {}", self.kind),
            ));
        }
        let mut group = Map::from_iter([
            ("lr".to_string(), json!(self.learning_rate())),
            (
                "weight_decay".to_string(),
                json!(if coupled == 0.0 { decoupled } else { coupled }),
            ),
        ]);
        group.extend(
            // Under another schedule the own rate has no effect, and torch would multiply it.
            self.driven_rate
                .iter()
                .filter(|rate| rate.schedule.is_relative)
                .map(|rate| (INITIAL_RATE.to_string(), json!(rate.leaf_rate))),
        );
        if self.decay_has_kinds {
            // Without any decay both kinds would be right, so the rule's field decides.
            let decouples = decoupled != 0.0 || coupled == 0.0 && self.decays[1].place.is_some();
            group.insert("decoupled_weight_decay".to_string(), decouples.into());
        }
        for TorchSetting { key, value, .. } in &self.settings {
            // Lion has no such option in torch.
            if self.kind == "Lion" && *key == "maximize" {
                if *value == FieldValue::Flag(true) {
                    return Err(unrepresentable(path, "an objective that is maximised in Lion"));
                }
                continue;
            }
            if !value.is_equal(*value, |number, _| number.is_finite()) {
                return Err(unrepresentable(path, format!("a {key} of {value}")));
            }
            group.insert(key.to_string(), json!(value.data()));
        }
        Ok(group)
    }
}

/// Whether two hyper-parameters are equal, up to a rounding to f32.
///
/// If a rate of torch's is a tensor, it is in f32. So one value may be the other rounded.
pub(super) fn is_same(a: f64, b: f64) -> bool {
    a == b || f64::from(a as f32) == b || f64::from(b as f32) == a
}

/// Refuses a state that lacks a tensor of the counterpart.
fn check_slots(leaf: &Leaf, slots: &[TorchSlot]) -> Result<()> {
    let tensors = leaf.state.tensors();
    let has_tensor = |slot: &TorchSlot| {
        tensors
            .iter()
            .any(|(name, tensor)| *name == slot.slot && !leaf.state.is_outer_master(tensor))
    };
    match slots.iter().find(|slot| !has_tensor(slot)) {
        Some(slot) => Err(unrepresentable(
            leaf.path(),
            format!("a state without {:?}", slot.slot),
        )),
        None => Ok(()),
    }
}
