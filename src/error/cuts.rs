//! candle's operations through which no gradient passes.

/// Operations of candle 0.11 that cut the graph without an error, each with one that computes the same and
/// has a gradient. Names are those in candle-nn or candle. `guide/cuts.md` also says when each cuts.
const CUTS: &[(&str, &str)] = &[
    ("LayerNorm::forward, ops::layer_norm", "ops::layer_norm_slow, or layer_norm_no_bias"),
    ("RmsNorm::forward, ops::rms_norm", "RmsNorm::forward_diff, or ops::rms_norm_slow"),
    ("ops::softmax_last_dim", "ops::softmax(x, D::Minus1)"),
    ("rotary_emb::rope", "rotary_emb::rope_slow"),
    ("rotary_emb::rope_i", "rotary_emb::rope_i_slow"),
    ("rotary_emb::rope_thd", "rotary_emb::rope_slow between two transpose(1, 2)"),
    ("attention::flash_attn, flash_attn_varlen_*, ops::sdpa", "matmul, ops::softmax, matmul"),
    ("kv_cache::*::append", "the keys and values themselves"),
    ("QMatMul::forward", "QMatMul::Tensor(weight.dequantize(device)?)"),
    ("moe::moe_gemm, moe_gemm_gguf", "a matmul for each expert"),
];

/// Advice for messages about parameters without a gradient.
pub(crate) fn advice() -> String {
    format!("Where the loss depends on them something cuts the graph: `audit(&model, &loss)` shows what a loss reaches. {}", silent_cuts())
}

/// What cuts the graph, and what to use in its place.
pub(crate) fn silent_cuts() -> String {
    let cuts: Vec<String> = CUTS.iter().map(|(operation, instead)| format!("{operation} (use {instead})")).collect();
    format!("These operations of candle do so without an error: {}", cuts.join("; "))
}
