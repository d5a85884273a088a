//! With candle and without it the bits are the same.

/// `WITHOUT_CANDLE` names a file with the lines that `bits` prints in a build without candle.
#[test]
#[ignore = "compares with another build: `.ci/run plain` makes it"]
fn the_bits_are_those_without_candle() {
    let path = std::env::var_os("WITHOUT_CANDLE").expect("WITHOUT_CANDLE");
    let expected = std::fs::read_to_string(path).expect("the lines of a build without candle");
    let lines = optimisers_plain::bits::lines();
    assert!(lines.len() > 1000, "{} lines", lines.len());
    assert!(
        expected.lines().eq(lines.iter().map(String::as_str)),
        "{:?}",
        expected.lines().zip(&lines).find(|(a, b)| a != b)
    );
}
