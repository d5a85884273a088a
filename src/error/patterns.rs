use super::shown::errors;

errors! {
/// Why patterns do not decide over the parameters of a model.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PatternError {
    /// A pattern that no parameter's path matches.
    #[error("the pattern {pattern:?} matches no parameter; there are: {}", available.join(", "))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// Some paths that exist.
        available: Vec<String>,
    },

    /// A pattern that comes too late: patterns before it match all that it matches.
    #[error(
        "the pattern {pattern:?} decides nothing: {earlier:?} comes first and matches {path:?} as well; put the narrower pattern first"
    )]
    Shadowed {
        /// The pattern.
        pattern: String,
        /// A pattern before it.
        earlier: String,
        /// A parameter that both match.
        path: String,
    },

    /// A parameter that no pattern matches.
    #[error("no pattern matches the parameter {path:?}; a last pattern \"*\" would. There are: {}", patterns.join(", "))]
    Uncovered {
        /// The parameter.
        path: String,
        /// The patterns.
        patterns: Vec<String>,
    },

    /// A path with a `*` or a `?`, which are no signs of their own in a pattern.
    #[error(
        "no pattern tells the parameter {path:?} from {other:?}, which has another optimiser: in a pattern * and ? stand for other characters; rename the one, or choose optimisers in code with `setup_with`"
    )]
    Indistinct {
        /// The path.
        path: String,
        /// A path that the pattern matches as well.
        other: String,
    },

    /// Two patterns that choose differently for two paths of one parameter.
    #[error(
        "parameter {:?} is tied to {:?}, and the pattern {:?} chooses for the one, {:?} for the other; let both choose the same, or one match both paths",
        paths.0, paths.1, patterns.0, patterns.1
    )]
    Contradiction {
        /// Two paths of the parameter.
        paths: (String, String),
        /// The first pattern that matches each.
        patterns: (String, String),
    },
}
}
