//! The leaves of a call as tables, one for each kind of leaf.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::{DType, Tensor};

use super::machine::{Launch, Machine};
use super::print::{CHUNK, Program};
use super::recording::{End, Recording, Role, Work, record};
use crate::engine::Buffer;
use crate::engine::cpu::{Fold, chunk_length};
use crate::error::Result;

/// What a machine is to do in one call.
pub(super) struct Batch<'a, M: Machine<'a>> {
    machine: M,
    groups: Vec<Group<M::Function>>,
    call: std::marker::PhantomData<&'a ()>,
}

/// Leaves with the same recording.
struct Group<F> {
    recording: Recording,
    printed: Arc<Printed>,
    /// Nothing, if it does not compile.
    function: Option<F>,
    rows: Vec<u64>,
    firsts: Vec<u32>,
    blocks: u32,
}

/// A program and its source.
pub(super) struct Printed {
    pub(super) program: Program,
    source: Arc<str>,
}

/// A place in a batch for one leaf: its group and its scalars.
pub(super) struct Place {
    group: usize,
    scalars: Vec<f64>,
}

/// Where the data of a leaf is.
pub(super) struct Data<'a, S> {
    pub(super) length: usize,
    pub(super) x: &'a Tensor,
    /// Of the lower part of x, where it has two.
    pub(super) rest: Option<u64>,
    pub(super) sources: &'a [Tensor],
    pub(super) slots: S,
    pub(super) parameter: Option<&'a Tensor>,
    pub(super) compensation: Option<&'a mut Buffer>,
    pub(super) key: [u32; 2],
}

/// A state tensor.
pub(super) enum Slot<'a> {
    Read(&'a Buffer),
    Write(&'a mut Buffer),
}

/// The program of a recording, printed once.
fn printed(recording: &Recording) -> Arc<Printed> {
    static PRINTED: LazyLock<Mutex<HashMap<Recording, Arc<Printed>>>> = LazyLock::new(Mutex::default);
    let mut all = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    let print = || {
        let program = Program::new(recording);
        Arc::new(Printed { source: program.source().into(), program })
    };
    all.entry(recording.clone()).or_insert_with(print).clone()
}

impl<'a, M: Machine<'a>> Batch<'a, M> {
    pub(super) fn new(machine: M) -> Self {
        Batch { machine, groups: Vec::new(), call: std::marker::PhantomData }
    }

    pub(super) fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    /// A place for the work on a leaf; nothing, if the machine has no function for it.
    pub(super) fn place(&mut self, work: Work<'_, '_>) -> Result<Option<Place>> {
        let Some((recording, scalars)) = record(work) else { return Ok(None) };
        let known = self.groups.iter().position(|group| group.recording == recording);
        let group = match known {
            Some(group) => group,
            None => {
                let printed = printed(&recording);
                let function = self.machine.function(&printed.source)?;
                self.groups.push(Group { recording, printed, function, rows: Vec::new(), firsts: Vec::new(), blocks: 0 });
                self.groups.len() - 1
            }
        };
        Ok(self.groups[group].function.is_some().then_some(Place { group, scalars }))
    }

    /// Puts a leaf into its place. The result is the range of its blocks among those of its group.
    pub(super) fn add<S: Iterator<Item = Slot<'a>>>(&mut self, place: &Place, data: Data<'a, S>, fold: Option<Fold>) -> Result<Blocks> {
        let group = &mut self.groups[place.group];
        let program = &group.printed.program;
        let chunk = if fold.is_some() { chunk_length(data.length) } else { CHUNK };
        let count = data.length.div_ceil(chunk) as u32;
        let blocks = Blocks { group: place.group, first: group.blocks, count };

        let row = group.rows.len();
        group.rows.extend([data.length as u64, 0]);
        match (fold, group.recording.end) {
            (Some(Fold::Powers(power)), _) => group.rows.extend([chunk as u64, power.to_bits()]),
            (Some(_), _) => group.rows.push(chunk as u64),
            (None, End::Random) => group.rows.push(u64::from(data.key[1]) << 32 | u64::from(data.key[0])),
            _ => {}
        }
        let mut aligned = true;
        let mut push = |rows: &mut Vec<u64>, address: u64, size: usize| {
            aligned &= address.is_multiple_of((size * program.lanes) as u64);
            rows.push(address);
        };
        let (mut sources, mut slots, mut compensation) = (data.sources.iter(), data.slots, data.compensation);
        for (number, array) in group.recording.arrays.iter().enumerate() {
            let (used, written) = (program.arrays.contains(&number), group.recording.writes(number));
            let machine = &mut self.machine;
            // Every array takes its data, whether it is used or not.
            let address = match array.role {
                Role::Gradient => sources.next().filter(|_| used).map(|source| machine.read(source.contiguous()?)),
                Role::Slot(_) => slots.next().filter(|_| used).map(|slot| match slot {
                    Slot::Write(state) if written => machine.write_state(state),
                    Slot::Write(state) => machine.read_state(state),
                    Slot::Read(state) => machine.read_state(state),
                }),
                Role::Compensation => compensation.take().map(|state| machine.write_state(state)),
                Role::X | Role::SplitX if !used => None,
                Role::X | Role::SplitX if written => Some(machine.write(data.x)),
                Role::X | Role::SplitX => Some(machine.read(data.x.contiguous()?)),
            };
            if let Some(address) = address.transpose()? {
                push(&mut group.rows, address, array.dtype.size_in_bytes());
                if let (Role::SplitX, Some(rest)) = (array.role, data.rest) {
                    push(&mut group.rows, rest, size_of::<i16>());
                }
            }
        }
        if let (Some(parameter), End::Master(dtype)) = (data.parameter, group.recording.end) {
            push(&mut group.rows, self.machine.write(parameter)?, dtype.size_in_bytes());
        }
        group.rows[row + 1] = aligned.into();
        let scalars = program.scalars.iter().map(|&scalar| place.scalars[scalar]);
        match group.recording.compute {
            DType::F64 => group.rows.extend(scalars.map(f64::to_bits)),
            _ => {
                let bits: Vec<u64> = scalars.map(|scalar| u64::from((scalar as f32).to_bits())).collect();
                group.rows.extend(bits.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 32)));
            }
        }
        group.firsts.push(group.blocks);
        group.blocks += count;
        Ok(blocks)
    }

    /// Runs everything. The result is what each block of each group found, if the groups fold.
    pub(super) fn run(self, folds: bool) -> Result<Vec<Vec<f64>>> {
        let mut launches = Vec::with_capacity(self.groups.len());
        let mut results = 0;
        let mut counts = Vec::with_capacity(self.groups.len());
        for Group { printed, function, rows, firsts, blocks, .. } in self.groups {
            counts.push(if folds { blocks as usize } else { 0 });
            let (Some(function), 1..) = (function, blocks) else { continue };
            let source = printed.source.clone();
            launches.push(Launch { function, source, leaves: firsts.len(), rows, firsts, blocks, results: folds.then_some(results) });
            results += if folds { blocks as usize } else { 0 };
        }
        let mut found = self.machine.run(launches, results)?.into_iter();
        Ok(counts.into_iter().map(|count| found.by_ref().take(count).collect()).collect())
    }
}

/// The blocks of a leaf.
pub(super) struct Blocks {
    pub(super) group: usize,
    pub(super) first: u32,
    pub(super) count: u32,
}
