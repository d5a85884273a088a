//! README's table of rules is the catalogue.

use optimisers::rules::catalogue;

#[test]
fn the_table_lists_every_rule() {
    let readme = include_str!("../../README.md");
    let table: Vec<&str> =
        readme.lines().skip_while(|line| !line.starts_with("| Rule |")).skip(2).take_while(|line| line.starts_with('|')).collect();
    let rows: Vec<String> = catalogue().iter().map(|rule| format!("| `{}` | {} | {} |", rule.name, rule.recurrence, rule.source)).collect();
    assert_eq!(table, rows);
}
