//! The floor on the CPU: a loop that reads and writes the bytes of a case and computes nothing.

use candle_core::Device;
use rayon::prelude::*;

use crate::timed::Timed;

/// Elements per task, as in the fused engine.
const CHUNK: usize = 1 << 14;

/// The arrays of a case by how they are used, in bytes per element.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// Arrays that are read (more than once, if a case reads them again).
    pub read: Vec<usize>,
    /// Arrays that are read and written.
    pub update: Vec<usize>,
    /// Arrays that are only written.
    pub write: Vec<usize>,
}

impl Traffic {
    /// The bytes that a step reads and writes for each element.
    pub fn moved(&self) -> usize {
        let sum = |bytes: &[usize]| bytes.iter().sum::<usize>();
        sum(&self.read) + 2 * sum(&self.update) + sum(&self.write)
    }

    /// The bytes of memory for each element, if an array that is read again is one array.
    pub fn held(&self) -> usize {
        self.read.iter().max().unwrap_or(&0) + self.update.iter().chain(&self.write).sum::<usize>()
    }
}

/// A task's part of every array.
struct Task<'t> {
    read: Vec<&'t [u64]>,
    update: Vec<&'t mut [u64]>,
    write: Vec<&'t mut [u64]>,
}

impl Task<'_> {
    /// The first array that is read is added to the first that is updated; the others are only touched.
    fn run(&mut self) {
        let (source, others) = self
            .read
            .split_first()
            .map_or((&[][..], &[][..]), |(source, others)| (*source, others));
        for other in others {
            std::hint::black_box(other.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        }
        for (i, array) in self.update.iter_mut().enumerate() {
            if i == 0 {
                array
                    .iter_mut()
                    .zip(source)
                    .for_each(|(word, more)| *word = word.wrapping_add(*more));
                // The source is narrower than the array where gradients are; the rest is touched alone.
                array
                    .iter_mut()
                    .skip(source.len())
                    .for_each(|word| *word = word.wrapping_add(1));
            } else {
                array.iter_mut().for_each(|word| *word = word.wrapping_add(1));
            }
        }
        for array in &mut self.write {
            array.fill(1);
        }
    }
}

/// A loop over the memory of tensors of these sizes; that many of them take turns.
pub fn floor(sizes: Vec<usize>, traffic: Traffic, models: usize) -> Timed {
    let elements = sizes.iter().sum();
    let all = sizes.repeat(models);
    let allocate = |bytes: &Vec<usize>| -> Vec<Vec<Vec<u64>>> {
        all.iter()
            .map(|&size| {
                bytes
                    .iter()
                    .map(|&bytes| vec![1u64; (size * bytes).div_ceil(8)])
                    .collect()
            })
            .collect()
    };
    let (read, mut update, mut write) = (
        allocate(&traffic.read),
        allocate(&traffic.update),
        allocate(&traffic.write),
    );
    let run = move |go_on: &mut dyn FnMut() -> bool| {
        let tensors = all
            .iter()
            .zip(read.iter().zip(update.iter_mut().zip(write.iter_mut())));
        let tasks =
            tensors.map(|(&size, (read, (update, write)))| split(size, &traffic, read, update, write));
        let mut tasks: Vec<_> = tasks.collect();
        let mut turns: Vec<Vec<Task<'_>>> = tasks
            .chunks_mut(sizes.len())
            .map(|tensors| tensors.iter_mut().flat_map(std::mem::take).collect())
            .collect();
        let mut turn = (0..models).cycle();
        while go_on() {
            turns[turn.next().unwrap_or(0)].par_iter_mut().for_each(Task::run);
        }
    };
    Timed {
        elements,
        device: Device::Cpu,
        run: Box::new(run),
    }
}

/// Cuts one tensor's arrays into chunks of elements.
fn split<'t>(
    size: usize,
    traffic: &Traffic,
    read: &'t [Vec<u64>],
    update: &'t mut [Vec<u64>],
    write: &'t mut [Vec<u64>],
) -> Vec<Task<'t>> {
    let words = |bytes: usize| CHUNK * bytes / 8;
    let mut tasks: Vec<Task<'t>> = (0..size.div_ceil(CHUNK))
        .map(|_| Task {
            read: Vec::new(),
            update: Vec::new(),
            write: Vec::new(),
        })
        .collect();
    for (array, &bytes) in read.iter().zip(&traffic.read) {
        array
            .chunks(words(bytes))
            .zip(&mut tasks)
            .for_each(|(part, task)| task.read.push(part));
    }
    for (array, &bytes) in update.iter_mut().zip(&traffic.update) {
        array
            .chunks_mut(words(bytes))
            .zip(&mut tasks)
            .for_each(|(part, task)| task.update.push(part));
    }
    for (array, &bytes) in write.iter_mut().zip(&traffic.write) {
        array
            .chunks_mut(words(bytes))
            .zip(&mut tasks)
            .for_each(|(part, task)| task.write.push(part));
    }
    tasks
}
