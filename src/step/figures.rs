//! Norms of gradients, parameters and updates, to watch while training.

use std::fmt::{self, Display};

use crate::rule::LeafNorms;
use crate::tree::Leaf;

/// What a step did to one parameter, in norms of gradient, parameter and update.
///
/// Each norm is the root of a sum of squares in f64, over the whole parameter even if it is divided among
/// ranks.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Adam, Update, setup};
///
/// let model = vec![Var::new(&[1f32, 1.0], &Device::Cpu)?, Var::new(&[-1f32], &Device::Cpu)?];
/// let mut state = setup(Adam::new(1e-3), &model)?;
/// // The second parameter is behind a ReLU that does not open.
/// let loss = (model[0].sum_all()? + model[1].relu()?.sum_all()?)?;
/// let figures = Update::new(&mut state).with_figures().apply(&model, &loss.backward()?)?.figures;
///
/// for leaf in &figures {
///     println!("{leaf}");
/// }
/// assert!((figures[0].ratio() - 1e-3).abs() < 1e-9);
/// // What does not learn, and what moves much too far.
/// let dead: Vec<_> = figures.iter().filter(|leaf| leaf.ratio() < 1e-7).map(|leaf| leaf.path.as_str()).collect();
/// assert_eq!(dead, ["1"]);
/// assert!(figures.iter().all(|leaf| leaf.ratio() < 0.1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeafFigures {
    /// The parameter's path.
    pub path: String,
    /// ‖dx‖ of the gradient before the rules: without the loss scale, the mean of all ranks. With
    /// [`AccumGrad`](crate::AccumGrad) the mean (or sum) over the window.
    pub gradient: f64,
    /// ‖x‖ of the parameter before the step, or of its master if it has one.
    pub parameter: f64,
    /// ‖dx'‖ of the update that is subtracted from x, before rounding to the parameter's dtype.
    pub update: f64,
}

impl LeafFigures {
    /// The figures of a leaf, if its norms were computed.
    pub(super) fn found(leaf: &Leaf, norms: &LeafNorms) -> Option<Self> {
        let (gradient, step) = norms.found()?;
        Some(LeafFigures {
            path: leaf.path.clone(),
            gradient,
            parameter: step.parameter,
            update: step.gradient,
        })
    }

    /// How far the step moved the parameter, relative to its size: update / parameter.
    ///
    /// If the parameter is zero, such as a bias at first, the ratio is infinite, or NaN if the parameter does
    /// not move.
    ///
    /// With Adam and similar rules about 1e-3 is usual for matrices. At 1e-2 and more, the learning rate is
    /// too high or the warm-up too short; at 1e-5 and less, the learning rate is too low. A parameter without
    /// a master loses the step of an element if it is below 2⁻²⁵ of the element in F32, 2⁻¹² in F16 and 2⁻⁹
    /// (0.002) in BF16.
    pub fn ratio(&self) -> f64 {
        self.update / self.parameter
    }
}

/// The figures in one line.
impl Display for LeafFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeafFigures { path, gradient, parameter, update } = self;
        write!(
            f,
            "{path}: gradient {gradient:.3e}, parameter {parameter:.3e}, update {update:.3e}, ratio {:.3e}",
            self.ratio()
        )
    }
}
