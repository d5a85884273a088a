//! The documentation's table is the catalogue of rules, and README's code is run.

use candle_core::{DType, Device, Var};
use optimisers::rules::{Listing, catalogue};
use optimisers::setup;
use support::examples::root;

/// Bytes of state per parameter of an f32 matrix, to two decimals.
fn state_bytes(rule: &Listing) -> f64 {
    let x = Var::zeros((1024, 1024), DType::F32, &Device::Cpu).expect("a variable");
    let bytes = setup(rule.rule.clone(), &x).expect("a state").bytes();
    (bytes as f64 / x.elem_count() as f64 * 100.0).round() / 100.0
}

/// The rows of the table with this first heading.
pub(crate) fn table(page: &'static str, heading: &str) -> Vec<&'static str> {
    let lines = page
        .lines()
        .skip_while(|line| !line.starts_with(&format!("| {heading}")));
    lines.skip(2).take_while(|line| line.starts_with('|')).collect()
}

/// A recurrence or a source that is still to be written.
const BLANK: &str = "...";

/// After a wanted change, run this test with `PRINT=1`, which writes the table but for recurrences and sources.
#[test]
fn the_table_lists_every_rule() {
    let page = include_str!("../../../src/rules/table.md");
    let row = |rule: Listing| {
        let begin = format!("| `{}` | ", rule.name);
        let written = table(page, "Rule |")
            .into_iter()
            .find_map(|row| row.strip_prefix(&begin));
        let cells: Vec<&str> = written
            .into_iter()
            .flat_map(|row| row.trim_end_matches(" |").split(" | "))
            .collect();
        let [recurrence, .., source] = cells[..] else {
            return format!(
                "{begin}{BLANK} | {} | {} | {BLANK} |",
                rule.rule.kind(),
                state_bytes(&rule)
            );
        };
        format!(
            "{begin}{recurrence} | {} | {} | {source} |",
            rule.rule.kind(),
            state_bytes(&rule)
        )
    };
    let rows: Vec<String> = catalogue().into_iter().map(row).collect();
    let (written, expected) = (table(page, "Rule |").join("\n"), rows.join("\n"));
    assert!(!written.is_empty(), "the page has no table of rules");
    assert!(
        !written.contains(&format!("| {BLANK} |")),
        "write the recurrence and the source of the new rule"
    );
    if std::env::var_os("PRINT").is_some() {
        let path = root().join("src/rules/table.md");
        return std::fs::write(path, page.replace(&written, &expected)).expect("the page is written");
    }
    let of_page = table(page, "Rule |")
        .into_iter()
        .chain(std::iter::repeat("nothing"));
    let differs = rows
        .iter()
        .zip(of_page)
        .find(|(row, listed)| row.as_str() != *listed);
    assert!(
        written == expected,
        "PRINT=1 writes this row, and what it replaces: {differs:?}"
    );
}

#[test]
fn readmes_code_is_run() {
    let readme = include_str!("../../../README.md");
    let fences: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("```"))
        .filter(|kind| !kind.is_empty())
        .collect();
    assert!(fences.contains(&"rust"));
    let known = ["rust", "console", "toml", "json"];
    assert!(fences.iter().all(|kind| known.contains(kind)), "{fences:?}");
}
