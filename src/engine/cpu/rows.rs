//! Many items with little work each, a row of neighbours at a time.

use rayon::prelude::*;

use crate::error::{Error, Result};

/// How many stages of preparation there are.
const STAGES: usize = 3;

/// How work goes along a row.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// How many items are in a row.
    pub(super) row: usize,
    /// How many items before its turn each stage of an item's preparation comes.
    pub(super) distances: [usize; STAGES],
}

/// Calls `run` on every item, a row of neighbours after another. Before its turn comes an item is prepared in stages, so that what it needs is on its
/// way to the cache meanwhile: for little work, memory takes longer than the work.
///
/// # Errors
/// The first in the order of the items. A row ends with its first error, others go on.
pub(super) fn in_rows<I: Send>(
    items: &mut [I],
    pace: Pace,
    prepare: impl Fn(&mut I, usize) + Sync,
    run: impl Fn(&mut I) -> Result<()> + Sync,
) -> Result<()> {
    // Errors are large; boxed, they leave the list small.
    let rows: Vec<_> = items.par_chunks_mut(pace.row).map(|row| in_a_row(row, pace, &prepare, &run).map_err(Box::new)).collect();
    rows.into_iter().collect::<std::result::Result<(), Box<Error>>>().map_err(|error| *error)
}

/// [`in_rows`] for one row.
pub(super) fn in_a_row<I>(
    row: &mut [I],
    Pace { distances, .. }: Pace,
    prepare: impl Fn(&mut I, usize),
    run: impl Fn(&mut I) -> Result<()>,
) -> Result<()> {
    for (stage, &distance) in distances.iter().enumerate() {
        row.iter_mut().take(distance).for_each(|item| prepare(item, stage));
    }
    for place in 0..row.len() {
        for (stage, &distance) in distances.iter().enumerate() {
            row.get_mut(place + distance).into_iter().for_each(|item| prepare(item, stage));
        }
        run(&mut row[place])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace { row: 5, distances: [3, 2, 1] };

    #[test]
    fn every_item_is_prepared_in_order_and_runs_once() {
        for pace in [PACE, Pace { row: 7, distances: [7; STAGES] }] {
            for count in [0, 1, 4, 5, 23] {
                let mut items = vec![Vec::new(); count];
                let run = |item: &mut Vec<usize>| {
                    item.push(STAGES);
                    Ok(())
                };
                in_rows(&mut items, pace, |item, stage| item.push(stage), run).expect("no error");
                assert!(items.iter().all(|item| item[..] == [0, 1, 2, STAGES]), "{items:?}");
            }
        }
    }

    #[test]
    fn the_first_error_in_order_is_returned() {
        let mut items: Vec<usize> = (0..40).collect();
        let run = |item: &mut usize| if [17, 19, 38].contains(item) { Err(Error::other(item.to_string())) } else { Ok(()) };
        let error = in_rows(&mut items, PACE, |_, _| (), run).expect_err("an error");
        assert!(error.to_string().contains("17"), "{error}");
    }
}
