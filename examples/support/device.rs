//! The device to work on.

use candle_core::Device;
use clap::ValueEnum;

/// A device by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    Cpu,
    /// The first NVIDIA GPU, in a build with `--features cuda`
    Cuda,
}

impl DeviceName {
    /// The device, where this build and this machine have it.
    pub(crate) fn open(self) -> Result<Device, String> {
        match self {
            DeviceName::Cpu => Ok(Device::Cpu),
            DeviceName::Cuda if !cfg!(feature = "cuda") => {
                Err("this build knows no CUDA devices: build with --features cuda".to_string())
            }
            DeviceName::Cuda => {
                Device::new_cuda(0).map_err(|error| format!("no CUDA device can be used here: {error}"))
            }
        }
    }
}
