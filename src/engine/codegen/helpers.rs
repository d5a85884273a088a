//! Selects the helpers (functions and types of the `.cu` files) that printed code uses.
//!
//! A helper is kept if the code contains its name. Overloads share a name, so the code must also contain the
//! types of an overload's parameters: a kernel of F32 has no use for the roundings of F16. A helper calls
//! only helpers above it. So helpers are visited from the last to the first, and a helper that is kept counts
//! as code for the helpers above it.

use std::collections::HashSet;

/// The types by which overloads differ.
const TYPES: [&str; 4] = ["f16", "bf16", "float", "double"];

/// A function or a type.
struct Helper<'t> {
    text: &'t str,
    name: &'t str,
    parameters: &'t str,
}

/// The helpers that `code` uses, in the order of `helpers`. Empty lines divide `helpers` into groups. The
/// comment of a group is kept if one of its helpers is kept.
pub(crate) fn used_helpers(helpers: &str, code: &str) -> String {
    let groups: Vec<(&str, Vec<Helper<'_>>)> = helpers.trim_end().split("\n\n").map(split_group).collect();
    let names: Vec<&str> = groups
        .iter()
        .flat_map(|(_, helpers)| helpers)
        .map(|helper| helper.name)
        .collect();
    let mut used_words: HashSet<&str> =
        // Comments are left out, because a word there may be the name of a helper.
        code.lines().filter(|line| !line.starts_with("//")).flat_map(words).collect();
    let mut used_groups = Vec::new();
    for (comment, helpers) in groups.iter().rev() {
        let mut texts = Vec::new();
        for Helper {
            text,
            name,
            parameters,
        } in helpers.iter().rev()
        {
            let is_overload = names.iter().filter(|other| *other == name).count() > 1;
            let is_used = |word: &str| used_words.contains(word) || !TYPES.contains(&word);
            if used_words.contains(name) && (!is_overload || words(parameters).all(is_used)) {
                used_words.extend(words(text));
                texts.push(*text);
            }
        }
        if !texts.is_empty() {
            texts.push(comment);
            used_groups.push(texts.into_iter().rev().collect::<String>().trim_end().to_string() + "\n");
        }
    }
    used_groups.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Splits a group into its comment and its helpers. A helper ends where its braces are balanced.
fn split_group(text: &str) -> (&str, Vec<Helper<'_>>) {
    let comment_length = text
        .split_inclusive('\n')
        .take_while(|line| line.starts_with("//"))
        .map(str::len)
        .sum();
    let (comment, text) = text.split_at(comment_length);
    let (mut helpers, mut start, mut end, mut depth) = (Vec::new(), 0, 0, 0);
    for line in text.split_inclusive('\n') {
        end += line.len();
        depth += line.matches('{').count();
        depth -= line.matches('}').count();
        if depth == 0 {
            helpers.push(parse_helper(&text[start..end]));
            start = end;
        }
    }
    debug_assert_eq!(start, text.len(), "an empty line within a helper");
    (comment, helpers)
}

fn parse_helper(text: &str) -> Helper<'_> {
    let head = text.split('{').next().unwrap_or(text).trim_end();
    // A type has no parameters, and its name is the last word, after `__align__(..)`. The last word of a
    // specialised type is its argument `N`, which every kernel contains.
    let (signature, parameters) = head
        .strip_suffix(')')
        .and_then(|head| head.split_once('('))
        .unwrap_or((head, ""));
    Helper {
        text,
        name: words(signature).last().unwrap_or_default(),
        parameters,
    }
}

/// The identifiers in a text.
fn words(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}
