//! README's table of rules is the catalogue.

use candle_core::{DType, Device, Var};
use optimisers::rules::{Listing, catalogue};
use optimisers::setup;

/// Bytes of state per parameter of an f32 matrix, to two decimals.
fn state_bytes(rule: &Listing) -> f64 {
    let x = Var::zeros((1024, 1024), DType::F32, &Device::Cpu).expect("a variable");
    let bytes = setup(rule.optimiser(), &x).expect("a state").bytes();
    (bytes as f64 / x.elem_count() as f64 * 100.0).round() / 100.0
}

#[test]
fn the_table_lists_every_rule() {
    let readme = include_str!("../../README.md");
    let table: Vec<&str> =
        readme.lines().skip_while(|line| !line.starts_with("| Rule |")).skip(2).take_while(|line| line.starts_with('|')).collect();
    let row = |rule: Listing| {
        let (kind, bytes) = (rule.kind(), state_bytes(&rule));
        format!("| `{}` | {} | {kind} | {bytes} | {} |", rule.name, rule.recurrence, rule.source)
    };
    let rows: Vec<String> = catalogue().into_iter().map(row).collect();
    assert_eq!(table.join("\n"), rows.join("\n"));
}
