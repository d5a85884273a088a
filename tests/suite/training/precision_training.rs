//! A transformer in F16 with some parts in F32, trained.

use candle_core::{D, DType, Device, IndexOp, Module, Tensor};
use candle_nn::{
    Embedding, Linear, RmsNorm, VarBuilder, VarMap, embedding, linear, linear_no_bias, loss::cross_entropy,
    ops::softmax, rms_norm,
};
use optimisers::{AdamW, InDtype, LossScaler, MixedPrecision, PrecisionPolicy, Status, Update, setup};

use crate::training::precision::policy;
use support::common::devices;

/// `RmsNorm` by the formula that has gradients.
struct Norm(RmsNorm);

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.forward_diff(x)
    }
}

struct Attention {
    heads: usize,
    projections: Linear,
    output: Linear,
}

impl Attention {
    fn new(width: usize, heads: usize, builder: VarBuilder) -> candle_core::Result<Self> {
        let projections = linear_no_bias(width, 3 * width, builder.pp("projections"))?;
        Ok(Attention {
            heads,
            projections,
            output: linear_no_bias(width, width, builder.pp("output"))?,
        })
    }
}

impl Module for Attention {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, length, width) = x.dims3()?;
        let parts = self
            .projections
            .forward(x)?
            .reshape((batch, length, 3, self.heads, width / self.heads))?
            .permute((2, 0, 3, 1, 4))?;
        let (queries, keys, values) = (
            parts.i(0)?.contiguous()?,
            parts.i(1)?.contiguous()?,
            parts.i(2)?.contiguous()?,
        );
        let scores = (queries.matmul(&keys.t()?)? / (width as f64 / self.heads as f64).sqrt())?;
        let weights =
            InDtype::new(DType::F32, |scores: &Tensor| softmax(scores, D::Minus1))?.forward(&scores)?;
        self.output.forward(
            &weights
                .matmul(&values)?
                .transpose(1, 2)?
                .reshape((batch, length, width))?,
        )
    }
}

struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    attention_norm: InDtype<Norm>,
    attention: Attention,
    mlp_norm: InDtype<Norm>,
    widen: Linear,
    narrow: Linear,
    output_norm: InDtype<Norm>,
    output: Linear,
}

const WIDTH: usize = 16;
const LENGTH: usize = 6;
const TOKENS: usize = 11;

impl Transformer {
    fn new(builder: VarBuilder) -> candle_core::Result<Self> {
        let norm = |name: &str| -> candle_core::Result<InDtype<Norm>> {
            Ok(InDtype::new(
                DType::F32,
                Norm(rms_norm(WIDTH, 1e-5, builder.pp(name).pp("norm"))?),
            )?)
        };
        Ok(Transformer {
            tokens: embedding(TOKENS, WIDTH, builder.pp("tokens"))?,
            positions: embedding(LENGTH, WIDTH, builder.pp("positions"))?,
            attention_norm: norm("attention")?,
            attention: Attention::new(WIDTH, 2, builder.pp("attention"))?,
            mlp_norm: norm("mlp")?,
            widen: linear(WIDTH, 4 * WIDTH, builder.pp("mlp.widen"))?,
            narrow: linear(4 * WIDTH, WIDTH, builder.pp("mlp.narrow"))?,
            output_norm: norm("output")?,
            output: linear_no_bias(WIDTH, TOKENS, builder.pp("output"))?,
        })
    }
}

impl Module for Transformer {
    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let positions = self
            .positions
            .forward(&Tensor::arange(0, LENGTH as u32, tokens.device())?)?;
        let x = self.tokens.forward(tokens)?.broadcast_add(&positions)?;
        let x = (&x + self.attention.forward(&self.attention_norm.forward(&x)?)?)?;
        let x = (&x
            + self
                .narrow
                .forward(&self.widen.forward(&self.mlp_norm.forward(&x)?)?.gelu()?)?)?;
        self.output.forward(&self.output_norm.forward(&x)?)
    }
}

/// Sequences, and the same sequences reversed: what the model is to answer.
fn task(device: &Device) -> (Tensor, Tensor) {
    let sequences: Vec<u32> = (0..16 * LENGTH as u32)
        .map(|i| (i * i + 3 * i) % TOKENS as u32)
        .collect();
    let reversed = sequences
        .chunks(LENGTH)
        .flat_map(|sequence| sequence.iter().rev().copied())
        .collect::<Vec<_>>();
    let tensor =
        |numbers: Vec<u32>, shape: &[usize]| Tensor::from_vec(numbers, shape, device).expect("tokens");
    (tensor(sequences, &[16, LENGTH]), tensor(reversed, &[16 * LENGTH]))
}

fn norms_in_f32() -> PrecisionPolicy {
    policy(&[("*.norm.*", DType::F32), ("*", DType::F16)])
}

#[test]
fn a_transformer_in_f16_with_norms_in_f32_trains_with_masters_where_they_are_needed() {
    for device in devices() {
        let (policy, variables) = (norms_in_f32(), VarMap::new());
        let model = Transformer::new(policy.builder(&variables, &device)).expect("a model");
        policy.check(&variables).expect("as the policy says");

        let mut state =
            setup(MixedPrecision::new(DType::F32, AdamW::new(1e-2)), &variables).expect("a state");
        for leaf in state.leaves() {
            let is_norm = leaf.path().contains(".norm.");
            assert_eq!(
                leaf.dtype(),
                if is_norm { DType::F32 } else { DType::F16 },
                "{}",
                leaf.path()
            );
            assert_eq!(
                leaf.tensor_names().contains(&"master".to_string()),
                !is_norm,
                "{}",
                leaf.path()
            );
        }
        assert_eq!(
            (
                state.len(),
                state.leaves().filter(|leaf| leaf.dtype() == DType::F32).count()
            ),
            (12, 3)
        );

        let (tokens, answers) = task(&device);
        let mut scaler = LossScaler::dynamic();
        let (mut losses, mut steps) = (Vec::new(), 0);
        for _ in 0..80 {
            let logits = model.forward(&tokens).expect("logits");
            assert_eq!(logits.dtype(), DType::F16);
            let loss = logits
                .flatten_to(1)
                .and_then(|x| cross_entropy(&x.to_dtype(DType::F32)?, &answers))
                .expect("a loss");
            let gradients = scaler
                .scale(&loss)
                .and_then(|loss| Ok(loss.backward()?))
                .expect("gradients");
            let outcome = Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&variables, &gradients)
                .expect("an update");
            assert_eq!(outcome.without_gradient, [""; 0]);
            steps += usize::from(outcome.status == Status::Stepped);
            losses.push(loss.to_scalar::<f32>().expect("a number"));
        }
        assert!(
            steps > 70 && losses[79] < 0.5 * losses[0],
            "{steps} steps, {losses:?}"
        );
        policy.check(&variables).expect("still as the policy says");
    }
}

/// The trap that the documentation of `InDtype` names: candle's fused norm has no gradients, and an outcome
/// tells.
#[test]
fn fused_norms_leave_parameters_without_gradient() {
    let variables = VarMap::new();
    let builder = norms_in_f32().builder(&variables, &Device::Cpu);
    let first = linear_no_bias(4, 4, builder.pp("first")).expect("a layer");
    let norm = InDtype::new(
        DType::F32,
        rms_norm(4, 1e-5, builder.pp("x.norm")).expect("a norm"),
    )
    .expect("an adaptor");
    let last = linear_no_bias(4, 4, builder.pp("last")).expect("a layer");
    let input = Tensor::ones((2, 4), DType::F16, &Device::Cpu).expect("an input");
    let output = first
        .forward(&input)
        .and_then(|x| last.forward(&norm.forward(&x)?))
        .expect("an output");
    let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(1e-2)), &variables).expect("a state");
    let mut scaler = LossScaler::fixed(1.0);
    let gradients = output
        .sqr()
        .and_then(|y| scaler.scale(&y.sum_all()?)?.backward())
        .expect("gradients");
    let outcome = Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&variables, &gradients)
        .expect("an update");
    assert_eq!(outcome.applied, 1);
    assert_eq!(outcome.without_gradient, ["first.weight", "x.norm.weight"]);
}
