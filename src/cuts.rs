//! candle's operations through which no gradient passes.

/// An operation of candle that ends the graph without an error: what is upstream of it gets no gradient, and trains as if it were frozen.
///
/// All are in [`CUTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cut {
    /// The operation, under its name in candle-nn or candle.
    pub operation: &'static str,
    /// When it cuts.
    pub when: &'static str,
    /// What computes the same and has a gradient.
    pub instead: &'static str,
}

/// The operations of candle 0.11 that end the graph without an error, and what to use in their place.
///
/// In one of several branches, as in a norm before a residual connection, such an operation leaves only what lies in that branch alone without a
/// gradient. What other branches reach has one, and it lacks a part. Of a matrix that is several in one, such as queries, keys and values before
/// `ops::softmax_last_dim`, only the rows behind the cut lack theirs, which [`Audited::cut_rows`](crate::Audited::cut_rows) tells.
///
/// The graph ends in the same way where a program asks for it: at `Tensor::detach`, at values that were read with `to_vec1` or `to_scalar` and put
/// into a new tensor or `Var`, and at what has no useful derivative (`floor`, `ceil`, `round`, `sign`, `argmax`, comparisons, integers).
///
/// ```
/// for cut in optimisers::CUTS {
///     println!("{} ({}): use {}", cut.operation, cut.when, cut.instead);
/// }
/// ```
pub const CUTS: &[Cut] = &[
    cut(
        "LayerNorm::forward, ops::layer_norm",
        "contiguous input, with a bias and the mean removed: the default",
        "ops::layer_norm_slow, or layer_norm_no_bias",
    ),
    cut("RmsNorm::forward, ops::rms_norm", "contiguous input", "RmsNorm::forward_diff, or ops::rms_norm_slow"),
    cut("ops::softmax_last_dim", "always", "ops::softmax(x, D::Minus1)"),
    cut("rotary_emb::rope", "always", "rotary_emb::rope_slow"),
    cut("rotary_emb::rope_i", "always", "rotary_emb::rope_i_slow"),
    cut("rotary_emb::rope_thd", "always", "rotary_emb::rope_slow between two transpose(1, 2)"),
    cut(
        "attention::flash_attn, flash_attn_varlen_*, ops::sdpa",
        "always; `flash_attn_varlen_unfused` for queries and keys only",
        "matmul, ops::softmax, matmul",
    ),
    cut("kv_cache::*::append", "always; a RotatingCache for less than it holds", "the keys and values themselves"),
    cut("QMatMul::forward", "quantised weight", "QMatMul::Tensor(weight.dequantize(device)?)"),
    cut("moe::moe_gemm, moe_gemm_gguf", "always (CUDA)", "a matmul for each expert"),
];

const fn cut(operation: &'static str, when: &'static str, instead: &'static str) -> Cut {
    Cut { operation, when, instead }
}

/// What to do about parameters that are without a gradient, for messages.
pub(crate) fn advice() -> String {
    format!("Where the loss depends on them something cuts the graph. {}. `audit(&model, &loss)` shows what a loss reaches", silent_cuts())
}

/// What cuts the graph, and what to use in its place.
pub(crate) fn silent_cuts() -> String {
    let cuts: Vec<String> = CUTS.iter().map(|Cut { operation, instead, .. }| format!("{operation} (use {instead})")).collect();
    format!("These operations of candle do so without an error: {}", cuts.join("; "))
}
