//! This crate's errors among candle's.

use super::Error;

/// The conversion for functions that return candle's `Result`, with the same message. A tensor operation's error comes out as it was; any other is
/// candle's `Wrapped`, which shows it but does not give it back as a value.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, setup, update};
///
/// fn step(x: &Var) -> candle_core::Result<()> {
///     let mut state = setup(Descent::new(0.1), x)?;
///     update(&mut state, x, &Var::new(1f32, &Device::Cpu)?.backward()?)?;
///     Ok(())
/// }
///
/// let error = step(&Var::new(1f32, &Device::Cpu)?).unwrap_err();
/// assert!(error.to_string().starts_with("no gradient for any of the 1 parameters"));
/// # Ok::<(), candle_core::Error>(())
/// ```
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::wrap(error),
        }
    }
}
