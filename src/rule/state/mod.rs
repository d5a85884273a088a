//! The state of a rule for one parameter: named tensors, counters and numbers, nothing else.
//!
//! A state is a tree: the states of held rules are its `children`, in the order in which the rule describes
//! the held rules. The full name of an entry begins with the indices of the children that contain the entry,
//! as in `0.t`. Every list of entries has the order of `State::walk`, because checkpoints pair names with
//! memory by position.
//!
//! A wrapper or the size of the parameter may convert tensors to another format (`convert_tensors`,
//! `widen_small`).

pub(crate) mod copies;
pub(crate) mod held;
pub(crate) mod parts;
pub(crate) mod rows;
pub(crate) mod shared;
pub(crate) mod slot;
pub(crate) mod transfer;

use std::fmt;

use super::description::ChildPlace;
use super::{Adjust, Parameter};
use crate::engine::{Buffer, filled, rounded};
use crate::error::{Error, ErrorKind, Result, comma_separated};
use crate::numbers::codes::BLOCK;
use crate::numbers::{Code, DType, Records, Shape, compute_dtype, elem_count};
use crate::tensors::{Device, Tensor, Var};
use slot::{EntryTraits, Initial, Renewal, Sign, Slot, SlotFormat};

/// The state of one rule for one parameter: named tensors, counters and numbers.
///
/// The state includes the states of held rules. A rule's [`init`](crate::Rule::init) makes the state, and the
/// engines update its tensors in place.
#[must_use]
#[derive(Default)]
pub struct State {
    /// The copy of the parameter that steps are taken on: a master, or under `Offload` the copy on the CPU.
    pub(crate) master: Option<Buffer>,
    /// Under `Offload`, the values that go to the device after a step.
    ///
    /// `staging` is the variable of `master`, or scratch for the rounded master of a child. Scratch is
    /// overwritten in each step, hence never saved.
    pub(crate) staging: Option<Var>,
    pub(crate) tensors: Vec<(&'static str, Buffer)>,
    pub(crate) counters: Vec<(&'static str, u64)>,
    /// Real numbers that are not per element.
    pub(crate) numbers: Vec<(&'static str, f64)>,
    /// Properties of own entries besides their values. An entry without properties has no element here.
    pub(crate) traits: Vec<(&'static str, EntryTraits)>,
    /// Whether the tensors are parts of one sum. The tensors are then taken over from another state all
    /// together or not at all, because a part of the sum would give a wrong mean.
    pub(crate) is_taken_whole: bool,
    pub(crate) children: Vec<Child>,
}

/// The state of a held rule.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) place: ChildPlace,
    pub(crate) state: State,
}

/// All values that can be written in a state and in the states of held rules.
#[derive(Debug, Default)]
pub(crate) struct StateValues<'s> {
    pub(crate) tensors: Vec<&'s mut Buffer>,
    pub(crate) counters: Vec<&'s mut u64>,
    pub(crate) numbers: Vec<&'s mut f64>,
}

/// Lists the entries by their full names: tensors, then counters and numbers.
///
/// A tensor has its format and shape, but no elements.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |(name, tensor): (String, &Buffer)| {
            format!("{name} {} {:?}", SlotFormat::from_buffer(tensor), tensor.shape())
        };
        let tensors = self.tensors().into_iter().map(text);
        let counters = self
            .counters()
            .into_iter()
            .map(|(name, count)| format!("{name} {count}"));
        let numbers = self
            .numbers()
            .into_iter()
            .map(|(name, number)| format!("{name} {number:?}"));
        f.write_str(&comma_separated(
            &tensors.chain(counters).chain(numbers).collect::<Vec<_>>(),
        ))
    }
}

impl State {
    /// No state at all.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Tensors of the shape and on the device of `x`, and one counter `t` of applied steps.
    ///
    /// # Errors
    /// If a slot cannot be stored in its format, see [`Slot::stored_as`]; if the device has no memory left.
    pub fn for_slots(x: Parameter<'_>, slots: &[Slot]) -> Result<Self> {
        let state = slots
            .iter()
            .try_fold(State::empty().with_counter("t"), |state, slot| {
                state.with_slot(*slot, x, x.shape())
            })?;
        // If all tensors are copies, new weights leave nothing of the earlier steps, so `t` becomes 0, too.
        let only_copies = !slots.is_empty() && slots.iter().all(|slot| slot.initial == Initial::Parameter);
        Ok(if only_copies {
            state.zeroed_by_new_weights("t")
        } else {
            state
        })
    }

    /// Adds a tensor of this `shape`, which may differ from the shape of `x`.
    ///
    /// # Errors
    /// As [`State::for_slots`].
    pub fn with_slot(mut self, slot: Slot, x: Parameter<'_>, shape: impl Into<Shape>) -> Result<Self> {
        let shape = crate::tensors::Shape::from(shape.into().dims());
        let dtype = if let Some(SlotFormat::Dtype(dtype)) = slot.format {
            dtype
        } else {
            compute_dtype(x.dtype())
        };
        let copy_renewal = if slot.is_average {
            Renewal::Average
        } else {
            Renewal::Copy
        };
        let renewal = (slot.initial == Initial::Parameter).then_some(copy_renewal);
        // The traits are set first, because `traits_of` and `code_of` read them.
        if slot.sign.is_some() || renewal.is_some() || slot.needs_f32 {
            *self.traits_mut(slot.name) = EntryTraits {
                sign: slot.sign,
                renewal,
                needs_f32: slot.needs_f32,
                ..EntryTraits::default()
            };
        }
        self.traits_of(slot.name)
            .check_format(slot.name, slot.format.unwrap_or(dtype.into()))?;
        let code = (slot.format == Some(SlotFormat::Q8)).then(|| self.code_of(slot.name));
        let buffer_of =
            |values: &Tensor| code.map_or_else(|| Buffer::new(values), |code| Buffer::coded(values, code));
        let buffer = match slot.initial {
            // Zeros take no memory before the first write, so that `StoreAs` can change the format for free.
            Initial::Value(0.0) => Buffer::of_zeros(shape, dtype, code.map(Records::Codes), x.device())?,
            Initial::Value(initial) => buffer_of(&filled(initial, shape, dtype, x.device())?)?,
            Initial::Parameter => buffer_of(&rounded(&x.values()?, dtype)?.broadcast_as(shape)?)?,
        };
        self.tensors.push((
            slot.name,
            buffer.of_squares(slot.sign == Some(Sign::SecondMoment)),
        ));
        Ok(self)
    }

    /// Adds a tensor with the buffer of its elements.
    pub(crate) fn with_buffer(mut self, name: &'static str, buffer: Buffer) -> Self {
        self.tensors.push((name, buffer));
        self
    }

    /// Adds a counter that starts at 0.
    pub fn with_counter(mut self, name: &'static str) -> Self {
        self.counters.push((name, 0));
        self
    }

    /// Adds a number that is not per element, such as the sum of a rule's weights. Checkpoints save it.
    ///
    /// `range` is a function of [`range`](crate::range), or a similar function. A finite number outside of
    /// the range is refused in a file and by [`set_entries`](crate::StateTree::set_entries). If a step has
    /// set such a number, no checkpoint is saved either, so the range has to contain all numbers that steps
    /// can set.
    pub fn with_number(
        mut self,
        name: &'static str,
        value: f64,
        range: fn(f64) -> Option<&'static str>,
    ) -> Self {
        self.numbers.push((name, value));
        self.traits_mut(name).range = Some(range);
        self
    }

    /// The state of a store that has a master, around the state of its rule.
    pub(crate) fn with_master(master: &Tensor, inner: State) -> Result<Self> {
        Ok(State {
            master: Some(Buffer::new(master)?),
            ..State::default()
        }
        .with_rule_state(inner))
    }

    /// The master, whose rounded value the parameter has to have. The master may be inside an `Offload`.
    pub(crate) fn outer_master(&self) -> Option<&Buffer> {
        match (&self.master, self.inside_store()) {
            (None, Some(inner)) => inner.outer_master(),
            (master, _) => master.as_ref(),
        }
    }

    /// Whether `tensor` is the [`State::outer_master`].
    pub(crate) fn is_outer_master(&self, tensor: &Buffer) -> bool {
        self.outer_master()
            .is_some_and(|master| std::ptr::eq(master, tensor))
    }

    /// The state of the rule or store inside this state of a store.
    pub(crate) fn inside_store(&self) -> Option<&State> {
        match &self.children[..] {
            [
                Child {
                    place: ChildPlace::Stored,
                    state,
                },
            ] => Some(state),
            _ => None,
        }
    }

    /// Makes this state the state of a store, around the state of its rule.
    pub(crate) fn with_rule_state(mut self, rule: State) -> Self {
        self.children.push(Child {
            place: ChildPlace::Stored,
            state: rule,
        });
        self
    }

    pub(super) fn traits_of(&self, name: &str) -> EntryTraits {
        entry(&self.traits, name).copied().unwrap_or_default()
    }

    pub(super) fn traits_mut(&mut self, name: &'static str) -> &mut EntryTraits {
        let index = self
            .traits
            .iter()
            .position(|(entry, _)| *entry == name)
            .unwrap_or_else(|| {
                self.traits.push((name, EntryTraits::default()));
                self.traits.len() - 1
            });
        &mut self.traits[index].1
    }

    /// Visits this state, then the states of held rules in order, each with the prefix of its full names.
    pub(super) fn walk<'s>(&'s self, prefix: &str, visit: &mut dyn FnMut(&str, &'s State)) {
        visit(prefix, self);
        for child in &self.children {
            child.state.walk(&child.prefix(prefix), visit);
        }
    }

    /// Every tensor under its full name. The rule's own tensors come first.
    pub(crate) fn tensors(&self) -> Vec<(String, &Buffer)> {
        self.with_full_names(State::own_tensors)
    }

    /// Every counter under its full name.
    pub(crate) fn counters(&self) -> Vec<(String, u64)> {
        self.with_full_names(|state| state.counters.iter().copied())
    }

    /// Every number under its full name.
    pub(crate) fn numbers(&self) -> Vec<(String, f64)> {
        self.with_full_names(|state| state.numbers.iter().copied())
    }

    /// The entries that `own_entries` lists for this state and the states of held rules, under their full
    /// names.
    fn with_full_names<'s, T, I: Iterator<Item = (&'static str, T)>>(
        &'s self,
        own_entries: impl Fn(&'s State) -> I,
    ) -> Vec<(String, T)> {
        let mut entries = Vec::new();
        self.walk("", &mut |prefix, state| {
            entries.extend(own_entries(state).map(|(name, value)| (format!("{prefix}{name}"), value)));
        });
        entries
    }

    /// The tensors of this state, without those of held rules. The master comes first.
    pub(super) fn own_tensors(&self) -> impl Iterator<Item = (&'static str, &Buffer)> {
        let master = self.master.iter().map(|buffer| ("master", buffer));
        master.chain(self.tensors.iter().map(|(name, buffer)| (*name, buffer)))
    }

    /// The range, in words, of the number with this full name, if `value` is finite and out of this range.
    ///
    /// Infinity and NaN are no fault here, because a program may [accept
    /// them](crate::CheckpointFile::accepting_non_finite).
    pub(crate) fn number_fault(&self, name: &str, value: f64) -> Option<&'static str> {
        let mut expected = None;
        self.walk("", &mut |prefix, state| {
            let own_name = name
                .strip_prefix(prefix)
                .filter(|name| entry(&state.numbers, name).is_some());
            expected = expected.or_else(|| state.traits_of(own_name?).range?(value));
        });
        expected.filter(|_| value.is_finite())
    }

    /// All values, in the order of [`State::tensors`], [`State::counters`] and [`State::numbers`].
    pub(crate) fn values_mut(&mut self) -> StateValues<'_> {
        let mut values = StateValues::default();
        self.collect_mut(&mut values);
        values
    }

    fn collect_mut<'s>(&'s mut self, values: &mut StateValues<'s>) {
        // The order has to be that of `walk`: see the head of this file.
        values.tensors.extend(self.master.as_mut());
        values
            .tensors
            .extend(self.tensors.iter_mut().map(|(_, buffer)| buffer));
        values
            .counters
            .extend(self.counters.iter_mut().map(|(_, count)| count));
        values
            .numbers
            .extend(self.numbers.iter_mut().map(|(_, value)| value));
        for child in &mut self.children {
            child.state.collect_mut(values);
        }
    }

    /// A copy with storage of its own, on the same devices.
    pub(crate) fn copy(&self) -> Result<Self> {
        self.map_tensors(&|buffer| buffer.copy_on(buffer.device()))
    }

    /// A copy with all tensors on `device`.
    pub(crate) fn to_device(&self, device: &Device) -> Result<Self> {
        self.map_tensors(&|buffer| buffer.copy_on(device))
    }

    fn map_tensors(&self, map_buffer: &dyn Fn(&Buffer) -> Result<Buffer>) -> Result<Self> {
        let map_child = |child: &Child| {
            Ok(Child {
                place: child.place,
                state: child.state.map_tensors(map_buffer)?,
            })
        };
        let master = self.master.as_ref().map(map_buffer).transpose()?;
        let staging = match (&self.staging, &master) {
            // `staging` is the variable of the master, so both copies have to be one variable, too.
            (Some(_), Some(master)) => master.variable().cloned(),
            (Some(scratch), None) => Some(Var::zeros(scratch.shape(), scratch.dtype(), scratch.device())?),
            (None, _) => None,
        };
        Ok(State {
            staging,
            tensors: self
                .tensors
                .iter()
                .map(|(name, old)| Ok((*name, map_buffer(old)?)))
                .collect::<Result<_>>()?,
            counters: self.counters.clone(),
            numbers: self.numbers.clone(),
            traits: self.traits.clone(),
            is_taken_whole: self.is_taken_whole,
            children: self.children.iter().map(map_child).collect::<Result<_>>()?,
            master,
        })
    }
}

/// The entry with this name, in a list of entries of one state.
pub(crate) fn entry<'e, T>(entries: &'e [(&'static str, T)], name: &str) -> Option<&'e T> {
    entries
        .iter()
        .find(|(other, _)| *other == name)
        .map(|(_, entry)| entry)
}

/// [`entry`], mutable.
pub(crate) fn entry_mut<'e, T>(entries: &'e mut [(&'static str, T)], name: &str) -> Option<&'e mut T> {
    entries
        .iter_mut()
        .find(|(other, _)| *other == name)
        .map(|(_, entry)| entry)
}

impl Child {
    /// The prefix of the child's full names, inside the prefix `outer` of its parent.
    pub(super) fn prefix(&self, outer: &str) -> String {
        self.place
            .number()
            .map_or_else(|| outer.to_string(), |i| format!("{outer}{i}."))
    }
}

/// The error for a state whose layout is not that of `rule`. A rule must not return the bare gradient
/// instead, because the bare gradient would be a step of another size.
pub(crate) fn state_of_another_rule<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(another_rule_error(&rule.name()))
}

pub(in crate::rule) fn another_rule_error(rule: &str) -> Error {
    Error::new(ErrorKind::Contract, format!("the state was not made by {rule}"))
        .with_remedy("keep the state that the `init` of each rule made, also of each held rule")
}

/// The fewest elements of a tensor that is stored in 8 bits: a multiple of [`BLOCK`].
const LEAST_CODED: usize = 32 * BLOCK;

impl State {
    /// The 8-bit code for the tensor with this name.
    pub(crate) fn code_of(&self, slot: &str) -> Code {
        if self.traits_of(slot).sign.is_some() {
            Code::NonNegative
        } else {
            Code::Signed
        }
    }

    /// Converts tensors to `format`, also of held rules, and returns the number of converted tensors.
    ///
    /// With a `name`, all tensors with this name are converted, and the format must fit each of them. Without
    /// a name, all tensors that are precise in this format are converted.
    pub(crate) fn convert_tensors(&mut self, name: Option<&str>, format: SlotFormat) -> Result<usize> {
        let mut converted = 0;
        for index in 0..self.tensors.len() {
            let tensor_name = self.tensors[index].0;
            let (traits, code) = (self.traits_of(tensor_name), self.code_of(tensor_name));
            match name {
                Some(name) if name == tensor_name => traits.check_format(tensor_name, format)?,
                None if traits.is_precise_in(format) => {}
                _ => continue,
            }
            converted += 1;
            let buffer = &mut self.tensors[index].1;
            let new_buffer = match format {
                // Zeros are made anew, because a conversion would make a copy in F32, which for 8 bits takes
                // several times the memory of the state.
                _ if buffer.is_zero() => {
                    let (dtype, records) = match format {
                        SlotFormat::Dtype(dtype) => (dtype, None),
                        SlotFormat::Q8 => (DType::U8, Some(Records::Codes(code))),
                    };
                    Buffer::of_zeros(buffer.shape().into(), dtype, records, buffer.device())?
                }
                SlotFormat::Dtype(dtype) => Buffer::new(&rounded(&buffer.tensor()?, dtype)?)?,
                SlotFormat::Q8 => Buffer::coded(&buffer.tensor()?, code)?,
            };
            // The new buffer has to be marked as a buffer of squares again. By this mark, checks of gradients
            // find squares that would overflow.
            *buffer = new_buffer.of_squares(buffer.is_of_squares());
        }
        self.children.iter_mut().try_fold(converted, |converted, child| {
            Ok(converted + child.state.convert_tensors(name, format)?)
        })
    }

    /// Converts tensors that are too small for 8 bits back to F32. The state is for `part` elements of a
    /// parameter with `whole` elements.
    pub(crate) fn widen_small(&mut self, part: usize, whole: usize) -> Result<()> {
        for (_, buffer) in self
            .tensors
            .iter_mut()
            .filter(|(_, buffer)| buffer.code().is_some())
        {
            // A tensor with the length of the part counts with the length of the whole parameter, so that all
            // ranks decide alike.
            let elements = elem_count(buffer.shape());
            let whole_elements = if elements == part { whole } else { elements };
            if whole_elements < LEAST_CODED {
                *buffer = Buffer::new(&buffer.tensor()?)?.of_squares(buffer.is_of_squares());
            }
        }
        self.children
            .iter_mut()
            .try_for_each(|child| child.state.widen_small(part, whole))
    }
}
