//! Norms of gradients, parameters and updates, to watch while training.

use std::fmt::{self, Display, Write};

/// What a step did to each parameter that it moved, where the update was asked for [figures](crate::Update::with_figures): in the order of paths.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Adam, Update, setup};
///
/// let model = vec![Var::new(&[1f32, 1.0], &Device::Cpu)?, Var::new(&[-1f32], &Device::Cpu)?];
/// let mut state = setup(Adam::new(1e-3), &model)?;
/// // The second parameter is behind a ReLU that does not open.
/// let loss = (model[0].sum_all()? + model[1].relu()?.sum_all()?)?;
/// let outcome = Update::new(&mut state).with_figures().apply(&model, &loss.backward()?)?;
///
/// for leaf in outcome.figures.iter() {
///     println!("{leaf}");
/// }
/// assert!((outcome.figures[0].ratio() - 1e-3).abs() < 1e-9);
/// let dead: Vec<_> = outcome.figures.dead(1e-7).map(|leaf| leaf.path.as_str()).collect();
/// assert_eq!(dead, ["1"]);
/// assert_eq!(outcome.figures.exploding(0.1).count(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default, PartialEq)]
pub struct Figures(Vec<LeafFigures>);

/// What a step did to one parameter, in norms: each is the root of a sum of squares in f64 over the whole parameter, also where it is divided among
/// ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeafFigures {
    /// The parameter's path.
    pub path: String,
    /// ‖dx‖ of the gradient before the rules: without the loss scale, the mean of all ranks. Where [`AccumGrad`](crate::AccumGrad) collects it is that of what
    /// this hands on, the mean (or sum) over the window.
    pub gradient: f64,
    /// ‖x‖ of the parameter before the step; of its master, where it has one.
    pub parameter: f64,
    /// ‖dx'‖ of what the step subtracts from that, before it is rounded to the parameter's dtype.
    pub update: f64,
}

impl LeafFigures {
    /// How far the step moved the parameter, relative to its size: update / parameter. Infinite for a parameter that is zero, as biases are at first, and NaN where
    /// that does not move.
    ///
    /// With Adam and its kin about 1e-3 is usual for matrices; 1e-2 and more is a learning rate that is too high, or a warm-up that is too short, and 1e-5 and
    /// less one that is too low. A parameter without a master keeps nothing of an element's step that is below 2⁻²⁵ of the element in F32, 2⁻¹² in F16 and 2⁻⁹ (0.002) in BF16.
    pub fn ratio(&self) -> f64 {
        self.update / self.parameter
    }

    /// Whether the parameter does not learn: no gradient reaches it, or the step is less than this part of it. See [`Figures::dead`].
    pub fn is_dead(&self, threshold: f64) -> bool {
        self.gradient == 0.0 || self.update == 0.0 || self.update < threshold * self.parameter
    }

    /// Whether the step is more than this part of the parameter, or a norm is infinite or NaN. See [`Figures::exploding`].
    pub fn is_exploding(&self, threshold: f64) -> bool {
        let is_finite = [self.gradient, self.parameter, self.update].iter().all(|norm| norm.is_finite());
        !is_finite || (self.parameter > 0.0 && self.update > threshold * self.parameter)
    }
}

/// One line for people.
impl Display for LeafFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeafFigures { path, gradient, parameter, update } = self;
        write!(f, "{path}: gradient {gradient:.3e}, parameter {parameter:.3e}, update {update:.3e}, ratio {:.3e}", self.ratio())
    }
}

impl Figures {
    /// The first line of a file of [`Figures::csv`].
    pub const CSV_HEADER: &'static str = "step,path,gradient,parameter,update,ratio";

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, LeafFigures> {
        self.0.iter()
    }

    /// How many parameters moved.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: no parameter moved, or nobody asked.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The figures of the parameter with this path; of several paths the first counts.
    pub fn get(&self, path: &str) -> Option<&LeafFigures> {
        self.iter().find(|leaf| leaf.path == path)
    }

    /// The parameters that do not learn in this step: whose gradient is zero throughout, or whose update is less than this part of them. 1e-7 is far
    /// below what trains, and a learning rate of 0 makes all of them dead.
    ///
    /// One step says little: an expert that no token went to, or an embedding whose rows a batch did not use, has no gradient either. What is dead
    /// in each of many steps is:
    ///
    /// ```
    /// # use std::collections::HashMap;
    /// # let figures = optimisers::Outcome::default().figures;
    /// let mut dead_for: HashMap<String, u64> = HashMap::new();
    /// // After each step:
    /// dead_for.retain(|path, _| figures.dead(1e-7).any(|leaf| leaf.path == *path));
    /// figures.dead(1e-7).for_each(|leaf| *dead_for.entry(leaf.path.clone()).or_default() += 1);
    /// let without_life = dead_for.iter().filter(|(_, steps)| **steps >= 100);
    /// # assert_eq!(without_life.count(), 0);
    /// ```
    pub fn dead(&self, threshold: f64) -> impl Iterator<Item = &LeafFigures> {
        self.iter().filter(move |leaf| leaf.is_dead(threshold))
    }

    /// The parameters of which this step changes more than this part, or of which a norm is infinite or NaN. 0.1 is a hundred times what is usual. A
    /// parameter that is zero has no ratio yet, and is not among them.
    pub fn exploding(&self, threshold: f64) -> impl Iterator<Item = &LeafFigures> {
        self.iter().filter(move |leaf| leaf.is_exploding(threshold))
    }

    /// A line for each parameter, in the columns of [`Figures::CSV_HEADER`], to be appended to a file. Infinite numbers are `inf`.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, Update, setup};
    ///
    /// let x = Var::new(&[3f32, 4.0], &Device::Cpu)?;
    /// let mut state = setup(Descent::new(0.5), &x)?;
    /// let outcome = Update::new(&mut state).with_figures().apply(&x, &(x.sqr()? * 0.5)?.sum_all()?.backward()?)?;
    /// assert_eq!(outcome.figures.csv(1), "1,,5e0,5e0,2.5e0,5e-1\n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn csv(&self, step: u64) -> String {
        self.iter().fold(String::new(), |mut lines, leaf| {
            let LeafFigures { path, gradient, parameter, update } = leaf;
            let path = if path.contains([',', '"', '\n', '\r']) { format!("\"{}\"", path.replace('"', "\"\"")) } else { path.clone() };
            // Writing to a text cannot fail.
            let _ = writeln!(lines, "{step},{path},{gradient:e},{parameter:e},{update:e},{:e}", leaf.ratio());
            lines
        })
    }
}

impl std::ops::Index<usize> for Figures {
    type Output = LeafFigures;

    /// # Panics
    /// If there are fewer.
    fn index(&self, index: usize) -> &LeafFigures {
        &self.0[index]
    }
}

impl<'a> IntoIterator for &'a Figures {
    type Item = &'a LeafFigures;
    type IntoIter = std::slice::Iter<'a, LeafFigures>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<LeafFigures> for Figures {
    fn from_iter<I: IntoIterator<Item = LeafFigures>>(leaves: I) -> Self {
        Figures(leaves.into_iter().collect())
    }
}

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}
