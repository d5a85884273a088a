//! The ranks of a run: threads of this process that train one model together, each on micro-batches of its own.

use std::error::Error;

use optimisers::{CommunicationError, Communicator, LocalRank, ranks};

/// What the first of so many ranks returns. If any fails, what they say about it, once: those that wait for one that has left say so.
pub(crate) fn on_each<T: Send>(count: usize, run: impl Fn(LocalRank) -> Result<T, Box<dyn Error>> + Sync) -> Result<T, String> {
    let run = |world| run(world).map_err(|error| error.to_string());
    let results: Vec<Result<T, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(count).into_iter().map(|world| scope.spawn(|| run(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut errors: Vec<String> = Vec::new();
    let mut first = None;
    for result in results {
        match result {
            Ok(value) => first = first.or(Some(value)),
            Err(error) if errors.contains(&error) => {}
            Err(error) => errors.push(error),
        }
    }
    first.filter(|_| errors.is_empty()).ok_or_else(|| errors.join("; "))
}

/// What each rank brings, in their order. All have to call it.
pub(crate) fn of_all<const N: usize>(world: &LocalRank, own: [u8; N]) -> Result<Vec<[u8; N]>, CommunicationError> {
    let mut all = vec![own; world.size()];
    let mut from: Vec<Vec<&mut [u8]>> = all.iter_mut().map(|bytes| vec![&mut bytes[..]]).collect();
    from[world.rank()].clear();
    world.gather(&[&own], &mut from)?;
    Ok(all)
}
