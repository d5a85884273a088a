//! Paints an image with round Gaussians, as Gaussian splatting does in three dimensions: every so often Gaussians that do nothing are removed, and those that are
//! pulled about most are split in two. Adam's moments follow their Gaussians by row, in plain vectors.
//!
//! Run with `cargo run --release --example splats`.

mod scene;

use std::error::Error;

use clap::Parser;
use optimisers::{Adam, setup_with, update};

use scene::{Splats, image};

/// Paints an image with Gaussians whose number changes.
#[derive(Parser)]
struct Args {
    /// Steps of Adam
    #[arg(long, default_value_t = 600)]
    steps: u64,

    /// Steps between changes of the number of Gaussians
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,

    /// Gaussians per side of the image at the start
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=32))]
    side: u64,
}

/// Gaussians that are fainter are removed.
const FAINT: f32 = 0.02;
/// By how much the halves of a split Gaussian are smaller.
const SHRINK: f32 = 1.6;
/// How far a half moves from where the whole was.
const APART: f32 = 0.01;

fn main() -> Result<(), Box<dyn Error>> {
    let Args { steps, every, side } = Args::parse();
    let image = image();
    let mut splats = Splats::grid(side as usize);
    let mut state = setup_with(&splats.lend()?, |path, _| Some(Adam::new(if path.ends_with("means") { 0.004 } else { 0.02 })))?;
    let mut pulled = vec![0.0; splats.len()];
    for step in 1..=steps {
        let (error, gradients) = splats.error(&image);
        update(&mut state, &splats.lend()?, &gradients.show()?)?;
        let of_means = gradients.means.chunks_exact(2);
        pulled.iter_mut().zip(of_means).for_each(|(pulled, of_mean)| *pulled += of_mean[0].hypot(of_mean[1]));
        if step % every == 0 {
            println!("step {step}: {} Gaussians, {:.2} dB", splats.len(), -10.0 * error.log10());
            if step < steps {
                let rows = change(&mut splats, &pulled);
                state.resize_rows("splats", &splats.lend()?, &rows)?;
                pulled = vec![0.0; splats.len()];
            }
        }
    }
    Ok(())
}

/// Removes faint Gaussians and splits the half of the others that is pulled about more. Says which row each comes from: a half begins with the moments of the whole.
fn change(splats: &mut Splats, pulled: &[f32]) -> Vec<Option<usize>> {
    let mut kept: Vec<usize> = (0..splats.len()).filter(|&row| splats.weights[row].abs() > FAINT).collect();
    kept.sort_by(|&a, &b| pulled[a].total_cmp(&pulled[b]));
    let whole = kept.len() - kept.len() / 2;
    let split = kept.split_off(whole);
    kept.extend(split.iter().flat_map(|&row| [row, row]));
    *splats = splats.rows(&kept);
    for half in whole..splats.len() {
        let side = if (half - whole).is_multiple_of(2) { APART } else { -APART };
        splats.radii[half] -= SHRINK.ln();
        splats.means[2 * half..2 * half + 2].iter_mut().for_each(|mean| *mean += side);
    }
    kept.into_iter().map(Some).collect()
}
