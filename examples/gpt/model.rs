//! The network: a transformer that sees some characters and guesses after each of them which comes next.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear, RmsNorm, ops::softmax};
use optimisers::{Segments, model};

use crate::random::Random;

/// Keeps the norms' denominators from zero.
const EPSILON: f64 = 1e-5;
/// The bound of the embeddings' first numbers.
const EMBEDDING: f32 = 0.05;
/// The hidden layer of a feed-forward part is this much wider than the rest.
const EXPANSION: usize = 4;

/// What a network looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) characters: usize,
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
}

/// A decoder-only transformer as GPT-2, with RmsNorm and without biases.
///
/// Its matrices are parameters of the dtype it was made with, and its matrix products take operands of that
/// dtype. What is between the products is in F32: sums, norms with their parameters, softmax, logits.
pub(crate) struct Gpt {
    characters: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    logits: Linear,
}

// All that the optimiser needs to know: which fields have parameters (`..` says that others have none). Their
// paths are `characters.weight`, `blocks.0.attention.query.weight` and so on.
model!(Gpt {
    characters,
    positions,
    blocks,
    norm,
    logits
});

struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    feed_forward: FeedForward,
}

model!(Block {
    attention_norm,
    attention,
    feed_forward_norm,
    feed_forward
});

struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

model!(Attention {
    query,
    key,
    value,
    output,
    ..
});

struct FeedForward {
    expand: Linear,
    contract: Linear,
}

model!(FeedForward { expand, contract });

impl Gpt {
    /// A network with random weights, the same in every dtype but for rounding.
    pub(crate) fn new(size: Size, dtype: DType, seed: u64, device: &Device) -> Result<Self> {
        let mut parameters = Parameters {
            random: Random::new(seed),
            dtype,
            device,
        };
        let Size {
            characters,
            context,
            layers,
            width,
            ..
        } = size;
        Ok(Gpt {
            characters: parameters.embedding(characters, width)?,
            positions: parameters.embedding(context, width)?,
            blocks: (0..layers)
                .map(|_| Block::new(size, &mut parameters))
                .collect::<Result<_>>()?,
            norm: parameters.norm(width)?,
            logits: parameters.linear(width, characters)?,
        })
    }

    /// Where the parameters are.
    pub(crate) fn device(&self) -> &Device {
        self.characters.embeddings().device()
    }

    /// The logits of what comes after each of the characters `(windows, length)`:
    /// `(windows * length, characters)`.
    pub(crate) fn forward(&self, characters: &Tensor) -> Result<Tensor> {
        let (windows, length) = characters.dims2()?;
        let mask = causal_mask(length, characters.device())?;
        let mut x = self.embed(characters)?;
        for block in &self.blocks {
            x = block.forward(&x, windows, &mask)?;
        }
        self.predict(&x)
    }

    /// The same in segments: the embeddings, each block, and the logits.
    pub(crate) fn segments(&self, characters: &Tensor) -> Result<Segments<'_, Tensor>> {
        let (windows, length) = characters.dims2()?;
        let mask = causal_mask(length, characters.device())?;
        Ok(Segments::new(characters)
            .then(|characters| self.embed(characters))
            .each(&self.blocks, move |block, x| block.forward(x, windows, &mask))
            .then(|x| self.predict(x)))
    }

    fn embed(&self, characters: &Tensor) -> Result<Tensor> {
        let (windows, length) = characters.dims2()?;
        let positions = look_up(
            &self.positions,
            &Tensor::arange(0, length as u32, characters.device())?,
        )?;
        look_up(&self.characters, characters)?
            .broadcast_add(&positions)?
            .reshape((windows * length, ()))
    }

    fn predict(&self, x: &Tensor) -> Result<Tensor> {
        apply(&self.logits, &normalise(&self.norm, x)?)
    }
}

impl Block {
    fn new(Size { width, heads, .. }: Size, parameters: &mut Parameters<'_>) -> Result<Self> {
        let mut square = || parameters.linear(width, width);
        let attention = Attention {
            query: square()?,
            key: square()?,
            value: square()?,
            output: square()?,
            heads,
        };
        let hidden = EXPANSION * width;
        Ok(Block {
            attention_norm: parameters.norm(width)?,
            attention,
            feed_forward_norm: parameters.norm(width)?,
            feed_forward: FeedForward {
                expand: parameters.linear(width, hidden)?,
                contract: parameters.linear(hidden, width)?,
            },
        })
    }

    fn forward(&self, x: &Tensor, windows: usize, mask: &Tensor) -> Result<Tensor> {
        let x = (x + self
            .attention
            .forward(&normalise(&self.attention_norm, x)?, windows, mask)?)?;
        &x + self
            .feed_forward
            .forward(&normalise(&self.feed_forward_norm, &x)?)?
    }
}

impl Attention {
    fn forward(&self, x: &Tensor, windows: usize, mask: &Tensor) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        let dtype = self.output.weight().dtype();
        // (windows, heads, length, width / heads)
        let split = |layer| {
            apply(layer, x)?
                .reshape((windows, tokens / windows, self.heads, ()))?
                .transpose(1, 2)
        };
        let (query, key, value) = (split(&self.query)?, split(&self.key)?, split(&self.value)?);
        let scale = (self.heads as f64 / width as f64).sqrt();
        let scores = (product(&query, &key.t()?, dtype)? * scale)?.broadcast_add(mask)?;
        let seen = product(&softmax(&scores, D::Minus1)?, &value, dtype)?;
        apply(&self.output, &seen.transpose(1, 2)?.reshape((tokens, width))?)
    }
}

impl FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply(&self.contract, &apply(&self.expand, x)?.relu()?)
    }
}

/// The product of two matrices, or of many, taken in `dtype` and returned in F32.
fn product(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let operand = |x: &Tensor| x.to_dtype(dtype)?.contiguous();
    operand(a)?.matmul(&operand(b)?)?.to_dtype(DType::F32)
}

/// `layer` on `x` in the dtype of its weight. candle-nn's `forward` wants `x` in that dtype and leaves the
/// result in it.
fn apply(layer: &Linear, x: &Tensor) -> Result<Tensor> {
    let weight = layer.weight();
    product(x, &weight.t()?, weight.dtype())
}

/// Rows of `embedding` in F32. They are widened first: so their gradients, of which a frequent character has
/// hundreds, are summed in F32.
fn look_up(embedding: &Embedding, rows: &Tensor) -> Result<Tensor> {
    Embedding::new(
        embedding.embeddings().to_dtype(DType::F32)?,
        embedding.hidden_size(),
    )
    .forward(rows)
}

/// `norm` on `x`. Its `forward` would be candle's fused operation, which has no gradient.
fn normalise(norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
    norm.forward_diff(x)
}

/// 0 where a character looks at itself or back, -∞ where it would look ahead.
fn causal_mask(length: usize, device: &Device) -> Result<Tensor> {
    let row = |own| (0..length).map(move |other| if other <= own { 0.0 } else { f32::NEG_INFINITY });
    Tensor::from_vec((0..length).flat_map(row).collect(), (length, length), device)
}

/// Where the first numbers of the layers come from.
struct Parameters<'d> {
    random: Random,
    /// The dtype of the matrices.
    dtype: DType,
    device: &'d Device,
}

impl Parameters<'_> {
    fn linear(&mut self, inputs: usize, outputs: usize) -> Result<Linear> {
        Ok(Linear::new(
            self.matrix((outputs, inputs), 1.0 / (inputs as f32).sqrt())?,
            None,
        ))
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Embedding> {
        Ok(Embedding::new(self.matrix((rows, width), EMBEDDING)?, width))
    }

    fn matrix(&mut self, shape: (usize, usize), bound: f32) -> Result<Tensor> {
        self.random.variable(shape, bound, self.dtype, self.device)
    }

    fn norm(&self, width: usize) -> Result<RmsNorm> {
        Ok(RmsNorm::new(
            Var::ones(width, DType::F32, self.device)?.into_inner(),
            EPSILON,
        ))
    }
}
