//! A state tree as a table, for people.

use std::fmt;

use super::{Leaf, StateTree};

const HEADINGS: [&str; 8] = [
    "path",
    "shape",
    "dtype",
    "optimiser",
    "rate",
    "steps",
    "bytes",
    "",
];

impl Leaf {
    fn row(&self) -> [String; 8] {
        [
            if self.path.is_empty() {
                "\"\"".to_string()
            } else {
                self.path.clone()
            },
            format!("{:?}", self.shape()),
            format!("{:?}", self.dtype()),
            self.optimiser.name(),
            self.learning_rate()
                .map_or("-".to_string(), |rate| rate.to_string()),
            self.steps.to_string(),
            self.bytes().to_string(),
            if self.frozen { "frozen" } else { "" }.to_string(),
        ]
    }
}

/// A table with a line for each parameter, and a line of totals.
///
/// The columns are path, shape, dtype, optimiser, learning rate, steps, bytes of state, and whether the leaf
/// is frozen. The last line ends with the calls in open windows of [`AccumGrad`](crate::AccumGrad) and with
/// the calls that were skipped since the last step, if there are any.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{Adam, MixedPrecision, setup};
///
/// let model = vec![Var::zeros((2, 3), DType::BF16, &Device::Cpu)?, Var::zeros(3, DType::F32, &Device::Cpu)?];
/// let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.01)), &model)?;
/// state.at("1")?.freeze();
/// let table = "\
/// path  shape   dtype  optimiser                  rate  steps  bytes
/// 0     [2, 3]  BF16   MixedPrecision(F32, Adam)  0.01  0      72
/// 1     [3]     F32    MixedPrecision(F32, Adam)  0.01  0      24     frozen
/// 2 parameters of 9 elements, 96 bytes of state";
/// assert_eq!(state.to_string(), table);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl fmt::Display for StateTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Err(error) = self.check_leaves() {
            return error.fmt(f);
        }
        let rows: Vec<[String; 8]> = std::iter::once(HEADINGS.map(str::to_string))
            .chain(self.leaves().map(Leaf::row))
            .collect();
        let widths: [usize; 8] = std::array::from_fn(|column| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        });
        for row in &rows {
            let cells = row
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        self.write_totals(f)
    }
}

/// A line with totals, then two lines for each [`Leaf`].
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{Adam, MixedPrecision, setup};
///
/// let model = vec![Var::zeros((2, 3), DType::BF16, &Device::Cpu)?];
/// let state = setup(MixedPrecision::new(DType::F32, Adam::new(0.01)), &model)?;
/// let text = r#"StateTree after 0 steps: 1 parameters of 6 elements, 72 bytes of state
/// "0" [2, 3] BF16, steps 0: MixedPrecision(F32, Adam { eta: 0.01, beta: (0.9, 0.999), epsilon: 1e-8, bias_correction: true })
///     master F32 [2, 3], m F32 [2, 3], v F32 [2, 3], t 0"#;
/// assert_eq!(format!("{state:?}"), text);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl fmt::Debug for StateTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StateTree after {} steps: ", self.steps)?;
        if let Err(error) = self.check_leaves() {
            return write!(f, "{error}");
        }
        self.write_totals(f)?;
        self.leaves().try_for_each(|leaf| write!(f, "\n{leaf:?}"))
    }
}

impl StateTree {
    fn write_totals(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} parameters of {} elements, {} bytes of state",
            self.len(),
            self.elements(),
            self.bytes()
        )?;
        for (calls, kind) in [
            (self.calls, "in open windows"),
            (self.skipped, "skipped since the last step"),
        ] {
            if calls > 0 {
                write!(f, "; {calls} calls {kind}")?;
            }
        }
        Ok(())
    }
}
