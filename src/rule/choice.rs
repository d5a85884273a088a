//! Choices between rules for each parameter.

use super::Parameter;

/// A choice between rules by path and shape.
pub(crate) trait ParameterChoice {
    /// The patterns of paths that decide.
    fn patterns(&self) -> &[String];

    /// Decides for a parameter.
    fn choose(&mut self, paths: &[String], x: Parameter<'_>);
}
