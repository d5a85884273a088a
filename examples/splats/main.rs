//! Paints an image with round Gaussians, as Gaussian splatting does in three dimensions: every so often
//! Gaussians that do nothing are removed, and those that are pulled about most are split in two. Adam's
//! moments follow their Gaussians by row, in plain vectors.
//!
//! Run with `cargo run --release --example splats`. It writes the image and what was painted into
//! `splats.png`.

#[path = "../support/picture.rs"]
mod picture;
mod plot;
mod scene;

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use optimisers::{Adam, setup_with, update};

use scene::{SIDE, Splats, image};

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

    /// Where to write the picture: the image, what was painted, and where the Gaussians are
    #[arg(long, default_value = "splats.png", value_parser = picture::png_path)]
    out: PathBuf,
}

/// Gaussians that are fainter are removed.
const FAINT: f32 = 0.02;
/// By how much the halves of a split Gaussian are smaller.
const SHRINK: f32 = 1.6;
/// How far a half moves from where the whole was.
const APART: f32 = 0.01;

fn main() -> Result<(), Box<dyn Error>> {
    let Args {
        steps,
        every,
        side,
        out,
    } = Args::parse();
    picture::check_writable(&out)?;
    let image = image();
    println!(
        "{SIDE} by {SIDE} pixels, painted with Gaussians; the signal-to-noise ratio says how well, and 20 \
         dB is an error of a tenth"
    );
    let mut splats = Splats::grid(side as usize);
    let mut state = setup_with(&splats.lend()?, |path, _| {
        Some(Adam::new(if path.ends_with("means") { 0.004 } else { 0.02 }))
    })?;
    let mut pulled = vec![0.0; splats.len()];
    for step in 1..=steps {
        let (error, gradients) = splats.error(&image);
        update(&mut state, &splats.lend()?, &gradients.show()?)?;
        let of_means = gradients.means.chunks_exact(2);
        pulled
            .iter_mut()
            .zip(of_means)
            .for_each(|(pulled, of_mean)| *pulled += of_mean[0].hypot(of_mean[1]));
        if step % every == 0 {
            println!(
                "step {step}: {} Gaussians, {:.2} dB",
                splats.len(),
                decibels(error)
            );
            if step < steps {
                let rows = change(&mut splats, &pulled);
                state.resize_rows("splats", &splats.lend()?, &rows)?;
                pulled = vec![0.0; splats.len()];
            }
        }
    }
    let (error, _) = splats.error(&image);
    plot::paintings(&image, &splats, decibels(error), &out)?;
    println!("picture: {}", out.display());
    Ok(())
}

/// The ratio of the brightest light to a mean squared error.
fn decibels(error: f32) -> f32 {
    -10.0 * error.log10()
}

/// Removes faint Gaussians and splits the half of the others that is pulled about more. Says which row each
/// comes from: a half begins with the moments of the whole.
fn change(splats: &mut Splats, pulled: &[f32]) -> Vec<Option<usize>> {
    let mut kept: Vec<usize> = (0..splats.len())
        .filter(|&row| splats.weights[row].abs() > FAINT)
        .collect();
    kept.sort_by(|&a, &b| pulled[a].total_cmp(&pulled[b]));
    let whole = kept.len() - kept.len() / 2;
    let split = kept.split_off(whole);
    kept.extend(split.iter().flat_map(|&row| [row, row]));
    *splats = splats.rows(&kept);
    for half in whole..splats.len() {
        let side = if (half - whole).is_multiple_of(2) {
            APART
        } else {
            -APART
        };
        splats.radii[half] -= SHRINK.ln();
        splats.means[2 * half..2 * half + 2]
            .iter_mut()
            .for_each(|mean| *mean += side);
    }
    kept.into_iter().map(Some).collect()
}
