//! What a step sends, without the step.

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;
use optimisers::mpi::World;
use optimisers::{Communicator, Error};

use crate::Case;
use crate::collectives::{reduce_scatter, wide};

/// How many elements of all ranks together are on their way at once, as in an update.
const AT_ONCE: usize = 1 << 19;

/// Arrays of a model's length, and of a window's.
pub struct Arrays {
    gradients: Vec<bf16>,
    parameters: Vec<bf16>,
    copy: Vec<bf16>,
    part: Vec<bf16>,
    sum: Vec<f32>,
    windows: Vec<Vec<bf16>>,
}

impl Arrays {
    pub fn new(world: &World, elements: usize) -> Self {
        let windows = elements.div_ceil(AT_ONCE) * AT_ONCE;
        let part = AT_ONCE / world.size();
        let numbers = |length: usize| vec![bf16::ONE; length];
        Arrays {
            gradients: numbers(windows),
            parameters: numbers(windows),
            copy: numbers(windows),
            part: numbers(part),
            sum: vec![0.0; part],
            windows: (0..world.size())
                .map(|rank| numbers(if rank == world.rank() { 0 } else { part }))
                .collect(),
        }
    }

    pub fn cases<'a>(&'a mut self, world: &'a World) -> Vec<Case<'a>> {
        let Arrays {
            gradients,
            parameters,
            copy,
            part,
            sum,
            windows,
        } = self;
        let (gradients, windows) = (&gradients[..], std::cell::RefCell::new(windows));
        let windows = std::rc::Rc::new(windows);
        let (of_exchange, of_sum) = (windows.clone(), windows.clone());
        let run =
            |name, baseline, run: Box<dyn FnMut() -> Result<(), Error> + 'a>| Case { name, baseline, run };
        vec![
            run(
                "memcpy",
                "memcpy",
                Box::new(move || {
                    copy.copy_from_slice(gradients);
                    Ok(())
                }),
            ),
            run(
                "exchange",
                "memcpy",
                Box::new(move || {
                    gradients
                        .chunks(AT_ONCE)
                        .try_for_each(|window| exchange(world, window, &mut of_exchange.borrow_mut()))
                }),
            ),
            run(
                "gather",
                "memcpy",
                Box::new(move || {
                    parameters
                        .chunks_mut(AT_ONCE)
                        .try_for_each(|window| gather(world, window, &mut windows.borrow_mut()))
                }),
            ),
            run(
                "reduce_scatter",
                "reduce_scatter",
                Box::new(move || {
                    gradients
                        .chunks(AT_ONCE)
                        .for_each(|window| reduce_scatter(window, part));
                    Ok(())
                }),
            ),
            run(
                "exchange_sum",
                "reduce_scatter",
                Box::new(move || {
                    gradients.chunks(AT_ONCE).try_for_each(|window| {
                        let mut others = of_sum.borrow_mut();
                        exchange(world, window, &mut others)?;
                        let own = &window[world.rank() * sum.len()..][..sum.len()];
                        sum.iter_mut().zip(own).for_each(|(sum, own)| *sum = wide(*own));
                        for other in others.iter().filter(|other| !other.is_empty()) {
                            sum.iter_mut()
                                .zip(other)
                                .for_each(|(sum, more)| *sum += wide(*more));
                        }
                        Ok(())
                    })
                }),
            ),
        ]
    }
}

/// The parts of the ranks in a window.
fn parts<'w>(world: &World, window: &'w [bf16]) -> impl Iterator<Item = (usize, &'w [bf16])> {
    window.chunks(window.len() / world.size()).enumerate()
}

fn slices(windows: &mut [Vec<bf16>]) -> Vec<Vec<&mut [u8]>> {
    windows
        .iter_mut()
        .map(|window| {
            if window.is_empty() {
                Vec::new()
            } else {
                vec![cast_slice_mut(window)]
            }
        })
        .collect()
}

/// Each rank's part from place to a window of its owner.
fn exchange(world: &World, window: &[bf16], others: &mut [Vec<bf16>]) -> Result<(), Error> {
    let to: Vec<Vec<&[u8]>> = parts(world, window)
        .map(|(rank, part)| {
            if rank == world.rank() {
                Vec::new()
            } else {
                vec![cast_slice(part)]
            }
        })
        .collect();
    Ok(world.exchange(&to, &mut slices(others))?)
}

/// The own part from place to all, and theirs from windows to their place.
fn gather(world: &World, window: &mut [bf16], others: &mut [Vec<bf16>]) -> Result<(), Error> {
    let own = parts(world, window)
        .nth(world.rank())
        .map_or(&[][..], |(_, part)| part);
    world.gather(&[cast_slice(own)], &mut slices(others))?;
    let length = own.len();
    for (part, other) in window
        .chunks_mut(length)
        .zip(others)
        .filter(|(_, other)| !other.is_empty())
    {
        part.copy_from_slice(other);
    }
    Ok(())
}
