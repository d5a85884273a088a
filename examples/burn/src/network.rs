//! The convolutional network of burn's guide, for images of 8 x 8 pixels and without dropout, so that runs
//! can be compared.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::digits::{CLASSES, PIXELS};

const SIDE: usize = 8;
const CHANNELS: [usize; 2] = [8, 16];
const HIDDEN: usize = 512;

#[derive(Module, Debug)]
pub struct Network {
    conv1: Conv2d,
    conv2: Conv2d,
    linear1: Linear,
    linear2: Linear,
    activation: Relu,
}

impl Network {
    pub fn new(device: &Device) -> Self {
        // Each convolution with a kernel of 3 x 3 takes two pixels off each side.
        let side = SIDE - 4;
        Network {
            conv1: Conv2dConfig::new([1, CHANNELS[0]], [3, 3]).init(device),
            conv2: Conv2dConfig::new(CHANNELS, [3, 3]).init(device),
            linear1: LinearConfig::new(CHANNELS[1] * side * side, HIDDEN).init(device),
            linear2: LinearConfig::new(HIDDEN, CLASSES).init(device),
            activation: Relu::new(),
        }
    }

    /// Logits in f32, of images row by row.
    pub fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let [batch, _] = images.dims();
        let x = images
            .cast(self.linear1.weight.val().dtype())
            .reshape([batch, 1, SIDE, PIXELS / SIDE]);
        let x = self.activation.forward(self.conv1.forward(x));
        let x = self.activation.forward(self.conv2.forward(x));
        let x = self.activation.forward(self.linear1.forward(x.reshape([0, -1])));
        self.linear2.forward(x).cast(FloatDType::F32)
    }

    /// The same network with parameters of another dtype.
    pub fn with_dtype(self, dtype: DType) -> Self {
        self.map(&mut Cast(dtype))
    }
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A parameter is a leaf of the graph: it is cast outside.
        parameter.map(|tensor| tensor.inner().cast(self.0).autodiff().require_grad())
    }
}
