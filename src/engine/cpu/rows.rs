//! Many items with little work each, a row of neighbours at a time.
//!
//! Right before item i runs, items i + 1 to i + 3 are prepared: the nearest has its last stage, the farthest
//! its first. So each stage finds in the cache what the stage before it has fetched.

use rayon::prelude::*;

use crate::error::Result;

/// For each stage, how many items before its turn an item is prepared.
const DISTANCES: [usize; 3] = [3, 2, 1];

/// Calls `run` on every item, in rows of neighbours, and before that `prepare` in stages.
///
/// `prepare` fetches an item's memory into the cache, because waiting for memory takes longer than little
/// work.
///
/// # Errors
/// The first in the order of the items. A row ends with its first error; other rows go on.
pub(super) fn in_rows<I: Send>(
    items: &mut [I],
    row: usize,
    prepare: impl Fn(&I, usize) + Sync,
    run: impl Fn(&mut I) -> Result<()> + Sync,
) -> Result<()> {
    let rows: Vec<_> = items.par_chunks_mut(row).map(|row| in_a_row(row, &prepare, &run)).collect();
    rows.into_iter().collect()
}

/// [`in_rows`] for one row.
fn in_a_row<I>(row: &mut [I], prepare: impl Fn(&I, usize), run: impl Fn(&mut I) -> Result<()>) -> Result<()> {
    // The first items are prepared here, because no items before them do it.
    for (stage, &distance) in DISTANCES.iter().enumerate() {
        row.iter().take(distance).for_each(|item| prepare(item, stage));
    }
    for index in 0..row.len() {
        for (stage, &distance) in DISTANCES.iter().enumerate() {
            row.get(index + distance).into_iter().for_each(|item| prepare(item, stage));
        }
        run(&mut row[index])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::error::Error;

    #[test]
    fn every_item_is_prepared_in_order_and_runs_once() {
        for row in [1, 5, 7] {
            for count in [0, 1, 4, 5, 23] {
                let mut items: Vec<Mutex<Vec<usize>>> = (0..count).map(|_| Mutex::default()).collect();
                let note = |item: &Mutex<Vec<usize>>, stage| item.lock().expect("a lock").push(stage);
                in_rows(&mut items, row, note, |item| {
                    note(item, DISTANCES.len());
                    Ok(())
                })
                .expect("no error");
                assert!(
                    items.iter().all(|item| item.lock().expect("a lock")[..] == [0, 1, 2, 3]),
                    "{items:?}"
                );
            }
        }
    }

    #[test]
    fn the_first_error_in_order_is_returned() {
        let mut items: Vec<usize> = (0..40).collect();
        let run = |item: &mut usize| {
            if [17, 19, 38].contains(item) { Err(Error::other(item.to_string())) } else { Ok(()) }
        };
        let error = in_rows(&mut items, 5, |_, _| (), run).expect_err("an error");
        assert!(error.to_string().contains("17"), "{error}");
    }
}
