//! The documentation's table is the catalogue of rules, and README's code is run.

use candle_core::{DType, Device, Var};
use optimisers::rules::{Listing, catalogue};
use optimisers::setup;

/// Bytes of state per parameter of an f32 matrix, to two decimals.
fn state_bytes(rule: &Listing) -> f64 {
    let x = Var::zeros((1024, 1024), DType::F32, &Device::Cpu).expect("a variable");
    let bytes = setup(rule.rule.clone(), &x).expect("a state").bytes();
    (bytes as f64 / x.elem_count() as f64 * 100.0).round() / 100.0
}

/// The rows of the table with this first heading.
pub(crate) fn table(page: &'static str, heading: &str) -> Vec<&'static str> {
    let lines = page.lines().skip_while(|line| !line.starts_with(&format!("| {heading}")));
    lines.skip(2).take_while(|line| line.starts_with('|')).collect()
}

/// The table with this first heading has these rows; if not, the first one that differs is printed.
fn assert_rows(page: &'static str, heading: &str, rows: &[String]) {
    let table = table(page, heading);
    for (row, listed) in rows.iter().zip(table.iter().copied().chain(std::iter::repeat("nothing"))) {
        assert!(row == listed, "the page should have\n{row}\nwhere it has\n{listed}");
    }
    assert_eq!(table.len(), rows.len(), "rows that should not be there");
}

#[test]
fn the_table_lists_every_rule() {
    let row = |rule: Listing| {
        let (kind, bytes) = (rule.rule.kind(), state_bytes(&rule));
        format!("| `{}` | {} | {kind} | {bytes} | {} |", rule.name, rule.recurrence, rule.source)
    };
    let rows: Vec<String> = catalogue().into_iter().map(row).collect();
    assert_rows(include_str!("../../../src/rules/table.md"), "Rule |", &rows);
}

#[test]
fn readmes_code_is_run() {
    let readme = include_str!("../../../README.md");
    let fences: Vec<&str> =
        readme.lines().filter_map(|line| line.strip_prefix("```")).filter(|kind| !kind.is_empty()).collect();
    assert!(fences.contains(&"rust"));
    let known = ["rust", "console", "toml", "json"];
    assert!(fences.iter().all(|kind| known.contains(kind)), "{fences:?}");
}
