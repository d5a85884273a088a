use super::consistency::{Difference, Extent, difference};
use crate::engine::{Buffer, Epilogue, Operand};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::rule::{Flow, Planned, Progress};

/// What an optimiser plans a step for: a parameter and its path.
#[doc(hidden)]
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations)]
pub struct Target<'a> {
    pub(crate) path: &'a str,
    pub(crate) x: &'a dyn Lend,
    /// How much of x is compared with its master; `None` if it may differ.
    pub(crate) extent: Option<Extent>,
}

impl<'a> Target<'a> {
    /// Refuses a parameter that was changed since its master was made or written.
    pub(crate) fn check_rounded(self, master: &dyn Lend) -> Result<()> {
        let Some(extent) = self.extent else { return Ok(()) };
        match difference(master, self.x, extent)? {
            Some(Difference { index, parameter, master }) => {
                Err(Error::new(ErrorKind::Changed, "its value is")
                    .with_got(parameter)
                    .at_element(index)
                    .with_expected(format_args!("that of its master, {master}"))
                    .with_remedy(
                        "it was changed outside of `update`, which would overwrite it: call \
                         `refresh_masters` to go on from the parameters, or `Update::keep_masters` to go on \
                         from the masters",
                    )
                    .at(self.path))
            }
            None => Ok(()),
        }
    }

    /// The plan for a rule that works on a high-precision copy of this parameter. The two are compared,
    /// except in a call that brings the leaf nothing: no step is taken over a change then.
    pub(crate) fn plan_with_master(
        self,
        flow: Flow<'a>,
        has_gradient: bool,
        master: &'a mut Buffer,
    ) -> Result<Planned<'a>> {
        let planned = Planned::new(flow, self.path, Operand::master(master), Epilogue::Master(self.x));
        if has_gradient || planned.progress == Progress::Applied {
            self.check_rounded(planned.job.x.lender())?;
        }
        Ok(planned)
    }
}
