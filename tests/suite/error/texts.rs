//! The texts of all errors, read from the source: `cargo test --test suite texts -- --nocapture` prints them.

use crate::whole::structure::{files, root};

/// The string literals of an expression that begins here, up to the end of its chain of methods.
fn literals(code: &str) -> Vec<String> {
    let (mut found, mut depth, mut rest) = (Vec::new(), 0usize, code.chars().peekable());
    while let Some(next) = rest.next() {
        match next {
            '"' => {
                let mut text = String::new();
                while let Some(next) = rest.next().filter(|next| *next != '"') {
                    let escaped = if next == '\\' { rest.next() } else { None };
                    match escaped {
                        Some('\n') => while rest.next_if(|next| next.is_whitespace()).is_some() {},
                        Some(escaped) => text.push(escaped),
                        None => text.push(next),
                    }
                }
                found.push(text);
            }
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' if depth == 0 => break,
            ')' | '}' | ']' => {
                depth -= 1;
                while rest.next_if(|next| next.is_whitespace()).is_some() {}
                if depth == 0 && rest.peek() != Some(&'.') {
                    break;
                }
            }
            ';' | ',' if depth == 0 => break,
            _ => {}
        }
    }
    found
}

/// Where an error is made, and its texts.
fn texts() -> Vec<(String, Vec<String>)> {
    const MAKERS: [&str; 8] = [
        "new(",
        "shape(",
        "dtype(",
        "device(",
        "not_finite(",
        "too_large(",
        "missing(",
        "unknown(",
    ];
    let mut all = Vec::new();
    for file in files(&root())
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"))
    {
        let source = std::fs::read_to_string(&file).expect("a source file");
        let file = file
            .strip_prefix(root())
            .expect("a file below src")
            .display()
            .to_string();
        let source = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        for (at, _) in source.match_indices("Error::") {
            let rest = &source[at + "Error::".len()..];
            let is_code = !source[..at]
                .rsplit('\n')
                .next()
                .unwrap_or_default()
                .trim_start()
                .starts_with("//");
            if is_code && MAKERS.iter().any(|maker| rest.starts_with(maker)) {
                let kind = rest
                    .split_once("ErrorKind::")
                    .filter(|(before, _)| *before == "new(")
                    .map_or("", |(_, kind)| kind);
                let kind: String = kind
                    .chars()
                    .take_while(|letter| letter.is_alphanumeric())
                    .collect();
                let maker = rest.split('(').next().unwrap_or_default();
                all.push((format!("{file}: {maker} {kind}"), literals(rest)));
            }
        }
    }
    all
}

#[test]
fn errors_are_clauses_without_a_full_stop() {
    let all = texts();
    for (place, texts) in &all {
        println!("{place}");
        for text in texts {
            println!("    {text}");
            assert!(!text.ends_with('.') || text.ends_with(".."), "{place}: {text:?}");
            assert!(!text.contains("  "), "{place}: {text:?}");
        }
    }
    assert!(all.len() > 150, "{} errors", all.len());
}
