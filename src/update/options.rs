//! More to say about how an update is done.

use super::Update;

impl<S> Update<'_, S> {
    /// Also finds, for every parameter that moves, the norms of gradient, parameter and update: [`Outcome::figures`](crate::Outcome::figures), to plot, and to find
    /// by their [ratio](crate::LeafFigures::ratio) what does not learn, or explodes. Without it they cost nothing.
    ///
    /// They change no bit of the step, and are the same on any number of threads and ranks. The gradients are read once more, and so is everything else
    /// that the rules work on, because all is found before anything is written: the arithmetic is done twice, and what functions of whole tensors return (as
    /// [`Muon`](crate::Muon)'s) is kept for all parameters until then. On a device the step waits for its norms, and over ranks no gradient comes
    /// piece by piece. So ask in every tenth step, say.
    pub fn with_figures(mut self) -> Self {
        self.how.figures = true;
        self
    }
}
