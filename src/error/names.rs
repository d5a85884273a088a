//! Names in messages.

/// Names a part of a configuration, for a message.
pub(super) fn inside(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(", at {place}") }
}

/// At most `LISTED` names, for messages that say what exists.
pub(crate) fn listed<'p>(names: impl Iterator<Item = &'p str>) -> Vec<String> {
    const LISTED: usize = 20;
    let mut names: Vec<String> = names.take(LISTED + 1).map(str::to_string).collect();
    if names.len() > LISTED {
        names[LISTED] = "...".to_string();
    }
    names
}
