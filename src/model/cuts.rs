//! Texts for messages: why parameters have no gradient, and what to do.

/// The operations of candle 0.11 that cut the graph most often. `guide/cuts.md` lists all.
pub(crate) const CUTS: &str = "In candle `LayerNorm::forward` (use `ops::layer_norm_slow`), \
                               `RmsNorm::forward` (use `RmsNorm::forward_diff`) and `ops::softmax_last_dim` \
                               (use `ops::softmax`) cut the graph without an error; the page \
                               `optimisers::guide::cuts` lists all that do";

/// For messages in which only running statistics of BatchNorm lack a gradient.
pub(crate) const STATISTICS: &str = "These are running statistics of BatchNorm, which its forward pass \
                                     changes: leave them out of the state, with `None` for them in \
                                     `setup_with`";

/// Advice for a message about parameters without a gradient. The caller sorts running statistics of BatchNorm
/// to the end of `paths`, so if the first path is one, all are.
pub(crate) fn advice(paths: &[String]) -> String {
    match paths.first() {
        Some(first) if is_running_statistic(first) => STATISTICS.to_string(),
        _ => format!(
            "If the loss should depend on them, something cuts the graph: `audit(&model, &loss)` shows what \
             the loss reaches. {CUTS}"
        ),
    }
}

/// Whether the path is that of a running statistic of BatchNorm. A `VarMap` has it as a variable, although no
/// loss is differentiated by it.
pub(crate) fn is_running_statistic(path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    name.starts_with("running_") || name == "num_batches_tracked"
}
