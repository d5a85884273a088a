//! A check that the ranks of a machine have together no more threads than cores.

use std::fs;
use std::sync::Once;

use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives as _};

use crate::error::warning::Warning;

/// The words in a mask of cores, enough for 4096 cores.
const WORDS: usize = 128;

/// The number of threads of a rank, then a mask of the cores that it may use.
type Share = [u32; 1 + WORDS];

/// Warns if the ranks of this machine have more threads than cores: once in a job, on one rank of the
/// machine. All ranks have to call this function.
pub(super) fn warn_if_crowded(world: &SimpleCommunicator) {
    static CHECKED: Once = Once::new();
    let mut warning = None;
    CHECKED.call_once(|| {
        let machine = world.split_shared(world.rank());
        let ranks = machine.size() as usize;
        let mut shares = vec![0; ranks * (1 + WORDS)];
        machine.all_gather_into(&own_share()[..], &mut shares[..]);
        warning = crowding_warning(shares.as_chunks().0).filter(|_| machine.rank() == 0);
    });
    // The warning comes after `call_once`, because a `Once` refuses all later calls after a panic, here of a
    // logger.
    warning.iter().for_each(Warning::log);
}

/// The share of this rank. If the system does not report the cores, the mask is empty.
fn own_share() -> Share {
    let mut share = [0; 1 + WORDS];
    share[0] = rayon::current_num_threads() as u32;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed:"))
        .unwrap_or_default();
    // In reverse, because the last word of the text has the first cores.
    for (word, text) in share[1..].iter_mut().zip(mask.trim().rsplit(',')) {
        *word = u32::from_str_radix(text, 16).unwrap_or(0);
    }
    share
}

/// The warning for the ranks of a machine, if they have more threads than cores.
fn crowding_warning(shares: &[Share]) -> Option<Warning> {
    let threads: usize = shares.iter().map(|share| share[0] as usize).sum();
    let union = |word: usize| shares.iter().fold(0, |union, share| union | share[1 + word]);
    let cores: usize = (0..WORDS).map(|word| union(word).count_ones() as usize).sum();
    (shares.len() > 1 && cores > 0 && threads > cores).then_some(Warning::CoresShared {
        ranks: shares.len(),
        threads,
        cores,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(threads: u32, cores: u32) -> Share {
        let mut share = [0; 1 + WORDS];
        (share[0], share[1]) = (threads, cores);
        share
    }

    #[test]
    fn ranks_are_too_many_if_their_threads_are_more_than_their_cores() {
        for (shares, warns) in [
            (vec![share(4, 0b1111)], false),
            (vec![share(4, 0b1111); 2], true),
            (vec![share(2, 0b1111); 2], false),
            // Bound to cores of their own.
            (vec![share(2, 0b0011), share(2, 0b1100)], false),
            (vec![share(1, 0b0001), share(1, 0b0001)], true),
            // The system does not report the cores.
            (vec![share(4, 0); 2], false),
        ] {
            assert_eq!(
                crowding_warning(&shares).is_some(),
                warns,
                "{:?}",
                shares.iter().map(|share| &share[..2]).collect::<Vec<_>>()
            );
        }
        let [threads, first, ..] = own_share();
        assert!(threads > 0 && (first > 0 || cfg!(not(target_os = "linux"))));
    }
}
