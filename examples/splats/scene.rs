//! An image as a sum of round Gaussians, with the gradients of its squared error.

use optimisers::{GradientSlices, ParameterSlices};

/// Pixels per side.
pub(crate) const SIDE: usize = 32;

/// What each Gaussian has: a place, the logarithm of its radius, and how bright it is. Lengths are in sides
/// of the image.
#[derive(Default)]
pub(crate) struct Splats {
    /// `(n, 2)`: x and y.
    pub(crate) means: Vec<f32>,
    /// `(n,)`
    pub(crate) radii: Vec<f32>,
    /// `(n,)`
    pub(crate) weights: Vec<f32>,
}

/// A ring with a bright dot beside its middle.
pub(crate) fn image() -> Vec<f32> {
    let light = |i: usize| {
        let [x, y] = [i % SIDE, i / SIDE].map(|i| (i as f32 + 0.5) / SIDE as f32 - 0.5);
        let ring = (x.hypot(y) - 0.32).abs() < 0.07;
        let dot = (x - 0.08).hypot(y + 0.05) < 0.08;
        if ring || dot { 1.0 } else { 0.0 }
    };
    (0..SIDE * SIDE).map(light).collect()
}

impl Splats {
    /// As many per side, evenly.
    pub(crate) fn grid(side: usize) -> Self {
        let middle = |i: usize| (i as f32 + 0.5) / side as f32;
        let means = (0..side * side)
            .flat_map(|i| [middle(i % side), middle(i / side)])
            .collect();
        Splats {
            means,
            radii: vec![0.1f32.ln(); side * side],
            weights: vec![0.1; side * side],
        }
    }

    pub(crate) fn zeros(count: usize) -> Self {
        Splats {
            means: vec![0.0; 2 * count],
            radii: vec![0.0; count],
            weights: vec![0.0; count],
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.radii.len()
    }

    /// These Gaussians in this order.
    pub(crate) fn rows(&self, rows: &[usize]) -> Self {
        Splats {
            means: rows
                .iter()
                .flat_map(|&row| [self.means[2 * row], self.means[2 * row + 1]])
                .collect(),
            radii: rows.iter().map(|&row| self.radii[row]).collect(),
            weights: rows.iter().map(|&row| self.weights[row]).collect(),
        }
    }

    /// What the optimiser gets to see, for one call.
    pub(crate) fn lend(&mut self) -> optimisers::Result<ParameterSlices<'_>> {
        let count = self.len();
        let Splats {
            means,
            radii,
            weights,
        } = self;
        ParameterSlices::new()
            .with("splats.means", (count, 2), means)?
            .with("splats.radii", count, radii)?
            .with("splats.weights", count, weights)
    }

    pub(crate) fn show(&self) -> optimisers::Result<GradientSlices<'_>> {
        let Splats {
            means,
            radii,
            weights,
        } = self;
        GradientSlices::new()
            .with("splats.means", means)?
            .with("splats.radii", radii)?
            .with("splats.weights", weights)
    }

    /// The mean squared error against an image, and its gradients.
    pub(crate) fn error(&self, image: &[f32]) -> (f32, Splats) {
        let mut gradients = Splats::zeros(self.len());
        let mut error = 0.0;
        for (pixel, expected) in image.iter().enumerate() {
            let touched = self.touched(pixel);
            let difference = self.light(&touched) - expected;
            error += difference * difference / image.len() as f32;
            for Touch {
                splat,
                height,
                away: [x, y],
            } in touched
            {
                let of_height = 2.0 * difference / image.len() as f32 * height;
                let of_exponent = of_height * self.weights[splat];
                let per_square = (-2.0 * self.radii[splat]).exp();
                gradients.weights[splat] += of_height;
                gradients.means[2 * splat] += of_exponent * x * per_square;
                gradients.means[2 * splat + 1] += of_exponent * y * per_square;
                gradients.radii[splat] += of_exponent * (x * x + y * y) * per_square;
            }
        }
        (error, gradients)
    }

    /// The image that the Gaussians make.
    pub(crate) fn painted(&self) -> Vec<f32> {
        (0..SIDE * SIDE)
            .map(|pixel| self.light(&self.touched(pixel)))
            .collect()
    }

    /// The Gaussians that are seen in a pixel.
    fn touched(&self, pixel: usize) -> Vec<Touch> {
        let at = [pixel % SIDE, pixel / SIDE].map(|i| (i as f32 + 0.5) / SIDE as f32);
        (0..self.len())
            .filter_map(|splat| self.touch(splat, at))
            .collect()
    }

    fn light(&self, touched: &[Touch]) -> f32 {
        touched
            .iter()
            .map(|touch| self.weights[touch.splat] * touch.height)
            .sum()
    }

    fn touch(&self, splat: usize, [x, y]: [f32; 2]) -> Option<Touch> {
        let away = [x - self.means[2 * splat], y - self.means[2 * splat + 1]];
        let exponent = -0.5 * (away[0] * away[0] + away[1] * away[1]) * (-2.0 * self.radii[splat]).exp();
        (exponent > -12.0).then(|| Touch {
            splat,
            height: exponent.exp(),
            away,
        })
    }
}

/// A Gaussian that is seen in a pixel.
struct Touch {
    splat: usize,
    /// Of 1 in its middle.
    height: f32,
    away: [f32; 2],
}
