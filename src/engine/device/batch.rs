//! The leaves of a call as tables, one for each kind of leaf.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::{DType, Tensor, Var};
use smallvec::SmallVec;

use super::machine::{Launch, Machine};
use super::print::{CHUNK, Program};
use super::recording::{End, Recording, Role, Work, record};
use crate::engine::Buffer;
use crate::engine::cpu::{Fold, chunk_length};
use crate::error::Result;

/// What a machine is to do in one call.
pub(super) struct Batch<'a, M: Machine<'a>> {
    machine: M,
    /// What is filled.
    groups: Vec<Group<M::Function>>,
    /// What is to run before that.
    launches: Vec<Launch<M::Function>>,
    /// How many numbers the launches find.
    results: usize,
    call: std::marker::PhantomData<&'a ()>,
}

/// Leaves with the same recording.
struct Group<F> {
    recording: Recording,
    printed: Arc<Printed>,
    /// Nothing, if it does not compile.
    function: Option<F>,
    rows: Vec<u64>,
    references: Vec<usize>,
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
    /// The numbers of the results that the arithmetic depends on, in its order.
    pub(super) found: SmallVec<[usize; 2]>,
    pub(super) parameter: Option<&'a Tensor>,
    pub(super) compensation: Option<&'a mut Buffer>,
    /// A new variable for the result.
    pub(super) copy: Option<Var>,
    pub(super) key: [u32; 2],
}

/// A state tensor.
pub(super) enum Slot<'a> {
    Read(&'a Buffer),
    Write(&'a mut Buffer),
}

/// Results that are joined to one number.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    /// Their numbers.
    pub(super) results: Range<usize>,
    /// What their total is multiplied by; twice, if they are sums of squares.
    pub(super) scale: f64,
}

impl Parts {
    /// None, which make 0.
    pub(super) const NONE: Parts = Parts { results: 0..0, scale: 1.0 };
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
        Batch { machine, groups: Vec::new(), launches: Vec::new(), results: 0, call: std::marker::PhantomData }
    }

    pub(super) fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    /// A place for the work on a leaf; nothing, if the machine has no function for it.
    pub(super) fn place(&mut self, work: Work<'_, '_>) -> Result<Option<Place>> {
        record(work).map_or(Ok(None), |(recording, scalars)| self.place_of(recording, scalars))
    }

    /// A place for what was recorded.
    pub(super) fn place_of(&mut self, recording: Recording, scalars: Vec<f64>) -> Result<Option<Place>> {
        let known = self.groups.iter().position(|group| group.recording == recording);
        let group = match known {
            Some(group) => group,
            None => {
                let printed = printed(&recording);
                let function = self.machine.function(&printed.source)?;
                let (rows, references, firsts) = (Vec::new(), Vec::new(), Vec::new());
                self.groups.push(Group { recording, printed, function, rows, references, firsts, blocks: 0 });
                self.groups.len() - 1
            }
        };
        Ok(self.groups[group].function.is_some().then_some(Place { group, scalars }))
    }

    /// Puts a leaf into its place. The result is the range of its blocks among those of its group.
    pub(super) fn add<S: Iterator<Item = Slot<'a>>>(&mut self, place: &Place, data: Data<'a, S>, fold: Option<Fold>) -> Result<Blocks> {
        let group = &mut self.groups[place.group];
        let printed = group.printed.clone();
        let program = &printed.program;
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
        let mut found = data.found.into_iter();
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
                Role::Found => {
                    if let Some(result) = found.next().filter(|_| used) {
                        refer(&mut group.rows, &mut group.references, result);
                    }
                    None
                }
                Role::Total(_) => None,
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
        if let Some(copy) = data.copy {
            let size = copy.dtype().size_in_bytes();
            push(&mut group.rows, self.machine.write_new(copy)?, size);
        }
        group.rows[row + 1] = aligned.into();
        group.finish(&place.scalars, count);
        Ok(blocks)
    }

    /// Puts parts into a place for what joins them, where they are of a fold.
    pub(super) fn join(&mut self, place: &Place, totals: impl IntoIterator<Item = Parts>, fold: Fold) -> Blocks {
        let group = &mut self.groups[place.group];
        let blocks = Blocks { group: place.group, first: group.blocks, count: 1 };
        if let (End::Follow(_), Fold::Powers(p)) = (group.recording.end, fold) {
            group.rows.push(p.recip().to_bits());
        }
        for (number, Parts { results, scale }) in totals.into_iter().enumerate() {
            if group.printed.program.arrays.contains(&number) {
                refer(&mut group.rows, &mut group.references, results.start);
                group.rows.extend([results.len() as u64, scale.to_bits()]);
            }
        }
        group.finish(&place.scalars, 1);
        blocks
    }

    /// Lets what has been added run before what will be. The result is the number of the first result of each group; places and blocks of
    /// before mean nothing from now on but for [`Blocks::results`].
    pub(super) fn enqueue(&mut self) -> Vec<usize> {
        let mut firsts_of_groups = Vec::with_capacity(self.groups.len());
        for Group { recording, printed, function, rows, references, firsts, blocks } in self.groups.drain(..) {
            let first = self.results;
            firsts_of_groups.push(first);
            let (Some(function), 1..) = (function, blocks) else { continue };
            let source = printed.source.clone();
            let results = recording.finds().then_some(first);
            self.results += results.map_or(0, |_| blocks as usize);
            self.launches.push(Launch { function, source, leaves: firsts.len(), rows, references, firsts, blocks, results });
        }
        firsts_of_groups
    }

    /// Runs everything that has been added, without waiting for it.
    pub(super) fn launch(&mut self) -> Result<()> {
        self.enqueue();
        match std::mem::take(&mut self.launches) {
            launches if launches.is_empty() => Ok(()),
            launches => self.machine.launch(launches, self.results),
        }
    }

    /// Runs everything. The result is what was found, by number.
    pub(super) fn run(mut self) -> Result<Vec<f64>> {
        self.launch()?;
        self.machine.found()
    }
}

impl<F> Group<F> {
    /// Puts the scalars at the end of the row, which has so many blocks.
    fn finish(&mut self, scalars: &[f64], count: u32) {
        let scalars = self.printed.program.scalars.iter().map(|&scalar| scalars[scalar]);
        match self.recording.compute {
            DType::F64 => self.rows.extend(scalars.map(f64::to_bits)),
            _ => {
                let bits: Vec<u64> = scalars.map(|scalar| u64::from((scalar as f32).to_bits())).collect();
                self.rows.extend(bits.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 32)));
            }
        }
        self.firsts.push(self.blocks);
        self.blocks += count;
    }
}

/// Says at the end of the rows where the result of this number is.
fn refer(rows: &mut Vec<u64>, references: &mut Vec<usize>, result: usize) {
    references.push(rows.len());
    rows.push(result as u64);
}

/// The blocks of a leaf.
pub(super) struct Blocks {
    group: usize,
    first: u32,
    count: u32,
}

impl Blocks {
    /// The numbers of their results, where those of the groups begin at these.
    pub(super) fn results(&self, firsts: &[usize]) -> Range<usize> {
        let start = firsts[self.group] + self.first as usize;
        start..start + self.count as usize
    }
}
