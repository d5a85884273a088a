//! Why parameters have no gradient, and what to do.

/// The operations of candle 0.11 that cut the graph most often. `guide/cuts.md` has all.
pub(crate) const CUTS: &str = "In candle `LayerNorm::forward` (use `ops::layer_norm_slow`), \
                               `RmsNorm::forward` (use `RmsNorm::forward_diff`) and `ops::softmax_last_dim` \
                               (use `ops::softmax`) cut the graph without an error; the page \
                               `optimisers::guide::cuts` lists all that do";

/// What BatchNorm's running statistics are, where nothing else lacks a gradient.
pub(crate) const STATISTICS: &str = "These are running statistics of BatchNorm, which its forward pass \
                                     moves: leave them out of the state, with `None` for them in \
                                     `setup_with`";

/// Advice for messages about parameters without a gradient, in whose list running statistics are last.
pub(crate) fn advice(paths: &[String]) -> String {
    match paths.first() {
        Some(first) if is_running_statistic(first) => STATISTICS.to_string(),
        _ => format!(
            "If the loss should depend on them, something cuts the graph: `audit(&model, &loss)` shows what \
             it reaches. {CUTS}"
        ),
    }
}

/// Whether a path is that of a running statistic of BatchNorm: a variable of a `VarMap` that no loss is
/// differentiated by.
pub(crate) fn is_running_statistic(path: &str) -> bool {
    matches!(path.rsplit('.').next(), Some("running_mean" | "running_var"))
}
