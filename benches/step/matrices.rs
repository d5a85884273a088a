//! Rules of matrices: a stack of them in one parameter, and each in one of its own.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::{Device, Tensor, Var};
use optimisers::{AdaMuon, Adafactor, Engine, Muon, NorMuon, Rule, StateTree, Update, setup};

const SHAPES: [(usize, usize, usize); 3] = [(8, 256, 256), (64, 32, 32), (4, 768, 256)];

type Vars = BTreeMap<String, Var>;

fn rules() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(Muon::default()),
        Box::new(NorMuon::default()),
        Box::new(AdaMuon::default()),
        Box::new(Adafactor::default()),
    ]
}

/// Variables with their state and gradients.
struct Run {
    vars: Vars,
    state: StateTree,
    gradients: BTreeMap<String, Tensor>,
    samples: Vec<f64>,
}

impl Run {
    fn new(
        rule: &dyn Rule,
        tensors: impl Iterator<Item = Tensor>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let vars: Vars = tensors
            .enumerate()
            .map(|(i, x)| Ok((i.to_string(), Var::from_tensor(&x.copy()?)?)))
            .collect::<candle_core::Result<_>>()?;
        let gradients = vars
            .iter()
            .map(|(path, x)| Ok((path.clone(), x.randn_like(0.0, 1.0)?)))
            .collect::<candle_core::Result<_>>()?;
        Ok(Run {
            state: setup(dyn_clone::clone_box(rule), &vars)?,
            vars,
            gradients,
            samples: Vec::new(),
        })
    }

    fn step(&mut self, engine: Engine) -> optimisers::Result<()> {
        let start = Instant::now();
        Update::new(&mut self.state)
            .engine(engine)
            .apply(&self.vars, &self.gradients)?;
        self.samples
            .push(start.elapsed().as_nanos() as f64 / self.state.elements() as f64);
        Ok(())
    }

    /// Without the first, which touches fresh memory.
    fn median(&mut self) -> f64 {
        let samples = &mut self.samples[1..];
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    }
}

/// Prints, for each rule and stack, the time of a step of the stack and of its matrices as parameters of
/// their own, per element.
pub fn measure(engine: Engine, rounds: u32) -> Result<(), Box<dyn std::error::Error>> {
    for rule in rules() {
        for (count, rows, columns) in SHAPES {
            let stack = Tensor::randn(0f32, 1.0, (count, rows, columns), &Device::Cpu)?;
            let matrices = (0..count)
                .map(|i| stack.get(i))
                .collect::<candle_core::Result<Vec<_>>>()?;
            let mut together = Run::new(&*rule, std::iter::once(stack))?;
            let mut apart = Run::new(&*rule, matrices.into_iter())?;
            for _ in 0..=rounds {
                together.step(engine)?;
                apart.step(engine)?;
            }
            let (stack, each) = (together.median(), apart.median());
            let name = rule.name().to_lowercase();
            println!(
                "bench {name}_{count}x{rows}x{columns} ns_per_element={stack:.3} one_by_one_ns={each:.3} \
                 ratio={:.3}",
                stack / each
            );
        }
    }
    Ok(())
}
