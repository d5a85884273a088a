//! Random programs for ranks: calls whose bytes say where they come from.

use std::hash::{DefaultHasher, Hash, Hasher};

use optimisers::{CommunicationError, Communicator};

/// A number that is the same for the same facts.
pub fn draw(facts: impl Hash, below: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    facts.hash(&mut hasher);
    hasher.finish() as usize % below
}

/// What one rank sends another in a call of a program: often nothing, rarely much.
fn letter(program: usize, call: usize, sender: usize, receiver: usize) -> Vec<u8> {
    let facts = (program, call, sender, receiver);
    let most = [1, 2, 9, 100, 1000, 1000, 1000, 70_000][draw((facts, "size"), 8)];
    let first = draw((facts, "content"), 256);
    (0..draw((facts, "length"), most))
        .map(|at| (first + at) as u8)
        .collect()
}

/// Where `facts` cut so many bytes, the end last; empty slices among them.
fn cuts(length: usize, facts: impl Hash + Copy) -> Vec<usize> {
    let mut cuts: Vec<usize> = (0..draw((facts, "cuts"), 4))
        .map(|cut| draw((facts, cut), length + 1))
        .collect();
    cuts.extend((length > 0).then_some(length));
    cuts.sort_unstable();
    cuts
}

fn slices(bytes: &[u8], facts: impl Hash + Copy) -> Vec<&[u8]> {
    let ends = cuts(bytes.len(), facts);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts
        .zip(&ends)
        .map(|(start, end)| &bytes[start..*end])
        .collect()
}

fn slices_mut(mut bytes: &mut [u8], facts: impl Hash + Copy) -> Vec<&mut [u8]> {
    let mut start = 0;
    let mut slices = Vec::new();
    for end in cuts(bytes.len(), facts) {
        let (slice, rest) = bytes.split_at_mut(end - start);
        slices.push(slice);
        (bytes, start) = (rest, end);
    }
    slices
}

/// One call of a random program: an exchange or a gather, whose bytes are compared.
pub fn call(world: &impl Communicator, program: usize, call: usize) -> Result<(), CommunicationError> {
    let (rank, size) = (world.rank(), world.size());
    let is_gather = draw((program, call), 2) == 0;
    let from_to = |sender, receiver| match (is_gather, sender == receiver) {
        (_, true) => Vec::new(),
        (true, _) => letter(program, call, sender, sender),
        (false, _) => letter(program, call, sender, receiver),
    };
    let expected: Vec<Vec<u8>> = (0..size).map(|other| from_to(other, rank)).collect();
    let mut got: Vec<Vec<u8>> = expected.iter().map(|bytes| vec![0; bytes.len()]).collect();
    let mut from: Vec<_> = got
        .iter_mut()
        .enumerate()
        .map(|(other, bytes)| slices_mut(bytes, (program, call, rank, other, "from")))
        .collect();
    if is_gather {
        world.gather(
            &slices(&letter(program, call, rank, rank), (program, call, rank)),
            &mut from,
        )?;
    } else {
        let own: Vec<Vec<u8>> = (0..size).map(|other| from_to(rank, other)).collect();
        let to: Vec<_> = own
            .iter()
            .enumerate()
            .map(|(other, bytes)| slices(bytes, (program, call, rank, other, "to")))
            .collect();
        world.exchange(&to, &mut from)?;
    }
    assert!(
        got == expected,
        "rank {rank} of {size}, call {call} of program {program}"
    );
    Ok(())
}
