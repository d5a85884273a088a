//! The order in which gradients are added up.

/// Cuts a list into the two parts whose sums are added last.
///
/// The length of the first part is the largest power of two below the length of the list. Hence neighbours
/// are added in pairs first, then their sums in pairs. The order depends only on the number of items, and the
/// sum of 2ⁿ equal numbers is exact.
pub(in crate::engine) fn halves<T>(items: &[T]) -> (&[T], &[T]) {
    items.split_at(items.len().next_power_of_two() / 2)
}

/// Adds the values of the items in the order of [`halves`]. Returns `None` if there are no items.
pub(in crate::engine) fn pairwise<T, V, E>(
    items: &[T],
    value: &mut impl FnMut(&T) -> Result<V, E>,
    add: &impl Fn(V, V) -> Result<V, E>,
) -> Result<Option<V>, E> {
    match items {
        [] => Ok(None),
        [item] => value(item).map(Some),
        _ => {
            let (first, second) = halves(items);
            let (first_sum, second_sum) = (pairwise(first, value, add)?, pairwise(second, value, add)?);
            first_sum.zip(second_sum).map(|(a, b)| add(a, b)).transpose()
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
            let text = pairwise(&items, &mut |item| Ok::<_, ()>(item.to_string()), &|a, b| {
                Ok(format!("({a}+{b})"))
            });
            text.expect("no error").unwrap_or_default()
        };
        let sums = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(sum);
        let expected = [
            "",
            "0",
            "(0+1)",
            "((0+1)+2)",
            "((0+1)+(2+3))",
            "(((0+1)+(2+3))+4)",
            "(((0+1)+(2+3))+(4+5))",
        ];
        assert_eq!(sums[..7], expected);
        assert_eq!(sums[7], "(((0+1)+(2+3))+((4+5)+6))");
        assert_eq!(sums[8], "(((0+1)+(2+3))+((4+5)+(6+7)))");
    }
}
