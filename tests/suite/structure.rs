//! Imports inside the crate go one way.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Each top-level module with those it may use; a module may always use itself. `lib` uses all.
const ALLOWED: &[(&str, &[&str])] = &[
    ("field", &[]),
    ("value", &[]),
    ("error", &["field"]),
    ("engine", &["error", "value"]),
    ("rule", &["engine", "error", "field", "value"]),
    ("rules", &["error", "rule", "value"]),
    ("compose", &["engine", "error", "rule", "rules", "value"]),
    ("model", &["error"]),
    ("gradients", &[]),
    ("tree", &["engine", "error", "model", "rule"]),
    ("tensor_file", &[]),
    ("checkpoint", &["engine", "error", "field", "loss_scaler", "model", "rule", "tensor_file", "tree"]),
    ("setup", &["error", "model", "rule", "tree"]),
    ("patterns", &["error", "model"]),
    ("weights", &["engine", "error", "model", "tensor_file", "tree"]),
    ("precision", &["engine", "error", "model", "patterns", "setup", "weights"]),
    ("config", &["compose", "error", "field", "model", "patterns", "rule", "rules", "setup", "tree"]),
    ("outcome", &[]),
    ("update", &["engine", "error", "gradients", "model", "outcome", "rule", "tree"]),
    ("schedule", &["error", "outcome", "tree"]),
    ("twin", &["engine", "error", "gradients", "model", "outcome", "tree", "update"]),
    ("evaluation", &["engine", "error", "model", "tree"]),
    ("running_statistics", &["engine", "error", "model", "tree"]),
    ("masters", &["checkpoint", "engine", "error", "model", "tensor_file", "tree"]),
    ("loss_scaler", &["error", "gradients", "model", "outcome", "tree", "update"]),
    ("updated", &["engine", "error", "gradients", "outcome", "tree", "update"]),
    ("candle_optimizer", &["error", "model", "outcome", "rule", "setup", "tree", "update"]),
    ("views", &["engine", "error", "model", "tree"]),
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a source folder").flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

#[test]
fn imports_go_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = BTreeSet::new();
    for file in sources(&root) {
        let inside = file.strip_prefix(&root).expect("a file below src");
        let module = inside.iter().next().expect("a name").to_string_lossy().trim_end_matches(".rs").to_string();
        if module == "lib" {
            continue;
        }
        let (_, allowed) = ALLOWED.iter().find(|(name, _)| *name == module).unwrap_or_else(|| panic!("{module} is not listed"));
        let text = std::fs::read_to_string(&file).expect("a source file");
        for line in text.lines().map(str::trim).filter(|line| line.starts_with("use crate::") || line.starts_with("pub use crate::")) {
            let used = line.split("crate::").nth(1).and_then(|rest| rest.split([':', ';']).next()).expect("a module").to_string();
            assert!(used == module || allowed.contains(&used.as_str()), "{}: {line}", inside.display());
        }
        seen.insert(module);
    }
    assert_eq!(seen.len(), ALLOWED.len());
}

#[test]
fn unsafe_code_stays_in_the_files_named_for_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in sources(&root) {
        let text = std::fs::read_to_string(&file).expect("a source file");
        let inside = file.strip_prefix(&root).expect("a file below src");
        let folders = ["engine/cpu", "engine/cuda", "engine/emulation"];
        let allowed = folders.iter().any(|folder| inside.starts_with(folder)) && text.contains("allow(unsafe_code)]");
        let lines: Vec<&str> = text.lines().collect();
        for (number, _) in lines.iter().enumerate().filter(|(_, line)| line.contains("unsafe {") || line.contains("unsafe impl")) {
            assert!(allowed, "{}", inside.display());
            let reason = lines[number.saturating_sub(4)..number].iter().any(|line| line.contains("// SAFETY: "));
            assert!(reason, "{}:{}: unsafe without a reason", inside.display(), number + 1);
        }
    }
}
