//! Texts for messages: why parameters have no gradient, and what to do.

/// The two operations that cut off queries and keys, but not values. The operations leave equal graphs, so a
/// message names both.
pub(crate) const QUERIES: &str = "`rotary_emb::rope` (use `rotary_emb::rope_slow`) and \
                                  `ops::softmax_last_dim` (use `ops::softmax`) cut off queries and keys";

/// The two operations that cut off the variables of a norm.
pub(crate) const NORMS: &str = "`LayerNorm::forward` (use `ops::layer_norm_slow`) and `RmsNorm::forward` \
                                (use `RmsNorm::forward_diff`) cut off their variables and all before them";

/// For messages that do not know what has cut the graph.
pub(crate) const USUAL: [&str; 2] = [QUERIES, NORMS];

/// A sentence, without its full stop, about the operations that are likely to have cut a graph.
/// `guide/cuts.md` lists all operations that cut.
pub(crate) fn cut_hint(likely: &[&str]) -> String {
    if likely.is_empty() {
        return "The page `optimisers::guide::cuts` lists what cuts a graph without an error".to_string();
    }
    format!(
        "In candle {}, without an error; the page `optimisers::guide::cuts` lists all that cuts",
        likely.join("; ")
    )
}

/// For messages in which only running statistics of BatchNorm lack a gradient.
pub(crate) const STATISTICS: &str = "These are running statistics of BatchNorm, which its forward pass \
                                     changes: leave them out of the state, with `None` for them in \
                                     `setup_with`";

/// Advice for a message about parameters without a gradient. The caller sorts running statistics of BatchNorm
/// to the end of `paths`. So if the first path is a running statistic, all are.
pub(crate) fn advice(paths: &[String]) -> String {
    match paths.first() {
        Some(first) if is_running_statistic(first) => STATISTICS.to_string(),
        _ => format!(
            "If the loss should depend on them, something cuts the graph: `audit(&model, &loss)` shows what \
             the loss reaches. {}",
            cut_hint(&USUAL)
        ),
    }
}

/// Whether the path is that of a running statistic of BatchNorm. A `VarMap` has running statistics as
/// variables, although no loss is differentiated by them.
pub(crate) fn is_running_statistic(path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    name.starts_with("running_") || name == "num_batches_tracked"
}
