//! The counterpart of a leaf in torch: the optimiser that one of the leaf's rules corresponds to, and torch's
//! names of state and hyper-parameters.
//!
//! One optimiser of torch's may be several rules here. [`Counterpart::of`] flattens them into members:
//!
//! 1. [`FoundRule::of`] finds the only member with a [`Definition`]. `Descent` counts only if there is no
//!    other, and a `Momentum` after `RMSProp` is the momentum of torch's RMSprop.
//! 2. torch's `lr` is the product of the rates from that member on. The last `eta` is the one to adjust.
//! 3. torch's velocity does not contain `lr`. A velocity here contains the rates up to that of its own
//!    member.
//! 4. A `WeightDecay` before the member is in the gradient. The member's own decay and that of a
//!    `DecoupledDecay` are decoupled.

use std::fmt::Display;

use serde_json::{Map, Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::rule::description::MemberDescription;
use crate::rule::field::FieldValue;
use crate::rule::{RATE, Setting};
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

/// A state tensor of torch.
#[derive(Clone, Debug)]
pub(super) struct TorchSlot {
    pub(super) key: &'static str,
    /// The state tensor here.
    pub(super) slot: String,
    /// The sign of a velocity, which is torch's times a learning rate. `None` for tensors equal to torch's.
    pub(super) velocity: Option<f64>,
    /// Whether torch has no such tensor, because the momentum is 0. A file of this crate has it, for a later
    /// momentum.
    pub(super) is_unused: bool,
}

impl TorchSlot {
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
    /// The counters here that are torch's `step`, first that of the rule with the state.
    pub(super) counters: Vec<String>,
    /// Whether torch's state has a `step`.
    pub(super) has_step: bool,
    /// All settings but learning rate and weight decay.
    pub(super) settings: Vec<TorchSetting>,
    /// The factors of the learning rate, each with the place of its field.
    rates: Vec<(String, f64)>,
    /// The index of the factor to adjust: the last `eta`.
    rate: usize,
    /// The number of factors that a velocity contains, which are the first ones.
    inner: usize,
    /// The schedule of the learning rate, if one drives it.
    pub(super) driven: Option<DrivenRate>,
    /// The weight decay in the gradient, and the decoupled one.
    pub(super) decay: [Decay; 2],
    /// Whether torch has both kinds of decay for this optimiser.
    pub(super) decay_has_kinds: bool,
}

/// A learning rate that follows a schedule.
#[derive(Clone, Debug)]
pub(super) struct DrivenRate {
    /// The leaf's own learning rate.
    pub(super) own: f64,
    pub(super) schedule: Schedule,
}

/// A weight decay, and the place of its field.
#[derive(Clone, Debug, Default)]
pub(super) struct Decay {
    pub(super) lambda: f64,
    pub(super) place: Option<String>,
    /// Whether a schedule drives it.
    pub(super) is_driven: bool,
}

/// What torch has for a rule. In pairs of names torch's is the first.
struct Definition {
    /// torch's class. `Adam` also means `AdamW`.
    kind: &'static str,
    /// State tensors.
    slots: &'static [(&'static str, &'static str)],
    /// Hyper-parameters that are fields of the rule.
    fields: &'static [(&'static str, &'static str)],
    /// Switches of torch, with the value that the rule corresponds to.
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

const SGD: Definition =
    Definition { kind: "SGD", slots: &[], fields: &[], flags: &[], zeros: &["dampening"], has_step: false };

fn definition(rule: &str) -> Option<Definition> {
    Some(match rule {
        "Adam" | "AdamW" => ADAM,
        "AMSGradW" => Definition {
            slots: &[("exp_avg", "m"), ("exp_avg_sq", "v"), ("max_exp_avg_sq", "largest_v")],
            flags: &[("amsgrad", true)],
            ..ADAM
        },
        "Descent" => Definition { flags: &[("nesterov", false)], ..SGD },
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

/// The member that has a counterpart (`own`), and for torch's RMSprop the later member with its velocity.
struct FoundRule<'m> {
    members: &'m [MemberDescription<'m>],
    own: usize,
    velocity: Option<usize>,
}

impl<'m> FoundRule<'m> {
    fn of(leaf: &Leaf, members: &'m [MemberDescription<'m>]) -> Result<Self> {
        let known = |i: &usize| definition(members[*i].rule.kind).is_some();
        let places =
            |name: &str| (0..members.len()).filter(|i| members[*i].rule.kind == name).collect::<Vec<_>>();
        let mut with_state: Vec<usize> =
            (0..members.len()).filter(known).filter(|i| members[*i].rule.kind != "Descent").collect();
        let mut velocity = None;
        if let ([mean], [momentum]) = (&places("RMSProp")[..], &places("Momentum")[..])
            && mean < momentum
        {
            velocity = Some(*momentum);
            with_state.retain(|i| i != momentum);
        }
        // Next to another rule `Descent` is a factor of the learning rate.
        if with_state.is_empty() {
            with_state = places("Descent");
        }
        match with_state[..] {
            [own] => Ok(FoundRule { members, own, velocity }),
            _ => {
                let names: Vec<&str> = with_state.iter().map(|i| members[*i].rule.kind).collect();
                let found = if names.is_empty() { "none".to_string() } else { names.join(" and ") };
                let problem =
                    format!("the rules of {} with a counterpart in torch are", leaf.optimiser().name());
                Err(Error::new(ErrorKind::Unsupported, problem)
                    .with_got(found)
                    .with_expected(format_args!("exactly one of {RULES}"))
                    .at(leaf.path()))
            }
        }
    }

    fn own(&self) -> &'m MemberDescription<'m> {
        &self.members[self.own]
    }

    /// Returns [`Counterpart::rates`], [`Counterpart::rate`] and [`Counterpart::inner`].
    fn rates(&self) -> (Vec<(String, f64)>, usize, usize) {
        let (mut rates, mut rate, mut inner) = (Vec::new(), 0, 0);
        for (i, member) in self.members.iter().enumerate().skip(self.own) {
            let field = match member.rule.kind {
                "Descent" => RATE,
                "Scale" => "alpha",
                _ if i == self.own || Some(i) == self.velocity => RATE,
                _ => continue,
            };
            if field == RATE {
                rate = rates.len();
            }
            rates.extend(member.real(field).map(|value| (member.at(field), value)));
            if i <= self.velocity.unwrap_or(self.own) {
                inner = rates.len();
            }
        }
        (rates, rate, inner)
    }

    /// The counters `t` of this rule, and of all members that make their steps together with the rule. Those
    /// have the velocity, or no tensor, as `Descent`. An average has tensors that torch lacks, and what
    /// stands before an accumulator counts calls.
    fn counters(&self, leaf: &Leaf) -> Vec<String> {
        let (known, tensors) = (leaf.counters(), leaf.tensor_names());
        let before = self.members[..self.own].iter().rposition(|member| member.rule.kind == "AccumGrad");
        let follows = |i: &usize| {
            if before.is_some_and(|accumulator| *i < accumulator) {
                return false;
            }
            let place = self.members[*i].at("");
            Some(*i) == self.velocity || tensors.iter().all(|name| !name.starts_with(&place))
        };
        let others = (0..self.members.len()).filter(|i| *i != self.own).filter(follows);
        let counters = std::iter::once(self.own).chain(others).map(|i| self.members[i].at("t"));
        counters.filter(|counter| known.iter().any(|(name, _)| name == counter)).collect()
    }

    /// The decay in the gradient, and the decoupled one.
    fn decay(&self, path: &str) -> Result<[Decay; 2]> {
        let mut decay = [Decay::default(), Decay::default()];
        for (i, member) in self.members.iter().enumerate() {
            let (kind, field) = match member.rule.kind {
                "WeightDecay" if i > self.own => {
                    return Err(unrepresentable(path, "a WeightDecay after the rule"));
                }
                "WeightDecay" => (0, "lambda"),
                "DecoupledDecay" => (1, "decay_lambda"),
                _ if i == self.own => (1, "lambda"),
                _ => continue,
            };
            let Some(lambda) = member.real(field) else { continue };
            // Fields with a decay of 0 give way to one that is not 0.
            if decay[kind].place.is_some() && lambda != 0.0 && decay[kind].lambda != 0.0 {
                return Err(unrepresentable(path, "two weight decays of one kind"));
            }
            if decay[kind].place.is_none() || lambda != 0.0 {
                decay[kind] = Decay { lambda, place: Some(member.at(field)), is_driven: false };
            }
            let maximum = member.real("decay_eta_max").unwrap_or(0.0);
            if kind == 1 && lambda != 0.0 && (maximum != 0.0 || member.flag("couple") == Some(false)) {
                return Err(unrepresentable(
                    path,
                    "a weight decay that is not in proportion to the learning rate",
                ));
            }
        }
        Ok(decay)
    }

    /// Whether the rule gets the gradient with the opposite sign, which is torch's `maximize`.
    fn maximises(&self) -> bool {
        let before = self.members[..self.own].iter().filter(|member| member.rule.kind == "Scale");
        before.filter_map(|member| member.real("alpha")).product::<f64>() < 0.0
    }
}

impl MemberDescription<'_> {
    fn value(&self, field: &str) -> Option<FieldValue> {
        self.rule.fields.iter().find_map(|known| (known.name == field).then_some(known.value))
    }

    fn real(&self, field: &str) -> Option<f64> {
        if let Some(FieldValue::Real(value)) = self.value(field) { Some(value) } else { None }
    }

    fn flag(&self, field: &str) -> Option<bool> {
        if let Some(FieldValue::Flag(value)) = self.value(field) { Some(value) } else { None }
    }
}

pub(super) fn unrepresentable(path: &str, what: impl Display) -> Error {
    Error::new(ErrorKind::Unsupported, format!("torch has no counterpart of {what}")).at(path)
}

impl Counterpart {
    pub(super) fn of(leaf: &Leaf) -> Result<Self> {
        let path = leaf.path();
        // The acting optimiser, because torch's file has the values that schedules give in this step.
        let description = leaf.acting().description();
        if description.has_alternatives() {
            return Err(unrepresentable(path, "alternative rules, one acting at a time"));
        }
        let mut members = description.all();
        if members.iter().any(|member| {
            member.rule.kind == "DecoupledDecay"
                && member.rule.settings.contains(&("cautious", Setting::Flag(true)))
        }) {
            return Err(unrepresentable(path, "a cautious weight decay"));
        }
        members.retain(|member| !member.rule.fields.is_empty());
        let found = FoundRule::of(leaf, &members)?;
        let own = found.own();
        let definition = definition(own.rule.kind).ok_or_else(|| unrepresentable(path, own.rule.kind))?;
        if own.flag("bias_correction") == Some(false) {
            return Err(unrepresentable(path, "moments without bias corrections"));
        }
        let schedule = |place: &str| {
            let field = leaf.optimiser().description().fields_named(place).first()?.index;
            leaf.drives.as_ref()?.of_field(field).map(|given| &*given.schedule)
        };
        let setting = |key, value: FieldValue, place: Option<String>| {
            let is_driven = place.as_deref().and_then(schedule).is_some();
            TorchSetting { key, value, place, is_driven }
        };
        let named = definition
            .fields
            .iter()
            .filter_map(|(key, field)| Some(setting(*key, own.value(field)?, Some(own.at(field)))));
        let mut settings: Vec<TorchSetting> = named.collect();
        settings.extend(definition.flags.iter().map(|(key, flag)| setting(*key, (*flag).into(), None)));
        settings.extend(definition.zeros.iter().map(|key| setting(*key, 0.0.into(), None)));
        settings.push(setting("maximize", found.maximises().into(), None));
        let slot =
            |key, slot: String, velocity: Option<f64>| TorchSlot { key, slot, velocity, is_unused: false };
        let sign = |name: &str| match name {
            "velocity" => Some(1.0),
            "displacement" => Some(-1.0),
            _ => None,
        };
        let mut slots: Vec<TorchSlot> =
            definition.slots.iter().map(|(key, name)| slot(*key, own.at(name), sign(name))).collect();
        if definition.kind == "RMSprop" {
            let mean = own.at("m");
            let is_centred = leaf.state.tensors().iter().any(|(name, _)| *name == mean);
            settings.push(setting("centered", is_centred.into(), None));
            slots.extend(is_centred.then(|| slot("grad_avg", mean, None)));
            let velocity = found.velocity.map(|i| &members[i]);
            slots.extend(velocity.map(|member| slot("momentum_buffer", member.at("velocity"), Some(1.0))));
        }
        if settings.iter().all(|setting| setting.key != "momentum")
            && ["SGD", "RMSprop"].contains(&definition.kind)
        {
            let velocity = found.velocity.map(|i| &members[i]);
            let momentum = velocity.and_then(|member| Some((member.value("rho")?, Some(member.at("rho")))));
            let (value, place) = momentum.unwrap_or((0.0.into(), None));
            settings.push(setting("momentum", value, place));
        }
        if settings.iter().any(|setting| setting.key == "momentum" && setting.value == FieldValue::Real(0.0))
        {
            slots.iter_mut().for_each(|slot| slot.is_unused = slot.velocity.is_some());
        }
        check_slots(leaf, &slots)?;
        let (rates, rate, inner) = found.rates();
        let mut decay = found.decay(path)?;
        for decay in &mut decay {
            decay.is_driven = decay.place.as_deref().and_then(schedule).is_some();
        }
        let driven = rates.get(rate).and_then(|(place, _)| schedule(place)).map(|schedule| {
            let own = |(place, _): &(String, f64)| -> Option<f64> { leaf.field(place)?.try_into().ok() };
            DrivenRate { own: rates.iter().filter_map(own).product(), schedule: schedule.clone() }
        });
        Ok(Counterpart {
            kind: definition.kind,
            slots,
            counters: found.counters(leaf),
            has_step: definition.has_step,
            settings,
            rates,
            rate,
            inner,
            driven,
            decay,
            decay_has_kinds: definition.kind == "Adam",
        })
    }

    /// Whether torch's state has a velocity.
    pub(super) fn has_velocity(&self) -> bool {
        self.slots.iter().any(|slot| slot.velocity.is_some() && !slot.is_unused)
    }

    /// Whether torch's setting `key` is a switch that is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.settings.iter().any(|setting| setting.key == key && setting.value == FieldValue::Flag(true))
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
        self.rates.iter().enumerate().map(move |(i, (_, rate))| if i == self.rate { field } else { *rate })
    }

    /// The place of the field to adjust for `learning_rate`, and the value that it then needs.
    pub(super) fn field_for(&self, learning_rate: f64) -> Option<(&str, f64)> {
        let (place, value) = self.rates.get(self.rate)?;
        let others: f64 = self
            .rates
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != self.rate)
            .map(|(_, (_, rate))| rate)
            .product();
        // An equal rate keeps the field's value, so that neither f32 nor the division rounds it. Under a
        // schedule `value` is that of a step, and not the field's.
        let is_same = self.driven.is_none() && same(learning_rate, self.learning_rate());
        Some((place, if is_same { *value } else { learning_rate / others }))
    }

    /// What a velocity here is, as a multiple of torch's, if the field to adjust has the value `field`.
    pub(super) fn velocity_scale(&self, field: f64) -> f64 {
        self.rates_with(field).take(self.inner).product()
    }

    /// The current value of the field to adjust.
    pub(super) fn own_rate(&self) -> f64 {
        self.rates.get(self.rate).map_or(0.0, |(_, rate)| *rate)
    }

    /// The hyper-parameters as a group of torch's. An error if torch cannot express them.
    pub(super) fn group(&self, path: &str) -> Result<Map<String, Value>> {
        let [coupled, decoupled] = [&self.decay[0], &self.decay[1]].map(|decay| decay.lambda);
        if coupled != 0.0 && decoupled != 0.0 {
            return Err(unrepresentable(path, "a decay in the gradient together with a decoupled decay"));
        }
        let takes = match self.kind {
            "Adam" => true,
            "Lion" => coupled == 0.0,
            _ => decoupled == 0.0,
        };
        if !takes {
            return Err(unrepresentable(path, format!("this weight decay in {}", self.kind)));
        }
        let mut group = Map::from_iter([
            ("lr".to_string(), json!(self.learning_rate())),
            ("weight_decay".to_string(), json!(if coupled == 0.0 { decoupled } else { coupled })),
        ]);
        group.extend(self.driven.iter().map(|driven| (INITIAL_RATE.to_string(), json!(driven.own))));
        if self.decay_has_kinds {
            // Without any decay both kinds are right; this one is the rule's own.
            let decouples = decoupled != 0.0 || coupled == 0.0 && self.decay[1].place.is_some();
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

/// Whether two hyper-parameters are equal, up to a rounding of one to f32, the dtype of a rate that torch has
/// as a tensor.
pub(super) fn same(a: f64, b: f64) -> bool {
    a == b || f64::from(a as f32) == b || f64::from(b as f32) == a
}

/// Refuses a state that lacks a tensor of the counterpart.
fn check_slots(leaf: &Leaf, slots: &[TorchSlot]) -> Result<()> {
    let tensors = leaf.state.tensors();
    let has = |slot: &TorchSlot| {
        tensors.iter().any(|(name, tensor)| *name == slot.slot && !leaf.state.is_followed(tensor))
    };
    match slots.iter().find(|slot| !has(slot)) {
        Some(slot) => Err(unrepresentable(leaf.path(), format!("a state without {:?}", slot.slot))),
        None => Ok(()),
    }
}
