//! The order in which gradients are added up.

/// Cuts a list where the last addition of its sum is. The first part is the largest power of two that leaves
/// something for the second.
///
/// So pairs of neighbours are added first, then pairs of these. The order depends on the number of items and
/// on nothing else, and the sum of 2ⁿ equal numbers is exact.
pub(in crate::engine) fn halves<T>(items: &[T]) -> (&[T], &[T]) {
    items.split_at(items.len().next_power_of_two() / 2)
}

/// The sum of what the items stand for; `None` if there are no items.
pub(in crate::engine) fn pairwise<T, V, E>(
    items: &[T],
    value: &mut impl FnMut(&T) -> Result<V, E>,
    add: &impl Fn(V, V) -> Result<V, E>,
) -> Result<Option<V>, E> {
    match items {
        [] => Ok(None),
        [one] => value(one).map(Some),
        _ => {
            let (before, behind) = halves(items);
            let (before, behind) = (pairwise(before, value, add)?, pairwise(behind, value, add)?);
            before.zip(behind).map(|(before, behind)| add(before, behind)).transpose()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_added_first() {
        let sum = |count: u32| {
            let items: Vec<u32> = (0..count).collect();
            let told =
                pairwise(&items, &mut |item| Ok::<_, ()>(item.to_string()), &|a, b| Ok(format!("({a}+{b})")));
            told.expect("no error").unwrap_or_default()
        };
        let sums = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(sum);
        let expected =
            ["", "0", "(0+1)", "((0+1)+2)", "((0+1)+(2+3))", "(((0+1)+(2+3))+4)", "(((0+1)+(2+3))+(4+5))"];
        assert_eq!(sums[..7], expected);
        assert_eq!(sums[7], "(((0+1)+(2+3))+((4+5)+6))");
        assert_eq!(sums[8], "(((0+1)+(2+3))+((4+5)+(6+7)))");
    }
}
